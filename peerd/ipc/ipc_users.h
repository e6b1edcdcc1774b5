// Which users may connect, and what each user may hold.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>

#include "base/outcome.h"
#include "peerd/ipc/accounts.h"
#include "peerd/ipc/ipc_client.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/ipc/ipc_socket.h"

namespace longhaul::peerd::ipc {

// Lets connections in, each with an account below that of its user, whose account is below that of
// peerd. Reactor thread.
class Users {
 public:
  Users(const IpcServerOptions& options, SocketAccess access);

  // Gives the connection its accounts, or returns why it is not let in. Then nothing has changed,
  // except that the user may be known now.
  Outcome Admit(const PeerCredentials& credentials, Client* client);

  // Those that were not let in: because the user may not use this peerd, or because of a limit.
  uint64_t forbidden() const { return forbidden_; }
  uint64_t limited() const { return limited_; }

 private:
  User& UserOf(uid_t uid);

  const uint32_t share_;  // percent of peerd that one user may have
  const SocketAccess access_;
  const ResourceLimits limits_;
  const std::shared_ptr<Account> peerd_;
  std::map<uid_t, User> users_;
  uint64_t forbidden_ = 0;
  uint64_t limited_ = 0;
};

}  // namespace longhaul::peerd::ipc
