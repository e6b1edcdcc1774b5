#include "tests/sim/checker.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <variant>

#include "base/check.h"
#include "base/log.h"
#include "peerd/core/op_table.h"
#include "tests/sim/coded_tensors.h"
#include "tests/sim/story.h"

namespace longhaul::sim {
namespace {

template <class Ids>
std::string List(const Ids& ids) {
  std::string text;
  for (const auto& id : ids) {
    text += text.empty() ? "" : ",";
    if constexpr (std::is_integral_v<std::decay_t<decltype(id)>>) {
      text += std::to_string(id);
    } else {
      text += ToString(id);
    }
  }
  return "[" + text + "]";
}

std::vector<uint8_t> BytesOf(const std::vector<float>& floats) {
  std::vector<uint8_t> bytes(floats.size() * sizeof(float));
  if (!floats.empty()) std::memcpy(bytes.data(), floats.data(), bytes.size());
  return bytes;
}

// Whether tensors travel in segments. Otherwise they are not encoded.
bool HasSegments(Algorithm algorithm) {
  return algorithm == Algorithm::kMesh || algorithm == Algorithm::kRing;
}

std::string ToString(const Checker::Local& local) {
  return longhaul::ToString(local.peer) + " local " + std::to_string(local.local.value());
}

}  // namespace

void Checker::Fail(const std::string& text) {
  LH_CHECK(false) << "simulation: " << text;
  __builtin_unreachable();
}

// ------------------------------------------------------------------------------ members

void Checker::OnLocalJoin(const Local& local, uint32_t, uint32_t slot,
                          const control::JoinWish& terms) {
  slots_[local] = slot;
  terms_[local] = terms;
}

uint64_t Checker::FirstStep(uint32_t group, MemberId member) const {
  const auto it = members_.find({group, member});
  if (it == members_.end() || !it->second.first_step) {
    Fail(longhaul::ToString(member) + " was told that it is admitted, and was not");
  }
  return *it->second.first_step;
}

void Checker::OnAdmitted(uint32_t group, const peerd::World& world, bool newcomer) const {
  const Member& own = members_.at({group, world.member});
  // A newcomer may hear of its admission only when all the others have gone, by a later epoch.
  const auto& members = epochs_.at({group, world.step.epoch}).members;
  const bool with_others = std::ranges::any_of(members, [&](const control::MemberInfo& info) {
    return members_.at({group, info.member}).first_step < own.first_step;
  });
  if (newcomer == (own.newcomer && with_others)) return;
  Fail(longhaul::ToString(world.member) + " is told that it is " + (newcomer ? "a" : "no") +
       " newcomer, and its admission says otherwise");
}

void Checker::OnStep(uint32_t group, uint64_t step, const peerd::World& world) {
  members_[{group, world.member}].step = step;
  last_step_[group] = std::max(last_step_[group], step);
  if (went_back_) return;
  const auto [first, fresh] = step_epochs_.emplace(std::pair(group, step), world.step.epoch);
  if (first->second != world.step.epoch) {
    Fail(longhaul::ToString(world.member) + " is told that step " + std::to_string(step) +
         " begins in epoch " + longhaul::ToString(world.step.epoch) + ", and others were told " +
         longhaul::ToString(first->second));
  }
  const auto epoch = epochs_.find({group, world.step.epoch});
  if (epoch == epochs_.end() || !committed_.contains(epoch->first)) {
    Fail("step " + std::to_string(step) + " begins in epoch " +
         longhaul::ToString(world.step.epoch) + ", which was not committed");
  }
  const auto& members = epoch->second.members;
  if (world.step.size != members.size() || world.step.rank >= members.size() ||
      members[world.step.rank].member != world.member) {
    Fail(longhaul::ToString(world.member) + " is told that it begins step " + std::to_string(step) +
         " with rank " + std::to_string(world.step.rank) + " of " +
         std::to_string(world.step.size) + ", and that is not so in epoch " +
         longhaul::ToString(world.step.epoch));
  }
}

void Checker::OnWorld(const Local& local, const GroupKey& group, const peerd::World& world) {
  const auto it = epochs_.find({group.group, world.epoch});
  if (it == epochs_.end() || !committed_.contains(it->first)) {
    Fail(ToString(local) + " is in epoch " + longhaul::ToString(world.epoch) +
         ", which was not committed");
  }
  const auto& members = it->second.members;
  if (world.size != members.size()) {
    Fail(ToString(local) + " sees " + std::to_string(world.size) + " members in epoch " +
         longhaul::ToString(world.epoch) + " of " + std::to_string(members.size()));
  }
  if (world.rank >= world.size || members[world.rank].member != world.member) {
    Fail(ToString(local) + " has the wrong rank " + std::to_string(world.rank) + " in epoch " +
         longhaul::ToString(world.epoch));
  }
  Epoch& last = last_epoch_[local];
  if (world.epoch < last) {
    Fail(ToString(local) + " goes back from epoch " + longhaul::ToString(last) + " to " +
         longhaul::ToString(world.epoch));
  }
  last = world.epoch;
}

void Checker::OnLogLine(const std::string& line) {
  const std::string json = FormatLogLine(LogFormat::kJson, LogLevel::kInfo, line, 0);
  if (json.find("\"forged\":") != std::string::npos) Fail("a foreign text is a field of: " + line);
}

void Checker::OnMembers(const Local& local, const GroupKey& group,
                        const peerd::PeerCore::MembersView& view) {
  if (!view.epoch) return;
  const auto it = epochs_.find({group.group, view.epoch});
  std::vector<MemberId> expected;
  if (it != epochs_.end()) {
    for (const control::MemberInfo& member : it->second.members) expected.push_back(member.member);
  }
  if (expected != view.members) {
    Fail(ToString(local) + " has members " + List(view.members) + " in epoch " +
         longhaul::ToString(view.epoch) + ", which has " + List(expected));
  }
}

// ------------------------------------------------------------------------------ coordinator

void Checker::OnSend(PeerId to, const control::CoordinatorMessage& message,
                     const coordinator::Records& durable) {
  if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
    OnPrepare(to, *prepare, durable);
  } else if (const auto* commit = std::get_if<control::CommitEpoch>(&message)) {
    OnCommit(to, *commit, durable);
  } else if (const auto* pending = std::get_if<control::JoinPending>(&message)) {
    const auto run = durable.runs.find(pending->group.run);
    if (run == durable.runs.end() || run->second.next_member <= pending->member.value()) {
      Fail("JoinPending for " + longhaul::ToString(pending->member) + " is not durable");
    }
    const auto key = std::pair(pending->group.group, pending->member);
    const Local local{to, peerd::LocalId(pending->request)};
    Member& member = members_[key];
    if (member.local && *member.local != local) {
      Fail(longhaul::ToString(pending->member) + " is " + ToString(*member.local) + " and " +
           ToString(local));
    }
    member.local = local;
    const auto group = durable.groups.find(pending->group);
    if (group == durable.groups.end()) return;
    for (const coordinator::MemberRecord& record : group->second.members) {
      if (record.member == pending->member) CheckTerms(local, record);
    }
  } else if (std::holds_alternative<control::Removed>(message)) {
    CheckCohorts(durable);
  } else if (const auto* result = std::get_if<control::VoteResult>(&message)) {
    const auto group = durable.groups.find(result->group);
    if (group == durable.groups.end()) return;
    for (const coordinator::MemberRecord& member : group->second.members) {
      if (member.member == result->member && member.votes < result->number) {
        Fail("VoteResult for " + longhaul::ToString(member.member) + " is not durable");
      }
    }
  } else if (const auto* sync = std::get_if<control::SyncResult>(&message)) {
    OnSyncResult(*sync, durable);
  } else if (const auto* agreed = std::get_if<control::StateAgreed>(&message)) {
    const auto group = durable.groups.find(agreed->group);
    const bool stored = group != durable.groups.end() && group->second.state &&
                        group->second.state->revision == agreed->revision &&
                        group->second.state->state == agreed->state &&
                        group->second.state->manifest == agreed->manifest;
    if (!stored) {
      Fail("StateAgreed of revision " + std::to_string(agreed->revision) +
           " is not what the store holds");
    }
  }
}

void Checker::OnPrepare(PeerId to, const control::PrepareEpoch& prepare,
                        const coordinator::Records& durable) {
  const std::string name = "epoch " + longhaul::ToString(prepare.epoch);
  const auto group = durable.groups.find(prepare.group);
  if (group == durable.groups.end() || group->second.highest < prepare.epoch) {
    Fail("PrepareEpoch of " + name + " is not durable");
  }
  OnDepartures(group->second);
  const auto [it, fresh] = epochs_.emplace(std::pair(prepare.group.group, prepare.epoch), prepare);
  if (fresh) {
    ++counts_.epochs;
    CheckAssembly(prepare, group->second);
    if (prepare.freeze) {
      ++counts_.freezes;
      CheckFreeze(prepare);
    }
    return;
  }
  control::PrepareEpoch known = it->second;
  // A repeated message may differ in the addresses of peers, and in the text.
  known.cause = prepare.cause;
  for (control::PeerInfo& peer : known.peers) {
    for (const control::PeerInfo& now : prepare.peers) {
      if (now.peer == peer.peer) peer = now;
    }
  }
  if (known != prepare) {
    Fail(name + " is used twice; first \"" + Describe(it->second) + "\", now to " +
         longhaul::ToString(to) + " \"" + Describe(prepare) + "\"");
  }
}

// Members that wait for each other begin as one group, of the size that they asked for.
void Checker::CheckAssembly(const control::PrepareEpoch& prepare,
                            const coordinator::GroupRecord& group) {
  uint32_t size = 0;
  std::vector<std::string> names;
  // In a group with members, the number that newcomers give has no meaning.
  const auto base = epochs_.find({prepare.group.group, prepare.base});
  if (base != epochs_.end() && !base->second.members.empty()) return;
  for (const control::MemberInfo& info : prepare.members) {
    if (info.joined != prepare.epoch) return;  // a later epoch: newcomers join one by one
    for (const coordinator::MemberRecord& record : group.members) {
      if (record.member == info.member) size = std::max(size, record.members);
    }
    names.push_back(info.name);
  }
  if (size == 0) return;
  ++counts_.assemblies;
  if (prepare.members.size() != size) {
    Fail("epoch " + longhaul::ToString(prepare.epoch) + " has " +
         std::to_string(prepare.members.size()) + " members, who waited for " +
         std::to_string(size));
  }
  if (!std::is_sorted(names.begin(), names.end())) {
    Fail("the ranks of epoch " + longhaul::ToString(prepare.epoch) + " do not follow the names");
  }
}

void Checker::CheckTerms(const Local& local, const coordinator::MemberRecord& member) const {
  const control::JoinWish& asked = terms_.at(local);
  if (member.cohort == asked.cohort && member.cohort_size == asked.cohort_size &&
      member.step_deadline_ms == asked.step_deadline_ms && member.members == asked.members &&
      (asked.background || member.background_until != control::kInBackground)) {
    return;
  }
  Fail(ToString(local) + " asked for cohort \"" + asked.cohort + "\" and a deadline of " +
       std::to_string(asked.step_deadline_ms) + " ms, and is " + longhaul::ToString(member.member) +
       " with cohort \"" + member.cohort + "\" and " + std::to_string(member.step_deadline_ms));
}

// Counts the members that are removed for being late. Fails if a removal has no reason.
void Checker::OnDepartures(const coordinator::GroupRecord& group) {
  for (const coordinator::MemberRecord& member : group.members) {
    if (!member.departs) continue;
    if (!departed_.insert({group.group.group, member.member}).second) continue;
    const std::string name = longhaul::ToString(member.member);
    const bool late = member.departs->reason.starts_with("late at the step boundary") ||
                      member.departs->reason.starts_with("late for the sync");
    if (late) {
      if (member.step_deadline_ms == 0)
        Fail(name + " is late by a deadline that it did not ask for");
      ++counts_.late;
    }
    if (member.departs->why == control::Removal::kEvicted) member_lost_ = true;
    if (member.departs->why == control::Removal::kLeft || member_lost_ || all_disturbed_) continue;
    if (disturbed_.empty()) {
      Fail(name + " is removed although nothing was done to anybody: " + member.departs->reason);
    }
  }
}

// Fails if only a part of a cohort is admitted, or only a part of it is removed.
void Checker::CheckCohorts(const coordinator::Records& durable) {
  struct Seen {
    uint32_t there = 0, size = 0;
    bool admitted = false;
  };
  std::map<std::pair<PeerId, std::string>, Seen> cohorts;
  for (const auto& [key, group] : durable.groups) {
    for (const coordinator::MemberRecord& member : group.members) {
      if (member.cohort.empty() || member.departs) continue;
      Seen& seen = cohorts[{member.peer, member.cohort}];
      ++seen.there;
      seen.size = member.cohort_size;
      seen.admitted = seen.admitted || member.joined;
    }
  }
  // A cohort that was removed may come again under the same name.
  std::erase_if(cohort_ballots_, [&](const auto& entry) { return !cohorts.contains(entry.first); });
  for (const auto& [key, seen] : cohorts) {
    if (!seen.admitted || seen.there == seen.size) continue;
    Fail("cohort " + key.second + " has " + std::to_string(seen.there) + " of " +
         std::to_string(seen.size) + " members, and some are admitted");
  }
}

// All groups admit a cohort in the ballot of the same number. The exception is a group in which
// nobody votes.
void Checker::AdmitCohorts(const control::PrepareEpoch& prepare,
                           const coordinator::GroupRecord& group) {
  if (group.committed != prepare.epoch) return;
  const bool voted = std::any_of(
      prepare.members.begin(), prepare.members.end(),
      [&](const control::MemberInfo& member) { return member.joined != prepare.epoch; });
  for (const coordinator::MemberRecord& member : group.members) {
    if (member.joined != prepare.epoch || member.cohort.empty()) continue;
    cohorts_.emplace(member.peer, member.cohort);
    counts_.cohorts = cohorts_.size();
    if (!voted) continue;
    const auto [it, fresh] =
        cohort_ballots_.emplace(std::pair(member.peer, member.cohort), group.ballots);
    if (it->second == group.ballots) continue;
    Fail("cohort " + member.cohort + " was admitted by ballot " + std::to_string(it->second) +
         " and, in group " + std::to_string(group.group.group) + ", by ballot " +
         std::to_string(group.ballots));
  }
}

// Returns true if ops may be redone because a member left that takes no part in them. A member
// leaves when its own ops have ended. Ops of an older boundary, in which it takes no part, may
// still be in flight.
bool Checker::RedoneForALeaver(const OpName& name, const Op& known) const {
  for (const auto& [group, id] : departed_) {
    if (group != name.group) continue;
    // The op is of a part of the group, perhaps of another one than the leaver's.
    if (!known.part.empty()) return true;
    const auto member = members_.find({group, id});
    if (member != members_.end() && member->second.first_step.value_or(0) > name.step) return true;
  }
  return false;
}

// Fails if ops are frozen without a reason in their own group. The reasons are: the group loses a
// member, or something was done to one of its peers.
void Checker::CheckFreeze(const control::PrepareEpoch& prepare) const {
  if (all_disturbed_ || cancelled_in_.contains(prepare.group.group)) return;
  const auto stands = [&](const control::MemberInfo& member) {
    return std::any_of(prepare.members.begin(), prepare.members.end(),
                       [&](const control::MemberInfo& m) { return m.member == member.member; });
  };
  const auto base = epochs_.find({prepare.group.group, prepare.base});
  if (base == epochs_.end()) return;
  for (const control::MemberInfo& member : base->second.members) {
    if (disturbed_.contains(member.peer)) return;
    if (!stands(member)) return;
  }
  for (const control::MemberInfo& member : prepare.members) {
    if (disturbed_.contains(member.peer)) return;
  }
  // Another reason is a peer whose last member left and that is back at once with a new member. The
  // peer believes that its old links are up while the other peers close them. So the peer reports
  // these links as lost. That report may come after the commit, because the other peers may be
  // ready before the report arrives.
  const auto there = [&](const control::MemberInfo& member) {
    return std::any_of(prepare.members.begin(), prepare.members.end(),
                       [&](const control::MemberInfo& m) { return m.peer == member.peer; });
  };
  for (const auto& [key, epoch] : epochs_) {
    if (key.first != prepare.group.group) continue;
    for (const control::MemberInfo& member : epoch.members) {
      if (there(member) && !stands(member)) return;
    }
  }
  Fail("epoch " + longhaul::ToString(prepare.epoch) + " freezes group " +
       std::to_string(prepare.group.group) + " for nothing: " + prepare.cause);
}

void Checker::OnCommit(PeerId to, const control::CommitEpoch& commit,
                       const coordinator::Records& durable) {
  const std::string name = "epoch " + longhaul::ToString(commit.epoch);
  const auto group = durable.groups.find(commit.group);
  if (group == durable.groups.end() || group->second.committed < commit.epoch) {
    Fail("CommitEpoch of " + name + " is not durable");
  }
  if (group->second.committed == commit.epoch) {
    coordinator::FatesRecord fates{to, {}, {}};
    for (const coordinator::FatesRecord& record : group->second.fates) {
      if (record.peer == to) fates = record;
    }
    if (fates.fates != commit.fates || fates.missed != commit.missed) {
      Fail("fates of " + name + " are not durable");
    }
  }
  const auto prepared = epochs_.find({commit.group.group, commit.epoch});
  if (prepared == epochs_.end()) Fail(name + " is committed and was never prepared");
  if (committed_.insert(prepared->first).second) {
    Admit(prepared->second);
    AdmitCohorts(prepared->second, group->second);
    CheckCohorts(durable);
    if (group->second.committed == commit.epoch) {
      for (const coordinator::FatesRecord& record : group->second.fates) {
        CheckFates(commit.epoch, commit.group.group, record);
      }
    }
  }
}

// Called before any peer hears of the commit. Peers that have heard of it may go on at once.
void Checker::CheckFates(Epoch epoch, uint32_t group, const coordinator::FatesRecord& record) {
  for (const control::OpFate& fate : record.fates) {
    const auto op = announced_.find({record.peer, group, fate.ordinal});
    if (op == announced_.end() || fate.fate == control::Fate::kCommit) continue;
    const OpName& name = op->second.name;
    const Op& known = ops_[name];
    // A small op may be redone although a member has its result: so the others get that result.
    if ((known.result && !known.at_once) || known.refused) {
      Fail(ToString(name) + " is not committed at " + longhaul::ToString(record.peer) +
           " in epoch " + longhaul::ToString(epoch) + ", but has ended at another member");
    }
  }
}

// All members that stay have voted, so they are at the end of the same step. Newcomers begin with
// the next step.
void Checker::Admit(const control::PrepareEpoch& prepare) {
  const uint32_t group = prepare.group.group;
  std::optional<uint64_t> step;
  bool joins = false;
  for (const control::MemberInfo& member : prepare.members) {
    if (member.joined == prepare.epoch || member.background_until == prepare.epoch) joins = true;
  }
  if (!joins) return;
  for (const control::MemberInfo& info : prepare.members) {
    if (info.joined == prepare.epoch) continue;
    const uint64_t own = members_[{group, info.member}].step;
    if (step && *step != own) {
      Fail("epoch " + longhaul::ToString(prepare.epoch) + " admits while " +
           longhaul::ToString(info.member) + " stands in step " + std::to_string(own) +
           " and another member in step " + std::to_string(*step));
    }
    step = own;
  }
  // No member stays. The newcomers use step numbers that no earlier member can have reached.
  const uint64_t first = step ? *step + 1 : last_step_[group] + 100;
  last_step_[group] = std::max(last_step_[group], first);
  for (const control::MemberInfo& info : prepare.members) {
    Member& member = members_[{group, info.member}];
    if (info.joined == prepare.epoch) {
      member.first_step = first;
      member.step = first;
      member.newcomer = step.has_value();
      if (info.background_until != control::kInBackground) member.contributes_step = first;
    } else if (info.background_until == prepare.epoch) {
      if (member.contributes_step) {
        Fail(longhaul::ToString(info.member) + " contributes already, and begins to");
      }
      member.contributes_step = first;
      ++counts_.background;
    }
  }
}

// Forgets the numbers that the store has forgotten: they may be given out again. But a commit of
// such a number must not reach a peer that means another epoch by it (OnArrival checks that).
void Checker::OnStoreWentBack(const coordinator::Records& durable) {
  std::erase_if(epochs_, [&](const auto& entry) {
    const auto& [group, epoch] = entry.first;
    const auto known = durable.groups.find({entry.second.group.run, group});
    return known == durable.groups.end() || epoch > known->second.highest;
  });
  std::erase_if(members_, [&](const auto& entry) {
    const auto run = durable.runs.find("demo");
    return run == durable.runs.end() || entry.first.second.value() >= run->second.next_member;
  });
  departed_.clear();
  went_back_ = true;
}

// When its last member is gone, a peer forgets the group and its preparation.
void Checker::OnHello(PeerId from, const control::Hello& hello) {
  std::erase_if(prepared_at_, [&](const auto& entry) {
    const auto& [peer, group] = entry.first;
    return peer == from && std::none_of(hello.groups.begin(), hello.groups.end(),
                                        [&](const control::GroupState& known) {
                                          return known.group.group == group;
                                        });
  });
}

void Checker::OnArrival(PeerId at, const control::CoordinatorMessage& message) {
  if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
    auto& newest = prepared_at_[{at, prepare->group.group}];
    newest = std::max(newest, {prepare->epoch, prepare->preparation},
                      [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  // The peer gives up its preparation. The coordinator may have forgotten the number.
  if (const auto* abort = std::get_if<control::AbortEpoch>(&message)) {
    const auto given_up = prepared_at_.find({at, abort->group.group});
    if (given_up != prepared_at_.end() && given_up->second.first == abort->epoch) {
      prepared_at_.erase(given_up);
    }
  }
  const auto* commit = std::get_if<control::CommitEpoch>(&message);
  if (commit == nullptr) return;
  const auto prepared = prepared_at_.find({at, commit->group.group});
  const auto epoch = epochs_.find({commit->group.group, commit->epoch});
  if (prepared != prepared_at_.end() && epoch != epochs_.end() &&
      prepared->second.first == commit->epoch &&
      prepared->second.second != epoch->second.preparation) {
    Fail("epoch " + longhaul::ToString(commit->epoch) + " is committed, and " +
         longhaul::ToString(at) + " has prepared another one of that number");
  }
  for (const control::OpFate& fate : commit->fates) {
    if (refusals_.contains({at, commit->group.group, fate.ordinal})) continue;
    const auto op = announced_.find({at, commit->group.group, fate.ordinal});
    if (op == announced_.end()) {
      Fail("fate of " + longhaul::ToString(fate.ordinal) + " of " + longhaul::ToString(at) +
           ", which it never announced");
    }
    const auto [it, fresh] =
        fates_.emplace(FateKey{commit->group.group, commit->epoch, op->second}, fate.fate);
    if (it->second != fate.fate) {
      Fail(ToString(op->second.name) + " has two fates in epoch " +
           longhaul::ToString(commit->epoch));
    }
    if (fresh && fate.fate == control::Fate::kCommit) ++counts_.committed_by_fate;
  }
}

// ------------------------------------------------------------------------------ syncs

void Checker::OnStored(const coordinator::GroupRecord& before,
                       const coordinator::GroupRecord& after) {
  if (!before.state || !after.state) return;
  if (after.state->revision < before.state->revision) {
    Fail("revision " + std::to_string(before.state->revision) + " of " +
         longhaul::ToString(after.group) + " falls to " + std::to_string(after.state->revision));
  }
}

// The end of a sync is sent only when the store holds the sync. So all members are told the same
// state for one revision.
void Checker::OnSyncResult(const control::SyncResult& result, const coordinator::Records& durable) {
  if (const auto it = durable.groups.find(result.group); it != durable.groups.end()) {
    const coordinator::MemberRecord* const member = FindMember(it->second, result.member);
    if (member != nullptr && member->background_until == control::kInBackground) {
      Fail(longhaul::ToString(result.member) + " is in the background and in a sync");
    }
  }
  if (result.action != control::SyncAction::kEnd) return;
  Holders& holders = holders_[result.group];
  if (!result.outcome.ok()) {
    // Trainers do not change their tensors. So whoever held what was agreed on never is the odd
    // one.
    const bool held = holders.before.contains(result.member) || holders.now.contains(result.member);
    if (!result.sources.empty() && held) {
      Fail(longhaul::ToString(result.member) +
           " took part in the last commit, and is refused for newcomers with other tensors");
    }
    return;
  }
  if (holders.revision != result.revision || holders.state != result.state) {
    holders = {result.revision, result.state, {}, std::move(holders.now)};
  }
  holders.now.insert(result.member);
  const auto group = durable.groups.find(result.group);
  const bool stored = group != durable.groups.end() && group->second.state &&
                      group->second.state->revision == result.revision &&
                      group->second.state->state == result.state;
  if (!stored) {
    Fail("the end of a sync at revision " + std::to_string(result.revision) + " for " +
         longhaul::ToString(result.member) + " is not what the store holds");
  }
}

void Checker::OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo& info,
                         control::SyncStrategy strategy, const Hash128& begun, const Hash128& now) {
  if (strategy == control::SyncStrategy::kSend && now != begun) {
    Fail("the state of a member that only sends was written");
  }
  if (info.bytes != 0) ++counts_.syncs_fetched;
  if (outcome.ok()) {
    ++counts_.syncs_ok;
    if (info.resumed) ++counts_.syncs_resumed;
    if (now != info.state) Fail("a sync is committed, and a member has another state");
    if (now != begun && !info.changed) Fail("a state has changed, and its trainer is not told");
    return;
  }
  if (outcome.code == Code::kInternal) Fail("a sync ended as: " + outcome.text);
  ++(outcome.code == Code::kAborted ? counts_.syncs_aborted : counts_.syncs_refused);
  if (now != begun) Fail("a sync has failed, and the tensors of a member were written");
}

void Checker::OnTaken(const peerd::StateSyncInfo& info, const Hash128& now) {
  ++counts_.taken;
  if (info.state != now) Fail("a state is taken that is not what was agreed on");
}

// ------------------------------------------------------------------------------ ops

void Checker::OnAnnounced(PeerId peer, const GroupKey& group, OpOrdinal ordinal,
                          const OpPost& post) {
  const auto [it, fresh] = announced_.emplace(std::tuple(peer, group.group, ordinal), post);
  if (it->second.name != post.name) {
    Fail(longhaul::ToString(ordinal) + " of " + longhaul::ToString(peer) + " is " +
         ToString(it->second.name) + " and " + ToString(post.name));
  }
}

void Checker::OnReported(PeerId peer, const GroupKey& group, const control::OpReport& report,
                         const OpPost& post) {
  if (refusals_.contains({peer, group.group, report.ordinal})) return;
  const OpKind kind = ShapeOf(seed_, post.name).desc.kind;
  std::vector<MemberId> part = ops_[post.name].part;
  if (kind != OpKind::kSendRecv) std::sort(part.begin(), part.end());
  if (post.name.tag != report.tag || peerd::SetOf(kind, part) != report.set) return;
  announced_.emplace(std::tuple(peer, group.group, report.ordinal), post);
}

OpPost Checker::OnPosted(const OpName& name, uint32_t slot, uint32_t world, bool is_root) {
  Op& op = ops_[name];
  if (is_root) op.roots.insert(slot);
  op.worlds.insert(world);
  return {name, ++op.posted[slot]};
}

bool Checker::Unfit(const Ended& op, const Op& known, Epoch epoch) const {
  const OpKind kind = op.desc.kind;
  if (kind == OpKind::kAllReduce || kind == OpKind::kBarrier) return false;
  if (!epoch) return false;  // it had not begun in any epoch: a fault ended it
  const size_t all = Participants(op.name, epoch, /*contributing=*/false).size();
  const size_t contributing = Participants(op.name, epoch, /*contributing=*/true).size();
  if (kind == OpKind::kSendRecv) return contributing < 2;
  if (known.worlds.size() > 1) return true;
  if (kind == OpKind::kAllGather) return false;
  if (all != *known.worlds.begin()) return true;
  return (kind == OpKind::kBroadcast || kind == OpKind::kScatter) && contributing != all;
}

const std::vector<MemberId>& Checker::StepMembers(uint32_t group, uint64_t step, Epoch epoch) {
  std::vector<MemberId>& members = step_members_[{group, step}];
  if (!members.empty()) return members;
  const auto known = epochs_.find({group, epoch});
  if (known == epochs_.end()) return members;
  for (const control::MemberInfo& info : known->second.members) members.push_back(info.member);
  return members;
}

void Checker::OnPart(const OpName& name, const std::vector<MemberId>& members) {
  ops_[name].part = members;
}

void Checker::OnCancelled(const OpName& name) {
  ops_[name].cancelled = true;
  cancelled_in_.insert(name.group);
}

void Checker::OnGivenUp(const OpName& name, Epoch epoch) {
  Op& known = ops_[name];
  known.given_up = epoch;
  if (known.result && !(known.at_once && AllGone(name, known.holders, epoch))) {
    Fail(ToString(name) + " is given up, and succeeded at another member");
  }
}

bool Checker::AllGone(const OpName& name, const std::set<uint32_t>& slots, Epoch epoch) const {
  if (!epoch) return false;  // aborted before it had begun in any epoch
  const std::vector<uint32_t> there = Participants(name, epoch, /*contributing=*/false);
  return std::none_of(there.begin(), there.end(),
                      [&](uint32_t slot) { return slots.contains(slot); });
}

std::vector<MemberId> Checker::Members(const OpName& name, Epoch epoch, bool contributing) const {
  const auto it = epochs_.find({name.group, epoch});
  if (it == epochs_.end() || !committed_.contains(it->first)) {
    Fail(ToString(name) + " ended in epoch " + longhaul::ToString(epoch) +
         ", which was not committed");
  }
  std::vector<MemberId> members;
  for (const control::MemberInfo& info : it->second.members) {
    const Member& member = members_.at({name.group, info.member});
    const std::optional<uint64_t>& from =
        contributing ? member.contributes_step : member.first_step;
    if (!from || *from > name.step) continue;
    const auto op = ops_.find(name);
    const bool here = op == ops_.end() || op->second.part.empty() ||
                      std::find(op->second.part.begin(), op->second.part.end(), info.member) !=
                          op->second.part.end();
    if (here) members.push_back(info.member);
  }
  return members;
}

std::vector<uint32_t> Checker::Participants(const OpName& name, Epoch epoch,
                                            bool contributing) const {
  std::vector<uint32_t> slots;
  for (const MemberId member : Members(name, epoch, contributing)) {
    slots.push_back(slots_.at(*members_.at({name.group, member}).local));
  }
  return slots;
}

std::vector<uint32_t> Checker::Givers(const Ended& op, Epoch epoch) const {
  return Participants(op.name, epoch, /*contributing=*/true);
}

void Checker::OnEnded(const Ended& op, const Outcome& outcome, const peerd::OpInfo& info) {
  Op& known = ops_[op.name];
  const std::string name = ToString(op.name);
  // A member that has no source in this kind of op has posted none.
  const bool intact = op.source->empty() || *op.source == InputOf(op.name, op.desc, op.slot);
  if ((!outcome.ok() || !op.in_place) && !intact) {
    Fail(name + " ended as " + Describe(outcome) + " and its input is not as posted, slot " +
         std::to_string(op.slot));
  }
  if (!outcome.ok() && *op.error != BytesOf(ErrorOf(op.name, op.desc, op.slot))) {
    Fail(name + " ended as " + Describe(outcome) + " and its error is not as posted, slot " +
         std::to_string(op.slot));
  }
  const auto fresh = [](uint8_t byte) { return byte == kFresh; };
  if (!outcome.ok() && op.desc.kind == OpKind::kReduceScatter &&
      !std::all_of(op.target->begin(), op.target->end(), fresh)) {
    Fail(name + " ended as " + Describe(outcome) + " and its target was written to, slot " +
         std::to_string(op.slot));
  }
  switch (outcome.code) {
    case Code::kOk:
      ++counts_.ok;
      if (op.desc.kind != OpKind::kAllReduce) ++counts_.other_kinds;
      if (!known.part.empty()) ++counts_.of_parts;
      if (info.algorithm == Algorithm::kMesh) ++counts_.by_mesh;
      if (info.algorithm == Algorithm::kRing) ++counts_.by_ring;
      if (info.codec != Quantization::kNone) {
        ++counts_.encoded;
        if (!op.error->empty()) ++counts_.with_errors;
        if (IsAuto(op.desc.quantization)) ++counts_.chosen;
      } else if (op.desc.Encodes() && HasSegments(info.algorithm)) {
        ++counts_.not_chosen;
      }
      counts_.retries += info.retries;
      if (info.retries > 0 && disturbed_.empty() && !all_disturbed_ && !member_lost_ &&
          !cancelled_in_.contains(op.name.group) && !RedoneForALeaver(op.name, known)) {
        Fail(name + " was redone although nothing happened but joins, leaves and drains");
      }
      if (known.refused) Fail(name + " is refused at one member and succeeds at another");
      for (const uint32_t slot : Participants(op.name, info.epoch, /*contributing=*/false)) {
        if (!known.refusers.contains(slot)) continue;
        Fail(name + " succeeds with slot " + std::to_string(slot) + ", whose call was refused");
      }
      CheckSucceeded(op, info);
      break;
    case Code::kAborted:
      ++counts_.aborted;
      if (known.cancelled) {
        ++counts_.cancelled;
        // In epoch 0: cancelled before it was announced. An op that was started again may also be
        // aborted because of its world, and then be started once more in the same epoch.
        if (info.epoch && outcome.text.find(" cancelled ") != std::string::npos) {
          known.aborted.insert(info.epoch);
        }
        break;
      }
      if (Unfit(op, known, info.epoch)) {
        ++counts_.unfit;
        if (known.result && !(known.at_once && AllGone(op.name, known.holders, info.epoch))) {
          Fail(name + " is aborted at one member and succeeded at another");
        }
        known.unfit.emplace(known.posted.at(op.slot), info.epoch);
        break;
      }
      // If offers differ, other members may have asked for abort. This member had not started the
      // op when it was aborted.
      if (op.desc.on_fault != OnFault::kAbort && !ShapeOf(seed_, op.name).mismatched) {
        Fail(name + " is aborted, and was to be redone");
      }
      known.aborted.insert(info.epoch);
      if (known.result && known.result_epoch == info.epoch) {
        Fail(name + " is aborted at one member and succeeded at another");
      }
      break;
    case Code::kTooFewMembers:
      ++counts_.too_few;
      if (!info.members.empty() && info.members.size() >= op.desc.min_world) {
        Fail(name + " found enough members: " + outcome.text);
      }
      known.aborted.insert(info.epoch);
      if (known.result && known.result_epoch == info.epoch) {
        Fail(name + " found too few members and succeeded at another member");
      }
      if (known.at_once && !Outlived(op, known, info.epoch)) {
        Fail(name + " found too few members, and one that is still there has its result");
      }
      break;
    case Code::kInvalidArgument:
      ++counts_.refused;
      if (!known.refusers.empty()) {
        ++counts_.refused_to_another;
        if (outcome.text.find(kReason) == std::string::npos) Fail(name + " ended: " + outcome.text);
        // The op may go on without members that have gone together with what they were told.
        break;
      }
      if (!ShapeOf(seed_, op.name).mismatched) Fail(name + " is refused: " + outcome.text);
      if (known.result) Fail(name + " is refused at one member and succeeded at another");
      known.refused = true;
      break;
    case Code::kEvicted:
    case Code::kUnavailable:
      ++counts_.removed;
      break;
    default:
      Fail(name + " ended as " + Describe(outcome));
  }
}

bool Checker::Outlived(const Ended& op, const Op& known, Epoch epoch) const {
  if (epoch == known.result_epoch) return false;
  const std::set<uint32_t> older = epoch > known.result_epoch ? known.holders : std::set{op.slot};
  return AllGone(op.name, older, std::max(epoch, known.result_epoch));
}

std::optional<std::vector<uint8_t>> Checker::WholeOf(const Ended& op,
                                                     const std::vector<uint32_t>& all,
                                                     const std::vector<uint32_t>& givers,
                                                     bool encoded) const {
  if (SlackOf(op.name, op.desc, givers).result > 0) return RoughWholeOf(op, all, givers);
  const OpKind kind = op.desc.kind;
  const std::vector<uint8_t>& target = *op.target;
  const auto part_bytes = static_cast<ptrdiff_t>(op.desc.part_bytes());
  const auto rank = std::find(all.begin(), all.end(), op.slot) - all.begin();
  const auto part_of = [&](const std::vector<uint8_t>& whole) {
    const auto begin = whole.begin() + rank * part_bytes;
    return std::vector<uint8_t>(begin, begin + part_bytes);
  };
  if (kind == OpKind::kAllToAll) {
    std::vector<uint8_t> expected;
    for (const uint32_t slot : all) {
      const std::vector<uint8_t> part = part_of(InputOf(op.name, op.desc, slot));
      expected.insert(expected.end(), part.begin(), part.end());
    }
    if (target != expected) return std::nullopt;
    return InputOf(op.name, op.desc, all.front());  // the same at all members
  }
  if (kind == OpKind::kBroadcast || kind == OpKind::kScatter || kind == OpKind::kSendRecv) {
    const bool has_target = TargetOf(kind, op.is_root) != Extent::kNone;
    const std::set<uint32_t>& roots = ops_.at(op.name).roots;
    for (const uint32_t slot : givers) {
      // The sender of a pair knows that it was the sender. It has no result.
      if (kind == OpKind::kSendRecv ? (slot == op.slot) != op.is_root : !roots.contains(slot)) {
        continue;
      }
      const std::vector<uint8_t> whole = InputOf(op.name, op.desc, slot);
      if (!has_target || target == (kind == OpKind::kScatter ? part_of(whole) : whole))
        return whole;
    }
    return std::nullopt;
  }
  // Parts of a reduce-scatter stay where they are added up.
  const bool sum_encoded = encoded && kind == OpKind::kAllReduce;
  std::vector<uint8_t> whole = ResultOf(op.name, op.desc, givers, sum_encoded);
  if (kind == OpKind::kReduceScatter) {
    if (target != part_of(whole)) return std::nullopt;
  } else if (kind == OpKind::kAllGather || (kind == OpKind::kGather && op.is_root)) {
    // What lies behind the parts means nothing.
    if (target.size() < whole.size() || !std::equal(whole.begin(), whole.end(), target.begin())) {
      return std::nullopt;
    }
  } else if (TargetOf(kind, op.is_root) == Extent::kWhole && target != whole) {
    return std::nullopt;
  }
  return whole;
}

std::optional<std::vector<uint8_t>> Checker::RoughWholeOf(
    const Ended& op, const std::vector<uint32_t>& all, const std::vector<uint32_t>& givers) const {
  const double slack = SlackOf(op.name, op.desc, givers).result;
  const auto near = [&](const std::vector<uint8_t>& expected, const std::vector<uint8_t>& got) {
    return Near(op.desc.dtype, expected, got, slack);
  };
  if (op.desc.kind == OpKind::kBroadcast) {
    // Nobody here knows who the root was.
    const bool from_one = std::any_of(givers.begin(), givers.end(), [&](uint32_t slot) {
      return near(InputOf(op.name, op.desc, slot), *op.target);
    });
    return from_one ? std::optional(*op.target) : std::nullopt;
  }
  std::vector<uint8_t> whole = ResultOf(op.name, op.desc, givers);
  if (op.desc.kind == OpKind::kReduceScatter) {
    const auto rank = std::find(all.begin(), all.end(), op.slot) - all.begin();
    const auto begin = whole.begin() + rank * static_cast<ptrdiff_t>(op.desc.part_bytes());
    const std::vector<uint8_t> part(begin, begin + static_cast<ptrdiff_t>(op.desc.part_bytes()));
    return near(part, *op.target) ? std::optional(std::move(whole)) : std::nullopt;
  }
  // What lies behind the parts of an all-gather means nothing.
  if (op.target->size() < whole.size()) return std::nullopt;
  const auto end = op.target->begin() + static_cast<ptrdiff_t>(whole.size());
  std::vector<uint8_t> got(op.target->begin(), end);
  return near(whole, got) ? std::optional(std::move(got)) : std::nullopt;
}

void Checker::CheckError(const Ended& op, const std::vector<uint32_t>& givers) const {
  if (op.error->empty()) return;
  const std::vector<float> posted = ErrorOf(op.name, op.desc, op.slot);
  // An input that is left out has lost nothing, and keeps its error for the next time. But if all
  // inputs of a host are left out, what the host's sums have lost is added to one of their errors.
  const bool gives = std::find(givers.begin(), givers.end(), op.slot) != givers.end();
  const std::vector<uint8_t> about =
      gives ? std::vector<uint8_t>(op.error->size()) : BytesOf(posted);
  const double slack = SlackOf(op.name, op.desc, givers).error;
  const bool right = Near(DType::kFloat32, about, *op.error, slack);
  if (right) return;
  Fail(ToString(op.name) + " (" + longhaul::ToString(op.desc) + ") succeeded at slot " +
       std::to_string(op.slot) + ", and its error is not what encoding has lost");
}

void Checker::CheckCodec(const Ended& op, const peerd::OpInfo& info) {
  const bool right = HasSegments(info.algorithm) ? IsAmong(op.desc.quantization, info.codec)
                                                 : info.codec == Quantization::kNone;
  if (right) return;
  Fail(ToString(op.name) + " (" + longhaul::ToString(op.desc) + ") went by " +
       Name(info.algorithm) + " with codec " + Name(info.codec));
}

void Checker::CheckSucceeded(const Ended& op, const peerd::OpInfo& info) {
  Op& known = ops_[op.name];
  const std::string name = ToString(op.name);
  const std::vector<uint32_t> all = Participants(op.name, info.epoch, /*contributing=*/false);
  const std::vector<uint32_t> slots = Participants(op.name, info.epoch, /*contributing=*/true);
  if (std::find(all.begin(), all.end(), op.slot) == all.end()) {
    Fail(name + " succeeded at slot " + std::to_string(op.slot) +
         ", which takes no part in epoch " + longhaul::ToString(info.epoch));
  }
  const std::vector<MemberId> members = Members(op.name, info.epoch, /*contributing=*/true);
  if (info.members != members) {
    Fail(name + " says that its members are " + List(info.members) + ", not " + List(members));
  }
  if (slots.size() < op.desc.min_world) {
    Fail(name + " succeeded with " + List(slots) + ", fewer than it asked for");
  }
  for (const uint32_t slot : slots) {
    if (!known.posted.contains(slot)) {
      Fail(name + " succeeded without slot " + std::to_string(slot) + ", which did not post it");
    }
    if (!DescOf(seed_, op.name, slot).SameButForWorld(op.desc)) {
      Fail(name + " succeeded although slot " + std::to_string(slot) + " posted another one");
    }
  }
  const bool one_shot = IsOneShot(op.desc) || info.algorithm == Algorithm::kOneShot;
  const bool at_once = one_shot && op.desc.on_fault == OnFault::kRetry && Gathers(op.desc.kind) &&
                       !IsDirect(op.desc.kind);
  // The others go on without this member, and it does not know that yet.
  const auto gone = [&](Epoch epoch) {
    return at_once && info.epoch < epoch && AllGone(op.name, {op.slot}, epoch);
  };
  if (known.given_up && !gone(*known.given_up)) {
    Fail(name + " succeeded, although it was aborted and given up");
  }
  const auto unfit = known.unfit.find(known.posted.at(op.slot));
  if (known.aborted.contains(info.epoch) || (unfit != known.unfit.end() && !gone(unfit->second))) {
    Fail(name + " succeeded at one member and was aborted at another");
  }
  const std::vector<uint32_t> givers = Givers(op, info.epoch);
  CheckError(op, givers);
  CheckCodec(op, info);
  const auto whole = WholeOf(op, all, givers, info.codec != Quantization::kNone);
  if (!whole) {
    Fail(name + " (" + longhaul::ToString(op.desc) + ") at slot " + std::to_string(op.slot) +
         " is not the result over slots " + List(slots) + " of epoch " +
         longhaul::ToString(info.epoch));
  }
  const std::vector<uint8_t>& result = *whole;
  const bool older_at_once = info.epoch < known.result_epoch ? at_once : known.at_once;
  if (known.result && *known.result != result && older_at_once && Outlived(op, known, info.epoch)) {
    if (info.epoch < known.result_epoch) return;
    known.result.reset();
    known.holders.clear();
  }
  known.holders.insert(op.slot);
  if (!known.result) {
    known.result = result;
    known.participants = slots;
    known.result_epoch = info.epoch;
    known.at_once = at_once;
    known.algorithm = info.algorithm;
    known.codec = info.codec;
  } else if (known.codec != info.codec && known.result_epoch == info.epoch) {
    Fail(name + " has two codecs in one epoch: " + Name(known.codec) + " and " + Name(info.codec));
  } else if (known.algorithm != info.algorithm && known.result_epoch == info.epoch) {
    Fail(name + " went two ways in one epoch: " + Name(known.algorithm) + " and " +
         Name(info.algorithm));
  } else if (*known.result != result) {
    Fail(name + " has one result over slots " + List(known.participants) + " and another over " +
         List(slots));
  }
}

}  // namespace longhaul::sim
