#include "tests/sim/hosts.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "base/check.h"
#include "peerd/engine/state_runner.h"
#include "peerd/state/state_hash.h"
#include "proto/control/convert.h"
#include "proto/wire/limits.h"
#include "tests/sim/store_back.h"

namespace longhaul::sim {
namespace {

using coordinator::CloseSession;
using coordinator::Persist;
using coordinator::ToPeer;

// After this many detect_ms a peer gives up a stream on which it hears nothing.
constexpr int64_t kStreamSilence = 2;
// After this many quarters of detect_ms the coordinator's end gives up a silent stream. That is a
// little before the core would give it up (proto/control/grpc/support.cc).
constexpr int64_t kKeepaliveQuarters = 15;
// A queue that is longer than this in a simulated run shows a bug: it grows without bounds.
constexpr size_t kQueueMax = 2000;
// The most turns without a pause that a loop may take in a row.
constexpr uint32_t kPumpsAtOnceMax = 1000;
// Messages of a crashed coordinator that may come again.
constexpr size_t kEchoesMax = 12;
// Writes that the store may lose.
constexpr size_t kBackupsMax = 6;

Node MakeNode(int index, std::string name) {
  Node node;
  node.index = index;
  node.name = std::move(name);
  return node;
}

const char* NameOf(const coordinator::EventRecord& event) { return event.text.c_str(); }

}  // namespace

// ------------------------------------------------------------------------------ the coordinator

CoordinatorHost::CoordinatorHost(const Context& context) : context_(context) {
  node_.index = 0;
  node_.name = "coordinator";
  Start();
}

void CoordinatorHost::Start() {
  aged_.clear();
  ++starts_;
  node_.alive = true;
  coordinator::CoreConfig config;
  config.incarnation = incarnation();
  config.detect_ms = context_.detect_ms;
  config.ring_interval_ms = context_.ring_interval_ms;
  config.sign_ops = context_.sign_ops;
  for (int i = 0; i < 4; ++i) {
    const uint64_t word = context_.world->Random();
    config.entropy.append(reinterpret_cast<const char*>(&word), sizeof word);
  }
  coordinator::Records records = durable_;
  if (context_.planted == Planted::kEpochReused) {
    for (auto& [key, group] : records.groups) {
      group.highest = group.committed;
      group.last_freeze = std::min(group.last_freeze, group.committed);
    }
  }
  if (context_.planted == Planted::kDrainForgotten) records.drains.clear();
  core_.emplace(config, std::move(records));
  context_.story->Tell(context_.world->now(), "coordinator  starts");
  Step(coordinator::TimePassed{});
}

void CoordinatorHost::Crash(bool resets) {
  if (!node_.alive) return;
  context_.checker->OnAllDisturbed();
  context_.story->Tell(context_.world->now(), "coordinator  dies");
  context_.world->Kill(&node_);
  core_.reset();
  armed_ = kNever;
  // The write in progress may have reached the store.
  if (persisting_ && context_.world->Chance(0.5)) {
    Apply(std::get<Persist>(out_.front().action));
  }
  persisting_ = false;
  out_.clear();
  for (const auto& [id, stream] : std::exchange(streams_, {})) {
    stream->at_coordinator = false;
    // Messages in flight may be lost with the connection, or arrive before its end.
    stream->cut = context_.world->Chance(0.5);
    if (resets && stream->peer->node()->alive) {
      context_.world->On(
          stream->peer->node(),
          std::max(stream->to_peer, context_.world->Arrival(node_, *stream->peer->node())),
          [stream = stream] { stream->peer->OnStreamEnd(stream); });
    }
  }
}

void CoordinatorHost::Apply(const Persist& persist) {
  backups_.push_back(durable_);
  if (backups_.size() > kBackupsMax) backups_.pop_front();
  for (const coordinator::Mutation& mutation : persist.mutations) {
    if (const auto* put = std::get_if<coordinator::PutGroup>(&mutation)) {
      const auto before = durable_.groups.find(put->record.group);
      if (before != durable_.groups.end()) context_.checker->OnStored(before->second, put->record);
    }
    coordinator::Apply(mutation, &durable_);
  }
}

void CoordinatorHost::GoBack() {
  if (node_.alive) return;
  std::erase_if(backups_, [this](const coordinator::Records& backup) {
    return !ForgetsPlansOnly(backup, durable_);
  });
  if (backups_.empty()) return;
  const size_t chosen = context_.world->Below(backups_.size());
  durable_ = backups_[chosen];
  backups_.clear();
  // Messages from the forgotten time ended with their streams.
  ++went_back_;
  sent_.clear();
  context_.story->Tell(context_.world->now(), "store  goes back");
  context_.checker->OnStoreWentBack(durable_);
}

std::string CoordinatorHost::WaitingFor() const {
  if (!core_) return "the coordinator is not there";
  std::string text;
  for (const coordinator::GroupView& group : core_->GetOverview().groups) {
    text += ToString(group.group) + " epoch " + ToString(group.committed) + ": " +
            (group.waiting_for.empty() ? "waits for nothing" : group.waiting_for) + "; ";
  }
  return text;
}

void CoordinatorHost::Step(const coordinator::Event& event) {
  const Tick now = context_.world->now();
  const auto run = [&](const coordinator::Event& e) {
    for (coordinator::Action& action : core_->Step(e, now)) {
      if (auto* notice = std::get_if<coordinator::Notice>(&action)) {
        context_.story->Tell(now, "coordinator  notes ", NameOf(notice->event));
        Checker::OnLogLine(notice->event.text);
        // Trainers that die are "death", too.
        if (absl::StrContains(notice->event.text, " and lost by ")) {
          CheckNotOfAge(notice->event.peer);
        }
        if (notice->event.text.starts_with("ring ordered anew")) context_.checker->OnRingOrdered();
      } else if (auto* persist = std::get_if<Persist>(&action)) {
        out_.push_back({std::move(*persist)});
      } else if (auto* to_peer = std::get_if<ToPeer>(&action)) {
        if (context_.planted == Planted::kSentBeforeDurable) {
          Carry(*to_peer);
        } else {
          out_.push_back({std::move(*to_peer)});
        }
      } else if (auto* order = std::get_if<coordinator::OrderRing>(&action)) {
        SolveRing(std::move(*order));
      } else {
        out_.push_back({std::get<CloseSession>(std::move(action))});
      }
    }
    core_->CheckInvariants();
    if (out_.size() > kQueueMax) Checker::Fail("the coordinator's queue of messages runs over");
  };
  if (core_->NextDeadline() <= now) run(coordinator::TimePassed{});
  run(event);
  if (++steps_ % 8 == 0) context_.story->Mix(core_->Digest());
  Arm();
  // Done later and not here, because sending may lead back into this function.
  context_.world->On(&node_, now, [this] { PumpOut(); });
}

// The production coordinator solves on another thread. So the answer comes at some later time,
// unless this process dies first.
void CoordinatorHost::SolveRing(coordinator::OrderRing order) {
  const int64_t takes = context_.world->Between(0, Millis(context_.detect_ms) / 4);
  context_.world->On(&node_, context_.world->now() + takes,
                     [this, order = std::move(order)] { Step(coordinator::Solve(order)); });
}

void CoordinatorHost::Arm() {
  const Tick due = core_->NextDeadline();
  if (due == kNever || due >= armed_) return;
  armed_ = due;
  context_.world->On(&node_, std::max(due, context_.world->now()), [this, due] {
    if (armed_ == due) armed_ = kNever;
    if (core_->NextDeadline() <= context_.world->now()) {
      Step(coordinator::TimePassed{});
      if (core_->NextDeadline() <= context_.world->now()) {
        Checker::Fail("the coordinator's deadline stays in the past");
      }
    } else {
      Arm();
    }
  });
}

void CoordinatorHost::PumpOut() {
  while (!out_.empty() && !persisting_) {
    if (std::holds_alternative<Persist>(out_.front().action)) {
      persisting_ = true;
      const int64_t takes = context_.world->Between(0, context_.persist_us);
      context_.world->On(&node_, context_.world->now() + takes, [this] {
        persisting_ = false;
        Apply(std::get<Persist>(out_.front().action));
        out_.pop_front();
        context_.trigger(Moment::kCommitDurable, PeerId());
        if (node_.alive) PumpOut();
      });
      return;
    }
    const Out out = std::move(out_.front());
    out_.pop_front();
    if (const auto* to_peer = std::get_if<ToPeer>(&out.action)) {
      Carry(*to_peer);
      if (!node_.alive) return;  // a fault hit in that moment
    } else {
      const auto it = streams_.find(std::get<CloseSession>(out.action).session);
      if (it == streams_.end()) continue;
      context_.story->Tell(context_.world->now(), "coordinator  closes the stream of ",
                           ToString(it->second->peer->id()), ": ",
                           std::get<CloseSession>(out.action).reason);
      Close(it->second);
    }
  }
}

// The coordinator knows of the end. The peer learns of it later.
void CoordinatorHost::Close(StreamPtr stream) {
  stream->at_coordinator = false;
  streams_.erase(stream->id);
  if (!stream->peer->node()->alive) return;
  context_.world->On(
      stream->peer->node(),
      std::max(stream->to_peer, context_.world->Arrival(node_, *stream->peer->node())),
      [stream] { stream->peer->OnStreamEnd(stream); });
}

void CoordinatorHost::Mutilate(PeerId peer, control::CoordinatorMessage* message, bool* drop) {
  if (auto* commit = std::get_if<control::CommitEpoch>(message)) {
    if (context_.planted == Planted::kCancelForgotten) {
      cancel_forgotten_.Forge(peer.value(), commit);
    }
    if (context_.planted == Planted::kCommitLost) *drop = context_.world->Chance(0.1);
    if (context_.planted == Planted::kFateFlipped && peer.value() % 2 == 0) {
      for (control::OpFate& fate : commit->fates) {
        fate.fate =
            fate.fate == control::Fate::kRedo ? control::Fate::kAbort : control::Fate::kRedo;
      }
    }
  }
  if (auto* prepare = std::get_if<control::PrepareEpoch>(message)) {
    if (context_.planted == Planted::kRingDiffers && peer.value() % 2 == 0) {
      std::reverse(prepare->members.begin(), prepare->members.end());
    }
  }
}

void CoordinatorHost::Carry(const ToPeer& action) {
  const auto it = streams_.find(action.session);
  if (it == streams_.end()) return;
  const StreamPtr stream = it->second;
  context_.checker->OnSend(stream->peer->id(), action.message, durable_);
  control::CoordinatorMessage message = action.message;
  bool drop = false;
  Mutilate(stream->peer->id(), &message, &drop);
  const std::string bytes = control::Serialize(message);
  const PeerId to = stream->peer->id();
  if (!std::holds_alternative<control::Welcome>(message) &&
      !std::holds_alternative<control::PendingCount>(message)) {
    context_.story->TellLater(context_.world->now(), bytes, [&] {
      return "coordinator -> " + ToString(to) + "  " + Describe(message);
    });
  }
  if (std::holds_alternative<control::PrepareEpoch>(message)) {
    context_.trigger(Moment::kPrepareSent, to);
  }
  if (std::holds_alternative<control::CommitEpoch>(message)) {
    context_.trigger(Moment::kCommitSent, to);
  }
  if (drop || stream->cut || !stream->peer->node()->alive || !node_.alive) return;
  sent_.emplace_back(stream->peer, bytes);
  if (sent_.size() > kEchoesMax) sent_.pop_front();
  stream->to_peer =
      std::max(stream->to_peer, context_.world->Arrival(node_, *stream->peer->node()));
  context_.world->On(stream->peer->node(), stream->to_peer, [stream, bytes] {
    if (!stream->cut) stream->peer->OnStreamBytes(stream, bytes);
  });
}

void CoordinatorHost::OnOpen(const StreamPtr& stream) {
  if (stream->cut) return;
  stream->at_coordinator = true;
  stream->heard_there = context_.world->now();
  streams_[stream->id] = stream;
  aged_.erase(stream->peer->id());
  Step(coordinator::SessionOpened{stream->id});
  KeepAlive(stream);
  PeerHost* const peer = stream->peer;
  if (!peer->node()->alive) return;
  stream->to_peer = std::max(stream->to_peer, context_.world->Arrival(node_, *peer->node()));
  context_.world->On(peer->node(), stream->to_peer, [stream] {
    if (!stream->cut) stream->peer->OnStreamUp(stream);
  });
}

void CoordinatorHost::KeepAlive(const StreamPtr& stream) {
  const int64_t patience = kKeepaliveQuarters * Millis(context_.detect_ms) / 4;
  context_.world->On(&node_, stream->heard_there + patience, [this, stream, patience] {
    if (!stream->at_coordinator) return;
    if (context_.world->now() - stream->heard_there < patience) return KeepAlive(stream);
    Close(stream);
    Step(coordinator::SessionClosed{stream->id});
  });
}

void CoordinatorHost::OnBytes(const StreamPtr& stream, const std::string& bytes) {
  if (!stream->at_coordinator || stream->cut) return;
  stream->heard_there = context_.world->now();
  const auto message = control::ParsePeerMessage(bytes);
  if (!message.ok()) {
    Checker::Fail("the coordinator refuses a message of " + ToString(stream->peer->id()) + ": " +
                  std::string(message.status().message()));
  }
  if (std::holds_alternative<control::Join>(*message)) {
    context_.trigger(Moment::kJoinArrived, stream->peer->id());
    if (!node_.alive) return;
  }
  Step(coordinator::FromPeer{stream->id, *message});
}

void CoordinatorHost::OnEnd(const StreamPtr& stream) {
  if (!std::exchange(stream->at_coordinator, false)) return;
  streams_.erase(stream->id);
  Step(coordinator::SessionClosed{stream->id});
}

void CoordinatorHost::Reset(const StreamPtr& stream) {
  stream->cut = true;
  context_.checker->OnDisturbed(stream->peer->id());
  World& world = *context_.world;
  if (node_.alive) {
    world.On(&node_, world.now() + world.Between(0, Millis(20)), [this, stream] { OnEnd(stream); });
  }
  if (stream->peer->node()->alive) {
    world.On(stream->peer->node(), world.now() + world.Between(0, Millis(20)),
             [stream] { stream->peer->OnStreamEnd(stream); });
  }
}

void CoordinatorHost::EndAged(const StreamPtr& stream) {
  if (!node_.alive || node_.frozen || !stream->at_coordinator) return;
  context_.story->Tell(context_.world->now(), "coordinator  ends the stream of ",
                       ToString(stream->peer->id()), ": it has reached its age");
  aged_[stream->peer->id()] = stream;
  Close(stream);
  Step(coordinator::SessionClosed{stream->id, context_.planted != Planted::kAgeIsDeath});
}

// Whatever others report of a peer, that its stream was ended because of its age says nothing.
void CoordinatorHost::CheckNotOfAge(PeerId peer) {
  const auto it = aged_.find(peer);
  if (it == aged_.end() || !it->second->peer->node()->alive) return;
  if (context_.world->now() - it->second->heard_there >= Millis(context_.detect_ms)) return;
  Checker::Fail(ToString(peer) + " is removed because the coordinator ended its stream");
}

void CoordinatorHost::Echo(int64_t within_us) {
  World& world = *context_.world;
  for (const auto& [peer, bytes] : std::exchange(sent_, {})) {
    if (!peer->node()->alive) continue;
    world.On(peer->node(), world.now() + world.Between(0, within_us),
             [this, peer = peer, bytes = bytes, life = went_back_] {
               if (life == went_back_) peer->OnEcho(bytes);
             });
  }
}

void CoordinatorHost::Evict(const GroupKey& group, MemberId member) {
  if (!node_.alive) return;
  context_.story->Tell(context_.world->now(), "operator  evicts ", ToString(member));
  context_.checker->OnMemberLost();
  context_.world->On(&node_, context_.world->now(), [this, group, member] {
    Step(coordinator::EvictMember{group, member, "the operator wants it out"});
  });
}

void CoordinatorHost::Drain(PeerId peer) {
  if (!node_.alive) return;
  context_.story->Tell(context_.world->now(), "operator  drains ", ToString(peer));
  context_.world->On(&node_, context_.world->now(), [this, peer] {
    Step(coordinator::DrainPeer{peer, "the operator drains it"});
  });
}

// ------------------------------------------------------------------------------ a peerd

// The production StateRunner, with the bugs that are planted in it.
class PeerHost::States final : public peerd::StateRunner {
 public:
  States(PeerHost* host, const Options& options)
      : StateRunner(
            options, &host->transport_, [host] { host->Wake(); },
            [host] { return host->context_.world->now(); }),
        h_(host) {}

  void Tell(peerd::Event event) { events_.push_back(std::move(event)); }

  void WhenUnread(peerd::LocalId local, std::function<void()> act) override {
    if (h_->context_.planted == Planted::kReadersForgotten) return act();
    StateRunner::WhenUnread(local, std::move(act));
  }
  std::vector<peerd::Event> PopEvents() override {
    std::vector<peerd::Event> events = std::exchange(events_, {});
    for (peerd::Event& event : StateRunner::PopEvents()) events.push_back(std::move(event));
    return events;
  }

 private:
  PeerHost* const h_;
  std::vector<peerd::Event> events_;
};

// What a runner hears of its segments may give the engine something to do.
class PeerHost::Segments final : public peerd::SegmentListener {
 public:
  Segments(PeerHost* host, peerd::SegmentListener* runner) : host_(host), runner_(runner) {}

  absl::StatusOr<uint8_t*> OnDataHeader(const peerd::LinkKey& link,
                                        const FrameHeader& header) override {
    return runner_->OnDataHeader(link, header);
  }
  absl::Status OnDataReceived(const peerd::LinkKey& link, const FrameHeader& header) override {
    const absl::Status status = runner_->OnDataReceived(link, header);
    host_->Wake();
    if (header.type == FrameType::kChunkData) {
      host_->context_.trigger(Moment::kChunkArrived, host_->id_);
    }
    return status;
  }
  void OnDataAbandoned(const peerd::LinkKey& link, const FrameHeader& header) override {
    runner_->OnDataAbandoned(link, header);
  }
  uint64_t OnSegmentRepeat(uint64_t owner) override { return runner_->OnSegmentRepeat(owner); }
  void OnSegmentSent(uint64_t cookie) override {
    runner_->OnSegmentSent(cookie);
    if (host_->node_.alive) host_->Wake();
  }
  void OnReceivesDetached(uint64_t cookie) override {
    runner_->OnReceivesDetached(cookie);
    host_->Wake();
  }

 private:
  PeerHost* const host_;
  peerd::SegmentListener* const runner_;
};

PeerHost::PeerHost(const Context& context, CoordinatorHost* coordinator, int index, PeerId id)
    : context_(context),
      coordinator_(coordinator),
      node_(MakeNode(index, ToString(id))),
      id_(id),
      identity_(Identity::ForTest(id.value())),
      transport_(context.world, &node_, id, context.transport, context.switchboard, this),
      sent_(id) {
  transport_.WatchSegments([this](const peerd::LinkKey& link, const FrameHeader& header,
                                  const uint8_t* data) { NoteSegment(link, header, data); });
  peerd::OpRunner::Options runner;
  runner.self = id;
  runner.grain_bytes = 512;
  runner.cached_bytes_max = 6000;  // smaller than some ops' tensors, larger than others
  runner.turn_bytes_max = 2000;
  runner_ = std::make_unique<peerd::OpRunner>(&transport_, runner);
  engine_ = std::make_unique<peerd::Engine>();
  peerd::StateRunner::Options states;
  states.self = id;
  states.hash_threads = 0;
  states.detect_ms = context.detect_ms;
  states.state_rate = context.state_rate;
  states.kept.bytes_max = context.keep_bytes;
  states.kept.keep_us = 10 * Millis(context.detect_ms);
  states.kept.memory = [](uint64_t bytes) { return std::make_shared<uint8_t[]>(bytes); };
  states_ = std::make_unique<States>(this, states);
  op_segments_ = std::make_unique<Segments>(this, runner_->segments());
  state_segments_ = std::make_unique<Segments>(this, states_->segments());
  transport_.SetSegmentListeners({.ops = op_segments_.get(), .states = state_segments_.get()});
  peerd::EngineOptions options;
  options.core.peer = id;
  options.core.endpoints = {"host" + std::to_string(index) + ":29700"};
  options.core.lanes = static_cast<uint32_t>(context.transport.lanes);
  options.core.version = "sim" + context.foreign;
  options.core.host = "host" + std::to_string(index) + context.foreign;
  options.core.detect_ms = context.detect_ms;
  peerd::EnginePorts ports;
  ports.trainers = this;
  ports.links = &transport_;
  ports.ops = runner_.get();
  ports.states = states_.get();
  ports.to_coordinator = [this](const control::PeerMessage& m) { SendToCoordinator(m); };
  ports.refuse_coordinator = [this](const std::string&) {
    if (const StreamPtr stream = stream_) OnStreamEnd(stream);
  };
  ports.clock = [this] { return context_.world->now(); };
  ports.sign = [this](const std::string& text) { return identity_.Sign(text); };
  ports.observer = this;
  engine_->Start(std::move(options), std::move(ports));
  context_.story->Tell(context_.world->now(), node_.name, "  starts");
  Connect();
  Beat();
}

PeerHost::~PeerHost() { Dispose(); }

void PeerHost::Dispose() {
  if (!runner_) return;
  if (node_.alive) context_.world->Kill(&node_);
  transport_.Die(/*resets=*/false);
  // Nothing refers to the process's memory any more.
  transport_.GiveBackSegments();
  runner_.reset();
  engine_.reset();
  states_.reset();
}

void PeerHost::Crash(bool resets) {
  if (!node_.alive) return;
  context_.checker->OnDisturbed(id_);
  context_.story->Tell(context_.world->now(), node_.name, "  dies", resets ? "" : ", silently");
  context_.world->Kill(&node_);
  transport_.Die(resets);
  if (const StreamPtr stream = std::exchange(stream_, nullptr)) {
    stream->at_peer = false;
    if (resets && coordinator_->node()->alive) {
      context_.world->On(
          coordinator_->node(),
          std::max(stream->to_coordinator, context_.world->Arrival(node_, *coordinator_->node())),
          [c = coordinator_, stream] { c->OnEnd(stream); });
    }
  }
  // During a turn the engine is still in use: it is freed when the turn ends.
  if (!pumping_) Bury();
}

void PeerHost::Bury() {
  Dispose();
  for (auto& [id, local] : locals_) {
    if (TrainerSide* const trainer = std::exchange(local.trainer, nullptr)) trainer->OnPeerGone();
  }
}

void PeerHost::Freeze() {
  if (!node_.alive || node_.frozen) return;
  context_.checker->OnDisturbed(id_);
  context_.story->Tell(context_.world->now(), node_.name, "  freezes");
  context_.world->Freeze(&node_);
}

void PeerHost::Thaw() {
  if (!node_.alive || !node_.frozen) return;
  context_.story->Tell(context_.world->now(), node_.name, "  thaws");
  // After a freeze of this process, silence of other peers proves nothing.
  transport_.ForgiveSilence();
  if (stream_) stream_->heard = context_.world->now();
  context_.world->Thaw(&node_);
}

void PeerHost::Drain() {
  if (!node_.alive) return;
  context_.story->Tell(context_.world->now(), node_.name, "  is told to stop");
  context_.world->On(&node_, context_.world->now(), [this] {
    engine_->OnDrain(context_.world->now() + 4 * Millis(context_.detect_ms));
    Wake();
  });
}

// ---- the loop

void PeerHost::Wake() {
  if (pumping_ || std::exchange(pump_due_, true)) return;
  context_.world->On(&node_, context_.world->now(), [this] { Pump(); });
}

void PeerHost::Pump() {
  pump_due_ = false;
  pumping_ = true;
  const Tick now = context_.world->now();
  life_ = node_.life;
  engine_->Turn();
  AfterAction();
  pumping_ = false;
  if (node_.life != life_) {
    Bury();
    return;
  }
  if (++pumps_ % 16 == 0) context_.story->Mix(engine_->Digest());
  if (core().NextDeadline() <= now) {
    Checker::Fail(node_.name + ": its deadline stays in the past");
  }
  Hash();
  Arm();
}

void PeerHost::Arm() {
  const Tick now = context_.world->now();
  const Tick due = engine_->NextDeadline();
  const bool at_once = due <= now;
  pumps_at_once_ = at_once ? pumps_at_once_ + 1 : 0;
  if (pumps_at_once_ > kPumpsAtOnceMax) Checker::Fail(node_.name + ": its loop spins");
  if (at_once && !std::exchange(pump_due_, true)) {
    context_.world->On(&node_, now + 1, [this] { Pump(); });
  }
  if (at_once || due == kNever || due >= armed_) return;
  armed_ = due;
  context_.world->On(&node_, due, [this, due] {
    if (armed_ == due) armed_ = kNever;
    Pump();
  });
}

// Hashes one chunk after the other, each at a time when a thread might have finished it.
void PeerHost::Hash() {
  if (!states_->hashing() || std::exchange(hash_due_, true)) return;
  World& world = *context_.world;
  world.On(&node_, world.now() + world.Between(0, context_.hash_us), [this] {
    hash_due_ = false;
    // The next turn delivers what has ended.
    if (!states_->HashHere()) return Wake();
    Hash();
  });
}

// ---- events and actions of the engine

bool PeerHost::OnEvent(peerd::Event* event) {
  if (!AfterAction()) return false;
  NoteHeard(*event);
  if (const auto* stopped = std::get_if<peerd::AttemptStopped>(event)) SpoilSources(*stopped);
  if (const auto* ended = std::get_if<peerd::TransferEnded>(event)) OnTransferEnded(*ended);
  if (const auto* complete = std::get_if<peerd::AttemptComplete>(event)) {
    running_[{complete->group, complete->ordinal}].complete = true;
    context_.trigger(Moment::kAttemptComplete, id_);
  }
  if (const auto* finished = std::get_if<peerd::AttemptFinished>(event);
      finished != nullptr && context_.planted == Planted::kFinishLate &&
      !told_.insert({finished->group, finished->ordinal}).second) {
    *event = peerd::TimePassed{};
  }
  const auto refresh = [this](auto* frame) {
    if (frame == nullptr || context_.planted != Planted::kStaleFrames) return;
    frame->attempt = std::max(frame->attempt, attempts_[frame->group]);
  };
  refresh(std::get_if<peerd::PeerReady>(event));
  refresh(std::get_if<peerd::PeerDone>(event));
  if (context_.planted == Planted::kLinkDownLost &&
      std::holds_alternative<peerd::LinkDown>(*event) && (!stream_ || !stream_->connected)) {
    *event = peerd::TimePassed{};
  }
  return node_.life == life_;
}

void PeerHost::OnActions(std::vector<peerd::Action>* actions) {
  core().CheckInvariants();
  CheckBounds();
  const auto move_to = [actions](auto what, std::vector<peerd::Action>* to) {
    std::erase_if(*actions, [&](peerd::Action& action) {
      if (!what(action)) return false;
      to->push_back(std::move(action));
      return true;
    });
  };
  if (context_.planted == Planted::kFinishLate) {
    // Results are put in place milliseconds late, and the core is told at once that they are there.
    if (context_.world->now() > late_until_) {
      std::vector<peerd::Action> due = std::exchange(late_, {});
      actions->insert(actions->begin(), due.begin(), due.end());
      late_until_ = context_.world->now() + Millis(3);
      return;
    }
    const size_t known = late_.size();
    move_to(
        [](const peerd::Action& action) {
          const auto* finish = std::get_if<peerd::FinishAttempt>(&action);
          return finish != nullptr && finish->commit;
        },
        &late_);
    for (size_t i = known; i < late_.size(); ++i) {
      const auto& finish = std::get<peerd::FinishAttempt>(late_[i]);
      states_->Tell(peerd::AttemptFinished{finish.group, finish.ordinal});
    }
  }
  if (context_.planted == Planted::kGoneFirst) {
    std::vector<peerd::Action> first;
    move_to([](const peerd::Action& a) { return std::holds_alternative<peerd::MemberGone>(a); },
            &first);
    actions->insert(actions->begin(), first.begin(), first.end());
  }
  if (context_.planted == Planted::kSeedOfAttempt) {
    for (peerd::Action& action : *actions) {
      if (auto* const start = std::get_if<peerd::StartAttempt>(&action)) {
        start->seed += start->attempt.value();
      }
    }
  }
  if (context_.planted == Planted::kIndexForgotten) {
    for (peerd::Action& action : *actions) {
      auto* const ready = std::get_if<peerd::SendReady>(&action);
      if (ready != nullptr && ready->sign) ready->sign = 0;
    }
  }
  if (context_.planted == Planted::kResultForgotten) {
    for (peerd::Action& action : *actions) {
      auto* const ready = std::get_if<peerd::SendReady>(&action);
      if (ready == nullptr || !ready->result) continue;
      ready->result->bytes.assign(ready->result->bytes.size(), '\0');
    }
  }
  if (lie_) lie_(actions);
}

bool PeerHost::AfterAction() {
  if (node_.life == life_ && moment_) context_.trigger(*std::exchange(moment_, std::nullopt), id_);
  moment_.reset();
  return node_.life == life_;
}

bool PeerHost::OnAction(const peerd::Action& action) {
  if (!AfterAction()) return false;
  Note(action);
  return true;
}

// Tells an action to the story and the checker.
struct PeerHost::Noter {
  PeerHost* h;
  Story& story;
  Tick now;

  void operator()(const peerd::SendReady& a) {
    for (const peerd::PostRef& post : a.posts) {
      h->context_.checker->OnAnnounced(h->id_, a.group, a.ordinal, h->posted_ops_.at(post));
    }
    if (a.refusal) h->context_.checker->OnRefusalAnnounced(h->id_, a.group, a.ordinal);
    story.TellLater(now, "READY", [&] {
      return h->node_.name + " -> " + ToString(a.to) + "  READY ordinal=" + ToString(a.ordinal) +
             " attempt=" + ToString(a.attempt) + " tag=" + std::to_string(a.tag) +
             " boundary=" + ToString(a.boundary) + " desc=\"" + ToString(a.desc) + "\"" +
             (a.refusal ? " refused to " + ToString(a.refusal->member) : "") +
             (a.result ? " with the result of epoch=" + ToString(a.result->epoch) : "");
    });
  }
  void operator()(const peerd::SendDone& a) {
    story.TellLater(now, "DONE", [&] {
      return h->node_.name + " -> " + ToString(a.to) + "  DONE to=" + ToString(a.ordinal) +
             " attempt=" + ToString(a.attempt) + (a.refused ? " refused" : "");
    });
    h->moment_ = Moment::kDoneSent;
  }
  void operator()(const peerd::StartAttempt& a) {
    story.Tell(now, h->node_.name, "  starts ", ToString(a.ordinal),
               " attempt=", ToString(a.attempt), " peers=", a.ring.size(), " ", Name(a.algorithm));
    for (const peerd::PostRef& post : a.posts) {
      h->context_.checker->OnAnnounced(h->id_, a.group, a.ordinal, h->posted_ops_.at(post));
    }
    h->context_.checker->OnShares(a.shares);
    Running& running = h->running_[{a.group, a.ordinal}];
    running.attempt = a.attempt;
    running.complete = false;
    running.posts = a.posts;
    h->sent_.OnStart(a);
    h->moment_ = Moment::kAttemptStarted;
  }
  void operator()(const peerd::CreditAttempt& a) {
    const auto it = h->running_.find({a.group, a.ordinal});
    if (it != h->running_.end()) it->second.theirs[a.peer] = a.theirs;
  }
  void operator()(const peerd::StopAttempt& a) {
    story.Tell(now, h->node_.name, "  stops ", ToString(a.ordinal),
               " attempt=", ToString(a.attempt));
    if (h->context_.planted == Planted::kDoneWhileFrozen) h->ForgeDone(a.group);
  }
  void operator()(const peerd::FinishAttempt& a) {
    story.Tell(now, h->node_.name, "  finishes ", ToString(a.ordinal),
               a.commit ? " commit" : " without result");
    h->running_.erase({a.group, a.ordinal});
    h->sent_.OnEnd(a.group, a.ordinal);
  }
  // Checked here, because there may be no link that could break.
  void operator()(const peerd::BreakLink& a) {
    if (!h->context_.checker->liars()) {
      Checker::Fail(h->node_.name + " takes no more of " + ToString(a.peer) + ": " + a.reason);
    }
  }
  void operator()(const peerd::MemberGone& a) {
    h->locals_.at(a.local).out = true;
    if (h->serving_.contains(a.local) || h->fetching_.contains(a.local)) {
      Checker::Fail("a member is out, and its state is still served or fetched");
    }
  }

  // ---- shared state
  void operator()(const peerd::ServeState& a) {
    const peerd::StateSync& brought = h->brought_.at(a.local);
    // A state that may change is not compared: the trainer writes to it.
    if (!a.may_change && RootOfBytes(*brought.state) != a.state) {
      Checker::Fail(ToString(a.member) + " serves a state that it has not got");
    }
    const auto elected = h->elected_.find(a.member);
    const bool own = elected == h->elected_.end() || elected->second.state != a.state;
    if (brought.strategy == control::SyncStrategy::kReceive && own) {
      Checker::Fail(ToString(a.member) + " only receives, and serves a state of its own");
    }
    h->serving_[a.local] = a.may_change;
  }
  void operator()(const peerd::EndServe& a) {
    if (h->serving_.erase(a.local) == 0) Checker::Fail("nothing is served that ends");
  }
  void operator()(const peerd::StartTransfer& a) {
    const peerd::StateSync& brought = h->brought_.at(a.local);
    if (h->fetching_.contains(a.local)) Checker::Fail("two transfers into one state");
    if (h->serving_.contains(a.local)) Checker::Fail("a state is fetched while it is served");
    if (a.manifest != peerd::HashManifest(brought.state->manifest)) {
      Checker::Fail("a transfer of another manifest");
    }
    if (brought.strategy == control::SyncStrategy::kSend) {
      Checker::Fail("a member that only sends is told to fetch");
    }
    story.Tell(now, h->node_.name, "  fetches for local ", a.local.value(),
               " revision=", a.revision, a.background ? " background" : "");
    NoteSources(a.local, a.sources);
    h->moment_ = Moment::kTransferStarted;
  }
  void operator()(const peerd::ChangeSources& a) {
    if (h->fetching_.contains(a.local)) NoteSources(a.local, a.sources);
  }
  void NoteSources(peerd::LocalId local, const std::vector<control::SyncSource>& sources) {
    auto& known = h->fetching_[local];
    for (const control::SyncSource& source : sources) known[source.member] = source.peer;
  }
  void operator()(const peerd::SyncDone& a) {
    if (a.background) {
      return story.Tell(now, h->node_.name, "  holds the state of local ", a.local.value());
    }
    story.Tell(now, h->node_.name, "  sync of local ", a.local.value(),
               " ends: ", Describe(a.outcome), " revision=", a.revision);
    CheckOver(a.local);
  }
  void operator()(const peerd::TakeDone& a) {
    story.Tell(now, h->node_.name, "  take of local ", a.local.value(),
               " ends: ", Describe(a.outcome), " revision=", a.revision);
    if (a.outcome.ok()) CheckOver(a.local);
  }
  void CheckOver(peerd::LocalId local) {
    const auto serving = h->serving_.find(local);
    const bool served = serving != h->serving_.end() && !serving->second;
    if (served || h->fetching_.contains(local)) {
      Checker::Fail("a sync has ended, and the state is still served or fetched");
    }
  }

  void operator()(const peerd::Drained&) { story.Tell(now, h->node_.name, "  is drained"); }
  void operator()(const peerd::LogLine& a) {
    story.Tell(now, h->node_.name, "  logs ", a.text);
    Checker::OnLogLine(a.text);
  }
  template <class Other>
  void operator()(const Other&) {}
};

void PeerHost::Note(const peerd::Action& action) {
  std::visit(Noter{this, *context_.story, context_.world->now()}, action);
}

void PeerHost::CheckBounds() const {
  if (engine_->queued() > kQueueMax) Checker::Fail(node_.name + ": its queue of events runs over");
  size_t posts = 0;
  for (const auto& [local, state] : locals_) posts += state.gone ? 0 : LH_OPS_OPEN_MAX;
  if (core().GetStats().ops_open > posts) Checker::Fail(node_.name + " keeps ops of nobody");
  transport_.CheckBounds();
}

void PeerHost::Twice(const char* what, peerd::LocalId local) {
  Checker::Fail(node_.name + ": " + what + " for local " + std::to_string(local.value()) +
                ", which did not ask or was answered before");
}

void PeerHost::NoteHeard(const peerd::Event& event) {
  if (const auto* join = std::get_if<peerd::LocalJoin>(&event)) heard_[join->local].join = true;
  if (const auto* step = std::get_if<peerd::LocalStep>(&event)) {
    heard_[step->local].step = true;
    heard_[step->local].sync = step->sync.has_value();
  }
  if (const auto* sync = std::get_if<peerd::LocalSync>(&event)) heard_[sync->local].sync = true;
  if (const auto* take = std::get_if<peerd::LocalTake>(&event)) heard_[take->local].take = true;
  if (const auto* leave = std::get_if<peerd::LocalLeave>(&event)) {
    heard_[leave->local].leave = true;
  }
  if (const auto* post = std::get_if<peerd::LocalPost>(&event)) heard_posts_.insert(post->post);
}

void PeerHost::CheckAnswered(peerd::LocalId local, bool heard) const {
  const auto& requests = heard ? heard_ : open_;
  const auto it = requests.find(local);
  bool open = it != requests.end() && (it->second.join || it->second.step || it->second.sync ||
                                       it->second.take || it->second.leave);
  for (const peerd::PostRef& post : heard ? heard_posts_ : open_posts_) {
    open = open || post.local == local;
  }
  if (!open) return;
  Checker::Fail(node_.name + ": a request of local " + std::to_string(local.value()) +
                " is not answered, and the member is gone");
}

void PeerHost::CheckAllAnswered() const {
  if (!node_.alive) return;
  // A dead trainer's request may stay without an answer if the core never got it.
  for (const auto& [local, state] : locals_) CheckAnswered(local, /*heard=*/state.died);
  // No peer here breaks the protocol.
  if (core().GetStats().frames_refused != 0) Checker::Fail(node_.name + " has refused a frame");
}

// ---- answers

void PeerHost::JoinDone(peerd::LocalId local, const Outcome& outcome, const peerd::World& world,
                        bool newcomer) {
  if (!std::exchange(open_[local].join, false)) Twice("JoinDone", local);
  heard_[local].join = false;
  if (outcome.ok()) {
    CheckWorld(local, world);
    context_.checker->OnAdmitted(locals_.at(local).group.group, world, newcomer);
  }
  ToTrainer(local, [=](TrainerSide* t) { t->OnJoinDone(outcome, world); });
}

void PeerHost::StepDone(peerd::LocalId local, const Outcome& outcome, const peerd::World& world) {
  if (!std::exchange(open_[local].step, false)) Twice("StepDone", local);
  heard_[local].step = false;
  if (open_[local].sync) Checker::Fail("a step has returned before its sync");
  if (outcome.ok()) CheckWorld(local, world);
  peerd::World told = world;
  if (context_.planted == Planted::kWorldOfNow) told.step = {world.epoch, world.rank, world.size};
  ToTrainer(local, [=](TrainerSide* t) { t->OnStepDone(outcome, told); });
}

void PeerHost::SyncDone(peerd::LocalId local, const Outcome& outcome,
                        const peerd::StateSyncInfo& info) {
  if (!std::exchange(open_[local].sync, false)) Twice("SyncDone", local);
  heard_[local].sync = false;
  if (!info.background) CheckUnused(local);
  ToTrainer(local, [outcome, info](TrainerSide* t) { t->OnSyncDone(outcome, info); });
}

void PeerHost::TakeDone(peerd::LocalId local, const Outcome& outcome,
                        const peerd::StateSyncInfo& info) {
  if (!std::exchange(open_[local].take, false)) Twice("TakeDone", local);
  heard_[local].take = false;
  if (outcome.ok()) CheckUnused(local);
  ToTrainer(local, [outcome, info](TrainerSide* t) { t->OnTakeDone(outcome, info); });
}

void PeerHost::LeaveDone(peerd::LocalId local, const Outcome& outcome) {
  if (!std::exchange(open_[local].leave, false)) Twice("LeaveDone", local);
  heard_[local].leave = false;
  ToTrainer(local, [=](TrainerSide* t) { t->OnLeaveDone(outcome); });
}

void PeerHost::PostDone(const peerd::PostRef& post, const Outcome& outcome,
                        const peerd::OpInfo& info, const peerd::OpTraffic&) {
  if (open_posts_.erase(post) == 0) Twice("PostDone", post.local);
  heard_posts_.erase(post);
  context_.story->TellLater(context_.world->now(), outcome.text, [&] {
    return node_.name + "  " + ToString(posted_ops_.at(post).name) + " ends: " + Describe(outcome) +
           (outcome.ok() ? " members=" + std::to_string(info.members.size()) +
                               " retries=" + std::to_string(info.retries)
                         : "");
  });
  const auto tell = [=](TrainerSide* t) { t->OnPostDone(post.call, outcome, info); };
  ToTrainer(post.local, tell);
  if (context_.planted == Planted::kAnswerTwice && context_.world->Chance(0.02)) {
    ToTrainer(post.local, tell);
  }
}

void PeerHost::WorldChanged(peerd::LocalId local, const peerd::World& world) {
  if (locals_.at(local).gone) Twice("WorldChanged", local);
  CheckWorld(local, world);
  ToTrainer(local, [=](TrainerSide* t) { t->OnWorldChanged(world); });
}

void PeerHost::MemberGone(peerd::LocalId local, const Outcome& outcome) {
  if (std::exchange(locals_.at(local).gone, true)) Twice("MemberGone", local);
  // A request that the core has not got yet is answered by MemberGone.
  if (!locals_.at(local).asked_late) CheckAnswered(local, /*heard=*/true);
  if (brought_.contains(local)) CheckUnused(local);
  // Requests that came in the meantime are answered, but the trainer does not listen any more.
  ToTrainer(local, [this, local, outcome](TrainerSide* t) {
    locals_.at(local).trainer = nullptr;
    t->OnMemberGone(outcome);
  });
}

// ---- states

// Fails if anything in flight reads or writes the tensors that the trainer has got back.
void PeerHost::CheckUnused(peerd::LocalId local) const {
  const peerd::LocalState& state = *brought_.at(local).state;
  for (size_t i = 0; i < state.manifest.size(); ++i) {
    const uint64_t bytes = state.manifest[i].bytes;
    if (!transport_.Uses(state.places[i], bytes) && !transport_.Uses(state.inbox[i], bytes))
      continue;
    Checker::Fail(node_.name + ": a trainer is answered while the network still uses its state");
  }
}

void PeerHost::OnTransferEnded(const peerd::TransferEnded& ended) {
  context_.story->Tell(context_.world->now(), node_.name, "  transfer of local ",
                       ended.local.value(), " ends: ", Describe(ended.outcome),
                       " bytes=", ended.bytes);
  const auto from = fetching_.find(ended.local);
  if (from == fetching_.end()) Checker::Fail("a transfer has ended twice");
  for (const MemberId member : ended.corrupt) {
    if (transport_.Flipped(from->second.at(member))) continue;
    Checker::Fail(ToString(member) + " is said to have sent wrong bits, and none was flipped");
  }
  fetching_.erase(from);
  if (context_.planted != Planted::kChunksUnchecked || ended.bytes == 0) return;
  // As if the transfer had not noticed a flipped bit.
  const peerd::LocalState& state = *brought_.at(ended.local).state;
  for (size_t i = 0; i < state.manifest.size(); ++i) {
    if (state.InInbox(i, 0) && context_.world->Chance(context_.transport.flips))
      state.inbox[i][0] ^= 1;
  }
}

void PeerHost::CheckWorld(peerd::LocalId local, const peerd::World& world) {
  const GroupKey& group = locals_.at(local).group;
  context_.checker->OnWorld({id_, local}, group, world);
  for (const auto as_of : {peerd::PeerCore::AsOf::kNow, peerd::PeerCore::AsOf::kStep}) {
    context_.checker->OnMembers({id_, local}, group, core().GetMembers(local, as_of));
  }
}

// ---- trainers

void PeerHost::FromTrainer(std::function<void()> what) {
  World& world = *context_.world;
  ipc_in_ = std::max(ipc_in_, world.now() + world.Between(5, 100));
  world.On(&node_, ipc_in_, std::move(what));
}

PeerHost::Answers& PeerHost::Asks(peerd::LocalId local) {
  if (locals_.at(local).out) locals_.at(local).asked_late = true;
  return open_[local];
}

void PeerHost::ToTrainer(peerd::LocalId local, std::function<void(TrainerSide*)> what) {
  const LocalState& state = locals_.at(local);
  if (state.trainer == nullptr) return;
  World& world = *context_.world;
  ipc_out_ = std::max(ipc_out_, world.now() + world.Between(5, 100));
  world.At(ipc_out_, [this, local, what = std::move(what)] {
    // A trainer that died in the meantime hears nothing.
    if (TrainerSide* const trainer = locals_.at(local).trainer) what(trainer);
  });
}

peerd::LocalId PeerHost::Join(TrainerSide* trainer, const GroupKey& group, const std::string& name,
                              uint32_t slot, const control::JoinWish& terms) {
  const peerd::LocalId local(next_local_++);
  locals_[local] = {trainer, group, false};
  context_.checker->OnLocalJoin({id_, local}, group.group, slot, terms);
  control::JoinWish asked = terms;
  if (context_.planted == Planted::kTermsIgnored) {
    asked = {};
    if (terms.step_deadline_ms == 0) asked.step_deadline_ms = context_.detect_ms;
  }
  asked.named = asked.members > 0;
  FromTrainer([this, local, group, name, asked] {
    Asks(local).join = true;
    engine_->OnJoin({local, group, name, asked});
    Wake();
  });
  return local;
}

void PeerHost::Step(peerd::LocalId local, std::optional<peerd::StateSync> sync) {
  FromTrainer([this, local, sync = std::move(sync)] {
    Asks(local).step = true;
    if (sync) Asks(local).sync = true;
    if (sync) brought_[local] = *sync;
    engine_->OnStep(local, sync ? &*sync : nullptr);
    Wake();
  });
}

void PeerHost::Sync(peerd::LocalId local, const peerd::StateSync& sync) {
  FromTrainer([this, local, sync] {
    Asks(local).sync = true;
    brought_[local] = sync;
    engine_->OnSync(local, sync);
    Wake();
  });
}

void PeerHost::Prepare(peerd::LocalId local, const std::shared_ptr<peerd::LocalState>& state,
                       std::function<void()> done) {
  FromTrainer([this, local, state, done = std::move(done)] {
    engine_->OnPrepare(state,
                       [this, local, done] { ToTrainer(local, [done](TrainerSide*) { done(); }); });
    Wake();
  });
}

void PeerHost::TakeState(peerd::LocalId local, int64_t wait_us) {
  FromTrainer([this, local, wait_us] {
    Asks(local).take = true;
    engine_->OnTake(local, static_cast<uint32_t>(wait_us / 1000));
    Wake();
  });
}

void PeerHost::Leave(peerd::LocalId local) {
  FromTrainer([this, local] {
    Asks(local).leave = true;
    engine_->OnLeave(local);
    Wake();
  });
}

void PeerHost::Post(const peerd::LocalPost& asked, peerd::PostBuffers buffers, const OpPost& op) {
  peerd::LocalPost post = asked;
  if (context_.planted == Planted::kMinWorldIgnored) post.desc.min_world = 0;
  posted_ops_[post.post] = op;
  sources_[post.post] = buffers.in_place() ? buffers.targets.front() : nullptr;
  errors_[post.post] = buffers.errors.empty() ? nullptr : buffers.errors.front();
  FromTrainer([this, post, buffers = std::move(buffers)] {
    Asks(post.post.local);
    open_posts_.insert(post.post);
    engine_->OnPost(post, buffers);
    Wake();
  });
}

void PeerHost::Cancel(const peerd::PostRef& post) {
  FromTrainer([this, post] {
    if (!open_posts_.contains(post)) return;
    engine_->OnCancel(post);
    Wake();
  });
}

void PeerHost::Refuse(const peerd::LocalPost& post) {
  if (context_.planted == Planted::kRefusalUntold) return;
  FromTrainer([this, post] {
    engine_->OnRefusal({post, Checker::kReason});
    Wake();
  });
}

void PeerHost::TrainerDied(peerd::LocalId local) {
  context_.checker->OnMemberLost();
  locals_.at(local).trainer = nullptr;
  locals_.at(local).died = true;
  FromTrainer([this, local] {
    engine_->OnGone(local, "its connection broke");
    Wake();
  });
}

// ---- the stream

void PeerHost::Connect() {
  World& world = *context_.world;
  world.On(&node_, world.now() + world.Between(Millis(1), Millis(40)), [this, &world] {
    if (stream_ || drained()) return;
    auto stream = std::make_shared<Stream>();
    stream->id = coordinator::SessionId(world.NewNumber());
    stream->peer = this;
    stream->heard = world.now();
    stream_ = stream;
    Node* const node = coordinator_->node();
    if (!node->alive) {
      world.On(&node_, world.now() + Millis(20), [this, stream] { OnStreamEnd(stream); });
      return;
    }
    stream->to_coordinator = world.Arrival(node_, *node);
    world.On(node, stream->to_coordinator, [c = coordinator_, stream] { c->OnOpen(stream); });
    // The coordinator has not answered in time.
    world.On(&node_, world.now() + kStreamSilence * Millis(context_.detect_ms), [this, stream] {
      if (!stream->connected) OnStreamEnd(stream);
    });
  });
}

void PeerHost::OnStreamUp(const StreamPtr& stream) {
  if (stream_ != stream || !stream->at_peer) return;
  stream->connected = true;
  stream->heard = context_.world->now();
  engine_->OnStreamUp();
  Wake();
}

void PeerHost::OnStreamBytes(const StreamPtr& stream, const std::string& bytes) {
  if (stream_ != stream || !stream->connected) return;
  stream->heard = context_.world->now();
  const auto message = control::ParseCoordinatorMessage(bytes);
  if (!message.ok()) {
    Checker::Fail(node_.name + " refuses a message of the coordinator: " +
                  std::string(message.status().message()));
  }
  Hear(*message);
}

// A late message of a crashed coordinator. In production its stream has ended, so the driver drops
// the message. This test gives it to the core, which must ignore it as well.
void PeerHost::OnEcho(const std::string& bytes) {
  if (!stream_ || !stream_->connected) return;
  const auto message = control::ParseCoordinatorMessage(bytes);
  LH_CHECK(message.ok()) << message.status().ToString();
  context_.story->TellLater(context_.world->now(), bytes, [&] {
    return node_.name + "  hears of a coordinator of old: " + Describe(*message);
  });
  Hear(*message);
}

void PeerHost::Hear(const control::CoordinatorMessage& message) {
  context_.checker->OnArrival(id_, message);
  if (const auto* result = std::get_if<control::SyncResult>(&message);
      result != nullptr && result->action != control::SyncAction::kEnd) {
    control::SyncResult& last = elected_[result->member];
    if (result->number >= last.number) last = *result;
  }
  const uint64_t life = node_.life;
  if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
    context_.trigger(Moment::kPrepareArrived, id_);
    attempts_[prepare->group] = std::max(attempts_[prepare->group], prepare->last_freeze);
    prepared_[prepare->group] = *prepare;
  }
  if (std::holds_alternative<control::CommitEpoch>(message)) {
    context_.trigger(Moment::kCommitArrived, id_);
  }
  if (node_.life != life) return;
  engine_->OnMessage(message);
  Wake();
}

void PeerHost::OnStreamEnd(const StreamPtr& stream) {
  if (stream_ != stream) return;
  stream_.reset();
  stream->at_peer = false;
  engine_->OnStreamDown(stream->connected ? "it ended" : "it never stood");
  Wake();
  // The other end is told as soon as the path is open.
  Node* const node = coordinator_->node();
  if (node->alive) {
    context_.world->On(node,
                       std::max(stream->to_coordinator, context_.world->Arrival(node_, *node)),
                       [c = coordinator_, stream] { c->OnEnd(stream); });
  }
  Connect();
}

void PeerHost::SendToCoordinator(const control::PeerMessage& said) {
  if (!stream_ || !stream_->connected) return;
  control::PeerMessage message = said;
  Withhold(context_.planted, coordinator_->incarnation(), &message);
  if (const auto* dispute = std::get_if<control::Dispute>(&message);
      dispute != nullptr && dispute->peer && !context_.checker->liars()) {
    Checker::Fail(node_.name + " and " + ToString(dispute->peer) +
                  " have come to different verdicts about " + dispute->what);
  }
  if (auto* const hello = std::get_if<control::Hello>(&message)) {
    hello->key = identity_.public_key();
  }
  coordinator_->Overhear(id_, message);
  const std::string bytes = control::Serialize(message);
  if (!std::holds_alternative<control::Heartbeat>(message)) {
    context_.story->TellLater(context_.world->now(), bytes,
                              [&] { return node_.name + " -> coordinator  " + Describe(message); });
  }
  const uint64_t life = node_.life;
  if (const auto* ready = std::get_if<control::EpochReady>(&message)) {
    // A peer that lost all others announced its op to nobody, but reports it.
    for (const control::OpReport& op : ready->ops) {
      for (const peerd::PostRef& post : open_posts_) {
        if (locals_.at(post.local).group != ready->group) continue;
        context_.checker->OnReported(id_, ready->group, op, posted_ops_.at(post));
      }
    }
    context_.trigger(Moment::kReadySent, id_);
  }
  if (std::holds_alternative<control::Vote>(message)) context_.trigger(Moment::kVoteSent, id_);
  if (const auto* hello = std::get_if<control::Hello>(&message)) {
    context_.checker->OnHello(id_, *hello);
  }
  if (std::holds_alternative<control::FetchDone>(message)) {
    context_.trigger(Moment::kFetchDoneSent, id_);
  }
  Node* const node = coordinator_->node();
  if (node_.life != life || !node->alive || !stream_ || stream_->cut) return;
  stream_->to_coordinator =
      std::max(stream_->to_coordinator, context_.world->Arrival(node_, *node));
  context_.world->On(node, stream_->to_coordinator,
                     [c = coordinator_, stream = stream_, bytes] { c->OnBytes(stream, bytes); });
}

// Invented numbers. They need not be true; they only have to make rings change.
void PeerHost::ReportLinks() {
  control::LinkReport report;
  std::set<PeerId> seen{id_};
  for (const auto& [group, prepare] : prepared_) {
    for (const control::PeerInfo& other : prepare.peers) {
      if (!seen.insert(other.peer).second) continue;
      const uint64_t rate = 1000000 * (1 + context_.world->Below(50));
      report.links.push_back({id_, other.peer, rate, 1000, 0});
      // Made of the number that was drawn, so that old seeds stay the same runs.
      report.links.back().held = rate % 5000000 == 0;
      report.up_bytes_per_second += rate;
      report.down_bytes_per_second = rate % 3000000;  // 0: unknown
    }
  }
  if (!report.links.empty()) SendToCoordinator(report);
}

void PeerHost::Beat() {
  World& world = *context_.world;
  world.On(&node_, world.now() + Millis(context_.detect_ms) / 3, [this, &world] {
    transport_.Beat();
    if (context_.ring_interval_ms != 0 && world.Chance(0.6)) ReportLinks();
    if (context_.planted == Planted::kFreezeForNothing) ForgeLinkLost();
    if (const StreamPtr stream = stream_; stream && stream->connected) {
      if (world.now() - stream->heard > kStreamSilence * Millis(context_.detect_ms)) {
        OnStreamEnd(stream);
      } else if (Node* const node = coordinator_->node(); node->alive && !stream->cut) {
        // Keepalive: an answer shows that the path and the process are alive.
        world.On(node, world.Arrival(node_, *node), [this, &world, node, stream] {
          if (stream->cut || !stream->at_coordinator || !node_.alive) return;
          world.On(&node_, world.Arrival(*node, node_),
                   [stream, &world] { stream->heard = world.now(); });
        });
      }
    }
    Beat();
  });
}

// ---- the transport's listener

void PeerHost::OnLinkUp(const peerd::LinkKey& link) {
  context_.story->Tell(context_.world->now(), node_.name, "  link up to ", ToString(link.peer));
  engine_->OnLinkUp(link);
  Wake();
}

void PeerHost::OnLinkDown(const peerd::LinkKey& link, const std::string& reason,
                          uint32_t silent_ms) {
  context_.story->Tell(context_.world->now(), node_.name, "  link down to ", ToString(link.peer),
                       ": ", reason);
  engine_->OnLinkDown(link, reason + context_.foreign, silent_ms);
  Wake();
}

void PeerHost::OnPeerTried(const GroupKey& group, uint64_t trial, PeerId peer,
                           const std::string& error) {
  engine_->OnPeerTried(group, trial, peer, error);
  Wake();
}

absl::Status PeerHost::OnControlFrame(const peerd::LinkKey& link, const FrameHeader& header,
                                      std::span<const uint8_t> payload) {
  const absl::Status status = engine_->OnControlFrame(link, header, payload);
  Wake();
  return status;
}

// ---- planted bugs

// Sends DONE for every op of the group that is in flight here and not complete.
void PeerHost::ForgeDone(const GroupKey& group) {
  for (const auto& [key, running] : running_) {
    if (key.first != group || running.complete) continue;
    for (const auto& [peer, ordinal] : running.theirs) {
      FrameHeader header;
      header.type = FrameType::kDone;
      header.group = group.group;
      header.op = ordinal;
      header.attempt = running.attempt;
      transport_.SendControl({group.run, peer}, header, {});
    }
  }
}

// Reports links as lost that are up.
void PeerHost::ForgeLinkLost() {
  for (const auto& [group, prepare] : prepared_) {
    for (const control::PeerInfo& other : prepare.peers) {
      if (other.peer == id_ || !context_.world->Chance(0.05)) continue;
      SendToCoordinator(control::LinkLost{group, prepare.epoch, other.peer, "forged", 0});
    }
  }
}

// As if a stopped attempt had left the beginning of a finished segment in place of the original, or
// had written what it has lost by encoding.
void PeerHost::SpoilSources(const peerd::AttemptStopped& stopped) {
  const bool sources = context_.planted == Planted::kNoRestore;
  const bool errors = context_.planted == Planted::kErrorsEarly;
  const auto it = running_.find({stopped.group, stopped.ordinal});
  if ((!sources && !errors) || it == running_.end()) return;
  for (const peerd::PostRef& post : it->second.posts) {
    if (uint8_t* const source = sources_.at(post); source != nullptr && sources) source[0] ^= 1;
    if (float* const error = errors_.at(post); error != nullptr && errors) error[0] += 1;
  }
}

void PeerHost::NoteSegment(const peerd::LinkKey& link, const FrameHeader& header,
                           const uint8_t* data) {
  if (header.type != FrameType::kData) return;
  for (const auto& [key, running] : running_) {
    const auto& [group, ordinal] = key;
    const auto theirs = running.theirs.find(link.peer);
    if (group != GroupKey{link.run, header.group} || theirs == running.theirs.end()) continue;
    if (theirs->second != header.op || running.attempt != header.attempt) continue;
    const uint64_t again = sent_.OnSegment(group, ordinal, header, data);
    for (uint64_t i = 0; i < again; ++i) context_.checker->OnSentAgain();
  }
}

}  // namespace longhaul::sim
