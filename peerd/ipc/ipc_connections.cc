// Connections of trainers, from accept to their end, and reading and writing on them.
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
#include "peerd/ipc/ipc_server_impl.h"
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

Server::~Server() {
  life_->server = nullptr;
  ring_->SetSharedWork(nullptr);
  regions_.Close();
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

void Server::StartAccept() {
  accept_ = ring_->Accept(socket_.fd(), [life = life_](IoResult result) {
    if (life->server == nullptr) {
      if (result.value >= 0) close(result.value);
      return;
    }
    life->server->OnAccept(result);
  });
}

void Server::OnAccept(IoResult result) {
  accept_ = 0;
  if (closing_) {
    if (result.value >= 0) closer_.CloseSocket(UniqueFd(result.value));
    return;
  }
  if (result.value < 0) {
    // Probably no descriptor or no memory is left. A new try at once would fail, too, so wait.
    CountRefusal(absl::StrCat("accept failed (", strerror(-result.value), ")"));
    retry_ = ring_->Timeout(ring_->Now() + kAcceptRetryUs, [life = life_](IoResult) {
      if (life->server == nullptr) return;
      life->server->retry_ = 0;
      if (!life->server->closing_) life->server->StartAccept();
    });
    return;
  }
  StartAccept();
  UniqueFd fd(result.value);
  auto client = std::make_shared<Client>();
  absl::StatusOr<PeerCredentials> credentials = CredentialsOf(fd.get());
  const Outcome admitted = credentials.ok() ? Admit(*credentials, client.get())
                                            : Outcome{Code::kFailedPrecondition,
                                                      std::string(credentials.status().message())};
  if (!admitted.ok()) return Refuse(std::move(fd), admitted);
  client->life = life_;
  client->fd = std::move(fd);
  client->number = next_client_++;
  client->credentials = *std::move(credentials);
  clients_[client->number] = client;
  client->timer =
      ring_->Timeout(ring_->Now() + Millis(options_.hello_timeout_ms), [client](IoResult timeout) {
        client->timer = 0;
        Server* const server = client->life->server;
        if (server == nullptr) return;
        if (timeout.value == 0 && !client->greeted && !client->ending) {
          server->Cut(*client, {Code::kDeadlineExceeded, "no HELLO in time"});
        }
        server->Settle(client);
      });
  StartRecv(client);
  BoundSilent();
}

Outcome Server::Admit(const PeerCredentials& credentials, Client* client) {
  if (!Permitted(credentials, access_)) {
    ++users_refused_;
    return {Code::kFailedPrecondition,
            absl::StrCat("connection refused: user ", credentials.uid, ", process ",
                         credentials.pid, ", may not use this peerd; it admits ", ToString(access_),
                         " (--socket-mode, --socket-group, --allow-users and --allow-groups of "
                         "peerd)")};
  }
  User& user = UserOf(credentials.uid);
  if (const uint32_t unclosed = user.unclosed->load(); unclosed > LH_FOREIGN_DESCRIPTORS_MAX) {
    ++limits_reached_;
    return {Code::kUnavailable,
            absl::StrCat("connection refused: peerd is still closing ", unclosed,
                         " file descriptors that user ", credentials.uid,
                         " sent and that are no arena regions; end the processes that keep "
                         "them open")};
  }
  absl::StatusOr<Hold> held = user.account->Take(Resource::kConnections, 1);
  if (!held.ok()) {
    ++limits_reached_;
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

ResourceLimits Server::LimitsOfAll(const IpcServerOptions& options) {
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

User& Server::UserOf(uid_t uid) {
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
    if (options_.user_share < 100) limits = ShareOf(LimitsOfAll(options_), options_.user_share);
    user.account = Account::Make(absl::StrCat("user ", uid),
                                 absl::StrCat("(--user-share=", options_.user_share, " of peerd)"),
                                 limits, peerd_);
  }
  return user;
}

void Server::BoundSilent() {
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
  ++limits_reached_;
  Cut(*most->second.front(),
      {Code::kUnavailable, absl::StrCat("peerd has more than ", LH_CLIENTS_WITHOUT_HELLO_MAX,
                                        " connections without HELLO; this is the oldest one of "
                                        "user ",
                                        most->first, ", who has most of them")});
}

void Server::Refuse(UniqueFd fd, const Outcome& outcome) {
  ++connections_refused_;
  CountRefusal(outcome.text);
  // The buffer of a new connection has room for one frame. It does not matter if nobody reads it.
  const lh_ipc_reply reply = MakeReply(LH_IPC_GONE, 0, 0, outcome);
  (void)::send(fd.get(), &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
  closer_.CloseSocket(std::move(fd));
}

void Server::DropDescriptors(Client& client, std::vector<UniqueFd>& descriptors) {
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

void Server::CountRefusal(const std::string& what) {
  ++requests_refused_;
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

bool Server::MayLogClient() {
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

void Server::StartRecv(const ClientPtr& client) {
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
    if (client->life->server != nullptr) client->life->server->OnRecv(client, result);
  });
}

void Server::OnRecv(const ClientPtr& client, IoResult result) {
  Client& c = *client;
  if (!c.ending) {
    if (result.value <= 0 && !std::exchange(c.drained, true) && HasMore(c)) {
      // The trainer sent these requests before it closed the connection. The next read finds the
      // end again, in a later turn.
    } else if (result.value <= 0) {
      if (c.have > 0) {
        ++(c.greeted ? connections_cut_ : connections_refused_);
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

bool Server::HasRequest(const Client& c) {
  const size_t have = c.have - c.taken * sizeof c.request;
  if (have >= sizeof c.request) return true;
  constexpr size_t kVersionEnd = offsetof(lh_ipc_request, u.hello.version) + sizeof(uint32_t);
  const lh_ipc_request& first = c.inbox.front();
  return !c.greeted && have >= kVersionEnd && first.magic == LH_IPC_MAGIC &&
         first.type == LH_IPC_HELLO && first.u.hello.version != LH_IPC_VERSION;
}

Server::Source Server::NextRequest(Client& c) {
  // Requests of the queue come before a later one of the socket.
  if (c.shared != nullptr && c.shared->Peek(c.frames_taken, &c.request)) return Source::kShared;
  if (!HasRequest(c)) return Source::kNone;
  c.request = c.inbox[c.taken];
  return Source::kSocket;
}

void Server::TakeRequests(const ClientPtr& client) {
  Client& c = *client;
  if (!c.ending && c.pause != 0) return;
  LookAtShared(c);
  for (Source source; !c.ending && (source = NextRequest(c)) != Source::kNone;) {
    const bool costly = IsCostly(c.request);
    const Tick begin = costly ? ring_->Now() : Tick();
    if (costly && begin < *c.user.costly_from) {
      c.pause = ring_->Timeout(*c.user.costly_from, [client](IoResult) {
        client->pause = 0;
        if (client->life->server != nullptr) client->life->server->TakeRequests(client);
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
    OnRequest(client);
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

void Server::Push(Client& client, const lh_ipc_reply& reply) {
  if (client.ending) return;
  if (client.waiting.size() >= kRepliesWaitingMax + client.locals.size() * LH_OPS_OPEN_MAX) {
    ++connections_cut_;
    CountRefusal("client does not read its replies");
    End(client, "trainer does not read its replies");
    return;
  }
  client.waiting.push_back(reply);
  SendSoon(client);
}

void Server::SendSoon(Client& client) {
  if (client.send_due || (client.send != 0 && client.shared == nullptr)) return;
  client.send_due = true;
  ring_->BeforeSubmit([client = clients_.at(client.number)] {
    client->send_due = false;
    Server* const server = client->life->server;
    if (server != nullptr && !client->ending) server->SendReplies(client);
  });
}

void Server::SendReplies(const ClientPtr& client) {
  PutShared(*client);
  if (client->send == 0 && !client->waiting.empty()) StartSend(client);
}

void Server::StartSend(const ClientPtr& client) {
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
                         Server* const server = client->life->server;
                         if (server != nullptr) server->OnSend(client, result);
                       });
}

void Server::OnSend(const ClientPtr& client, IoResult result) {
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

void Server::Cut(Client& client, const Outcome& outcome) {
  ++(client.greeted ? connections_cut_ : connections_refused_);
  CountRefusal(outcome.text);
  if (client.send == 0) {
    const lh_ipc_reply reply = MakeReply(LH_IPC_GONE, 0, 0, outcome);
    (void)::send(client.fd.get(), &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  End(client, "trainer was cut off: " + outcome.text);
}

void Server::End(Client& client, const std::string& reason) {
  if (client.ending) return;
  client.ending = true;
  client.reason = reason;
  // Ends the operations in flight, so that their callbacks come and call Settle().
  shutdown(client.fd.get(), SHUT_RDWR);
  for (const IoId id : {client.recv, client.send, client.timer, client.pause}) {
    if (id != 0) ring_->Cancel(id);
  }
}

void Server::Settle(const ClientPtr& client) {
  Client& c = *client;
  if (!c.ending) return;
  if (!c.told) {
    c.told = true;
    const bool logged = c.logged || !c.locals.empty();
    for (const LocalId local : std::exchange(c.locals, {})) {
      const auto it = members_.find(local);
      posts_open_ -= static_cast<uint32_t>(it->second.posts.size());
      members_.erase(it);
      if (!closing_) handler_->OnGone(local, c.reason);
    }
    c.states.clear();
    c.regions.clear();
    c.shared.reset();
    std::erase(sharing_, client);
    c.calls.clear();
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

void Server::Close() {
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

IpcStats Server::GetStats() const {
  IpcStats stats;
  stats.clients = static_cast<uint32_t>(clients_.size());
  stats.members = static_cast<uint32_t>(members_.size());
  stats.posts_open = posts_open_;
  for (const auto& [number, client] : clients_) {
    stats.states += static_cast<uint32_t>(client->states.size());
  }
  stats.arena_bytes = regions_.bytes_mapped();
  stats.connections_refused = connections_refused_;
  stats.users_refused = users_refused_;
  stats.limits_reached = limits_reached_;
  stats.connections_cut = connections_cut_;
  stats.requests_refused = requests_refused_;
  return stats;
}

}  // namespace longhaul::peerd::ipc
