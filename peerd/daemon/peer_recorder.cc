#include "peerd/daemon/peer_recorder.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/outcome.h"

namespace longhaul::peerd {
namespace {

// A member numbers its calls one by one and has at most LH_OPS_OPEN_MAX open ops, so the open ops
// of a few members do not overwrite each other.
constexpr size_t kOpenSlots = 4096;
constexpr size_t kReadySlots = 512;

constexpr uint64_t kMix = 0x9e3779b97f4a7c15;

// Names an op in flight. Two ops with the same key would only mix up for whom they waited.
uint64_t KeyOf(const GroupKey& group, uint64_t tag) {
  uint64_t key = tag * kMix + group.group;
  for (const char c : group.run) key = (key ^ static_cast<unsigned char>(c)) * kMix;
  return key ^ key >> 32;
}

std::string Why(const Outcome& outcome) {
  return absl::StrCat(NameOf(outcome.code), outcome.text.empty() ? "" : ": ", outcome.text);
}

}  // namespace

PeerRecorder::PeerRecorder(Recorder* recorder, std::function<void(std::string_view)> fault)
    : recorder_(recorder), fault_(std::move(fault)), open_(kOpenSlots), readies_(kReadySlots) {}

// ------------------------------------------------------------------------------ ops

PeerRecorder::OpenOp& PeerRecorder::OpenAt(const PostRef& post) {
  return open_[(post.local.value() * kMix + post.call) % open_.size()];
}

void PeerRecorder::OnPost(const LocalPost& post, Tick now) {
  OpenOp& open = OpenAt(post.post);
  open.post = post.post;
  Record& record = open.record;
  record = Record();
  record.time_us = now.us;
  record.kind = static_cast<uint8_t>(RecordKind::kOp);
  record.flags = kRecordOpOpen;
  record.tag = post.tag;
  record.bytes = post.desc.bytes();
  record.algorithm = static_cast<uint8_t>(post.desc.algorithm);
  if (const auto member = members_.find(post.post.local); member != members_.end()) {
    record.group = member->second.group.group;
    record.member = member->second.member.value();
    SetText(record.run, member->second.group.run);
  }
  recorder_->ops().Add(&record);
}

void PeerRecorder::OnReady(const PeerReady& ready, Tick now) {
  const uint64_t key = KeyOf(ready.group, ready.tag);
  Readies& readies = ReadiesAt(key);
  if (readies.key != key) {
    readies.key = key;
    readies.last.fill({});
  }
  readies.last[readies.next++ % readies.last.size()] = {ready.peer, now};
}

PeerId PeerRecorder::LastReady(uint64_t key, Tick posted, Tick ended) const {
  const Readies& readies = readies_[key % readies_.size()];
  if (readies.key != key) return PeerId();
  Readies::Ready last;
  for (const Readies::Ready& ready : readies.last) {
    // A later one is about the next op with this tag.
    if (ready.peer && ready.time > posted && ready.time <= ended && ready.time >= last.time) {
      last = ready;
    }
  }
  return last.peer;
}

void PeerRecorder::OnDone(const PostDone& done, Tick now) {
  OpenOp& open = OpenAt(done.post);
  if (open.record.sequence == 0 || open.post != done.post) return;
  Record& record = open.record;
  const Tick posted{record.time_us};
  record.flags = 0;
  record.code = static_cast<uint8_t>(done.outcome.code);
  record.epoch = done.info.epoch.value();
  record.algorithm = static_cast<uint8_t>(done.info.algorithm);
  record.world_size = static_cast<uint32_t>(done.info.members.size());
  record.retries = done.info.retries;
  record.wait_us = std::max<int64_t>(0, done.info.wait_us);
  record.transfer_us = std::max<int64_t>(0, done.info.transfer_us);
  record.total_us = std::max<int64_t>(0, now - posted);
  const auto member = members_.find(done.post.local);
  if (member != members_.end()) {
    // READYs come as events, so the READY that ended the wait came a little before the core saw it.
    const Tick ended = done.outcome.ok() ? posted + record.wait_us : now;
    record.peer = LastReady(KeyOf(member->second.group, record.tag), posted, ended).value();
    record.member = member->second.member.value();
  }
  SetText(record.text, done.outcome.text);
  recorder_->ops().Update(record);
  record.sequence = 0;
  if (done.outcome.code == Code::kAborted) fault_(absl::StrCat("op aborted: ", done.outcome.text));
}

// ------------------------------------------------------------------------------ events

void PeerRecorder::OnEvent(const Event& event, Tick now) {
  if (const auto* ready = std::get_if<PeerReady>(&event)) {
    OnReady(*ready, now);
  } else if (const auto* post = std::get_if<LocalPost>(&event)) {
    OnPost(*post, now);
  } else if (const auto* from = std::get_if<FromCoordinator>(&event)) {
    OnMessage(from->message, now);
  } else if (std::holds_alternative<CoordinatorUp>(event)) {
    Tell(RecordKind::kCoordinator, now, "the coordinator is reached");
  } else if (std::holds_alternative<CoordinatorDown>(event)) {
    Tell(RecordKind::kCoordinator, now, "the coordinator is lost");
  } else if (const auto* up = std::get_if<LinkUp>(&event)) {
    const GroupKey run{up->run, 0};
    Tell(RecordKind::kLink, now, "link up", &run, {}, {}, up->peer);
  } else if (const auto* down = std::get_if<LinkDown>(&event)) {
    const GroupKey run{down->run, 0};
    Tell(RecordKind::kLink, now, absl::StrCat("link lost: ", down->reason), &run, {}, {},
         down->peer, Code::kUnavailable);
  } else if (const auto* join = std::get_if<LocalJoin>(&event)) {
    members_[join->local] = {join->group, MemberId()};
    TellOf(join->local, RecordKind::kMember, now, absl::StrCat("trainer joins: ", join->name));
  } else if (const auto* died = std::get_if<LocalDied>(&event)) {
    TellOf(died->local, RecordKind::kMember, now, absl::StrCat("trainer died: ", died->reason),
           Code::kUnavailable);
    // A member that was never admitted gets no MemberGone.
    const auto member = members_.find(died->local);
    if (member != members_.end() && !member->second.member) members_.erase(member);
  } else if (std::holds_alternative<DrainRequested>(event)) {
    Tell(RecordKind::kMember, now, "peerd drains");
  }
}

void PeerRecorder::OnMessage(const control::CoordinatorMessage& message, Tick now) {
  if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
    Tell(RecordKind::kEpoch, now,
         absl::StrCat("epoch ", prepare->epoch.value(), " is prepared",
                      prepare->freeze ? " and freezes ops: " : ": ", prepare->cause),
         &prepare->group, prepare->epoch);
  } else if (const auto* commit = std::get_if<control::CommitEpoch>(&message)) {
    Tell(RecordKind::kEpoch, now, absl::StrCat("epoch ", commit->epoch.value(), " holds"),
         &commit->group, commit->epoch);
  } else if (const auto* abort = std::get_if<control::AbortEpoch>(&message)) {
    Tell(RecordKind::kEpoch, now,
         absl::StrCat("epoch ", abort->epoch.value(), " is given up: ", abort->reason),
         &abort->group, abort->epoch);
  } else if (const auto* removed = std::get_if<control::Removed>(&message)) {
    const bool left = removed->why == control::Removal::kLeft;
    const std::string text =
        absl::StrCat(ToString(removed->member), " is removed, ", NameOf(removed->why),
                     removed->reason.empty() ? "" : ": ", removed->reason);
    Tell(left ? RecordKind::kMember : RecordKind::kFault, now, text, &removed->group, {},
         removed->member, {}, left ? Code::kOk : Code::kEvicted);
    if (!left) fault_(text);
  }
}

void PeerRecorder::OnAction(const Action& action, Tick now) {
  if (const auto* done = std::get_if<PostDone>(&action)) {
    OnDone(*done, now);
  } else if (const auto* join = std::get_if<JoinDone>(&action)) {
    OnJoin(*join, now);
  } else if (const auto* gone = std::get_if<MemberGone>(&action)) {
    TellOf(gone->local, RecordKind::kMember, now,
           absl::StrCat("member is gone, ", Why(gone->outcome)), gone->outcome.code);
    members_.erase(gone->local);
  } else if (const auto* transfer = std::get_if<StartTransfer>(&action)) {
    TellOf(transfer->local, RecordKind::kSync, now,
           absl::StrCat("sync fetches revision ", transfer->revision, " from ",
                        transfer->sources.size(), " members"));
  } else if (const auto* sync = std::get_if<SyncDone>(&action)) {
    if (sync->outcome.ok() && sync->bytes == 0) return;
    TellOf(sync->local, RecordKind::kSync, now,
           absl::StrCat("sync ended at revision ", sync->revision, ", ", sync->bytes,
                        " bytes fetched, ", Why(sync->outcome)),
           sync->outcome.code);
  } else if (const auto* take = std::get_if<TakeDone>(&action)) {
    TellOf(take->local, RecordKind::kSync, now,
           absl::StrCat("take ended at revision ", take->revision, ", ", take->bytes,
                        " bytes fetched, ", Why(take->outcome)),
           take->outcome.code);
  } else if (const auto* refuse = std::get_if<RefuseCoordinator>(&action)) {
    Tell(RecordKind::kCoordinator, now, absl::StrCat("coordinator refused: ", refuse->reason));
  } else if (const auto* over = std::get_if<FaultOver>(&action)) {
    const std::string text =
        absl::StrCat("fault over: agreed in ", over->agree_us / 1000, " ms",
                     over->resume_us < 0
                         ? std::string(", no op was redone")
                         : absl::StrCat(", first redone op after ", over->resume_us / 1000, " ms"));
    Tell(RecordKind::kFault, now, text, &over->group);
    fault_(text);
  }
}

void PeerRecorder::OnJoin(const JoinDone& join, Tick now) {
  if (const auto member = members_.find(join.local); member != members_.end()) {
    member->second.member = join.world.member;
  }
  TellOf(join.local, RecordKind::kMember, now,
         join.outcome.ok() ? absl::StrCat("member is admitted, world size ", join.world.size)
                           : absl::StrCat("join failed, ", Why(join.outcome)),
         join.outcome.code);
  if (!join.outcome.ok()) members_.erase(join.local);
}

void PeerRecorder::OnLanesLost(uint64_t total, Tick now) {
  if (total == lanes_lost_) return;
  Tell(RecordKind::kLanes, now, absl::StrCat(total - lanes_lost_, " lanes lost"), nullptr, {}, {},
       {}, Code::kUnavailable);
  lanes_lost_ = total;
}

void PeerRecorder::TellOf(LocalId local, RecordKind kind, Tick now, std::string_view text,
                          Code code) {
  const auto member = members_.find(local);
  if (member == members_.end()) return Tell(kind, now, text, nullptr, {}, {}, {}, code);
  Tell(kind, now, text, &member->second.group, {}, member->second.member, {}, code);
}

void PeerRecorder::Tell(RecordKind kind, Tick now, std::string_view text, const GroupKey* group,
                        Epoch epoch, MemberId member, PeerId peer, Code code) {
  Record record;
  record.time_us = now.us;
  record.kind = static_cast<uint8_t>(kind);
  record.code = static_cast<uint8_t>(code);
  record.epoch = epoch.value();
  record.member = member.value();
  record.peer = peer.value();
  if (group != nullptr) {
    record.group = group->group;
    SetText(record.run, group->run);
  }
  SetText(record.text, text);
  recorder_->events().Add(&record);
}

}  // namespace longhaul::peerd
