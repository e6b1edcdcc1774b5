// A trainer for tests that make faults of their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/simulation.h"

namespace longhaul::sim {

// Reduces a tensor, passes a boundary, and repeats that until its peer dies or it is removed.
class BusyTrainer final : public TrainerSide {
 public:
  BusyTrainer(Simulation* sim, PeerHost* peer, uint32_t slot, uint64_t count = 1000)
      : sim_(sim), peer_(peer), slot_(slot), count_(count) {
    Join();
  }

  // From now on, joins again at once when a join is refused.
  void Insist() { insists_ = true; }
  uint64_t refusals() const { return refusals_; }
  PeerId peer() const { return peer_->id(); }
  bool member() const { return member_; }
  const Outcome& end() const { return end_; }
  // The times at which its ops ended.
  const std::vector<Tick>& ops() const { return ops_; }
  // How each of its ops ended.
  const std::vector<Code>& outcomes() const { return outcomes_; }
  int64_t LongestGap(Tick from, Tick to) const {
    int64_t longest = 0;
    Tick last = from;
    for (const Tick op : ops_) {
      if (op <= from || op > to) continue;
      longest = std::max(longest, op - last);
      last = op;
    }
    return std::max(longest, to - last);
  }
  int64_t OpsWithin(Tick from, Tick to) const {
    return std::count_if(ops_.begin(), ops_.end(),
                         [&](const Tick op) { return from < op && op <= to; });
  }

  void OnJoinDone(const Outcome& outcome, const peerd::World& world) override {
    if (!outcome.ok()) {
      ++refusals_;
      end_ = outcome;
      if (insists_) sim_->world().At(sim_->now(), [this] { Join(); });
      return;
    }
    member_ = true;
    step_ = sim_->checker().FirstStep(0, world.member);
    sim_->checker().OnStep(0, step_, world);
    Post();
  }
  void OnStepDone(const Outcome& outcome, const peerd::World& world) override {
    if (!outcome.ok()) return;
    sim_->checker().OnStep(0, ++step_, world);
    Post();
  }
  void OnSyncDone(const Outcome&, const peerd::StateSyncInfo&) override {}
  void OnTakeDone(const Outcome&, const peerd::StateSyncInfo&) override {}
  void OnLeaveDone(const Outcome&) override {}
  void OnPostDone(uint64_t, const Outcome& outcome, const peerd::OpInfo&) override {
    outcomes_.push_back(outcome.code);
    if (!outcome.ok()) return;
    ops_.push_back(sim_->now());
    peer_->Step(local_);
  }
  void OnWorldChanged(const peerd::World&) override {}
  void OnMemberGone(const Outcome& outcome) override {
    member_ = false;
    end_ = outcome;
  }
  void OnPeerGone() override { member_ = false; }

 private:
  void Join() { local_ = peer_->Join(this, {"demo", 0}, "t" + std::to_string(slot_), slot_); }
  void Post() {
    const OpName name{0, step_, 1, 0};
    OpDesc desc;
    desc.dtype = DType::kInt64;
    desc.count = count_;
    desc.algorithm = count_ <= 100 ? Algorithm::kAuto : Algorithm::kRing;
    memory_ = std::make_shared<std::vector<uint8_t>>(InputOf(name, desc, slot_));
    peer_->Post({{local_, ++calls_}, 1, desc}, InPlace(desc, memory_), {name});
  }

  Simulation* const sim_;
  PeerHost* const peer_;
  const uint32_t slot_;
  const uint64_t count_;  // elements; 100 and fewer are reduced in one shot
  peerd::LocalId local_;
  bool member_ = false;
  bool insists_ = false;
  uint64_t refusals_ = 0;
  Outcome end_;
  uint64_t step_ = 0;
  uint64_t calls_ = 0;
  std::shared_ptr<std::vector<uint8_t>> memory_;
  std::vector<Tick> ops_;
  std::vector<Code> outcomes_;
};

// How many seeds each test has: LONGHAUL_SIM_SEEDS, or two.
inline uint64_t Seeds() {
  const char* const text = std::getenv("LONGHAUL_SIM_SEEDS");
  return text == nullptr ? 2 : std::strtoull(text, nullptr, 10);
}

// Hosts with one busy trainer each, and the time at which a test makes its fault.
class BusyGroup {
 public:
  // `count`: as for BusyTrainer.
  explicit BusyGroup(uint64_t seed, uint64_t count = 1000) : count_(count), sim_(Options(seed)) {}

  // Starts hosts 1..n, and lets them work for a while. Each seed has its fault at another moment.
  // Returns false if not all of them become members.
  bool Found(int n) {
    for (int i = 0; i < n; ++i) Add();
    if (!sim_.RunUntil(sim_.now() + Seconds(10), [&] { return Members() == n; })) return false;
    Pass(Seconds(2) + sim_.world().Between(0, Millis(500)));
    from_ = sim_.now();
    return true;
  }
  BusyTrainer& Add() {
    PeerHost* const peer = sim_.AddPeer();
    trainers_.push_back(std::make_unique<BusyTrainer>(
        &sim_, peer, static_cast<uint32_t>(trainers_.size()), count_));
    return *trainers_.back();
  }
  void Pass(int64_t us) {
    sim_.RunUntil(sim_.now() + us, [] { return false; });
  }
  int Members() const {
    return static_cast<int>(std::count_if(trainers_.begin(), trainers_.end(),
                                          [](const auto& t) { return t->member(); }));
  }

 private:
  static SimulationOptions Options(uint64_t seed) {
    SimulationOptions options;
    options.seed = seed;
    options.latency = {200, Millis(2)};
    options.persist_us = Millis(1);
    return options;
  }

  const uint64_t count_;

 protected:
  Simulation sim_;
  std::vector<std::unique_ptr<BusyTrainer>> trainers_;
  Tick from_;  // time of the fault
};

}  // namespace longhaul::sim
