// The step boundary that a group's members come to: who stands at it, and since when they wait.
//
// Plain value: no clock, no thread.
#pragma once

#include <set>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/ballot.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/records.h"
#include "coordinator/core/sync_ballot.h"

namespace longhaul::coordinator {

struct Boundary {
  Ballot ballot;  // electorate: the survivors
  // A preparation of this ballot has tried to admit newcomers. There is one try per ballot;
  // otherwise a newcomer that cannot be reached and joins again and again would hold the voters.
  bool admission_tried = false;
  Tick first_vote = kNever;  // when the first vote came
  std::set<MemberId> ready;  // voters that are to come out of the background
  LH_STATE(Boundary, LH_FIELD(ballot), LH_FIELD(admission_tried), LH_FIELD(first_vote),
           LH_FIELD(ready));

  // The next boundary, at which the survivors of this record vote.
  static Boundary Of(const GroupRecord& record) { return {Ballot(Survivors(record))}; }

  void Vote(MemberId member, bool is_ready, Tick now);
  void Leave(MemberId member);
  // Time that does not count for the members.
  void Postpone(int64_t us) {
    if (first_vote != kNever) first_vote = first_vote + us;
  }
};

// When the member is evicted unless it votes (VoteDue) or offers its state (OfferDue). kNever: no
// such deadline. Both deadlines stand still while ops are frozen, because a trainer that waits for
// an op cannot come to the boundary.
Tick VoteDue(const MemberRecord& member, const EpochState& epochs, const Boundary& boundary,
             const SyncBallot& sync);
Tick OfferDue(const MemberRecord& member, const EpochState& epochs, const SyncBallot& sync);

}  // namespace longhaul::coordinator
