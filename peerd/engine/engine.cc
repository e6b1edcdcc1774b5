#include "peerd/engine/engine.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace longhaul::peerd {
namespace {

const Outcome kLeaves{Code::kAborted, "the member leaves"};

void LogSync(LocalId local, const Outcome& outcome, const StateSyncInfo& info) {
  Log(LogLevel::kInfo, absl::StrCat("state sync ended local=", local.value(), " ok=", outcome.ok(),
                                    " revision=", info.revision, " bytes=", info.bytes,
                                    " sources=", info.sources, " took_ms=", info.total_us / 1000) +
                           LogField("reason", outcome.text));
}

}  // namespace

void Engine::Start(EngineOptions options, EnginePorts ports) {
  options_ = std::move(options);
  ports_ = std::move(ports);
  core_.emplace(options_.core);
  unserved_since_ = Now();
}

std::unique_ptr<Engine> Engine::Clone(EnginePorts ports) const {
  LH_CHECK(events_.empty()) << "an engine is cloned within a turn";
  auto clone = std::make_unique<Engine>();
  clone->options_ = options_;
  clone->ports_ = std::move(ports);
  clone->core_ = core_->Clone();
  clone->joins_ = joins_;
  clone->groups_ = groups_;
  clone->stream_up_ = stream_up_;
  clone->welcome_ = welcome_;
  clone->unserved_since_ = unserved_since_;
  clone->stream_error_ = stream_error_;
  clone->drained_ = drained_;
  return clone;
}

uint64_t Engine::Digest() const {
  Digester digest;
  digest.Add(core_->Digest()).Add(uint64_t{stream_up_} | uint64_t{welcome_} << 1);
  digest.Add(uint64_t{drained_});
  if (options_.coordinator_timeout_ms == 0) return digest.value();
  digest.Add(unserved_since_);
  for (const auto& [local, since] : joins_) digest.Add(local).Add(since);
  return digest.value();
}

// ------------------------------------------------------------------------------ the loop

void Engine::Turn() {
  if (Now() >= core_->NextDeadline()) Post(TimePassed{});
  ports_.ops->Work();
  ports_.states->Work();
  for (const auto& [local, progress] : ports_.states->PopProgress()) {
    ports_.trainers->SyncProgress(local, progress);
    core_->SetProgress(local, progress);
  }
  FailHopelessJoins();
  EndQuestions();
  CarryOut();
}

Tick Engine::NextDeadline() const {
  if (ports_.ops->HasWork()) return Now();
  Tick next = std::min(core_->NextDeadline(), ports_.states->NextDeadline());
  for (const auto& [group, question] : questions_) next = std::min(next, question.until);
  return next;
}

// Carries out one action.
struct Engine::Carrier {
  Engine* e;
  EnginePorts& ports = e->ports_;

  // ---- the coordinator
  void operator()(ToCoordinator& a) { ports.to_coordinator(a.message); }
  void operator()(RefuseCoordinator& a) {
    e->Unwelcome();
    ports.refuse_coordinator(a.reason);
  }

  // ---- trainers
  void operator()(JoinDone& a) {
    e->joins_.erase(a.local);
    if (!a.outcome.ok()) {
      e->groups_.erase(a.local);
      ports.states->Forget(a.local);
      // The trainer gave up waiting. Without a coordinator, that is what it waited for.
      if (a.outcome.code == Code::kAborted && !e->welcome_) {
        absl::StrAppend(&a.outcome.text, "; ", e->NoCoordinator());
      }
    }
    ports.trainers->JoinDone(a.local, a.outcome, a.world, a.newcomer);
  }
  void operator()(StepDone& a) {
    ports.states->WhenUnread(a.local, [trainers = ports.trainers, a] {
      trainers->StepDone(a.local, a.outcome, a.world);
    });
  }
  void operator()(LeaveDone& a) {
    ports.states->WhenUnread(
        a.local, [trainers = ports.trainers, a] { trainers->LeaveDone(a.local, a.outcome); });
  }
  void operator()(PostDone& a) {
    const OpTraffic traffic = ports.ops->EndPost(a.post);
    ports.trainers->PostDone(a.post, a.outcome, a.info, traffic);
  }
  void operator()(WorldChanged& a) {
    ports.states->WhenUnread(
        a.local, [trainers = ports.trainers, a] { trainers->WorldChanged(a.local, a.world); });
  }
  void operator()(MemberGone& a) {
    e->WithdrawSync(a.local, a.outcome.ok() ? kLeaves : a.outcome);
    e->groups_.erase(a.local);
    ports.states->WhenUnread(a.local, [states = ports.states, trainers = ports.trainers, a] {
      states->Forget(a.local);
      trainers->MemberGone(a.local, a.outcome);
    });
  }

  // ---- links
  std::vector<std::string> Reached(const std::vector<std::string>& endpoints) {
    return ports.reached ? ports.reached(endpoints) : endpoints;
  }
  void operator()(OpenLinks& a) {
    std::map<PeerId, const control::PeerInfo*> infos;
    for (const LinkWanted& want : a.links) infos[want.peer.peer] = &want.peer;
    std::vector<LinkRequest> links;
    for (const LinkWanted& want : a.links) {
      const PeerId at = want.relay ? want.relay : want.peer.peer;
      links.push_back({want.peer.peer, want.relay, want.peer.key, Reached(infos.at(at)->endpoints),
                       want.dial, want.data, want.one_lane});
    }
    ports.links->OpenLinks(a.group.run, a.group.group, a.epoch, a.token, links, a.deadline);
  }
  void operator()(KeepLinks& a) {
    if (a.peers.empty()) ports.ops->ForgetGroup(a.group);
    ports.links->KeepLinks(a.group.run, a.group.group, a.epoch, a.peers);
  }
  void operator()(TryAddress& a) {
    ports.links->TryPeer(a.group, a.trial, a.peer.peer, Reached(a.peer.endpoints), a.deadline);
  }
  void operator()(BreakLink& a) { ports.links->BreakLink({a.group.run, a.peer}, a.reason); }

  // ---- ops
  void operator()(SendReady& a) {
    ControlFrame frame = FrameOf(a, a.one_shot ? ports.ops->Payload(a) : "");
    if (a.sign) e->Sign(a, &frame);
    e->Send(frame);
  }
  void operator()(SendDone& a) { e->Send(FrameOf(a)); }
  void operator()(StartAttempt& a) { ports.ops->Start(a); }
  void operator()(CreditAttempt& a) { ports.ops->Credit(a); }
  void operator()(StopAttempt& a) { ports.ops->Stop(a); }
  void operator()(FinishAttempt& a) { ports.ops->Finish(a); }

  // ---- shared state
  void operator()(SyncDone& a) { e->EndSync(a); }
  void operator()(TakeDone& a) {
    const StateSyncInfo info = ports.states->Carry(a);
    if (info.bytes > 0) LogSync(a.local, a.outcome, info);
    ports.trainers->TakeDone(a.local, a.outcome, info);
  }
  void operator()(ServeState& a) { ports.states->Carry(a); }
  void operator()(EndServe& a) { ports.states->Carry(a); }
  void operator()(StartTransfer& a) { ports.states->Carry(a); }
  void operator()(ChangeSources& a) { ports.states->Carry(a); }
  void operator()(StopTransfer& a) { ports.states->Carry(a); }
  void operator()(CompareManifest& a) { ports.states->Carry(a); }

  void operator()(FaultOver&) {}  // for observers
  void operator()(Drained&) { e->drained_ = true; }
  void operator()(LogLine& a) { Log(LogLevel::kInfo, a.text); }
};

void Engine::CarryOut() {
  while (true) {
    for (Event& event : ports_.ops->PopEvents()) Post(std::move(event));
    for (Event& event : ports_.states->PopEvents()) Post(std::move(event));
    if (events_.empty()) return;
    Event event = std::move(events_.front());
    events_.pop_front();
    EngineObserver* const observer = ports_.observer;
    if (observer != nullptr && !observer->OnEvent(&event)) return;
    if (const auto* post = std::get_if<LocalPost>(&event); post && !Admit(*post)) continue;
    std::vector<Action> actions = core_->Step(event, Now());
    if (observer != nullptr) observer->OnActions(&actions);
    for (Action& action : actions) {
      if (observer != nullptr && !observer->OnAction(action)) return;
      std::visit(Carrier{this}, action);
    }
  }
}

// ------------------------------------------------------------------------------ the coordinator

void Engine::OnStreamUp() {
  stream_up_ = true;
  Post(CoordinatorUp{});
}

void Engine::OnStreamDown(const std::string& reason) {
  Unwelcome();
  if (std::exchange(stream_up_, false)) Post(CoordinatorDown{});
  stream_error_ = reason;
}

void Engine::Unwelcome() {
  if (std::exchange(welcome_, false)) unserved_since_ = Now();
}

void Engine::OnMessage(control::CoordinatorMessage message) {
  if (const auto* welcome = std::get_if<control::Welcome>(&message)) {
    welcome_ = true;
    ports_.links->SetDetectMs(welcome->detect_ms);
    ports_.states->SetDetectMs(welcome->detect_ms);
  }
  Post(FromCoordinator{std::move(message)});
}

void Engine::FailHopelessJoins() {
  if (welcome_ || joins_.empty() || options_.coordinator_timeout_ms == 0) return;
  const Tick now = Now();
  const int64_t patience = Millis(options_.coordinator_timeout_ms);
  if (now - unserved_since_ < patience) return;
  for (auto it = joins_.begin(); it != joins_.end();) {
    const auto [local, since] = *it;
    if (now - since < patience) {
      ++it;
      continue;
    }
    it = joins_.erase(it);
    ports_.trainers->JoinDone(
        local,
        {Code::kUnavailable,
         absl::StrCat("join refused: no coordinator of ", options_.coordinators,
                      " serves this peer (", stream_error_, "); check --coordinator of peerd")},
        {}, /*newcomer=*/false);
    ports_.states->Forget(local);
    Post(LocalDied{local, "no coordinator"});
  }
}

std::string Engine::NoCoordinator() const {
  return absl::StrCat("no coordinator for ", (Now() - unserved_since_) / Seconds(1),
                      " s: ", stream_error_);
}

void Engine::OnWhy(const GroupKey& group, std::function<void(const std::string&)> done) {
  if (!welcome_) return done(NoCoordinator());
  const bool ours = std::any_of(groups_.begin(), groups_.end(),
                                [&](const auto& entry) { return entry.second == group; });
  if (!ours || ports_.ask_why == nullptr) return done("this host has no member in the group");
  const auto [it, fresh] = questions_.try_emplace(group);
  Question& question = it->second;
  if (!fresh && question.number == 0) return done(question.text);
  question.waiting.push_back(std::move(done));
  if (!fresh) return;
  question.number = ++last_question_;
  question.until = Now() + kWhyPatience;
  ports_.ask_why({question.number, group});
}

void Engine::OnTellWhy(const control::TellWhy& tell) {
  for (auto& [group, question] : questions_) {
    if (question.number == 0 || question.number != tell.request) continue;
    question.number = 0;
    question.text = tell.text;
    for (const auto& done : std::exchange(question.waiting, {})) done(question.text);
  }
}

void Engine::EndQuestions() {
  for (auto it = questions_.begin(); it != questions_.end();) {
    if (welcome_ && Now() < it->second.until) {
      ++it;
      continue;
    }
    const Question ended = std::move(it->second);
    it = questions_.erase(it);
    const std::string text =
        welcome_ ? "the coordinator does not answer: it hangs, or the network to it is slow"
                 : NoCoordinator();
    for (const auto& done : ended.waiting) done(text);
  }
}

// ------------------------------------------------------------------------------ trainers

void Engine::OnJoin(const LocalJoin& join) {
  joins_[join.local] = Now();
  groups_[join.local] = join.group;
  ports_.states->Add(join.local, join.group, join.name);
  Post(join);
}

void Engine::OnPost(const LocalPost& post, PostBuffers buffers) {
  ports_.ops->AddPost(post, std::move(buffers));
  Post(post);
}

void Engine::OnCancel(const PostRef& post) { Post(LocalCancel{post}); }

bool Engine::Admit(const LocalPost& post) {
  const std::optional<PostView> view = core_->ViewPost(post);
  if (!view) return true;  // the core will refuse the post, and say why
  const Outcome outcome = ports_.ops->Admit(post, *view);
  if (outcome.ok()) return true;
  Action answer = PostDone{post.post, outcome, {}};
  if (ports_.observer == nullptr || ports_.observer->OnAction(answer)) {
    std::visit(Carrier{this}, answer);
  }
  if (outcome.code == Code::kInvalidArgument) {
    // Before the trainer's next call.
    events_.push_front(LocalRefusal{post, outcome.text});
  }
  return false;
}

void Engine::OnStep(LocalId local, const StateSync* sync) {
  if (sync != nullptr) {
    BeginSync(local, *sync, /*with_step=*/true);
  } else {
    Post(LocalStep{local});
  }
}

void Engine::OnSync(LocalId local, const StateSync& sync) {
  BeginSync(local, sync, /*with_step=*/false);
}

void Engine::BeginSync(LocalId local, const StateSync& sync, bool with_step) {
  const auto group = groups_.find(local);
  if (group != groups_.end()) return ports_.states->Begin(local, group->second, sync, with_step);
  // The member is out, but its trainer does not know it yet, because something still reads its
  // tensors.
  ports_.states->WhenUnread(local, [trainers = ports_.trainers, local, with_step] {
    trainers->SyncDone(local, kLeaves, {});
    if (with_step) trainers->StepDone(local, kLeaves, {});
  });
}

void Engine::OnTake(LocalId local, uint32_t timeout_ms) {
  Post(LocalTake{local, Now() + Millis(timeout_ms)});
}

void Engine::OnLeave(LocalId local) {
  WithdrawSync(local, kLeaves);
  Post(LocalLeave{local});
}

void Engine::OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) {
  ports_.states->Prepare(state, std::move(done));
}

bool Engine::OnKept(LocalId local, const LocalState& state, uint64_t* revision) {
  return ports_.states->KeptRevision(local, state, revision);
}

void Engine::OnGone(LocalId local, const std::string& reason) {
  joins_.erase(local);
  groups_.erase(local);
  ports_.states->Withdraw(local);
  ports_.states->Gone(local);
  Post(LocalDied{local, reason});
}

void Engine::OnRegionAdded(const uint8_t* data, size_t bytes) {
  ports_.links->AddMemory(data, bytes);
}

void Engine::OnRegionRemoved(const uint8_t* data, size_t) { ports_.links->RemoveMemory(data); }

// A sync that the core has heard of stays open: the core ends it with the member.
void Engine::WithdrawSync(LocalId local, const Outcome& outcome) {
  const std::optional<bool> with_step = ports_.states->Withdraw(local);
  if (!with_step) return;
  ports_.trainers->SyncDone(local, outcome, {});
  if (*with_step) ports_.trainers->StepDone(local, outcome, {});
}

void Engine::EndSync(const SyncDone& ended) {
  const StateSyncInfo info = ports_.states->Carry(ended);
  // A sync in which all members were equal is not logged: that happens at each step.
  if (!ended.outcome.ok() || info.bytes > 0) LogSync(ended.local, ended.outcome, info);
  ports_.states->WhenUnread(ended.local, [trainers = ports_.trainers, clock = ports_.clock, ended,
                                          told = info, since = Now()]() mutable {
    told.total_us += clock() - since;
    trainers->SyncDone(ended.local, ended.outcome, told);
  });
}

// ------------------------------------------------------------------------------ links and frames

// The READYs of an op in one attempt are equal, and follow each other. Only the first is signed.
void Engine::Sign(const SendReady& ready, ControlFrame* frame) {
  const auto is_of = [&](const Signed& one) {
    return one.group == ready.group && one.ordinal == ready.ordinal &&
           one.attempt == ready.attempt && one.header.stamp == *ready.sign &&
           one.plain == frame->payload;
  };
  if (signed_ && is_of(*signed_)) {
    frame->header = signed_->header;
    frame->payload = signed_->payload;
    return;
  }
  Signed next{ready.group, ready.ordinal, ready.attempt, frame->payload, {}, ""};
  std::string digest = SignReady(ready, ports_.sign, frame);
  next.header = frame->header;
  next.payload = frame->payload;
  signed_ = std::move(next);
  Post(ReadySigned{ready.group, ready.ordinal, ready.attempt, std::move(digest)});
}

void Engine::Send(const ControlFrame& frame) {
  if (frame.may_wait) {
    ports_.links->SendControlInTime(frame.link, frame.header, frame.bytes());
  } else {
    ports_.links->SendControl(frame.link, frame.header, frame.bytes());
  }
}

void Engine::OnLinkUp(const LinkKey& link) {
  ports_.states->OnLinkUp(link);
  Post(LinkUp{link.run, link.peer, ports_.links->LatencyUs(link)});
}

void Engine::OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) {
  ports_.states->OnLinkDown(link);
  Post(LinkDown{link.run, link.peer, reason, silent_ms});
}

absl::Status Engine::OnControlFrame(const LinkKey& link, const FrameHeader& header,
                                    std::span<const uint8_t> payload) {
  if (IsOfTransfer(header.type)) {
    // The core checks the frames of ops against the members of its epochs.
    const bool in_group = core_->HasPeer({link.run, header.group}, link.peer);
    return ports_.states->OnControlFrame(link, header, payload, in_group);
  }
  LH_ASSIGN_OR_RETURN(TakenFrame taken, TakeFrame(link, header, payload));
  std::visit([this](auto& frame) { Post(std::move(frame)); }, taken);
  return absl::OkStatus();
}

}  // namespace longhaul::peerd
