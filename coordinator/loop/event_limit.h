// Decides which events are told, in the log, to operators and in the flight recorder. Peers cause
// events as often as they like: one that asks for memberships that it may not have would fill the
// disk with lines, and push the events of all others out of the rings.
//
// Of each kind, in each kEventWindow, at most kEventsOfPeerMax events of one peer are told, and at
// most kEventsOfKindMax of all peers. The others are counted, and the end of the window tells how
// many there were. Events that are of no peer come from the coordinator's own decisions, and are
// all told.
//
// Bounded: it keeps at most kEventKeysMax pairs of peer and kind. Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

inline constexpr int64_t kEventWindow = Seconds(60);
inline constexpr uint64_t kEventsOfPeerMax = 200;
inline constexpr uint64_t kEventsOfKindMax = 2048;
inline constexpr size_t kEventKeysMax = 16384;

class EventLimit {
 public:
  // Whether to tell the event. False: it is counted.
  bool Take(const EventRecord& event, Tick now);
  // For each peer and kind of which events were left out in a window that is over: an event of that
  // kind that says how many.
  std::vector<EventRecord> TakeLeftOut(Tick now);
  // When TakeLeftOut() has something to say; kNever: no event was left out.
  Tick due() const { return due_; }

 private:
  struct Window {
    Tick since;
    uint64_t told = 0;
    uint64_t left_out = 0;
  };
  // Peer 0: those left out because of all peers together.
  using Key = std::pair<PeerId, std::string>;

  Window& At(const Key& key, Tick now);
  void LeaveOut(Window* window);

  std::map<Key, Window> windows_;
  Tick due_ = kNever;
};

}  // namespace longhaul::coordinator
