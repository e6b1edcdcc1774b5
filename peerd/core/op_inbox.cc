#include "peerd/core/op_inbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// The most READYs of one key that wait for one peer's ops. A peer that has settled an op may
// announce the next op of the same tag, but it cannot settle that one without this peer. So one
// READY may wait; one more is tolerated. Refusals wait beside them.
constexpr size_t kReadiesAheadMax = 2;

bool IsRefusal(const PeerReady& ready) { return ready.refusal.has_value(); }

// Larger inputs and results that a READY carries. (Those of small ops are limited in number.)
uint64_t BytesCarried(const PeerReady& ready) {
  if (!MayCarryInput(ready.desc)) return 0;
  return ready.payload.size() + (ready.result ? ready.result->bytes.size() : 0);
}

}  // namespace

std::string PayloadProblem(const PeerReady& ready) {
  if (ready.refusal && (ready.result || !ready.payload.empty())) {
    return "READY " + ToString(ready.ordinal) + " is refused, and carries bytes";
  }
  const bool may_carry = IsOneShot(ready.desc) || MayCarryInput(ready.desc);
  const bool one_shot =
      (IsOneShot(ready.desc) && !ready.other_offer) || ready.input == ReadyInput::kCarried;
  if (ready.result) {
    const bool may =
        may_carry && !ready.other_offer && MayEndAtOnce(ready.desc) && ready.payload.empty();
    // The result of an all-gather has a part for each of its members.
    const bool fits = !ready.desc.InParts() || ready.result->members.size() <= ready.desc.world;
    if (may && fits && ready.result->bytes.size() == ready.desc.bytes() &&
        ready.result->epoch < ready.attempt) {
      return "";
    }
    return "READY " + ToString(ready.ordinal) + " carries a result of " +
           std::to_string(ready.result->bytes.size()) + " bytes from epoch " +
           ToString(ready.result->epoch) + ", which cannot be one of " + ToString(ready.desc) +
           " in attempt " + ToString(ready.attempt);
  }
  const uint64_t expected = one_shot ? OneShotPayloadBytes(ready.desc) : 0;
  if (ready.payload.size() == expected) return "";
  return "READY " + ToString(ready.ordinal) + " carries " + std::to_string(ready.payload.size()) +
         " bytes where " + std::to_string(expected) + " belong";
}

// ------------------------------------------------------------------------------ peers

bool OpInbox::Expects(PeerId peer, const EpochHistory& history) const {
  return expected_.contains(peer) || (!history.empty() && history.current().HasPeer(peer));
}

void OpInbox::Expect(std::set<PeerId> peers, const EpochHistory& history) {
  expected_ = std::move(peers);
  const auto stranger = [&](const auto& entry) { return !Expects(entry.first, history); };
  std::erase_if(unmatched_, stranger);
  std::erase_if(early_, stranger);
}

void OpInbox::Lose(PeerId peer, Epoch attempt) { lost_[peer] = std::max(lost_[peer], attempt); }

bool OpInbox::Lost(PeerId peer, Epoch attempt) const {
  const auto it = lost_.find(peer);
  return it != lost_.end() && attempt <= it->second;
}

// ------------------------------------------------------------------------------ frames

std::string OpInbox::KeepEarly(const PeerDone& done) {
  std::vector<Frame>& frames = early_[done.peer];
  if (frames.size() >= LH_READY_UNMATCHED_MAX) {
    return "too many frames of an attempt that has not begun";
  }
  frames.push_back(done);
  return "";
}

std::string OpInbox::KeepEarly(const PeerReady& ready) {
  std::vector<Frame>& frames = early_[ready.peer];
  if (frames.size() >= LH_READY_UNMATCHED_MAX) {
    return "too many frames of an attempt that has not begun";
  }
  uint64_t bytes = BytesCarried(ready);
  for (const Frame& each : frames) {
    const auto* const other = bytes == 0 ? nullptr : std::get_if<PeerReady>(&each);
    if (other != nullptr) bytes += BytesCarried(*other);
  }
  if (bytes > LH_READY_INPUTS_UNMATCHED_BYTES_MAX) {
    return "too long READYs of an attempt that has not begun";
  }
  frames.push_back(ready);
  return "";
}

std::string OpInbox::KeepUnmatched(const PeerReady& ready) {
  Waiting& waiting = unmatched_[ready.peer];
  if (waiting.count >= LH_READY_UNMATCHED_MAX) return "too many READYs that no op here has met";
  const uint64_t bytes = BytesCarried(ready);
  if (waiting.bytes + bytes > LH_READY_INPUTS_UNMATCHED_BYTES_MAX) {
    return "too long READYs that no op here has met";
  }
  std::deque<PeerReady>& queue = waiting.by_key[{ready.boundary, ready.tag, ready.set}];
  const size_t refused = std::count_if(queue.begin(), queue.end(), IsRefusal);
  if (ready.refusal && refused >= kRefusalsAheadMax) {
    const auto old = std::find_if(queue.begin(), queue.end(), IsRefusal);
    if (old->step >= ready.step) return "too many refusals of tag " + std::to_string(ready.tag);
    queue.erase(old);
    --waiting.count;
  } else if (!ready.refusal && queue.size() - refused >= kReadiesAheadMax) {
    return "too many READYs of tag " + std::to_string(ready.tag);
  }
  queue.push_back(ready);
  ++waiting.count;
  waiting.bytes += bytes;
  return "";
}

const PeerReady* OpInbox::Unmatched(PeerId peer, const OpKey& key) const {
  const auto from = unmatched_.find(peer);
  if (from == unmatched_.end()) return nullptr;
  const auto queue = from->second.by_key.find(key);
  return queue == from->second.by_key.end() ? nullptr : &queue->second.front();
}

PeerReady OpInbox::TakeUnmatched(PeerId peer, const OpKey& key) {
  const auto from = unmatched_.find(peer);
  Waiting& waiting = from->second;
  const auto queue = waiting.by_key.find(key);
  PeerReady ready = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) waiting.by_key.erase(queue);
  waiting.bytes -= BytesCarried(ready);
  if (--waiting.count == 0) unmatched_.erase(from);
  return ready;
}

Epoch OpInbox::LaterCall(PeerId peer, const OpKey& key) const {
  const auto from = unmatched_.find(peer);
  if (from == unmatched_.end()) return Epoch();
  const auto& by_key = from->second.by_key;
  for (auto it = by_key.upper_bound(key); it != by_key.end(); ++it) {
    const OpKey& later = it->first;
    if (later.tag == key.tag && later.set == key.set) return later.boundary;
  }
  return Epoch();
}

void OpInbox::ForgetBefore(Epoch boundary, const std::function<bool(const OpKey&)>& wanted) {
  for (auto from = unmatched_.begin(); from != unmatched_.end();) {
    const PeerId peer = from->first;
    std::vector<OpKey> old;
    for (const auto& [key, queue] : from->second.by_key) {
      if (key.boundary >= boundary) break;
      if (!wanted(key)) old.insert(old.end(), queue.size(), key);
    }
    ++from;  // the last READY that is taken ends the entry
    for (const OpKey& key : old) TakeUnmatched(peer, key);
  }
}

void OpInbox::BeginAttempt(Epoch attempt) {
  std::erase_if(lost_, [attempt](const auto& entry) { return entry.second != attempt; });
  unmatched_.clear();
}

std::vector<OpInbox::Frame> OpInbox::TakeEarly() {
  std::vector<Frame> all;
  for (auto& [peer, frames] : std::exchange(early_, {})) {
    std::move(frames.begin(), frames.end(), std::back_inserter(all));
  }
  return all;
}

void OpInbox::Reset(const EpochHistory& history) {
  lost_.clear();
  unmatched_.clear();
  Expect(std::exchange(expected_, {}), history);
}

// ------------------------------------------------------------------------------ for tests

void OpInbox::CheckInvariants() const {
  for (const auto& [peer, waiting] : unmatched_) {
    size_t count = 0;
    for (const auto& [key, queue] : waiting.by_key) {
      const size_t refused = std::count_if(queue.begin(), queue.end(), IsRefusal);
      LH_CHECK(!queue.empty() && refused <= kRefusalsAheadMax) << ToString(peer);
      LH_CHECK(queue.size() - refused <= kReadiesAheadMax) << ToString(peer);
      count += queue.size();
    }
    LH_CHECK(count == waiting.count && count <= LH_READY_UNMATCHED_MAX) << ToString(peer);
    LH_CHECK(waiting.bytes <= LH_READY_INPUTS_UNMATCHED_BYTES_MAX) << ToString(peer);
  }
  for (const auto& [peer, frames] : early_) {
    LH_CHECK(!frames.empty() && frames.size() <= LH_READY_UNMATCHED_MAX) << ToString(peer);
  }
}

}  // namespace longhaul::peerd
