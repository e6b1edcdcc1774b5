// What a trainer registers as a state, checked against its arena.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "peerd/ipc/ipc_client.h"
#include "peerd/state/local_state.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

// The table of a state, once and for all: its memory may change under our eyes.
absl::StatusOr<std::vector<lh_ipc_tensor>> CopyTable(const Client& client,
                                                     const lh_ipc_state& wish);

// `regions`: those that it lies in.
absl::StatusOr<std::shared_ptr<LocalState>> MakeState(const Client& client,
                                                      const lh_ipc_state& wish,
                                                      const std::vector<lh_ipc_tensor>& table,
                                                      std::set<uint64_t>* regions);

}  // namespace longhaul::peerd::ipc
