// A scripted trainer: joins, passes steps, reduces tensors, leaves or dies.
//
// All trainers of a group run the same program: in step S they post the ops of S, each in an order
// of its own and at a pace of its own, some in place and some not, some awaited one step later. An
// op that is aborted is posted again. A trainer that is removed may join again as a new member.
//
// One that dies may be started again, with the memory of a new process.
//
// In some runs they have a state: a step changes it, alike at all members unless one diverges, and
// most steps begin with a sync, of newcomers as well. One that is aborted is tried again, by all;
// who is refused goes on as it is. Some join in the background; of those, some take their state as
// soon as they can, and go on from it as the others do.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/prng.h"
#include "tests/sim/checker.h"
#include "tests/sim/hosts.h"
#include "tests/sim/state_memory.h"
#include "tests/sim/tensors.h"

namespace longhaul::sim {

// Who brings what to the syncs of a run.
enum class Syncs {
  kNone,
  kPopular,
  kSendReceive,  // some only send, the others only receive
};

struct TrainerPlan {
  uint32_t group = 0;
  uint64_t steps = 10;            // leaves after so many
  Tick leave_after = kNever;      // or at the first boundary after this
  int64_t think_us = Millis(20);  // at most, between two things
  int ops_max = 4;                // a step
  bool rejoin = false;            // after being removed
  int64_t dawdle_us = 0;          // now and then, between its last op and the boundary
  Terms terms;
  Syncs syncs = Syncs::kNone;
  bool odd = false;  // declares other tensors than the others
};

class Trainer final : public TrainerSide {
 public:
  // `slots` counts the slots of the group that are taken.
  Trainer(const Context& context, uint64_t seed, int index, PeerHost* peer, TrainerPlan plan,
          uint32_t* slots);

  // Trainers of one cohort. When one of them has ended, those that still wait to be admitted with
  // it are ended, as a launcher does.
  void SetFellows(std::vector<Trainer*> fellows) { fellows_ = std::move(fellows); }
  void Start();
  void Die();
  // It does nothing of its own accord for so long.
  void Pause(int64_t us);

  bool finished() const { return state_ == State::kFinished; }
  bool joining() const { return state_ == State::kJoining; }
  bool member() const { return state_ == State::kInside; }
  MemberId id() const { return world_seen_.member; }
  PeerHost* peer() const { return peer_; }
  uint32_t group() const { return plan_.group; }
  uint64_t ops_ok() const { return ops_ok_; }
  // The oldest request that is not answered: since when, and which.
  struct Waiting {
    Tick since;
    std::string what;
  };
  std::optional<Waiting> waiting() const;

  void OnJoinDone(const Outcome& outcome, const peerd::World& world) override;
  void OnStepDone(const Outcome& outcome, const peerd::World& world) override;
  void OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo& info) override;
  void OnTakeDone(const Outcome& outcome, const peerd::StateSyncInfo& info) override;
  void OnLeaveDone(const Outcome& outcome) override;
  void OnPostDone(uint64_t call, const Outcome& outcome, const peerd::OpInfo& info) override;
  void OnWorldChanged(const peerd::World& world) override;
  void OnMemberGone(const Outcome& outcome) override;
  void OnPeerGone() override;

 private:
  enum class State { kIdle, kJoining, kInside, kLeaving, kFinished };
  // Memory that the peer may read and write, with a fence around it.
  class Buffer;
  struct Posted {
    OpName name;
    OpDesc desc;
    Tick since;
    std::shared_ptr<Buffer> source;
    std::shared_ptr<Buffer> target;  // the same as source: in place
  };
  // The ops of one tag in one step, one after the other.
  struct Strand {
    uint64_t step = 0;
    uint64_t tag = 0;
    uint32_t turns = 1;
    uint32_t turn = 0;
    bool late = false;  // awaited one step later
  };

  void Join();
  void BeginStep();
  void PostNext(size_t strand);
  void StrandDone(const OpName& name);
  // Whether those who take part in an op that was aborted leave it at that, or start it again: the
  // same at all of them.
  bool GivesUp(const OpName& name) const;
  void MaybeEndStep();
  void EndStep();
  void ReachBoundary();
  // Whether the step begins with a sync.
  bool SyncsAt(uint64_t step) const;
  peerd::StateSync MakeOffer(uint64_t step);
  void Sync();
  void TakeState();
  void CheckState();
  void Finish(const std::string& how);
  void GiveUpJoin();
  void JoinAgain(int64_t within_us);
  void NewTensors();
  void After(int64_t low_us, int64_t high_us, std::function<void()> what);
  std::vector<Strand> StrandsOf(uint64_t step) const;
  void Say(const std::string& text);
  void CheckGraves();

  const Context context_;
  const uint64_t seed_;
  const std::string name_;
  PeerHost* const peer_;
  const TrainerPlan plan_;
  uint32_t* const slots_;
  std::vector<Trainer*> fellows_;
  Prng prng_;

  State state_ = State::kIdle;
  uint64_t life_ = 0;  // rises with each membership
  peerd::LocalId local_;
  uint32_t slot_ = 0;
  peerd::World world_seen_;
  uint64_t step_ = 0;
  uint64_t steps_done_ = 0;
  bool working_ = false;  // between the beginning of a step's ops and its end
  std::optional<Tick> join_since_, step_since_, sync_since_, take_since_, leave_since_;
  Tick paused_until_;
  uint64_t next_call_ = 1;
  uint64_t ops_ok_ = 0;
  std::vector<Strand> strands_;
  std::map<uint64_t, Posted> posted_;  // by call
  std::vector<std::shared_ptr<Buffer>> graves_;

  // Its tensors.
  Prng state_prng_;
  std::unique_ptr<StateMemory> tensors_;
  std::vector<std::unique_ptr<StateMemory>> lost_;  // of processes that died; peers may use it
  Hash128 root_;                                    // of what they hold
  control::SyncStrategy strategy_ = control::SyncStrategy::kPopular;  // of the open sync
  uint64_t revision_ = 0;                                             // to be offered
  bool in_step_ = false;                                              // the open sync is a step's
  bool again_ = false;                                                // the last sync was aborted
  bool changed_ = true;            // since the last sync that ended well
  bool held_ = false;              // the peer fetches, in the background
  uint64_t background_steps_ = 0;  // passed without counting
  uint64_t refusals_ = 0;          // of its state, one after another
};

}  // namespace longhaul::sim
