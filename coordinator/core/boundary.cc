#include "coordinator/core/boundary.h"

#include <algorithm>

namespace longhaul::coordinator {
namespace {

// Whether the member has a step deadline whose clock runs now.
bool ClockRuns(const MemberRecord& member, const EpochState& epochs) {
  return member.step_deadline_ms != 0 && IsAdmitted(member) && !member.departs &&
         !(epochs.preparation && epochs.preparation->freeze);
}

}  // namespace

void Boundary::Vote(MemberId member, bool is_ready, Tick now) {
  ballot.Vote(member);
  if (is_ready) ready.insert(member);
  if (first_vote == kNever) first_vote = now;
}

void Boundary::Leave(MemberId member) {
  ballot.Leave(member);
  ready.erase(member);
  if (ballot.voted().empty()) first_vote = kNever;
}

Tick VoteDue(const MemberRecord& member, const EpochState& epochs, const Boundary& boundary,
             const SyncBallot& sync) {
  if (boundary.first_vote == kNever || !ClockRuns(member, epochs)) return kNever;
  // A member in a sync cannot vote before the sync has ended.
  if (boundary.ballot.HasVoted(member.member) || sync.InSync(member.member)) return kNever;
  return std::max(boundary.first_vote, sync.last_end()) + Millis(member.step_deadline_ms);
}

Tick OfferDue(const MemberRecord& member, const EpochState& epochs, const SyncBallot& sync) {
  if (sync.first_offer() == kNever || !ClockRuns(member, epochs) || InBackground(member)) {
    return kNever;
  }
  if (!sync.Awaits(member.member)) return kNever;
  return std::max(sync.first_offer(), sync.last_end()) + Millis(member.step_deadline_ms);
}

}  // namespace longhaul::coordinator
