// A small run as a value, for exhaustive search (explore.h): the production coordinator core, the
// production engines of the peers with their cores, and all that is in flight between them.
//
// Everything around the cores is reduced to what a core can notice:
// - Control messages (as the production conversion returns them) and frames are in one queue for
//   each direction.
// - Links and streams are up or down.
// - The result of an attempt is a sum, a state is a number, and a transfer is one move. An input
// that
//   travels alone (all-gather, broadcast) is added to nothing, so a sum tells this as well.
// - Trainers follow a script.
//
// Moves() lists all that can happen next, and Apply() does one of these moves. Nothing else
// decides, so a path of moves is a run. Time stands still while something else can happen, unless a
// fault says otherwise.
//
// Each move checks these properties, with Checker::Fail():
// - An op has one outcome: the n-th call of a name ends in the same way at all members. A result is
// that of the recorded participants. Inputs are intact unless
//   the op succeeded, and kinds other than all-reduce never write to them. An op ends Aborted only
//   because of on_fault, because it was cancelled, because it does not fit its participants, or
//   because a participant has passed a boundary without it. It is refused only if the call of a
//   participant was.
// - Segments come to a peer that has a place for them.
// - The members and the ring of an epoch are the same at all its peers. Epoch numbers are not used
//   twice.
// - Each call is answered once.
// - A commit is durable before anybody is told of it. Nobody is told that it failed.
// - Agreed states were brought by a trainer. A state does not change while others may ask for it.
// - The invariants of the cores hold, and no wait is endless.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "coordinator/core/coordinator_core.h"
#include "peerd/engine/engine.h"
#include "proto/control/messages.h"
#include "proto/wire/frame.h"
#include "tests/sim/cancel_forgotten.h"
#include "tests/sim/planted.h"

namespace longhaul::sim {

// One act of a trainer. Acts follow one another. A post or a cancel does not wait for earlier
// posts; all other acts do. A cancel is about the open post of its tag, if there is one. kWait does
// nothing but wait. kRefuse is a post that was refused to the trainer.
struct Act {
  enum class Kind : uint8_t { kJoin, kPost, kStep, kSync, kLeave, kCancel, kWait, kRefuse };
  Kind kind = Kind::kJoin;
  uint64_t tag = 0;
  Algorithm algorithm = Algorithm::kOneShot;  // ring and mesh move segments
  bool abort_on_fault = false;
  bool gives_up = false;  // an aborted op is not started again
  bool beside = false;    // posted by a thread beside the loop, so boundaries do not wait for it
  uint64_t state = 0;     // kSync, kStep: the state that the trainer brings; 0: none
  // What a post asks for. Members are named by their indices. An op in parts is laid out for the
  // members that the trainer sees when it posts.
  OpKind op = OpKind::kAllReduce;
  int root = -1;         // root; of a send-recv: the sender
  int receiver = -1;     // of a send-recv
  std::vector<int> set;  // the participants; empty: all
  uint64_t weight = 0;   // 0: the op has no weights
  bool unequal = false;  // parts have different lengths
};

struct ScriptedMember {
  int peer = 0;
  std::vector<Act> acts;
  size_t setup = 0;  // number of acts before the search begins
};

struct ExploreScenario {
  std::string name;
  int peers = 0;
  std::vector<ScriptedMember> members;
  int evicted = -1;       // index of the member that an operator evicts at some time
  bool measured = false;  // at some time links are measured: another ring is better
  // The store may lose its last write. Then each state exists once for each such write, so only
  // small scenarios have this fault.
  bool store_goes_back = false;
  // The path between two peers may break for ever.
  bool cuts = false;
  // The network between the coordinator and one peer, or all peers, may fail for a while.
  bool silences = false;
  // Number of attempts to reach the data port of the last peer that fail, because the port is
  // closed. A firewall that drops packets (`drops`) leaves an attempt without an answer until its
  // deadline. A firewall that refuses connections answers at once.
  int closed_attempts = 0;
  bool drops = false;
  bool signs = false;  // peers sign their READYs from the beginning
};

struct Move {
  enum class Kind : uint8_t {
    // The head of a queue arrives, at peer `a` or from peer `a`.
    kToPeer,
    kToCoordinator,
    kLateEnd,
    kControl,  // b -> a
    kData,     // b -> a
    kLocal,
    kTransfer,  // of member b at peer a: it is complete
    // A member, an operator or a process does its next act.
    kAct,  // member a
    kOperator,
    kMeasure,
    kRestart,
    kReconnect,       // peer a
    kReconnectFirst,  // the end of the old stream is noticed after the new stream
    kTime,            // nothing happens until the next deadline
    // Faults.
    kCrashPeer,
    kCrashPeerLost,  // what it had sent is lost
    kCrashPeerSilent,
    kKillTrainer,
    kBreakLink,
    kBreakLinkLost,
    kCutPair,  // nothing gets through any more, and neither end is told
    kBreakStream,
    kBreakStreamLost,
    kSilence,  // the coordinator and peer `a` do not hear each other for a while
    kIsolate,  // the same for all peers
    kCrashCoordinator,
    kCrashCoordinatorLost,
    kStoreGoesBack,  // the coordinator dies, and its store loses the last write
    kEarly,          // time passes although something else could happen
    kCount,
  };
  Kind kind = Kind::kTime;
  uint8_t a = 0;
  uint8_t b = 0;
  // If not 0, the receiver dies after this many of its actions for this move. At a peer, only the
  // actions that others can see count.
  uint8_t crash_after = 0;

  bool fault() const { return kind >= Kind::kCrashPeer || crash_after != 0; }
};

class ExploreState {
 public:
  static constexpr int kPeersMax = 3;

  ExploreState(const ExploreScenario* scenario, Planted planted);

  // Runs to the point where the search begins.
  void Setup();
  // Returns all moves that can happen next. An empty list means that every call is answered and
  // nothing is in flight.
  std::vector<Move> Moves(bool faults) const;
  // Returns false if the receiver has fewer actions than `crash_after`. The state is useless then.
  bool Apply(const Move& move);
  // `faults`: more faults may follow.
  uint64_t Digest(bool faults) const;

  std::string Text(const Move& move) const;
  // With a trace, each action is printed.
  void SetTrace(bool trace) { trace_ = trace; }
  uint64_t ops_ok() const { return ops_ok_; }
  uint64_t syncs_ok() const { return syncs_ok_; }

 private:
  struct End {};
  struct Opened {};
  struct Frame {
    FrameHeader header;
    std::string payload;
  };
  struct Data {
    OpOrdinal ordinal;
    Epoch attempt;
    uint64_t value = 0;
    bool finished = false;  // mesh: the sender's part of the result
  };
  struct Body {
    std::variant<End, Opened, Data, Frame, control::PeerMessage, control::CoordinatorMessage,
                 peerd::Event>
        what;
    uint64_t session = 0;  // of the stream, if sent to the coordinator
    uint64_t hash = 0;

    bool frame() const { return std::holds_alternative<Frame>(what); }
  };
  using Packet = std::shared_ptr<const Body>;
  using Queue = std::vector<Packet>;

  struct Post {
    uint64_t tag = 0;
    uint64_t boundary = 0;
    uint64_t turn = 0;  // tells ops of this tag and boundary apart, as TurnOf()
    uint64_t input = 0;
    uint64_t buffer = 0;  // the input; all-reduce is in place, so it is overwritten by the result
    uint64_t target = 0;  // of all other kinds
    uint64_t world = 0;   // members that the op is laid out for
    bool cancelled = false;
    bool abort_on_fault = false;
    size_t act = 0;
  };
  struct Member {
    size_t next = 0;            // next act
    std::vector<size_t> again;  // acts of aborted ops, to be done before `next`
    // How often the op of an act ended Aborted since the last epoch that was made at a boundary.
    // Then the next post is another op.
    std::map<size_t, uint64_t> rounds;
    bool dead = false, gone = false, joined = false;
    bool join_open = false, step_open = false, leave_open = false;
    bool sync_open = false, sync_again = false;
    uint64_t state = 0;     // contents of its tensors
    uint64_t fetched = 0;   // by the open sync; 0: nothing
    uint64_t revision = 0;  // of its next offer
    uint64_t syncs = 0;     // syncs begun
    uint64_t calls = 0;
    uint64_t steps = 0;  // boundaries passed in the epochs of `boundary`
    uint64_t boundary = 0;
    uint64_t member = 0;
    std::map<uint64_t, Post> posts;  // by call
  };
  struct Attempt {
    Epoch attempt;
    std::vector<peerd::PostRef> posts;
    std::map<int, uint64_t> parts;  // what this peer gives, by receiver
    std::set<int> missing;          // peers whose part has not arrived
    bool gets = false;              // this peer gets a result
    bool in_place = false;
    uint64_t bytes = 0;  // of a one-shot op: the whole
    bool mesh = false, one_shot = false;
    std::set<int> unfinished;  // mesh: peers whose part of the result has not arrived
    uint64_t sum = 0;
    bool stopped = false, complete = false;
    std::map<int, OpOrdinal> theirs;
  };
  struct Fetch {
    uint64_t state = 0;
    std::vector<control::SyncSource> sources;
    Tick fails_at;  // unless a source has the state by then
  };
  // An attempt to reach a newcomer's data port.
  struct Try {
    GroupKey group;
    PeerId peer;
    Tick deadline;
  };
  struct LinkRequest {
    Epoch epoch;
    int relay = -1;  // relay of the link; -1: straight
    Tick deadline;
  };
  struct Peer {
    // nullptr: the peer is dead. Its ports are connected only during a move.
    std::shared_ptr<const peerd::Engine> engine;
    uint64_t digest = 0;
    uint64_t attempt_seen = 0;
    Queue local;
    std::map<OpOrdinal, Attempt> attempts;
    std::set<uint64_t> tokens;  // epochs whose token it knows
    std::map<int, LinkRequest> requests;
    std::map<int, Tick> silent;  // links whose other end is silent: when this end notices
    std::map<int, std::pair<MemberId, uint64_t>> served;  // state, by member's index
    std::map<int, Fetch> fetches;                         // by member's index
    std::map<uint64_t, Try> tries;                        // trials without an answer, by number
  };
  struct StreamState {
    uint64_t session = 0;
    bool live = false;
    bool peer_up = false;
    bool opened = false;      // the coordinator has got Opened
    Tick not_before;          // the peer connects again at this time or later
    Tick dead_until;          // nothing gets through until then, and no end is told
    Tick silent_at = kNever;  // when the peer, which hears nothing, gives the stream up
    Queue to_coordinator, to_peer, late_end;
  };
  struct Pair {
    bool connected = false;
    int relay = -1;             // relay of the link, or of the last one
    bool cut = false;           // the path is broken
    Queue control[2], data[2];  // to the smaller peer, to the larger peer
  };
  // What members were told of an op. It may never change.
  struct OpSeen {
    std::optional<uint64_t> result;
    uint64_t result_epoch = 0;
    std::set<MemberId> holders;  // members that have the result
    std::set<uint64_t> aborted;  // epochs; started again it is another op
    bool given_up = false;
    uint64_t posted = 0;
    std::set<uint64_t> worlds;  // that it was posted for
    uint64_t cancels = 0;       // members that have cancelled it
    bool refused = false;       // the call of a member was refused
    // Members for which it ended Aborted, other than by on_fault=abort, or was refused, and the
    // newest epoch then.
    std::set<MemberId> aborters;
    uint64_t abort_epoch = 0;
  };

  template <class T>
  static Packet Pack(T what, uint64_t hash, uint64_t session = 0);
  static Packet PackEnd(uint64_t session = 0);
  static Packet PackEvent(peerd::Event event);

  int peers() const { return scenario_->peers; }
  Pair& PairOf(int a, int b) { return pairs_[a < b ? a + b - 1 : b + a - 1]; }
  const Pair& PairOf(int a, int b) const { return const_cast<ExploreState*>(this)->PairOf(a, b); }
  Queue& ControlTo(int to, int from) { return PairOf(to, from).control[to > from]; }
  Queue& DataTo(int to, int from) { return PairOf(to, from).data[to > from]; }
  const Queue& ControlTo(int to, int from) const { return PairOf(to, from).control[to > from]; }
  const Queue& DataTo(int to, int from) const { return PairOf(to, from).data[to > from]; }
  bool EndPending(int to, int from) const;

  bool Settled() const;
  bool CanAct(int member) const;
  // 1 for each time at which the op of the act ended Aborted, 100 for each earlier act since the
  // last boundary that posts the same kind under the same tag, and more for the kind and for the
  // boundaries since the last epoch that was made at one.
  uint64_t TurnOf(int member, size_t index) const;
  Tick NextDeadline() const;
  void AddFaults(bool busy, std::vector<Move>* moves) const;

  // Stands behind all ports of one peer's engine during a move.
  class Ports;
  // Calls `what` with the peer's engine, which then makes a turn. `due`: an event for the engine
  // from the models of ops and states.
  void Turn(int i, const std::function<void(peerd::Engine*)>& what,
            std::optional<peerd::Event> due = std::nullopt);
  const peerd::PeerCore& CoreOf(int i) const;
  void StepCoordinator(const coordinator::Event& event);
  void MeasureLinks();
  void SendToCoordinator(int i, const control::PeerMessage& message);
  void SendToPeer(const coordinator::ToPeer& action);
  void CloseSession(uint64_t session);

  void DeliverToPeer(int i);
  void DeliverToCoordinator(int i);
  void DeliverControl(int to, int from);
  void DeliverData(int to, int from);
  void DoAct(int member);
  void Reconnect(int i, bool first);
  void PassTime();
  void CheckNobodyWaitsForTheClosedPort() const;

  void CrashPeer(int i, Move::Kind how);
  void CrashCoordinator(bool lost);
  void GoBack();
  void Restart();
  void BreakLink(int a, int b, bool lost);
  void CutPair(int a, int b);
  void LoseCarried(int relay, Move::Kind how);
  bool CanConnect(int from, int to, const LinkRequest& request) const;
  void BreakStream(int i, bool lost);
  void Silence(int i);
  bool Silent(int i) const { return now_ < streams_[i].dead_until; }
  void CheckSilentPeersAreRemoved() const;
  void EndOfStream(int i, bool lost);
  void KillTrainer(int member);

  void OpenLinks(int i, Epoch epoch, const std::vector<peerd::LinkRequest>& links, Tick deadline);
  void KeepLinks(int i, Epoch epoch, const std::vector<PeerId>& peers);
  void Connect();
  void TryPeer(int i, const GroupKey& group, uint64_t trial, PeerId peer, Tick deadline);
  bool PortClosed(int i) const;
  void SendFrame(int from, PeerId to, const FrameHeader& header, std::string payload);
  void Start(int i, const peerd::StartAttempt& start);
  void Credit(int i, const peerd::CreditAttempt& credit);
  void Stop(int i, const peerd::StopAttempt& stop);
  void Finish(int i, const peerd::FinishAttempt& finish);
  void SendPart(int i, const Attempt& attempt, int to, bool finished);
  void Cancel(int member, uint64_t tag);
  void Contribute(int i, OpOrdinal ordinal, bool finished);

  int MemberOf(peerd::LocalId local) const;
  const Act& ActOf(int member, const Post& post) const {
    return scenario_->members[member].acts[post.act];
  }
  peerd::LocalPost LocalPostOf(int member, const Act& act, uint64_t call, uint64_t* world) const;
  uint64_t PayloadOf(const OpDesc& desc, const std::vector<peerd::PostRef>& posts,
                     const std::vector<peerd::CutOwner>& cuts);
  // The members of the epoch that take part in the op of the post.
  std::vector<int> ParticipantsOf(const Act& act, const Post& post, uint64_t epoch) const;
  uint64_t ResultOf(const Act& act, const std::vector<int>& participants) const;
  void CheckSucceeded(int m, const Post& post, const peerd::OpInfo& info, OpSeen* seen);
  void CheckAborted(int m, const Post& post, OpSeen* seen);
  void CheckOneOutcome(const OpSeen& seen, const std::string& name) const;
  void CheckResult(int m, uint64_t result, const peerd::OpInfo& info, OpSeen* seen);
  Post& PostOf(const peerd::PostRef& post);
  // The sum of the inputs, which are multiplied by their weights.
  uint64_t InputsOf(const std::vector<peerd::PostRef>& posts);
  void Answered(bool* open, const char* what, int member);
  void EnterWorld(int member, const peerd::World& world);
  void CheckMembers(int member);
  void OnPostDone(const peerd::PostDone& done);

  bool HasSource(int i, const Fetch& fetch) const;
  void BeginSync(int member, bool with_step);
  peerd::SyncRequest RequestOf(int member);
  void Serve(int i, const peerd::ServeState& serve);
  void StartFetch(int i, const peerd::StartTransfer& start);
  void EndFetch(int i, int member, bool ok);
  void CheckState(const coordinator::Records& before);
  void OnSyncDone(const peerd::SyncDone& ended);
  void CheckPrepare(const control::PrepareEpoch& prepare);
  void Say(const std::string& text) const;

  const ExploreScenario* scenario_;
  Planted planted_;
  bool trace_ = false;

  Tick now_;
  Tick last_fault_;
  std::shared_ptr<const coordinator::CoordinatorCore> coordinator_;  // nullptr: down
  uint64_t coordinator_digest_ = 0;
  std::shared_ptr<const coordinator::Records> durable_;
  std::shared_ptr<const coordinator::Records> before_;  // durable_ less a write that may be lost
  uint64_t before_digest_ = 0;
  uint64_t starts_ = 0;
  uint64_t sessions_ = 0;
  bool evict_done_ = false;
  bool measure_done_ = false;
  int closed_attempts_ = 0;  // attempts that are still to fail
  std::optional<Move::Kind> first_fault_;
  bool more_faults_ = false;
  std::array<std::shared_ptr<const Peer>, kPeersMax> peers_;
  std::array<StreamState, kPeersMax> streams_;
  std::array<Pair, kPeersMax> pairs_;
  std::vector<Member> members_;
  std::map<uint64_t, std::shared_ptr<const control::PrepareEpoch>> epochs_;
  std::set<uint64_t> committed_;
  CancelForgotten cancel_forgotten_;
  std::map<std::array<uint64_t, 3>, OpSeen> ops_;  // by boundary, tag and turn
  uint64_t ops_ok_ = 0;
  std::set<uint64_t> brought_;                     // states that trainers brought
  std::set<std::pair<uint64_t, Hash128>> agreed_;  // all that was ever durable: revision, state
  std::set<std::pair<MemberId, uint64_t>> committed_syncs_;
  uint64_t syncs_ok_ = 0;

  // Only during a move:
  Peer& Write(int i);  // makes a copy if the value is shared
  uint32_t crash_after_ = 0;
  bool crashed_ = false;
  peerd::Engine* turning_ = nullptr;  // engine that makes a turn, of this peer
  int turning_peer_ = -1;
};

}  // namespace longhaul::sim
