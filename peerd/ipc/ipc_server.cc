#include "peerd/ipc/ipc_server.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "peerd/io/unmapper.h"
#include "peerd/ipc/ipc_socket.h"
#include "proto/wire/ipc.h"
#include "proto/wire/ipc_check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// Descriptors that one read may bring; one is right, more are seen and closed.
constexpr size_t kDescriptorsMax = 8;
// Replies that may wait for a client that does not read, beyond those of its members' ops.
constexpr size_t kRepliesWaitingMax = size_t{2} * LH_OPS_OPEN_MAX;
constexpr int64_t kAcceptRetryUs = Millis(100);
constexpr int64_t kRefusalLogUs = Seconds(1);

class Server;

// Mappings whose last user is gone wait here for a safe moment: their release happens deep inside
// code that the removal would call again. Outlives the server as long as regions do.
struct RegionHub {
  Server* server = nullptr;  // null once the server is gone
  uint64_t bytes_mapped = 0;
  std::vector<ArenaRegion*> released;
  bool sweep_scheduled = false;
  Unmapper unmapper;

  void Unmap(ArenaRegion* region) {
    unmapper.Unmap(region->data, region->bytes);
    bytes_mapped -= region->bytes;
    delete region;
  }
};

// Member of no epoch yet, or of one; requests of it that are open.
struct Member {
  struct Client* client = nullptr;
  bool admitted = false;
  uint64_t join_call = 0;
  uint64_t step_call = 0;   // 0: none open
  uint64_t sync_call = 0;   // 0: none open, or it is the step's
  uint64_t sync_state = 0;  // that a sync or step with a sync uses; 0: none
  uint64_t held_state = 0;  // that is fetched into in the background; 0: none
  uint64_t take_call = 0;   // 0: none open
  // Of a step with a sync: that has ended.
  std::optional<std::pair<Outcome, StateSyncInfo>> step_sync;
  uint64_t leave_call = 0;  // 0: none open
  struct Post {
    uint64_t tag = 0;
    uint64_t source_region = 0;
    uint64_t target_region = 0;
  };
  std::map<uint64_t, Post> posts;  // by call
  std::set<uint64_t> tags;
  // Numbers of the WORLD and PROGRESS frames that say the last about this member, to be overwritten
  // while they wait.
  uint64_t world_frame = 0;
  uint64_t progress_frame = 0;
};

// One connection. Kept alive by the callbacks of its operations in the ring, which refer to its
// memory.
struct Client {
  std::shared_ptr<RegionHub> hub;
  UniqueFd fd;
  uint64_t number = 0;
  PeerCredentials credentials;
  std::string name;
  bool greeted = false;

  lh_ipc_request request{};
  size_t have = 0;
  std::vector<UniqueFd> descriptors;
  msghdr message{};
  iovec iov{};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];

  // Members that are out, the latest ones: a request may have crossed the news of it.
  std::deque<std::pair<LocalId, Outcome>> gone;

  std::vector<lh_ipc_reply> sending;
  size_t sent = 0;
  std::vector<lh_ipc_reply> waiting;
  uint64_t waiting_first = 1;  // number of the first frame in `waiting`

  IoId recv = 0;
  IoId send = 0;
  IoId timer = 0;
  bool ending = false;            // nothing is read or answered any more
  bool told = false;              // the handler has heard of it
  bool end_when_flushed = false;  // the server closes
  std::string reason;

  struct Region {
    std::shared_ptr<ArenaRegion> region;
    uint32_t posts = 0;
    uint32_t states = 0;
  };
  std::map<uint64_t, Region> regions;
  struct State {
    std::shared_ptr<LocalState> state;
    std::set<uint64_t> regions;
    bool syncing = false;  // or being prepared
  };
  std::map<uint64_t, State> states;
  std::set<LocalId> locals;
  std::set<uint64_t> calls;  // in use
};

lh_ipc_reply MakeReply(uint32_t type, uint64_t call, uint64_t member, const Outcome& outcome) {
  lh_ipc_reply reply;
  memset(&reply, 0, sizeof reply);
  reply.magic = LH_IPC_MAGIC;
  reply.type = type;
  reply.call = call;
  reply.member = member;
  reply.status = static_cast<int32_t>(outcome.code);
  if (!outcome.ok()) {
    size_t length = std::min<size_t>(outcome.text.size(), LH_ERROR_TEXT_BYTES_MAX);
    // Not in the middle of a character.
    while (length > 0 && length < outcome.text.size() && (outcome.text[length] & 0xc0) == 0x80) {
      --length;
    }
    memcpy(reply.u.text, outcome.text.data(), length);
  }
  return reply;
}

void PutWorld(const World& world, lh_ipc_reply* reply) {
  reply->world.epoch = world.epoch.value();
  reply->world.member_id = world.member.value();
  reply->world.rank = world.rank;
  reply->world.size = world.size;
  reply->world.pending = world.pending;
  reply->world.background = world.counts ? 0 : 1;
}

uint64_t Nanoseconds(int64_t us) { return us < 0 ? 0 : static_cast<uint64_t>(us) * 1000; }

void PutSync(const StateSyncInfo& info, lh_ipc_reply* reply) {
  if (info.torn) reply->flags |= LH_IPC_TORN;
  if (info.background) reply->flags |= LH_IPC_BACKGROUND;
  if (info.resumed) reply->flags |= LH_IPC_RESUMED;
  if (info.replaced) {
    reply->flags |= LH_IPC_REPLACED;
    reply->revision = info.revision;
  }
  if (reply->status != 0) return;  // the text is there
  reply->u.sync.revision = info.revision;
  reply->u.sync.hash_high = info.state.high;
  reply->u.sync.hash_low = info.state.low;
  reply->u.sync.bytes = info.bytes;
  reply->u.sync.seconds_ns = Nanoseconds(info.total_us);
  reply->u.sync.sources = info.sources;
}

// `bytes` at the place that a trainer named; nullptr: it does not lie in the arena.
uint8_t* Locate(const Client& client, const lh_ipc_range& range, uint64_t bytes) {
  const auto it = client.regions.find(range.region);
  if (it == client.regions.end()) return nullptr;
  const ArenaRegion& region = *it->second.region;
  if (range.offset > region.bytes || bytes > region.bytes - range.offset) return nullptr;
  return region.data + range.offset;
}

// The table of a state, once and for all: its memory may change under our eyes.
absl::StatusOr<std::vector<lh_ipc_tensor>> CopyTable(const Client& client,
                                                     const lh_ipc_state& wish) {
  const uint64_t bytes = uint64_t{wish.count} * sizeof(lh_ipc_tensor);
  const uint8_t* const from = Locate(client, wish.table, bytes);
  if (from == nullptr) return absl::InvalidArgumentError("its table lies outside of the arena");
  std::vector<lh_ipc_tensor> table(wish.count);
  memcpy(table.data(), from, bytes);
  return table;
}

// InvalidArgument if two tensors share bytes: a transfer into one would change the other.
absl::Status CheckApart(const LocalState& state) {
  std::vector<size_t> order;
  for (size_t i = 0; i < state.places.size(); ++i) {
    if (state.places[i] != nullptr) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return state.places[a] < state.places[b]; });
  for (size_t k = 1; k < order.size(); ++k) {
    const size_t low = order[k - 1];
    const size_t high = order[k];
    if (state.places[low] + state.manifest[low].bytes <= state.places[high]) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensors \"", state.manifest[low].name,
                                                   "\" and \"", state.manifest[high].name,
                                                   "\" share memory"));
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const Manifest& manifest) {
  std::set<std::string> names;
  for (const StateTensor& tensor : manifest) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two tensors are called \"", tensor.name, "\""));
    }
  }
  return absl::OkStatus();
}

// `regions`: those that it lies in.
absl::StatusOr<std::shared_ptr<LocalState>> MakeState(const Client& client,
                                                      const lh_ipc_state& wish,
                                                      const std::vector<lh_ipc_tensor>& table,
                                                      std::set<uint64_t>* regions) {
  auto state = std::make_shared<LocalState>();
  uint64_t bytes = 0;
  uint64_t chunks = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    const lh_ipc_tensor& entry = table[i];
    const std::string error = IpcTensorError(entry);
    if (!error.empty()) return absl::InvalidArgumentError(absl::StrCat("tensor ", i, ": ", error));
    if (entry.bytes > LH_STATE_BYTES_MAX - bytes) {
      return absl::InvalidArgumentError("all together have more than 2^50 bytes");
    }
    uint8_t* const data = entry.bytes == 0 ? nullptr : Locate(client, entry.data, entry.bytes);
    if (entry.bytes != 0 && data == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", i, " \"", entry.name, "\" lies outside of the arena"));
    }
    if (data != nullptr) regions->insert(entry.data.region);
    state->manifest.push_back({entry.name,
                               entry.dtype,
                               {entry.shape, entry.shape + entry.dims},
                               entry.bytes,
                               (entry.flags & LH_IPC_ALLOW_UNEQUAL) != 0});
    state->places.push_back(data);
    state->digests.emplace_back(CountChunks(entry.bytes));
    bytes += entry.bytes;
    chunks += CountChunks(entry.bytes);
  }
  uint8_t* const changed = chunks == 0 ? nullptr : Locate(client, wish.changed, chunks);
  if (chunks != 0 && changed == nullptr) {
    return absl::InvalidArgumentError("the marks of its chunks lie outside of the arena");
  }
  if (changed != nullptr) {
    state->changed = {changed, chunks};
    regions->insert(wish.changed.region);
  }
  LH_RETURN_IF_ERROR(CheckNames(state->manifest));
  LH_RETURN_IF_ERROR(CheckApart(*state));
  auto memory = std::make_shared<std::vector<std::shared_ptr<const ArenaRegion>>>();
  for (const uint64_t region : *regions) memory->push_back(client.regions.at(region).region);
  state->memory = std::move(memory);
  auto declared = std::make_shared<MemoryState>();
  declared->manifest = state->manifest;
  declared->places.resize(state->places.size());
  declared->digests.resize(state->digests.size());
  state->declared = std::move(declared);
  return state;
}

static_assert(static_cast<uint32_t>(control::SyncStrategy::kPopular) == LH_WIRE_POPULAR);
static_assert(static_cast<uint32_t>(control::SyncStrategy::kReceive) == LH_WIRE_RECEIVE);
static_assert(static_cast<uint32_t>(control::SyncStrategy::kSend) == LH_WIRE_SEND);

class Server final : public IpcServer {
 public:
  Server(IpcServerOptions options, ListeningSocket socket, Ring* ring, IpcHandler* handler)
      : options_(std::move(options)),
        socket_(std::move(socket)),
        ring_(ring),
        handler_(handler),
        hub_(std::make_shared<RegionHub>()) {
    hub_->server = this;
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
  void ScheduleSweep();
  bool closed() const override {
    return closing_ && accept_ == 0 && retry_ == 0 && clients_.empty() && !hub_->sweep_scheduled;
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
  // No more of this connection; Settle() does the rest.
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
  // What the request asks to be synced; false: it was refused. `call` of the member waits for it.
  bool TakeSync(Client& client, Member& member, StateSync* sync);
  void AllReduce(Client& client);
  void Members(Client& client);
  // A member of this client that may ask for something; otherwise answers the request.
  Member* ActiveMember(Client& client);
  absl::StatusOr<std::shared_ptr<ArenaRegion>> MapRegion(int fd, uint64_t bytes);
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
  // Unless the frame of that number still waits, which is overwritten then.
  void PushLatest(Client& client, const lh_ipc_reply& reply, uint64_t* frame);
  void EndSync(Member& member);
  void EndHold(Member& member);
  // Answers what is open, if anything is, and forgets the member.
  void Forget(LocalId local, const Outcome& outcome);

  const IpcServerOptions options_;
  ListeningSocket socket_;
  Ring* const ring_;
  IpcHandler* const handler_;
  const std::shared_ptr<RegionHub> hub_;
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

struct RegionDeleter {
  std::shared_ptr<RegionHub> hub;
  void operator()(ArenaRegion* region) const {
    if (hub->server == nullptr) {
      hub->Unmap(region);
      return;
    }
    hub->released.push_back(region);
    hub->server->ScheduleSweep();
  }
};

Server::~Server() {
  hub_->server = nullptr;
  if (accept_ != 0) ring_->Cancel(accept_);
  if (retry_ != 0) ring_->Cancel(retry_);
  for (auto& [number, client] : clients_) {
    shutdown(client->fd.get(), SHUT_RDWR);
    for (const IoId id : {client->recv, client->send, client->timer}) {
      if (id != 0) ring_->Cancel(id);
    }
    client->states.clear();
    client->regions.clear();
  }
  for (ArenaRegion* region : std::exchange(hub_->released, {})) hub_->Unmap(region);
}

void Server::ScheduleSweep() {
  if (hub_->sweep_scheduled) return;
  hub_->sweep_scheduled = true;
  ring_->Timeout(ring_->Now(), [hub = hub_](IoResult) {
    hub->sweep_scheduled = false;
    for (ArenaRegion* region : std::exchange(hub->released, {})) {
      if (hub->server != nullptr) {
        hub->server->handler_->OnRegionRemoved(region->data, region->bytes);
      }
      hub->Unmap(region);
    }
  });
}

// ------------------------------------------------------------------------------ connections

void Server::StartAccept() {
  accept_ = ring_->Accept(socket_.fd(), [hub = hub_](IoResult result) {
    if (hub->server == nullptr) {
      if (result.value >= 0) close(result.value);
      return;
    }
    hub->server->OnAccept(result);
  });
}

void Server::OnAccept(IoResult result) {
  accept_ = 0;
  if (closing_) {
    if (result.value >= 0) close(result.value);
    return;
  }
  if (result.value < 0) {
    // Out of descriptors or memory: the next try would fail as fast.
    CountRefusal(absl::StrCat("accept failed (", strerror(-result.value), ")"));
    retry_ = ring_->Timeout(ring_->Now() + kAcceptRetryUs, [hub = hub_](IoResult) {
      if (hub->server == nullptr) return;
      hub->server->retry_ = 0;
      if (!hub->server->closing_) hub->server->StartAccept();
    });
    return;
  }
  StartAccept();
  UniqueFd fd(result.value);
  absl::StatusOr<PeerCredentials> credentials = CredentialsOf(fd.get());
  if (!credentials.ok()) {
    return Refuse(fd.get(),
                  {Code::kFailedPrecondition, std::string(credentials.status().message())});
  }
  if (!Permitted(*credentials, geteuid(), socket_.group())) {
    return Refuse(fd.get(), {Code::kFailedPrecondition,
                             absl::StrCat("connection refused: user ", credentials->uid,
                                          " may not use this peerd; only root, user ", geteuid(),
                                          " and members of group ", socket_.group(),
                                          " may (--socket_group of peerd)")});
  }
  if (clients_.size() >= LH_CLIENTS_MAX) {
    return Refuse(fd.get(), {Code::kUnavailable,
                             absl::StrCat("connection refused: peerd has ", clients_.size(),
                                          " clients already, the most it "
                                          "takes; close some")});
  }
  auto client = std::make_shared<Client>();
  client->hub = hub_;
  client->fd = std::move(fd);
  client->number = next_client_++;
  client->credentials = *std::move(credentials);
  clients_[client->number] = client;
  client->timer =
      ring_->Timeout(ring_->Now() + Millis(options_.hello_timeout_ms), [client](IoResult timeout) {
        client->timer = 0;
        Server* const server = client->hub->server;
        if (server == nullptr) return;
        if (timeout.value == 0 && !client->greeted && !client->ending) {
          server->Cut(*client, {Code::kDeadlineExceeded, "no HELLO in time"});
        }
        server->Settle(client);
      });
  StartRecv(client);
}

void Server::Refuse(int fd, const Outcome& outcome) {
  ++connections_refused_;
  CountRefusal(outcome.text);
  // A new connection has room for one frame; whether anybody reads it is not our concern.
  const lh_ipc_reply reply = MakeReply(LH_IPC_GONE, 0, 0, outcome);
  (void)::send(fd, &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
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

void Server::StartRecv(const ClientPtr& client) {
  Client& c = *client;
  // To the end of this request only: so what descriptors come belong to it.
  c.iov.iov_base = reinterpret_cast<char*>(&c.request) + c.have;
  c.iov.iov_len = sizeof c.request - c.have;
  c.message = {};
  c.message.msg_iov = &c.iov;
  c.message.msg_iovlen = 1;
  c.message.msg_control = c.control;
  c.message.msg_controllen = sizeof c.control;
  c.recv = ring_->RecvMsg(c.fd.get(), &c.message, [client](IoResult result) {
    client->recv = 0;
    // Also when nobody cares any more: the descriptors are ours to close.
    if (result.value > 0) {
      ForEachDescriptor(client->message,
                        [&client](int fd) { client->descriptors.emplace_back(fd); });
    }
    if (client->hub->server != nullptr) client->hub->server->OnRecv(client, result);
  });
}

void Server::OnRecv(const ClientPtr& client, IoResult result) {
  Client& c = *client;
  if (!c.ending) {
    if (result.value <= 0) {
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
      // One of another version may be shorter, and wait for us.
      constexpr size_t kVersionEnd = offsetof(lh_ipc_request, u.hello.version) + sizeof(uint32_t);
      const bool foreign = !c.greeted && c.have >= kVersionEnd && c.request.magic == LH_IPC_MAGIC &&
                           c.request.type == LH_IPC_HELLO &&
                           c.request.u.hello.version != LH_IPC_VERSION;
      if (c.have == sizeof c.request || foreign) {
        OnRequest(client);
        c.have = 0;
        c.descriptors.clear();
      }
    }
  }
  if (!c.ending) StartRecv(client);
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
  if (client.send == 0) StartSend(clients_.at(client.number));
}

void Server::StartSend(const ClientPtr& client) {
  Client& c = *client;
  if (c.sent == c.sending.size() * sizeof(lh_ipc_reply)) {
    c.waiting_first += c.waiting.size();
    c.sending.clear();
    std::swap(c.sending, c.waiting);
    c.sent = 0;
  }
  const size_t bytes = c.sending.size() * sizeof(lh_ipc_reply) - c.sent;
  c.send = ring_->Send(c.fd.get(), reinterpret_cast<const char*>(c.sending.data()) + c.sent, bytes,
                       /*wait_all=*/true, [client](IoResult result) {
                         client->send = 0;
                         Server* const server = client->hub->server;
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
  // Ends what is in flight, so that a callback comes.
  shutdown(client.fd.get(), SHUT_RDWR);
  for (const IoId id : {client.recv, client.send, client.timer}) {
    if (id != 0) ring_->Cancel(id);
  }
}

void Server::Settle(const ClientPtr& client) {
  Client& c = *client;
  if (!c.ending) return;
  if (!c.told) {
    c.told = true;
    for (const LocalId local : std::exchange(c.locals, {})) {
      const auto it = members_.find(local);
      posts_open_ -= static_cast<uint32_t>(it->second.posts.size());
      members_.erase(it);
      if (!closing_) handler_->OnGone(local, c.reason);
    }
    c.states.clear();
    c.regions.clear();
    c.calls.clear();
    c.waiting.clear();
    c.descriptors.clear();
    if (c.greeted) {
      Log(LogLevel::kInfo, absl::StrCat("trainer detached client=", c.number) +
                               LogField("name", c.name) + LogField("reason", c.reason));
    }
  }
  if (c.recv == 0 && c.send == 0 && c.timer == 0) clients_.erase(c.number);
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

// ------------------------------------------------------------------------------ requests

void Server::OnRequest(const ClientPtr& client) {
  Client& c = *client;
  const lh_ipc_request& request = c.request;
  const std::string wrong = IpcProtocolError(request, c.greeted, c.descriptors.size());
  if (!wrong.empty()) return Cut(c, {Code::kFailedPrecondition, wrong});
  if (closing_) return;
  if (!c.calls.insert(request.call).second) {
    return Cut(c, {Code::kFailedPrecondition, absl::StrCat("call ", request.call, " is in use")});
  }
  switch (request.type) {
    case LH_IPC_HELLO:
      return Greet(c);
    case LH_IPC_REGION:
      return AddRegion(c);
    case LH_IPC_UNREGION:
      return RemoveRegion(c);
    case LH_IPC_JOIN:
      return Join(c);
    case LH_IPC_LEAVE:
      return Leave(c);
    case LH_IPC_STEP:
      return Step(c);
    case LH_IPC_ALL_REDUCE:
      return AllReduce(c);
    case LH_IPC_MEMBERS:
      return Members(c);
    case LH_IPC_STATE:
      return AddState(c);
    case LH_IPC_UNSTATE:
      return RemoveState(c);
    case LH_IPC_SYNC:
      return Sync(c);
    case LH_IPC_KEPT:
      return Kept(c);
    case LH_IPC_TAKE:
      return Take(c);
    case LH_IPC_PREPARE:
      return Prepare(c);
    default:
      LH_CHECK(false) << "request " << request.type << " passed the check";
  }
}

void Server::Greet(Client& client) {
  client.greeted = true;
  client.name = client.request.u.hello.name;
  if (client.timer != 0) ring_->Cancel(client.timer);
  Log(LogLevel::kInfo, absl::StrCat("trainer attached client=", client.number, " pid=",
                                    client.credentials.pid, " uid=", client.credentials.uid) +
                           LogField("name", client.name));
  Answer(client, client.request.call, {});
}

void Server::Deny(Client& client, Code code, const std::string& text) {
  ++requests_refused_;
  Answer(client, client.request.call, {code, text});
}

absl::StatusOr<std::shared_ptr<ArenaRegion>> Server::MapRegion(int fd, uint64_t bytes) {
  // Huge pages that nobody reserved, or files of other kinds, could fault in our hands.
  struct statfs fs;
  if (fstatfs(fd, &fs) != 0 || fs.f_type != TMPFS_MAGIC) {
    return absl::InvalidArgumentError("not a memfd of ordinary pages");
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("not a memfd sealed against shrinking");
  }
  struct stat status;
  if (fstat(fd, &status) != 0) return absl::InvalidArgumentError("fstat failed");
  if (static_cast<uint64_t>(status.st_size) < bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", status.st_size, " bytes, ", bytes, " were announced"));
  }
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return absl::UnavailableError(absl::StrCat("mmap failed (", strerror(errno), ")"));
  }
  hub_->bytes_mapped += bytes;
  return std::shared_ptr<ArenaRegion>(new ArenaRegion{static_cast<uint8_t*>(data), bytes},
                                      RegionDeleter{hub_});
}

void Server::AddRegion(Client& client) {
  const lh_ipc_region& wanted = client.request.u.region;
  const std::string what = absl::StrCat("arena region of ", wanted.bytes, " bytes refused: ");
  if (wanted.bytes == 0 || wanted.bytes > LH_REGION_BYTES_MAX) {
    return Deny(client, Code::kInvalidArgument, what + "1 to 2^40 are possible");
  }
  if (client.regions.count(wanted.region) != 0) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat(what, "region ", wanted.region, " exists already"));
  }
  if (client.regions.size() >= LH_REGIONS_MAX) {
    return Deny(client, Code::kUnavailable,
                absl::StrCat(what, "a client has at most ", LH_REGIONS_MAX, " regions"));
  }
  if (options_.arena_limit != 0 && (hub_->bytes_mapped > options_.arena_limit ||
                                    wanted.bytes > options_.arena_limit - hub_->bytes_mapped)) {
    return Deny(
        client, Code::kUnavailable,
        absl::StrCat(what, "the arena limit of peerd is ", options_.arena_limit, " bytes, and ",
                     hub_->bytes_mapped, " are in use; free tensors or raise --arena_limit"));
  }
  auto region = MapRegion(client.descriptors.front().get(), wanted.bytes);
  if (!region.ok()) {
    return Deny(client,
                absl::IsUnavailable(region.status()) ? Code::kUnavailable : Code::kInvalidArgument,
                what + std::string(region.status().message()));
  }
  handler_->OnRegionAdded((*region)->data, (*region)->bytes);
  client.regions[wanted.region].region = *std::move(region);
  Answer(client, client.request.call, {});
}

void Server::RemoveRegion(Client& client) {
  const uint64_t id = client.request.u.region.region;
  const auto it = client.regions.find(id);
  if (it == client.regions.end()) {
    return Deny(client, Code::kInvalidArgument, absl::StrCat("no arena region ", id));
  }
  if (it->second.posts > 0) {
    return Deny(client, Code::kFailedPrecondition,
                absl::StrCat("arena region ", id, " is used by ", it->second.posts,
                             " operations in flight; wait for them"));
  }
  if (it->second.states > 0) {
    return Deny(client, Code::kFailedPrecondition,
                absl::StrCat("arena region ", id, " holds ", it->second.states,
                             " states; free them first"));
  }
  client.regions.erase(it);
  Answer(client, client.request.call, {});
}

void Server::Join(Client& client) {
  if (members_.size() >= LH_LOCAL_MEMBERS_MAX) {
    return Deny(client, Code::kUnavailable,
                absl::StrCat("join refused: peerd has ", members_.size(),
                             " members already, the most it takes; run another peerd"));
  }
  const LocalId local(next_local_++);
  Member& member = members_[local];
  member.client = &client;
  member.join_call = client.request.call;
  client.locals.insert(local);
  const lh_ipc_join& wish = client.request.u.join;
  handler_->OnJoin({local,
                    {wish.run, wish.group},
                    wish.name[0] != '\0' ? wish.name : client.name,
                    wish.cohort,
                    wish.cohort_size,
                    wish.step_deadline_ms,
                    wish.background != 0});
}

void Server::Leave(Client& client) {
  LocalId local(client.request.member);
  if (!local) {
    for (const LocalId own : client.locals) {
      if (members_.at(own).join_call == client.request.u.leave.join) local = own;
    }
  }
  if (client.locals.count(local) == 0) {
    return DenyUnknown(client, local);
  }
  Member& member = members_.at(local);
  if (member.leave_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member is leaving already");
  }
  member.leave_call = client.request.call;
  handler_->OnLeave(local);
}

void Server::DenyUnknown(Client& client, LocalId local) {
  for (const auto& [gone, outcome] : client.gone) {
    if (gone != local) continue;
    if (outcome.ok()) return Deny(client, Code::kFailedPrecondition, "the member has left");
    return Deny(client, outcome.code, outcome.text);
  }
  Deny(client, Code::kFailedPrecondition, "no such member on this connection");
}

Member* Server::ActiveMember(Client& client) {
  const LocalId local(client.request.member);
  if (client.locals.count(local) == 0) {
    DenyUnknown(client, local);
    return nullptr;
  }
  Member& member = members_.at(local);
  if (!member.admitted) {
    Deny(client, Code::kFailedPrecondition, "the member is not admitted yet; wait for its join");
    return nullptr;
  }
  if (member.leave_call != 0) {
    Deny(client, Code::kFailedPrecondition, "the member is leaving");
    return nullptr;
  }
  return &member;
}

void Server::Step(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  if (member->step_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member waits at a step boundary already");
  }
  if (member->sync_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member is in a sync; wait for its end");
  }
  if (member->take_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member takes its state; wait for that");
  }
  StateSync sync;
  const bool with_sync = client.request.u.sync.state != 0;
  if (with_sync && !TakeSync(client, *member, &sync)) return;
  member->step_call = client.request.call;
  handler_->OnStep(LocalId(client.request.member), with_sync ? &sync : nullptr);
}

void Server::Sync(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  if (member->step_call != 0 || member->sync_call != 0) {
    return Deny(client, Code::kFailedPrecondition,
                member->sync_call != 0 ? "the member is in a sync already; wait for its end"
                                       : "the member waits at a step boundary; wait for it first");
  }
  if (member->take_call != 0) {
    return Deny(client, Code::kFailedPrecondition, "the member takes its state; wait for that");
  }
  StateSync sync;
  if (!TakeSync(client, *member, &sync)) return;
  member->sync_call = client.request.call;
  handler_->OnSync(LocalId(client.request.member), sync);
}

bool Server::TakeSync(Client& client, Member& member, StateSync* sync) {
  const lh_ipc_sync& wish = client.request.u.sync;
  const auto refuse = [&](Code code, const std::string& why) {
    Deny(client, code, "sync refused: " + why);
    return false;
  };
  const auto it = client.states.find(wish.state);
  if (it == client.states.end()) {
    return refuse(Code::kInvalidArgument, absl::StrCat("no state ", wish.state));
  }
  if (member.held_state != 0 && member.held_state != wish.state) {
    return refuse(
        Code::kFailedPrecondition,
        "another state is fetched for this member in the background; take that one first");
  }
  if (it->second.syncing && member.held_state == 0) {
    return refuse(Code::kFailedPrecondition, "another sync uses this state; wait for its end");
  }
  if (wish.revision > LH_REVISION_MAX) {
    return refuse(Code::kInvalidArgument,
                  absl::StrCat("revision ", wish.revision, "; at most 2^63 are possible"));
  }
  if (wish.touched.region != 0) {
    const size_t bytes = it->second.state->manifest.size();
    const uint8_t* const from = Locate(client, wish.touched, bytes);
    if (from == nullptr) {
      return refuse(Code::kInvalidArgument, "what was touched lies outside of the arena");
    }
    sync->touched.assign(from, from + bytes);
  }
  sync->state = it->second.state;
  sync->strategy = static_cast<control::SyncStrategy>(wish.strategy);
  sync->revision = wish.revision;
  sync->restored = (wish.flags & LH_IPC_RESTORED) != 0;
  sync->torn = (wish.flags & LH_IPC_SYNC_TORN) != 0;
  it->second.syncing = true;
  member.sync_state = wish.state;
  member.step_sync.reset();
  // A later PROGRESS stands behind what was said of earlier syncs.
  member.progress_frame = 0;
  return true;
}

void Server::AddState(Client& client) {
  const lh_ipc_state wish = client.request.u.state;
  const auto refuse = [&](Code code, const std::string& why) {
    Deny(client, code, absl::StrCat("state of ", wish.count, " tensors refused: ", why));
  };
  if (client.states.count(wish.state) != 0) {
    return refuse(Code::kInvalidArgument, absl::StrCat("state ", wish.state, " exists already"));
  }
  if (client.states.size() >= LH_STATES_MAX) {
    return refuse(Code::kUnavailable,
                  absl::StrCat("a client has at most ", LH_STATES_MAX, "; free some"));
  }
  if (wish.count == 0 || wish.count > LH_STATE_TENSORS_MAX) {
    return refuse(Code::kInvalidArgument,
                  absl::StrCat("1 to ", LH_STATE_TENSORS_MAX, " are possible"));
  }
  Client::State made;
  const absl::StatusOr<std::vector<lh_ipc_tensor>> table = CopyTable(client, wish);
  absl::Status status = table.status();
  if (status.ok()) {
    auto state = MakeState(client, wish, *table, &made.regions);
    status = state.status();
    if (state.ok()) made.state = *std::move(state);
  }
  if (!status.ok()) return refuse(Code::kInvalidArgument, std::string(status.message()));
  for (const uint64_t region : made.regions) ++client.regions.at(region).states;
  client.states[wish.state] = std::move(made);
  Answer(client, client.request.call, {});
}

void Server::RemoveState(Client& client) {
  const auto it = client.states.find(client.request.u.state.state);
  if (it == client.states.end()) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat("no state ", client.request.u.state.state));
  }
  if (it->second.syncing) {
    return Deny(client, Code::kFailedPrecondition, "a sync uses this state; wait for its end");
  }
  for (const uint64_t region : it->second.regions) --client.regions.at(region).states;
  client.states.erase(it);
  Answer(client, client.request.call, {});
}

void Server::Prepare(Client& client) {
  const uint64_t state = client.request.u.state.state;
  const auto it = client.states.find(state);
  if (it == client.states.end()) {
    return Deny(client, Code::kInvalidArgument, absl::StrCat("no state ", state));
  }
  if (it->second.syncing) {
    return Deny(client, Code::kFailedPrecondition, "a sync uses this state; wait for its end");
  }
  it->second.syncing = true;
  handler_->OnPrepare(it->second.state,
                      [this, number = client.number, state, call = client.request.call] {
                        Prepared(number, state, call);
                      });
}

void Server::Prepared(uint64_t client, uint64_t state, uint64_t call) {
  const auto it = clients_.find(client);
  if (it == clients_.end() || it->second->told) return;
  it->second->states.at(state).syncing = false;
  Answer(*it->second, call, {});
}

void Server::Take(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  if (member->step_call != 0 || member->sync_call != 0 || member->take_call != 0) {
    return Deny(client, Code::kFailedPrecondition,
                "the member waits in another call; wait for its end");
  }
  member->take_call = client.request.call;
  handler_->OnTake(LocalId(client.request.member), client.request.u.take.timeout_ms);
}

void Server::Kept(Client& client) {
  if (ActiveMember(client) == nullptr) return;
  const auto it = client.states.find(client.request.u.state.state);
  if (it == client.states.end()) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat("no state ", client.request.u.state.state));
  }
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, client.request.call, client.request.member, {});
  uint64_t revision = 0;
  if (handler_->OnKept(LocalId(client.request.member), *it->second.state, &revision)) {
    reply.u.kept.kept = 1;
    reply.u.kept.revision = revision;
  }
  client.calls.erase(client.request.call);
  Push(client, reply);
}

void Server::AllReduce(Client& client) {
  Member* const member = ActiveMember(client);
  if (member == nullptr) return;
  const lh_ipc_op& op = client.request.u.op;
  const auto source = client.regions.find(op.source.region);
  const auto target = client.regions.find(op.target.region);
  if (source == client.regions.end() || target == client.regions.end()) {
    return Deny(client, Code::kInvalidArgument, "all-reduce refused: unknown arena region");
  }
  const absl::StatusOr<OpDesc> desc =
      ParseIpcOp(op, source->second.region->bytes, target->second.region->bytes);
  if (!desc.ok()) {
    return Deny(client, Code::kInvalidArgument, std::string(desc.status().message()));
  }
  if (member->posts.size() >= LH_OPS_OPEN_MAX) {
    return Deny(client, Code::kUnavailable,
                absl::StrCat("all-reduce refused: ", member->posts.size(),
                             " operations of the member are in flight; wait for some"));
  }
  if (!member->tags.insert(op.tag).second) {
    return Deny(client, Code::kInvalidArgument,
                absl::StrCat("all-reduce refused: tag ", op.tag, " is in flight already"));
  }
  member->posts[client.request.call] = {op.tag, op.source.region, op.target.region};
  ++posts_open_;
  ++source->second.posts;
  ++target->second.posts;
  IpcPost post;
  post.post = {LocalId(client.request.member), client.request.call};
  post.tag = op.tag;
  post.desc = *desc;
  post.source = source->second.region->data + op.source.offset;
  post.target = target->second.region->data + op.target.offset;
  post.source_region = source->second.region;
  post.target_region = target->second.region;
  handler_->OnPost(post);
}

void Server::Members(Client& client) {
  if (ActiveMember(client) == nullptr) return;
  const IpcMembers members = handler_->OnMembers(LocalId(client.request.member));
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, client.request.call, client.request.member, {});
  lh_ipc_members_page& page = reply.u.members;
  const size_t first = std::min<size_t>(client.request.u.members.first, members.members.size());
  page.epoch = members.epoch.value();
  page.first = static_cast<uint32_t>(first);
  page.count =
      static_cast<uint32_t>(std::min<size_t>(LH_IPC_MEMBERS_PAGE, members.members.size() - first));
  for (uint32_t i = 0; i < page.count; ++i) {
    page.member_ids[i] = members.members[first + i].value();
  }
  client.calls.erase(client.request.call);
  Push(client, reply);
}

// ------------------------------------------------------------------------------ replies

void Server::Answer(Client& client, uint64_t call, const Outcome& outcome) {
  client.calls.erase(call);
  Push(client, MakeReply(LH_IPC_DONE, call, 0, outcome));
}

void Server::AnswerWithWorld(Client& client, uint64_t call, LocalId local, const World& world) {
  client.calls.erase(call);
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, local.value(), {});
  PutWorld(world, &reply);
  // A later WORLD stands behind this one, not in the place of an earlier.
  members_.at(local).world_frame = 0;
  Push(client, reply);
}

Member* Server::Find(LocalId local) {
  const auto it = members_.find(local);
  if (it == members_.end() || it->second.client->ending) return nullptr;
  return &it->second;
}

void Server::Forget(LocalId local, const Outcome& outcome) {
  const auto it = members_.find(local);
  Member member = std::move(it->second);
  Client& client = *member.client;
  members_.erase(it);
  client.locals.erase(local);
  client.gone.emplace_back(local, outcome);
  if (client.gone.size() > LH_LOCAL_MEMBERS_MAX) client.gone.pop_front();
  posts_open_ -= static_cast<uint32_t>(member.posts.size());
  for (const auto& [call, post] : member.posts) {
    --client.regions.at(post.source_region).posts;
    --client.regions.at(post.target_region).posts;
    Answer(client, call, outcome);
  }
  EndSync(member);
  EndHold(member);
  if (member.take_call != 0) Answer(client, member.take_call, outcome);
  if (member.step_call != 0 && member.step_sync) {
    AnswerWithSync(client, member.step_call, local, outcome, member.step_sync->second);
  } else if (member.step_call != 0) {
    Answer(client, member.step_call, outcome);
  }
  if (member.sync_call != 0) Answer(client, member.sync_call, outcome);
  // Out is out, for whatever reason.
  if (member.leave_call != 0) Answer(client, member.leave_call, {});
}

void Server::JoinDone(LocalId local, const Outcome& outcome, const World& world) {
  Member* const member = Find(local);
  if (member == nullptr || member->admitted) return;
  Client& client = *member->client;
  if (outcome.ok()) {
    member->admitted = true;
    AnswerWithWorld(client, member->join_call, local, world);
  } else {
    Answer(client, member->join_call, outcome);
    Forget(local, outcome);
  }
}

void Server::StepDone(LocalId local, const Outcome& outcome, const World& world) {
  Member* const member = Find(local);
  if (member == nullptr || member->step_call == 0) return;
  LH_CHECK(member->sync_state == 0) << "a step is over before its sync";
  Client& client = *member->client;
  const uint64_t call = std::exchange(member->step_call, 0);
  const auto sync = std::exchange(member->step_sync, std::nullopt);
  const bool sync_failed = sync && !sync->first.ok();
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, local.value(),
                                 outcome.ok() && sync_failed ? sync->first : outcome);
  if (outcome.ok()) {
    reply.flags |= LH_IPC_PASSED;
    PutWorld(world, &reply);
    // A later WORLD stands behind this one, not in the place of an earlier.
    member->world_frame = 0;
  }
  if (sync) PutSync(sync->second, &reply);
  client.calls.erase(call);
  Push(client, reply);
}

void Server::EndSync(Member& member) {
  if (member.sync_state == 0) return;
  member.client->states.at(std::exchange(member.sync_state, 0)).syncing = false;
}

void Server::EndHold(Member& member) {
  if (member.held_state == 0) return;
  member.client->states.at(std::exchange(member.held_state, 0)).syncing = false;
}

void Server::SyncDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) {
  Member* const member = Find(local);
  if (member == nullptr || member->sync_state == 0) return;
  const uint64_t state = member->sync_state;
  EndSync(*member);
  if (!info.background) {
    EndHold(*member);
  } else {
    member->held_state = state;
    member->client->states.at(state).syncing = true;
  }
  if (member->sync_call == 0) {
    member->step_sync = {outcome, info};
    return;
  }
  AnswerWithSync(*member->client, std::exchange(member->sync_call, 0), local, outcome, info);
}

void Server::TakeDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) {
  Member* const member = Find(local);
  if (member == nullptr || member->take_call == 0) return;
  if (outcome.ok()) EndHold(*member);
  AnswerWithSync(*member->client, std::exchange(member->take_call, 0), local, outcome, info);
}

void Server::AnswerWithSync(Client& client, uint64_t call, LocalId local, const Outcome& outcome,
                            const StateSyncInfo& info) {
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, call, local.value(), outcome);
  PutSync(info, &reply);
  client.calls.erase(call);
  Push(client, reply);
}

void Server::SyncProgress(LocalId local, const control::FetchProgress& progress) {
  Member* const member = Find(local);
  if (member == nullptr || (member->sync_state == 0 && member->held_state == 0)) return;
  lh_ipc_reply reply = MakeReply(LH_IPC_PROGRESS, 0, local.value(), {});
  reply.u.progress.bytes_done = progress.bytes_done;
  reply.u.progress.bytes_total = progress.bytes_total;
  reply.u.progress.bytes_per_second = progress.bytes_per_second;
  reply.u.progress.sources = progress.sources;
  PushLatest(*member->client, reply, &member->progress_frame);
}

void Server::LeaveDone(LocalId local, const Outcome& outcome) {
  Member* const member = Find(local);
  if (member == nullptr || member->leave_call == 0) return;
  if (!outcome.ok()) {
    Answer(*member->client, std::exchange(member->leave_call, 0), outcome);
    return;
  }
  const Outcome left{Code::kAborted, "the member has left"};
  if (!member->admitted) Answer(*member->client, member->join_call, left);
  Forget(local, left);
}

void Server::PostDone(const PostRef& post, const Outcome& outcome, const OpInfo& info,
                      uint64_t bytes_sent, uint64_t bytes_received) {
  Member* const member = Find(post.local);
  if (member == nullptr) return;
  const auto it = member->posts.find(post.call);
  if (it == member->posts.end()) return;
  Client& client = *member->client;
  --client.regions.at(it->second.source_region).posts;
  --client.regions.at(it->second.target_region).posts;
  member->tags.erase(it->second.tag);
  member->posts.erase(it);
  --posts_open_;
  lh_ipc_reply reply = MakeReply(LH_IPC_DONE, post.call, post.local.value(), outcome);
  if (outcome.ok()) {
    reply.u.op.epoch = info.epoch.value();
    reply.u.op.bytes_sent = bytes_sent;
    reply.u.op.bytes_received = bytes_received;
    reply.u.op.seconds_total_ns = Nanoseconds(info.total_us);
    reply.u.op.seconds_wait_ns = Nanoseconds(info.wait_us);
    reply.u.op.size = info.size;
    reply.u.op.retries = info.retries;
    reply.u.op.algorithm = static_cast<uint32_t>(info.algorithm);
  }
  client.calls.erase(post.call);
  Push(client, reply);
}

void Server::WorldChanged(LocalId local, const World& world) {
  Member* const member = Find(local);
  // Before admission JoinDone says it all.
  if (member == nullptr || !member->admitted) return;
  Client& client = *member->client;
  lh_ipc_reply reply = MakeReply(LH_IPC_WORLD, 0, local.value(), {});
  PutWorld(world, &reply);
  PushLatest(client, reply, &member->world_frame);
}

void Server::PushLatest(Client& client, const lh_ipc_reply& reply, uint64_t* frame) {
  if (*frame >= client.waiting_first) {
    client.waiting[*frame - client.waiting_first] = reply;
    return;
  }
  *frame = client.waiting_first + client.waiting.size();
  Push(client, reply);
}

void Server::MemberGone(LocalId local, const Outcome& outcome) {
  Member* const member = Find(local);
  if (member == nullptr) return;
  Client& client = *member->client;
  if (!member->admitted) Answer(client, member->join_call, outcome);
  // Before the answers: what they fail with is then known to be the end of the member.
  Push(client, MakeReply(LH_IPC_GONE, 0, local.value(), outcome));
  Forget(local, outcome);
}

IpcStats Server::GetStats() const {
  IpcStats stats;
  stats.clients = static_cast<uint32_t>(clients_.size());
  stats.members = static_cast<uint32_t>(members_.size());
  stats.posts_open = posts_open_;
  stats.arena_bytes = hub_->bytes_mapped;
  stats.connections_refused = connections_refused_;
  stats.connections_cut = connections_cut_;
  stats.requests_refused = requests_refused_;
  return stats;
}

}  // namespace

absl::StatusOr<std::unique_ptr<IpcServer>> MakeIpcServer(const IpcServerOptions& options,
                                                         Ring* ring, IpcHandler* handler) {
  LH_ASSIGN_OR_RETURN(ListeningSocket socket,
                      ListenOnPath(options.path, options.mode, options.group));
  return std::unique_ptr<IpcServer>(
      std::make_unique<Server>(options, std::move(socket), ring, handler));
}

}  // namespace longhaul::peerd
