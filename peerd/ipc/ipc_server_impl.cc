#include "peerd/ipc/ipc_server_impl.h"

#include <utility>

#include "base/status_macros.h"

namespace longhaul::peerd {
namespace ipc {

Server::Server(const IpcServerOptions& options, ListeningSocket socket, SocketAccess access,
               Ring* ring, TrainerRequests* handler)
    : handler_(handler),
      regions_(ring,
               [this](const ArenaRegion& region) {
                 handler_->OnRegionRemoved(region.data, region.bytes);
               }),
      connections_(options, std::move(socket), std::move(access), ring, this) {}

void Server::OnEnded(Client& client) {
  for (const LocalId local : std::exchange(client.locals, {})) {
    const auto it = members_.find(local);
    posts_open_ -= static_cast<uint32_t>(it->second.posts.size());
    members_.erase(it);
    if (!connections_.closing()) handler_->OnGone(local, client.reason);
  }
  client.states.clear();
  client.regions.clear();
  client.calls.clear();
}

IpcStats Server::GetStats() const {
  IpcStats stats;
  stats.members = static_cast<uint32_t>(members_.size());
  stats.posts_open = posts_open_;
  stats.arena_bytes = regions_.bytes_mapped();
  stats.limits_reached = limits_reached_;
  stats.requests_refused = requests_refused_;
  connections_.AddTo(&stats);
  return stats;
}

}  // namespace ipc

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
