// The local members of one peer, from the wish to join to the end, and their open requests.
//
//   asking --(JoinPending)--> pending --(an epoch with it is committed)--> admitted
//   any --(leave, death of the trainer, drain)--> exiting: Leave, once its posts are answered
//   any --(Removed)--> removed --(its posts and its sync are answered)--> finished (forgotten)
//   asking, pending --(JoinRefused)--> finished
//
// A trainer that gives up before admission is answered at once; the member stays here, without
// anybody behind it, until the coordinator has let it go.
// Plain state machine: no clock, no thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/digest.h"
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
  std::string cohort;
  uint32_t cohort_size = 0;
  uint32_t step_deadline_ms = 0;
  bool background = false;  // its wish
  MemberId member;          // 0 while asking
  bool admitted = false;
  bool known_admitted = false;  // JoinDone was OK
  Epoch boundary;               // of its last step boundary

  bool join_open = true;
  bool step_open = false;
  bool step_ready = false;   // it asks to contribute from this boundary on
  bool step_passed = false;  // its vote is answered, its sync is not over
  bool leave_open = false;
  uint64_t boundaries = 0;  // step boundaries reached, the open one included

  Exit exit = Exit::kNone;
  std::string exit_reason;
  Tick leave_by = kNever;  // Leave is sent even if posts are open
  bool leave_told = false;
  std::optional<Outcome> removed;
};

class LocalMembers {
 public:
  // ---- requests of trainers. `id` is new; for the others it may have ended already.
  void Join(const LocalJoin& join, std::vector<Action>* out);
  // Why the member may not step; OK if it may.
  Outcome MayStep(LocalId id) const;
  // MayStep(). `offer`: goes with the vote. `ready`: as in control::Vote.
  void Step(LocalId id, const std::optional<control::SyncOffer>& offer, bool ready,
            std::vector<Action>* out);
  void Leave(LocalId id, std::vector<Action>* out);
  // The member leaves by `leave_by` at the latest, if the coordinator can be reached.
  void Died(LocalId id, const std::string& reason, Tick leave_by, std::vector<Action>* out);
  // Why the member may not post; OK if it may.
  Outcome MayPost(LocalId id) const;
  // The same of a sync outside a step.
  Outcome MaySync(LocalId id) const;

  // ---- the coordinator
  void Pending(const control::JoinPending& message, std::vector<Action>* out);
  void Refused(const control::JoinRefused& message, std::vector<Action>* out);
  // `record` is in force. Tells newcomers and those that were members before.
  void Committed(const GroupKey& group, const EpochRecord& record, uint32_t pending,
                 std::vector<Action>* out);
  // `record` is the epoch in force, nullptr if there is none. The member whose step has passed;
  // nullptr: nobody's has. EndStep() once its sync is over.
  const LocalMember* Voted(const control::VoteResult& message, const EpochRecord* record,
                           std::vector<Action>* out);
  // Its step has passed. Answers it, unless that is for Removed() to do.
  void EndStep(LocalId id, const EpochRecord& record, uint32_t pending, std::vector<Action>* out);
  // A member that is to be taken out of its ops; nullptr: nothing to do.
  const LocalMember* Removed(const control::Removed& message, std::vector<Action>* out);
  // As if every member had been removed.
  std::vector<const LocalMember*> RemoveAll(const std::string& why);
  void PendingChanged(const GroupKey& group, const EpochRecord& record, uint32_t pending,
                      std::vector<Action>* out) const;
  // The stream stands: what was not answered is said again. Hello went before.
  // A vote goes with the offer that `offer_of` its member knows.
  void Resend(const std::function<std::optional<control::SyncOffer>(LocalId)>& offer_of,
              std::vector<Action>* out);
  // Forgets wishes that nobody has any more and of which the coordinator, in the next Hello, will
  // hear nothing.
  void ForgetUnheard();

  // ---- drain. Nobody joins any more; members leave at their next boundary, or, `at_once`, now.
  void Drain(const std::string& reason, bool at_once, std::vector<Action>* out);

  struct Busy {
    size_t posts = 0;      // not answered
    size_t lingering = 0;  // ops of it whose result this peer may have to tell
    bool syncing = false;  // a sync is not answered: something may still write to its tensors
  };
  // Sends what is due and finishes who can be: a member leaves without open posts and lingering
  // ops, and is gone without open posts and syncs.
  void Sweep(const std::function<Busy(const LocalMember&)>& busy_with, Tick now,
             std::vector<Action>* out);
  Tick NextDeadline() const;

  const LocalMember* Find(LocalId id) const;
  // None that is removed.
  const LocalMember* Find(const GroupKey& group, MemberId member) const;
  const std::map<LocalId, LocalMember>& all() const { return members_; }
  bool empty() const { return members_.empty(); }
  // Known to the coordinator, by member id.
  std::vector<MemberId> MembersOf(const GroupKey& group) const;
  // Of any group.
  bool AnyNumbered() const;
  bool HasAny(const GroupKey& group) const;
  bool HasAdmitted(const GroupKey& group) const;
  // Every admitted member of the group is removed, and only waits for its posts.
  bool AllAdmittedRemoved(const GroupKey& group) const;
  // The member is in the epoch.
  static World WorldOf(const LocalMember& local, const EpochRecord& record, uint32_t pending);

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  LocalMember* FindMutable(LocalId id);
  // Its join is answered: it was not admitted, and nobody waits for it any more.
  void Withdraw(LocalMember& local, const Outcome& outcome, std::vector<Action>* out);
  void Finish(LocalId id, std::vector<Action>* out);
  Outcome OutcomeOf(const LocalMember& local, const control::Removed& message) const;

  std::map<LocalId, LocalMember> members_;
  std::optional<std::string> draining_;  // the reason
};

}  // namespace longhaul::peerd
