#include "tests/sim/world.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::sim {

void World::At(Tick when, std::function<void()> event) {
  LH_CHECK(when >= now_);
  queue_.push_back({when, next_number_++, std::move(event)});
  std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
}

void World::On(Node* node, Tick when, std::function<void()> event) {
  At(when, [node, life = node->life, event = std::move(event)] {
    if (node->life != life) return;
    if (node->frozen || !node->backlog.empty()) {
      node->backlog.push_back(event);
    } else {
      event();
    }
  });
}

bool World::RunOne(Tick limit) {
  if (queue_.empty() || queue_.front().when > limit) return false;
  std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
  const Event event = std::move(queue_.back());
  queue_.pop_back();
  now_ = event.when;
  ++events_;
  event.run();
  return true;
}

void World::Skip(Tick until) {
  LH_CHECK(queue_.empty() || queue_.front().when >= until);
  now_ = std::max(now_, until);
}

void World::Kill(Node* node) {
  node->alive = false;
  node->frozen = false;
  ++node->life;
  node->backlog.clear();
}

void World::Freeze(Node* node) { node->frozen = true; }

void World::Thaw(Node* node) {
  if (!node->frozen) return;
  node->frozen = false;
  At(now_, [this, node, life = node->life] { CatchUp(node, life); });
}

// Runs one event at a time, because each event may freeze or kill the node.
void World::CatchUp(Node* node, uint64_t life) {
  if (node->life != life || node->frozen || node->backlog.empty()) return;
  const std::function<void()> event = std::move(node->backlog.front());
  node->backlog.pop_front();
  // Queued before the event runs. So the events that it makes for this moment run after those that
  // had arrived before.
  At(now_, [this, node, life] { CatchUp(node, life); });
  event();
}

Tick World::Arrival(const Node& from, const Node& to) {
  Tick arrival = now_ + Between(latency_.low_us, latency_.high_us);
  for (const Blocked& blocked : blocked_) {
    if (blocked.from != from.index || blocked.to != to.index || blocked.until <= now_) continue;
    // What was lost on the blocked path is sent again after a while.
    arrival = std::max(arrival, blocked.until + Between(0, latency_.high_us));
  }
  return arrival;
}

void World::Block(int from, int to, Tick until) {
  std::erase_if(blocked_, [&](const Blocked& blocked) { return blocked.until <= now_; });
  blocked_.push_back({from, to, until});
}

}  // namespace longhaul::sim
