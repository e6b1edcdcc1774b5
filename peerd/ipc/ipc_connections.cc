#include "peerd/ipc/ipc_connections.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "peerd/ipc/ipc_replies.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd::ipc {
namespace {

// How many replies may wait for a client that does not read, besides those for its members' ops.
constexpr size_t kRepliesWaitingMax = size_t{2} * LH_OPS_OPEN_MAX;
constexpr int64_t kAcceptRetryUs = Millis(100);
// Requests with more tensors than this take milliseconds of the reactor. After such a request its
// user waits this many times as long before the next one. So a user who sends nothing else gets a
// quarter of the reactor's time.
constexpr uint32_t kCostlyTensors = 4096;
constexpr int64_t kCostlyRest = 3;

bool IsCostly(const lh_ipc_request& request) {
  return (request.type == LH_IPC_STATE && request.u.state.count > kCostlyTensors) ||
         (request.type == LH_IPC_OP && request.u.op.pieces > kCostlyTensors);
}

constexpr int64_t kRefusalLogUs = Seconds(1);
// Lines about clients: so many at once, and one more in each of these times.
constexpr int64_t kClientLinesMax = int64_t{2} * LH_LOCAL_MEMBERS_MAX;
constexpr int64_t kClientLineUs = Seconds(1);

}  // namespace

Connections::Connections(const IpcServerOptions& options, ListeningSocket socket,
                         SocketAccess access, Ring* ring, RequestHandler* handler)
    : hello_timeout_ms_(options.hello_timeout_ms),
      socket_(std::move(socket)),
      users_(options, std::move(access)),
      ring_(ring),
      handler_(handler) {
  life_->connections = this;
  ring_->SetSharedWork(this);
  StartAccept();
}

Connections::~Connections() {
  life_->connections = nullptr;
  ring_->SetSharedWork(nullptr);
  if (accept_ != 0) ring_->Cancel(accept_);
  if (retry_ != 0) ring_->Cancel(retry_);
  for (auto& [number, client] : clients_) {
    shutdown(client->fd.get(), SHUT_RDWR);
    for (const IoId id : {client->recv, client->send, client->timer, client->pause}) {
      if (id != 0) ring_->Cancel(id);
    }
    client->states.clear();
    client->regions.clear();
    client->shared.reset();
  }
}

void Connections::StartAccept() {
  accept_ = ring_->Accept(socket_.fd(), [life = life_](IoResult result) {
    if (life->connections == nullptr) {
      if (result.value >= 0) close(result.value);
      return;
    }
    life->connections->OnAccept(result);
  });
}

void Connections::OnAccept(IoResult result) {
  accept_ = 0;
  if (closing_) {
    if (result.value >= 0) closer_.CloseSocket(UniqueFd(result.value));
    return;
  }
  if (result.value < 0) {
    // Probably no descriptor or no memory is left. A new try at once would fail, too, so wait.
    CountRefusal(absl::StrCat("accept failed (", strerror(-result.value), ")"));
    retry_ = ring_->Timeout(ring_->Now() + kAcceptRetryUs, [life = life_](IoResult) {
      if (life->connections == nullptr) return;
      life->connections->retry_ = 0;
      if (!life->connections->closing_) life->connections->StartAccept();
    });
    return;
  }
  StartAccept();
  UniqueFd fd(result.value);
  auto client = std::make_shared<Client>();
  absl::StatusOr<PeerCredentials> credentials = CredentialsOf(fd.get());
  const Outcome admitted = credentials.ok() ? users_.Admit(*credentials, client.get())
                                            : Outcome{Code::kFailedPrecondition,
                                                      std::string(credentials.status().message())};
  if (!admitted.ok()) return Refuse(std::move(fd), admitted);
  client->life = life_;
  client->fd = std::move(fd);
  client->number = next_client_++;
  client->credentials = *std::move(credentials);
  clients_[client->number] = client;
  client->timer =
      ring_->Timeout(ring_->Now() + Millis(hello_timeout_ms_), [client](IoResult timeout) {
        client->timer = 0;
        Connections* const connections = client->life->connections;
        if (connections == nullptr) return;
        if (timeout.value == 0 && !client->greeted && !client->ending) {
          connections->Cut(*client, {Code::kDeadlineExceeded, "no HELLO in time"});
        }
        connections->Settle(client);
      });
  StartRecv(client);
  BoundSilent();
}

void Connections::BoundSilent() {
  std::map<uid_t, std::vector<Client*>> silent;  // each list from the oldest to the newest
  size_t count = 0;
  for (const auto& [number, client] : clients_) {
    if (client->greeted || client->ending) continue;
    silent[client->credentials.uid].push_back(client.get());
    ++count;
  }
  if (count <= LH_CLIENTS_WITHOUT_HELLO_MAX) return;
  const auto most = std::max_element(
      silent.begin(), silent.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  ++crowded_;
  Cut(*most->second.front(),
      {Code::kUnavailable, absl::StrCat("peerd has more than ", LH_CLIENTS_WITHOUT_HELLO_MAX,
                                        " connections without HELLO; this is the oldest one of "
                                        "user ",
                                        most->first, ", who has most of them")});
}

void Connections::Refuse(UniqueFd fd, const Outcome& outcome) {
  ++refused_;
  CountRefusal(outcome.text);
  // The buffer of a new connection has room for one frame. It does not matter if nobody reads it.
  const lh_ipc_reply reply = MakeReply(LH_IPC_GONE, 0, 0, outcome);
  (void)::send(fd.get(), &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
  closer_.CloseSocket(std::move(fd));
}

void Connections::DropDescriptors(Client& client, std::vector<UniqueFd>& descriptors) {
  for (UniqueFd& fd : descriptors) closer_.CloseForeign(std::move(fd), client.user.unclosed);
  descriptors.clear();
  if (client.user.unclosed->load() <= LH_FOREIGN_DESCRIPTORS_MAX) return;
  for (const auto& [number, other] : clients_) {
    if (other->credentials.uid != client.credentials.uid || other->ending) continue;
    Cut(*other, {Code::kUnavailable,
                 absl::StrCat("user ", client.credentials.uid,
                              " sent file descriptors that are no arena regions and that peerd "
                              "cannot close at once; all connections of this user end")});
  }
}

void Connections::CountRefusal(const std::string& what) {
  ++refusals_;
  if (ring_->Now() < refusal_log_due_) {
    ++refusals_unlogged_;
    return;
  }
  refusal_log_due_ = ring_->Now() + kRefusalLogUs;
  Log(LogLevel::kWarning,
      "ipc refused" + LogField("reason", what) +
          (refusals_unlogged_ > 0 ? LogField("unlogged", std::to_string(refusals_unlogged_)) : ""));
  refusals_unlogged_ = 0;
}

bool Connections::MayLogClient() {
  const Tick now = ring_->Now();
  const int64_t more =
      client_lines_at_ == Tick() ? kClientLinesMax : (now - client_lines_at_) / kClientLineUs;
  if (more > 0) {
    client_lines_ = std::min(kClientLinesMax, client_lines_ + more);
    client_lines_at_ = now;
  }
  if (client_lines_ == 0) {
    ++clients_unlogged_;
    return false;
  }
  --client_lines_;
  return true;
}

void Connections::StartRecv(const ClientPtr& client) {
  Client& c = *client;
  const size_t wanted = c.greeted ? sizeof c.inbox : sizeof c.request;
  c.iov.iov_base = reinterpret_cast<char*>(c.inbox.data()) + c.have;
  c.iov.iov_len = wanted - c.have;
  c.message = {};
  c.message.msg_iov = &c.iov;
  c.message.msg_iovlen = 1;
  c.message.msg_control = c.control;
  c.message.msg_controllen = sizeof c.control;
  c.recv = ring_->RecvMsg(c.fd.get(), &c.message, [client](IoResult result) {
    client->recv = 0;
    // Take the descriptors even if the server or the connection has ended, so that they are closed.
    if (result.value > 0) {
      ForEachDescriptor(client->message, [&client](int fd) { client->arrived.emplace_back(fd); });
    }
    if (client->life->connections != nullptr) client->life->connections->OnRecv(client, result);
  });
}

void Connections::OnRecv(const ClientPtr& client, IoResult result) {
  Client& c = *client;
  if (!c.ending) {
    if (result.value <= 0 && !std::exchange(c.drained, true) && HasMore(c)) {
      // The trainer sent these requests before it closed the connection. The next read finds the
      // end again, in a later turn.
    } else if (result.value <= 0) {
      if (c.have > 0) {
        ++(c.greeted ? cut_ : refused_);
        CountRefusal("connection ended in the middle of a request");
      }
      End(c, result.value == 0
                 ? "trainer closed its connection"
                 : absl::StrCat("connection to trainer failed (", strerror(-result.value), ")"));
    } else if ((c.message.msg_flags & MSG_CTRUNC) != 0) {
      Cut(c, {Code::kFailedPrecondition, "more descriptors than expected"});
    } else {
      c.have += static_cast<size_t>(result.value);
    }
  }
  TakeRequests(client);
}

bool Connections::HasRequest(const Client& c) {
  const size_t have = c.have - c.taken * sizeof c.request;
  if (have >= sizeof c.request) return true;
  constexpr size_t kVersionEnd = offsetof(lh_ipc_request, u.hello.version) + sizeof(uint32_t);
  const lh_ipc_request& first = c.inbox.front();
  return !c.greeted && have >= kVersionEnd && first.magic == LH_IPC_MAGIC &&
         first.type == LH_IPC_HELLO && first.u.hello.version != LH_IPC_VERSION;
}

Connections::Source Connections::NextRequest(Client& c) {
  // Requests of the queue come before a later one of the socket.
  if (c.shared != nullptr && c.shared->Peek(c.frames_taken, &c.request)) return Source::kShared;
  if (!HasRequest(c)) return Source::kNone;
  c.request = c.inbox[c.taken];
  return Source::kSocket;
}

void Connections::TakeRequests(const ClientPtr& client) {
  Client& c = *client;
  if (!c.ending && c.pause != 0) return;
  LookAtShared(c);
  for (Source source; !c.ending && (source = NextRequest(c)) != Source::kNone;) {
    const bool costly = IsCostly(c.request);
    const Tick begin = costly ? ring_->Now() : Tick();
    if (costly && begin < *c.user.costly_from) {
      c.pause = ring_->Timeout(*c.user.costly_from, [client](IoResult) {
        client->pause = 0;
        if (client->life->connections != nullptr) client->life->connections->TakeRequests(client);
      });
      return;
    }
    if (source == Source::kShared) {
      c.shared->Pop();
    } else {
      ++c.taken;
      ++c.frames_taken;
      if (c.have <= c.taken * sizeof c.request) c.descriptors = std::exchange(c.arrived, {});
    }
    handler_->OnRequest(client);
    DropDescriptors(c, c.descriptors);
    if (costly) {
      const Tick end = ring_->Now();
      *c.user.costly_from = end + kCostlyRest * (end - begin);
    }
  }
  if (!c.ending) {
    // Keep the beginning of the next request.
    const size_t done = c.taken * sizeof c.request;
    if (done > 0) memmove(c.inbox.data(), c.inbox.data() + c.taken, c.have - done);
    c.have -= done;
    c.taken = 0;
    if (c.arrived.size() > 1) {
      // Otherwise each byte of a request could bring more of them.
      Cut(c, {Code::kFailedPrecondition,
              absl::StrCat(c.arrived.size(), " descriptors with one request")});
    }
  }
  if (!c.ending && c.recv == 0) StartRecv(client);
  Settle(client);
}

void Connections::Push(Client& client, const lh_ipc_reply& reply) {
  if (client.ending) return;
  if (client.waiting.size() >= kRepliesWaitingMax + client.locals.size() * LH_OPS_OPEN_MAX) {
    ++cut_;
    CountRefusal("client does not read its replies");
    End(client, "trainer does not read its replies");
    return;
  }
  client.waiting.push_back(reply);
  SendSoon(client);
}

void Connections::PushLatest(Client& client, const lh_ipc_reply& reply, uint64_t* frame) {
  if (*frame >= client.waiting_first + client.waiting_shared) {
    client.waiting[*frame - client.waiting_first] = reply;
    return;
  }
  *frame = client.waiting_first + client.waiting.size();
  Push(client, reply);
}

bool Connections::Greet(Client& client) {
  client.greeted = true;
  client.name = client.request.u.hello.name;
  if (client.timer != 0) ring_->Cancel(client.timer);
  if (MayLogClient()) {
    client.logged = true;
    Log(LogLevel::kInfo,
        absl::StrCat("trainer attached client=", client.number, " pid=", client.credentials.pid,
                     " uid=", client.credentials.uid) +
            LogField("name", client.name) +
            (clients_unlogged_ > 0 ? LogField("unlogged", std::to_string(clients_unlogged_)) : ""));
    clients_unlogged_ = 0;
  }
  return Share(client);
}

Client* Connections::Find(uint64_t number) const {
  const auto it = clients_.find(number);
  return it == clients_.end() || it->second->told ? nullptr : it->second.get();
}

void Connections::SendSoon(Client& client) {
  if (client.send_due || (client.send != 0 && client.shared == nullptr)) return;
  client.send_due = true;
  ring_->BeforeSubmit([client = clients_.at(client.number)] {
    client->send_due = false;
    Connections* const connections = client->life->connections;
    if (connections != nullptr && !client->ending) connections->SendReplies(client);
  });
}

void Connections::SendReplies(const ClientPtr& client) {
  PutShared(*client);
  if (client->send == 0 && !client->waiting.empty()) StartSend(client);
}

void Connections::StartSend(const ClientPtr& client) {
  Client& c = *client;
  if (c.sent == c.sending.size() * sizeof(lh_ipc_reply)) {
    c.waiting_first += c.waiting.size();
    c.frames_sent += c.waiting.size() - c.waiting_shared;
    c.sending.clear();
    std::swap(c.sending, c.waiting);
    c.sent = std::exchange(c.waiting_shared, 0) * sizeof(lh_ipc_reply);
  }
  const size_t bytes = c.sending.size() * sizeof(lh_ipc_reply) - c.sent;
  c.send = ring_->Send(c.fd.get(), reinterpret_cast<const char*>(c.sending.data()) + c.sent, bytes,
                       /*wait_all=*/true, [client](IoResult result) {
                         client->send = 0;
                         Connections* const connections = client->life->connections;
                         if (connections != nullptr) connections->OnSend(client, result);
                       });
}

void Connections::OnSend(const ClientPtr& client, IoResult result) {
  Client& c = *client;
  if (!c.ending) {
    if (result.value <= 0) {
      End(c, absl::StrCat("connection to trainer failed (", strerror(-result.value), ")"));
    } else {
      c.sent += static_cast<size_t>(result.value);
      if (c.sent < c.sending.size() * sizeof(lh_ipc_reply) || !c.waiting.empty()) {
        StartSend(client);
      } else if (c.end_when_flushed) {
        End(c, "peerd closes");
      }
    }
  }
  Settle(client);
}

void Connections::Cut(Client& client, const Outcome& outcome) {
  ++(client.greeted ? cut_ : refused_);
  CountRefusal(outcome.text);
  if (client.send == 0) {
    const lh_ipc_reply reply = MakeReply(LH_IPC_GONE, 0, 0, outcome);
    (void)::send(client.fd.get(), &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  End(client, "trainer was cut off: " + outcome.text);
}

void Connections::End(Client& client, const std::string& reason) {
  if (client.ending) return;
  client.ending = true;
  client.reason = reason;
  // Ends the operations in flight, so that their callbacks come and call Settle().
  shutdown(client.fd.get(), SHUT_RDWR);
  for (const IoId id : {client.recv, client.send, client.timer, client.pause}) {
    if (id != 0) ring_->Cancel(id);
  }
}

void Connections::Settle(const ClientPtr& client) {
  Client& c = *client;
  if (!c.ending) return;
  if (!c.told) {
    c.told = true;
    const bool logged = c.logged || !c.locals.empty();
    handler_->OnEnded(c);
    c.shared.reset();
    std::erase(sharing_, client);
    c.waiting.clear();
    if (logged) {
      Log(LogLevel::kInfo, absl::StrCat("trainer detached client=", c.number) +
                               LogField("name", c.name) + LogField("reason", c.reason));
    }
  }
  if (c.recv != 0 || c.send != 0 || c.timer != 0 || c.pause != 0) return;
  DropDescriptors(c, c.arrived);
  closer_.CloseSocket(std::move(c.fd));
  clients_.erase(c.number);
}

void Connections::Close() {
  if (closing_) return;
  closing_ = true;
  socket_.Remove();
  if (accept_ != 0) ring_->Cancel(accept_);
  if (retry_ != 0) ring_->Cancel(retry_);
  for (auto& [number, client] : clients_) {
    if (client->ending) continue;
    Push(*client, MakeReply(LH_IPC_GONE, 0, 0, {Code::kUnavailable, "peerd has shut down"}));
    client->end_when_flushed = true;
  }
}

void Connections::AddTo(IpcStats* stats) const {
  stats->clients = static_cast<uint32_t>(clients_.size());
  for (const auto& [number, client] : clients_) {
    stats->states += static_cast<uint32_t>(client->states.size());
  }
  stats->connections_refused += refused_;
  stats->users_refused += users_.forbidden();
  stats->limits_reached += users_.limited() + crowded_;
  stats->connections_cut += cut_;
  stats->requests_refused += refusals_;
}

}  // namespace longhaul::peerd::ipc
