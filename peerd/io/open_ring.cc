#include "peerd/io/open_ring.h"

#include <utility>

#include "base/status_macros.h"

namespace longhaul::peerd {

std::optional<IoChoice> ParseIoChoice(const std::string& text) {
  if (text == "auto") return IoChoice::kAuto;
  if (text == "uring") return IoChoice::kUring;
  if (text == "epoll") return IoChoice::kEpoll;
  return std::nullopt;
}

absl::StatusOr<OpenedRing> OpenRing(IoChoice choice, unsigned entries) {
  OpenedRing opened;
  if (choice == IoChoice::kEpoll) {
    opened.why_epoll = "--io=epoll";
  } else {
    absl::StatusOr<std::unique_ptr<Ring>> uring = MakeUringRing(entries);
    if (uring.ok()) {
      opened.ring = *std::move(uring);
      return opened;
    }
    if (choice == IoChoice::kUring) return uring.status();
    opened.why_epoll = std::string(uring.status().message());
  }
  LH_ASSIGN_OR_RETURN(opened.ring, MakeEpollRing());
  return opened;
}

}  // namespace longhaul::peerd
