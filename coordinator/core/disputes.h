// What members say of ops whose verdicts differ, and what that proves
// (docs/adr/0045-unequal-verdicts.md).
//
// Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/fields.h"
#include "base/ids.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/routes.h"
#include "proto/control/messages.h"
#include "proto/control/signed_ready.h"

namespace longhaul::coordinator {

// The most READYs whose statements are remembered.
inline constexpr size_t kReadiesMax = 64;
// After so many disputes of one pair that prove nothing, a peer is removed.
inline constexpr uint32_t kDisputesMax = 3;
// Of one peer in one attempt; more are ignored. To check them takes the coordinator time.
inline constexpr uint32_t kDisputesOfPeerMax = 8;

class Disputes {
 public:
  // A peer that is to be removed for good, and why.
  struct Barred {
    PeerId peer;
    std::string reason;
  };
  // Chooses the peer to remove among the ends of these pairs.
  using VictimOf = std::function<PeerId(const MissingLinks&)>;

  // Takes a peer's dispute. The group answers the first dispute about an op with an epoch that
  // freezes ops, and signs its READYs from then on. Returns the peer to remove, if any.
  std::optional<Barred> Take(PeerId peer, const control::Dispute& dispute,
                             const VictimOf& victim_of, EpochState* epochs, const GroupStep& step);
  void ForgetIf(const std::function<bool(PeerId)>& stranger);

  LH_STATE(Disputes, LH_FIELD(said_), LH_FIELD(sent_), LH_FIELD(unproven_));

 private:
  // Returns false if the peer has sent too many disputes in this attempt.
  bool Admit(PeerId reporter, Epoch attempt);
  // Adds the statements of a dispute that are signed well. Uses only the first dispute of each
  // reporter about an op. Returns a peer that has said two different things of the same op.
  std::optional<PeerId> Add(PeerId reporter, const control::Dispute& dispute,
                            const GroupRecord& group);
  // Counts a dispute that proves nothing. Returns true if the pair has had too many of them.
  bool CountUnproven(PeerId reporter, const control::Dispute& dispute);
  // Forgets all pairs with such disputes, and returns them.
  MissingLinks TakeUnproven();

  struct Said {
    std::set<PeerId> reporters;
    std::map<PeerId, std::string> digests;
    LH_FIELDS(Said, LH_FIELD(reporters), LH_FIELD(digests));
  };
  std::map<control::ReadyName, Said> said_;
  std::map<PeerId, std::pair<Epoch, uint32_t>> sent_;  // how many in the peer's newest attempt
  struct Unproved {
    uint32_t count = 0;
    std::string what;
    LH_FIELDS(Unproved, LH_FIELD(count), LH_FIELD(what));
  };
  std::map<LinkEnds, Unproved> unproven_;  // the smaller peer first
};

}  // namespace longhaul::coordinator
