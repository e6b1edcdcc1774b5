// Traffic between the peers of a test, which checks itself.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "peerd/transport/testing.h"

namespace longhaul::peerd {

// Numbered traffic of ops and of transfers between two peers. Every segment and every frame has to
// arrive exactly once with the right bytes, and frames in order.
class Traffic {
 public:
  explicit Traffic(PeerWorld* world) : world_(world) {
    for (auto& peer : world->peers) {
      peer->scatter = true;
      peer->memory.resize(1 << 20);
      for (size_t b = 0; b < peer->memory.size(); ++b) {
        peer->memory[b] = static_cast<uint8_t>(b * 13 + b / 241);  // the same at all peers
      }
    }
  }

  void Segment(int from, int to, uint64_t offset, uint32_t bytes, uint64_t op = 1) {
    const uint64_t cookie = next_++;
    if (cookie % 3 == 0) {
      world_->at(from).SendChunk(world_->at(to).id, offset, bytes, cookie, op);
    } else {
      world_->at(from).Send(world_->at(to).id, offset, bytes, cookie, op);
    }
    segments_.push_back({world_->at(from).id, to, cookie});
  }
  void Frame(int from, int to, size_t bytes) {
    const uint64_t number = ++frames_[{from, to}];
    if (number % 4 == 3) {
      world_->at(from).SendCancel(world_->at(to).id, number);
    } else {
      world_->at(from).SendReady(world_->at(to).id, number, bytes);
    }
  }

  bool AllIsThere() const {
    for (const Sent& sent : segments_) {
      if (world_->at(sent.to).arrived.count({sent.from, sent.cookie}) == 0) return false;
    }
    for (auto& peer : world_->peers) {
      if (peer->sent != peer->started) return false;
    }
    for (const auto& [way, count] : frames_) {
      if (Frames(way.first, way.second).size() < count) return false;
    }
    return true;
  }

  void ExpectOnce() const {
    size_t arrived = 0;
    for (auto& peer : world_->peers) arrived += peer->arrived.size();
    EXPECT_EQ(arrived, segments_.size());
    for (const Sent& sent : segments_) {
      EXPECT_EQ(world_->at(sent.to).arrived[std::pair(sent.from, sent.cookie)], 1);
    }
    for (const auto& [way, count] : frames_) {
      const auto frames = Frames(way.first, way.second);
      ASSERT_EQ(frames.size(), count);
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(frames[i], i + 1);
    }
  }

 private:
  struct Sent {
    PeerId from;
    int to;
    uint64_t cookie;
  };
  std::vector<uint64_t> Frames(int from, int to) const {
    std::vector<uint64_t> ordinals;
    for (const auto& frame : world_->at(to).frames) {
      if (frame.from != world_->at(from).id) continue;
      ordinals.push_back(frame.header.op.value());
      EXPECT_EQ(frame.payload, std::string(frame.payload.size(), char(frame.header.op.value())));
    }
    return ordinals;
  }

  PeerWorld* const world_;
  uint64_t next_ = 1;
  std::vector<Sent> segments_;
  std::map<std::pair<int, int>, size_t> frames_;
};

inline void ExpectNoLinkWasLost(PeerWorld* world) {
  for (auto& peer : world->peers) {
    for (const auto& [other, reasons] : peer->downs) {
      for (const std::string& reason : reasons)
        ADD_FAILURE() << ToString(peer->id) << ": " << reason;
    }
    EXPECT_EQ(peer->transport->GetStats().links_lost, 0u);
    EXPECT_EQ(peer->transport->GetStats().frames_refused, 0u);
    for (const auto& [other, times] : peer->ups) EXPECT_EQ(times, 1);
  }
}

}  // namespace longhaul::peerd
