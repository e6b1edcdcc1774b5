// The exchange of shared state with other peers: one StateServer, which gives state, the
// StateTransfers, which fetch state, and comparisons of manifests. The transport and the engine
// reach all of them through this class.
//
// It is the transport's listener for CHUNK_DATA. The caller passes on changes of links and the
// other frames of transfers (IsOfTransfer()), calls Work() after each Ring::RunOnce(), and takes
// the results with PopEnded() and PopCompared().
//
// Threads: the reactor thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/counters.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/state/hasher.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_server.h"
#include "peerd/state/state_transfer.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class StateExchange final : public SegmentListener {
 public:
  // The number of a local member.
  using Local = uint64_t;

  // What to fetch for a member. For the fields see TransferSpec.
  struct Start {
    Local local = 0;
    GroupKey group;
    Hash128 root;
    std::shared_ptr<MemoryState> state;
    std::vector<StateSource> sources;
    bool unequal_too = false;
    bool background = false;
  };
  struct Ended {
    Local local = 0;
    TransferResult result;
  };
  struct Compared {
    Local local = 0;
    std::string difference;  // "": there is none, or the other peer did not answer
  };
  struct Stats {
    uint64_t bytes_sent = 0;
    uint64_t bytes_received = 0;
    uint64_t bytes_repeated = 0;
    // Sources that sent a wrong chunk or wrong digests. Such a source is dropped at once, so it
    // counts once in each transfer.
    uint64_t chunks_corrupt = 0;
    uint32_t transfers = 0;  // transfers in progress
    uint32_t serving = 0;    // transfers of other peers that are served
  };

  // `transport` and `hasher` must outlive this object.
  StateExchange(PeerId self, Transport* transport, Hasher* hasher, uint32_t detect_ms);
  ~StateExchange() override;
  StateExchange(const StateExchange&) = delete;
  StateExchange& operator=(const StateExchange&) = delete;
  void SetDetectMs(uint32_t detect_ms);

  StateServer* server() { return &server_; }

  // Starts a transfer. A local member has one transfer at a time. Each ends with exactly one Ended.
  void StartTransfer(Start start, Tick now);
  // Change and stop the transfer of the member. They do nothing if there is none.
  void ChangeSources(Local local, const std::vector<StateSource>& sources, Tick now);
  void StopTransfer(Local local);
  // Fetches the manifest of another member and compares it with `ours`. Ends with one Compared,
  // after 2 * detect_ms at the latest.
  void CompareManifest(Local local, const GroupKey& group, std::shared_ptr<const Manifest> ours,
                       const StateSource& other, Tick now);
  // Returns the progress of the member's transfer; zeros if there is none.
  StateTransfer::Progress ProgressOf(Local local) const;

  // ---- reports of the transport
  void OnLinkUp(const LinkKey& link, Tick now);
  void OnLinkDown(const LinkKey& link, Tick now);
  // `in_group`: the peer at the other end is in the group that the frame names. A peer of the run
  // that is not gets nothing of its states.
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload, bool in_group, Tick now);
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override;
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override;
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override;
  void OnSegmentSent(uint64_t cookie) override { server_.OnSegmentSent(cookie); }
  uint64_t OnSegmentRepeat(uint64_t owner) override { return server_.OnSegmentRepeat(owner); }
  void OnReceivesDetached(uint64_t cookie) override;

  void Work(Tick now);
  // When to call Work() at the latest. A time in the past means at once.
  Tick NextDeadline() const;
  std::vector<Ended> PopEnded() { return std::exchange(ended_, {}); }
  std::vector<Compared> PopCompared() { return std::exchange(compared_, {}); }

  Stats GetStats() const;

 private:
  struct Transfer {
    Local local = 0;
    std::unique_ptr<StateTransfer> transfer;
  };
  // A manifest that is being fetched.
  struct Comparison {
    Local local = 0;
    GroupKey group;
    StateSource other;
    std::shared_ptr<const Manifest> ours;
    Tick deadline;
    bool over = false;  // the result is known, but the transport may still write to `buffer`
    std::vector<uint8_t> buffer;
    uint64_t placed = 0;     // bytes for which a place was given
    uint64_t got = 0;        // bytes that have come
    uint64_t detaching = 0;  // the cookie of the DetachReceives() in progress; 0: none
  };
  using Comparisons = std::map<uint64_t, Comparison>;

  StateTransfer* FindTransfer(Local local) const;
  LinkKey LinkOf(const Comparison& comparison) const {
    return {comparison.group.run, comparison.other.peer};
  }
  void EndComparison(Comparisons::iterator it, const std::string& difference);
  void FinishComparisons();

  const PeerId self_;
  Transport* const transport_;
  Hasher* const hasher_;
  uint32_t detect_ms_;
  StateServer server_;
  std::set<LinkKey> up_;        // links that are up
  uint64_t next_transfer_ = 1;  // the next number of a transfer or a comparison
  uint64_t next_detach_ = 1;
  std::map<uint64_t, Transfer> transfers_;
  Comparisons comparisons_;
  std::vector<Ended> ended_;
  std::vector<Compared> compared_;
  Stats past_;  // of transfers that have ended
};

// The counters that /metrics shows.
inline constexpr Counter<StateExchange::Stats> kStateCounters[] = {
    {"longhaul_peerd_state_bytes_sent_total", "Bytes of shared state sent to other members",
     &StateExchange::Stats::bytes_sent},
    {"longhaul_peerd_state_bytes_received_total",
     "Bytes of shared state received from other members, in right chunks",
     &StateExchange::Stats::bytes_received},
    {"longhaul_peerd_state_bytes_refetched_total",
     "Bytes of shared state received for nothing: the chunk came again, was wrong, or broke off",
     &StateExchange::Stats::bytes_repeated},
    {"longhaul_peerd_state_chunks_corrupt_total",
     "Chunks of shared state received with wrong bytes", &StateExchange::Stats::chunks_corrupt},
};

}  // namespace longhaul::peerd
