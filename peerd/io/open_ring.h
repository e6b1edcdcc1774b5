// Opens the ring of the daemon: io_uring, or epoll where io_uring is refused.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

// kAuto: io_uring if the system allows it, else epoll.
enum class IoChoice { kAuto, kUring, kEpoll };

// "auto", "uring", "epoll"; none for any other text.
std::optional<IoChoice> ParseIoChoice(const std::string& text);

struct OpenedRing {
  std::unique_ptr<Ring> ring;
  // Why the ring is not io_uring, and what to do about that. Empty: it is.
  std::string why_epoll;
};

// `entries`: of the queues of io_uring.
// FailedPrecondition, with a text for the operator: the system refuses the chosen ring, or both.
absl::StatusOr<OpenedRing> OpenRing(IoChoice choice, unsigned entries);

}  // namespace longhaul::peerd
