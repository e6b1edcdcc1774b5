#include "peerd/io/fake_ring.h"

#include <netinet/in.h>
#include <string.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

constexpr uint8_t kJunk = 0xdb;

bool IsWildcard(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
  }
  return IN6_IS_ADDR_UNSPECIFIED(
      &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
}

void SetPort(SocketAddress* address, uint16_t port) {
  if (address->family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&address->storage)->sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6*>(&address->storage)->sin6_port = htons(port);
  }
}

SocketAddress Loopback(uint16_t port) {
  return *NumericAddress(HostPort{.host = "127.0.0.1", .port = port});
}

}  // namespace

void FakeRing::Stream::Drop(size_t bytes) {
  head += bytes;
  if (head < data.size() / 2 && head < 4096) return;
  data.erase(0, head);
  head = 0;
}

size_t FakeRing::Stream::Piece(size_t bytes) const {
  if (!detour) return bytes;
  for (const uint64_t bound : {detour->from, detour->to, detour->at}) {
    if (written < bound) bytes = std::min<uint64_t>(bytes, bound - written);
  }
  return bytes;
}

void FakeRing::Stream::Add(const std::string& piece) {
  const bool away = detour && written >= detour->from && written < detour->to;
  if (away) detour->bytes += piece;
  if (!away || detour->repeat) data += piece;
  if (!away && flip_at - written < piece.size()) {
    data[data.size() - piece.size() + (flip_at - written)] ^= 1;
  }
  if (record) recorded += piece;
  written += piece.size();
  if (!detour || written != detour->at) return;
  data += detour->bytes;
  detour.reset();
}

FakeRing::FakeRing(FakeRingOptions options) : options_(options), random_(options.seed) {
  features_ = {.send_zero_copy = options_.send_zero_copy,
               .registered_buffers = options_.registered_buffers,
               .description = "in memory"};
}

FakeRing::~FakeRing() = default;

// ------------------------------------------------------------------------------ faults

void FakeRing::CutConnection(int connection, bool from_dialer, uint64_t after_bytes) {
  Fault& fault = faults_[connection];
  (from_dialer ? fault.cut_from_dialer : fault.cut_to_dialer) = after_bytes;
  if (connection < connections()) {
    Link& link = links_[connection];
    Stream& stream = from_dialer ? *link.from_dialer : *link.to_dialer;
    stream.cut_after = std::max(after_bytes, stream.written);
    if (stream.written >= stream.cut_after) link.from_dialer->cut = link.to_dialer->cut = true;
  }
}

void FakeRing::FlipBit(int connection, bool from_dialer, uint64_t at) {
  Fault& fault = faults_[connection];
  (from_dialer ? fault.flip_from_dialer : fault.flip_to_dialer) = at;
  if (connection >= connections()) return;
  Link& link = links_[connection];
  Stream& stream = from_dialer ? *link.from_dialer : *link.to_dialer;
  LH_CHECK(at >= stream.written);
  stream.flip_at = at;
}

FakeRing::Stream* FakeRing::FindStream(int connection, bool from_dialer) {
  LH_CHECK(connection < connections());
  Link& link = links_[connection];
  return from_dialer ? link.from_dialer.get() : link.to_dialer.get();
}

void FakeRing::RepeatBytes(int connection, bool from_dialer, uint64_t from, uint64_t to) {
  Stream* const stream = FindStream(connection, from_dialer);
  LH_CHECK(from >= stream->written && from < to);
  stream->detour = {from, to, to, /*repeat=*/true, ""};
}

void FakeRing::DelayBytes(int connection, bool from_dialer, uint64_t from, uint64_t to,
                          uint64_t at) {
  Stream* const stream = FindStream(connection, from_dialer);
  LH_CHECK(from >= stream->written && from < to && to <= at);
  stream->detour = {from, to, at, /*repeat=*/false, ""};
}

const std::string& FakeRing::Recorded(int connection, bool by_dialer) const {
  LH_CHECK(record_ && connection < connections());
  const Link& link = links_[connection];
  return by_dialer ? link.from_dialer->recorded : link.to_dialer->recorded;
}

void FakeRing::StallConnection(int connection, bool stalled) {
  faults_[connection].stalled = stalled;
  if (connection < connections()) {
    links_[connection].from_dialer->stalled = links_[connection].to_dialer->stalled = stalled;
  }
}

void FakeRing::Refuse(const std::string& address, bool refused) {
  if (refused) {
    refusing_.insert(address);
  } else {
    refusing_.erase(address);
  }
}

void FakeRing::Ignore(const std::string& address, bool ignored) {
  if (ignored) {
    ignoring_.insert(address);
  } else {
    ignoring_.erase(address);
  }
}

uint64_t FakeRing::BytesSent(int connection, bool by_dialer) const {
  const Link& link = links_[connection];
  return (by_dialer ? link.from_dialer : link.to_dialer)->written;
}

std::pair<int, int> FakeRing::Pair() {
  const int a = NewSocket();
  const int b = NewSocket();
  sockets_[a].local = Loopback(next_port_++);
  sockets_[b].local = Loopback(next_port_++);
  Join(&sockets_[a], &sockets_[b]);
  return {a, b};
}

// ------------------------------------------------------------------------------ sockets

int FakeRing::NewSocket() {
  const int fd = next_fd_++;
  sockets_[fd];
  return fd;
}

FakeRing::Socket* FakeRing::Find(int fd) {
  const auto it = sockets_.find(fd);
  return it == sockets_.end() ? nullptr : &it->second;
}

void FakeRing::Join(Socket* dialer, Socket* acceptor) {
  Link link{std::make_shared<Stream>(), std::make_shared<Stream>()};
  if (const auto it = faults_.find(connections()); it != faults_.end()) {
    link.from_dialer->cut_after = it->second.cut_from_dialer;
    link.to_dialer->cut_after = it->second.cut_to_dialer;
    link.from_dialer->flip_at = it->second.flip_from_dialer;
    link.to_dialer->flip_at = it->second.flip_to_dialer;
    link.from_dialer->stalled = link.to_dialer->stalled = it->second.stalled;
    if (link.from_dialer->cut_after == 0 || link.to_dialer->cut_after == 0) {
      link.from_dialer->cut = link.to_dialer->cut = true;
    }
  }
  link.from_dialer->record = link.to_dialer->record = record_;
  link.from_dialer->segment_bytes_max = dialer->segment_bytes_max;
  link.to_dialer->segment_bytes_max = dialer->segment_bytes_max;
  dialer->out = acceptor->in = link.from_dialer;
  dialer->in = acceptor->out = link.to_dialer;
  dialer->remote = acceptor->local;
  acceptor->remote = dialer->local;
  links_.push_back(std::move(link));
}

FakeRing::Socket* FakeRing::FindListener(const SocketAddress& address) {
  for (auto& [fd, socket] : sockets_) {
    if (!socket.listening || socket.closing || socket.local.port() != address.port()) continue;
    if (ToString(socket.local) == ToString(address)) return &socket;
    if (IsWildcard(socket.local) && socket.local.family() == address.family()) return &socket;
  }
  return nullptr;
}

absl::StatusOr<int> FakeRing::Listen(const SocketAddress& address) {
  SocketAddress local = address;
  if (local.port() == 0) SetPort(&local, next_port_++);
  if (FindListener(local) != nullptr) {
    return absl::UnavailableError(
        absl::StrCat("listen on ", ToString(local), ": ", strerror(EADDRINUSE)));
  }
  const int fd = NewSocket();
  sockets_[fd].local = local;
  sockets_[fd].listening = true;
  return fd;
}

absl::StatusOr<SocketAddress> FakeRing::LocalAddress(int fd) {
  const Socket* socket = Find(fd);
  if (socket == nullptr) return absl::UnavailableError("getsockname: Bad file descriptor");
  return socket->local;
}

absl::StatusOr<SocketAddress> FakeRing::PeerAddress(int fd) {
  const Socket* socket = Find(fd);
  if (socket == nullptr || socket->in == nullptr) {
    return absl::UnavailableError("getpeername: not connected");
  }
  return socket->remote;
}

void FakeRing::DialFrom(const std::string& host) {
  dial_from_ = NumericAddress({.host = host, .port = 0});
  LH_CHECK(dial_from_.has_value());
}

absl::StatusOr<int> FakeRing::Open(int) { return NewSocket(); }

absl::Status FakeRing::Tune(int fd, const StreamTuning& tuning) {
  if (tuning.congestion == "none-such") {
    return absl::InvalidArgumentError("congestion control none-such: No such file or directory");
  }
  if (!tuning.congestion.empty()) Find(fd)->congestion = tuning.congestion;
  if (tuning.segment_bytes_max != 0) Find(fd)->segment_bytes_max = tuning.segment_bytes_max;
  return absl::OkStatus();
}

std::set<std::string> FakeRing::congestions() const {
  std::set<std::string> result;
  for (const auto& [fd, socket] : sockets_) {
    if (socket.in != nullptr) result.insert(socket.congestion);
  }
  return result;
}

std::optional<TcpDelivery> FakeRing::Delivery(int fd) {
  const Socket* socket = Find(fd);
  LH_CHECK(socket != nullptr);
  if (!delivery_ || socket->out == nullptr) return delivery_;
  TcpDelivery delivery = *delivery_;
  delivery.bytes_acked = delivery.bytes_arrived = socket->out->read;
  delivery.bytes_sent = socket->out->written;
  if (socket->out->written > 256 << 10) delivery.usual_rtt_us += queue_of_each_us_;
  return delivery;
}

void FakeRing::ShutdownSend(int fd) {
  Socket* socket = Find(fd);
  LH_CHECK(socket != nullptr);
  if (socket->out != nullptr) socket->out->ended = true;
}

void FakeRing::Close(int fd) {
  Socket* socket = Find(fd);
  LH_CHECK(socket != nullptr && !socket->closing) << "close of a socket that is not open";
  socket->closing = true;
  MaybeRelease(fd);
}

void FakeRing::Abort(int fd) {
  Socket* socket = Find(fd);
  LH_CHECK(socket != nullptr);
  socket->abort = true;
  Close(fd);
}

// Operations in flight keep a socket open, as in the kernel.
void FakeRing::MaybeRelease(int fd) {
  Socket* socket = Find(fd);
  if (socket == nullptr || !socket->closing || socket->holds > 0) return;
  const std::deque<int> backlog = std::move(socket->backlog);
  if (socket->in != nullptr) {
    const bool reset = socket->abort || socket->in->size() > 0;
    socket->in->reader_gone = true;
    socket->in->Drop(socket->in->size());
    socket->out->ended = true;
    if (reset) {
      socket->in->cut = socket->out->cut = true;
      if (random_.Chance(0.5)) socket->out->Drop(socket->out->size());
    }
  }
  sockets_.erase(fd);
  for (const int other : backlog) Abort(other);
}

void FakeRing::Hold(const Op& op, int change) {
  if (op.kind == Kind::kTimeout || op.kind == Kind::kNotice) return;
  if (Socket* socket = Find(op.fd)) socket->holds += change;
}

// ------------------------------------------------------------------------------ starting

IoId FakeRing::Start(Op op) {
  const IoId id = next_id_++;
  Hold(op, 1);
  ops_.emplace(id, std::move(op));
  return id;
}

IoId FakeRing::StartTransfer(Kind kind, int fd, std::vector<iovec> parts, bool wait_all,
                             IoCallback done) {
  Op op{.kind = kind, .fd = fd, .parts = std::move(parts), .wait_all = wait_all};
  op.callback = std::move(done);
  for (const iovec& part : op.parts) {
    op.bytes += part.iov_len;
    if (part.iov_len == 0) continue;
    if (kind == Kind::kRecv) {
      memset(part.iov_base, kJunk, part.iov_len);
    } else {
      op.snapshot.append(static_cast<const char*>(part.iov_base), part.iov_len);
    }
  }
  return Start(std::move(op));
}

IoId FakeRing::Accept(int listen_fd, IoCallback done) {
  return Start(Op{.kind = Kind::kAccept, .fd = listen_fd, .callback = std::move(done)});
}

IoId FakeRing::Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) {
  Op op{.kind = Kind::kConnect, .fd = fd, .callback = std::move(done)};
  LH_CHECK(length <= sizeof(op.address.storage));
  memcpy(&op.address.storage, address, length);
  op.address.length = length;
  op.from = dial_from_.value_or(op.address);
  return Start(std::move(op));
}

IoId FakeRing::Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) {
  return StartTransfer(Kind::kRecv, fd, {{data, bytes}}, wait_all, std::move(done));
}

IoId FakeRing::RecvMsg(int fd, msghdr* message, IoCallback done) {
  const IoId id =
      StartTransfer(Kind::kRecv, fd, {message->msg_iov, message->msg_iov + message->msg_iovlen},
                    false, std::move(done));
  ops_[id].message = message;
  return id;
}

IoId FakeRing::Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) {
  return StartTransfer(Kind::kSend, fd, {{const_cast<void*>(data), bytes}}, wait_all,
                       std::move(done));
}

IoId FakeRing::SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) {
  return StartTransfer(Kind::kSend, fd, {message->msg_iov, message->msg_iov + message->msg_iovlen},
                       wait_all, std::move(done));
}

IoId FakeRing::SendZeroCopy(int fd, const void* data, size_t bytes, int buffer, IoCallback done) {
  ++zero_copy_sends_;
  if (buffer >= 0) {
    const auto it = registered_.find(buffer);
    LH_CHECK(it != registered_.end()) << "buffer " << buffer << " is not registered";
    const auto* begin = static_cast<const uint8_t*>(it->second.first);
    const auto* from = static_cast<const uint8_t*>(data);
    LH_CHECK(from >= begin && from + bytes <= begin + it->second.second);
  }
  return StartTransfer(Kind::kSendZeroCopy, fd, {{const_cast<void*>(data), bytes}}, true,
                       std::move(done));
}

IoId FakeRing::Timeout(Tick at, IoCallback done) {
  return Start({.kind = Kind::kTimeout, .at = at, .callback = std::move(done)});
}

IoId FakeRing::PollIn(int fd, IoCallback done) {
  return Start({.kind = Kind::kPollIn, .fd = fd, .callback = std::move(done)});
}

void FakeRing::BeforeSubmit(absl::AnyInvocable<void()> run) {
  before_submit_.push_back(std::move(run));
}

void FakeRing::Cancel(IoId id) {
  const auto it = ops_.find(id);
  if (it != ops_.end()) it->second.cancelled = true;
}

absl::StatusOr<int> FakeRing::RegisterBuffer(const void* data, size_t bytes) {
  LH_CHECK(bytes > 0);
  if (!options_.registered_buffers) return absl::UnimplementedError("no registered buffers");
  if (registered_.size() >= options_.registered_buffers_max) {
    return absl::ResourceExhaustedError("the limit of locked memory is reached");
  }
  if (untouched_ != nullptr && static_cast<const uint8_t*>(data) + bytes > untouched_) {
    return absl::UnavailableError("not all of it is in memory");
  }
  registered_[next_buffer_] = {data, bytes};
  return next_buffer_++;
}

void FakeRing::UnregisterBuffer(int buffer) {
  LH_CHECK(registered_.erase(buffer) == 1) << "buffer " << buffer << " is not registered";
}

// ------------------------------------------------------------------------------ progress

size_t FakeRing::Room(const Stream& stream) const {
  const size_t limit = std::min<uint64_t>(options_.stream_bytes_max,
                                          stream.size() + stream.cut_after - stream.written);
  return limit > stream.size() ? limit - stream.size() : 0;
}

bool FakeRing::HasNews(const Stream& in) const {
  return !in.stalled && (in.size() > 0 || in.ended || in.cut);
}

bool FakeRing::CanProgress(const Op& op) {
  if (op.kind == Kind::kNotice) {
    return op.out->read >= op.notice_at || op.out->cut || op.out->reader_gone;
  }
  if (op.cancelled) return true;
  if (op.kind == Kind::kTimeout) return op.at <= now_;
  const Socket* socket = Find(op.fd);
  if (socket == nullptr) return true;  // ends with EBADF
  switch (op.kind) {
    case Kind::kAccept:
      return !socket->backlog.empty();
    case Kind::kConnect:
      return !ignoring_.contains(ToString(op.address));
    case Kind::kPollIn:
      if (socket->listening) return !socket->backlog.empty();
      return socket->in != nullptr && HasNews(*socket->in);
    case Kind::kRecv:
      return socket->in == nullptr || op.bytes == 0 || HasNews(*socket->in);
    case Kind::kSend:
    case Kind::kSendZeroCopy:
      if (socket->out == nullptr) return true;
      return socket->out->cut || socket->out->reader_gone || op.bytes == 0 ||
             Room(*socket->out) > 0;
    default:
      return false;
  }
}

size_t FakeRing::Amount(size_t bytes) {
  if (!options_.partial || bytes <= 1 || random_.Chance(0.3)) return bytes;
  return 1 + random_.Below(random_.Chance(0.5) ? std::min<size_t>(bytes, 100) : bytes);
}

uint8_t* FakeRing::At(const Op& op, size_t offset, size_t* contiguous) {
  for (const iovec& part : op.parts) {
    if (offset < part.iov_len) {
      *contiguous = part.iov_len - offset;
      return static_cast<uint8_t*>(part.iov_base) + offset;
    }
    offset -= part.iov_len;
  }
  LH_CHECK(false) << "beyond the end of a transfer";
  return nullptr;
}

void FakeRing::CheckSend(const Op& op, size_t from, size_t bytes) {
  for (size_t end = from + bytes; from < end;) {
    size_t contiguous = 0;
    const uint8_t* place = At(op, from, &contiguous);
    const size_t n = std::min(contiguous, end - from);
    LH_CHECK(memcmp(op.snapshot.data() + from, place, n) == 0)
        << "memory was changed while a send owned it";
    from += n;
  }
}

void FakeRing::CheckRecv(const Op& op) {
  for (size_t offset = op.done; offset < op.bytes;) {
    size_t contiguous = 0;
    const uint8_t* place = At(op, offset, &contiguous);
    // All bytes are junk if the first one is, and each is equal to the next.
    LH_CHECK(place[0] == kJunk && memcmp(place, place + 1, contiguous - 1) == 0)
        << "memory was written while a receive owned it";
    offset += contiguous;
  }
}

// The operation is over; its callback comes in this RunOnce().
void FakeRing::Finish(IoId id, int value) {
  const auto it = ops_.find(id);
  Op& op = it->second;
  if (op.kind == Kind::kSend || op.kind == Kind::kSendZeroCopy || op.kind == Kind::kNotice) {
    CheckSend(op, 0, op.bytes);
  }
  if (op.kind == Kind::kRecv) CheckRecv(op);
  const bool copied = op.kind == Kind::kNotice && options_.zero_copy_copies;
  const int fd = op.fd;
  Hold(op, -1);
  completions_.push_back(
      {id, {.value = value, .more = false, .copied = copied}, std::move(op.callback)});
  ops_.erase(it);
  MaybeRelease(fd);
}

void FakeRing::Report(IoId id, IoResult result) {
  completions_.push_back({id, result, IoCallback()});
}

void FakeRing::ProgressAccept(IoId id, Op* op) {
  Socket* listener = Find(op->fd);
  const int fd = listener->backlog.front();
  listener->backlog.pop_front();
  Finish(id, fd);
}

void FakeRing::ProgressConnect(IoId id, Op* op) {
  Socket* listener = FindListener(op->address);
  if (listener == nullptr || refusing_.contains(ToString(op->address))) {
    return Finish(id, -ECONNREFUSED);
  }
  const int fd = NewSocket();
  Socket* dialer = Find(op->fd);
  Socket* acceptor = Find(fd);
  dialer->local = op->from;
  SetPort(&dialer->local, next_port_++);
  acceptor->local = op->address;
  Join(dialer, acceptor);
  listener->backlog.push_back(fd);
  Finish(id, 0);
}

void FakeRing::ProgressRecv(IoId id, Op* op) {
  Stream* in = Find(op->fd)->in.get();
  if (in == nullptr) return Finish(id, -ENOTCONN);
  if (in->size() == 0 && op->bytes > 0) {
    if (op->done > 0) return Finish(id, static_cast<int>(op->done));
    return Finish(id, in->cut ? -ECONNRESET : 0);
  }
  const size_t amount = Amount(std::min(in->size(), op->bytes - op->done));
  for (size_t left = amount; left > 0;) {
    size_t contiguous = 0;
    uint8_t* place = At(*op, op->done, &contiguous);
    const size_t n = std::min(left, contiguous);
    memcpy(place, in->data.data() + in->head, n);
    in->Drop(n);
    op->done += n;
    left -= n;
  }
  in->read += amount;
  if (!op->wait_all || op->done == op->bytes) {
    if (op->message != nullptr) op->message->msg_flags = 0;
    Finish(id, static_cast<int>(op->done));
  }
}

void FakeRing::ProgressSend(IoId id, Op* op) {
  Socket* socket = Find(op->fd);
  Stream* out = socket->out.get();
  if (out == nullptr) return Finish(id, -ENOTCONN);
  if (op->kind == Kind::kSendZeroCopy && options_.zero_copy_error != 0 && op->done == 0) {
    return Finish(id, -options_.zero_copy_error);
  }
  bool ended = false;
  if (out->cut || out->reader_gone || out->ended) {
    socket->in->cut = true;
    if (op->done == 0) return Finish(id, out->cut ? -ECONNRESET : -EPIPE);
    ended = true;
  } else {
    const size_t amount = out->Piece(Amount(std::min(Room(*out), op->bytes - op->done)));
    CheckSend(*op, op->done, amount);
    out->Add(op->snapshot.substr(op->done, amount));
    op->done += amount;
    if (swallow_above_ != 0 &&
        std::min<size_t>(op->bytes, out->segment_bytes_max) > swallow_above_) {
      out->stalled = true;
    }
    if (out->written >= out->cut_after) out->cut = socket->in->cut = true;
    ended = !op->wait_all || op->done == op->bytes;
  }
  if (!ended) return;
  if (op->kind == Kind::kSend) return Finish(id, static_cast<int>(op->done));
  Report(id, {.value = static_cast<int>(op->done), .more = true});
  Hold(*op, -1);
  op->kind = Kind::kNotice;
  op->out = socket->out;
  op->notice_at = out->written;
  MaybeRelease(op->fd);
}

// A cancelled operation may still succeed, as in the kernel.
void FakeRing::ProgressCancelled(IoId id, Op* op) {
  op->cancelled = false;
  const bool could = CanProgress(*op);
  op->cancelled = true;
  if (could && random_.Chance(0.5)) return Progress(id, op);
  if (op->done == 0) return Finish(id, -ECANCELED);
  if (op->kind != Kind::kSendZeroCopy) return Finish(id, static_cast<int>(op->done));
  Report(id, {.value = static_cast<int>(op->done), .more = true});
  op->out = Find(op->fd)->out;
  op->notice_at = op->out->written;
  Hold(*op, -1);
  op->kind = Kind::kNotice;
  MaybeRelease(op->fd);
}

void FakeRing::Progress(IoId id, Op* op) {
  if (op->kind == Kind::kNotice || op->kind == Kind::kTimeout) return Finish(id, 0);
  if (Find(op->fd) == nullptr) return Finish(id, -EBADF);
  switch (op->kind) {
    case Kind::kAccept:
      return ProgressAccept(id, op);
    case Kind::kConnect:
      return ProgressConnect(id, op);
    case Kind::kRecv:
      return ProgressRecv(id, op);
    case Kind::kSend:
    case Kind::kSendZeroCopy:
      return ProgressSend(id, op);
    default:
      return Finish(id, 1);  // poll
  }
}

// Lets a random selection of the operations that can go on do so. False: none can.
bool FakeRing::Step() {
  std::vector<IoId> able;
  for (const auto& [id, op] : ops_) {
    if (CanProgress(op)) able.push_back(id);
  }
  for (size_t i = able.size(); i > 1; --i) std::swap(able[i - 1], able[random_.Below(i)]);
  for (const IoId id : able) {
    // A notice comes late. Any other operation often has to wait for a later round.
    const auto it = ops_.find(id);
    if (it == ops_.end() || !CanProgress(it->second)) continue;
    if (!random_.Chance(it->second.kind == Kind::kNotice ? 0.2 : 0.7)) continue;
    if (it->second.cancelled && it->second.kind != Kind::kNotice) {
      ProgressCancelled(id, &it->second);
    } else {
      Progress(id, &it->second);
    }
  }
  return !able.empty();
}

// Called when no operation can go on: moves the time to the next timer, at most to `until`. False:
// RunOnce() has no reason to return.
bool FakeRing::JumpTo(Tick until) {
  Tick next = until;
  for (const auto& [id, op] : ops_) {
    if (op.kind == Kind::kTimeout) next = std::min(next, op.at);
  }
  if (next == kNever) {
    MutexLock lock(&mutex_);
    while (!woken_) wake_condition_.Wait(&mutex_);
    woken_ = false;
    return true;
  }
  now_ = std::max(now_, next);
  return now_ >= until;
}

absl::Status FakeRing::RunOnce(Tick until) {
  LH_CHECK(!running_) << "RunOnce() from within a callback";
  running_ = true;
  now_ = now_ + static_cast<int64_t>(random_.Below(3));
  for (auto& run : std::exchange(before_submit_, {})) run();
  while (completions_.empty()) {
    {
      MutexLock lock(&mutex_);
      if (woken_) {
        woken_ = false;
        break;
      }
    }
    if (Step()) {
      if (completions_.empty() && until <= now_) break;
      now_ = now_ + 1;
      continue;
    }
    if (JumpTo(until)) break;
  }
  std::vector<Completion> completions;
  completions.swap(completions_);
  for (Completion& completion : completions) {
    if (completion.callback) {
      completion.callback(completion.result);
      continue;
    }
    // More callbacks of this operation follow, so its Op gets the callback back afterwards.
    const auto it = ops_.find(completion.id);
    if (it == ops_.end()) continue;
    IoCallback callback = std::move(it->second.callback);
    callback(completion.result);
    if (const auto again = ops_.find(completion.id); again != ops_.end()) {
      again->second.callback = std::move(callback);
    }
  }
  running_ = false;
  return absl::OkStatus();
}

void FakeRing::Wake() {
  MutexLock lock(&mutex_);
  woken_ = true;
  wake_condition_.Signal();
}

}  // namespace longhaul::peerd
