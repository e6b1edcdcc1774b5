// Functions that fill the frames that trainers get (proto/wire/ipc.h).
#pragma once

#include <cstdint>

#include "base/outcome.h"
#include "peerd/core/values.h"
#include "peerd/state/local_state.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

lh_ipc_reply MakeReply(uint32_t type, uint64_t call, uint64_t member, const Outcome& outcome);
void PutWorld(const World& world, lh_ipc_reply* reply);
void PutSync(const StateSyncInfo& info, lh_ipc_reply* reply);
// Microseconds to nanoseconds. Returns 0 if `us` is negative.
uint64_t Nanoseconds(int64_t us);

}  // namespace longhaul::peerd::ipc
