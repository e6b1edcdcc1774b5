// What the threads of the control client hand to the reactor: the messages of the coordinator, and
// when streams begin and end. Bounded.
//
// Whatever does not fit ends its stream: the coordinator says it again on the next one. The end of
// a stream always reaches the reactor if its beginning did. There is one place for it beyond all
// others: nothing else is put there, so when that place is taken an end is the last thing in the
// box.
//
// Threads: one of the client's at a time posts, the reactor takes. `wake` as in base/mailbox.h.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mailbox.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

struct StreamBegan {};
struct StreamEnded {
  std::string reason;
};

class ControlInbox {
 public:
  using Mail = std::variant<StreamBegan, StreamEnded, control::CoordinatorMessage>;

  ControlInbox(size_t mails_max, std::function<void()> wake)
      : mails_max_(mails_max), box_(mails_max + 1, std::move(wake)) {}

  // False: there is no room, and the stream has to end.
  [[nodiscard]] bool Begin() { return Post(StreamBegan{}); }
  [[nodiscard]] bool Add(control::CoordinatorMessage message) { return Post(std::move(message)); }
  void End(std::string reason) { (void)box_.Post(StreamEnded{std::move(reason)}); }

  std::vector<Mail> TakeAll() { return box_.TakeAll(); }

 private:
  bool Post(Mail mail) { return box_.size() < mails_max_ && box_.Post(std::move(mail)); }

  const size_t mails_max_;
  Mailbox<Mail> box_;
};

}  // namespace longhaul::peerd
