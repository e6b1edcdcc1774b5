#include "peerd/transport/segment_queue.h"

#include <utility>

#include "base/check.h"

namespace longhaul::peerd {

std::deque<OutgoingSegment>* SegmentQueue::QueueOf(FrameType type) {
  if (type == FrameType::kPart) return &parts_;
  return type == FrameType::kChunkData ? &chunks_ : &ops_;
}

void SegmentQueue::Push(const OutgoingSegment& segment) {
  QueueOf(segment.header.type)->push_back(segment);
}

void SegmentQueue::PushFront(const std::vector<OutgoingSegment>& segments) {
  for (auto it = segments.rbegin(); it != segments.rend(); ++it) {
    QueueOf(it->header.type)->push_front(*it);
  }
}

// Ops go first and are never behind. So while both kinds wait, ops get half of the link or more.
std::deque<OutgoingSegment>* SegmentQueue::Turn() {
  if (empty()) return nullptr;
  if (!parts_.empty()) return &parts_;
  if (ops_.empty() || chunks_.empty()) {
    chunks_ahead_ = 0;
    return ops_.empty() ? &chunks_ : &ops_;
  }
  return chunks_ahead_ < 0 ? &chunks_ : &ops_;
}

uint64_t SegmentQueue::bytes() const {
  uint64_t sum = 0;
  for (const OutgoingSegment& segment : parts_) sum += segment.header.payload_bytes;
  for (const OutgoingSegment& segment : ops_) sum += segment.header.payload_bytes;
  for (const OutgoingSegment& segment : chunks_) sum += segment.header.payload_bytes;
  return sum;
}

const OutgoingSegment* SegmentQueue::Next() {
  const std::deque<OutgoingSegment>* const queue = Turn();
  return queue == nullptr ? nullptr : &queue->front();
}

OutgoingSegment SegmentQueue::Pop() {
  std::deque<OutgoingSegment>* const queue = Turn();
  LH_CHECK(queue != nullptr);
  OutgoingSegment segment = std::move(queue->front());
  const int64_t bytes = segment.header.payload_bytes;
  const bool both = queue != &parts_ && !ops_.empty() && !chunks_.empty();
  if (both) chunks_ahead_ += queue == &chunks_ ? bytes : -bytes;
  queue->pop_front();
  return segment;
}

std::vector<uint64_t> SegmentQueue::Drop(FrameType type,
                                         const std::unordered_set<uint64_t>& cookies) {
  std::vector<uint64_t> dropped;
  std::erase_if(*QueueOf(type), [&](const OutgoingSegment& segment) {
    if (!cookies.contains(segment.cookie)) return false;
    dropped.push_back(segment.cookie);
    return true;
  });
  return dropped;
}

std::vector<uint64_t> SegmentQueue::DropAll(FrameType type) {
  std::vector<uint64_t> dropped;
  std::deque<OutgoingSegment>* const queue = QueueOf(type);
  for (const OutgoingSegment& segment : *queue) dropped.push_back(segment.cookie);
  queue->clear();
  return dropped;
}

}  // namespace longhaul::peerd
