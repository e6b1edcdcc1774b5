// The service Admin. The loop's thread answers unary calls from its own data. WatchEvents has one
// reactor per watcher; the event log wakes it.
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/version.h"
#include "base/log.h"
#include "base/mutex.h"
#include "coordinator/grpc/connection.h"
#include "coordinator/grpc/services.h"
#include "coordinator/loop/explain.h"
#include "proto/control/convert.h"
#include "proto/control/grpc/support.h"
#include "proto/longhaul/v1/admin.grpc.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

constexpr size_t kWatchersMax = 64;
// How many events a watcher takes from the log at once.
constexpr size_t kBatch = 64;
// How long a token is valid if the request does not say.
constexpr uint64_t kTokenTtlS = 30 * uint64_t{86400};

grpc::Status ToGrpc(const absl::Status& status) {
  // Abseil and gRPC number their codes alike, as google.rpc.Code does.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

int64_t WallTimeUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

grpc::Status BadRequest(const std::string& what) {
  return {grpc::StatusCode::INVALID_ARGUMENT, what};
}

// ------------------------------------------------------------------------------ to protobuf

bool Selects(const v1::Selector& selector, const GroupKey& group) {
  if (!selector.run().empty() && selector.run() != group.run) return false;
  return !selector.has_group() || selector.group() == group.group;
}

// The groups that `selector` names. NotFound: it names a run or a group that does not exist.
absl::StatusOr<std::vector<const GroupView*>> Select(const v1::Selector& selector,
                                                     const Overview& overview) {
  std::vector<const GroupView*> groups;
  for (const GroupView& group : overview.groups) {
    if (Selects(selector, group.group)) groups.push_back(&group);
  }
  if (groups.empty() && (!selector.run().empty() || selector.has_group())) {
    return absl::NotFoundError(
        absl::StrCat(selector.has_group() ? absl::StrCat("no group ", selector.group(), " of run '")
                                          : std::string("no run '"),
                     selector.run(), "'; `lhctl runs` lists all runs"));
  }
  return groups;
}

void Fill(const MemberView& member, v1::MemberStatus* status) {
  status->set_member(ToString(member.member));
  status->set_peer(ToString(member.peer));
  status->set_name(CleanText(member.name, LH_MEMBER_NAME_BYTES_MAX));
  status->set_joined(member.joined.value());
  status->set_voting(member.voting);
  status->set_background(member.background && member.joined);
  if (!member.fetch) return;
  v1::Fetch* const fetch = status->mutable_fetch();
  fetch->set_bytes_done(member.fetch->bytes_done);
  fetch->set_bytes_total(member.fetch->bytes_total);
  fetch->set_bytes_per_second(member.fetch->bytes_per_second);
  fetch->set_sources(member.fetch->sources);
}

void Fill(const LinkView& view, v1::Link* link) {
  link->set_bytes_per_second(view.bytes_per_second);
  link->set_rtt_us(view.rtt_us);
  link->set_age_s(view.age_s);
  link->set_at_least(view.at_least);
}

void Fill(const BlockedRecord& blocked, v1::BlockedStatus* status) {
  status->set_a(ToString(blocked.pair.a));
  status->set_b(ToString(blocked.pair.b));
  status->set_reason(CleanText(blocked.reason, LH_ERROR_TEXT_BYTES_MAX));
  if (blocked.pair.relay) status->set_relay(ToString(blocked.pair.relay));
}

void Fill(const PeerView& peer, v1::PeerStatus* status) {
  status->set_peer(ToString(peer.peer));
  status->set_host(CleanText(peer.host, LH_ERROR_TEXT_BYTES_MAX));
  status->set_endpoint(CleanText(peer.endpoint, LH_ENDPOINT_BYTES_MAX));
  status->set_attached(peer.attached);
  status->set_draining(peer.draining);
  status->set_ops_open(peer.load.ops_open);
  status->set_ops_settled(peer.load.ops_settled);
  status->set_bytes_sent(peer.load.bytes_sent);
  status->set_bytes_received(peer.load.bytes_received);
  if (peer.next) Fill(*peer.next, status->mutable_next());
  status->set_share(static_cast<double>(peer.share) / kShareUnits);
  status->set_up_bytes_per_second(peer.up_bytes_per_second);
  status->set_down_bytes_per_second(peer.down_bytes_per_second);
}

void Fill(const GroupView& group, v1::GroupStatus* status) {
  status->set_run(group.group.run);
  status->set_group(group.group.group);
  status->set_epoch(group.committed.value());
  status->set_preparing(group.preparing.value());
  status->set_waiting_for(CleanText(group.waiting_for, SIZE_MAX));
  for (const MemberView& member : group.members) Fill(member, status->add_members());
  for (const PeerView& peer : group.ring) Fill(peer, status->add_ring());
  for (const BlockedRecord& blocked : group.blocked) Fill(blocked, status->add_blocked());
  status->set_ring_epoch(group.ring_epoch.value());
  status->set_ring_gain(group.ring_gain);
  if (!group.state) return;
  status->mutable_state()->set_revision(group.state->revision);
  status->mutable_state()->set_digest(ToString(group.state->state));
}

void Fill(const GroupView& view, const std::vector<DirectionView>& links,
          v1::GetLinksResponse::Group* group) {
  group->set_run(view.group.run);
  group->set_group(view.group.group);
  group->set_epoch(view.committed.value());
  for (const PeerView& peer : view.ring) Fill(peer, group->add_peers());
  for (const DirectionView& each : links) {
    v1::GetLinksResponse::Direction* const direction = group->add_links();
    direction->set_from(ToString(each.from));
    direction->set_to(ToString(each.to));
    Fill(each.link, direction->mutable_link());
    direction->set_small_packets(each.small_packets);
    direction->set_held(each.held);
  }
  for (const BlockedRecord& blocked : view.blocked) Fill(blocked, group->add_blocked());
}

void Fill(const StampedEvent& stamped, const std::string& incarnation, v1::Event* proto) {
  const EventRecord& event = stamped.event;
  proto->set_sequence(stamped.sequence);
  proto->set_time_us(stamped.time_us);
  proto->set_kind(event.kind);
  proto->set_run(event.group.run);
  proto->set_group(event.group.group);
  proto->set_epoch(event.epoch.value());
  if (event.member) proto->set_member(ToString(event.member));
  if (event.peer) proto->set_peer(ToString(event.peer));
  proto->set_text(CleanText(event.text, SIZE_MAX));
  proto->set_incarnation(incarnation);
  if (event.sync) {
    v1::Sync* const sync = proto->mutable_sync();
    sync->mutable_state()->set_revision(event.sync->revision);
    sync->mutable_state()->set_digest(ToString(event.sync->state));
    sync->set_bytes(event.sync->bytes);
    sync->set_took_ms(event.sync->took_ms);
  }
  if (!event.fault) return;
  proto->mutable_fault()->set_cause(event.fault->cause);
  proto->mutable_fault()->set_detector(event.fault->detector);
  proto->mutable_fault()->set_detect_ms(event.fault->detect_ms);
  proto->mutable_fault()->set_agree_ms(event.fault->agree_ms);
  proto->mutable_fault()->set_subject(event.fault->subject);
}

void Fill(const RecordingAnswer& answer, v1::ReadRecordingResponse* response) {
  response->set_snapshot(answer.piece.snapshot);
  response->set_total(answer.piece.total);
  response->set_data(answer.piece.data);
  response->set_asked_us(answer.asked_us);
  response->set_received_us(answer.piece.received_us);
  response->set_sent_us(answer.piece.sent_us);
  response->set_answered_us(answer.answered_us);
}

void Fill(const TokenRecord& record, int64_t now_s, v1::Token* token) {
  token->set_id(record.id);
  token->set_run(record.run);
  token->set_role(NameOf(record.role));
  token->set_label(CleanText(record.label, kTokenLabelBytesMax));
  token->set_created_s(static_cast<int64_t>(record.created_s));
  token->set_expires_s(static_cast<int64_t>(record.expires_s));
  token->set_revoked_s(static_cast<int64_t>(record.revoked_s));
  token->set_groups(record.quota.groups);
  token->set_members(record.quota.members);
  token->set_runs(record.quota.runs);
  token->set_state(record.revoked_s != 0         ? "revoked"
                   : now_s >= token->expires_s() ? "expired"
                                                 : "valid");
}

// The runs that `selector` names, without their groups.
void Fill(const Overview& overview, const v1::Selector& selector, v1::ListRunsResponse* response) {
  std::map<std::string, v1::ListRunsResponse::Run*> runs;
  for (const GroupView& group : overview.groups) {
    if (!Selects(selector, group.group)) continue;
    v1::ListRunsResponse::Run*& run = runs[group.group.run];
    if (run == nullptr) {
      run = response->add_runs();
      run->set_run(group.group.run);
    }
    run->set_groups(run->groups() + 1);
    for (const MemberView& member : group.members) {
      if (member.joined) {
        run->set_members(run->members() + 1);
      } else {
        run->set_pending(run->pending() + 1);
      }
    }
  }
}

// ------------------------------------------------------------------------------ watching

class Watchers;

// One watcher's stream of events. It deletes itself when the call is over.
//
//   idle --(event)--> writing --(written)--> idle
//   any  --(end of the backlog | cancelled | Stop())--> finished, once no write is in flight
class Watcher final : public grpc::ServerWriteReactor<v1::Event> {
 public:
  // `request` selects nothing but what the caller may see.
  Watcher(Watchers* watchers, EventLog* log, std::string incarnation,
          const v1::WatchEventsRequest& request, Caller caller)
      : watchers_(watchers),
        log_(log),
        incarnation_(std::move(incarnation)),
        request_(request),
        caller_(std::move(caller)),
        end_(log->newest()) {
    // Every start of the coordinator numbers its events from 1. So a number from another start
    // means nothing here.
    const bool same = request_.incarnation().empty() || request_.incarnation() == incarnation_;
    uint64_t after = same ? request_.after_sequence() : 0;
    if (request_.no_backlog()) {
      after = end_;
    } else if (request_.backlog() > 0 && request_.backlog() < end_) {
      after = std::max<uint64_t>(after, end_ - request_.backlog());
    }
    after_ = after;
  }

  void Begin(grpc::CallbackServerContext* context) {
    {
      MutexLock lock(&mutex_);
      context->AddInitialMetadata(control::kWatchedIncarnation, incarnation_);
      context->AddInitialMetadata(control::kWatchedAfter, absl::StrCat(after_));
      // Tells the client that the watch has begun: no event is missed from now on.
      if (!stopped_) StartSendInitialMetadata();
    }
    subscription_ = log_->Subscribe([this] { Advance(); });
    Advance();
  }
  // Ends the stream. A watch that is refused from the start ends this way, too. Returns whether the
  // stream was running.
  bool Stop(const grpc::Status& status) {
    MutexLock lock(&mutex_);
    const bool running = !stopped_;
    StopLocked(status);
    return running;
  }

  const Caller& caller() const { return caller_; }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      if (!ok && !stopped_) {
        stopped_ = true;
        status_ = grpc::Status(grpc::StatusCode::CANCELLED, "the stream broke");
      }
      if (stopped_) return Finish(status_);
    }
    Advance();
  }
  void OnCancel() override { Stop({grpc::StatusCode::CANCELLED, "cancelled"}); }
  void OnDone() override;

 private:
  void Advance() {
    MutexLock lock(&mutex_);
    if (writing_ || stopped_) return;
    while (true) {
      if (batch_.empty()) batch_ = log_->Read(after_, kBatch);
      const bool over = !request_.follow() && (batch_.empty() || batch_[0].sequence > end_);
      if (over) return StopLocked(grpc::Status::OK);
      if (batch_.empty()) return;
      const StampedEvent event = std::move(batch_.front());
      batch_.erase(batch_.begin());
      after_ = event.sequence;
      // An event that concerns no group may name peers of other runs.
      const bool shown = event.event.group.run.empty()
                             ? caller_.run == kAllRuns
                             : Selects(request_.selector(), event.event.group);
      if (!shown) continue;
      outgoing_.Clear();
      Fill(event, incarnation_, &outgoing_);
      writing_ = true;
      return StartWrite(&outgoing_);
    }
  }

  void StopLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (stopped_) return;
    stopped_ = true;
    status_ = status;
    if (!writing_) Finish(status_);
  }

  Watchers* const watchers_;
  EventLog* const log_;
  const std::string incarnation_;
  const v1::WatchEventsRequest request_;
  const Caller caller_;
  const uint64_t end_;  // the newest event when the watch began: the end of the backlog
  std::optional<EventLog::Subscription> subscription_;

  Mutex mutex_;
  uint64_t after_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<StampedEvent> batch_ ABSL_GUARDED_BY(mutex_);
  v1::Event outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

// All watchers.
class Watchers {
 public:
  // OK: the watcher may begin. Otherwise: the error with which its stream has to end.
  grpc::Status Add(Watcher* watcher) {
    MutexLock lock(&mutex_);
    if (draining_) return {grpc::StatusCode::UNAVAILABLE, "the coordinator is shutting down"};
    if (watchers_.size() >= kWatchersMax) {
      return {grpc::StatusCode::RESOURCE_EXHAUSTED,
              absl::StrCat("the coordinator has ", kWatchersMax,
                           " watchers of events, and takes no more; end one of them")};
    }
    watchers_.insert(watcher);
    return grpc::Status::OK;
  }
  void Remove(Watcher* watcher) {
    MutexLock lock(&mutex_);
    watchers_.erase(watcher);
  }
  // Ends the watches for whose callers `why` gives a reason. Returns the reasons.
  std::vector<Denial> StopWhere(const std::function<std::optional<Denial>(const Caller&)>& why) {
    std::vector<Denial> denials;
    MutexLock lock(&mutex_);
    for (Watcher* watcher : watchers_) {
      const std::optional<Denial> denial = why(watcher->caller());
      if (denial && watcher->Stop(ToGrpc(*denial))) denials.push_back(*denial);
    }
    return denials;
  }
  void StopAll() {
    MutexLock lock(&mutex_);
    draining_ = true;
    for (Watcher* watcher : watchers_) {
      watcher->Stop({grpc::StatusCode::UNAVAILABLE, "the coordinator is shutting down"});
    }
  }

 private:
  Mutex mutex_;
  std::set<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

void Watcher::OnDone() {
  if (subscription_) log_->Unsubscribe(*subscription_);
  watchers_->Remove(this);
  delete this;
}

// ------------------------------------------------------------------------------ the service

// A call of ReadRecording. It ends when the peer answers, or when the caller gives up.
class RecordingCall final : public grpc::ServerUnaryReactor {
 public:
  RecordingCall(RecordingDesk* desk, v1::ReadRecordingResponse* response)
      : desk_(desk), response_(response) {}

  // Called before the service returns the call to gRPC. gRPC calls OnCancel() and OnDone() later.
  void Begin(PeerId peer, const control::ReadRecording& request) {
    request_ = desk_->Ask(peer, request,
                          [this](const absl::StatusOr<RecordingAnswer>& answer) { End(answer); });
  }
  void OnCancel() override { desk_->Cancel(request_); }
  void OnDone() override { delete this; }

 private:
  void End(const absl::StatusOr<RecordingAnswer>& answer) {
    if (answer.ok()) Fill(*answer, response_);
    Finish(ToGrpc(answer.status()));
  }

  RecordingDesk* const desk_;
  v1::ReadRecordingResponse* const response_;
  uint64_t request_ = 0;
};

class AdminService final : public DrainableService, private v1::Admin::CallbackService {
 public:
  AdminService(CoordinatorLoop* loop, RecordingDesk* desk, TokenDesk* tokens,
               Authorizer* authorizer)
      : loop_(loop), desk_(desk), tokens_(tokens), authorizer_(authorizer) {}

  grpc::Service* service() override { return this; }
  void EndStreams() override { watchers_.StopAll(); }
  void Came(const std::string&) override {}
  void EndStreamsOf(const std::function<std::optional<Denial>(const Caller&)>& why) override {
    for (const Denial& denial : watchers_.StopWhere(why)) {
      authorizer_->Refused(denial, "a watcher of events", "stream of events ended");
    }
  }

 private:
  using Context = grpc::CallbackServerContext;
  using Unary = grpc::ServerUnaryReactor;

  // Each method first finds out who calls, with one of the next four. They count and log a refusal.

  std::variant<Caller, Denial> Admit(Context* context, Role needed) {
    return authorizer_->Admit(*context, needed);
  }
  // Also refuses a caller that may not use `run`.
  std::variant<Caller, Denial> AdmitTo(Context* context, Role needed, const std::string& run) {
    std::variant<Caller, Denial> admitted = Admit(context, needed);
    const auto* caller = std::get_if<Caller>(&admitted);
    if (caller == nullptr || caller->MayUse(run)) return admitted;
    const std::string asked = run == kAllRuns ? "this call concerns all runs"
                                              : absl::StrCat("this call concerns run ",
                                                             CleanText(run, LH_RUN_NAME_BYTES_MAX));
    const Denial denial{
        TokenRefusal::kRun,
        absl::StrCat(asked, ", and the caller's ", caller->Shown(), " is for run ", caller->run)};
    authorizer_->Refused(denial, ClientOf(context->peer()), "call refused");
    return denial;
  }
  // Admits a reader. Makes the selection narrower if the caller may see one run only.
  std::variant<Caller, Denial> AdmitReader(Context* context, v1::Selector* selector) {
    if (!selector->run().empty()) return AdmitTo(context, Role::kObserver, selector->run());
    std::variant<Caller, Denial> admitted = Admit(context, Role::kObserver);
    const auto* caller = std::get_if<Caller>(&admitted);
    if (caller != nullptr && caller->run != kAllRuns) selector->set_run(caller->run);
    return admitted;
  }
  // Finishes the call if it was refused. Returns whether it was.
  static bool Over(const std::variant<Caller, Denial>& admitted, Unary* reactor) {
    const auto* denial = std::get_if<Denial>(&admitted);
    if (denial != nullptr) reactor->Finish(ToGrpc(*denial));
    return denial != nullptr;
  }

  // Answers with what `fill` makes of the overview. `fill` runs on the loop's thread. These four
  // come after the caller was admitted, or admit it themselves if they have a selector.
  Unary* Answer(Context* context, std::function<absl::Status(const Overview&)> fill) {
    return AnswerFromCore(
        context, [fill = std::move(fill)](const Overview& overview, const CoordinatorCore&) {
          return fill(overview);
        });
  }

  // As Answer(). `fill` may ask the core for more.
  Unary* AnswerFromCore(Context* context,
                        std::function<absl::Status(const Overview&, const CoordinatorCore&)> fill) {
    Unary* reactor = context->DefaultReactor();
    loop_->QueryCore([reactor, fill = std::move(fill)](const absl::StatusOr<Overview>& overview,
                                                       const CoordinatorCore* core) {
      reactor->Finish(ToGrpc(overview.ok() ? fill(*overview, *core) : overview.status()));
    });
    return reactor;
  }

  // Answers with what `fill` makes of each selected group that the caller may see.
  Unary* ForEach(Context* context, const v1::Selector& selector,
                 std::function<void(const GroupView&)> fill) {
    return ForEachFromCore(
        context, selector,
        [fill = std::move(fill)](const GroupView& group, const CoordinatorCore&) { fill(group); });
  }

  Unary* ForEachFromCore(Context* context, v1::Selector selector,
                         std::function<void(const GroupView&, const CoordinatorCore&)> fill) {
    Unary* reactor = context->DefaultReactor();
    if (Over(AdmitReader(context, &selector), reactor)) return reactor;
    return AnswerFromCore(context, [selector, fill = std::move(fill)](const Overview& overview,
                                                                      const CoordinatorCore& core) {
      const auto groups = Select(selector, overview);
      if (!groups.ok()) return groups.status();
      for (const GroupView* group : *groups) fill(*group, core);
      return absl::OkStatus();
    });
  }

  Unary* ListRuns(Context* context, const v1::ListRunsRequest*,
                  v1::ListRunsResponse* response) override {
    Unary* reactor = context->DefaultReactor();
    v1::Selector selector;
    if (Over(AdmitReader(context, &selector), reactor)) return reactor;
    return Answer(context, [selector, response](const Overview& overview) {
      Fill(overview, selector, response);
      return absl::OkStatus();
    });
  }

  Unary* GetOverview(Context* context, const v1::GetOverviewRequest* request,
                     v1::GetOverviewResponse* response) override {
    response->set_incarnation(loop_->core_config().incarnation);
    response->set_version(kVersion);
    response->set_detect_ms(loop_->core_config().detect_ms);
    response->set_store(CleanText(loop_->store_name(), SIZE_MAX));
    response->set_streams(static_cast<uint32_t>(loop_->sessions()));
    response->set_time_us(WallTimeUs());
    return ForEach(context, request->selector(),
                   [response](const GroupView& group) { Fill(group, response->add_groups()); });
  }

  Unary* GetRing(Context* context, const v1::GetRingRequest* request,
                 v1::GetRingResponse* response) override {
    return ForEach(context, request->selector(), [response](const GroupView& group) {
      v1::GetRingResponse::Ring* ring = response->add_rings();
      ring->set_run(group.group.run);
      ring->set_group(group.group.group);
      ring->set_epoch(group.committed.value());
      ring->set_ring_epoch(group.ring_epoch.value());
      ring->set_ring_gain(group.ring_gain);
      for (const PeerView& peer : group.ring) Fill(peer, ring->add_peers());
    });
  }

  Unary* GetLinks(Context* context, const v1::GetLinksRequest* request,
                  v1::GetLinksResponse* response) override {
    return ForEachFromCore(context, request->selector(),
                           [response](const GroupView& group, const CoordinatorCore& core) {
                             Fill(group, core.LinksOf(group), response->add_groups());
                           });
  }

  Unary* Explain(Context* context, const v1::ExplainRequest* request,
                 v1::ExplainResponse* response) override {
    const uint32_t detect_ms = loop_->core_config().detect_ms;
    Unary* reactor = context->DefaultReactor();
    v1::Selector selector = request->selector();
    if (Over(AdmitReader(context, &selector), reactor)) return reactor;
    return AnswerFromCore(context, [selector, response, detect_ms](const Overview& overview,
                                                                   const CoordinatorCore& core) {
      const auto groups = Select(selector, overview);
      if (!groups.ok()) return groups.status();
      for (const GroupView* group : *groups) {
        GroupView view = *group;
        view.pace = core.PaceOf(group->group);
        const Explanation explanation =
            coordinator::Explain(view, detect_ms, overview.slow_write_ms);
        v1::ExplainResponse::Group* proto = response->add_groups();
        proto->set_run(group->group.run);
        proto->set_group(group->group.group);
        proto->set_verdict(CleanText(explanation.verdict, SIZE_MAX));
        for (const std::string& fact : explanation.facts) {
          proto->add_facts(CleanText(fact, SIZE_MAX));
        }
      }
      return absl::OkStatus();
    });
  }

  Unary* Drain(Context* context, const v1::DrainRequest* request, v1::DrainResponse*) override {
    Unary* reactor = context->DefaultReactor();
    if (Over(AdmitTo(context, Role::kOperator, kAllRuns), reactor)) return reactor;
    PeerId peer;
    if (!ParseId(request->peer(), &peer) || !peer) {
      reactor->Finish(BadRequest("peer: write it as in `lhctl ring`, for instance p1f"));
      return reactor;
    }
    loop_->Drain({peer, CleanText(request->reason(), LH_ERROR_TEXT_BYTES_MAX)},
                 [reactor](const absl::Status& status) { reactor->Finish(ToGrpc(status)); });
    return reactor;
  }

  Unary* Evict(Context* context, const v1::EvictRequest* request, v1::EvictResponse*) override {
    Unary* reactor = context->DefaultReactor();
    if (request->run().size() > LH_RUN_NAME_BYTES_MAX) {
      reactor->Finish(
          BadRequest(absl::StrCat("run: the name has ", request->run().size(),
                                  " bytes; a run's name has at most ", LH_RUN_NAME_BYTES_MAX)));
      return reactor;
    }
    if (Over(AdmitTo(context, Role::kOperator, request->run()), reactor)) return reactor;
    MemberId member;
    if (!ParseId(request->member(), &member) || !member) {
      reactor->Finish(BadRequest("member: write it as in `lhctl members`, for instance m3"));
      return reactor;
    }
    loop_->Evict({{request->run(), request->group()},
                  member,
                  CleanText(request->reason(), LH_ERROR_TEXT_BYTES_MAX)},
                 [reactor](const absl::Status& status) { reactor->Finish(ToGrpc(status)); });
    return reactor;
  }

  grpc::ServerWriteReactor<v1::Event>* WatchEvents(Context* context,
                                                   const v1::WatchEventsRequest* request) override {
    v1::WatchEventsRequest seen = *request;
    const std::variant<Caller, Denial> admitted = AdmitReader(context, seen.mutable_selector());
    const auto* denial = std::get_if<Denial>(&admitted);
    auto* watcher = new Watcher(&watchers_, &loop_->events(), loop_->core_config().incarnation,
                                seen, denial == nullptr ? std::get<Caller>(admitted) : Caller());
    if (denial != nullptr) {
      watcher->Stop(ToGrpc(*denial));
    } else if (const grpc::Status refused = watchers_.Add(watcher); !refused.ok()) {
      watcher->Stop(refused);
    } else {
      watcher->Begin(context);
    }
    return watcher;
  }

  Unary* ReadRecording(Context* context, const v1::ReadRecordingRequest* request,
                       v1::ReadRecordingResponse* response) override {
    const std::variant<Caller, Denial> admitted = AdmitTo(context, Role::kObserver, kAllRuns);
    // The default reactor must not be made for a call that has a reactor of its own.
    if (std::holds_alternative<Denial>(admitted)) {
      Unary* reactor = context->DefaultReactor();
      Over(admitted, reactor);
      return reactor;
    }
    control::ReadRecording read;
    read.snapshot = request->snapshot();
    read.offset = request->offset();
    read.ops_max = request->ops_max();
    read.events_max = request->events_max();
    if (request->peer().empty()) {
      Unary* reactor = context->DefaultReactor();
      const absl::StatusOr<RecordingAnswer> answer = desk_->AskSelf(read);
      if (answer.ok()) Fill(*answer, response);
      reactor->Finish(ToGrpc(answer.status()));
      return reactor;
    }
    PeerId peer;
    if (!ParseId(request->peer(), &peer) || !peer) {
      Unary* reactor = context->DefaultReactor();
      reactor->Finish(BadRequest("peer: write it as in `lhctl ring`, for instance p1f"));
      return reactor;
    }
    auto* call = new RecordingCall(desk_, response);
    call->Begin(peer, read);
    return call;
  }

  Unary* CreateToken(Context* context, const v1::CreateTokenRequest* request,
                     v1::CreateTokenResponse* response) override {
    Unary* reactor = context->DefaultReactor();
    const std::variant<Caller, Denial> admitted = AdmitTo(context, Role::kOperator, kAllRuns);
    if (Over(admitted, reactor)) return reactor;
    TokenOrder order;
    order.run = request->run();
    order.role = Role();  // no role: the desk refuses it
    const auto roles = NamesOf(Role());
    for (uint64_t role = roles.first; role <= roles.last(); ++role) {
      if (request->role() == NameOf(static_cast<Role>(role))) order.role = static_cast<Role>(role);
    }
    order.label = request->label();
    order.ttl_s = request->ttl_s() == 0 ? kTokenTtlS : request->ttl_s();
    order.quota = {request->groups(), request->members(), request->runs()};
    tokens_->Create(order, [reactor, response,
                            by = ByWhom(admitted, context)](const absl::StatusOr<NewToken>& made) {
      if (made.ok()) {
        const TokenRecord& record = made->record;
        response->set_token(made->token);
        Fill(record, WallTimeUs() / 1000000, response->mutable_about());
        Log(LogLevel::kInfo, absl::StrCat("join token created id=", record.id, " run=", record.run,
                                          " role=", NameOf(record.role),
                                          " valid_for_s=", record.expires_s - record.created_s,
                                          LogField("label", record.label), by));
      }
      reactor->Finish(ToGrpc(made.status()));
    });
    return reactor;
  }

  Unary* ListTokens(Context* context, const v1::ListTokensRequest*,
                    v1::ListTokensResponse* response) override {
    Unary* reactor = context->DefaultReactor();
    if (Over(AdmitTo(context, Role::kOperator, kAllRuns), reactor)) return reactor;
    const int64_t now_s = WallTimeUs() / 1000000;
    for (const TokenRecord& record : tokens_->List()) Fill(record, now_s, response->add_tokens());
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  Unary* RevokeToken(Context* context, const v1::RevokeTokenRequest* request,
                     v1::RevokeTokenResponse*) override {
    Unary* reactor = context->DefaultReactor();
    const std::variant<Caller, Denial> admitted = AdmitTo(context, Role::kOperator, kAllRuns);
    if (Over(admitted, reactor)) return reactor;
    const std::string& id = request->id();
    tokens_->Revoke(id, [reactor, id, by = ByWhom(admitted, context)](const absl::Status& status) {
      if (status.ok()) Log(LogLevel::kInfo, absl::StrCat("join token revoked id=", id, by));
      reactor->Finish(ToGrpc(status));
    });
    return reactor;
  }

  // For the log: who gave an order.
  static std::string ByWhom(const std::variant<Caller, Denial>& admitted, Context* context) {
    return LogField("by", std::get<Caller>(admitted).Shown()) +
           LogField("client", ClientOf(context->peer()));
  }

  CoordinatorLoop* const loop_;
  RecordingDesk* const desk_;
  TokenDesk* const tokens_;
  Authorizer* const authorizer_;
  Watchers watchers_;
};

}  // namespace

std::unique_ptr<DrainableService> MakeAdminService(CoordinatorLoop* loop, RecordingDesk* desk,
                                                   TokenDesk* tokens, Authorizer* authorizer) {
  return std::make_unique<AdminService>(loop, desk, tokens, authorizer);
}

}  // namespace longhaul::coordinator
