// What must hold in every run, checked as it goes.
//
// Safety: one outcome per op, equal bits that are exactly the reduction over one set of members;
// inputs intact unless the op succeeded; the members of an epoch are the same wherever the epoch is
// seen; epochs never go back and their numbers are not used twice; nothing leaves the coordinator
// that its store does not hold; fates agree with each other and with outcomes; each request is
// answered exactly once. After a sync that is committed a member has the state that the store
// holds, revisions never fall, who only sends keeps every bit, and a sync that fails leaves every
// member's tensors as they were. Liveness: when the faults have stopped, every request is answered
// in time.
//
// A violation ends the process with a text; see Fail().
#pragma once

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

// What a member asks for with its join.
struct Terms {
  std::string cohort;
  uint32_t cohort_size = 0;
  uint32_t step_deadline_ms = 0;
  bool background = false;
};

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
  void OnLocalJoin(const Local& local, uint32_t group, uint32_t slot, const Terms& terms = {});
  // The step that the member begins with: known once its admission is on its way.
  uint64_t FirstStep(uint32_t group, MemberId member) const;
  // The member has passed a boundary and stands in `step`.
  void OnStep(uint32_t group, MemberId member, uint64_t step);
  // What a trainer is told of its world.
  void OnWorld(const Local& local, const GroupKey& group, const peerd::World& world);
  // What a peer knows of its epoch.
  void OnMembers(const Local& local, const GroupKey& group,
                 const peerd::PeerCore::MembersView& view);

  // ---- coordinator

  // A message leaves the coordinator for a peer; `durable` is what its store holds.
  void OnSend(PeerId to, const control::CoordinatorMessage& message,
              const coordinator::Records& durable);
  // The store holds this from now on, and has forgotten plans (store_back.h).
  void OnStoreWentBack(const coordinator::Records& durable);
  // A peer tells which groups it knows.
  void OnHello(PeerId from, const control::Hello& hello);
  // It arrives.
  void OnArrival(PeerId at, const control::CoordinatorMessage& message);

  // ---- syncs

  // The store changes.
  void OnStored(const coordinator::GroupRecord& before, const coordinator::GroupRecord& after);
  // The answer to a trainer whose tensors were `begun` when it asked and are `now`.
  void OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo& info,
                  control::SyncStrategy strategy, const Hash128& begun, const Hash128& now);
  // The same of a take that ended well.
  void OnTaken(const peerd::StateSyncInfo& info, const Hash128& now);

  // ---- ops

  void OnAnnounced(PeerId peer, const GroupKey& group, OpOrdinal ordinal, const OpName& name);
  // The same, unless the ordinal is known.
  void OnReported(PeerId peer, const GroupKey& group, OpOrdinal ordinal, const OpName& name) {
    announced_.emplace(std::tuple(peer, group.group, ordinal), name);
  }
  struct Ended {
    OpName name;
    OpDesc desc;
    uint32_t slot = 0;
    bool in_place = false;
    const std::vector<uint8_t>* source = nullptr;
    const std::vector<uint8_t>* target = nullptr;
  };
  void OnPosted(const OpName& name, uint32_t slot);
  // The op was aborted, and nobody is to start it again: it never succeeds.
  void OnGivenUp(const OpName& name);
  // A frame goes by way of a third peer.
  void OnTunnel() { ++counts_.tunnels; }

  // ---- faults

  // The harness did something to the peer, its links or its stream.
  void OnDisturbed(PeerId peer) { disturbed_.insert(peer); }
  // To the coordinator, or to what everybody depends on.
  void OnAllDisturbed() { all_disturbed_ = true; }
  // A member was evicted or its trainer died: its ops may have to be redone.
  void OnMemberLost() { member_lost_ = true; }
  void OnEnded(const Ended& op, const Outcome& outcome, const peerd::OpInfo& info);

  // How many ops ended how, and how often they were redone.
  struct Counts {
    uint64_t ok = 0;
    uint64_t by_mesh = 0;  // of those that are ok
    uint64_t by_ring = 0;
    uint64_t aborted = 0;
    uint64_t refused = 0;
    uint64_t too_few = 0;
    uint64_t removed = 0;
    uint64_t retries = 0;
    uint64_t epochs = 0;
    uint64_t freezes = 0;
    uint64_t committed_by_fate = 0;
    uint64_t tunnels = 0;  // links through a third peer
    uint64_t cohorts = 0;  // admitted
    uint64_t late = 0;     // members that were removed for it
    uint64_t syncs_ok = 0;
    uint64_t syncs_aborted = 0;
    uint64_t syncs_refused = 0;
    uint64_t syncs_fetched = 0;  // brought something
    uint64_t syncs_resumed = 0;  // from what a peer had kept
    uint64_t background = 0;     // members that came out of the background after they had joined
    uint64_t taken = 0;          // states that came in the background
    uint64_t rings = 0;          // ordered anew
  };
  const Counts& counts() const { return counts_; }
  void OnRingOrdered() { ++counts_.rings; }

 private:
  struct Member {
    std::optional<Local> local;
    std::optional<uint64_t> first_step;
    std::optional<uint64_t> contributes_step;  // from which on it contributes
    uint64_t step = 0;
  };
  struct Op {
    std::map<uint32_t, bool> posted;  // by slot
    std::optional<std::vector<uint8_t>> result;
    // Participants' epochs: an op that was aborted is posted again under the same name, and meets
    // those who had not announced it before. Each such op has one.
    Epoch result_epoch;
    bool at_once = false;                    // told before all are known to have it
    Algorithm algorithm = Algorithm::kAuto;  // of the result
    std::set<Epoch> aborted;
    std::vector<uint32_t> participants;
    std::set<uint32_t> holders;  // slots that have the result
    bool refused = false;
    bool given_up = false;
  };
  struct FateKey {
    uint32_t group;
    Epoch epoch;
    OpName name;
    friend auto operator<=>(const FateKey&, const FateKey&) = default;
  };

  void OnPrepare(PeerId to, const control::PrepareEpoch& prepare,
                 const coordinator::Records& durable);
  static void OnSyncResult(const control::SyncResult& result, const coordinator::Records& durable);
  void OnCommit(PeerId to, const control::CommitEpoch& commit, const coordinator::Records& durable);
  void Admit(const control::PrepareEpoch& prepare);
  void CheckFreeze(const control::PrepareEpoch& prepare) const;
  void OnDepartures(const coordinator::GroupRecord& group);
  void CheckTerms(const Local& local, const coordinator::MemberRecord& member) const;
  void CheckCohorts(const coordinator::Records& durable);
  void CheckFates(Epoch epoch, uint32_t group, const coordinator::FatesRecord& record);
  void AdmitCohorts(const control::PrepareEpoch& prepare, const coordinator::GroupRecord& group);
  bool RedoneForALeaver(const OpName& name) const;
  // `contributing`: those whose input is in the result.
  std::vector<uint32_t> Participants(const OpName& name, Epoch epoch, bool contributing) const;
  // The slots whose tensors make up the result of the op in `epoch`.
  std::vector<uint32_t> Givers(const Ended& op, Epoch epoch) const;
  void CheckSucceeded(const Ended& op, const peerd::OpInfo& info);
  // The op has another result in another epoch: a small one may, if nobody who has the older one
  // takes part in the newer epoch.
  bool Outlived(const Ended& op, const Op& known, Epoch epoch) const;

  const uint64_t seed_;
  std::map<Local, uint32_t> slots_;
  std::map<Local, Terms> terms_;
  std::set<std::pair<PeerId, std::string>> cohorts_;                   // admitted in some group
  std::map<std::pair<PeerId, std::string>, uint64_t> cohort_ballots_;  // that admitted them
  std::set<std::pair<uint32_t, MemberId>> departed_;
  std::map<std::pair<uint32_t, MemberId>, Member> members_;
  std::map<std::pair<uint32_t, Epoch>, control::PrepareEpoch> epochs_;
  // The newest that arrived, by peer and group: epoch and preparation.
  std::map<std::pair<PeerId, uint32_t>, std::pair<Epoch, uint64_t>> prepared_at_;
  std::set<std::pair<uint32_t, Epoch>> committed_;
  std::map<uint32_t, uint64_t> last_step_;  // highest of the group
  std::map<Local, Epoch> last_epoch_;
  std::map<std::tuple<PeerId, uint32_t, OpOrdinal>, OpName> announced_;
  std::map<OpName, Op> ops_;
  std::map<FateKey, control::Fate> fates_;
  std::set<PeerId> disturbed_;
  bool all_disturbed_ = false;
  bool member_lost_ = false;
  Counts counts_;
};

}  // namespace longhaul::sim
