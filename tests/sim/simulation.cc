#include "tests/sim/simulation.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace longhaul::sim {

// ------------------------------------------------------------------------------ machinery

Simulation::Simulation(const SimulationOptions& options)
    : options_(options),
      world_(options.seed, options.latency, options.scripted),
      story_(options.mode),
      checker_(options.seed) {
  SetLogLevel(LogLevel::kError);  // the story tells what engines do
  context_.world = &world_;
  context_.story = &story_;
  context_.checker = &checker_;
  context_.switchboard = this;
  context_.planted = options.planted;
  context_.detect_ms = options.detect_ms;
  // A scripted story is for people to read.
  if (!options.scripted) context_.foreign = kForeignText;
  context_.transport = {options.detect_ms, options.lanes, options.zero_copy, options.segment_us,
                        options.flips,     options.far,   options.planted};
  context_.persist_us = options.persist_us;
  context_.shape = DrawShape(options.seed);
  const uint64_t bytes = context_.shape.total_bytes();
  if (options.transfer_us > 0) {
    context_.state_rate = bytes * 1000000 / static_cast<uint64_t>(options.transfer_us);
  }
  context_.hash_us = options.hash_us;
  // Kept states are counted in pages. There is room for two or three members of a peer.
  if (options.keeps) context_.keep_bytes = 2 * (bytes + 5000);
  context_.ring_interval_ms = options.ring_interval_ms;
  context_.sign_ops = options.sign_ops;
  context_.find_peer = [this](PeerId peer) -> PeerHost* {
    const auto it = by_id_.find(peer);
    return it == by_id_.end() ? nullptr : it->second;
  };
  context_.trigger = [this](Moment moment, PeerId peer) { OnMoment(moment, peer); };
  coordinator_ = std::make_unique<CoordinatorHost>(context_);
}

Simulation::~Simulation() {
  for (const auto& peer : peers_) peer->Dispose();
}

PeerHost* Simulation::AddPeer() {
  const int index = static_cast<int>(peers_.size()) + 1;
  const PeerId id(static_cast<uint64_t>(index));
  peers_.push_back(std::make_unique<PeerHost>(context_, coordinator_.get(), index, id));
  by_id_[id] = peers_.back().get();
  return peers_.back().get();
}

Trainer* Simulation::AddTrainer(PeerHost* peer, TrainerPlan plan, Tick start) {
  const int index = static_cast<int>(trainers_.size()) + 1;
  trainers_.push_back(
      std::make_unique<Trainer>(context_, options_.seed, index, peer, plan, &slots_[plan.group]));
  Trainer* const trainer = trainers_.back().get();
  world_.At(std::max(start, now()), [trainer] { trainer->Start(); });
  return trainer;
}

ModelTransport* Simulation::Find(PeerId peer) {
  const auto it = by_id_.find(peer);
  return it == by_id_.end() ? nullptr : &it->second->transport();
}

void Simulation::OnProtocolError(const std::string& text) {
  if (!checker_.liars()) Checker::Fail(text);
}

void Simulation::OnTunnel(PeerId from, PeerId to, PeerId relay) {
  story_.Tell(now(), ToString(relay), "  carries between ", ToString(from), " and ", ToString(to));
  checker_.OnTunnel();
}

void Simulation::OnFrame(PeerId from, PeerId to, const FrameHeader& header) {
  if (header.type == FrameType::kData || header.type == FrameType::kChunkData) {
    story_.Mix(header.op.value() ^ header.offset ^ static_cast<uint64_t>(now().us));
    return;
  }
  if (IsOfTransfer(header.type)) story_.Mix(header.op.value() ^ header.attempt.value() << 20);
  story_.TellLater(now(), header.type == FrameType::kDone ? "D" : "R", [&] {
    return ToString(to) + " <- " + ToString(from) + "  " + sim::Describe(header);
  });
}

void Simulation::StopCoordinator(int64_t down_us, bool resets) {
  if (!coordinator_->node()->alive) return;
  coordinator_->Crash(resets);
  world_.At(now() + down_us, [this] { coordinator_->Start(); });
}

void Simulation::FreezeCoordinator(int64_t us) {
  Node* const node = coordinator_->node();
  if (!node->alive || node->frozen) return;
  story_.Tell(now(), "coordinator  freezes");
  checker_.OnAllDisturbed();
  world_.Freeze(node);
  world_.At(now() + us, [this, node] {
    if (!node->frozen) return;
    story_.Tell(now(), "coordinator  thaws");
    world_.Thaw(node);
  });
}

void Simulation::FreezePeer(PeerHost* peer, int64_t us) {
  peer->Freeze();
  world_.At(now() + us, [peer] { peer->Thaw(); });
}

void Simulation::LoseLanes(PeerHost* a, PeerId b) {
  if (!a->node()->alive) return;
  story_.Tell(now(), "network  loses lanes between ", ToString(a->id()), " and ", ToString(b));
  a->transport().LoseLanes(b);
}

void Simulation::ResetLink(PeerHost* a, PeerId b) {
  checker_.OnDisturbed(a->id());
  checker_.OnDisturbed(b);
  a->transport().Reset(b);
}

void Simulation::Block(int from, int to, int64_t us) {
  story_.Tell(now(), "network  nothing gets from ", from, " to ", to, " for ", us / 1000, " ms");
  for (const int index : {from, to}) {
    if (index > 0) checker_.OnDisturbed(peers_[static_cast<size_t>(index) - 1]->id());
  }
  world_.Block(from, to, now() + us);
}

void Simulation::ClosePort(PeerHost* peer, ModelTransport::Port port, int64_t us) {
  story_.Tell(now(), "network  data port of ", ToString(peer->id()),
              port == ModelTransport::Port::kRefuses ? " refuses for " : " drops for ", us / 1000,
              " ms");
  peer->transport().SetPort(port);
  world_.At(now() + us, [peer] { peer->transport().SetPort(ModelTransport::Port::kOpen); });
}

void Simulation::Trigger(Moment moment, int nth, std::function<void(PeerHost*)> what) {
  waiting_.push_back({moment, nth, std::move(what)});
}

void Simulation::OnMoment(Moment moment, PeerId peer) {
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waiting_[i].moment != moment || --waiting_[i].left > 0) continue;
    const auto what = std::move(waiting_[i].what);
    waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i));
    const auto it = by_id_.find(peer);
    what(it == by_id_.end() ? nullptr : it->second);
    return;
  }
}

bool Simulation::RunUntil(Tick limit, const std::function<bool()>& done) {
  Tick look = now();
  while (world_.RunOne(limit)) {
    if (now() < look && !options_.scripted) continue;
    look = now() + Millis(1);
    CheckAnswers();
    if (done()) return true;
  }
  world_.Skip(limit);
  return done();
}

void Simulation::ExpectAnswers(Tick since, int64_t bound_us) {
  answers_since_ = since;
  answers_bound_us_ = bound_us;
}

void Simulation::CheckAnswers() {
  if (now() < answers_since_) return;
  for (const auto& trainer : trainers_) {
    const auto waiting = trainer->waiting();
    if (!waiting) continue;
    const int64_t waited = now() - std::max(waiting->since, answers_since_);
    if (waited <= answers_bound_us_) continue;
    Checker::Fail(waiting->what + " has waited for " + std::to_string(waited / 1000) +
                  " ms since the faults stopped; " + Describe());
  }
}

bool Simulation::finished() const {
  return std::all_of(trainers_.begin(), trainers_.end(),
                     [](const auto& trainer) { return trainer->finished(); });
}

std::string Simulation::Describe() const { return coordinator_->WaitingFor(); }

// ------------------------------------------------------------------------------ random runs

namespace {

// A run uses some of these kinds only. So there are runs with one kind only, and every two kinds
// meet in some run.
enum class FaultKind {
  kCrash,
  kSeveralCrash,
  kCrashAndAgain,  // another peer dies during the repair
  kNewcomerCrash,
  kTrainerDies,
  kTrainerPauses,
  kFreeze,
  kReset,
  kLanes,  // nobody may notice more than a delay
  kFlap,   // a link that breaks again and again: a relay takes its place
  kBlock,
  kBlockPair,  // both ways, and for a long time
  kNoRoute,    // both ways, until the faults are over
  kBlockCoordinator,
  kStream,
  kCoordinatorCrash,
  kCoordinatorFreeze,
  kCoordinatorEchoes,  // it dies, and its last messages come again later
  kEvict,
  kEvictAndCrash,  // the coordinator dies before the eviction is carried out
  kCutOff,
  kDrain,
  kStoreGoesBack,  // the coordinator dies, and its store has lost its last writes
  // The kinds from here on have a generator of their own: seeds without them stay as they were.
  kTwoPairs,           // blocked both ways, one shortly after the other
  kCoordinatorCutOff,  // from all peers
  kClosedPort,         // of a newcomer, or of a peer whose links are up
  kAgedStream,         // ended by the coordinator, often just after a report about its peer
  kCount,
};

// A run drawn from a seed.
class RandomRun {
 public:
  RandomRun(uint64_t seed, Planted planted, Story::Mode mode)
      : seed_(seed), prng_(seed ^ 0x5eed), sim_(Draw(seed, planted, mode)) {}

  SeedResult Run();

 private:
  static constexpr int64_t kJoinWindow = Millis(300);

  SimulationOptions Draw(uint64_t seed, Planted planted, Story::Mode mode);
  void AddPeersAndTrainers();
  void AddTrainers(PeerHost* peer, Tick start);
  void AddCohort(PeerHost* peer, Tick start);
  // In some runs the first trainers of each group wait for each other.
  void Assemble();
  TrainerPlan DrawPlan();
  bool Has(FaultKind kind) const {
    return std::find(kinds_.begin(), kinds_.end(), kind) != kinds_.end();
  }
  void Flap(PeerHost* a, PeerId b, int times);
  void PlanFaults();
  void DrawKinds();
  std::function<void(PeerHost*)> DrawFault();
  void StopCoordinator();
  PeerHost* AnyPeer();
  Trainer* AnyTrainer();
  int64_t Detect(double low, double high) {
    const double us = static_cast<double>(Millis(detect_ms_));
    return prng_.Between(static_cast<int64_t>(us * low), static_cast<int64_t>(us * high));
  }

  const uint64_t seed_;
  Prng prng_;
  uint32_t detect_ms_ = 0;
  int64_t think_us_ = 0;
  Tick quiet_;
  uint32_t groups_ = 1;
  bool cohorts_ = false;  // every trainer is in a cohort
  uint64_t cohorts_made_ = 0;
  bool deadlines_ = false;
  std::vector<FaultKind> kinds_;
  int crashes_left_ = 0;
  Syncs syncs_ = Syncs::kNone;
  double background_ = 0;     // share of trainers that join in the background
  Prng background_draws_{1};  // a separate generator, see kTwoPairs
  double odd_ = 0;            // share of trainers that declare other tensors
  Prng odd_draws_{1};
  Prng cancel_draws_{seed_ ^ 0xca2ce1};
  Prng later_kinds_draws_{1};
  Planted planted_ = Planted::kNone;
  Simulation sim_;
};

SimulationOptions RandomRun::Draw(uint64_t seed, Planted planted, Story::Mode mode) {
  planted_ = planted;
  Prng states(seed ^ 0x57a7e5);  // a separate generator: seeds without states stay as they were
  if (states.Chance(0.4)) syncs_ = states.Chance(0.7) ? Syncs::kPopular : Syncs::kSendReceive;
  SimulationOptions options;
  if (states.Chance(0.5)) options.flips = 0.03;
  options.seed = seed;
  options.planted = planted;
  options.mode = mode;
  detect_ms_ = options.detect_ms = prng_.Chance(0.5) ? 300 : (prng_.Chance(0.5) ? 900 : 1500);
  if (prng_.Chance(0.3)) {
    options.latency = {Millis(3), Millis(prng_.Between(4, 30))};  // a wide area
  } else {
    options.latency = {20, prng_.Between(60, 600)};
  }
  // Some transfers are slow, so that other faults hit them.
  background_draws_ = Prng(seed ^ 0xbac6);
  if (background_draws_.Chance(0.35)) background_ = background_draws_.Chance(0.5) ? 0.3 : 0.7;
  if (states.Chance(0.4)) options.transfer_us = states.Between(1, Millis(options.detect_ms) / 2);
  options.keeps = states.Chance(0.5);
  options.hash_us = states.Chance(0.3) ? states.Between(0, Millis(20)) : states.Between(0, 200);
  // Trainers with other tensors exclude two options. A refused trainer has no state with which it
  // could come out of the background. A flipped bit in a manifest would break the protocol.
  odd_draws_ = Prng(seed ^ 0x0dd);
  if (odd_draws_.Chance(0.2) && background_ == 0 && options.flips == 0) {
    odd_ = odd_draws_.Chance(0.5) ? 0.15 : 0.5;  // the latter: newcomers may be more than members
  }
  later_kinds_draws_ = Prng(seed ^ 0x1a7e);
  Prng rings(seed ^ 0x71265);
  if (rings.Chance(0.35)) options.ring_interval_ms = 1 + static_cast<uint32_t>(rings.Below(400));
  options.sign_ops = Prng(seed ^ 0x5196).Chance(0.15);
  Prng far(seed ^ 0xfa9);
  if (far.Chance(0.5)) {
    options.far = far.Chance(0.7) ? TransportModel::Far::kAll : TransportModel::Far::kSome;
  }
  options.persist_us = prng_.Chance(0.3) ? 0 : prng_.Between(100, 5000);
  options.lanes = static_cast<int>(prng_.Between(1, 4));
  options.zero_copy = prng_.Chance(0.3) ? 0 : 0.5;
  // Slow lanes keep ops in flight for long, and faults hit them there.
  options.segment_us =
      prng_.Chance(0.4) ? prng_.Between(Millis(2), Millis(20)) : prng_.Between(20, 800);
  return options;
}

TrainerPlan RandomRun::DrawPlan() {
  TrainerPlan plan;
  plan.group = static_cast<uint32_t>(prng_.Below(groups_));
  plan.steps = prng_.Chance(0.25) ? static_cast<uint64_t>(prng_.Between(1, 6)) : 1000;
  plan.leave_after =
      Tick{} + (prng_.Chance(0.7) ? quiet_.us + Detect(0.5, 1) : prng_.Between(0, quiet_.us));
  plan.think_us = think_us_;
  plan.ops_max = 3;
  plan.rejoin = prng_.Chance(0.5);
  if (deadlines_ && prng_.Chance(0.6)) {
    plan.terms.step_deadline_ms = static_cast<uint32_t>(Detect(0.1, 1) / Millis(1));
    if (prng_.Chance(0.5)) plan.dawdle_us = Detect(0.2, 2);
  }
  plan.cancels = cancel_draws_.Chance(0.3);
  plan.ends_early = Prng(seed_ ^ 0xe2d5).Chance(0.3);
  plan.refuses = Prng(seed_ ^ 0x4ef05e).Chance(0.3);
  plan.syncs = syncs_;
  plan.terms.background = background_draws_.Chance(background_);
  plan.odd = odd_draws_.Chance(odd_);
  return plan;
}

// One member of the cohort in each group.
void RandomRun::AddCohort(PeerHost* peer, Tick start) {
  const std::string name = "h" + std::to_string(++cohorts_made_);
  std::vector<Trainer*> fellows;
  for (uint32_t group = 0; group < groups_; ++group) {
    TrainerPlan plan = DrawPlan();
    plan.group = group;
    plan.rejoin = false;  // alone, it would wait for its cohort for ever
    plan.terms.cohort = name;
    plan.terms.cohort_size = groups_;
    fellows.push_back(sim_.AddTrainer(peer, plan, start + prng_.Between(0, kJoinWindow)));
  }
  for (Trainer* trainer : fellows) {
    std::vector<Trainer*> others = fellows;
    std::erase(others, trainer);
    trainer->SetFellows(std::move(others));
  }
}

void RandomRun::AddTrainers(PeerHost* peer, Tick start) {
  if (cohorts_) return AddCohort(peer, start);
  const int64_t several = prng_.Chance(0.25) ? prng_.Between(2, 3) : 1;
  for (int64_t i = 0; i < several; ++i) {
    sim_.AddTrainer(peer, DrawPlan(), start + prng_.Between(0, kJoinWindow));
  }
}

void RandomRun::Assemble() {
  Prng draws(seed_ ^ 0xa55e);  // a separate generator, see kTwoPairs
  if (cohorts_ || !draws.Chance(0.2)) return;
  for (uint32_t group = 0; group < groups_; ++group) {
    std::vector<Trainer*> trainers;
    for (const auto& trainer : sim_.trainers()) {
      if (trainer->group() == group) trainers.push_back(trainer.get());
    }
    if (trainers.empty()) continue;
    const auto size =
        static_cast<uint32_t>(draws.Between(1, static_cast<int64_t>(trainers.size())));
    for (Trainer* trainer : trainers) {
      if (draws.Chance(0.9)) trainer->WaitForMembers(size);
    }
  }
}

void RandomRun::AddPeersAndTrainers() {
  groups_ = prng_.Chance(0.25) ? 2 : 1;
  cohorts_ = groups_ > 1 && prng_.Chance(0.4);
  deadlines_ = prng_.Chance(0.12);
  const bool routes = Has(FaultKind::kFlap) || Has(FaultKind::kNoRoute);
  const int64_t peers = routes ? prng_.Between(3, 6) : prng_.Chance(0.1) ? 1 : prng_.Between(2, 5);
  for (int64_t i = 0; i < peers; ++i) AddTrainers(sim_.AddPeer(), Tick{});
  Assemble();
  for (int64_t late = prng_.Between(0, 3); late > 0; --late) {
    sim_.world().At(Tick{prng_.Between(0, quiet_.us)}, [this] {
      PeerHost* const peer = prng_.Chance(0.6) ? sim_.AddPeer() : AnyPeer();
      AddTrainers(peer, sim_.now());
    });
  }
}

PeerHost* RandomRun::AnyPeer() { return sim_.peers()[prng_.Below(sim_.peers().size())].get(); }

Trainer* RandomRun::AnyTrainer() {
  return sim_.trainers()[prng_.Below(sim_.trainers().size())].get();
}

// Returns what a fault does when its time has come. Its argument is the peer at which the moment
// came (nullptr: none).
std::function<void(PeerHost*)> RandomRun::DrawFault() {
  const auto victim = [this](PeerHost* at) {
    return at != nullptr && prng_.Chance(0.6) ? at : AnyPeer();
  };
  const auto crash = [this](PeerHost* peer) {
    if (!peer->node()->alive || crashes_left_ <= 0) return;
    --crashes_left_;
    peer->Crash(prng_.Chance(0.7));
  };
  const auto evict = [this] {
    Trainer* const trainer = AnyTrainer();
    if (!trainer->member()) return;
    sim_.coordinator().Evict({"demo", trainer->group()}, trainer->id());
  };
  switch (kinds_[prng_.Below(kinds_.size())]) {
    case FaultKind::kCrash:
      return [=](PeerHost* at) { crash(victim(at)); };
    case FaultKind::kSeveralCrash:
      return [=, this](PeerHost* at) {
        crash(victim(at));
        for (int64_t more = prng_.Between(1, 2); more > 0; --more) crash(AnyPeer());
      };
    case FaultKind::kCrashAndAgain:
      return [=, this](PeerHost* at) {
        static constexpr Moment kRepair[] = {Moment::kPrepareSent,   Moment::kPrepareArrived,
                                             Moment::kReadySent,     Moment::kCommitDurable,
                                             Moment::kCommitArrived, Moment::kAttemptStarted};
        crash(victim(at));
        sim_.Trigger(kRepair[prng_.Below(std::size(kRepair))],
                     static_cast<int>(prng_.Between(1, 3)), [=, this](PeerHost* then) {
                       if (sim_.now() < quiet_) crash(victim(then));
                     });
      };
    case FaultKind::kNewcomerCrash:
      return [=, this](PeerHost*) {
        for (const auto& trainer : sim_.trainers()) {
          if (trainer->joining()) return crash(trainer->peer());
        }
      };
    case FaultKind::kTrainerDies:
      return [this](PeerHost*) { AnyTrainer()->Die(); };
    case FaultKind::kTrainerPauses:
      return [this](PeerHost*) { AnyTrainer()->Pause(Detect(0.5, 3)); };
    case FaultKind::kFreeze:
      return [=, this](PeerHost* at) { sim_.FreezePeer(victim(at), Detect(0.1, 3)); };
    case FaultKind::kReset:
      return [=, this](PeerHost* at) {
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (!a->node()->alive || a == b) return;
        sim_.story().Tell(sim_.now(), "network  resets ", ToString(a->id()), " and ",
                          ToString(b->id()));
        sim_.ResetLink(a, b->id());
      };
    case FaultKind::kLanes:
      return [=, this](PeerHost* at) {
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (a == b) return;
        for (int64_t more = prng_.Between(0, 3), wait = 0; more >= 0; --more) {
          sim_.world().At(sim_.now() + wait, [this, a, b] { sim_.LoseLanes(a, b->id()); });
          wait += prng_.Between(0, Millis(20));
        }
      };
    case FaultKind::kFlap:
      return [=, this](PeerHost* at) {
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (a != b) Flap(a, b->id(), 6);
      };
    case FaultKind::kBlock:  // one-way between two peers
      return [=, this](PeerHost* at) {
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (a != b) sim_.Block(a->node()->index, b->node()->index, Detect(0.05, 2.5));
      };
    case FaultKind::kBlockPair:
      return [=, this](PeerHost* at) {
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (a == b) return;
        const int64_t us = Detect(1, 8);
        sim_.Block(a->node()->index, b->node()->index, us);
        sim_.Block(b->node()->index, a->node()->index, us);
      };
    case FaultKind::kNoRoute:
      return [=, this](PeerHost* at) {
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (a == b) return;
        const int64_t us = Detect(20, 20);  // until the faults are over
        sim_.Block(a->node()->index, b->node()->index, us);
        sim_.Block(b->node()->index, a->node()->index, us);
      };
    case FaultKind::kTwoPairs:
      return [=, this](PeerHost* at) {
        const auto cut = [this](PeerHost* a, PeerHost* b, int64_t us) {
          if (a == b) return;
          sim_.Block(a->node()->index, b->node()->index, us);
          sim_.Block(b->node()->index, a->node()->index, us);
        };
        const int64_t us = Detect(1, 8);
        cut(victim(at), AnyPeer(), us);
        sim_.world().At(sim_.now() + Detect(0, 0.2), [=, this] { cut(AnyPeer(), AnyPeer(), us); });
      };
    case FaultKind::kCoordinatorCutOff:
      return [this](PeerHost*) {
        const int64_t us = Detect(0.5, 8);
        for (int index = 1; index <= static_cast<int>(sim_.peers().size()); ++index) {
          sim_.Block(0, index, us);
          sim_.Block(index, 0, us);
        }
      };
    case FaultKind::kClosedPort:
      return [=, this](PeerHost* at) {
        const bool newcomer = prng_.Chance(0.7);
        PeerHost* const peer = newcomer ? sim_.AddPeer() : victim(at);
        const bool refuses = prng_.Chance(0.5);
        sim_.ClosePort(peer,
                       refuses ? ModelTransport::Port::kRefuses : ModelTransport::Port::kDrops,
                       Detect(0.5, 8));
        // A newcomer that nobody reaches must not freeze anything or get anybody removed, so it
        // does not count as a disturbance.
        if (!newcomer) return sim_.checker().OnDisturbed(peer->id());
        AddTrainers(peer, sim_.now());
      };
    case FaultKind::kBlockCoordinator:  // one-way
      return [=, this](PeerHost* at) {
        const int index = victim(at)->node()->index;
        const int64_t us = Detect(0.05, 3);
        if (prng_.Chance(0.5)) {
          sim_.Block(index, 0, us);
        } else {
          sim_.Block(0, index, us);
        }
      };
    case FaultKind::kStream:
      return [=, this](PeerHost* at) {
        PeerHost* const peer = victim(at);
        if (!peer->node()->alive || !peer->stream()) return;
        sim_.story().Tell(sim_.now(), "network  resets the stream of ", ToString(peer->id()));
        sim_.coordinator().Reset(peer->stream());
      };
    case FaultKind::kAgedStream:
      return [=, this](PeerHost* at) {
        PeerHost* const peer = victim(at);
        PeerHost* const other = AnyPeer();
        const auto end = [this, peer](int64_t after_us) {
          sim_.world().At(sim_.now() + after_us, [this, peer] {
            if (peer->node()->alive && peer->stream()) sim_.coordinator().EndAged(peer->stream());
          });
        };
        if (prng_.Chance(0.3)) return end(0);
        if (!other->node()->alive || !peer->node()->alive || other == peer) return;
        sim_.story().Tell(sim_.now(), "network  resets ", ToString(other->id()), " and ",
                          ToString(peer->id()));
        sim_.ResetLink(other, peer->id());
        if (prng_.Chance(0.5)) return end(Detect(0, 0.3));
        sim_.Trigger(prng_.Chance(0.5) ? Moment::kReadySent : Moment::kPrepareSent, 1,
                     [end](PeerHost*) { end(0); });
      };
    case FaultKind::kCoordinatorCrash:
      return [this](PeerHost*) { StopCoordinator(); };
    case FaultKind::kCoordinatorFreeze:
      return [this](PeerHost*) { sim_.FreezeCoordinator(Detect(0.1, 3)); };
    case FaultKind::kCoordinatorEchoes:
      return [this](PeerHost*) {
        StopCoordinator();
        sim_.coordinator().Echo(Detect(0.2, 4));
      };
    case FaultKind::kStoreGoesBack:
      return [=, this](PeerHost* at) {
        static constexpr Moment kPlans[] = {Moment::kPrepareSent, Moment::kPrepareArrived,
                                            Moment::kReadySent};
        const auto go_back = [this] {
          if (sim_.now() >= quiet_) return;
          StopCoordinator();
          sim_.coordinator().GoBack();
        };
        if (prng_.Chance(0.4)) {
          // Often back to a time before the last start of the coordinator.
          StopCoordinator();
          sim_.world().At(sim_.now() + Detect(0.1, 1.5), go_back);
          return;
        }
        PeerHost* const a = victim(at);
        PeerHost* const b = AnyPeer();
        if (a->node()->alive && a != b) sim_.ResetLink(a, b->id());
        sim_.Trigger(kPlans[prng_.Below(std::size(kPlans))], static_cast<int>(prng_.Between(1, 4)),
                     [go_back](PeerHost*) { go_back(); });
      };
    case FaultKind::kEvict:
      return [=](PeerHost*) { evict(); };
    case FaultKind::kEvictAndCrash:
      return [=, this](PeerHost*) {
        static constexpr Moment kBefore[] = {Moment::kCommitDurable, Moment::kPrepareSent,
                                             Moment::kReadySent};
        evict();
        sim_.Trigger(kBefore[prng_.Below(std::size(kBefore))],
                     static_cast<int>(prng_.Between(1, 2)), [this](PeerHost*) {
                       if (sim_.now() < quiet_) StopCoordinator();
                     });
      };
    case FaultKind::kCutOff:  // a host
      return [=, this](PeerHost* at) {
        const int index = victim(at)->node()->index;
        const int64_t us = Detect(0.1, 2.5);
        for (int other = 0; other <= static_cast<int>(sim_.peers().size()); ++other) {
          if (other == index) continue;
          sim_.Block(index, other, us);
          sim_.Block(other, index, us);
        }
      };
    case FaultKind::kDrain:
    case FaultKind::kCount:
      break;
  }
  return [=, this](PeerHost* at) {
    if (prng_.Chance(0.5)) {
      victim(at)->Drain();
    } else {
      sim_.coordinator().Drain(victim(at)->id());
      if (!prng_.Chance(0.5)) return;
      // The coordinator dies as soon as the order is durable.
      sim_.Trigger(Moment::kCommitDurable, 1, [this](PeerHost*) {
        if (sim_.now() < quiet_) StopCoordinator();
      });
    }
  };
}

void RandomRun::Flap(PeerHost* a, PeerId b, int times) {
  if (times == 0 || !a->node()->alive || sim_.now() >= quiet_) return;
  sim_.story().Tell(sim_.now(), "network  resets ", ToString(a->id()), " and ", ToString(b));
  sim_.ResetLink(a, b);
  sim_.world().At(sim_.now() + Detect(0.15, 0.4), [=, this] { Flap(a, b, times - 1); });
}

void RandomRun::StopCoordinator() {
  const bool soon = prng_.Chance(0.6);
  sim_.StopCoordinator(soon ? Detect(0.01, 0.5) : Detect(0.5, 4), prng_.Chance(0.7));
}

void RandomRun::DrawKinds() {
  const double share = prng_.Chance(0.3) ? 1 : 0.25;
  for (int kind = 0; kind < static_cast<int>(FaultKind::kTwoPairs); ++kind) {
    if (prng_.Chance(share)) kinds_.push_back(static_cast<FaultKind>(kind));
  }
  if (kinds_.empty()) kinds_.push_back(FaultKind::kDrain);
  if (prng_.Chance(0.05)) kinds_ = {FaultKind::kLanes};
  for (int kind = static_cast<int>(FaultKind::kTwoPairs);
       kind < static_cast<int>(FaultKind::kCount); ++kind) {
    if (later_kinds_draws_.Chance(0.08)) kinds_.push_back(static_cast<FaultKind>(kind));
  }
}

void RandomRun::PlanFaults() {
  crashes_left_ = static_cast<int>(prng_.Between(0, 4));
  for (int64_t faults = prng_.Chance(0.05) ? 0 : prng_.Between(2, 9); faults > 0; --faults) {
    auto fault = DrawFault();
    const auto when_due = [this, fault](PeerHost* at) {
      if (sim_.now() < quiet_) fault(at);
    };
    if (prng_.Chance(0.7) && planted_ != Planted::kSentBeforeDurable) {
      const Moment end = syncs_ == Syncs::kNone ? Moment::kTransferStarted : Moment::kCount;
      auto moment = static_cast<Moment>(prng_.Below(static_cast<uint64_t>(end)));
      if (prng_.Chance(0.3)) moment = Moment::kDoneSent;
      const bool frequent = moment >= Moment::kAttemptStarted && moment <= Moment::kDoneSent;
      // Triggers are set some time after the start. Otherwise only the first moments would be hit.
      const Tick from{prng_.Between(0, quiet_.us / 2)};
      const int nth = static_cast<int>(prng_.Between(1, frequent ? 12 : 4));
      sim_.world().At(from, [this, moment, nth, when_due] { sim_.Trigger(moment, nth, when_due); });
    } else {
      sim_.world().At(Tick{prng_.Between(0, quiet_.us)}, [when_due] { when_due(nullptr); });
    }
  }
}

SeedResult RandomRun::Run() {
  quiet_ = Tick{Detect(2, 6)};
  think_us_ = prng_.Between(Millis(10), Detect(0.15, 0.5));
  DrawKinds();
  AddPeersAndTrainers();
  PlanFaults();
  // Faults that last are over by then: freezes take at most three detect_ms, and the coordinator is
  // down for at most four. Blocked paths are opened. Only a closed port may stay closed for four
  // more.
  const Tick calm = quiet_ + 4 * Millis(detect_ms_);
  sim_.world().At(calm, [this] { sim_.world().Unblock(); });
  const int64_t bound = 25 * Millis(detect_ms_) + Seconds(2);
  sim_.ExpectAnswers(calm, bound);
  if (!sim_.RunUntil(calm + 8 * bound,
                     [this] { return sim_.now() >= quiet_ && sim_.finished(); })) {
    Checker::Fail("the run does not end: " + sim_.Describe());
  }
  // Messages in flight still arrive, also at a coordinator that was down.
  sim_.RunUntil(std::max(sim_.now(), calm) + 3 * Millis(detect_ms_), [] { return false; });
  for (const auto& peer : sim_.peers()) {
    peer->CheckAllAnswered();
    if (!peer->node()->alive || peer->drained()) continue;
    if (sim_.coordinator().durable().drains.contains(peer->id())) {
      Checker::Fail(ToString(peer->id()) + " was to drain, and does not");
    }
  }
  return {sim_.story().digest(), sim_.world().events(), sim_.now(), sim_.checker().counts()};
}

}  // namespace

SeedResult RunSeed(uint64_t seed, Planted planted, Story::Mode mode) {
  return RandomRun(seed, planted, mode).Run();
}

}  // namespace longhaul::sim
