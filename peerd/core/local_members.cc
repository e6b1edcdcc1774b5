#include "peerd/core/local_members.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

const char* Name(control::Removal why) {
  switch (why) {
    case control::Removal::kLeft:
      return "left";
    case control::Removal::kDied:
      return "died";
    case control::Removal::kEvicted:
      return "evicted";
    case control::Removal::kUnreachable:
      return "unreachable";
    case control::Removal::kUnknown:
      return "unknown to the coordinator";
  }
  return "removed";
}

Outcome DrainOutcome(const std::string& reason) {
  return {Code::kEvicted, "this peer is draining (" + reason + "): join at another peer"};
}

Action LeaveOf(const LocalMember& local) {
  return ToCoordinator{
      control::Leave{local.group, local.member, local.exit == Exit::kDied, local.exit_reason}};
}

Action VoteOf(const LocalMember& local, const std::optional<control::SyncOffer>& offer) {
  return ToCoordinator{
      control::Vote{local.group, local.member, local.boundaries, offer, local.step_ready}};
}

Action JoinOf(const LocalMember& local) {
  return ToCoordinator{control::Join{local.id.value(), local.group, local.name, local.wish}};
}

// What a member that is not admitted waits for.
std::string WhyPending(const LocalMember& local) {
  if (!local.member) return "the coordinator has not taken the request yet";
  if (!local.present.empty()) return local.present;
  return "a newcomer is admitted when all members stand at a step boundary (begin_step() or "
         "step())";
}

const Outcome kNoMember{Code::kEvicted,
                        "this member was removed or has left: join again to come back"};

}  // namespace

// ------------------------------------------------------------------------------ trainers

void LocalMembers::Join(const LocalJoin& join, std::vector<Action>* out) {
  LH_CHECK(!members_.contains(join.local)) << "local " << join.local.value();
  Outcome refusal;
  if (draining_) {
    refusal = {Code::kUnavailable,
               "join refused: this peer is draining (" + *draining_ + "); join at another peer"};
  } else if (members_.size() >= LH_LOCAL_MEMBERS_MAX) {
    refusal = {Code::kUnavailable, "join refused: this peer has " +
                                       std::to_string(members_.size()) +
                                       " members, the most it takes; start another peerd"};
  }
  if (!refusal.ok()) {
    out->push_back(JoinDone{join.local, refusal, {}});
    return;
  }
  LocalMember local;
  local.id = join.local;
  local.group = join.group;
  local.name = join.name;
  local.wish = join.wish;
  out->push_back(JoinOf(local));
  members_.emplace(join.local, std::move(local));
}

Outcome LocalMembers::MayStep(LocalId id) const {
  const LocalMember* const local = Find(id);
  if (local == nullptr) return kNoMember;
  if (!local->admitted) {
    return {Code::kFailedPrecondition, "this member is not admitted yet: wait for its join"};
  }
  if (local->removed) return local->removed->ok() ? kNoMember : *local->removed;
  if (local->step_open) {
    return {Code::kFailedPrecondition, "this member stands at a step boundary already"};
  }
  if (local->exit == Exit::kLeaves || local->exit == Exit::kDied) {
    return {Code::kFailedPrecondition, "this member is leaving"};
  }
  return {};
}

void LocalMembers::Step(LocalId id, const std::optional<control::SyncOffer>& offer, bool ready,
                        std::vector<Action>* out) {
  LH_CHECK(MayStep(id).ok()) << "local " << id.value();
  LocalMember* const local = FindMutable(id);
  local->step_open = true;
  local->step_ready = ready;
  if (draining_ && local->exit == Exit::kNone) {
    local->exit = Exit::kDrains;
    local->exit_reason = "peer is draining: " + *draining_;
  }
  if (local->exit != Exit::kNone) return;
  ++local->boundaries;
  out->push_back(VoteOf(*local, offer));
}

void LocalMembers::Withdraw(LocalMember& local, const Outcome& outcome, std::vector<Action>* out) {
  if (!local.join_open) return;
  local.join_open = false;
  out->push_back(JoinDone{local.id, outcome, {}});
}

void LocalMembers::Leave(LocalId id, std::vector<Action>* out) {
  LocalMember* const local = FindMutable(id);
  if (local == nullptr) {
    out->push_back(LeaveDone{id, {}});
    return;
  }
  if (local->exit == Exit::kNone) {
    local->exit = Exit::kLeaves;
    local->exit_reason = "left";
  }
  if (local->admitted) {
    local->leave_open = true;
    return;
  }
  Withdraw(*local, {Code::kAborted, "the join was withdrawn: " + WhyPending(*local)}, out);
  out->push_back(LeaveDone{id, {}});
}

void LocalMembers::Died(LocalId id, const std::string& reason, Tick leave_by,
                        std::vector<Action>* out) {
  LocalMember* const local = FindMutable(id);
  if (local == nullptr || local->exit == Exit::kDied) return;
  local->exit = Exit::kDied;
  local->exit_reason = reason;
  local->leave_by = leave_by;
  Withdraw(*local, {Code::kAborted, "the trainer is gone: " + reason}, out);
}

Outcome LocalMembers::MayPost(LocalId id) const {
  const LocalMember* const local = Find(id);
  if (local == nullptr) return kNoMember;
  if (!local->admitted) {
    return {Code::kFailedPrecondition, "this member is not admitted yet: wait for its join"};
  }
  if (local->removed) return local->removed->ok() ? kNoMember : *local->removed;
  if (local->exit == Exit::kDrains) return DrainOutcome(*draining_);
  if (local->exit != Exit::kNone) return {Code::kFailedPrecondition, "this member is leaving"};
  return {};
}

Outcome LocalMembers::MaySync(LocalId id) const {
  Outcome refusal = MayPost(id);
  if (!refusal.ok() || !Find(id)->step_open) return refusal;
  return {Code::kFailedPrecondition,
          "this member stands at a step boundary: sync with the step, or after it"};
}

// ------------------------------------------------------------------------------ the coordinator

void LocalMembers::Pending(const control::JoinPending& message, std::vector<Action>* out) {
  LocalMember* const local = FindMutable(LocalId(message.request));
  if (local == nullptr || local->removed) {
    // The Join was sent again while the first answer was on its way, or it was withdrawn. Without
    // this Leave, the member would be admitted, and the other members would wait for it for ever.
    out->push_back(ToCoordinator{
        control::Leave{message.group, message.member, false, "nobody waits for this join"}});
    return;
  }
  if (local->group != message.group || local->admitted) return;
  const LocalMember* const other = Find(message.group, message.member);
  if (!message.member || (other != nullptr && other != local)) {
    out->push_back(LogLine{"member not taken group=" + ToString(message.group) +
                           " member=" + ToString(message.member) +
                           " why=\"another local member has the number\""});
    return;
  }
  // Member numbers rise. A lower number is in a late message, and the coordinator has forgotten the
  // member of that number.
  if (message.member < local->member) return;
  local->member = message.member;
  local->present = message.present;
}

void LocalMembers::Refused(const control::JoinRefused& message, std::vector<Action>* out) {
  LocalMember* const local = FindMutable(LocalId(message.request));
  if (local == nullptr || local->group != message.group || local->admitted) return;
  // The member has got a number since then: the refusal is late.
  if (local->member) return;
  local->removed = message.outcome.ok()
                       ? Outcome{Code::kInternal, "the coordinator refused without a reason"}
                       : message.outcome;
  Finish(local->id, out);
}

World LocalMembers::WorldOf(const LocalMember& local, const EpochRecord& record, uint32_t pending) {
  return World{record.epoch,
               local.member,
               static_cast<uint32_t>(record.RankOf(local.member)),
               static_cast<uint32_t>(record.members.size()),
               pending,
               record.InBackground(local.member),
               local.boundary,
               local.step};
}

void LocalMembers::Committed(const GroupKey& group, const EpochRecord& record, uint32_t pending,
                             std::vector<Action>* out) {
  for (auto& [id, local] : members_) {
    if (local.group != group || !local.member || record.RankOf(local.member) < 0) continue;
    if (local.admitted) {
      if (local.known_admitted) out->push_back(WorldChanged{id, WorldOf(local, record, pending)});
      continue;
    }
    local.admitted = true;
    local.boundary = record.boundary;
    local.step = {record.epoch, static_cast<uint32_t>(record.RankOf(local.member)),
                  static_cast<uint32_t>(record.members.size())};
    if (!local.join_open) continue;
    local.join_open = false;
    local.known_admitted = true;
    // The first members of a group are admitted in one epoch. So they all hear the same here, also
    // one that hears of that epoch only by a later one.
    const Epoch joined = record.members[record.RankOf(local.member)].joined;
    const bool newcomer =
        std::ranges::any_of(record.members, [&](const auto& m) { return m.joined < joined; });
    out->push_back(JoinDone{id, {}, WorldOf(local, record, pending), newcomer});
  }
}

void LocalMembers::PendingChanged(const GroupKey& group, const EpochRecord& record,
                                  uint32_t pending, std::vector<Action>* out) const {
  for (const auto& [id, local] : members_) {
    if (local.group != group || !local.known_admitted || record.RankOf(local.member) < 0) continue;
    out->push_back(WorldChanged{id, WorldOf(local, record, pending)});
  }
}

const LocalMember* LocalMembers::Voted(const control::VoteResult& message,
                                       const EpochHistory& history, std::vector<Action>* out) {
  const LocalMember* const found = Find(message.group, message.member);
  if (found == nullptr) return nullptr;
  LocalMember& local = members_.at(found->id);
  // The message is repeated, or the member is on its way out. Then its end answers the step.
  if (!local.step_open || local.step_passed || local.boundaries != message.number ||
      local.exit != Exit::kNone) {
    return nullptr;
  }
  // A later epoch may be in force, if the first answer was lost with the stream.
  const std::vector<MemberId>* const members = history.MembersOf(message.epoch);
  const auto place = members == nullptr ? std::vector<MemberId>::const_iterator{}
                                        : std::ranges::find(*members, local.member);
  if (members == nullptr || place == members->end() || history.current().RankOf(local.member) < 0) {
    out->push_back(LogLine{"vote not answered group=" + ToString(message.group) + " member=" +
                           ToString(message.member) + " epoch=" + ToString(message.epoch) +
                           " why=\"the epoch is not committed here\""});
    return nullptr;
  }
  local.step_passed = StepWorld{message.epoch, static_cast<uint32_t>(place - members->begin()),
                                static_cast<uint32_t>(members->size())};
  return &local;
}

bool LocalMembers::EndStep(LocalId id, const EpochRecord& record, uint32_t pending,
                           std::vector<Action>* out) {
  LocalMember& local = members_.at(id);
  LH_CHECK(local.step_passed) << "local " << id.value();
  if (local.exit != Exit::kNone || local.removed || record.RankOf(local.member) < 0) return false;
  local.step_open = false;
  local.step = *std::exchange(local.step_passed, std::nullopt);
  local.passed = local.boundary == record.boundary ? local.passed + 1 : 0;
  local.boundary = record.boundary;
  out->push_back(StepDone{id, {}, WorldOf(local, record, pending)});
  return true;
}

Outcome LocalMembers::OutcomeOf(const LocalMember& local, const control::Removed& message) const {
  // A member that wanted to be out gets the answer to its own wish, whatever removed it. But a
  // member that was evicted or unreachable is told so.
  const bool forced =
      message.why == control::Removal::kEvicted || message.why == control::Removal::kUnreachable;
  if (local.exit == Exit::kLeaves && !forced) return {};
  if (local.exit == Exit::kDrains && !forced) return DrainOutcome(*draining_);
  const bool unreachable = message.why == control::Removal::kUnreachable;
  std::string text = "member " + ToString(local.member) + " is out of " + ToString(local.group) +
                     " (" + Name(message.why) + ")";
  if (!message.reason.empty()) text += ": " + message.reason;
  text += "; join again to come back";
  return {!local.admitted && unreachable ? Code::kUnavailable : Code::kEvicted, std::move(text)};
}

const LocalMember* LocalMembers::Removed(const control::Removed& message,
                                         std::vector<Action>* out) {
  const LocalMember* const found = Find(message.group, message.member);
  if (found == nullptr || found->removed) return nullptr;
  LocalMember& local = members_.at(found->id);
  if (!local.admitted && local.join_open && message.why == control::Removal::kUnknown) {
    // The coordinator has forgotten this member, and its trainer still waits: ask again.
    local.member = MemberId();
    out->push_back(JoinOf(local));
    return nullptr;
  }
  local.removed = OutcomeOf(local, message);
  return &local;
}

std::vector<const LocalMember*> LocalMembers::RemoveAll(const std::string& why) {
  std::vector<const LocalMember*> removed;
  for (auto& [id, local] : members_) {
    if (local.removed) continue;
    local.removed = Outcome{Code::kEvicted, why};
    removed.push_back(&local);
  }
  return removed;
}

void LocalMembers::Resend(const std::function<std::optional<control::SyncOffer>(LocalId)>& offer_of,
                          std::vector<Action>* out) {
  for (const auto& [id, local] : members_) {
    if (!local.admitted && local.join_open) out->push_back(JoinOf(local));
  }
  for (const auto& [id, local] : members_) {
    if (local.step_open && !local.step_passed && local.exit == Exit::kNone && !local.removed) {
      out->push_back(VoteOf(local, offer_of(id)));
    }
  }
  for (const auto& [id, local] : members_) {
    if (local.leave_told && !local.removed) out->push_back(LeaveOf(local));
  }
}

void LocalMembers::ForgetUnheard() {
  std::erase_if(members_, [](const auto& entry) {
    const LocalMember& local = entry.second;
    return !local.member && !local.join_open;
  });
}

// ------------------------------------------------------------------------------ drain, sweep

void LocalMembers::Drain(const std::string& reason, bool at_once, std::vector<Action>* out) {
  if (!draining_) draining_ = reason;
  for (auto& [id, local] : members_) {
    if (local.exit != Exit::kNone) continue;
    if (local.admitted && !local.step_open && !at_once) continue;
    local.exit = Exit::kDrains;
    local.exit_reason = "peer is draining: " + *draining_;
    Withdraw(local,
             {Code::kUnavailable,
              "join refused: this peer is draining (" + *draining_ + "); join at another peer"},
             out);
  }
}

void LocalMembers::Sweep(const std::function<Busy(const LocalMember&)>& busy_with, Tick now,
                         std::vector<Action>* out) {
  std::vector<LocalId> finished;
  for (auto& [id, local] : members_) {
    if (local.removed) {
      const Busy busy = busy_with(local);
      if (busy.posts == 0 && !busy.syncing) finished.push_back(id);
    } else if (local.exit != Exit::kNone && !local.leave_told && local.member) {
      const Busy busy = busy_with(local);
      if (busy.posts + busy.lingering != 0 && now < local.leave_by) continue;
      local.leave_told = true;
      out->push_back(LeaveOf(local));
    }
  }
  for (const LocalId id : finished) Finish(id, out);
}

Tick LocalMembers::NextDeadline() const {
  Tick due = kNever;
  for (const auto& [id, local] : members_) {
    if (local.member && !local.leave_told && !local.removed) due = std::min(due, local.leave_by);
  }
  return due;
}

void LocalMembers::Finish(LocalId id, std::vector<Action>* out) {
  const LocalMember local = std::move(members_.at(id));
  members_.erase(id);
  const Outcome& outcome = *local.removed;
  if (local.join_open) {
    out->push_back(JoinDone{
        id, outcome.ok() ? Outcome{Code::kAborted, "the join was withdrawn"} : outcome, {}});
  }
  if (local.step_open) {
    out->push_back(StepDone{
        id,
        outcome.ok() ? Outcome{Code::kFailedPrecondition, "this member has left"} : outcome,
        {}});
  }
  if (local.leave_open) out->push_back(LeaveDone{id, {}});
  if (local.known_admitted) out->push_back(MemberGone{id, outcome});
}

// ------------------------------------------------------------------------------ look-ups

LocalMember* LocalMembers::FindMutable(LocalId id) {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

const LocalMember* LocalMembers::Find(LocalId id) const {
  const auto it = members_.find(id);
  return it == members_.end() ? nullptr : &it->second;
}

const LocalMember* LocalMembers::Find(const GroupKey& group, MemberId member) const {
  if (!member) return nullptr;
  for (const auto& [id, local] : members_) {
    if (local.member == member && local.group == group && !local.removed) return &local;
  }
  return nullptr;
}

std::vector<MemberId> LocalMembers::MembersOf(const GroupKey& group) const {
  std::vector<MemberId> members;
  for (const auto& [id, local] : members_) {
    if (local.group == group && local.member && !local.removed) members.push_back(local.member);
  }
  std::sort(members.begin(), members.end());
  return members;
}

bool LocalMembers::AnyNumbered() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& entry) {
    return entry.second.member && !entry.second.removed;
  });
}

bool LocalMembers::HasAny(const GroupKey& group) const {
  return std::any_of(members_.begin(), members_.end(),
                     [&](const auto& entry) { return entry.second.group == group; });
}

Epoch LocalMembers::OldestStep(const GroupKey& group, Epoch newest) const {
  Epoch oldest = newest;
  for (const auto& [id, local] : members_) {
    if (local.group == group && local.admitted) oldest = std::min(oldest, local.step.epoch);
  }
  return oldest;
}

bool LocalMembers::HasAdmitted(const GroupKey& group) const {
  return std::any_of(members_.begin(), members_.end(), [&](const auto& entry) {
    return entry.second.group == group && entry.second.admitted;
  });
}

bool LocalMembers::AllAdmittedRemoved(const GroupKey& group) const {
  return std::none_of(members_.begin(), members_.end(), [&](const auto& entry) {
    const LocalMember& local = entry.second;
    return local.group == group && local.admitted && !local.removed;
  });
}

void LocalMembers::CheckInvariants() const {
  for (const auto& [id, local] : members_) {
    const std::string name = "local " + std::to_string(id.value());
    LH_CHECK(id == local.id) << name;
    LH_CHECK(!local.admitted || (local.member && !local.join_open)) << name;
    LH_CHECK(local.admitted || (!local.step_open && !local.leave_open)) << name;
    LH_CHECK(!local.known_admitted || local.admitted) << name;
    LH_CHECK(!local.step_passed || local.step_open) << name;
    // A member that is not admitted and waits for no join is on its way out.
    LH_CHECK(local.admitted || local.join_open || local.exit != Exit::kNone) << name;
    LH_CHECK(!local.member || local.removed || Find(local.group, local.member) == &local) << name;
    LH_CHECK(local.exit != Exit::kDrains || draining_) << name;
  }
}

}  // namespace longhaul::peerd
