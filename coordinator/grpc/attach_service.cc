// The service Coordinator: one Stream and one gRPC reactor per control stream.
//
//   open     --(malformed message | Close() | client's end | cancelled | overflow)--> closing
//   closing  --(no write in flight)--> finished
//   finished --(OnDone)--> gone, CloseSession() posted
//
// At most one read and one write are in flight. A read begins only after the loop has handled the
// previous message. Every path calls Finish() exactly once, and never while a write is in flight.
// If the client does not read, the write in flight would never end; then the call is cancelled.
//
// This file parses the messages itself. gRPC's own parser reports bytes that are no message as the
// end of the stream.
#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/crypto/identity.h"
#include "base/crypto/secrets.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/tick.h"
#include "coordinator/grpc/connection.h"
#include "coordinator/grpc/rare_log.h"
#include "coordinator/grpc/services.h"
#include "coordinator/grpc/token_use.h"
#include "coordinator/loop/explain.h"
#include "proto/control/convert.h"
#include "proto/control/grpc/support.h"
#include "proto/control/recording.h"
#include "proto/control/why.h"
#include "proto/longhaul/v1/coordinator.grpc.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

// The most that a stream queues for a peer that does not read. Beyond that the stream ends.
constexpr size_t kQueuedMessagesMax = 8192;
constexpr size_t kQueuedBytesMax = 32 << 20;

// How often each reason of a refusal is logged, and how many reasons are told apart.
constexpr int64_t kRefusalLogUs = Seconds(10);
constexpr size_t kRefusalReasonsMax = 64;
constexpr int64_t kPutOutLogUs = Seconds(60);
// However often a host connects, the core is told of it no more often.
constexpr std::chrono::milliseconds kKnockPause{20};
// How long a denied peer may take to read what is being written to it.
constexpr std::chrono::seconds kDenialPatience{1};
// By how much of it the age at which a stream ends varies.
constexpr double kAgeVaries = 0.1;

using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

absl::StatusOr<std::string> BytesOf(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  if (!buffer.DumpToSingleSlice(&slice).ok()) {
    return absl::InvalidArgumentError("message cannot be decompressed");
  }
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

grpc::StatusCode CodeOf(StreamEnd end) {
  switch (end) {
    case StreamEnd::kGone:
      return grpc::StatusCode::ABORTED;
    case StreamEnd::kViolation:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case StreamEnd::kStranger:
      return grpc::StatusCode::PERMISSION_DENIED;
    case StreamEnd::kOtherStore:
      return grpc::StatusCode::FAILED_PRECONDITION;
  }
  return grpc::StatusCode::INTERNAL;
}

grpc::Status ShuttingDown() {
  return {grpc::StatusCode::UNAVAILABLE,
          "the coordinator is shutting down; try again, or the next address"};
}

class AttachService;

// The state of one stream. The stream's reactor, the loop and the service share it. Any thread.
class Stream final : public SessionPort,
                     public RecordingStream,
                     public std::enable_shared_from_this<Stream> {
 public:
  Stream(AttachService* service, grpc::CallbackServerContext* context, RecordingDesk* desk,
         Caller caller)
      : service_(service),
        context_(context),
        desk_(desk),
        caller_(std::move(caller)),
        connection_(ConnectionOf(context->peer())),
        client_(ClientOf(context->peer())),
        records_(context->client_metadata().contains(control::kRecordingMetadata)),
        nonce_(RandomBytes(kPossessionNonceBytes)) {}

  // Makes the reactor, which deletes itself when the call is over. Call this once, before any other
  // method.
  Reactor* MakeReactor();
  // Opens the session and starts to read. Does nothing if the stream has ended meanwhile.
  void Begin(CoordinatorLoop* loop, CoordinatorMetrics* metrics);

  // ---- SessionPort
  void Send(const control::CoordinatorMessage& message) override;
  void Close(StreamEnd end, const std::string& reason) override;
  void Accepted() override;
  PeerId peer() const override { return welcomed_ ? hello_ : PeerId{}; }
  std::optional<Denial> ObjectionTo(const control::Join& join,
                                    const CoordinatorCore& core) override;

  // ---- RecordingStream
  void SendBytes(std::string bytes) override;

  const std::string& client() const { return client_; }
  const Caller& caller() const { return caller_; }
  // Ends the stream because of what its caller may not do. No further message of the peer counts. A
  // peer that does not read keeps the stream for kDenialPatience at most.
  void Deny(const Denial& denial);

  // The coordinator ends the stream.
  void End(const grpc::Status& status) {
    MutexLock lock(&mutex_);
    EndLocked(status);
  }
  // The peer has ended the stream, or it broke.
  void Broke(const grpc::Status& status) {
    MutexLock lock(&mutex_);
    BrokeLocked(status);
  }
  std::chrono::steady_clock::time_point born() const { return born_; }
  // Varies from stream to stream, so that peers do not all connect anew at once.
  double age_share() const { return 1 - static_cast<uint8_t>(nonce_[0]) / 255.0 * kAgeVaries; }

 private:
  class StreamReactor;

  void OnReadDone(bool ok);
  void OnWriteDone(bool ok);
  void OnDone();

  void StartReadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartNextWriteLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BrokeLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the call, if it is not over yet, without a status.
  void Cancel();
  // Returns why this Hello does not come from the peer that it names; "": it does.
  std::string Distrust(const control::Hello& hello) const;
  // A message about recordings came. It does not go to the loop.
  void OnRecordingMessage(const std::string& bytes);
  // The peer asks why a group waits. Nothing more is read before the answer.
  void OnWhyMessage(const std::string& bytes);

  AttachService* const service_;
  grpc::CallbackServerContext* const context_;
  RecordingDesk* const desk_;
  const Caller caller_;
  const std::shared_ptr<const Connection> connection_;  // may be null
  const std::string client_;
  const bool records_;       // the peer answers requests for recordings
  const std::string nonce_;  // the peer signs it in Hello
  const std::chrono::steady_clock::time_point born_ = std::chrono::steady_clock::now();
  CoordinatorLoop* loop_ = nullptr;
  CoordinatorMetrics* metrics_ = nullptr;
  std::optional<SessionId> session_;
  bool greeted_ = false;  // the peer has sent a message; only OnReadDone() uses this
  // The peer of the stream's Hello; set before the loop sees the Hello.
  PeerId hello_;
  std::atomic<bool> welcomed_ = false;  // the coordinator has accepted the Hello

  Mutex mutex_;
  Reactor* reactor_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null when the call is over
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_here_ ABSL_GUARDED_BY(mutex_) = false;  // closing, and not because it broke
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
  grpc::Alarm patience_ ABSL_GUARDED_BY(mutex_);  // of Deny()
};

// A call that ends before any message of it is read.
class RefusedCall final : public Reactor {
 public:
  explicit RefusedCall(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

class AttachService final
    : public DrainableService,
      private v1::Coordinator::WithRawCallbackMethod_Attach<v1::Coordinator::Service> {
 public:
  AttachService(CoordinatorLoop* loop, CoordinatorMetrics* metrics, RecordingDesk* desk,
                Authorizer* authorizer, std::optional<std::chrono::milliseconds> stream_age)
      : loop_(loop),
        metrics_(metrics),
        desk_(desk),
        authorizer_(authorizer),
        stream_age_(stream_age) {}

  grpc::Service* service() override { return this; }

  void EndStreams() override {
    std::set<std::shared_ptr<Stream>> streams;
    {
      MutexLock lock(&mutex_);
      draining_ = true;
      streams = streams_;
    }
    for (const std::shared_ptr<Stream>& stream : streams) stream->End(ShuttingDown());
  }

  void EndStreamsOf(const std::function<std::optional<Denial>(const Caller&)>& why) override {
    std::set<std::shared_ptr<Stream>> streams;
    {
      MutexLock lock(&mutex_);
      streams = streams_;
    }
    for (const std::shared_ptr<Stream>& stream : streams) {
      if (const std::optional<Denial> denial = why(stream->caller())) {
        stream->Deny(*denial);
      } else if (stream_age_ && std::chrono::steady_clock::now() - stream->born() >=
                                    *stream_age_ * stream->age_share()) {
        stream->End({grpc::StatusCode::UNAVAILABLE, control::kAged});
      }
    }
  }

  // Counts the refusal of a control stream, and logs it unless the same was logged lately.
  void OnRefused(const std::string& client, const std::string& why) {
    metrics_->OnRefused();
    const std::optional<uint64_t> held_back = refusals_.Take(why);
    if (!held_back) return;
    Log(LogLevel::kWarning, absl::StrCat("control stream refused", LogField("client", client),
                                         " held_back=", *held_back, LogField("reason", why)));
  }

  void OnOverflow(const std::string& client, size_t queued) {
    const std::optional<uint64_t> held_back = overflows_.Take(HostOfUri(client));
    if (!held_back) return;
    Log(LogLevel::kWarning,
        absl::StrCat("control stream closed: its peer does not read", LogField("client", client),
                     " queued=", queued, " held_back=", *held_back));
  }

  // Posts a knock for each peer whose last stream came from this host (PeerKnocked). The core
  // forgets those of peers that it hears.
  void Came(const std::string& host) override {
    const auto now = std::chrono::steady_clock::now();
    MutexLock lock(&mutex_);
    for (auto& [peer, last] : homes_) {
      if (last.host != host || now - last.knocked < kKnockPause) continue;
      last.knocked = now;
      loop_->Knocked(peer);
    }
  }
  void Welcomed(PeerId peer, const std::string& client) {
    MutexLock lock(&mutex_);
    if (homes_.size() >= kSessionsMax) homes_.erase(homes_.begin());
    homes_[peer] = {HostOfUri(client), {}};
  }
  // The peer may not come back, as an operator wants it. So what its host does says nothing.
  void ForgetHome(PeerId peer) {
    MutexLock lock(&mutex_);
    homes_.erase(peer);
  }

  Authorizer& authorizer() { return *authorizer_; }
  TokenUse& token_use() { return *token_use_; }

  // The stream's first message has come: the stream no longer waits for Hello.
  void Greeted(const Stream& stream) {
    MutexLock lock(&mutex_);
    RemoveFromWaiting(stream);
  }

  void Forget(const std::shared_ptr<Stream>& stream) {
    MutexLock lock(&mutex_);
    RemoveFromWaiting(*stream);
    streams_.erase(stream);
  }

 private:
  Reactor* Attach(grpc::CallbackServerContext* context) override {
    std::variant<Caller, Denial> admitted = authorizer_->Admit(*context, Role::kTrainer);
    if (const auto* denial = std::get_if<Denial>(&admitted)) {
      if (MeantFor(denial->refusal)) ForgetHomesAt(HostOfUri(ClientOf(context->peer())));
      return new RefusedCall(ToGrpc(*denial));
    }
    auto stream = std::make_shared<Stream>(this, context, desk_, std::get<Caller>(admitted));
    Reactor* const reactor = stream->MakeReactor();
    bool draining = false;
    std::shared_ptr<Stream> put_out;
    {
      MutexLock lock(&mutex_);
      streams_.insert(stream);
      waiting_.push_back(stream);
      metrics_->SetStreamsWithoutHello(waiting_.size());
      draining = draining_;
      if (waiting_.size() > LH_STREAMS_WITHOUT_HELLO_MAX) put_out = waiting_.front();
    }
    if (draining) stream->End(ShuttingDown());
    if (put_out != nullptr) PutOut(*put_out);
    stream->Begin(loop_, metrics_);
    return reactor;
  }

  // Whether an operator has decided that this very caller may not come (any more). The other
  // reasons may be the coordinator's own fault.
  static bool MeantFor(TokenRefusal reason) {
    return reason == TokenRefusal::kExpired || reason == TokenRefusal::kRevoked ||
           reason == TokenRefusal::kRole || reason == TokenRefusal::kRun;
  }
  void ForgetHomesAt(const std::string& host) {
    MutexLock lock(&mutex_);
    std::erase_if(homes_, [&](const auto& home) { return home.second.host == host; });
  }

  // Ends the stream that has waited longest for its Hello, to make room for a new one. A real peer
  // says Hello at once, so a flood of silent callers ends its own streams.
  void PutOut(Stream& stream) {
    {
      MutexLock lock(&mutex_);
      RemoveFromWaiting(stream);
    }
    metrics_->OnRefused();
    if (put_out_.Take(0)) {
      Log(LogLevel::kWarning, absl::StrCat("more than ", LH_STREAMS_WITHOUT_HELLO_MAX,
                                           " control streams have not said Hello: the oldest of "
                                           "them are ended",
                                           LogField("client", stream.client())));
    }
    stream.End(
        {grpc::StatusCode::RESOURCE_EXHAUSTED,
         absl::StrCat("no Hello came on this stream, and ", LH_STREAMS_WITHOUT_HELLO_MAX,
                      " later streams wait without a Hello, too (LH_STREAMS_WITHOUT_HELLO_MAX): "
                      "send Hello as the first message, at once")});
  }

  void RemoveFromWaiting(const Stream& stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                                 [&](const auto& other) { return other.get() == &stream; });
    if (it == waiting_.end()) return;
    waiting_.erase(it);
    metrics_->SetStreamsWithoutHello(waiting_.size());
  }

  CoordinatorLoop* const loop_;
  CoordinatorMetrics* const metrics_;
  RecordingDesk* const desk_;
  Authorizer* const authorizer_;
  const std::optional<std::chrono::milliseconds> stream_age_;
  const std::shared_ptr<TokenUse> token_use_ = std::make_shared<TokenUse>();
  RareLog<std::string> refusals_{kRefusalLogUs, kRefusalReasonsMax};   // by reason
  RareLog<std::string> overflows_{kRefusalLogUs, kRefusalReasonsMax};  // by host
  RareLog<int> put_out_{kPutOutLogUs, 1};
  Mutex mutex_;
  std::set<std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mutex_);
  // The streams that have not said Hello, oldest first.
  std::deque<std::shared_ptr<Stream>> waiting_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  // Where the last stream of a peer came from.
  struct Home {
    std::string host;
    std::chrono::steady_clock::time_point knocked;
  };
  std::map<PeerId, Home> homes_ ABSL_GUARDED_BY(mutex_);
};

// gRPC's side of a stream. It passes all calls on to the Stream.
class Stream::StreamReactor final : public Reactor {
 public:
  explicit StreamReactor(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}
  void OnReadDone(bool ok) override { stream_->OnReadDone(ok); }
  void OnWriteDone(bool ok) override { stream_->OnWriteDone(ok); }
  void OnCancel() override { stream_->Broke({grpc::StatusCode::CANCELLED, "cancelled"}); }
  void OnDone() override {
    stream_->OnDone();
    delete this;
  }

 private:
  const std::shared_ptr<Stream> stream_;
};

Reactor* Stream::MakeReactor() {
  MutexLock lock(&mutex_);
  reactor_ = new StreamReactor(shared_from_this());
  return reactor_;
}

void Stream::Begin(CoordinatorLoop* loop, CoordinatorMetrics* metrics) {
  loop_ = loop;
  metrics_ = metrics;
  {
    MutexLock lock(&mutex_);
    if (closing_) return;
  }
  session_ = loop_->OpenSession(shared_from_this());
  if (!session_) {
    service_->OnRefused(client_, "too many control streams, or the coordinator is stopping");
    return End({grpc::StatusCode::RESOURCE_EXHAUSTED,
                absl::StrCat("the coordinator takes no further control stream; it has at most ",
                             kSessionsMax)});
  }
  MutexLock lock(&mutex_);
  if (closing_) return;
  // Tells the peer that it is connected.
  context_->AddInitialMetadata(control::kNonceMetadata, nonce_);
  reactor_->StartSendInitialMetadata();
  StartReadLocked();
}

void Stream::Send(const control::CoordinatorMessage& message) {
  // Only now the Hello is known to be no stranger's. A peer that has its Welcome can be asked.
  if (std::holds_alternative<control::Welcome>(message)) {
    welcomed_ = true;
    // At a port that asks for nothing, this is all that a caller shows.
    if (connection_ != nullptr) connection_->Known();
    service_->Welcomed(hello_, client_);
    service_->token_use().Attached(hello_, caller_, loop_);
    if (records_) desk_->Add(hello_, shared_from_this());
  }
  SendBytes(control::Serialize(message));
}

void Stream::SendBytes(std::string bytes) {
  MutexLock lock(&mutex_);
  if (closing_) return;
  if (queue_.size() >= kQueuedMessagesMax || queued_bytes_ + bytes.size() > kQueuedBytesMax) {
    service_->OnOverflow(client_, queue_.size());
    EndLocked({grpc::StatusCode::RESOURCE_EXHAUSTED, "the peer does not read its control stream"});
    // Without this, the write in flight would never end.
    context_->TryCancel();
    return;
  }
  queued_bytes_ += bytes.size();
  queue_.push_back(std::move(bytes));
  StartNextWriteLocked();
}

void Stream::Close(StreamEnd end, const std::string& reason) {
  if (end != StreamEnd::kGone) service_->OnRefused(client_, reason);
  End({CodeOf(end), reason});
}

void Stream::Accepted() {
  MutexLock lock(&mutex_);
  StartReadLocked();
}

std::optional<Denial> Stream::ObjectionTo(const control::Join& join, const CoordinatorCore& core) {
  if (!welcomed_) return std::nullopt;  // the core ends a stream that does not begin with Hello
  if (std::optional<Denial> denial = ObjectionToRun(caller_, join)) return denial;
  return service_->token_use().ObjectionTo(caller_, hello_, join, core);
}

void Stream::Deny(const Denial& denial) {
  if (welcomed_) service_->ForgetHome(hello_);
  MutexLock lock(&mutex_);
  if (closing_) return;
  service_->authorizer().Refused(denial, client_, "control stream ended");
  EndLocked(ToGrpc(denial));
  if (!writing_) return;
  // The status, which says why, comes after the message that is being written. A peer that does not
  // read does not get the status, and must not keep the stream.
  patience_.Set(std::chrono::system_clock::now() + kDenialPatience,
                [weak = weak_from_this()](bool expired) {
                  if (const auto self = weak.lock(); self && expired) self->Cancel();
                });
}

void Stream::Cancel() {
  MutexLock lock(&mutex_);
  if (reactor_ != nullptr) context_->TryCancel();
}

void Stream::OnReadDone(bool ok) {
  if (!ok) return Broke(grpc::Status::OK);
  absl::StatusOr<std::string> bytes = BytesOf(incoming_);
  incoming_.Clear();
  if (bytes.ok() && welcomed_ && control::IsRecordingMessage(*bytes)) {
    return OnRecordingMessage(*bytes);
  }
  if (bytes.ok() && welcomed_ && control::IsWhyMessage(*bytes)) return OnWhyMessage(*bytes);
  absl::StatusOr<control::PeerMessage> message =
      bytes.ok() ? control::ParsePeerMessage(*bytes) : bytes.status();
  if (!message.ok()) {
    const std::string why(message.status().message());
    service_->OnRefused(client_, why);
    return End({grpc::StatusCode::INVALID_ARGUMENT, why});
  }
  if (const auto denial = longhaul::coordinator::ObjectionTo(caller_, *message)) {
    return Deny(*denial);
  }
  // Any first message counts. The core ends a stream whose first message is not Hello.
  if (!std::exchange(greeted_, true)) {
    if (const auto* hello = std::get_if<control::Hello>(&*message)) {
      if (const std::string why = Distrust(*hello); !why.empty()) {
        service_->OnRefused(client_, why);
        metrics_->OnStrangerRefused();
        return End({grpc::StatusCode::PERMISSION_DENIED, why});
      }
      hello_ = hello->peer;
    }
    service_->Greeted(*this);
  }
  const bool heartbeat = std::holds_alternative<control::Heartbeat>(*message);
  loop_->PostMessage(*session_, *std::move(message));
  // The sign of life that a peer waits for. It says that the path carries words both ways, and asks
  // nothing of the loop.
  if (heartbeat && welcomed_) SendBytes("");
}

std::string Stream::Distrust(const control::Hello& hello) const {
  if (hello.protocol != control::kProtocolVersion) return "";  // the core says what to do
  if (hello.key.size() != kPublicKeyBytes) {
    return absl::StrCat("Hello has a key of ", hello.key.size(), " bytes: give the ",
                        kPublicKeyBytes, " bytes of an Ed25519 public key");
  }
  if (PeerIdOf(hello.key) != hello.peer) {
    return absl::StrCat("Hello names ", ToString(hello.peer), ", and the id of its key is ",
                        ToString(PeerIdOf(hello.key)), ": it is not that peer");
  }
  if (!IsSignedBy(hello.key, PossessionText(nonce_, hello.key), hello.signature)) {
    return absl::StrCat("the signature in the Hello of ", ToString(hello.peer),
                        " is wrong: the caller does not have the peer's private key, or repeats "
                        "the Hello of another stream");
  }
  return "";
}

void Stream::OnRecordingMessage(const std::string& bytes) {
  absl::StatusOr<control::RecordingPiece> piece = control::ParseRecordingPiece(bytes);
  if (!piece.ok()) {
    const std::string why(piece.status().message());
    service_->OnRefused(client_, why);
    return End({grpc::StatusCode::INVALID_ARGUMENT, why});
  }
  desk_->OnPiece(hello_, *std::move(piece));
  MutexLock lock(&mutex_);
  StartReadLocked();
}

void Stream::OnWhyMessage(const std::string& bytes) {
  const absl::StatusOr<control::AskWhy> ask = control::ParseAskWhy(bytes);
  if (!ask.ok()) {
    const std::string why(ask.status().message());
    service_->OnRefused(client_, why);
    return End({grpc::StatusCode::INVALID_ARGUMENT, why});
  }
  loop_->QueryCore([self = shared_from_this(), ask = *ask](const absl::StatusOr<Overview>& overview,
                                                           const CoordinatorCore*) {
    std::string text = "this host has no member in the group";
    if (!overview.ok()) {
      text = std::string(overview.status().message());
    } else {
      for (const GroupView& group : overview->groups) {
        // What goes on in other groups is no business of this peer.
        if (group.group != ask.group ||
            std::none_of(group.members.begin(), group.members.end(),
                         [&](const MemberView& member) { return member.peer == self->hello_; })) {
          continue;
        }
        text =
            ExplainToTrainer(group, self->loop_->core_config().detect_ms, overview->slow_write_ms);
      }
    }
    self->SendBytes(control::Serialize(control::TellWhy{ask.request, text}));
    self->Accepted();
  });
}

void Stream::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  writing_ = false;
  if (closing_) return FinishLocked();
  if (!ok) return BrokeLocked({grpc::StatusCode::CANCELLED, "the stream broke"});
  StartNextWriteLocked();
}

void Stream::OnDone() {
  bool ended_here = false;
  {
    MutexLock lock(&mutex_);
    reactor_ = nullptr;
    closing_ = true;
    ended_here = ended_here_;
  }
  if (welcomed_) desk_->Remove(hello_, this);
  if (session_) loop_->CloseSession(*session_, ended_here);
  service_->Forget(shared_from_this());
}

void Stream::StartReadLocked() {
  if (!closing_) reactor_->StartRead(&incoming_);
}

void Stream::StartNextWriteLocked() {
  if (writing_ || queue_.empty()) return;
  writing_ = true;
  queued_bytes_ -= queue_.front().size();
  outgoing_ = ToBuffer(queue_.front());
  queue_.pop_front();
  reactor_->StartWrite(&outgoing_);
}

void Stream::EndLocked(const grpc::Status& status) {
  if (closing_) return;
  ended_here_ = true;
  BrokeLocked(status);
}

void Stream::BrokeLocked(const grpc::Status& status) {
  if (closing_) return;
  closing_ = true;
  status_ = status;
  queue_.clear();
  if (!writing_) FinishLocked();
}

void Stream::FinishLocked() { reactor_->Finish(status_); }

}  // namespace

std::unique_ptr<DrainableService> MakeAttachService(
    CoordinatorLoop* loop, CoordinatorMetrics* metrics, RecordingDesk* desk, Authorizer* authorizer,
    std::optional<std::chrono::milliseconds> stream_age) {
  return std::make_unique<AttachService>(loop, metrics, desk, authorizer, stream_age);
}

}  // namespace longhaul::coordinator
