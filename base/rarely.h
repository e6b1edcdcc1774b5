// Lets the first of several reports about the same thing through, then one in each interval. The
// reports between are counted, so that the next one can say how many there were.
//
// Bounded: it knows at most `keys_max` things at a time. When it is full, it forgets those whose
// interval is over; if there are none, a report about another thing is held back. What it held back
// about things that it forgot or never knew counts with the next report that goes through. Plain
// value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "base/tick.h"

namespace longhaul {

template <class Key>
class Rarely {
 public:
  Rarely(int64_t interval_us, size_t keys_max) : interval_us_(interval_us), keys_max_(keys_max) {}

  // Returns how many reports about `key`, and about things that are not known, were held back since
  // the last one that went through. nullopt: this one is held back.
  std::optional<uint64_t> Take(const Key& key, Tick now) {
    const auto over = [&](const Entry& entry) { return now >= entry.last + interval_us_; };
    auto it = entries_.find(key);
    if (it == entries_.end()) {
      if (entries_.size() >= keys_max_) {
        std::erase_if(entries_, [&](const auto& entry) {
          if (!over(entry.second)) return false;
          others_held_back_ += entry.second.held_back;
          return true;
        });
      }
      if (entries_.size() >= keys_max_) {
        ++others_held_back_;
        return std::nullopt;
      }
      entries_.emplace(key, Entry{now});
      return std::exchange(others_held_back_, 0);
    }
    Entry& entry = it->second;
    if (!over(entry)) {
      ++entry.held_back;
      return std::nullopt;
    }
    entry.last = now;
    return std::exchange(entry.held_back, 0) + std::exchange(others_held_back_, 0);
  }

 private:
  struct Entry {
    Tick last;
    uint64_t held_back = 0;
  };
  int64_t interval_us_;
  size_t keys_max_;
  std::map<Key, Entry> entries_;
  uint64_t others_held_back_ = 0;
};

}  // namespace longhaul
