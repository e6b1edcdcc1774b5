// The properties that must hold in every simulated run. They are checked during the run.
//
// Safety of ops and epochs:
// - An op has one outcome in an epoch. Its results are equal bits: exactly the reduction over one
//   set of members.
// - Inputs and errors, and the targets of a reduce-scatter, are intact unless the op succeeded.
//   Afterwards an error is what encoding lost.
// - An op that is redone sends the same encoded bytes of its inputs.
// - The members of an epoch are the same wherever the epoch is seen. Epochs never go back, and
//   their numbers are not used twice.
// - The coordinator sends nothing that its store does not hold.
// - Fates agree with each other and with outcomes.
// - All members that pass a step boundary are told the same epoch of it, its size, and their ranks
//   in it.
// - Each request is answered exactly once.
//
// Safety of states: after a committed sync a member has the state that the store holds. Revisions
// never fall. A member that only sends keeps every bit. A sync that fails leaves every member's
// tensors as they were.
//
// Liveness: when the faults have stopped, every request is answered in time.
//
// A violation ends the process with a text (see Fail()).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/records.h"
#include "peerd/core/actions.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/values.h"
#include "peerd/state/local_state.h"
#include "proto/control/messages.h"
#include "tests/sim/tensors.h"

namespace longhaul::sim {

// Peers' names and reasons end with this text: it tries to be a field of the log.
inline constexpr char kForeignText[] = " \"forged=1 forged=2";

class Checker {
 public:
  explicit Checker(uint64_t seed) : seed_(seed) {}

  [[noreturn]] static void Fail(const std::string& text);

  // ---- members

  struct Local {
    PeerId peer;
    peerd::LocalId local;
    friend auto operator<=>(const Local&, const Local&) = default;
  };
  void OnLocalJoin(const Local& local, uint32_t group, uint32_t slot,
                   const control::JoinWish& terms = {});
  // Returns the step with which the member begins. It is known as soon as its admission is sent.
  uint64_t FirstStep(uint32_t group, MemberId member) const;
  // A member was admitted. It was told whether other members were in the group before.
  void OnAdmitted(uint32_t group, const peerd::World& world, bool newcomer) const;
  // The member has passed a boundary and is now in `step`. It was told of this world.
  void OnStep(uint32_t group, uint64_t step, const peerd::World& world);
  // A trainer is told of its world.
  void OnWorld(const Local& local, const GroupKey& group, const peerd::World& world);
  // A peer's list of the members of its epoch.
  // A line of the log has no field that a foreign text has brought.
  static void OnLogLine(const std::string& line);
  void OnMembers(const Local& local, const GroupKey& group,
                 const peerd::PeerCore::MembersView& view);

  // ---- coordinator

  // A message leaves the coordinator for a peer. `durable` is what the store holds.
  void OnSend(PeerId to, const control::CoordinatorMessage& message,
              const coordinator::Records& durable);
  // The store has lost its last writes, and holds this from now on (store_back.h).
  void OnStoreWentBack(const coordinator::Records& durable);
  // A peer says which groups it knows.
  void OnHello(PeerId from, const control::Hello& hello);
  // The message arrives at the peer.
  void OnArrival(PeerId at, const control::CoordinatorMessage& message);

  // ---- syncs

  // A write changes a group in the store.
  void OnStored(const coordinator::GroupRecord& before, const coordinator::GroupRecord& after);
  // A sync is answered. The trainer's tensors had the root `begun` when it asked, and have `now`.
  void OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo& info,
                  control::SyncStrategy strategy, const Hash128& begun, const Hash128& now);
  // The same for a take() that ended well.
  void OnTaken(const peerd::StateSyncInfo& info, const Hash128& now);

  // ---- ops

  void OnAnnounced(PeerId peer, const GroupKey& group, OpOrdinal ordinal, const OpPost& post);
  // The peer reports an op of this group. If the post belongs to it, and if the peer has announced
  // the op to nobody, the op is known from now on.
  void OnReported(PeerId peer, const GroupKey& group, const control::OpReport& report,
                  const OpPost& post);
  // What a target apart from its source is filled with before the op.
  static constexpr uint8_t kFresh = 0x77;
  struct Ended {
    OpName name;
    OpDesc desc;
    uint32_t slot = 0;
    bool in_place = false;
    bool is_root = false;  // as far as the trainer knew
    const std::vector<uint8_t>* source = nullptr;
    const std::vector<uint8_t>* target = nullptr;
    const std::vector<uint8_t>* error = nullptr;  // empty: it keeps none
  };
  // `world`: the size of the world that the trainer knows. `is_root`: the member in `slot` is the
  // root, or it sends.
  OpPost OnPosted(const OpName& name, uint32_t slot, uint32_t world, bool is_root);
  // The members of the group in a step, for ops of a part of the group: those of the epoch in which
  // the first trainer asked. All trainers get the same list.
  const std::vector<MemberId>& StepMembers(uint32_t group, uint64_t step, Epoch epoch);
  // The op is one of these members only.
  void OnPart(const OpName& name, const std::vector<MemberId>& members);
  // The call of the member in `slot` was refused to it, with the reason kReason. So the op may not
  // end well with this member, and nobody may wait for it.
  void OnRefused(const OpName& name, uint32_t slot) { ops_[name].refusers.insert(slot); }
  void OnRefusalAnnounced(PeerId peer, const GroupKey& group, OpOrdinal ordinal) {
    refusals_.insert({peer, group.group, ordinal});
  }
  static constexpr char kReason[] = "it does not fit";
  // A member cancels the op.
  void OnCancelled(const OpName& name);
  // The op was aborted in `epoch`, and nobody starts it again. So it may never succeed. (A small op
  // may succeed at members that are out of the group in that epoch.)
  void OnGivenUp(const OpName& name, Epoch epoch);
  // A link through a relay is up.
  void OnTunnel() { ++counts_.tunnels; }

  // ---- faults

  // The harness did something to this peer, its links or its stream.
  void OnDisturbed(PeerId peer) { disturbed_.insert(peer); }
  // Some peer lies: it may break the protocol.
  void OnLiar(PeerId peer) {
    OnDisturbed(peer);
    liars_ = true;
  }
  bool liars() const { return liars_; }
  // The harness did something to the coordinator, or to what everybody depends on.
  void OnAllDisturbed() { all_disturbed_ = true; }
  // A member was evicted or its trainer died, so its ops may be redone.
  void OnMemberLost() { member_lost_ = true; }
  void OnEnded(const Ended& op, const Outcome& outcome, const peerd::OpInfo& info);

  // How many ops had which outcome, and what else happened in the run.
  struct Counts {
    uint64_t ok = 0;
    uint64_t by_mesh = 0;  // how many of `ok` used the mesh
    uint64_t by_ring = 0;
    uint64_t with_shares = 0;  // attempts over the mesh with unequal shares
    uint64_t with_none = 0;    // of these, with a peer that owns nothing
    uint64_t other_kinds = 0;  // how many of `ok` were no all-reduce
    uint64_t of_parts = 0;     // how many of `ok` were of a part of the group
    uint64_t encoded = 0;      // how many of `ok` were encoded
    uint64_t chosen = 0;       // of these, with a codec that the core chose
    uint64_t not_chosen = 0;   // how many of `ok` were not, because the core chose none
    uint64_t with_errors = 0;  // of these, with an error
    uint64_t sent_again = 0;   // encoded blocks that another attempt had sent before
    uint64_t cancelled = 0;    // how many of `aborted` were cancelled
    uint64_t aborted = 0;
    uint64_t unfit = 0;  // how many of `aborted` did not fit their world
    uint64_t refused = 0;
    uint64_t refused_to_another = 0;  // how many of `refused` were refused to another member
    uint64_t too_few = 0;
    uint64_t removed = 0;
    uint64_t retries = 0;
    uint64_t epochs = 0;
    uint64_t freezes = 0;
    uint64_t committed_by_fate = 0;
    uint64_t tunnels = 0;  // links through a relay
    uint64_t cohorts = 0;  // cohorts that were admitted
    uint64_t late = 0;     // members that were removed as late
    uint64_t syncs_ok = 0;
    uint64_t syncs_aborted = 0;
    uint64_t syncs_refused = 0;
    uint64_t syncs_fetched = 0;  // syncs that brought bytes
    uint64_t syncs_resumed = 0;  // syncs that used chunks that a peer had kept
    uint64_t background = 0;     // members that came out of the background
    uint64_t assemblies = 0;     // first epochs of members that waited for each other
    uint64_t taken = 0;          // states that were taken in the background
    uint64_t rings = 0;          // rings that got a better order
  };
  const Counts& counts() const { return counts_; }
  void OnRingOrdered() { ++counts_.rings; }
  // An attempt sends an encoded block that an older attempt at the op has sent.
  void OnSentAgain() { ++counts_.sent_again; }
  // A peer started an attempt with these shares.
  void OnShares(const Shares& shares) {
    if (shares.empty()) return;
    ++counts_.with_shares;
    if (std::find(shares.begin(), shares.end(), 0u) != shares.end()) ++counts_.with_none;
  }

 private:
  struct Member {
    std::optional<Local> local;
    std::optional<uint64_t> first_step;
    std::optional<uint64_t> contributes_step;  // first step with its input
    uint64_t step = 0;
    bool newcomer = false;  // its admission found members in the group
  };
  struct Op {
    // By slot: how often it was posted. It is posted again by all after all have seen it aborted.
    std::map<uint32_t, uint32_t> posted;
    std::set<uint32_t> roots;   // slots that were the root when they posted it
    std::set<uint32_t> worlds;  // of the trainers when they posted it
    std::optional<std::vector<uint8_t>> result;
    // The epoch of the result. An aborted op is posted again under the same name, and meets members
    // that had not announced it before. So one name may have several outcomes, each in another
    // epoch.
    Epoch result_epoch;
    bool at_once = false;                    // answered before all are known to have it
    Algorithm algorithm = Algorithm::kAuto;  // of the result
    Quantization codec = Quantization::kNone;
    std::set<Epoch> aborted;
    // The posts (see `posted`) that were aborted because of their world, and in which epoch.
    std::map<uint32_t, Epoch> unfit;
    std::vector<uint32_t> participants;
    std::set<uint32_t> holders;  // slots that have the result
    bool refused = false;
    std::set<uint32_t> refusers;    // slots; see OnRefused()
    std::optional<Epoch> given_up;  // set: the epoch in which it was aborted for good
    bool cancelled = false;
    std::vector<MemberId> part;  // the members that it is for; empty: all
  };
  struct FateKey {
    uint32_t group;
    Epoch epoch;
    OpPost op;
    friend auto operator<=>(const FateKey&, const FateKey&) = default;
  };

  void OnPrepare(PeerId to, const control::PrepareEpoch& prepare,
                 const coordinator::Records& durable);
  void OnSyncResult(const control::SyncResult& result, const coordinator::Records& durable);
  void OnCommit(PeerId to, const control::CommitEpoch& commit, const coordinator::Records& durable);
  void Admit(const control::PrepareEpoch& prepare);
  void CheckFreeze(const control::PrepareEpoch& prepare) const;
  void OnDepartures(const coordinator::GroupRecord& group);
  void CheckAssembly(const control::PrepareEpoch& prepare, const coordinator::GroupRecord& group);
  void CheckTerms(const Local& local, const coordinator::MemberRecord& member) const;
  void CheckCohorts(const coordinator::Records& durable);
  void CheckFates(Epoch epoch, uint32_t group, const coordinator::FatesRecord& record);
  void AdmitCohorts(const control::PrepareEpoch& prepare, const coordinator::GroupRecord& group);
  bool RedoneForALeaver(const OpName& name, const Op& known) const;
  // The participants in rank order. `contributing`: as for Participants().
  std::vector<MemberId> Members(const OpName& name, Epoch epoch, bool contributing) const;
  // Slots of the participants. `contributing`: only those whose input is in the result.
  std::vector<uint32_t> Participants(const OpName& name, Epoch epoch, bool contributing) const;
  // The slots whose tensors make up the result of the op in `epoch`.
  std::vector<uint32_t> Givers(const Ended& op, Epoch epoch) const;
  void CheckSucceeded(const Ended& op, const peerd::OpInfo& info);
  // Whether the op may end as aborted because of the members that take part.
  bool Unfit(const Ended& op, const Op& known, Epoch epoch) const;
  // The whole that must have come of the op, as far as this member can tell: its own result is part
  // of it. Empty: its result is wrong.
  std::optional<std::vector<uint8_t>> WholeOf(const Ended& op, const std::vector<uint32_t>& all,
                                              const std::vector<uint32_t>& givers,
                                              bool encoded) const;
  // As WholeOf(), of an op that encodes and whose result need not be exact.
  std::optional<std::vector<uint8_t>> RoughWholeOf(const Ended& op,
                                                   const std::vector<uint32_t>& all,
                                                   const std::vector<uint32_t>& givers) const;
  void CheckError(const Ended& op, const std::vector<uint32_t>& givers) const;
  static void CheckCodec(const Ended& op, const peerd::OpInfo& info);
  // Whether the op may have another result in `epoch`. A small op may have one if no member with
  // the older result takes part in the newer epoch.
  bool Outlived(const Ended& op, const Op& known, Epoch epoch) const;
  // Whether none of these slots takes part in the op in `epoch`.
  bool AllGone(const OpName& name, const std::set<uint32_t>& slots, Epoch epoch) const;

  const uint64_t seed_;
  std::map<Local, uint32_t> slots_;
  std::map<Local, control::JoinWish> terms_;
  std::set<std::pair<PeerId, std::string>> cohorts_;                   // admitted in some group
  std::map<std::pair<PeerId, std::string>, uint64_t> cohort_ballots_;  // that admitted them
  std::set<std::pair<uint32_t, MemberId>> departed_;
  std::map<std::pair<uint32_t, MemberId>, Member> members_;
  std::map<std::pair<uint32_t, Epoch>, control::PrepareEpoch> epochs_;
  // The newest preparation that arrived, by peer and group: its epoch and its id.
  std::map<std::pair<PeerId, uint32_t>, std::pair<Epoch, uint64_t>> prepared_at_;
  std::set<std::pair<uint32_t, Epoch>> committed_;
  std::map<uint32_t, uint64_t> last_step_;  // highest step of the group
  std::map<Local, Epoch> last_epoch_;
  std::map<std::tuple<PeerId, uint32_t, OpOrdinal>, OpPost> announced_;
  std::map<OpName, Op> ops_;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<MemberId>> step_members_;
  std::map<std::pair<uint32_t, uint64_t>, Epoch> step_epochs_;  // by group and step
  std::set<std::tuple<PeerId, uint32_t, OpOrdinal>> refusals_;  // announced ones
  std::set<uint32_t> cancelled_in_;                             // groups
  // Who took part in the last commit of a group, and in the one before.
  struct Holders {
    uint64_t revision = 0;
    Hash128 state;
    std::set<MemberId> now;
    std::set<MemberId> before;
  };
  std::map<GroupKey, Holders> holders_;
  std::map<FateKey, control::Fate> fates_;
  std::set<PeerId> disturbed_;
  bool all_disturbed_ = false;
  bool went_back_ = false;  // the store has lost writes: some members may be a step ahead
  bool member_lost_ = false;
  bool liars_ = false;
  Counts counts_;
};

}  // namespace longhaul::sim
