#include "peerd/transport/event_queue.h"

namespace longhaul::peerd {

void EventQueue::Later(absl::AnyInvocable<void()> event) {
  events_.push_back(std::move(event));
  if (timer_ != 0) return;
  timer_ = ring_->Timeout(Tick{}, [this](IoResult) {
    timer_ = 0;
    Run();
  });
}

// Runs the events that are queued now. Events that they add run in the next callback.
void EventQueue::Run() {
  for (size_t n = events_.size(); n > 0; --n) {
    auto event = std::move(events_.front());
    events_.pop_front();
    event();
  }
  after_();
}

}  // namespace longhaul::peerd
