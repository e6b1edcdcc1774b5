// A scripted trainer: joins, passes steps, reduces tensors, leaves or dies.
//
// All trainers of a group run the same program. In step S they post the ops of S, each in its own
// order and at its own pace. Some ops are in place, some are not, and some are awaited one step
// later. An op that is aborted is posted again. A trainer that is removed may join again as a new
// member. A trainer that dies may be started again, with the memory of a new process.
//
// In some runs the trainers have a shared state. A step changes it in the same way at all members,
// unless a member diverges. Most steps begin with a sync, also those of newcomers. All participants
// of an aborted sync try it again. A trainer whose state is refused goes on without that sync. Some
// trainers join in the background. Some of these take the state as soon as they can, and then train
// on from that state.
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

// Which strategies the members use in the syncs of a run.
enum class Syncs {
  kNone,
  kPopular,
  kSendReceive,  // some members only send, the others only receive
};

struct TrainerPlan {
  uint32_t group = 0;
  uint64_t steps = 10;            // the trainer leaves after this many steps
  Tick leave_after = kNever;      // the trainer leaves at the first boundary after this time
  int64_t think_us = Millis(20);  // maximal pause between two actions
  int ops_max = 4;                // maximal number of ops in a step
  bool rejoin = false;            // joins again after it was removed
  int64_t dawdle_us = 0;          // maximal delay before some boundaries
  bool cancels = false;           // cancels some of its ops
  // In all plans of a run: some ops are cancelled by all members that start them, and some members
  // never start them.
  bool ends_early = false;
  // In all plans of a run: some calls of some ops are refused to their trainers.
  bool refuses = false;
  control::JoinWish terms;
  Syncs syncs = Syncs::kNone;
  bool odd = false;  // declares other tensors than its group
};

class Trainer final : public TrainerSide {
 public:
  // A slot is the number of a trainer in its group; the ops' inputs depend on it. `slots` is the
  // next free one.
  Trainer(const Context& context, uint64_t seed, int index, PeerHost* peer, TrainerPlan plan,
          uint32_t* slots);

  // The other trainers of its cohort. When one of them has ended, the trainers that still wait
  // for their admission are ended too, as a launcher would do.
  void SetFellows(std::vector<Trainer*> fellows) { fellows_ = std::move(fellows); }
  // In its first life the trainer joins with this number of members (control::Join::members).
  void WaitForMembers(uint32_t members) { waits_for_ = members; }
  void Start();
  void Die();
  // For `us`, the trainer starts nothing new.
  void Pause(int64_t us);

  bool finished() const { return state_ == State::kFinished; }
  bool joining() const { return state_ == State::kJoining; }
  bool member() const { return state_ == State::kInside; }
  MemberId id() const { return world_seen_.member; }
  PeerHost* peer() const { return peer_; }
  uint32_t group() const { return plan_.group; }
  uint64_t ops_ok() const { return ops_ok_; }
  // The oldest request without an answer.
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
    bool is_root = false;
    Tick since;
    std::shared_ptr<Buffer> source;
    std::shared_ptr<Buffer> target;  // in place: the same as source
    std::shared_ptr<Buffer> error;   // null: it keeps none
  };
  // The ops of one tag in one step, which follow one another.
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
  std::vector<MemberId> PartOf(OpName* name, bool split) const;
  void StrandDone(const OpName& name);
  // Returns true if the participants of an aborted op give the op up, and false if they start it
  // again. All participants get the same answer.
  bool GivesUp(const OpName& name) const;
  bool EndsEarly(const OpName& name) const;
  bool MayBeRefused(const OpName& name) const;
  bool IsLastOfStrand(const OpName& name) const;
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
  bool working_ = false;  // from the beginning of a step's ops to the end of the step
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
  std::vector<std::unique_ptr<StateMemory>> lost_;  // of dead processes; peers may use them
  Hash128 root_;                                    // of the tensors
  control::SyncStrategy strategy_ = control::SyncStrategy::kPopular;  // of the open sync
  uint64_t revision_ = 0;                                             // the next offer's
  bool in_step_ = false;           // the open sync belongs to a step
  bool again_ = false;             // the last sync was aborted
  bool changed_ = true;            // trained since the last sync that ended well
  uint32_t waits_for_ = 0;         // see WaitForMembers()
  bool held_ = false;              // in the background: the peer holds the state
  uint64_t background_steps_ = 0;  // boundaries passed in the background
  uint64_t refusals_ = 0;          // refusals of its state in a row
};

}  // namespace longhaul::sim
