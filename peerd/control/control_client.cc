#include "peerd/control/control_client.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/check.h"
#include "base/cpu_time.h"
#include "base/daemon/host_port.h"
#include "base/daemon/secret_file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "proto/control/convert.h"
#include "proto/control/grpc/credentials.h"
#include "proto/control/grpc/support.h"
#include "proto/control/recording.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMethod[] = "/longhaul.v1.Coordinator/Attach";
constexpr char kBehind[] = "this peer has too many messages of the coordinator still to read";
constexpr size_t kQueuedMessagesMax = 65536;
constexpr size_t kQueuedBytesMax = 64 << 20;
// While a stream is silent, a new connection is tried so often in a detect_ms. The path may come
// back at any time, and the coordinator removes the peer after 4 * detect_ms.
constexpr int kKnocksPerDetect = 15;
// The tries that may be under way at a time. The oldest one makes room.
constexpr size_t kKnocksMax = 16;

// The host and port of an address. A test's address may be a URI of gRPC with a DNS server of its
// own ("dns://SERVER/HOST:PORT").
absl::StatusOr<HostPort> HostPortOf(const std::string& address) {
  return ParseHostPort(address.substr(address.rfind('/') + 1));
}

// Whether the address has to be looked up.
bool HasName(const std::string& address) {
  const absl::StatusOr<HostPort> parsed = HostPortOf(address);
  in6_addr binary;
  return parsed.ok() && inet_pton(AF_INET, parsed->host.c_str(), &binary) != 1 &&
         inet_pton(AF_INET6, parsed->host.c_str(), &binary) != 1;
}

// The numeric host:port in a URI as ClientContext::peer() gives it, "ipv6:%5B::1%5D:29600".
std::string NumericOf(const std::string& uri) {
  return absl::StrReplaceAll(uri.substr(uri.find(':') + 1),
                             {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
}

// `last`: the URI to dial instead of `address`, whose name did not resolve; "": none.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const std::string& last,
                                           uint32_t detect_ms, tls::Files* tls) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(LH_CONTROL_MESSAGE_BYTES_MAX);
  args.SetMaxSendMessageSize(LH_CONTROL_MESSAGE_BYTES_MAX);
  const control::Keepalive keepalive = control::KeepaliveFor(detect_ms);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive.time_ms);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive.timeout_ms);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Each try makes a connection of its own, so that our pauses count and not those of gRPC.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  // Lanes do not use an HTTP proxy, so the control stream does not either.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (!last.empty()) {
    // The coordinator still has to be the one of this name.
    const absl::StatusOr<HostPort> name = HostPortOf(address);
    LH_CHECK(name.ok()) << address;
    if (tls != nullptr) args.SetSslTargetNameOverride(name->host);
    args.SetString(GRPC_ARG_DEFAULT_AUTHORITY, ToString(*name));
  }
  return grpc::CreateCustomChannel(last.empty() ? address : last,
                                   control::MakeChannelCredentials(tls), args);
}

const char* CodeName(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return "OK";
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case grpc::StatusCode::FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case grpc::StatusCode::ABORTED:
      return "ABORTED";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    case grpc::StatusCode::UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    case grpc::StatusCode::PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    default:
      return "error";
  }
}

absl::StatusOr<std::string> BytesOf(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  if (!buffer.DumpToSingleSlice(&slice).ok()) {
    return absl::InvalidArgumentError("message cannot be decompressed");
  }
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

// Connections of TCP to a numeric address, tried one after another until one of them stands. They
// carry nothing: they show that the path is there, and the coordinator sees who comes.
class Knocks {
 public:
  explicit Knocks(const std::string& numeric) {
    const absl::StatusOr<HostPort> parsed = ParseHostPort(numeric);
    if (!parsed.ok()) return;
    auto* const v4 = reinterpret_cast<sockaddr_in*>(&address_);
    auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address_);
    if (inet_pton(AF_INET, parsed->host.c_str(), &v4->sin_addr) == 1) {
      v4->sin_family = AF_INET;
      v4->sin_port = htons(parsed->port);
      size_ = sizeof *v4;
    } else if (inet_pton(AF_INET6, parsed->host.c_str(), &v6->sin6_addr) == 1) {
      v6->sin6_family = AF_INET6;
      v6->sin6_port = htons(parsed->port);
      size_ = sizeof *v6;
    }
  }
  ~Knocks() {
    for (const int fd : open_) close(fd);
  }
  Knocks(const Knocks&) = delete;
  Knocks& operator=(const Knocks&) = delete;

  // Begins one more try.
  void Knock() {
    if (size_ == 0) return;
    if (open_.size() >= kKnocksMax) {
      close(open_.front());
      open_.pop_front();
    }
    const int fd = socket(address_.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    open_.push_back(fd);
    (void)connect(fd, reinterpret_cast<const sockaddr*>(&address_), size_);  // poll() tells
  }
  // Whether one of them stands. Does not wait. Closes those that failed.
  bool Answered() {
    for (auto it = open_.begin(); it != open_.end();) {
      struct pollfd ready = {*it, POLLOUT, 0};
      if (poll(&ready, 1, 0) != 1) {
        ++it;
        continue;
      }
      int error = 0;
      socklen_t size = sizeof error;
      if (getsockopt(*it, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) return true;
      close(*it);
      it = open_.erase(it);
    }
    return false;
  }

 private:
  sockaddr_storage address_{};
  socklen_t size_ = 0;  // 0: there is no address to dial
  std::deque<int> open_;
};

// One try at one address, from connecting to the end of the stream.
//
//   starting --(initial metadata)--> standing --(end, or given up)--> closing --(status)--> done
//
// The client's thread waits for gRPC's events, and handles them. gRPC's callbacks would save this
// loop, but the threads that poll for them hand their role on with each event, which takes 1.5 to
// 2 times as long (bench/control_floor.cc). Writes start in the thread that calls Send().
class Stream final {
 public:
  // `last`: where to dial instead of looking `address` up; "": look it up. `beside`: the stream is
  // tried beside another one. It tells its owner nothing before Adopt().
  Stream(std::string address, const std::string& last, uint32_t detect_ms, const Identity* identity,
         tls::Files* tls, const ControlClientCallbacks* callbacks, bool beside)
      : beside_(beside),
        address_(std::move(address)),
        identity_(identity),
        callbacks_(callbacks),
        tls_(tls != nullptr),
        channel_(MakeChannel(address_, last, detect_ms, tls)),
        stub_(channel_),
        detect_ms_(detect_ms) {}

  // `token`: the join token to show; empty: none.
  void Start(const std::string& token) {
    if (!token.empty()) {
      context_.AddMetadata(control::kAuthorization, absl::StrCat(control::kBearer, token));
    }
    if (callbacks_->recording) context_.AddMetadata(control::kRecordingMetadata, "1");
    io_ = stub_.PrepareCall(&context_, kMethod, &queue_);
    MutexLock lock(&mutex_);
    io_->StartCall(Expect(kStarted));
  }

  // The stream must be done, if it was started.
  ~Stream() {
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  bool Send(const control::PeerMessage& message) {
    const auto* hello = std::get_if<control::Hello>(&message);
    if (hello == nullptr) {
      return SendBytes(control::Serialize(message), /*hello=*/false,
                       std::holds_alternative<control::Heartbeat>(message));
    }
    return SendBytes(control::Serialize(Signed(*hello)), /*hello=*/true);
  }

  // answered: the coordinator owes a word for it.
  bool SendBytes(std::string bytes, bool hello = false, bool answered = false) {
    MutexLock lock(&mutex_);
    if (!standing_ || closing_ || hello == said_hello_) return false;
    if (unsent_.size() >= kQueuedMessagesMax || queued_bytes_ + bytes.size() > kQueuedBytesMax) {
      GiveUpLocked("the coordinator does not read the control stream");
      return false;
    }
    said_hello_ = true;
    queued_bytes_ += bytes.size();
    unsent_.push_back(std::move(bytes));
    // Before it is sent: the answer may be here before this call returns.
    if (answered && !owed_since_) owed_since_ = Clock::now();
    StartNextWriteLocked();
    return true;
  }

  void GiveUp(const std::string& why) {
    MutexLock lock(&mutex_);
    GiveUpLocked(why);
  }

  // Nobody has answered.
  void GiveUpSilent(const std::string& why) {
    MutexLock lock(&mutex_);
    silent_ = !standing_ && !closing_;
    GiveUpLocked(why);
  }

  void Refuse(const std::string& why) {
    MutexLock lock(&mutex_);
    refused_ = true;
    GiveUpLocked(why);
  }

  // Whether the coordinator has owed a word for detect_ms.
  bool silent() {
    MutexLock lock(&mutex_);
    return standing_ && !closing_ && owed_since_ &&
           Clock::now() - *owed_since_ >= std::chrono::milliseconds(detect_ms_);
  }
  bool done() {
    MutexLock lock(&mutex_);
    return closing_ && events_ == 0;
  }

  // Only the client's thread calls these. They handle the stream's events.
  //
  // Handles the events of so long a time, or fewer if the stream is done.
  void HandleFor(std::chrono::milliseconds time) {
    const Clock::time_point until = Clock::now() + time;
    while (!done() && Clock::now() < until) {
      HandleEvent(std::chrono::system_clock::now() + (until - Clock::now()));
    }
  }
  // From now on the stream is its owner's. Call it once, of a stream that was tried beside another
  // one, when it stands.
  void Adopt() {
    beside_ = false;
    if (!callbacks_->connected(NumericOf(peer()))) return GiveUp(kBehind);
    Read();
  }
  // Waits until the stream stands or is done, or until the deadline.
  void WaitUntilStanding(Clock::time_point deadline) {
    while (!standing() && !done() && Clock::now() < deadline) {
      HandleEvent(std::chrono::system_clock::now() + (deadline - Clock::now()));
    }
  }
  void WaitUntilDone() {
    while (!done()) HandleEvent(std::chrono::system_clock::time_point::max());
  }
  bool standing() {
    MutexLock lock(&mutex_);
    return standing_;
  }

  // Returns true if the coordinator has sent a message and Refuse() was not called. Call it when
  // the stream is done.
  bool worked() {
    MutexLock lock(&mutex_);
    return worked_ && !refused_;
  }
  // Whether the coordinator ended the connection for its age only. Call it when the stream is done.
  bool aged() {
    MutexLock lock(&mutex_);
    return aged_locked();
  }
  uint32_t detect_ms() {
    MutexLock lock(&mutex_);
    return detect_ms_;
  }
  // The URI of the coordinator's numeric address; "": the stream never stood.
  std::string peer() {
    MutexLock lock(&mutex_);
    return peer_;
  }
  // What went wrong. nullopt: the stream has worked, and its end is no refusal. Call it when the
  // stream is done.
  std::optional<ControlFailure> failure() {
    MutexLock lock(&mutex_);
    const grpc::StatusCode code = status_.error_code();
    if (given_up_.empty() && (code == grpc::StatusCode::UNAUTHENTICATED ||
                              code == grpc::StatusCode::PERMISSION_DENIED)) {
      return ControlFailure::kRefused;
    }
    if (worked_) return std::nullopt;
    if (silent_) return ControlFailure::kLookup;
    if (!given_up_.empty()) return ControlFailure::kOther;
    switch (control::ServerFaultOf(status_)) {
      case control::ServerFault::kUntrusted:
        return ControlFailure::kUntrusted;
      case control::ServerFault::kOtherNames:
        return ControlFailure::kName;
      case control::ServerFault::kNone:
        break;
    }
    return absl::StrContains(status_.error_message(), "DNS resolution failed")
               ? ControlFailure::kLookup
               : ControlFailure::kOther;
  }
  std::string Reason() {
    MutexLock lock(&mutex_);
    const std::string what =
        standing_ ? absl::StrCat("control stream to coordinator ", address_, " ended: ")
                  : absl::StrCat("cannot reach coordinator ", address_, ": ");
    if (!given_up_.empty()) return what + given_up_;
    if (status_.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return what +
             "this port takes no peers: is it the coordinator's port for operators (--admin)? Give "
             "the address of its --listen, port 29600 by default";
    }
    if (aged_locked()) return what + control::kAged;
    return absl::StrCat(what, CodeName(status_.error_code()), " ", status_.error_message(),
                        control::TlsAdvice(status_, tls_));
  }

 private:
  // What the events are of.
  enum Tag : size_t { kStarted = 1, kMetadata, kRead, kWritten, kFinished };
  // Waits for one event, and handles it.
  void HandleEvent(std::chrono::system_clock::time_point deadline) {
    void* tag = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, deadline) != grpc::CompletionQueue::GOT_EVENT) return;
    Handle(static_cast<Tag>(reinterpret_cast<size_t>(tag)), ok);
    MutexLock lock(&mutex_);
    --events_;
  }
  void Handle(Tag tag, bool ok) {
    switch (tag) {
      case kStarted:
        OnStarted(ok);
        break;
      case kMetadata:
        OnMetadata(ok);
        break;
      case kRead:
        OnRead(ok);
        break;
      case kWritten:
        OnWritten(ok);
        break;
      case kFinished:
        break;
    }
  }
  // Counts an event that follows. Returns its tag for gRPC.
  void* Expect(Tag tag) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++events_;
    return reinterpret_cast<void*>(size_t{tag});
  }

  // Shows the coordinator of this stream that this peer has its private key.
  control::PeerMessage Signed(control::Hello hello) {
    std::string nonce;
    {
      MutexLock lock(&mutex_);
      nonce = nonce_;
    }
    hello.key = identity_->public_key();
    hello.signature = identity_->Sign(PossessionText(nonce, hello.key));
    return hello;
  }

  void OnStarted(bool ok) {
    MutexLock lock(&mutex_);
    if (!ok) return CloseLocked();
    if (closing_) return;
    io_->ReadInitialMetadata(Expect(kMetadata));
  }

  void OnMetadata(bool ok) {
    if (!ok) return Close();
    const auto& metadata = context_.GetServerInitialMetadata();
    const auto nonce = metadata.find(control::kNonceMetadata);
    // A call that the server refuses at once looks the same to gRPC, but for the nonce.
    if (nonce == metadata.end()) return Read();
    const std::string peer = context_.peer();
    {
      MutexLock lock(&mutex_);
      if (closing_) return;
      nonce_.assign(nonce->second.data(), nonce->second.size());
      peer_ = peer;
      standing_ = true;
    }
    if (beside_) return;
    // The first read starts after this call, so connected() comes before any message.
    if (!callbacks_->connected(NumericOf(peer))) return GiveUp(kBehind);
    Read();
  }

  void OnRead(bool ok) {
    if (!ok) return Close();
    if (!standing()) return GiveUp("it sends messages, but no nonce first: is it no coordinator?");
    {
      MutexLock lock(&mutex_);
      owed_since_.reset();
    }
    absl::StatusOr<std::string> bytes = BytesOf(incoming_);
    incoming_.Clear();
    if (bytes.ok() && bytes->empty()) return Read();  // a sign of life, and no more
    if (bytes.ok() && callbacks_->recording && control::IsRecordingMessage(*bytes)) {
      return OnRecordingMessage(*bytes);
    }
    if (bytes.ok() && callbacks_->told_why && control::IsWhyMessage(*bytes)) {
      return OnWhyMessage(*bytes);
    }
    absl::StatusOr<control::CoordinatorMessage> message =
        bytes.ok() ? control::ParseCoordinatorMessage(*bytes) : bytes.status();
    if (!message.ok()) {
      return GiveUp(absl::StrCat("the coordinator sent a message against the protocol: ",
                                 std::string(message.status().message())));
    }
    {
      MutexLock lock(&mutex_);
      worked_ = true;
      const auto* welcome = std::get_if<control::Welcome>(&*message);
      if (welcome != nullptr) detect_ms_ = welcome->detect_ms;
    }
    if (!callbacks_->message(*std::move(message))) return GiveUp(kBehind);
    Read();
  }

  void OnRecordingMessage(const std::string& bytes) {
    const int64_t received_us = control::WallClockUs();
    const absl::StatusOr<control::ReadRecording> request = control::ParseReadRecording(bytes);
    if (!request.ok()) return GiveUp(std::string(request.status().message()));
    (void)SendBytes(control::Serialize(callbacks_->recording(*request, received_us)));
    Read();
  }

  void OnWhyMessage(const std::string& bytes) {
    absl::StatusOr<control::TellWhy> tell = control::ParseTellWhy(bytes);
    if (!tell.ok()) return GiveUp(std::string(tell.status().message()));
    if (!callbacks_->told_why(*std::move(tell))) return GiveUp(kBehind);
    Read();
  }

  void OnWritten(bool ok) {
    MutexLock lock(&mutex_);
    writing_ = false;
    // A broken stream ends the read too, and OnRead() closes it.
    if (ok && !closing_) StartNextWriteLocked();
  }

  void Read() {
    MutexLock lock(&mutex_);
    if (closing_) return;
    io_->Read(&incoming_, Expect(kRead));
  }
  void Close() {
    MutexLock lock(&mutex_);
    CloseLocked();
  }
  bool aged_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return tls_ && worked_ && given_up_.empty() &&
           status_.error_code() == grpc::StatusCode::UNAVAILABLE &&
           status_.error_message() == control::kAged;
  }
  void CloseLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (closing_) return;
    closing_ = true;
    unsent_.clear();
    io_->Finish(&status_, Expect(kFinished));
  }
  void GiveUpLocked(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (closing_) return;
    given_up_ = why;
    context_.TryCancel();
    CloseLocked();
  }
  void StartNextWriteLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || unsent_.empty()) return;
    writing_ = true;
    queued_bytes_ -= unsent_.front().size();
    const grpc::Slice slice(unsent_.front());
    unsent_.pop_front();
    io_->Write(grpc::ByteBuffer(&slice, 1), Expect(kWritten));
  }

  bool beside_;  // only the client's thread uses this
  const std::string address_;
  const Identity* const identity_;
  const ControlClientCallbacks* const callbacks_;
  const bool tls_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> io_;
  grpc::ByteBuffer incoming_;

  Mutex mutex_;
  int events_ ABSL_GUARDED_BY(mutex_) = 0;     // that are still to come
  std::string nonce_ ABSL_GUARDED_BY(mutex_);  // of the coordinator; Hello signs it
  std::deque<std::string> unsent_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t detect_ms_ ABSL_GUARDED_BY(mutex_);
  std::string given_up_ ABSL_GUARDED_BY(mutex_);
  std::string peer_ ABSL_GUARDED_BY(mutex_);
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;  // given up because nobody answered
  // When the first heartbeat was sent since the last word of the coordinator.
  std::optional<Clock::time_point> owed_since_ ABSL_GUARDED_BY(mutex_);
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;  // stays true after the end
  bool said_hello_ ABSL_GUARDED_BY(mutex_) = false;
  bool worked_ ABSL_GUARDED_BY(mutex_) = false;  // the coordinator has sent a message
  bool refused_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
};

class ControlClientImpl final : public ControlClient {
 public:
  ControlClientImpl(ControlClientOptions options, ControlClientCallbacks callbacks)
      : options_(std::move(options)),
        callbacks_(std::move(callbacks)),
        detect_ms_(options_.detect_ms),
        random_(std::random_device()()),
        thread_([this] { Run(); }) {}

  ~ControlClientImpl() override { Stop(); }

  bool Send(const control::PeerMessage& message) override {
    std::shared_ptr<Stream> stream;
    {
      MutexLock lock(&mutex_);
      stream = stream_;
    }
    return stream != nullptr && stream->Send(message);
  }

  bool AskWhy(const control::AskWhy& ask) override {
    std::shared_ptr<Stream> stream;
    {
      MutexLock lock(&mutex_);
      stream = stream_;
    }
    return stream != nullptr && stream->SendBytes(control::Serialize(ask));
  }

  void Refuse(const std::string& reason) override {
    std::shared_ptr<Stream> stream;
    {
      MutexLock lock(&mutex_);
      stream = stream_;
    }
    if (stream != nullptr) stream->Refuse(absl::StrCat("this peer refuses it: ", reason));
  }

  ControlStats GetStats() const override {
    ControlStats stats;
    for (size_t i = 0; i < kControlFailures; ++i) stats.failures[i] = failures_[i];
    stats.by_last_address = by_last_address_;
    stats.second = second_;
    return stats;
  }

  void Stop() override {
    std::shared_ptr<Stream> stream;
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      stream = stream_;
      stop_.SignalAll();
    }
    if (stream != nullptr) stream->GiveUp("the peer is stopping");
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    const CpuTime cpu("control");
    size_t address = 0;
    size_t failures = 0;  // in a row
    bool aged = false;
    bool by_last = false;            // the next try dials the address that worked last
    std::shared_ptr<Stream> second;  // stands, and takes the place of the one before
    std::string last_reason;
    while (true) {
      const std::string& target = options_.addresses[address % options_.addresses.size()];
      const absl::StatusOr<std::string> token = Token();
      if (!token.ok() && second == nullptr) {
        aged = false;
        if (!Report(absl::StrCat("cannot reach coordinator ", target, ": ",
                                 std::string(token.status().message())),
                    LogLevel::kWarning, &last_reason)) {
          return;
        }
        if (!Pause(++failures)) return;
        continue;
      }
      const std::string last = last_.contains(target) ? last_[target] : "";
      const bool stands = second != nullptr;
      const std::shared_ptr<Stream> stream =
          stands ? std::exchange(second, nullptr) : Make(target, by_last ? last : "");
      if (!Install(stream, stands ? nullptr : &*token)) {
        if (stands) Drop(*stream);
        return;
      }
      if (stands) stream->Adopt();
      // Where another way is left, the first silence of a look-up must not outlast the members.
      const bool hurry = !last.empty() && !by_last && failures < options_.addresses.size();
      second = Attend(target, *stream, token.value_or(""), hurry, aged, &last_reason);
      aged = stream->aged();
      const std::optional<ControlFailure> failure = stream->failure();
      if (failure) ++failures_[static_cast<size_t>(*failure)];
      if (stream->worked() && HasName(target)) last_[target] = stream->peer();
      by_last = !by_last && !last.empty() && failure == ControlFailure::kLookup;
      if (by_last) {
        ++by_last_address_;
      } else if (stream->worked()) {
        failures = 0;
      } else {
        ++failures;
        ++address;
      }
      const bool goes_on = End(*stream, &last_reason) && (second != nullptr || Pause(failures));
      if (goes_on) continue;
      if (second != nullptr) Drop(*second);
      return;
    }
  }

  // The join token to show now; empty: none.
  absl::StatusOr<std::string> Token() const {
    if (options_.token_file.empty()) return std::string();
    return ReadSecretFile("--token-file", options_.token_file);
  }

  // A try at one address, not started.
  std::shared_ptr<Stream> Make(const std::string& target, const std::string& last,
                               bool beside = false) {
    return std::make_shared<Stream>(target, last, detect_ms_, &options_.identity,
                                    options_.tls.get(), &callbacks_, beside);
  }
  // Makes it the stream on which messages go out, and starts it with the token; null: it has begun.
  // Returns false if the client is stopping.
  bool Install(const std::shared_ptr<Stream>& stream, const std::string* token) {
    MutexLock lock(&mutex_);
    if (stopping_) return false;
    stream_ = stream;
    if (token != nullptr) stream->Start(*token);
    return true;
  }
  // Ends a stream that was tried beside another one.
  static void Drop(Stream& stream) {
    stream.GiveUp("it is not needed");
    stream.WaitUntilDone();
  }

  // Waits from the start of a stream to its end. `hurry`: there is another way to try soon. `aged`:
  // the stream before ended for its age only. Returns a stream that stands, and for which this one
  // was given up; null: there is none.
  std::shared_ptr<Stream> Attend(const std::string& target, Stream& stream,
                                 const std::string& token, bool hurry, bool aged,
                                 std::string* last_reason) {
    const auto patience =
        std::chrono::milliseconds(std::max<uint32_t>((hurry ? 1 : 4) * detect_ms_, 1000));
    WaitUntilStanding(target, stream, Clock::now() + patience);
    if (stream.standing()) {
      // After a connection that has reached its age, the next one is no news.
      Log(aged ? LogLevel::kDebug : LogLevel::kInfo,
          "control stream stands" + LogField("coordinator", target) +
              LogField("address", NumericOf(stream.peer())));
      last_reason->clear();
    } else {
      stream.GiveUpSilent(absl::StrCat(
          "no answer in ", patience.count(), " ms",
          hurry ? "; the next try goes to the address that worked last, without DNS" : ""));
    }
    std::shared_ptr<Stream> second;
    while (!stream.done()) {
      detect_ms_ = stream.detect_ms();
      if (second == nullptr && stream.silent()) second = Second(target, stream, token);
      stream.HandleFor(std::chrono::milliseconds(std::max<uint32_t>(detect_ms_ / 8, 1)));
    }
    detect_ms_ = stream.detect_ms();
    return second;
  }

  // As Stream::WaitUntilStanding(). TCP waits longer and longer before it asks again for a
  // connection. If another one comes to stand meanwhile, the path is back, and this try is not
  // worth its whole time.
  void WaitUntilStanding(const std::string& target, Stream& stream, Clock::time_point deadline) {
    stream.WaitUntilStanding(
        std::min(deadline, Clock::now() + std::chrono::milliseconds(detect_ms_)));
    const auto last = last_.find(target);
    const std::string at = !HasName(target) ? target : last == last_.end() ? "" : last->second;
    Knocks knocks(at == target ? at : NumericOf(at));
    while (!stream.standing() && !stream.done() && Clock::now() < deadline) {
      knocks.Knock();
      stream.HandleFor(KnockPause());
      if (knocks.Answered()) deadline = std::min(deadline, Clock::now() + KnockPause() * 4);
    }
  }
  std::chrono::milliseconds KnockPause() const {
    return std::chrono::milliseconds(std::max<uint32_t>(detect_ms_ / kKnocksPerDetect, 1));
  }

  // Tries to make a second stream beside one that is silent. If it stands while the first one is
  // still silent, the first one is given up for it. Returns null if the first one is heard again,
  // or is done, or if the second one fails.
  std::shared_ptr<Stream> Second(const std::string& target, Stream& first,
                                 const std::string& token) {
    {
      Knocks knocks(NumericOf(first.peer()));
      do {
        knocks.Knock();
        first.HandleFor(KnockPause());
        if (!first.silent()) return nullptr;
      } while (!knocks.Answered());
    }
    auto second = Make(target, HasName(target) ? first.peer() : "", /*beside=*/true);
    second->Start(token);
    const Clock::time_point deadline =
        Clock::now() + std::chrono::milliseconds(std::max<uint32_t>(4 * detect_ms_, 1000));
    while (first.silent() && !second->standing() && !second->done() && Clock::now() < deadline) {
      first.HandleFor(std::chrono::milliseconds(1));
      second->HandleFor(std::chrono::milliseconds(5));
    }
    if (!first.silent() || !second->standing()) {
      Drop(*second);
      return nullptr;
    }
    ++second_;
    first.GiveUp("nothing was heard, and a second connection stands");
    return second;
  }

  // Reports the end of the stream. Returns false if the client is stopping.
  bool End(Stream& stream, std::string* last_reason) {
    {
      MutexLock lock(&mutex_);
      stream_ = nullptr;
    }
    return Report(stream.Reason(), stream.aged() ? LogLevel::kDebug : LogLevel::kWarning,
                  last_reason);
  }

  // Tells the owner that there is no stream. Returns false if the client is stopping.
  bool Report(std::string reason, LogLevel level, std::string* last_reason) {
    {
      MutexLock lock(&mutex_);
      if (stopping_) return false;
    }
    // Log once for a coordinator that stays away, not once for each try.
    if (reason != *last_reason) Log(level, reason + "; trying again");
    *last_reason = reason;
    callbacks_.disconnected(std::move(reason));
    return true;
  }

  // Waits before the next try. The first round over all addresses has the shortest pause. Returns
  // false if the client is stopping.
  bool Pause(size_t failures) {
    const size_t rounds = std::min<size_t>(failures / options_.addresses.size(), 16);
    const uint64_t full_ms =
        std::min<uint64_t>(uint64_t{options_.pause_ms_min} << rounds, options_.pause_ms_max);
    std::uniform_int_distribution<uint64_t> jitter(full_ms * 500, full_ms * 1000);
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(jitter(random_));
    MutexLock lock(&mutex_);
    while (!stopping_ && Clock::now() < until) stop_.WaitFor(&mutex_, until - Clock::now());
    return !stopping_;
  }

  const ControlClientOptions options_;
  const ControlClientCallbacks callbacks_;
  // Only the client's thread uses these three, and changes the counts below them.
  uint32_t detect_ms_;
  std::mt19937_64 random_;
  std::map<std::string, std::string> last_;  // by address: the URI where it was reached last
  std::array<std::atomic<uint64_t>, kControlFailures> failures_{};
  std::atomic<uint64_t> by_last_address_ = 0;
  std::atomic<uint64_t> second_ = 0;

  Mutex mutex_;
  CondVar stop_;
  std::shared_ptr<Stream> stream_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member: the thread uses everything above
};

constexpr std::array<const char*, kControlFailures> kFailureNames = {"lookup", "untrusted", "name",
                                                                     "refused", "other"};
static_assert(static_cast<size_t>(ControlFailure::kOther) + 1 == kControlFailures);

}  // namespace

void AddTotals(const ControlStats& stats, std::vector<CounterTotal>* totals) {
  for (size_t i = 0; i < kControlFailures; ++i) {
    totals->push_back({"longhaul_peerd_coordinator_failures_total",
                       "Tries to reach a coordinator that failed, and streams that a coordinator "
                       "refused, by reason",
                       stats.failures[i], kFailureNames[i]});
  }
  totals->push_back({"longhaul_peerd_coordinator_last_address_total",
                     "Tries at the address at which the coordinator was last reached, because its "
                     "name did not resolve in time",
                     stats.by_last_address});
  totals->push_back({"longhaul_peerd_coordinator_second_connections_total",
                     "Control streams that were given up because nothing was heard, and a second "
                     "connection beside them stood",
                     stats.second});
}

std::unique_ptr<ControlClient> MakeControlClient(ControlClientOptions options,
                                                 ControlClientCallbacks callbacks) {
  LH_CHECK(!options.addresses.empty());
  LH_CHECK(options.pause_ms_min > 0 && options.detect_ms > 0);
  control::InitGrpc();
  return std::make_unique<ControlClientImpl>(std::move(options), std::move(callbacks));
}

}  // namespace longhaul::peerd
