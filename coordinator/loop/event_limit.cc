#include "coordinator/loop/event_limit.h"

#include <algorithm>

namespace longhaul::coordinator {

bool EventLimit::Take(const EventRecord& event, Tick now) {
  if (!event.peer) return true;
  Window& all = At({PeerId{}, event.kind}, now);
  const Key key(event.peer, event.kind);
  if (all.told < kEventsOfKindMax && !windows_.contains(key) && windows_.size() >= kEventKeysMax) {
    std::erase_if(windows_, [now](const auto& entry) {
      const auto& [old, window] = entry;
      return old.first && window.left_out == 0 && now - window.since >= kEventWindow;
    });
    // Without room, this kind is over for this window. It must not be searched for with each event.
    if (windows_.size() >= kEventKeysMax) all.told = kEventsOfKindMax;
  }
  if (all.told >= kEventsOfKindMax) {
    LeaveOut(&all);
    return false;
  }
  Window& own = At(key, now);
  if (own.told >= kEventsOfPeerMax) {
    LeaveOut(&own);
    return false;
  }
  ++all.told;
  ++own.told;
  return true;
}

std::vector<EventRecord> EventLimit::TakeLeftOut(Tick now) {
  std::vector<EventRecord> events;
  if (now < due_) return events;
  due_ = kNever;
  for (auto& [key, window] : windows_) {
    if (window.left_out == 0) continue;
    if (now - window.since < kEventWindow) {
      due_ = std::min(due_, window.since + kEventWindow);
      continue;
    }
    EventRecord event;
    event.kind = key.second;
    event.peer = key.first;
    event.text = "and " + std::to_string(window.left_out) + " more like this in " +
                 std::to_string(kEventWindow / Seconds(1)) + " s event=" + key.second +
                 (key.first ? " peer=" + ToString(key.first) : "");
    events.push_back(std::move(event));
    window = Window{now};
  }
  return events;
}

EventLimit::Window& EventLimit::At(const Key& key, Tick now) {
  Window& window = windows_.emplace(key, Window{now}).first->second;
  // If something was left out, TakeLeftOut() ends the window.
  if (window.left_out == 0 && now - window.since >= kEventWindow) window = Window{now};
  return window;
}

void EventLimit::LeaveOut(Window* window) {
  ++window->left_out;
  due_ = std::min(due_, window->since + kEventWindow);
}

}  // namespace longhaul::coordinator
