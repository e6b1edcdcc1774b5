// What `lhctl top` shows: rates from one overview to the next, and how long a group has waited.
//
// Plain value: no clock, no thread, no I/O. Times are microseconds of any clock that only rises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

class Top {
 public:
  // Takes what the coordinator said at `now_us`.
  void Update(const v1::GetOverviewResponse& overview, int64_t now_us);
  // The coordinator does not answer, for this reason. What it said last stays.
  void Lost(const std::string& why, int64_t now_us);

  // The lines to show, each with its newline. Lines are cut after `columns` characters, and after
  // `rows` lines a last one counts what is left out; 0: no limit.
  std::string Render(size_t rows, size_t columns) const;

 private:
  // A counter that a peer tells in heartbeats.
  struct Rate {
    uint64_t last = 0;
    double per_second = 0;
    // Takes the counter's value, which is `seconds` newer than the one before. A counter that fell
    // began anew.
    void Take(uint64_t value, double seconds);
  };
  struct PeerRates {
    Rate ops;
    Rate sent;
    Rate received;
    bool measured = false;  // there were two overviews with this peer
  };
  // By run, group and peer.
  using PeerKey = std::pair<std::pair<std::string, uint32_t>, std::string>;
  struct Waiting {
    std::string text;
    int64_t since_us = 0;
  };

  std::string RenderHead() const;
  std::string RenderGroups() const;
  std::string RenderPeers() const;

  v1::GetOverviewResponse overview_;
  int64_t updated_us_ = 0;  // 0: never
  int64_t now_us_ = 0;
  std::string lost_;  // why the coordinator does not answer; empty: it does
  std::map<PeerKey, PeerRates> rates_;
  std::map<std::pair<std::string, uint32_t>, Waiting> waiting_;
};

}  // namespace longhaul
