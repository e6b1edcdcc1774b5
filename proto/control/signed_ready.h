// A READY as a signed statement: what its sender says to all participants of an op.
//
// In a group that signs ops (docs/adr/0045-unequal-verdicts.md) each peer signs its READYs. If a
// peer says different things to two others, the two statements prove that to the coordinator.
#pragma once

#include <cstdint>
#include <string>

#include "base/fields.h"
#include "base/ids.h"
#include "proto/control/messages.h"

namespace longhaul::control {

// Which READY of its sender a statement is about.
struct ReadyName {
  GroupKey group;
  Epoch attempt;
  // The op's name, as in OpReport.
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;
  // How many READYs of an op of this name the sender has sent in this attempt before this one.
  // READYs of a name are matched to ops in order, so all participants of an op know the same index.
  uint64_t index = 0;
  friend auto operator<=>(const ReadyName&, const ReadyName&) = default;
  LH_FIELDS(ReadyName, LH_FIELD(group), LH_FIELD(attempt), LH_FIELD(boundary), LH_FIELD(tag),
            LH_FIELD(set), LH_FIELD(index));
};

// Returns the text that the sender signs. `digest`: the SHA-256 of the READY's payload without the
// signature.
std::string TextToSign(const ReadyName& name, const std::string& digest);

// Whether the owner of `public_key` has made this statement about the READY of this name.
bool IsStatementOf(const std::string& public_key, const ReadyName& name,
                   const Statement& statement);

}  // namespace longhaul::control
