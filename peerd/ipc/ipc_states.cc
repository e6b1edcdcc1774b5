#include "peerd/ipc/ipc_states.h"

#include <string.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/wire/ipc_check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd::ipc {
namespace {

// Returns InvalidArgument if any two of all tensors and inboxes overlap, because bytes that are
// fetched for one would change the other. (An inbox may be the same memory as its own tensor.)
absl::Status CheckApart(const LocalState& state) {
  std::vector<std::pair<const uint8_t*, size_t>> order;  // address, number of the tensor
  for (size_t i = 0; i < state.manifest.size(); ++i) {
    if (state.manifest[i].bytes == 0) continue;
    order.emplace_back(state.places[i], i);
    if (state.inbox[i] != state.places[i]) order.emplace_back(state.inbox[i], i);
  }
  std::sort(order.begin(), order.end());
  for (size_t k = 1; k < order.size(); ++k) {
    const auto& [low, first] = order[k - 1];
    const auto& [high, second] = order[k];
    if (low + state.manifest[first].bytes <= high) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensors \"", state.manifest[first].name,
                                                   "\" and \"", state.manifest[second].name,
                                                   "\" share memory"));
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const Manifest& manifest) {
  std::set<std::string> names;
  for (const StateTensor& tensor : manifest) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two tensors are called \"", tensor.name, "\""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<lh_ipc_tensor>> CopyTable(const Client& client,
                                                     const lh_ipc_state& wish) {
  const uint64_t bytes = uint64_t{wish.count} * sizeof(lh_ipc_tensor);
  const uint8_t* const from = Locate(client, wish.table, bytes);
  if (from == nullptr) return absl::InvalidArgumentError("its table lies outside of the arena");
  std::vector<lh_ipc_tensor> table(wish.count);
  memcpy(table.data(), from, bytes);
  return table;
}

absl::StatusOr<std::shared_ptr<LocalState>> MakeState(const Client& client,
                                                      const lh_ipc_state& wish,
                                                      const std::vector<lh_ipc_tensor>& table,
                                                      std::set<uint64_t>* regions) {
  auto state = std::make_shared<LocalState>();
  std::vector<uint8_t*> inboxes;
  uint64_t bytes = 0;
  uint64_t chunks = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    const lh_ipc_tensor& entry = table[i];
    const std::string error = IpcTensorError(entry);
    if (!error.empty()) return absl::InvalidArgumentError(absl::StrCat("tensor ", i, ": ", error));
    if (entry.bytes > LH_STATE_BYTES_MAX - bytes) {
      return absl::InvalidArgumentError("all together have more than 2^50 bytes");
    }
    uint8_t* const data = entry.bytes == 0 ? nullptr : Locate(client, entry.data, entry.bytes);
    uint8_t* const inbox = entry.bytes == 0 ? nullptr : Locate(client, entry.inbox, entry.bytes);
    if (entry.bytes != 0 && (data == nullptr || inbox == nullptr)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", i, " \"", entry.name, "\"",
                                                     data == nullptr ? "" : " has an inbox that",
                                                     " lies outside of the arena"));
    }
    if (data != nullptr) regions->insert({entry.data.region, entry.inbox.region});
    state->manifest.push_back({entry.name,
                               entry.dtype,
                               {entry.shape, entry.shape + entry.dims},
                               entry.bytes,
                               (entry.flags & LH_IPC_ALLOW_UNEQUAL) != 0});
    state->places.push_back(data);
    inboxes.push_back(inbox);
    bytes += entry.bytes;
    chunks += CountChunks(entry.bytes);
  }
  uint8_t* const changed = chunks == 0 ? nullptr : Locate(client, wish.changed, chunks);
  if (chunks != 0 && changed == nullptr) {
    return absl::InvalidArgumentError("the marks of its chunks lie outside of the arena");
  }
  if (changed != nullptr) {
    state->changed = {changed, chunks};
    regions->insert(wish.changed.region);
  }
  LH_RETURN_IF_ERROR(CheckNames(state->manifest));
  state->inbox = inboxes;
  LH_RETURN_IF_ERROR(CheckApart(*state));
  // Allocate digests only after CheckApart(): the size of the arena then limits their number.
  for (const StateTensor& tensor : state->manifest) {
    state->digests.emplace_back(CountChunks(tensor.bytes));
  }
  state->FetchInto(std::move(inboxes));
  auto memory = std::make_shared<std::vector<std::shared_ptr<const ArenaRegion>>>();
  for (const uint64_t region : *regions) memory->push_back(client.regions.at(region).region);
  state->memory = std::move(memory);
  auto declared = std::make_shared<MemoryState>();
  declared->manifest = state->manifest;
  declared->places.resize(state->places.size());
  declared->digests.resize(state->digests.size());
  state->declared = std::move(declared);
  return state;
}

}  // namespace longhaul::peerd::ipc
