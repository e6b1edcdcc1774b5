// The processes of a simulated run: the coordinator, a driver around its production core, peerds,
// and the streams between them.
//
// CoordinatorHost does what the coordinator's loop does. It steps the core, makes mutations durable
// before any later message leaves, and starts again from the store after a crash. PeerHost
// surrounds a production engine (peerd/engine) that has the production OpRunner and StateRunner. It
// stands behind all other ports of the engine, and decides when something is hashed. Every control
// message is carried as protobuf bytes.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/crypto/identity.h"
#include "coordinator/core/coordinator_core.h"
#include "peerd/core/peer_core.h"
#include "peerd/engine/engine.h"
#include "peerd/engine/op_runner.h"
#include "peerd/engine/ports.h"
#include "peerd/state/local_state.h"
#include "tests/sim/cancel_forgotten.h"
#include "tests/sim/checker.h"
#include "tests/sim/model_transport.h"
#include "tests/sim/planted.h"
#include "tests/sim/sent_inputs.h"
#include "tests/sim/state_memory.h"
#include "tests/sim/story.h"
#include "tests/sim/world.h"

namespace longhaul::sim {

// Moments at which a fault is most likely to show a bug; see Simulation::Trigger().
enum class Moment {
  kPrepareSent,
  kPrepareArrived,
  kReadySent,
  kCommitDurable,
  kCommitSent,
  kCommitArrived,
  kAttemptStarted,
  kAttemptComplete,
  kDoneSent,
  kVoteSent,
  kJoinArrived,
  // These occur only in runs whose trainers have a state.
  kTransferStarted,
  kChunkArrived,
  kFetchDoneSent,
  kCount,
};

// The buffers of an op on one tensor in place.
inline peerd::PostBuffers InPlace(const OpDesc& desc,
                                  const std::shared_ptr<std::vector<uint8_t>>& tensor) {
  return {{{desc.dtype, desc.count}}, {tensor->data()}, {tensor->data()}, {}, {tensor}};
}

class PeerHost;
class CoordinatorHost;

// Changes what the core of a peer that lies wants to do.
using Lie = std::function<void(std::vector<peerd::Action>*)>;

// What all hosts of a run share.
struct Context {
  World* world = nullptr;
  Story* story = nullptr;
  Checker* checker = nullptr;
  Switchboard* switchboard = nullptr;
  Planted planted = Planted::kNone;
  uint32_t detect_ms = 1500;
  TransportModel transport;
  int64_t persist_us = 0;         // maximal time of making a write durable
  StateShape shape;               // of the state that trainers share
  uint64_t state_rate = 0;        // bytes of states that a peer sends a second; 0: no limit
  int64_t hash_us = 0;            // maximal time of hashing a chunk
  uint64_t keep_bytes = 0;        // bytes of states that a peer keeps at most
  uint32_t ring_interval_ms = 0;  // 0: peers measure no links
  bool sign_ops = false;          // as in CoreConfig
  std::string foreign;            // is in every text that a peer chooses
  std::function<void(Moment, PeerId)> trigger;
  std::function<PeerHost*(PeerId)> find_peer;  // returns nullptr if there is none
};

// One control stream. If one end closes it, the other end learns of that later.
struct Stream {
  coordinator::SessionId id;
  PeerHost* peer = nullptr;
  bool at_peer = true;  // open, or opening, as the peer sees it
  bool connected = false;
  bool at_coordinator = false;
  bool cut = false;  // nothing passes any more except the news of its end
  Tick to_coordinator;
  Tick to_peer;
  Tick heard;        // when the peer heard the coordinator last
  Tick heard_there;  // when the coordinator heard the peer last
};
using StreamPtr = std::shared_ptr<Stream>;

class CoordinatorHost {
 public:
  explicit CoordinatorHost(const Context& context);

  Node* node() { return &node_; }
  const coordinator::Records& durable() const { return durable_; }
  std::string WaitingFor() const;
  // Names the start that runs now, or that ran last.
  std::string incarnation() const { return "c" + std::to_string(starts_); }
  // For a planted bug: a message that a peer sends.
  void Overhear(PeerId peer, const control::PeerMessage& message) {
    if (context_.planted != Planted::kCancelForgotten) return;
    cancel_forgotten_.Note(peer.value(), message);
  }
  // Sends the last messages of the coordinator that crashed once more, each at a random time within
  // `within_us`, on whatever stream the peer has then.
  void Echo(int64_t within_us);

  // ---- streams
  void OnOpen(const StreamPtr& stream);
  void OnBytes(const StreamPtr& stream, const std::string& bytes);
  void OnEnd(const StreamPtr& stream);
  // The network breaks the stream.
  void Reset(const StreamPtr& stream);
  // The coordinator ends the stream because of its age.
  void EndAged(const StreamPtr& stream);

  void Evict(const GroupKey& group, MemberId member);
  void Drain(PeerId peer);
  void Crash(bool resets);
  // Makes the store lose some of its last writes: preparations, joins, departures, drains and
  // terms, but no committed epoch or sync (store_back.h). Call this only while the coordinator is
  // down.
  void GoBack();
  void Start();

 private:
  struct Out {
    std::variant<coordinator::Persist, coordinator::ToPeer, coordinator::CloseSession> action;
  };
  void Step(const coordinator::Event& event);
  void Apply(const coordinator::Persist& persist);
  void Arm();
  void PumpOut();
  void Carry(const coordinator::ToPeer& action);
  void SolveRing(coordinator::OrderRing order);
  void Close(StreamPtr stream);
  // Closes the stream if nothing is heard on it.
  void KeepAlive(const StreamPtr& stream);
  void CheckNotOfAge(PeerId peer);
  void Mutilate(PeerId peer, control::CoordinatorMessage* message, bool* drop);

  const Context context_;
  Node node_;
  std::optional<coordinator::CoordinatorCore> core_;
  coordinator::Records durable_;
  std::deque<coordinator::Records> backups_;  // the store before its last writes
  uint64_t went_back_ = 0;
  std::map<coordinator::SessionId, StreamPtr> streams_;
  // The last stream of each peer, if the coordinator ended it because of its age.
  std::map<PeerId, StreamPtr> aged_;
  CancelForgotten cancel_forgotten_;
  std::deque<std::pair<PeerHost*, std::string>> sent_;  // the last messages
  std::deque<Out> out_;
  bool persisting_ = false;
  Tick armed_ = kNever;
  uint64_t starts_ = 0;
  uint64_t steps_ = 0;
};

// What a trainer hears from its peerd.
class TrainerSide {
 public:
  virtual ~TrainerSide() = default;
  virtual void OnJoinDone(const Outcome& outcome, const peerd::World& world) = 0;
  virtual void OnStepDone(const Outcome& outcome, const peerd::World& world) = 0;
  virtual void OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo& info) = 0;
  virtual void OnTakeDone(const Outcome& outcome, const peerd::StateSyncInfo& info) = 0;
  virtual void OnLeaveDone(const Outcome& outcome) = 0;
  virtual void OnPostDone(uint64_t call, const Outcome& outcome, const peerd::OpInfo& info) = 0;
  virtual void OnWorldChanged(const peerd::World& world) = 0;
  virtual void OnMemberGone(const Outcome& outcome) = 0;
  // The socket broke, because peerd died.
  virtual void OnPeerGone() = 0;
};

class PeerHost final : private peerd::TransportListener,
                       private peerd::TrainerPort,
                       private peerd::EngineObserver {
 public:
  PeerHost(const Context& context, CoordinatorHost* coordinator, int index, PeerId id);
  ~PeerHost() override;

  Node* node() { return &node_; }
  PeerId id() const { return id_; }
  ModelTransport& transport() { return transport_; }
  const StreamPtr& stream() const { return stream_; }
  const peerd::PeerCore& core() const { return engine_->core(); }
  bool drained() const { return engine_ != nullptr && engine_->drained(); }
  // From now on this peer lies. What it sends is signed as if it were true.
  void LieWith(Lie lie) {
    lie_ = std::move(lie);
    context_.checker->OnLiar(id_);
  }

  // ---- requests of its trainers; each arrives a little later, in order
  peerd::LocalId Join(TrainerSide* trainer, const GroupKey& group, const std::string& name,
                      uint32_t slot, const control::JoinWish& terms = {});
  // `sync`: the state that the member offers, if any. Nobody writes to that state until OnSyncDone.
  void Step(peerd::LocalId local, std::optional<peerd::StateSync> sync = std::nullopt);
  void Sync(peerd::LocalId local, const peerd::StateSync& sync);
  // Has the state hashed before its first sync.
  void Prepare(peerd::LocalId local, const std::shared_ptr<peerd::LocalState>& state,
               std::function<void()> done);
  // A member in the background asks for its tensors, filled with the state.
  void TakeState(peerd::LocalId local, int64_t wait_us);
  void Leave(peerd::LocalId local);
  void Post(const peerd::LocalPost& post, peerd::PostBuffers buffers, const OpPost& op);
  void Cancel(const peerd::PostRef& post);
  // The call was refused to the trainer.
  void Refuse(const peerd::LocalPost& post);
  void TrainerDied(peerd::LocalId local);

  // ---- faults
  void Drain();
  void Crash(bool resets);
  void Freeze();
  void Thaw();

  // ---- its end of the stream
  void OnStreamUp(const StreamPtr& stream);
  void OnStreamBytes(const StreamPtr& stream, const std::string& bytes);
  // A message of a coordinator that has crashed (Echo()).
  void OnEcho(const std::string& bytes);
  void OnStreamEnd(const StreamPtr& stream);

  // Fails if a request that has arrived has no answer.
  void CheckAllAnswered() const;
  // Frees all that the process had, and tells nobody.
  void Dispose();

 private:
  struct LocalState {
    TrainerSide* trainer = nullptr;  // nullptr: it died, or hears nothing any more
    GroupKey group;
    bool gone = false;
    bool out = false;         // the core has decided MemberGone
    bool asked_late = false;  // a request has come since then
    bool died = false;        // its trainer died
  };

  void FromTrainer(std::function<void()> what);
  // Called when a request has arrived. From now on the engine must answer it.
  struct Answers;
  Answers& Asks(peerd::LocalId local);
  void ToTrainer(peerd::LocalId local, std::function<void(TrainerSide*)> what);
  // Called when the engine has something to do: plans a turn.
  void Wake();
  void Pump();
  void Arm();
  // The process is dead. Frees all that it had and tells its trainers.
  void Bury();
  void ReportLinks();
  [[noreturn]] void Twice(const char* what, peerd::LocalId local);
  // Fails if the member has an open request. `heard`: looks only at requests that the core has got.
  void CheckAnswered(peerd::LocalId local, bool heard) const;
  void NoteHeard(const peerd::Event& event);
  void CheckWorld(peerd::LocalId local, const peerd::World& world);
  void Hear(const control::CoordinatorMessage& message);
  void CheckBounds() const;
  void CheckUnused(peerd::LocalId local) const;
  void OnTransferEnded(const peerd::TransferEnded& ended);
  // If something is to be hashed, hashes it chunk by chunk at random times.
  void Hash();
  void Beat();
  void Connect();
  void SendToCoordinator(const control::PeerMessage& message);
  void ForgeDone(const GroupKey& group);
  void ForgeLinkLost();
  void SpoilSources(const peerd::AttemptStopped& stopped);
  void NoteSegment(const peerd::LinkKey& link, const FrameHeader& header, const uint8_t* data);

  // ---- TrainerPort
  void JoinDone(peerd::LocalId local, const Outcome& outcome, const peerd::World& world,
                bool newcomer) override;
  void StepDone(peerd::LocalId local, const Outcome& outcome, const peerd::World& world) override;
  void SyncDone(peerd::LocalId local, const Outcome& outcome,
                const peerd::StateSyncInfo& info) override;
  void TakeDone(peerd::LocalId local, const Outcome& outcome,
                const peerd::StateSyncInfo& info) override;
  void SyncProgress(peerd::LocalId, const control::FetchProgress&) override {}
  void LeaveDone(peerd::LocalId local, const Outcome& outcome) override;
  void PostDone(const peerd::PostRef& post, const Outcome& outcome, const peerd::OpInfo& info,
                const peerd::OpTraffic& traffic) override;
  void WorldChanged(peerd::LocalId local, const peerd::World& world) override;
  void MemberGone(peerd::LocalId local, const Outcome& outcome) override;

  // ---- EngineObserver
  bool OnEvent(peerd::Event* event) override;
  void OnActions(std::vector<peerd::Action>* actions) override;
  bool OnAction(const peerd::Action& action) override;
  struct Noter;
  void Note(const peerd::Action& action);
  // Once an action is carried out, fires the trigger of its moment, if it has one. Returns false if
  // this process died of that.
  bool AfterAction();

  // ---- TransportListener
  void OnLinkUp(const peerd::LinkKey& link) override;
  void OnLinkDown(const peerd::LinkKey& link, const std::string& reason,
                  uint32_t silent_ms) override;
  void OnPeerTried(const GroupKey& group, uint64_t trial, PeerId peer,
                   const std::string& error) override;
  absl::Status OnControlFrame(const peerd::LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override;

  const Context context_;
  CoordinatorHost* const coordinator_;
  Node node_;
  const PeerId id_;
  const Identity identity_;
  Lie lie_;
  ModelTransport transport_;
  std::unique_ptr<peerd::OpRunner> runner_;
  std::unique_ptr<peerd::Engine> engine_;
  class States;
  std::unique_ptr<States> states_;
  class Segments;
  std::unique_ptr<Segments> op_segments_;
  std::unique_ptr<Segments> state_segments_;
  bool hash_due_ = false;
  std::map<peerd::LocalId, peerd::StateSync> brought_;             // offered last
  std::map<peerd::LocalId, bool> serving_;                         // whether the state may change
  std::map<MemberId, control::SyncResult> elected_;                // told last
  std::map<peerd::LocalId, std::map<MemberId, PeerId>> fetching_;  // source peers
  uint64_t life_ = 0;  // of the node when the turn began
  std::optional<Moment> moment_;
  bool pumping_ = false;
  bool pump_due_ = false;
  uint64_t pumps_ = 0;
  uint32_t pumps_at_once_ = 0;  // turns without a pause, in a row
  Tick armed_ = kNever;

  StreamPtr stream_;
  uint64_t next_local_ = 1;
  std::map<peerd::LocalId, LocalState> locals_;
  Tick ipc_in_;  // arrival of the last message each way: keeps the sockets in order
  Tick ipc_out_;
  std::map<peerd::PostRef, OpPost> posted_ops_;
  struct Answers {
    bool join = false, step = false, sync = false, take = false, leave = false;
  };
  std::map<peerd::LocalId, Answers> open_;  // requests without an answer
  std::set<peerd::PostRef> open_posts_;
  std::map<peerd::LocalId, Answers> heard_;  // the requests in open_ that the core has got
  std::set<peerd::PostRef> heard_posts_;

  SentInputs sent_;
  // Ops in flight, and their ordinals at the other peers.
  struct Running {
    Epoch attempt;
    bool complete = false;
    std::vector<peerd::PostRef> posts;
    std::map<PeerId, OpOrdinal> theirs;
  };
  std::map<std::pair<GroupKey, OpOrdinal>, Running> running_;
  // For planted bugs:
  std::map<peerd::PostRef, uint8_t*> sources_;  // of posts in place; else null
  std::map<peerd::PostRef, float*> errors_;     // of posts that have an error; else null
  std::map<GroupKey, Epoch> attempts_;
  std::vector<peerd::Action> late_;  // actions that are held back
  Tick late_until_;
  std::set<std::pair<GroupKey, OpOrdinal>> told_;  // ops whose AttemptFinished the core has got
  std::map<GroupKey, control::PrepareEpoch> prepared_;
};

}  // namespace longhaul::sim
