#include "proto/control/grpc/support.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/log.h"

namespace longhaul::control {
namespace {

// gRPC logs an error for each failed handshake, and strangers make as many of these as they like.
// So at most this many errors are logged a second; further ones count as debug lines.
constexpr uint64_t kErrorsPerSecondMax = 5;

bool TooManyErrors() {
  static std::atomic<uint64_t> second_and_count = 0;  // the second in the upper half
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto second =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  uint64_t seen = second_and_count;
  uint64_t next = 0;
  do {
    next = (seen >> 32) == second ? seen + 1 : (second << 32) + 1;
  } while (!second_and_count.compare_exchange_weak(seen, next));
  return (next & UINT32_MAX) > kErrorsPerSecondMax;
}

void ToLog(gpr_log_func_args* args) {
  const std::string file = args->file;
  const bool error = args->severity == GPR_LOG_SEVERITY_ERROR && !TooManyErrors();
  const LogLevel level = error ? LogLevel::kWarning : LogLevel::kDebug;
  Log(level,
      "grpc: " + std::string(args->message) +
          LogField("at", file.substr(file.rfind('/') + 1) + ":" + std::to_string(args->line)));
}

}  // namespace

Keepalive KeepaliveFor(uint32_t detect_ms) {
  const int half = static_cast<int>(std::clamp<uint32_t>(detect_ms / 2, 100, 60000));
  return {half, 7 * half};
}

void InitGrpc() {
  static const bool done = [] {
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 53
    // Without this, these releases tell the sender of each message at once that it may send more: a
    // packet and a wake-up at the other end for each message. With it, they tell so with the next
    // message. Later releases always do.
    setenv("GRPC_EXPERIMENTS", "flow_control_fixes", /*overwrite=*/0);
#endif
    gpr_set_log_function(ToLog);
    grpc_init();
    return true;
  }();
  (void)done;
}

}  // namespace longhaul::control
