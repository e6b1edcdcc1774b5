// The implementation of ipc_server.h: connections (ipc_connections.cc), queues in memory shared
// with trainers (ipc_shared.cc), requests of trainers (ipc_requests.cc), and what the server sends
// to trainers (ipc_answers.cc).
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
#include "peerd/ipc/accounts.h"
#include "peerd/ipc/arena_regions.h"
#include "peerd/ipc/descriptor_closer.h"
#include "peerd/ipc/ipc_client.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/ipc/ipc_socket.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

class Server final : public IpcServer, private SharedWork {
 public:
  Server(IpcServerOptions options, ListeningSocket socket, SocketAccess access, Ring* ring,
         TrainerRequests* handler)
      : options_(std::move(options)),
        socket_(std::move(socket)),
        access_(std::move(access)),
        peerd_(Account::Make("peerd", "", LimitsOfAll(options_), nullptr)),
        ring_(ring),
        handler_(handler),
        regions_(ring, [this](const ArenaRegion& region) {
          handler_->OnRegionRemoved(region.data, region.bytes);
        }) {
    life_->server = this;
    ring_->SetSharedWork(this);
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
                const OpTraffic& traffic) override;
  void WorldChanged(LocalId local, const World& world) override;
  void MemberGone(LocalId local, const Outcome& outcome) override;
  IpcStats GetStats() const override;
  uint32_t posts_open() const override { return posts_open_; }
  void Close() override;
  bool closed() const override {
    return closing_ && accept_ == 0 && retry_ == 0 && clients_.empty() && !regions_.sweeping();
  }

 private:
  using ClientPtr = std::shared_ptr<Client>;

  // ---- connections
  void StartAccept();
  void OnAccept(IoResult result);
  // Lets the connection in, or returns why not. Then nothing has changed, except that the user may
  // be new in users_.
  Outcome Admit(const PeerCredentials& credentials, Client* client);
  void Refuse(UniqueFd fd, const Outcome& outcome);
  // Closes the oldest connection without HELLO, of the user who has most of these, if there are too
  // many.
  void BoundSilent();
  // Closes these descriptors, which came from the client. Ends all connections of the user if the
  // user has sent too many that cannot be closed at once.
  void DropDescriptors(Client& client, std::vector<UniqueFd>& descriptors);
  User& UserOf(uid_t uid);
  void StartRecv(const ClientPtr& client);
  void OnRecv(const ClientPtr& client, IoResult result);
  // Carries out the requests that have come whole, now or later, and then reads on.
  void TakeRequests(const ClientPtr& client);
  // Whether a request has come whole that is not carried out yet. A HELLO of another version may be
  // shorter. Its sender waits for an answer, so it counts as whole as soon as its version is here.
  static bool HasRequest(const Client& client);
  // Copies the next request to client.request. Returns where it is.
  enum class Source { kNone, kSocket, kShared };
  static Source NextRequest(Client& client);
  // Sends all replies of this turn of the ring together, at its end.
  void SendSoon(Client& client);
  void SendReplies(const ClientPtr& client);
  void StartSend(const ClientPtr& client);
  void OnSend(const ClientPtr& client, IoResult result);
  // Ends the connection of a trainer that broke the protocol, and counts it. Tells the trainer
  // `outcome` if no other frame is being sent.
  void Cut(Client& client, const Outcome& outcome);
  // From now on nothing is read from the connection or sent on it. Settle() cleans up.
  void End(Client& client, const std::string& reason);
  // Called at the end of each callback. If the connection has ended: tells the handler (once), and
  // forgets the connection when the ring has no operation of it left.
  void Settle(const ClientPtr& client);
  void CountRefusal(const std::string& what);

  // ---- queues in shared memory
  // Uses the memory that has come with HELLO. Returns whether that went well.
  bool Share(Client& client);
  // Lets NextRequest() find the requests that are in the client's queue now.
  void LookAtShared(Client& client);
  // Whether a request waits in the client's queue.
  static bool HasShared(const Client& client);
  // Whether requests are left, now that the connection has ended.
  static bool HasMore(const Client& client);
  bool AnyHasShared() const;
  void SetLooking(bool looking);
  // Puts the first of the waiting replies into the client's queue, as many as it takes.
  void PutShared(Client& client);
  // SharedWork: the ring asks whether a request waits in any queue, and lets the server take it.
  bool Look() override;
  bool StopLooking() override;
  void Run() override;

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
  void Push(Client& client, const lh_ipc_reply& reply);
  void Answer(Client& client, uint64_t call, const Outcome& outcome);
  void AnswerWithWorld(Client& client, uint64_t call, LocalId local, const World& world);
  // Writes the ids to `info`, and sends those for which it has no room in frames of their own.
  void PutOpMembers(Client& client, uint64_t call, const std::vector<MemberId>& members,
                    lh_ipc_op_info* info);
  void AnswerWithSync(Client& client, uint64_t call, LocalId local, const Outcome& outcome,
                      const StateSyncInfo& info);
  // Returns nullptr if the member has ended, or its connection is ending.
  Member* Find(LocalId local);
  // Sends `reply`. If the frame with number `*frame` still waits to be sent, overwrites that frame.
  void PushLatest(Client& client, const lh_ipc_reply& reply, uint64_t* frame);
  // The open sync of the member no longer uses its state.
  void EndSync(Member& member);
  // The fetch in the background no longer uses the member's state.
  void EndHold(Member& member);
  // Answers the member's open requests and forgets the member.
  void Forget(LocalId local, const Outcome& outcome);

  // Whether to log that a client has attached. A user may attach as often as it likes, so there is
  // a bound on the lines of a second.
  bool MayLogClient();

  static ResourceLimits LimitsOfAll(const IpcServerOptions& options);

  const IpcServerOptions options_;
  ListeningSocket socket_;
  const SocketAccess access_;
  const std::shared_ptr<Account> peerd_;
  std::map<uid_t, User> users_;
  DescriptorCloser closer_;
  Ring* const ring_;
  TrainerRequests* const handler_;
  const std::shared_ptr<ServerLife> life_ = std::make_shared<ServerLife>();
  ArenaRegions regions_;
  IoId accept_ = 0;
  IoId retry_ = 0;
  bool closing_ = false;
  std::map<uint64_t, ClientPtr> clients_;
  std::vector<ClientPtr> sharing_;  // the clients with queues in shared memory
  bool looking_ = false;            // their trainers know that peerd looks into the queues
  std::map<LocalId, Member> members_;
  uint64_t next_client_ = 1;
  uint64_t next_local_ = 1;
  uint32_t posts_open_ = 0;
  uint64_t connections_refused_ = 0;
  uint64_t users_refused_ = 0;
  uint64_t limits_reached_ = 0;
  uint64_t connections_cut_ = 0;
  uint64_t requests_refused_ = 0;
  Tick refusal_log_due_;
  uint64_t refusals_unlogged_ = 0;
  // Lines about clients that may be logged now.
  int64_t client_lines_ = 0;
  Tick client_lines_at_;  // when client_lines_ was computed
  uint64_t clients_unlogged_ = 0;
};

}  // namespace longhaul::peerd::ipc
