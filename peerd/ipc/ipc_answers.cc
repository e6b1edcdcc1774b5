// What the server sends to trainers: answers to their requests, and news that they did not ask for.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "peerd/ipc/ipc_replies.h"
#include "peerd/ipc/ipc_server_impl.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd::ipc {

void TrainerServer::Answer(Client& client, uint64_t call, const Outcome& outcome) {
  client.calls.erase(call);
  connections_.Push(client, MakeReply(LH_IPC_DONE, call, 0, outcome));
}

void TrainerServer::AnswerJoin(Client& client, uint64_t call, LocalId local, const World& world,
                               bool newcomer) {
  client.calls.erase(call);
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, local.value(), {});
  PutWorld(world, &reply);
  if (newcomer) reply.flags |= LH_IPC_NEWCOMER;
  // A later WORLD frame must follow this reply, so it must not overwrite an earlier WORLD frame.
  members_.at(local).world_frame = 0;
  connections_.Push(client, reply);
}

Member* TrainerServer::Find(LocalId local) {
  const auto it = members_.find(local);
  if (it == members_.end() || it->second.client->ending) return nullptr;
  return &it->second;
}

void TrainerServer::Forget(LocalId local, const Outcome& outcome) {
  const auto it = members_.find(local);
  Member member = std::move(it->second);
  Client& client = *member.client;
  members_.erase(it);
  client.locals.erase(local);
  client.gone.emplace_back(local, outcome);
  if (client.gone.size() > LH_LOCAL_MEMBERS_MAX) client.gone.pop_front();
  posts_open_ -= static_cast<uint32_t>(member.posts.size());
  for (const auto& [call, regions] : member.posts) {
    for (const uint64_t region : regions) --client.regions.at(region).posts;
    Answer(client, call, outcome);
  }
  EndSync(member);
  EndHold(member);
  if (member.take_call != 0) Answer(client, member.take_call, outcome);
  if (member.step_call != 0 && member.step_sync) {
    AnswerWithSync(client, member.step_call, local, outcome, member.step_sync->second);
  } else if (member.step_call != 0) {
    Answer(client, member.step_call, outcome);
  }
  if (member.sync_call != 0) Answer(client, member.sync_call, outcome);
  // The leave has succeeded, whatever the reason for which the member is out.
  if (member.leave_call != 0) Answer(client, member.leave_call, {});
}

void TrainerServer::JoinDone(LocalId local, const Outcome& outcome, const World& world,
                             bool newcomer) {
  Member* const member = Find(local);
  if (member == nullptr || member->admitted) return;
  Client& client = *member->client;
  if (outcome.ok()) {
    member->admitted = true;
    AnswerJoin(client, member->join_call, local, world, newcomer);
  } else {
    Answer(client, member->join_call, outcome);
    Forget(local, outcome);
  }
}

void TrainerServer::StepDone(LocalId local, const Outcome& outcome, const World& world) {
  Member* const member = Find(local);
  if (member == nullptr || member->step_call == 0) return;
  LH_CHECK(member->sync_state == 0) << "a step is over before its sync";
  Client& client = *member->client;
  const uint64_t call = std::exchange(member->step_call, 0);
  const auto sync = std::exchange(member->step_sync, std::nullopt);
  const bool sync_failed = sync && !sync->first.ok();
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, local.value(),
                                 outcome.ok() && sync_failed ? sync->first : outcome);
  if (outcome.ok()) {
    reply.flags |= LH_IPC_PASSED;
    PutWorld(world, &reply);
    // A later WORLD frame must follow this reply, so it must not overwrite an earlier WORLD frame.
    member->world_frame = 0;
  }
  if (sync) PutSync(sync->second, &reply);
  client.calls.erase(call);
  connections_.Push(client, reply);
}

void TrainerServer::EndSync(Member& member) {
  if (member.sync_state == 0) return;
  member.client->states.at(std::exchange(member.sync_state, 0)).syncing = false;
}

void TrainerServer::EndHold(Member& member) {
  if (member.held_state == 0) return;
  member.client->states.at(std::exchange(member.held_state, 0)).syncing = false;
}

void TrainerServer::SyncDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) {
  Member* const member = Find(local);
  if (member == nullptr || member->sync_state == 0) return;
  const uint64_t state = member->sync_state;
  EndSync(*member);
  if (!info.background) {
    EndHold(*member);
  } else {
    member->held_state = state;
    member->client->states.at(state).syncing = true;
  }
  if (member->sync_call == 0) {
    member->step_sync = {outcome, info};
    return;
  }
  AnswerWithSync(*member->client, std::exchange(member->sync_call, 0), local, outcome, info);
}

void TrainerServer::TakeDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) {
  Member* const member = Find(local);
  if (member == nullptr || member->take_call == 0) return;
  if (outcome.ok()) EndHold(*member);
  AnswerWithSync(*member->client, std::exchange(member->take_call, 0), local, outcome, info);
}

void TrainerServer::AnswerWithSync(Client& client, uint64_t call, LocalId local,
                                   const Outcome& outcome, const StateSyncInfo& info) {
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, local.value(), outcome);
  PutSync(info, &reply);
  client.calls.erase(call);
  connections_.Push(client, reply);
}

void TrainerServer::SyncProgress(LocalId local, const control::FetchProgress& progress) {
  Member* const member = Find(local);
  if (member == nullptr || (member->sync_state == 0 && member->held_state == 0)) return;
  lh_ipc_reply reply = MakeReply(LH_IPC_PROGRESS, 0, local.value(), {});
  reply.u.progress.bytes_done = progress.bytes_done;
  reply.u.progress.bytes_total = progress.bytes_total;
  reply.u.progress.bytes_per_second = progress.bytes_per_second;
  reply.u.progress.sources = progress.sources;
  connections_.PushLatest(*member->client, reply, &member->progress_frame);
}

void TrainerServer::LeaveDone(LocalId local, const Outcome& outcome) {
  Member* const member = Find(local);
  if (member == nullptr || member->leave_call == 0) return;
  if (!outcome.ok()) {
    Answer(*member->client, std::exchange(member->leave_call, 0), outcome);
    return;
  }
  const Outcome left{Code::kAborted,
                     member->admitted ? "the member has left" : "the join was withdrawn"};
  if (!member->admitted) Answer(*member->client, member->join_call, left);
  Forget(local, left);
}

void TrainerServer::PutOpMembers(Client& client, uint64_t call,
                                 const std::vector<MemberId>& members, lh_ipc_op_info* info) {
  const size_t inside = std::min<size_t>(members.size(), LH_IPC_OP_MEMBERS_MAX);
  for (size_t i = 0; i < inside; ++i) info->member_ids[i] = members[i].value();
  for (size_t first = inside; first < members.size(); first += LH_IPC_MEMBERS_PAGE) {
    lh_ipc_reply reply = MakeReply(LH_IPC_OP_MEMBERS, call, 0, {});
    lh_ipc_members_page& page = reply.u.members;
    page.first = static_cast<uint32_t>(first);
    page.count =
        static_cast<uint32_t>(std::min<size_t>(members.size() - first, LH_IPC_MEMBERS_PAGE));
    for (uint32_t i = 0; i < page.count; ++i) page.member_ids[i] = members[first + i].value();
    connections_.Push(client, reply);
  }
}

void TrainerServer::PostDone(const PostRef& post, const Outcome& outcome, const OpInfo& info,
                             const OpTraffic& traffic) {
  Member* const member = Find(post.local);
  if (member == nullptr) return;
  const auto it = member->posts.find(post.call);
  if (it == member->posts.end()) return;
  Client& client = *member->client;
  for (const uint64_t region : it->second) --client.regions.at(region).posts;
  member->posts.erase(it);
  --posts_open_;
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, post.call, post.local.value(), outcome);
  if (outcome.ok()) {
    reply.u.op.epoch = info.epoch.value();
    reply.u.op.bytes_sent = traffic.bytes_sent;
    reply.u.op.bytes_received = traffic.bytes_received;
    reply.u.op.blocks_not_finite = traffic.blocks_not_finite;
    reply.u.op.seconds_total_ns = Nanoseconds(info.total_us);
    reply.u.op.seconds_wait_ns = Nanoseconds(info.wait_us);
    reply.u.op.size = static_cast<uint32_t>(info.members.size());
    reply.u.op.hosts = info.hosts;
    PutOpMembers(client, post.call, info.members, &reply.u.op);
    reply.u.op.retries = info.retries;
    reply.u.op.algorithm = static_cast<uint32_t>(info.algorithm);
    reply.u.op.quantization = static_cast<uint32_t>(info.codec);
  }
  client.calls.erase(post.call);
  connections_.Push(client, reply);
}

void TrainerServer::WorldChanged(LocalId local, const World& world) {
  Member* const member = Find(local);
  // Before the admission the trainer needs no news: JoinDone() will bring the whole world.
  if (member == nullptr || !member->admitted) return;
  Client& client = *member->client;
  lh_ipc_reply reply = MakeReply(LH_IPC_WORLD, 0, local.value(), {});
  PutWorld(world, &reply);
  connections_.PushLatest(client, reply, &member->world_frame);
}

void TrainerServer::MemberGone(LocalId local, const Outcome& outcome) {
  Member* const member = Find(local);
  if (member == nullptr) return;
  Client& client = *member->client;
  if (!member->admitted) Answer(client, member->join_call, outcome);
  // Send GONE before the answers, so that the trainer knows why its calls fail.
  connections_.Push(client, MakeReply(LH_IPC_GONE, 0, local.value(), outcome));
  Forget(local, outcome);
}

}  // namespace longhaul::peerd::ipc
