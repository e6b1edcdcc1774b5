// What the participants of one op make of it in one attempt (docs/adr/0045-unequal-verdicts.md).
//
// In a group that signs, a verdict covers all READYs that a peer has got. So two peers that were
// told different things have different verdicts, and the signed READYs prove who told them.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "peerd/core/events.h"
#include "proto/control/messages.h"
#include "proto/control/signed_ready.h"

namespace longhaul::peerd {

// What a DONE says of the op.
struct OpVerdict {
  bool refused = false;
  std::optional<Hash128> readies_digest;  // see PeerDone
  LH_FIELDS(OpVerdict, LH_FIELD(refused), LH_FIELD(readies_digest));
};

class Verdicts {
 public:
  // READYs are signed from here on. `own`: what the own READY is signed as.
  void BeginSigning(const control::ReadyName& own);
  // What the own READY is signed as; nullptr: READYs are not signed.
  const control::ReadyName* signed_as() const { return signed_ ? &signed_->name : nullptr; }
  // True if the own READY has to be signed, and is not yet.
  bool AwaitsOwn() const { return signed_ && signed_->own.empty(); }
  // The own READY is signed, and has this digest.
  void SignedOwn(const std::string& digest);
  // Takes the signature of a READY of `peer`. Returns what is wrong with it, or "". `keys`: the
  // public keys of peers.
  std::string TakeSignature(PeerId peer, const std::optional<ReadySignature>& signature,
                            const std::map<PeerId, std::string>& keys);
  // The signed READYs of the other participants.
  std::vector<control::Statement> Statements() const;

  // Takes the verdict of another participant. Returns what is wrong with its form, or "".
  std::string TakeDone(const PeerDone& done);
  bool HasDone(PeerId peer) const { return dones_.contains(peer); }
  size_t count() const { return dones_.size(); }
  const std::map<PeerId, OpVerdict>& dones() const { return dones_; }
  // The verdict of `self`.
  OpVerdict Own(PeerId self, bool refused) const;
  // The first peer that has another verdict; 0: there is none.
  PeerId FirstOtherThan(const OpVerdict& own) const;
  // The coordinator was told of a verdict that differs.
  bool disputed() const { return disputed_; }
  void SetDisputed() { disputed_ = true; }

  LH_FIELDS(Verdicts, LH_FIELD(dones_), LH_FIELD(signed_), LH_FIELD(disputed_));

 private:
  struct Signed {
    control::ReadyName name;
    std::string own;                              // the digest of the own READY; "": not signed yet
    std::map<PeerId, control::Statement> others;  // signed well
    LH_FIELDS(Signed, LH_FIELD(name), LH_FIELD(own), LH_FIELD(others));
  };
  std::map<PeerId, OpVerdict> dones_;
  std::optional<Signed> signed_;
  bool disputed_ = false;
};

}  // namespace longhaul::peerd
