// A whole run in one thread: a coordinator, peerds, trainers, a network, and faults.
//
// Simulation is the machinery. Its caller adds peers and trainers, and makes things happen at
// chosen times. RunSeed() draws peers, trainers and faults from a seed, and runs until the run is
// over. It ends the process if a checker finds something wrong.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/checker.h"
#include "tests/sim/hosts.h"
#include "tests/sim/model_transport.h"
#include "tests/sim/planted.h"
#include "tests/sim/story.h"
#include "tests/sim/trainer.h"
#include "tests/sim/world.h"

namespace longhaul::sim {

struct SimulationOptions {
  uint64_t seed = 1;
  uint32_t detect_ms = 1500;
  World::Latency latency;
  int64_t persist_us = 0;
  int lanes = 2;
  double zero_copy = 0.5;
  int64_t segment_us = 200;
  Planted planted = Planted::kNone;
  Story::Mode mode = Story::Mode::kQuiet;
  double flips = 0;  // share of the segments of states that arrive with a flipped bit
  TransportModel::Far far = TransportModel::Far::kNone;
  int64_t transfer_us = 0;        // time that a peer needs to send a whole state; 0: no limit
  int64_t hash_us = 0;            // maximal time of hashing a chunk
  bool keeps = false;             // peers keep states (--keep-state)
  uint32_t ring_interval_ms = 0;  // 0: no link is measured, no ring is reordered
  bool sign_ops = false;          // peers sign their READYs from the beginning
  bool scripted = false;          // nothing is random: see World
};

class Simulation final : private Switchboard {
 public:
  explicit Simulation(const SimulationOptions& options);
  ~Simulation() override;

  Tick now() const { return world_.now(); }
  World& world() { return world_; }
  Story& story() { return story_; }
  Checker& checker() { return checker_; }
  const Context& context() const { return context_; }
  CoordinatorHost& coordinator() { return *coordinator_; }

  PeerHost* AddPeer();
  Trainer* AddTrainer(PeerHost* peer, TrainerPlan plan, Tick start);
  const std::vector<std::unique_ptr<PeerHost>>& peers() const { return peers_; }
  const std::vector<std::unique_ptr<Trainer>>& trainers() const { return trainers_; }

  // ---- faults; a fault that lasts ends by itself
  void StopCoordinator(int64_t down_us, bool resets);
  void FreezeCoordinator(int64_t us);
  void FreezePeer(PeerHost* peer, int64_t us);
  // Loses lanes of the link between two peers. The transport replaces the lanes, so the layers
  // above it may notice a delay and nothing else.
  void LoseLanes(PeerHost* a, PeerId b);
  // Breaks the link between two peers.
  void ResetLink(PeerHost* a, PeerId b);
  // For `us`, nothing gets from `from` to `to`; index 0 is the coordinator.
  void Block(int from, int to, int64_t us);
  // For `us`, nobody gets a new connection to the peer.
  void ClosePort(PeerHost* peer, ModelTransport::Port port, int64_t us);
  // Calls `what` at the nth of these moments from now on, at whatever peer. Its argument is that
  // peer (nullptr: the moment belongs to no peer).
  void Trigger(Moment moment, int nth, std::function<void(PeerHost*)> what);

  // Runs until `done` holds, and at most until `limit`. Returns false if `done` does not hold then.
  // Calls `done` after each event in a scripted run, otherwise once a millisecond.
  bool RunUntil(Tick limit, const std::function<bool()>& done);
  // From `since` on, every request of a trainer must be answered within `bound_us`.
  void ExpectAnswers(Tick since, int64_t bound_us);
  bool finished() const;
  std::string Describe() const;

 private:
  struct Waiting {
    Moment moment;
    int left;
    std::function<void(PeerHost*)> what;
  };

  ModelTransport* Find(PeerId peer) override;
  void OnProtocolError(const std::string& text) override;
  void OnTunnel(PeerId from, PeerId to, PeerId relay) override;
  void OnFrame(PeerId from, PeerId to, const FrameHeader& header) override;
  void OnMoment(Moment moment, PeerId peer);
  void CheckAnswers();

  const SimulationOptions options_;
  World world_;
  Story story_;
  Checker checker_;
  Context context_;
  std::unique_ptr<CoordinatorHost> coordinator_;
  std::vector<std::unique_ptr<PeerHost>> peers_;
  std::map<PeerId, PeerHost*> by_id_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
  std::map<uint32_t, uint32_t> slots_;  // by group: the next trainer's number in the group
  std::vector<Waiting> waiting_;
  Tick answers_since_ = kNever;
  int64_t answers_bound_us_ = 0;
};

struct SeedResult {
  uint64_t digest = 0;
  uint64_t events = 0;
  Tick end;
  Checker::Counts counts;
};

// Runs one seed. Does not return if a checker fails.
SeedResult RunSeed(uint64_t seed, Planted planted, Story::Mode mode);

}  // namespace longhaul::sim
