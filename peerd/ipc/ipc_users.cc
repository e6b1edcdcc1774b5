#include "peerd/ipc/ipc_users.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd::ipc {
namespace {

ResourceLimits LimitsOfAll(const IpcServerOptions& options) {
  ResourceLimits limits;
  limits[static_cast<size_t>(Resource::kConnections)] = LH_CLIENTS_MAX;
  limits[static_cast<size_t>(Resource::kMembers)] = LH_LOCAL_MEMBERS_MAX;
  limits[static_cast<size_t>(Resource::kRegions)] = LH_REGIONS_OF_ALL_MAX;
  limits[static_cast<size_t>(Resource::kArenaBytes)] =
      options.arena_limit == 0 ? UINT64_MAX : options.arena_limit;
  limits[static_cast<size_t>(Resource::kTensors)] = static_cast<uint64_t>(LH_TENSORS_OF_ALL_MAX);
  limits[static_cast<size_t>(Resource::kPieces)] = static_cast<uint64_t>(LH_PIECES_OF_ALL_MAX);
  return limits;
}

}  // namespace

Users::Users(const IpcServerOptions& options, SocketAccess access)
    : share_(options.user_share),
      access_(std::move(access)),
      limits_(LimitsOfAll(options)),
      peerd_(Account::Make("peerd", "", limits_, nullptr)) {}

Outcome Users::Admit(const PeerCredentials& credentials, Client* client) {
  if (!Permitted(credentials, access_)) {
    ++forbidden_;
    return {Code::kFailedPrecondition,
            absl::StrCat("connection refused: user ", credentials.uid, ", process ",
                         credentials.pid, ", may not use this peerd; it admits ", ToString(access_),
                         " (--socket-mode, --socket-group, --allow-users and --allow-groups of "
                         "peerd)")};
  }
  User& user = UserOf(credentials.uid);
  if (const uint32_t unclosed = user.unclosed->load(); unclosed > LH_FOREIGN_DESCRIPTORS_MAX) {
    ++limited_;
    return {Code::kUnavailable,
            absl::StrCat("connection refused: peerd is still closing ", unclosed,
                         " file descriptors that user ", credentials.uid,
                         " sent and that are no arena regions; end the processes that keep "
                         "them open")};
  }
  absl::StatusOr<Hold> held = user.account->Take(Resource::kConnections, 1);
  if (!held.ok()) {
    ++limited_;
    return {Code::kUnavailable,
            absl::StrCat("connection refused: ", std::string(held.status().message()))};
  }
  ResourceLimits limits;
  limits.fill(UINT64_MAX);
  limits[static_cast<size_t>(Resource::kRegions)] = LH_REGIONS_MAX;
  limits[static_cast<size_t>(Resource::kTensors)] = static_cast<uint64_t>(LH_CLIENT_TENSORS_MAX);
  limits[static_cast<size_t>(Resource::kPieces)] = static_cast<uint64_t>(LH_CLIENT_PIECES_MAX);
  client->user = user;
  client->account = Account::Make("a connection", "", limits, user.account);
  client->held = *std::move(held);
  return {};
}

User& Users::UserOf(uid_t uid) {
  // Forget users of whom nothing is left: their accounts have no other owner.
  std::erase_if(users_, [&](const auto& entry) {
    const auto& [known, user] = entry;
    return known != uid && user.account.use_count() == 1 && user.unclosed.use_count() == 1;
  });
  User& user = users_[uid];
  if (user.account == nullptr) {
    // A user who may have all gets no limits, so that refusals name peerd's.
    ResourceLimits limits;
    limits.fill(UINT64_MAX);
    if (share_ < 100) limits = ShareOf(limits_, share_);
    user.account =
        Account::Make(absl::StrCat("user ", uid),
                      absl::StrCat("(--user-share=", share_, " of peerd)"), limits, peerd_);
  }
  return user;
}

}  // namespace longhaul::peerd::ipc
