// The ports of the engine: all that it needs from its surroundings.
//
//   trainers ----- TrainerRequests -----> engine ----- TrainerPort -----> trainers
//   transport ---- TransportListener ---> engine ----- Links -----------> other peers
//   OpPort, StatePort: the two parts that move bytes, OpRunner and StateRunner. The transport gives
//   them their segments itself (SegmentListener)
//
// In the daemon the IPC server, the transport, OpRunner and StateRunner are behind these ports. In
// the simulation the same two runners are there, and models are behind the other ports. The search
// of small runs has models behind all ports. The engine is the same in all three.
//
// Threads: the reactor thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/engine/trainers.h"
#include "peerd/state/local_state.h"
#include "peerd/transport/transport.h"
#include "proto/control/messages.h"
#include "proto/control/why.h"
#include "proto/wire/frame.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// ------------------------------------------------------------------------------ bytes

// Runs the attempts that the core asks for. The daemon has OpRunner here.
class OpPort {
 public:
  virtual ~OpPort() = default;

  virtual void AddPost(const LocalPost& post, PostBuffers buffers) = 0;
  // Takes the memory that the attempts at the op may need. Called before the core gets the post.
  // Not OK: nothing has changed, the post must be answered with this outcome, and the core must not
  // get it.
  // - InvalidArgument: its tensors overlap those of another local post of the op.
  // - Unavailable: the memory would exceed the scratch limit, or the system has no more.
  virtual Outcome Admit(const LocalPost& post, const PostView& view) = 0;
  // Ends the post. Returns the bytes that its attempts moved; zeros for a post that is not known.
  virtual OpTraffic EndPost(const PostRef& post) = 0;
  // The input that a SendReady with one_shot carries.
  virtual std::string Payload(const SendReady& ready) const = 0;
  virtual void Start(const StartAttempt& action) = 0;
  virtual void Credit(const CreditAttempt& action) = 0;
  virtual void Stop(const StopAttempt& action) = 0;
  virtual void Finish(const FinishAttempt& action) = 0;
  virtual void ForgetGroup(const GroupKey& group) = 0;
  // Called once in each turn: goes on with work that earlier turns left.
  virtual void Work() = 0;
  // True if the next turn should follow at once.
  virtual bool HasWork() const = 0;
  // The events for the core, in order.
  virtual std::vector<Event> PopEvents() = 0;
};

// Hashes, serves and fetches states. The daemon has StateRunner here; its header explains the
// calls.
class StatePort {
 public:
  virtual ~StatePort() = default;

  virtual void SetDetectMs(uint32_t detect_ms) = 0;

  // ---- trainers
  virtual void Add(LocalId local, const GroupKey& group, const std::string& name) = 0;
  virtual void Gone(LocalId local) = 0;
  virtual void Forget(LocalId local) = 0;
  virtual bool KeptRevision(LocalId local, const LocalState& state, uint64_t* revision) const = 0;
  virtual void Prepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) = 0;
  virtual void Begin(LocalId local, const GroupKey& group, const StateSync& sync,
                     bool with_step) = 0;
  // Withdraws a sync that the core has not heard of. Returns whether it came with a step; nullopt:
  // there is no such sync.
  virtual std::optional<bool> Withdraw(LocalId local) = 0;

  // ---- actions of the core
  virtual void Carry(const ServeState& action) = 0;
  virtual void Carry(const EndServe& action) = 0;
  virtual void Carry(const StartTransfer& action) = 0;
  virtual void Carry(const ChangeSources& action) = 0;
  virtual void Carry(const StopTransfer& action) = 0;
  virtual void Carry(const CompareManifest& action) = 0;
  virtual StateSyncInfo Carry(const SyncDone& action) = 0;
  virtual StateSyncInfo Carry(const TakeDone& action) = 0;

  // Runs `act` when nothing reads the member's tensors: at once, or within a later Work(). The
  // functions of one member run in the order of these calls.
  virtual void WhenUnread(LocalId local, std::function<void()> act) = 0;
  // True if any tensors are still read, so that WhenUnread() would wait.
  virtual bool reading() const = 0;

  // ---- links
  virtual void OnLinkUp(const LinkKey& link) = 0;
  virtual void OnLinkDown(const LinkKey& link) = 0;
  // `in_group`: the peer at the other end is in the group that the frame names.
  virtual absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                                      std::span<const uint8_t> payload, bool in_group) = 0;

  // ---- time
  virtual void Work() = 0;
  virtual Tick NextDeadline() const = 0;
  virtual std::vector<Event> PopEvents() = 0;
  virtual std::vector<std::pair<LocalId, control::FetchProgress>> PopProgress() = 0;
};

// ------------------------------------------------------------------------------ all together

// Sees the events and actions that pass through the engine: for metrics, and for checks in tests.
//
// A test may change events and actions, to see whether a bug of the engine would be found. It may
// also return false to end the turn: nothing more is done, as if the process had been killed.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // Called before the core gets the event.
  virtual bool OnEvent(Event*) { return true; }
  // Called when the core has decided, before any of the actions is carried out.
  virtual void OnActions(std::vector<Action>*) {}
  // Called before the action is carried out.
  virtual bool OnAction(const Action&) { return true; }
};

// Returns the signature of a text by this peer (base/crypto/identity.h).
using Signer = std::function<std::string(const std::string& text)>;

// All of these must outlive the engine.
struct EnginePorts {
  TrainerPort* trainers = nullptr;
  Links* links = nullptr;
  OpPort* ops = nullptr;
  StatePort* states = nullptr;
  std::function<void(const control::PeerMessage&)> to_coordinator;
  // Asks the coordinator why a group waits. OnTellWhy() gets the answer, if one comes. May be null.
  std::function<void(const control::AskWhy&)> ask_why;
  // Closes the control stream, and tries the next address.
  std::function<void(const std::string& reason)> refuse_coordinator;
  // The addresses at which this host may reach a peer that tells these; null: these.
  std::function<std::vector<std::string>(const std::vector<std::string>& endpoints)> reached;
  std::function<Tick()> clock;
  Signer sign;
  EngineObserver* observer = nullptr;  // may be null
};

}  // namespace longhaul::peerd
