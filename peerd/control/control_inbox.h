// Carries news from the threads of the control client to the reactor: messages of the coordinator,
// and the beginnings and ends of streams. Bounded.
//
// If a message does not fit, the client ends the stream. Nothing is lost by that: the coordinator
// sends its messages again on the next stream. If the reactor has heard of the beginning of a
// stream, it also hears of its end: the mailbox has one extra place that only the end may use.
//
// Threads: threads of the client post, one at a time; the reactor takes. For `wake` see
// base/mailbox.h.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mailbox.h"
#include "proto/control/messages.h"
#include "proto/control/why.h"

namespace longhaul::peerd {

struct StreamBegan {};
struct StreamEnded {
  std::string reason;
};

class ControlInbox {
 public:
  using Mail =
      std::variant<StreamBegan, StreamEnded, control::CoordinatorMessage, control::TellWhy>;

  ControlInbox(size_t mails_max, std::function<void()> wake)
      : mails_max_(mails_max), box_(mails_max + 1, std::move(wake)) {}

  // Begin() and Add() return false if there is no room. The caller then has to end the stream.
  [[nodiscard]] bool Begin() { return Post(StreamBegan{}); }
  [[nodiscard]] bool Add(control::CoordinatorMessage message) { return Post(std::move(message)); }
  [[nodiscard]] bool Add(control::TellWhy tell) { return Post(std::move(tell)); }
  void End(std::string reason) { (void)box_.Post(StreamEnded{std::move(reason)}); }

  std::vector<Mail> TakeAll() { return box_.TakeAll(); }

 private:
  bool Post(Mail mail) { return box_.size() < mails_max_ && box_.Post(std::move(mail)); }

  const size_t mails_max_;
  Mailbox<Mail> box_;
};

}  // namespace longhaul::peerd
