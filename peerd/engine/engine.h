// The driver of a peer: tells the peer core what happens, and carries out what the core decides.
//
// Whatever happens (requests of trainers, messages of the coordinator, links, frames, time,
// attempts and transfers that end) becomes an event and waits in one queue. Turn() tells the core
// one event after the other; the actions of an event are carried out, in order, before the next
// event.
//
// What is decided here, and not by the core:
// - what is said of one member arrives in order, also where an answer waits until nothing reads the
//   member's tensors any more (StatePort::WhenUnread());
// - a sync whose tensors are still being hashed ends with its member, before the core hears of it;
// - a join fails when no coordinator has served this peer for `coordinator_timeout_ms`.
//
// Threads: the reactor thread only. No call of the engine calls the core or a port, except Turn()
// and what answers by its return value.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/peer_core.h"
#include "peerd/engine/control_frames.h"
#include "peerd/engine/ports.h"
#include "peerd/transport/transport.h"
#include "proto/control/messages.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct EngineOptions {
  CoreConfig core;
  // A join fails if no coordinator has served this peer for this long; 0: joins wait for ever.
  uint32_t coordinator_timeout_ms = 0;
  std::string coordinators;  // names them in that error
};

class Engine final : public TransportListener, public TrainerRequests {
 public:
  Engine() = default;
  // Before anything happens. Apart from the constructor, as transport and trainers want the engine
  // for a listener.
  void Start(EngineOptions options, EnginePorts ports);
  // An engine in the same state over other ports; both between two turns, with nothing in the
  // queue. For searches, which try more than one future.
  std::unique_ptr<Engine> Clone(EnginePorts ports) const;

  // ---- the coordinator
  void OnStreamUp();
  // Also of a try that failed; the reason names the address.
  void OnStreamDown(const std::string& reason);
  void OnMessage(control::CoordinatorMessage message);
  // It has welcomed this peer on the stream; one that accepts the stream and then refuses the peer
  // is as good as none.
  bool welcome() const { return welcome_; }

  // ---- the operator: every member leaves, by `deadline` at the latest.
  void OnDrain(Tick deadline) { Post(DrainRequested{deadline}); }
  // Drained, and all has been said.
  bool over() const { return drained_ && !ports_.states->reading(); }
  bool drained() const { return drained_; }

  // ---- time
  // Goes on with all that can, until the queue is empty.
  void Turn();
  // When to call Turn() at the latest, if nothing happens before.
  Tick NextDeadline() const;

  // For metrics and the heartbeat.
  PeerCore& core() { return *core_; }
  const PeerCore& core() const { return *core_; }
  size_t queued() const { return events_.size(); }
  // Of the engine and its core; not of what is behind the ports.
  uint64_t Digest() const;

  // ---- TransportListener
  void OnLinkUp(const LinkKey& link) override;
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) override;
  void OnPeerTried(const GroupKey& group, uint64_t trial, PeerId peer,
                   const std::string& error) override {
    Post(PeerTried{group, trial, peer, error});
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override;
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override;
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override;
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override;
  void OnSegmentSent(uint64_t cookie) override;
  uint64_t OnSegmentRepeat(uint64_t owner) override;
  void OnReceivesDetached(uint64_t cookie) override;

  // ---- TrainerRequests
  void OnJoin(const LocalJoin& join) override;
  void OnStep(LocalId local, const StateSync* sync) override;
  void OnSync(LocalId local, const StateSync& sync) override;
  void OnTake(LocalId local, uint32_t timeout_ms) override;
  void OnLeave(LocalId local) override;
  void OnPost(const LocalPost& post, PostBuffers buffers) override;
  PeerCore::MembersView OnMembers(LocalId local) override { return core_->GetMembers(local); }
  void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override;
  bool OnKept(LocalId local, const LocalState& state, uint64_t* revision) override;
  void OnGone(LocalId local, const std::string& reason) override;
  void OnRegionAdded(const uint8_t* data, size_t bytes) override;
  void OnRegionRemoved(const uint8_t* data, size_t bytes) override;

 private:
  struct Carrier;

  Tick Now() const { return ports_.clock(); }
  void Post(Event event) { events_.push_back(std::move(event)); }
  // Gives the core all events that there are, and carries out its actions.
  void CarryOut();
  // False: it was answered, and is none of the core's business.
  bool Admit(const LocalPost& post);
  void Send(const ControlFrame& frame);
  void BeginSync(LocalId local, const StateSync& sync, bool with_step);
  void EndSync(const SyncDone& ended);
  // The answer to a sync that the core has not heard of and never will.
  void WithdrawSync(LocalId local, const Outcome& outcome);
  void Unwelcome();
  void FailHopelessJoins();
  SegmentListener* ListenerOf(const FrameHeader& header) const;
  SegmentListener* ListenerOf(uint64_t cookie) const;

  EngineOptions options_;
  EnginePorts ports_;
  std::optional<PeerCore> core_;
  std::deque<Event> events_;
  std::map<LocalId, Tick> joins_;  // trainers that wait for admission, since when
  std::map<LocalId, GroupKey> groups_;
  bool stream_up_ = false;
  bool welcome_ = false;
  Tick unserved_since_;  // not welcome since then
  std::string stream_error_ = "not tried yet";
  bool drained_ = false;
};

}  // namespace longhaul::peerd
