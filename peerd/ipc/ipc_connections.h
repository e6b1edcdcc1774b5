// The connections of trainers, from accept to their end.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/descriptor_closer.h"
#include "peerd/ipc/ipc_client.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/ipc/ipc_socket.h"
#include "peerd/ipc/ipc_users.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

using ClientPtr = std::shared_ptr<Client>;

// Who carries out the requests of trainers.
class RequestHandler {
 public:
  // client->request has come whole, and client->descriptors with it. The handler answers with
  // Push(), now or later, or cuts the connection.
  virtual void OnRequest(const ClientPtr& client) = 0;
  // The connection has ended, and nothing can be sent on it any more. Called once for each.
  virtual void OnEnded(Client& client) = 0;

 protected:
  ~RequestHandler() = default;
};

// Accepts connections, reads requests from them and sends replies, on the socket and through queues
// in memory shared with a trainer. It knows neither members nor what a request means.
//
// Ring, socket file and handler: the ring and the handler outlive this object. After the end of
// this object no callback reaches the handler. Reactor thread.
class Connections final : private SharedWork {
 public:
  Connections(const IpcServerOptions& options, ListeningSocket socket, SocketAccess access,
              Ring* ring, RequestHandler* handler);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Lets nobody in any more. Tells each trainer so, and closes its connection when all replies are
  // sent.
  void Close();
  bool closing() const { return closing_; }
  // Whether Close() is complete: the ring has no operation of this object left.
  bool closed() const { return closing_ && accept_ == 0 && retry_ == 0 && clients_.empty(); }

  // The trainer has said HELLO. Uses the queues in shared memory that have come with it, and
  // returns whether there are such.
  bool Greet(Client& client);
  // Sends `reply` together with all others of this turn of the ring. Ends the connection of a
  // trainer that does not read.
  void Push(Client& client, const lh_ipc_reply& reply);
  // Sends `reply`. If the frame with number `*frame` still waits to be sent, overwrites that frame.
  void PushLatest(Client& client, const lh_ipc_reply& reply, uint64_t* frame);
  // Ends the connection of a trainer that broke the protocol, and counts it. Tells the trainer
  // `outcome` if no other frame is being sent.
  void Cut(Client& client, const Outcome& outcome);
  // Returns nullptr if there is no such connection, or it has ended.
  Client* Find(uint64_t number) const;

  // Adds what is counted of connections.
  void AddTo(IpcStats* stats) const;

 private:
  // Lets callbacks of the ring find out whether this object still exists.
  using Life = ConnectionsLife;

  // ---- connections
  void StartAccept();
  void OnAccept(IoResult result);
  void Refuse(UniqueFd fd, const Outcome& outcome);
  // Closes the oldest connection without HELLO, of the user who has most of these, if there are too
  // many.
  void BoundSilent();
  // Closes these descriptors, which came from the client. Ends all connections of the user if the
  // user has sent too many that cannot be closed at once.
  void DropDescriptors(Client& client, std::vector<UniqueFd>& descriptors);
  void StartRecv(const ClientPtr& client);
  void OnRecv(const ClientPtr& client, IoResult result);
  // Hands over the requests that have come whole, now or later, and then reads on.
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
  // From now on nothing is read from the connection or sent on it. Settle() cleans up.
  void End(Client& client, const std::string& reason);
  // Called at the end of each callback. If the connection has ended: tells the handler (once), and
  // forgets the connection when the ring has no operation of it left.
  void Settle(const ClientPtr& client);
  void CountRefusal(const std::string& what);
  // Whether to log that a client has attached. A user may attach as often as it likes, so there is
  // a bound on the lines of a second.
  bool MayLogClient();

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
  // SharedWork: the ring asks whether a request waits in any queue, and lets this object take it.
  bool Look() override;
  bool StopLooking() override;
  void Run() override;

  const uint32_t hello_timeout_ms_;
  ListeningSocket socket_;
  Users users_;
  DescriptorCloser closer_;
  Ring* const ring_;
  RequestHandler* const handler_;
  const std::shared_ptr<Life> life_ = std::make_shared<Life>();
  IoId accept_ = 0;
  IoId retry_ = 0;
  bool closing_ = false;
  std::map<uint64_t, ClientPtr> clients_;
  std::vector<ClientPtr> sharing_;  // the clients with queues in shared memory
  bool looking_ = false;            // their trainers know that peerd looks into the queues
  uint64_t next_client_ = 1;
  uint64_t refused_ = 0;
  uint64_t crowded_ = 0;  // a connection ended because too many were silent
  uint64_t cut_ = 0;
  uint64_t refusals_ = 0;
  Tick refusal_log_due_;
  uint64_t refusals_unlogged_ = 0;
  // Lines about clients that may be logged now.
  int64_t client_lines_ = 0;
  Tick client_lines_at_;  // when client_lines_ was computed
  uint64_t clients_unlogged_ = 0;
};

}  // namespace longhaul::peerd::ipc
