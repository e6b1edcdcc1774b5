// All that the driver does for shared state: hashes what trainers bring (SyncRunner), carries out
// what the core says about syncs, moves the chunks (StateExchange), and keeps what was agreed on
// (KeptStates), which others may ask for while its trainer trains.
//
// The driver hands over what the transport's listener hears of ours (exchange()), calls Work()
// after each turn of the ring, and takes what has to be told to the core and to trainers.
//
// A member that has synced stays known to others until Forget(): by its manifest only, so that the
// memory of a state goes back to its trainer's hands with the end of the sync. What was being sent
// then the kernel may still read. Until it has let go, nothing is told to the trainer and nothing
// is written to the inbox (WhenUnread()), so that nobody gets bits of the next step and takes
// them for corruption. That takes no longer than the transport waits for a lane that stands still.
//
// Threads: the reactor's; `wake` of the pool of threads comes from any.
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
    uint32_t hash_threads = 1;  // 0: see HashHere()
    uint32_t detect_ms = 1500;
    uint64_t state_rate = 0;  // bytes of states that are sent a second; 0: no limit
    KeptStates::Options kept;
  };

  // `transport` outlives it. `wake`: of the reactor; `clock`: its clock.
  StateRunner(const Options& options, Transport* transport, std::function<void()> wake,
              std::function<Tick()> clock);
  StateRunner(const StateRunner&) = delete;
  StateRunner& operator=(const StateRunner&) = delete;
  void SetDetectMs(uint32_t detect_ms) override { exchange_.SetDetectMs(detect_ms); }

  StateExchange* exchange() { return &exchange_; }

  // ---- links: what is of shared state
  void OnLinkUp(const LinkKey& link) override { exchange_.OnLinkUp(link, Now()); }
  void OnLinkDown(const LinkKey& link) override { exchange_.OnLinkDown(link, Now()); }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override {
    return exchange_.OnControlFrame(link, header, payload, Now());
  }
  SegmentListener* segments() override { return &exchange_; }

  // ---- trainers; see SyncRunner
  // The member is here; its trainer is gone, or it was not admitted.
  void Add(LocalId local, const GroupKey& group, const std::string& name) override {
    kept_.Add(local.value(), group, name);
  }
  void Gone(LocalId local) override;
  // The revision of what is kept for the member, of these tensors; false: nothing is.
  bool KeptRevision(LocalId local, const LocalState& state, uint64_t* revision) const override {
    return kept_.Revision(local.value(), state.manifest, revision);
  }
  void Prepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override {
    syncs_.Prepare(state, std::move(done));
  }
  void Begin(LocalId local, const GroupKey& group, const StateSync& sync, bool with_step) override;
  std::optional<bool> Withdraw(LocalId local) override { return syncs_.Withdraw(local); }
  // The member is out: nobody asks for its state any more.
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

  // Runs `act` once nothing reads the member's state, because it has served it or because it is to
  // be kept: at once, or within a later Work(). What is handed over for one member runs in
  // that order.
  void WhenUnread(LocalId local, std::function<void()> act) override;

  // Goes on with whatever can.
  void Work() override;
  // When to call Work() at the latest.
  Tick NextDeadline() const override;
  // What the core has to be told, in order.
  std::vector<Event> PopEvents() override;
  // What trainers that fetch are to be told: of each at most ten a second.
  std::vector<std::pair<LocalId, control::FetchProgress>> PopProgress() override;
  std::vector<int64_t> PopHashTimes() { return syncs_.PopHashTimes(); }
  // Something is being hashed: `wake` follows.
  bool hashing() const { return !pool_.idle(); }
  // Without threads: HashPool::WorkHere().
  bool HashHere() { return pool_.WorkHere(); }
  // Something waits for WhenUnread().
  bool reading() const override { return !reads_.empty(); }
  uint64_t kept_bytes() const { return kept_.bytes(); }

 private:
  struct Member {
    GroupKey group;
    MemberId served;      // 0: has not been
    bool shared = false;  // while its trainer writes to it
    std::shared_ptr<const MemoryState> declared;
  };
  // States that are not served any more and still read, and what waits for the end of that.
  struct Reads {
    std::vector<std::shared_ptr<const LocalState>> states;
    bool keeping = false;  // SyncRunner::Keeping()
    std::vector<std::function<void()>> then;
  };
  // A transfer that is on, or over and not told yet.
  struct Fetch {
    Tick looked;  // when its progress was told
    uint64_t bytes = 0;
    uint64_t bytes_per_second = 0;
    uint64_t state_bytes = 0;
    bool background = false;
    bool measure = false;  // the core is to be told how much there is to fetch
  };

  Tick Now() const { return clock_(); }
  void Start(const StartTransfer& action);
  void Over(StateExchange::Ended ended);
  void EndReads();
  // Others may ask for what the member has committed.
  void ServeKept(LocalId local);
  void EndShare(LocalId local);
  // Others are told of its manifest only.
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
