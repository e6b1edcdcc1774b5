#include "coordinator/grpc/stranger_table.h"

#include <algorithm>

namespace longhaul::coordinator {
namespace {

// So many may be on their way out at a time. Each makes room for one that waits.
constexpr size_t kLeavingMax = 8;

}  // namespace

std::optional<uint64_t> StrangerTable::Add(uint64_t id, const std::string& address) {
  std::optional<uint64_t> closed;
  if (waiting() >= waiting_max_) {
    const auto most = std::max_element(
        shares_.begin(), shares_.end(),
        [](const auto& a, const auto& b) { return a.second.waiting < b.second.waiting; });
    for (const auto& [other, stranger] : strangers_) {
      if (stranger.served || stranger.address != most) continue;
      closed = other;
      break;
    }
    if (closed) Remove(*closed);
  }
  const Shares::iterator home = shares_.try_emplace(address).first;
  ++home->second.waiting;
  strangers_.emplace(id, Stranger{home});
  return closed;
}

void StrangerTable::Ready(uint64_t id) {
  const auto it = strangers_.find(id);
  if (it != strangers_.end()) it->second.ready = true;
}

StrangerTable::Step StrangerTable::Next(Tick now) {
  due_ = kNever;
  Stranger* next = nullptr;
  uint64_t next_id = 0;
  for (auto& [id, stranger] : strangers_) {
    if (stranger.served || !stranger.ready) continue;
    if (next != nullptr && stranger.share().served >= next->share().served) continue;
    next = &stranger;
    next_id = id;
  }
  if (next == nullptr) return {};
  Share& share = next->share();
  if (served_ < served_max_) {
    next->served = true;
    next->since = now;
    ++served_;
    ++share.served;
    --share.waiting;
    return {.serve = next_id};
  }
  if (leaving_ >= kLeavingMax) return {};
  // The oldest of the address with the most.
  Stranger* out = nullptr;
  uint64_t out_id = 0;
  for (auto& [id, stranger] : strangers_) {
    if (!stranger.served || stranger.leaving) continue;
    if (out != nullptr && stranger.share().served <= out->share().served) continue;
    out = &stranger;
    out_id = id;
  }
  if (out == nullptr) return {};
  if (out->share().served <= share.served + 1 && now < out->since + kLeastUs) {
    due_ = out->since + kLeastUs;
    return {};
  }
  out->leaving = true;
  ++leaving_;
  --out->share().served;
  return {.put_out = out_id};
}

void StrangerTable::Remove(uint64_t id) {
  const auto it = strangers_.find(id);
  if (it == strangers_.end()) return;
  const Stranger& stranger = it->second;
  Share& share = stranger.share();
  if (!stranger.served) {
    --share.waiting;
  } else {
    --served_;
    if (stranger.leaving) {
      --leaving_;
    } else {
      --share.served;
    }
  }
  if (share.served == 0 && share.waiting == 0) shares_.erase(stranger.address);
  strangers_.erase(it);
}

}  // namespace longhaul::coordinator
