#include "proto/control/grpc/support.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>

#include <algorithm>
#include <string>

#include "base/log.h"

namespace longhaul::control {
namespace {

void ToLog(gpr_log_func_args* args) {
  const std::string file = args->file;
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
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
    gpr_set_log_function(ToLog);
    grpc_init();
    return true;
  }();
  (void)done;
}

}  // namespace longhaul::control
