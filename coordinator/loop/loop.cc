#include "coordinator/loop/loop.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/cpu_time.h"
#include "base/log.h"
#include "base/mailbox.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "coordinator/loop/event_limit.h"
#include "coordinator/loop/ring_worker.h"

namespace longhaul::coordinator {
namespace {

using Clock = std::chrono::steady_clock;

Tick SystemTick() {
  return Tick{std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch())
                  .count()};
}

int64_t WallTimeUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Says whether an event of this kind removes a member.
bool IsRemoval(const std::string& kind) {
  return kind == "leave" || kind == "death" || kind == "evict";
}

template <class Predicate>
bool AnyMember(const Overview& overview, Predicate predicate) {
  for (const GroupView& group : overview.groups) {
    for (const MemberView& member : group.members) {
      if (predicate(group.group, member)) return true;
    }
  }
  return false;
}

// The longest write of the store in the last five to ten seconds.
class SlowWrites {
 public:
  void Add(Tick now, Clock::duration took) {
    Turn(now);
    const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
    worst_ms_ = std::max(worst_ms_, static_cast<uint32_t>(std::min<int64_t>(ms, UINT32_MAX)));
  }
  uint32_t WorstMs(Tick now) {
    Turn(now);
    return std::max(worst_ms_, before_ms_);
  }

 private:
  static constexpr int64_t kPartUs = Seconds(5);

  void Turn(Tick now) {
    if (now - part_since_ < kPartUs) return;
    before_ms_ = now - part_since_ < 2 * kPartUs ? worst_ms_ : 0;
    worst_ms_ = 0;
    part_since_ = now;
  }

  Tick part_since_;
  uint32_t worst_ms_ = 0;   // of this part
  uint32_t before_ms_ = 0;  // of the part before
};

// Calls `ask` with a function that takes the answer, and waits for it.
template <class Answer>
absl::StatusOr<Answer> Await(
    std::chrono::milliseconds timeout,
    const std::function<void(std::function<void(const absl::StatusOr<Answer>&)>)>& ask) {
  struct Waiting {
    Mutex mutex;
    CondVar answered;
    std::optional<absl::StatusOr<Answer>> answer ABSL_GUARDED_BY(mutex);
  };
  // Shared, because the answer may come after this function has returned.
  auto waiting = std::make_shared<Waiting>();
  ask([waiting](const absl::StatusOr<Answer>& answer) {
    MutexLock lock(&waiting->mutex);
    waiting->answer = answer;
    waiting->answered.Signal();
  });
  const Clock::time_point deadline = Clock::now() + timeout;
  MutexLock lock(&waiting->mutex);
  while (!waiting->answer) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) {
      return absl::DeadlineExceededError(
          absl::StrCat("the coordinator's loop did not answer within ", timeout.count(),
                       " ms; its store may be slow"));
    }
    waiting->answered.WaitFor(&waiting->mutex, left);
  }
  return *std::move(waiting->answer);
}

absl::Status Stopping() {
  return absl::UnavailableError("the coordinator is stopping; try again, or the next address");
}

}  // namespace

class CoordinatorLoop::Impl {
 public:
  // Called with the loop, on the loop's thread; or with null and an error, on any thread.
  using Request = std::function<void(Impl*, const absl::Status&)>;

  Impl(Options options, std::unique_ptr<Store> store, Records records, CoordinatorMetrics* metrics)
      : options_(std::move(options)),
        store_name_(store->Name()),
        metrics_(metrics),
        mailbox_(3 * kSessionsMax + kRequestsMax + kRingsMax, [this] { Wake(); }),
        store_(std::move(store)),
        core_(options_.core, std::move(records)),
        ring_worker_([this](RingOrdered ring) { (void)Post(std::move(ring)); }),
        thread_([this] { Run(); }) {}

  ~Impl() {
    mailbox_.Close();
    {
      MutexLock lock(&wake_mutex_);
      stopping_ = true;
      woken_ = true;
    }
    wake_.Signal();
    thread_.join();
  }

  std::optional<SessionId> OpenSession(std::shared_ptr<SessionPort> port) {
    if (sessions_.fetch_add(1) >= kSessionsMax) {
      sessions_.fetch_sub(1);
      return std::nullopt;
    }
    const SessionId session(next_session_.fetch_add(1));
    if (!Post(Open{session, std::move(port)})) {
      sessions_.fetch_sub(1);
      return std::nullopt;
    }
    return session;
  }
  // The mailbox refuses these two only after the loop has stopped. It has room for three mails of
  // each session: its opening, one message, and its end.
  void PostMessage(SessionId session, control::PeerMessage message) {
    (void)Post(Message{session, std::move(message)});
  }
  void CloseSession(SessionId session, bool ended_here) { (void)Post(Closed{session, ended_here}); }

  void PostRequest(Request request) {
    if (requests_.fetch_add(1) >= kRequestsMax) {
      requests_.fetch_sub(1);
      request(nullptr, absl::UnavailableError("too many requests are waiting; try again"));
      return;
    }
    // Shared, because the mailbox destroys a mail that it refuses, and then the request still needs
    // an answer.
    auto shared = std::make_shared<Request>(std::move(request));
    if (Post(shared)) return;
    requests_.fetch_sub(1);
    (*shared)(nullptr, Stopping());
  }

  // These five are for requests only: they run on the loop's thread.
  Overview GetOverview() {
    Overview overview = core_.GetOverview();
    overview.now = Now();
    overview.slow_write_ms = slow_writes_.WorstMs(overview.now);
    return overview;
  }
  const CoordinatorCore& core() const { return core_; }
  bool HasPeer(PeerId peer) const { return core_.HasPeer(peer); }
  absl::Status StepFor(const Event& event) {
    Step(event);
    return failed_ ? Stopping() : absl::OkStatus();
  }

  absl::Status Keep(const TokenChange& change) {
    const absl::Status stored = Stored([&] { return store_->ChangeTokens(change); });
    if (!stored.ok()) Fail(stored);
    return stored;
  }

  EventLog& events() { return events_; }
  const CoreConfig& core_config() const { return options_.core; }
  const std::string& store_name() const { return store_name_; }
  size_t sessions() const { return sessions_; }
  size_t queued() const { return queued_; }

 private:
  struct Open {
    SessionId session;
    std::shared_ptr<SessionPort> port;
  };
  struct Message {
    SessionId session;
    control::PeerMessage message;
  };
  struct Closed {
    SessionId session;
    bool ended_here = false;
  };
  using Content = std::variant<Open, Message, Closed, RingOrdered, std::shared_ptr<Request>>;
  struct Mail {
    Content content;
    Clock::time_point posted;
  };
  // The ring worker has one order at a time, so at most one answer waits.
  static constexpr size_t kRingsMax = 1;

  // False: the loop has stopped, and `content` is dropped.
  bool Post(Content content) {
    queued_.fetch_add(1);
    if (mailbox_.Post(Mail{std::move(content), Clock::now()})) return true;
    queued_.fetch_sub(1);
    return false;
  }
  void Wake() {
    {
      MutexLock lock(&wake_mutex_);
      woken_ = true;
    }
    wake_.Signal();
  }

  void Run();
  void Step(const Event& event);
  // Waits for mail or for the core's next deadline. Returns false if the loop has to stop.
  bool Wait();
  void Handle(Mail& mail);
  void HandleOpen(Open& open);
  void HandleMessage(Message& message);
  void HandleClosed(const Closed& closed);
  // Refuses the join if its stream objects to it. Returns whether it was refused.
  bool Refuse(SessionPort& port, const control::Join& join);
  // Called after the store failed: stops the loop and calls `fatal`.
  void Fail(const absl::Status& status);
  // Answers all requests in `mail` and in the mailbox with an error.
  void RefuseRest(std::vector<Mail> mail);

  // Runs `write`, which writes to the store, and measures it.
  template <class Write>
  absl::Status Stored(Write write);
  void Carry(ToPeer& action);
  void Carry(Persist& action);
  void Carry(::longhaul::coordinator::CloseSession& action);
  void Tell(EventRecord event);
  void TellLeftOut();
  void Carry(Notice& action);
  void Carry(OrderRing& action) { ring_worker_.Submit(std::move(action)); }
  // Updates the metrics from the actions of one step. Must run before the actions are carried out,
  // because that moves from them.
  void Measure(const std::vector<Action>& actions);
  void MeasureCommit(const GroupKey& group, const std::vector<Action>& actions);

  Tick Now() const { return options_.now ? options_.now() : SystemTick(); }

  const Options options_;
  const std::string store_name_;
  CoordinatorMetrics* const metrics_;
  std::atomic<size_t> sessions_{0};
  std::atomic<size_t> requests_{0};
  std::atomic<size_t> queued_{0};  // posted, and not handled yet
  std::atomic<uint64_t> next_session_{1};
  SlowWrites slow_writes_;
  EventLog events_;
  Mailbox<Mail> mailbox_;
  Mutex wake_mutex_;
  CondVar wake_;
  bool woken_ ABSL_GUARDED_BY(wake_mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(wake_mutex_) = false;

  // Only the loop's thread uses these.
  std::unique_ptr<Store> store_;
  CoordinatorCore core_;
  EventLimit event_limit_;
  std::map<SessionId, std::shared_ptr<SessionPort>> ports_;
  std::map<GroupKey, Tick> preparing_since_;
  // Groups that lost a member since their last epoch. A group without members never has another
  // epoch, so the number has a limit; beyond it, an epoch may count as a repair.
  std::set<GroupKey> removed_from_;
  static constexpr size_t kRemovedFromMax = 4096;
  bool failed_ = false;
  RingWorker ring_worker_;  // posts to the mailbox

  std::thread thread_;  // last: it uses everything above
};

// ------------------------------------------------------------------------------ the thread

void CoordinatorLoop::Impl::Run() {
  const CpuTime cpu("loop");
  // The first step starts the clock for deadlines that were left open before a restart.
  Step(TimePassed{});
  do {
    if (failed_) return RefuseRest({});
    std::vector<Mail> mail = mailbox_.TakeAll();
    for (size_t i = 0; i < mail.size(); ++i) {
      Handle(mail[i]);
      if (failed_)
        return RefuseRest(
            {std::make_move_iterator(mail.begin() + i + 1), std::make_move_iterator(mail.end())});
    }
    if (Now() >= core_.NextDeadline()) Step(TimePassed{});
    TellLeftOut();
  } while (failed_ || Wait());
  RefuseRest({});
}

bool CoordinatorLoop::Impl::Wait() {
  const Tick deadline = std::min(core_.NextDeadline(), event_limit_.due());
  MutexLock lock(&wake_mutex_);
  while (!woken_) {
    if (deadline == kNever) {
      wake_.Wait(&wake_mutex_);
      continue;
    }
    const int64_t left_us = deadline - Now();
    if (left_us <= 0) break;
    wake_.WaitFor(&wake_mutex_, std::chrono::microseconds(left_us));
  }
  woken_ = false;
  return !stopping_;
}

void CoordinatorLoop::Impl::Handle(Mail& mail) {
  metrics_->OnMail(Clock::now() - mail.posted);
  queued_.fetch_sub(1);
  Content& content = mail.content;
  if (auto* open = std::get_if<Open>(&content)) return HandleOpen(*open);
  if (auto* message = std::get_if<Message>(&content)) return HandleMessage(*message);
  if (auto* closed = std::get_if<Closed>(&content)) return HandleClosed(*closed);
  if (auto* ring = std::get_if<RingOrdered>(&content)) return Step(*ring);
  requests_.fetch_sub(1);
  (*std::get<std::shared_ptr<Request>>(content))(this, absl::OkStatus());
}

void CoordinatorLoop::Impl::HandleOpen(Open& open) {
  ports_.emplace(open.session, std::move(open.port));
  metrics_->OnStreamOpened();
  Step(SessionOpened{open.session});
}

void CoordinatorLoop::Impl::HandleMessage(Message& message) {
  if (std::holds_alternative<control::Vote>(message.message)) metrics_->OnVote();
  const SessionId session = message.session;
  const auto port = ports_.find(session);
  const auto* join = std::get_if<control::Join>(&message.message);
  if (join == nullptr || port == ports_.end() || !Refuse(*port->second, *join)) {
    Step(FromPeer{session, std::move(message.message)});
    if (failed_) return;
  }
  if (const auto it = ports_.find(session); it != ports_.end()) it->second->Accepted();
}

bool CoordinatorLoop::Impl::Refuse(SessionPort& port, const control::Join& join) {
  const std::optional<Denial> denial = port.ObjectionTo(join, core_);
  if (!denial) return false;
  metrics_->OnCallerRefused(NameOf(denial->refusal));
  metrics_->OnJoinRefused();
  port.Send(
      control::JoinRefused{join.request, join.group, {Code::kFailedPrecondition, denial->text}});
  Notice notice;
  notice.event.kind = "refuse";
  notice.event.peer = port.peer();
  notice.event.text =
      "join refused peer=" + ToString(notice.event.peer) + LogField("reason", denial->text);
  Carry(notice);
  return true;
}

void CoordinatorLoop::Impl::HandleClosed(const Closed& closed) {
  ports_.erase(closed.session);
  sessions_.fetch_sub(1);
  metrics_->OnStreamClosed();
  Step(SessionClosed{closed.session, closed.ended_here});
}

void CoordinatorLoop::Impl::Fail(const absl::Status& status) {
  failed_ = true;
  mailbox_.Close();
  if (options_.fatal) options_.fatal(status);
}

void CoordinatorLoop::Impl::RefuseRest(std::vector<Mail> mail) {
  mailbox_.Close();
  for (Mail& late : mailbox_.TakeAll()) mail.push_back(std::move(late));
  for (Mail& waiting : mail) {
    if (auto* request = std::get_if<std::shared_ptr<Request>>(&waiting.content)) {
      (**request)(nullptr, Stopping());
    }
  }
}

// ------------------------------------------------------------------------------ actions

void CoordinatorLoop::Impl::Step(const Event& event) {
  const Clock::time_point begun = Clock::now();
  const Tick now = Now();
  std::vector<Action> actions = core_.Step(event, now);
  Measure(actions);
  for (Action& action : actions) {
    std::visit([this](auto& a) { Carry(a); }, action);
    if (failed_) return;
  }
  metrics_->OnStep(Clock::now() - begun);
}

void CoordinatorLoop::Impl::Carry(ToPeer& action) {
  if (const auto it = ports_.find(action.session); it != ports_.end()) {
    it->second->Send(action.message);
  }
}

template <class Write>
absl::Status CoordinatorLoop::Impl::Stored(Write write) {
  const Clock::time_point begun = Clock::now();
  const absl::Status written = write();
  const Clock::duration took = Clock::now() - begun;
  metrics_->OnStoreWrite(took);
  slow_writes_.Add(Now(), took);
  return written;
}

void CoordinatorLoop::Impl::Carry(Persist& action) {
  const absl::Status applied = Stored([&] { return store_->Apply(action.mutations); });
  if (!applied.ok()) Fail(applied);
}

void CoordinatorLoop::Impl::Carry(::longhaul::coordinator::CloseSession& action) {
  if (const auto it = ports_.find(action.session); it != ports_.end()) {
    if (action.end == StreamEnd::kStranger) metrics_->OnStrangerRefused();
    it->second->Close(action.end, action.reason);
  }
}

void CoordinatorLoop::Impl::Carry(Notice& action) {
  if (event_limit_.Take(action.event, Now())) Tell(std::move(action.event));
}

void CoordinatorLoop::Impl::TellLeftOut() {
  for (EventRecord& event : event_limit_.TakeLeftOut(Now())) Tell(std::move(event));
}

void CoordinatorLoop::Impl::Tell(EventRecord event) {
  const std::string group = event.group.run.empty() ? "" : LogField("group", ToString(event.group));
  Log(LogLevel::kInfo, event.text + group);
  if (options_.observe) options_.observe(event, Now());
  events_.Append(std::move(event), WallTimeUs());
}

void CoordinatorLoop::Impl::Measure(const std::vector<Action>& actions) {
  for (const Action& action : actions) {
    const auto* notice = std::get_if<Notice>(&action);
    if (notice == nullptr) continue;
    const EventRecord& event = notice->event;
    if (IsRemoval(event.kind)) {
      metrics_->OnRemoval(event.cause);
      // The epoch without the member may come several steps later.
      if (removed_from_.size() == kRemovedFromMax) removed_from_.clear();
      removed_from_.insert(event.group);
    }
    // A preparation that replaces another one keeps the start time of the first.
    if (event.kind == "prepare") preparing_since_.emplace(event.group, Now());
    if (event.kind == "commit") MeasureCommit(event.group, actions);
    if (event.fault) {
      metrics_->OnFault(std::chrono::milliseconds(event.fault->detect_ms),
                        std::chrono::milliseconds(event.fault->agree_ms));
    }
    if (event.sync) {
      metrics_->OnSync(std::chrono::milliseconds(event.sync->took_ms), event.sync->bytes);
    }
    if (event.kind == "refuse") metrics_->OnJoinRefused();
    if (event.kind == "sync_failed") metrics_->OnSyncFailed();
    if (event.kind == "sync_refused") metrics_->OnSyncRefused();
    if (event.kind == "state_corrupt") metrics_->OnStateCorrupt();
    if (event.kind == "abort") {
      preparing_since_.erase(event.group);
      metrics_->OnPreparationAborted();
    }
  }
}

void CoordinatorLoop::Impl::MeasureCommit(const GroupKey& group,
                                          const std::vector<Action>& actions) {
  EpochCause cause = removed_from_.erase(group) > 0 ? EpochCause::kRemoval : EpochCause::kRepair;
  for (const Action& action : actions) {
    const auto* notice = std::get_if<Notice>(&action);
    if (notice == nullptr || notice->event.group != group) continue;
    if (notice->event.kind == "admit" && cause == EpochCause::kRepair) cause = EpochCause::kAdmit;
    if (notice->event.kind == "ring" && cause == EpochCause::kRepair) cause = EpochCause::kRing;
  }
  metrics_->OnEpochCommitted(cause);
  if (const auto it = preparing_since_.find(group); it != preparing_since_.end()) {
    metrics_->OnPreparation(std::chrono::microseconds(Now() - it->second));
    preparing_since_.erase(it);
  }
}

// ------------------------------------------------------------------------------ the outside

CoordinatorLoop::CoordinatorLoop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CoordinatorLoop::~CoordinatorLoop() = default;

absl::StatusOr<std::unique_ptr<CoordinatorLoop>> CoordinatorLoop::Start(
    Options options, std::unique_ptr<Store> store, CoordinatorMetrics* metrics) {
  LH_ASSIGN_OR_RETURN(Records records, store->Load());
  return std::unique_ptr<CoordinatorLoop>(new CoordinatorLoop(
      std::make_unique<Impl>(std::move(options), std::move(store), std::move(records), metrics)));
}

std::optional<SessionId> CoordinatorLoop::OpenSession(std::shared_ptr<SessionPort> port) {
  return impl_->OpenSession(std::move(port));
}
void CoordinatorLoop::PostMessage(SessionId session, control::PeerMessage message) {
  impl_->PostMessage(session, std::move(message));
}
void CoordinatorLoop::CloseSession(SessionId session, bool ended_here) {
  impl_->CloseSession(session, ended_here);
}

void CoordinatorLoop::Evict(EvictMember request, Done done) {
  impl_->PostRequest([request = std::move(request), done = std::move(done)](
                         Impl* loop, const absl::Status& status) {
    if (loop == nullptr) return done(status);
    const bool known =
        AnyMember(loop->GetOverview(), [&](const GroupKey& group, const MemberView& member) {
          return group == request.group && member.member == request.member;
        });
    if (known) return done(loop->StepFor(request));
    done(absl::NotFoundError(absl::StrCat("no member ", ToString(request.member), " in ",
                                          ToString(request.group),
                                          "; `lhctl members` lists all members")));
  });
}

void CoordinatorLoop::Knocked(PeerId peer) {
  impl_->PostRequest([peer](Impl* loop, const absl::Status&) {
    if (loop != nullptr) (void)loop->StepFor(PeerKnocked{peer});
  });
}

void CoordinatorLoop::Drain(DrainPeer request, Done done) {
  impl_->PostRequest([request = std::move(request), done = std::move(done)](
                         Impl* loop, const absl::Status& status) {
    if (loop == nullptr) return done(status);
    if (loop->HasPeer(request.peer)) return done(loop->StepFor(request));
    done(absl::NotFoundError(absl::StrCat("no peer ", ToString(request.peer),
                                          " is attached or has members; `lhctl ring` lists peers "
                                          "with members, `lhctl events` shows which attached")));
  });
}

void CoordinatorLoop::ChangeTokens(TokenChange change, Done done) {
  impl_->PostRequest(
      [change = std::move(change), done = std::move(done)](Impl* loop, const absl::Status& status) {
        done(loop == nullptr ? status : loop->Keep(change));
      });
}

void CoordinatorLoop::Query(std::function<void(const absl::StatusOr<Overview>&)> done) {
  QueryCore([done = std::move(done)](const absl::StatusOr<Overview>& overview,
                                     const CoordinatorCore*) { done(overview); });
}

void CoordinatorLoop::QueryCore(
    std::function<void(const absl::StatusOr<Overview>&, const CoordinatorCore*)> done) {
  impl_->PostRequest([done = std::move(done)](Impl* loop, const absl::Status& status) {
    if (loop == nullptr) return done(status, nullptr);
    done(loop->GetOverview(), &loop->core());
  });
}

absl::StatusOr<Overview> CoordinatorLoop::QueryAndWait(std::chrono::milliseconds timeout) {
  return Await<Overview>(timeout, [this](auto done) { Query(std::move(done)); });
}

absl::Status CoordinatorLoop::Ping(std::chrono::milliseconds timeout) {
  struct Pong {};
  return Await<Pong>(
             timeout,
             [this](auto done) {
               impl_->PostRequest([done = std::move(done)](Impl*, const absl::Status& status) {
                 done(status.ok() ? absl::StatusOr<Pong>(Pong{}) : absl::StatusOr<Pong>(status));
               });
             })
      .status();
}

size_t CoordinatorLoop::queued() const { return impl_->queued(); }
EventLog& CoordinatorLoop::events() { return impl_->events(); }
const CoreConfig& CoordinatorLoop::core_config() const { return impl_->core_config(); }
const std::string& CoordinatorLoop::store_name() const { return impl_->store_name(); }
size_t CoordinatorLoop::sessions() const { return impl_->sessions(); }

}  // namespace longhaul::coordinator
