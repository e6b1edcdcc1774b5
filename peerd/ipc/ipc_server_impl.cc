#include "peerd/ipc/ipc_server_impl.h"

#include "base/status_macros.h"

namespace longhaul::peerd {

absl::StatusOr<std::unique_ptr<IpcServer>> MakeIpcServer(const IpcServerOptions& options,
                                                         Ring* ring, TrainerRequests* handler) {
  LH_ASSIGN_OR_RETURN(SocketAccess access,
                      ResolveSocketAccess({options.mode, options.group, options.allow_users,
                                           options.allow_groups}));
  LH_ASSIGN_OR_RETURN(ListeningSocket socket,
                      ListenOnPath(options.path, options.mode, options.group));
  return std::unique_ptr<IpcServer>(
      std::make_unique<ipc::Server>(options, std::move(socket), std::move(access), ring, handler));
}

}  // namespace longhaul::peerd
