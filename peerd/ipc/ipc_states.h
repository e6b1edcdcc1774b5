// Makes a LocalState of a state that a trainer registers. Checks that all of it lies in the
// trainer's arena.
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

// Copies the table of the state's tensors. All checks use the copy, because the trainer can write
// to the table at any time. InvalidArgument: the table is not in the arena.
absl::StatusOr<std::vector<lh_ipc_tensor>> CopyTable(const Client& client,
                                                     const lh_ipc_state& wish);

// Makes the state from the copied table. Adds to `regions` the regions in which the state lies.
// InvalidArgument: the text says what is wrong with the table.
absl::StatusOr<std::shared_ptr<LocalState>> MakeState(const Client& client,
                                                      const lh_ipc_state& wish,
                                                      const std::vector<lh_ipc_tensor>& table,
                                                      std::set<uint64_t>* regions);

}  // namespace longhaul::peerd::ipc
