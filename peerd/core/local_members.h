// The local members of one peer, from the request to join until they are out, and their open
// requests.
//
//   asking --(JoinPending)--> pending --(an epoch with the member is committed)--> admitted
//   any --(leave, death of the trainer, drain)--> exiting: sends Leave when it has no open post and
//                                                 no lingering op, or when its time is up
//   any --(Removed)--> removed --(its posts and its sync are answered)--> finished (forgotten)
//   asking --(JoinRefused)--> finished
//
// If a trainer gives up before its admission, it is answered at once. The member stays here,
// without a trainer, until the coordinator has removed it.
//
// Plain state machine: no clock, no thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

enum class Exit : uint8_t { kNone, kLeaves, kDrains, kDied };

struct LocalMember {
  LocalId id;
  GroupKey group;
  std::string name;
  control::JoinWish wish;
  std::string present;  // JoinPending::present
  MemberId member;      // 0 while asking
  bool admitted = false;
  bool known_admitted = false;  // JoinDone was OK
  Epoch boundary;               // EpochRecord::boundary at its last step boundary
  uint64_t passed = 0;          // boundaries passed since then: the same at all members
  StepWorld step;               // its last step boundary; once admitted

  bool join_open = true;
  bool step_open = false;
  bool step_ready = false;  // it asks to contribute from this boundary on
  // Its vote is answered, but the step is not: its sync may be open.
  std::optional<StepWorld> step_passed;
  bool leave_open = false;
  uint64_t boundaries = 0;  // step boundaries reached, the open one included

  Exit exit = Exit::kNone;
  std::string exit_reason;
  Tick leave_by = kNever;          // then Leave is sent even if posts are open
  bool leave_told = false;         // Leave was sent
  std::optional<Outcome> removed;  // set: removed, with this outcome for open requests
  LH_FIELDS(LocalMember, LH_FIELD(id), LH_FIELD(group), LH_FIELD(name), LH_FIELD(wish),
            LH_FIELD(present), LH_FIELD(member), LH_FIELD(admitted), LH_FIELD(known_admitted),
            LH_FIELD(boundary), LH_FIELD(passed), LH_FIELD(step), LH_FIELD(join_open),
            LH_FIELD(step_open), LH_FIELD(step_ready), LH_FIELD(step_passed), LH_FIELD(leave_open),
            LH_FIELD(boundaries), LH_FIELD(exit), LH_FIELD(exit_reason), LH_FIELD(leave_by),
            LH_FIELD(leave_told), LH_FIELD(removed));
};

class LocalMembers {
 public:
  // ---- requests of trainers. Join() takes a new id. All other calls allow for a member that has
  // ended already.
  void Join(const LocalJoin& join, std::vector<Action>* out);
  // Returns why the member may not step, or OK.
  Outcome MayStep(LocalId id) const;
  // MayStep() must be OK. `offer` is sent with the vote. `ready`: see control::Vote.
  void Step(LocalId id, const std::optional<control::SyncOffer>& offer, bool ready,
            std::vector<Action>* out);
  void Leave(LocalId id, std::vector<Action>* out);
  // The member leaves by `leave_by` at the latest, if the coordinator can be reached.
  void Died(LocalId id, const std::string& reason, Tick leave_by, std::vector<Action>* out);
  // Returns why the member may not post, or OK.
  Outcome MayPost(LocalId id) const;
  // Returns why the member may not sync outside a step, or OK.
  Outcome MaySync(LocalId id) const;

  // ---- the coordinator
  void Pending(const control::JoinPending& message, std::vector<Action>* out);
  void Refused(const control::JoinRefused& message, std::vector<Action>* out);
  // The epoch `record` is in force. Answers the joins of the members that it admits, and tells the
  // older members.
  void Committed(const GroupKey& group, const EpochRecord& record, uint32_t pending,
                 std::vector<Action>* out);
  // Returns the member whose step has passed, or nullptr. The caller must call EndStep() once the
  // member's sync is over.
  const LocalMember* Voted(const control::VoteResult& message, const EpochHistory& history,
                           std::vector<Action>* out);
  // Answers a step that has passed. Returns false, and does nothing, if the member is leaving or
  // removed: then its end answers the step.
  bool EndStep(LocalId id, const EpochRecord& record, uint32_t pending, std::vector<Action>* out);
  // Returns the member, whose ops and sync the caller must end. nullptr: there is nothing to end.
  const LocalMember* Removed(const control::Removed& message, std::vector<Action>* out);
  // Removes every member, for the reason `why`. The caller must end the ops and syncs of those
  // returned.
  std::vector<const LocalMember*> RemoveAll(const std::string& why);
  void PendingChanged(const GroupKey& group, const EpochRecord& record, uint32_t pending,
                      std::vector<Action>* out) const;
  // The control stream is open, and Hello was sent: sends again what was not answered. `offer_of`
  // returns the offer that goes with a member's vote.
  void Resend(const std::function<std::optional<control::SyncOffer>(LocalId)>& offer_of,
              std::vector<Action>* out);
  // Forgets members that have no number and whose join was withdrawn. The next Hello does not name
  // them.
  void ForgetUnheard();

  // ---- drain
  // Joins are refused from now on. Members leave at their next boundary; `at_once`: now.
  void Drain(const std::string& reason, bool at_once, std::vector<Action>* out);

  struct Busy {
    size_t posts = 0;      // posts that are not answered
    size_t lingering = 0;  // its ops whose result this peer may have to give to other peers
    bool syncing = false;  // a sync is not answered, or a transfer may still write to its inbox
  };
  // Sends Leave for members that are exiting and have no open posts and no lingering ops, or whose
  // time is up. Finishes removed members that have no open posts and no open sync.
  void Sweep(const std::function<Busy(const LocalMember&)>& busy_with, Tick now,
             std::vector<Action>* out);
  Tick NextDeadline() const;

  const LocalMember* Find(LocalId id) const;
  // Does not find removed members.
  const LocalMember* Find(const GroupKey& group, MemberId member) const;
  const std::map<LocalId, LocalMember>& all() const { return members_; }
  bool empty() const { return members_.empty(); }
  // The members of the group that have a number and are not removed, in rising order.
  std::vector<MemberId> MembersOf(const GroupKey& group) const;
  // True if any member, of any group, has a number and is not removed.
  bool AnyNumbered() const;
  bool HasAny(const GroupKey& group) const;
  // The oldest epoch that a VoteResult for a member of the group may name. `newest`: of the group.
  Epoch OldestStep(const GroupKey& group, Epoch newest) const;
  bool HasAdmitted(const GroupKey& group) const;
  // True if every admitted member of the group is removed, and only waits for its posts and its
  // sync. Also true if there is none.
  bool AllAdmittedRemoved(const GroupKey& group) const;
  // The member must be in the epoch.
  static World WorldOf(const LocalMember& local, const EpochRecord& record, uint32_t pending);

  void CheckInvariants() const;
  LH_FIELDS(LocalMembers, LH_FIELD(members_), LH_FIELD(draining_));

 private:
  LocalMember* FindMutable(LocalId id);
  // Answers the open join of a member that was not admitted. No trainer waits for it any more.
  void Withdraw(LocalMember& local, const Outcome& outcome, std::vector<Action>* out);
  void Finish(LocalId id, std::vector<Action>* out);
  Outcome OutcomeOf(const LocalMember& local, const control::Removed& message) const;

  std::map<LocalId, LocalMember> members_;
  std::optional<std::string> draining_;  // the reason
};

}  // namespace longhaul::peerd
