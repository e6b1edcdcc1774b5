// The server behind ipc_server.h: connections (ipc_connections.cc), what trainers ask for
// (ipc_requests.cc), what they are answered (ipc_answers.cc).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/arena_regions.h"
#include "peerd/ipc/ipc_client.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/ipc/ipc_socket.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

class Server final : public IpcServer {
 public:
  Server(IpcServerOptions options, ListeningSocket socket, Ring* ring, TrainerRequests* handler)
      : options_(std::move(options)),
        socket_(std::move(socket)),
        ring_(ring),
        handler_(handler),
        regions_(ring, [this](const ArenaRegion& region) {
          handler_->OnRegionRemoved(region.data, region.bytes);
        }) {
    life_->server = this;
    StartAccept();
  }
  ~Server() override;

  void JoinDone(LocalId local, const Outcome& outcome, const World& world) override;
  void StepDone(LocalId local, const Outcome& outcome, const World& world) override;
  void SyncDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) override;
  void TakeDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) override;
  void SyncProgress(LocalId local, const control::FetchProgress& progress) override;
  void LeaveDone(LocalId local, const Outcome& outcome) override;
  void PostDone(const PostRef& post, const Outcome& outcome, const OpInfo& info,
                uint64_t bytes_sent, uint64_t bytes_received) override;
  void WorldChanged(LocalId local, const World& world) override;
  void MemberGone(LocalId local, const Outcome& outcome) override;
  IpcStats GetStats() const override;
  void Close() override;
  bool closed() const override {
    return closing_ && accept_ == 0 && retry_ == 0 && clients_.empty() && !regions_.sweeping();
  }

 private:
  using ClientPtr = std::shared_ptr<Client>;

  // ---- connections
  void StartAccept();
  void OnAccept(IoResult result);
  void Refuse(int fd, const Outcome& outcome);
  void StartRecv(const ClientPtr& client);
  void OnRecv(const ClientPtr& client, IoResult result);
  void StartSend(const ClientPtr& client);
  void OnSend(const ClientPtr& client, IoResult result);
  // The trainer broke the rules; it is told `outcome` if it can still read.
  void Cut(Client& client, const Outcome& outcome);
  // From now on nothing is read from the connection or sent on it. Settle() does the rest.
  void End(Client& client, const std::string& reason);
  // At the end of each callback: tells the handler of an end, forgets what is over.
  void Settle(const ClientPtr& client);
  void CountRefusal(const std::string& what);

  // ---- requests
  void OnRequest(const ClientPtr& client);
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
  void Kept(Client& client);
  void Take(Client& client);
  // Reads which state the request syncs, and how. False: the request was refused. The call of the
  // request becomes the member's open call.
  bool ReadSync(Client& client, Member& member, StateSync* sync);
  void Op(Client& client);
  void Members(Client& client);
  // A member of this client that may ask for something; otherwise answers the request.
  Member* ActiveMember(Client& client);
  void Deny(Client& client, Code code, const std::string& text);
  // The request names a member that this connection does not have (any more).
  void DenyUnknown(Client& client, LocalId local);

  // ---- replies
  void Push(Client& client, const lh_ipc_reply& reply);
  void Answer(Client& client, uint64_t call, const Outcome& outcome);
  void AnswerWithWorld(Client& client, uint64_t call, LocalId local, const World& world);
  void AnswerWithSync(Client& client, uint64_t call, LocalId local, const Outcome& outcome,
                      const StateSyncInfo& info);
  Member* Find(LocalId local);
  // Sends `reply`. If the frame with number `*frame` still waits to be sent, overwrites that frame.
  void PushLatest(Client& client, const lh_ipc_reply& reply, uint64_t* frame);
  void EndSync(Member& member);
  void EndHold(Member& member);
  // Answers the member's open requests and forgets the member.
  void Forget(LocalId local, const Outcome& outcome);

  const IpcServerOptions options_;
  ListeningSocket socket_;
  Ring* const ring_;
  TrainerRequests* const handler_;
  const std::shared_ptr<ServerLife> life_ = std::make_shared<ServerLife>();
  ArenaRegions regions_;
  IoId accept_ = 0;
  IoId retry_ = 0;
  bool closing_ = false;
  std::map<uint64_t, ClientPtr> clients_;
  std::map<LocalId, Member> members_;
  uint64_t next_client_ = 1;
  uint64_t next_local_ = 1;
  uint32_t posts_open_ = 0;
  uint64_t connections_refused_ = 0;
  uint64_t connections_cut_ = 0;
  uint64_t requests_refused_ = 0;
  Tick refusal_log_due_;
  uint64_t refusals_unlogged_ = 0;
};

}  // namespace longhaul::peerd::ipc
