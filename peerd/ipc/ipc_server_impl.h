// The implementation of ipc_server.h: the members of trainers, their requests (ipc_requests.cc),
// and what the server sends to trainers (ipc_answers.cc).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/ids.h"
#include "base/outcome.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/arena_regions.h"
#include "peerd/ipc/ipc_client.h"
#include "peerd/ipc/ipc_connections.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/ipc/ipc_socket.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

class TrainerServer final : public IpcServer, private RequestHandler {
 public:
  TrainerServer(const IpcServerOptions& options, ListeningSocket socket, SocketAccess access,
                Ring* ring, TrainerRequests* handler);
  ~TrainerServer() override { regions_.Close(); }

  void JoinDone(LocalId local, const Outcome& outcome, const World& world, bool newcomer) override;
  void StepDone(LocalId local, const Outcome& outcome, const World& world) override;
  void SyncDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) override;
  void TakeDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) override;
  void SyncProgress(LocalId local, const control::FetchProgress& progress) override;
  void LeaveDone(LocalId local, const Outcome& outcome) override;
  void PostDone(const PostRef& post, const Outcome& outcome, const OpInfo& info,
                const OpTraffic& traffic) override;
  void WorldChanged(LocalId local, const World& world) override;
  void MemberGone(LocalId local, const Outcome& outcome) override;
  IpcStats GetStats() const override;
  uint32_t posts_open() const override { return posts_open_; }
  void Close() override { connections_.Close(); }
  bool closed() const override { return connections_.closed() && !regions_.sweeping(); }

 private:
  // RequestHandler
  void OnRequest(const ClientPtr& client) override;
  void OnEnded(Client& client) override;

  // ---- requests
  void Greet(Client& client);
  void AddRegion(Client& client);
  void RemoveRegion(Client& client);
  void Join(Client& client);
  void Leave(Client& client);
  void Step(Client& client);
  void Sync(Client& client);
  void AddState(Client& client);
  void RemoveState(Client& client);
  void Prepare(Client& client);
  void Prepared(uint64_t client, uint64_t state, uint64_t call);
  void Why(Client& client);
  void Kept(Client& client);
  void Take(Client& client);
  // Reads which state the request syncs, and how, and marks the state as used by the member.
  // Returns false if it has refused the request.
  bool ReadSync(Client& client, Member& member, StateSync* sync);
  void Op(Client& client);
  void Cancel(Client& client);
  void Members(Client& client);
  void About(Client& client);
  // Returns the member that the request names, if it is admitted and not leaving. Otherwise refuses
  // the request and returns nullptr.
  Member* ActiveMember(Client& client);
  void Deny(Client& client, Code code, const std::string& text);
  // Refuses a request because of a limit.
  void DenyLimit(Client& client, const std::string& text);
  // Refuses a request that names a member which this connection does not have, or not any more.
  void DenyUnknown(Client& client, LocalId local);

  // ---- replies
  void Answer(Client& client, uint64_t call, const Outcome& outcome);
  void AnswerJoin(Client& client, uint64_t call, LocalId local, const World& world, bool newcomer);
  // Writes the ids to `info`, and sends those for which it has no room in frames of their own.
  void PutOpMembers(Client& client, uint64_t call, const std::vector<MemberId>& members,
                    lh_ipc_op_info* info);
  void AnswerWithSync(Client& client, uint64_t call, LocalId local, const Outcome& outcome,
                      const StateSyncInfo& info);
  // Returns nullptr if the member has ended, or its connection is ending.
  Member* Find(LocalId local);
  // The open sync of the member no longer uses its state.
  void EndSync(Member& member);
  // The fetch in the background no longer uses the member's state.
  void EndHold(Member& member);
  // Answers the member's open requests and forgets the member.
  void Forget(LocalId local, const Outcome& outcome);

  TrainerRequests* const handler_;
  ArenaRegions regions_;
  std::map<LocalId, Member> members_;
  uint64_t next_local_ = 1;
  uint32_t posts_open_ = 0;
  uint64_t limits_reached_ = 0;
  uint64_t requests_refused_ = 0;
  Connections connections_;  // the first to be destroyed, because it calls the rest
};

}  // namespace longhaul::peerd::ipc
