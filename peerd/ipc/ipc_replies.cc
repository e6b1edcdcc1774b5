#include "peerd/ipc/ipc_replies.h"

#include <string.h>

#include <algorithm>

#include "proto/wire/limits.h"

namespace longhaul::peerd::ipc {

lh_ipc_reply MakeReply(uint32_t type, uint64_t call, uint64_t member, const Outcome& outcome) {
  lh_ipc_reply reply;
  memset(&reply, 0, sizeof reply);
  reply.magic = LH_IPC_MAGIC;
  reply.type = type;
  reply.call = call;
  reply.member = member;
  reply.status = static_cast<int32_t>(outcome.code);
  if (!outcome.ok()) {
    size_t length = std::min<size_t>(outcome.text.size(), LH_ERROR_TEXT_BYTES_MAX);
    // Do not cut the text inside a UTF-8 character.
    while (length > 0 && length < outcome.text.size() && (outcome.text[length] & 0xc0) == 0x80) {
      --length;
    }
    memcpy(reply.u.text, outcome.text.data(), length);
  }
  return reply;
}

void PutWorld(const World& world, lh_ipc_reply* reply) {
  reply->world.epoch = world.epoch.value();
  reply->world.member_id = world.member.value();
  reply->world.rank = world.rank;
  reply->world.size = world.size;
  reply->world.pending = world.pending;
  reply->world.background = world.background ? 1 : 0;
  reply->world.boundary = world.boundary.value();
  reply->world.step_epoch = world.step.epoch.value();
  reply->world.step_rank = world.step.rank;
  reply->world.step_size = world.step.size;
}

uint64_t Nanoseconds(int64_t us) { return us < 0 ? 0 : static_cast<uint64_t>(us) * 1000; }

void PutSync(const StateSyncInfo& info, lh_ipc_reply* reply) {
  if (info.background) reply->flags |= LH_IPC_BACKGROUND;
  if (info.resumed) reply->flags |= LH_IPC_RESUMED;
  if (info.changed) reply->flags |= LH_IPC_CHANGED;
  if (reply->status != 0) return;  // the error text has this place
  reply->u.sync.revision = info.revision;
  reply->u.sync.hash_high = info.state.high;
  reply->u.sync.hash_low = info.state.low;
  reply->u.sync.bytes = info.bytes;
  reply->u.sync.seconds_ns = Nanoseconds(info.total_us);
  reply->u.sync.sources = info.sources;
}

}  // namespace longhaul::peerd::ipc
