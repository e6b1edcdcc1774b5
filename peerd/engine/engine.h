// The driver of a peer: tells the peer core what happens, and carries out what the core decides.
//
// Everything that happens becomes an event in one queue: requests of trainers, messages of the
// coordinator, changes of links, frames, time, and attempts and transfers that end. Turn() gives
// the events to the core one by one. The actions of an event are carried out, in order, before the
// next event.
//
// The engine itself decides three things:
// - Order: a member gets its answers in order, even if one of them waits until nothing reads the
//   member's tensors any more (StatePort::WhenUnread()).
// - Early syncs: the core does not hear of a sync while its tensors are being hashed. If the member
//   ends meanwhile, the engine ends the sync.
// - Joins: a join fails when no coordinator has served this peer for `coordinator_timeout_ms`.
//
// Threads: the reactor thread only. The core runs only in Turn(); other calls post events.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

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
#include "proto/control/why.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct EngineOptions {
  CoreConfig core;
  // A join fails if no coordinator has served this peer for this long; 0: joins wait for ever.
  uint32_t coordinator_timeout_ms = 0;
  std::string coordinators;  // their addresses, for the text of that error
};

class Engine final : public TransportListener, public TrainerRequests {
 public:
  Engine() = default;
  // Must be called before anything else. This is not done by the constructor, because the transport
  // and the IPC server need the engine before the ports exist.
  void Start(EngineOptions options, EnginePorts ports);
  // Returns an engine in the same state with other ports. Must be called between two turns, when
  // the queue is empty. A search tries several futures with such copies.
  std::unique_ptr<Engine> Clone(EnginePorts ports) const;

  // ---- the coordinator
  void OnStreamUp();
  // Also called when an attempt to open the stream failed. The reason names the address.
  void OnStreamDown(const std::string& reason);
  void OnMessage(control::CoordinatorMessage message);
  void OnTellWhy(const control::TellWhy& tell);
  // True if the coordinator has sent Welcome on the open stream. A coordinator that accepts the
  // stream and then refuses the peer does not count.
  bool welcome() const { return welcome_; }

  // ---- the operator: every member leaves, by `deadline` at the latest.
  void OnDrain(Tick deadline) { Post(DrainRequested{deadline}); }
  // True if all members are out, and all trainers have their answers.
  bool over() const { return drained_ && !ports_.states->reading(); }
  bool drained() const { return drained_; }

  // ---- time
  // Does everything that is due, and gives events to the core until the queue is empty.
  void Turn();
  // When to call Turn() at the latest, if nothing happens before.
  Tick NextDeadline() const;

  // For metrics and the heartbeat.
  PeerCore& core() { return *core_; }
  const PeerCore& core() const { return *core_; }
  size_t queued() const { return events_.size(); }
  // The digest of the engine and its core, without what is behind the ports.
  uint64_t Digest() const;

  // ---- TransportListener
  void OnLinkUp(const LinkKey& link) override;
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) override;
  void OnPeerTried(const GroupKey& group, uint64_t trial, PeerId peer,
                   const std::string& error) override {
    Post(AddressTried{group, trial, peer, error});
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override;

  // ---- TrainerRequests
  void OnJoin(const LocalJoin& join) override;
  void OnStep(LocalId local, const StateSync* sync) override;
  void OnSync(LocalId local, const StateSync& sync) override;
  void OnTake(LocalId local, uint32_t timeout_ms) override;
  void OnLeave(LocalId local) override;
  void OnPost(const LocalPost& post, PostBuffers buffers) override;
  void OnRefusal(LocalRefusal refusal) override { Post(std::move(refusal)); }
  void OnCancel(const PostRef& post) override;
  PeerCore::MembersView OnMembers(LocalId local, PeerCore::AsOf as_of) override {
    return core_->GetMembers(local, as_of);
  }
  std::optional<PeerCore::MemberView> OnMember(LocalId local, MemberId member) override {
    return core_->GetMember(local, member);
  }
  void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override;
  void OnWhy(const GroupKey& group, std::function<void(const std::string&)> done) override;
  bool OnKept(LocalId local, const LocalState& state, uint64_t* revision) override;
  void OnGone(LocalId local, const std::string& reason) override;
  void OnRegionAdded(const uint8_t* data, size_t bytes) override;
  void OnRegionRemoved(const uint8_t* data, size_t bytes) override;

 private:
  struct Carrier;

  Tick Now() const { return ports_.clock(); }
  void Post(Event event) { events_.push_back(std::move(event)); }
  // Gives all events to the core, and carries out its actions.
  void CarryOut();
  // Takes memory for a post. False: the post was refused and answered, and the core must not get
  // it.
  bool Admit(const LocalPost& post);
  void Send(const ControlFrame& frame);
  void Sign(const SendReady& ready, ControlFrame* frame);
  void BeginSync(LocalId local, const StateSync& sync, bool with_step);
  void EndSync(const SyncDone& ended);
  // Answers a sync that the core has not heard of, and drops it.
  void WithdrawSync(LocalId local, const Outcome& outcome);
  void Unwelcome();
  void FailHopelessJoins();
  std::string NoCoordinator() const;
  // Forgets questions whose time is up, and answers what is open; all of them if there is no
  // coordinator.
  void EndQuestions();

  EngineOptions options_;
  EnginePorts ports_;
  std::optional<PeerCore> core_;
  std::deque<Event> events_;
  std::map<LocalId, Tick> joins_;  // members that wait for admission, and since when
  std::map<LocalId, GroupKey> groups_;
  bool stream_up_ = false;
  bool welcome_ = false;
  Tick unserved_since_;  // since when there has been no Welcome
  std::string stream_error_ = "not tried yet";
  bool drained_ = false;
  // Questions of trainers why a group waits. Within kWhyPatience the coordinator is asked once for
  // each group. Not copied by Clone(), and not digested: nothing is decided by them.
  struct Question {
    uint64_t number = 0;  // 0: it is answered
    Tick until;
    std::string text;  // the answer
    std::vector<std::function<void(const std::string&)>> waiting;
  };
  std::map<GroupKey, Question> questions_;
  uint64_t last_question_ = 0;
  // The newest READY that was signed.
  struct Signed {
    GroupKey group;
    OpOrdinal ordinal;
    Epoch attempt;
    std::string plain;  // the payload without the signature
    FrameHeader header;
    std::string payload;
  };
  std::optional<Signed> signed_;
};

}  // namespace longhaul::peerd
