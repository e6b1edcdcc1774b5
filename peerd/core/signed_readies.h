// The signed READYs of one op in one attempt (docs/adr/0045-unequal-verdicts.md).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "peerd/core/events.h"
#include "proto/control/messages.h"
#include "proto/control/signed_ready.h"

namespace longhaul::peerd {

struct SignedReadies {
  control::ReadyName name;
  std::string own;                              // the digest of the own READY; "": not signed yet
  std::map<PeerId, control::Statement> others;  // signed well
};

// Checks the signature of a READY of `peer`, and adds it to `readies`. Returns what is wrong with
// it, or "". `key`: the public key of the peer.
std::string AddSignature(PeerId peer, const std::string& key, const ReadySignature& signature,
                         SignedReadies* readies);

// A digest of all READYs of the op and of what `self` makes of them. All participants that got the
// same READYs have the same digest. Who wants two sets of READYs to have the same digest needs 2^64
// tries.
Hash128 DigestOf(const SignedReadies& readies, PeerId self, bool refused);

std::vector<control::Statement> StatementsOf(const SignedReadies& readies);

}  // namespace longhaul::peerd
