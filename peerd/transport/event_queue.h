// Events that the transport has put off. They run in order, from a callback of the ring, when no
// object of the transport is on the call stack.
//
// Threads: the ring's.
#pragma once

#include <deque>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

class EventQueue {
 public:
  // `after` is called each time that events have run. The ring refers to the queue until idle().
  EventQueue(Ring* ring, absl::AnyInvocable<void()> after)
      : ring_(ring), after_(std::move(after)) {}
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  void Later(absl::AnyInvocable<void()> event);
  // Destroys the object later, because it may be on the call stack.
  template <class T>
  void DestroyLater(std::unique_ptr<T> object) {
    Later([object = std::move(object)] {});
  }
  bool idle() const { return events_.empty() && timer_ == 0; }

 private:
  void Run();

  Ring* const ring_;
  absl::AnyInvocable<void()> after_;
  std::deque<absl::AnyInvocable<void()>> events_;
  IoId timer_ = 0;
};

}  // namespace longhaul::peerd
