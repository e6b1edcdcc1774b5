// Does all the work of a peer for shared state: SyncRunner hashes what trainers bring,
// StateExchange moves chunks, and KeptStates keeps copies of agreed states, which other peers may
// fetch while the trainer trains. This class connects them and carries out the core's actions about
// syncs.
//
// The engine passes on what the transport reports about shared state, calls Work() in each turn,
// and takes the events for the core and the progress for trainers.
//
// After a sync, and until Forget(), other peers can compare the member's manifest. They cannot
// fetch from its tensors, which belong to the trainer again (exception: ServeState with
// may_change). The kernel may still read pieces that were being sent. Until it has read them, the
// trainer gets no answer and nothing is written to the inbox (WhenUnread()). Otherwise a receiver
// could get bytes of the next step and take them for corruption. The wait is bounded: the transport
// gives up a lane that stands still.
//
// Threads: the reactor thread. The threads of the pool call `wake`.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/engine/ports.h"
#include "peerd/engine/sync_runner.h"
#include "peerd/state/hash_pool.h"
#include "peerd/state/kept_states.h"
#include "peerd/state/local_state.h"
#include "peerd/state/state_exchange.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

class StateRunner : public StatePort {
 public:
  struct Options {
    PeerId self;
    uint32_t hash_threads = 1;  // 0: hashing is done in HashHere()
    uint32_t detect_ms = 1500;
    uint64_t state_rate = 0;  // limit of the bytes of states that are sent per second; 0: none
    KeptStates::Options kept;
  };

  // `transport` must outlive this object. `wake` wakes the reactor, and `clock` is its clock.
  StateRunner(const Options& options, Transport* transport, std::function<void()> wake,
              std::function<Tick()> clock);
  StateRunner(const StateRunner&) = delete;
  StateRunner& operator=(const StateRunner&) = delete;
  void SetDetectMs(uint32_t detect_ms) override { exchange_.SetDetectMs(detect_ms); }

  StateExchange* exchange() { return &exchange_; }
  // For Transport::SetSegmentListeners().
  SegmentListener* segments() { return &exchange_; }

  // ---- links: reports about shared state
  void OnLinkUp(const LinkKey& link) override { exchange_.OnLinkUp(link, Now()); }
  void OnLinkDown(const LinkKey& link) override { exchange_.OnLinkDown(link, Now()); }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload, bool in_group) override {
    return exchange_.OnControlFrame(link, header, payload, in_group, Now());
  }

  // ---- trainers; see SyncRunner
  // Add(): the member has asked to join. Gone(): its trainer is gone.
  void Add(LocalId local, const GroupKey& group, const std::string& name) override {
    kept_.Add(local.value(), group, name);
  }
  void Gone(LocalId local) override;
  // Sets the revision of the state that is kept for the member with this manifest. Returns false if
  // none is kept.
  bool KeptRevision(LocalId local, const LocalState& state, uint64_t* revision) const override {
    return kept_.Revision(local.value(), state.manifest, revision);
  }
  void Prepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override {
    syncs_.Prepare(state, std::move(done));
  }
  void Begin(LocalId local, const GroupKey& group, const StateSync& sync, bool with_step) override;
  std::optional<bool> Withdraw(LocalId local) override { return syncs_.Withdraw(local); }
  // The member is out, or its join has failed: nobody asks for its state any more.
  void Forget(LocalId local) override;

  // ---- actions of the core
  void Carry(const ServeState& action) override;
  void Carry(const EndServe& action) override;
  void Carry(const StartTransfer& action) override;
  void Carry(const ChangeSources& action) override;
  void Carry(const StopTransfer& action) override;
  void Carry(const CompareManifest& action) override;
  StateSyncInfo Carry(const SyncDone& action) override;
  StateSyncInfo Carry(const TakeDone& action) override { return syncs_.End(action); }

  // Runs `act` when nothing reads the member's state any more: neither the kernel, which may still
  // send pieces of it, nor a copy for KeptStates. Runs it at once, or within a later Work(). The
  // functions of one member run in the order of these calls.
  void WhenUnread(LocalId local, std::function<void()> act) override;

  // Does all work that is possible now.
  void Work() override;
  // When to call Work() at the latest.
  Tick NextDeadline() const override;
  // The events for the core, in order.
  std::vector<Event> PopEvents() override;
  // The progress of transfers, for the trainers: at most ten times a second for each transfer.
  std::vector<std::pair<LocalId, control::FetchProgress>> PopProgress() override;
  std::vector<int64_t> PopHashTimes() { return syncs_.PopHashTimes(); }
  // True if the pool has work, or results that are not delivered. `wake` is called for them.
  bool hashing() const { return !pool_.idle(); }
  // For a pool without threads: HashPool::WorkHere().
  bool HashHere() { return pool_.WorkHere(); }
  // True if any state is still read, so that WhenUnread() would wait.
  bool reading() const override { return !reads_.empty(); }
  uint64_t kept_bytes() const { return kept_.bytes(); }

 private:
  struct Member {
    GroupKey group;
    MemberId served;      // the member's number, once it was served; 0: never
    bool shared = false;  // it is served while its trainer may write to it
    std::shared_ptr<const MemoryState> declared;
  };
  // States of a member that are not served any more, but still read. `then` runs after that.
  struct Reads {
    std::vector<std::shared_ptr<const LocalState>> states;
    bool keeping = false;  // SyncRunner::Keeping()
    std::vector<std::function<void()>> then;
  };
  // A transfer in progress, or one whose end the core has not been told yet.
  struct Fetch {
    Tick looked;         // when its progress was last told
    uint64_t bytes = 0;  // received by then
    uint64_t bytes_per_second = 0;
    uint64_t state_bytes = 0;
    bool background = false;
    bool measure = false;  // TransferMeasured is due when it is known how much there is to fetch
  };

  Tick Now() const { return clock_(); }
  void Start(const StartTransfer& action);
  void Over(StateExchange::Ended ended);
  void EndReads();
  // Lets other peers fetch the kept copy of what the member has committed.
  void ServeKept(LocalId local);
  void EndShare(LocalId local);
  // From now on other peers get the member's manifest only.
  void StopServing(Member* member);

  const std::function<Tick()> clock_;
  HashPool pool_;
  KeptStates kept_;
  SyncRunner syncs_;
  StateExchange exchange_;
  std::map<LocalId, Member> members_;
  std::map<LocalId, Fetch> fetches_;
  std::map<LocalId, Reads> reads_;
  std::vector<Event> events_;
};

}  // namespace longhaul::peerd
