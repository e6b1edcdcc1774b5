// The protocol core of a peer: decides about local members, epochs, ops and syncs. It moves no
// bytes of tensors.
//
// The core is pure and deterministic: Step(event, now) returns actions. It has no clock, thread,
// socket or protobuf. The driver carries out the actions in order.
//
// One op at one peer (docs/life_of_an_op.md):
//
//   gathering --(all local members posted)--> announced: READY to every other participant
//   announced --> attempt running (segments flow to another peer once its READY is here)
//   running --(result complete, all sends returned, every READY here)--> done: DONE to all
//   done --(every DONE here)--> settled: trainers get the outcome
//   announced, running, done --(PrepareEpoch that freezes)--> frozen: reported in EpochReady, and
//                              its attempt is stopped unless it is done
//   frozen --(CommitEpoch)--> settled (commit, abort) or announced again (redo, next attempt)
//
// A one-shot op carries its input in the READY and has no segments. Its trainers are usually
// answered when it is done (op_table.h). algorithm.h chooses the algorithm of an op.
//
// local_syncs.h handles syncs of shared state. The driver hashes states and moves their chunks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/counters.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

struct CoreConfig {
  PeerId peer;
  std::vector<std::string> endpoints;
  uint32_t lanes = 0;
  std::string version;
  std::string host;
  uint32_t detect_ms = 1500;          // until the coordinator's Welcome gives another value
  uint32_t drain_timeout_ms = 30000;  // for a drain that the coordinator asks for
};

class PeerCore {
 public:
  explicit PeerCore(CoreConfig config);
  ~PeerCore();
  PeerCore(PeerCore&&) noexcept;
  PeerCore& operator=(PeerCore&&) noexcept;

  std::vector<Action> Step(const Event& event, Tick now);
  Tick NextDeadline() const;

  // Sets the bytes that ops of the group have moved so far, for the next heartbeat.
  void SetBytes(const GroupKey& group, uint64_t sent, uint64_t received);
  // Sets the lanes on which this peer waits longest, for each run at most one, for the heartbeats
  // of groups with an open op. A run that is not named has none.
  void SetWorstLanes(std::map<std::string, control::WorstLane> worst);
  // Sets how far the transfer of a local member is, for heartbeats; ignored if it has none.
  void SetProgress(LocalId local, const control::FetchProgress& progress);

  // The members of an epoch of the local member's group, in rank order: of the committed one, or of
  // that in which the member's last step boundary was passed. Empty if the member is not in the
  // committed epoch.
  enum class AsOf { kNow, kStep };
  struct MembersView {
    Epoch epoch;
    std::vector<MemberId> members;
  };
  MembersView GetMembers(LocalId local, AsOf as_of = AsOf::kNow) const;
  // Whether a member here is in the group, and the other peer is in its committed epoch or in the
  // one that is prepared.
  bool HasPeer(const GroupKey& group, PeerId peer) const;
  // Returns what is known of a member of the local member's group, also of a former one.
  struct MemberView {
    KnownMember member;
    int rank = -1;  // in the committed epoch; -1: it is not in it
  };
  std::optional<MemberView> GetMember(LocalId local, MemberId member) const;

  // What the driver must know about a post before it gives the LocalPost to Step(). nullopt: the
  // core will refuse the post.
  std::optional<PostView> ViewPost(const LocalPost& post) const;

  // Counts for metrics and the heartbeat.
  struct Stats {
    uint32_t members = 0;
    uint32_t ops_open = 0;
    uint64_t ops_committed = 0;
    uint64_t ops_aborted = 0;
    uint64_t ops_refused = 0;
    uint64_t retries = 0;
    uint64_t frames_stale = 0;    // of an older attempt
    uint64_t frames_refused = 0;  // against the protocol
    double mesh_share = 0;        // what this peer owns of a tensor in the mesh; of the largest
  };
  Stats GetStats() const;

  // Aborts the process with a reason if an internal invariant is broken. Called by tests after each
  // step.
  void CheckInvariants() const;
  uint64_t Digest() const;
  // Returns a core in the same state, so that a search can try another future.
  PeerCore Clone() const;

 private:
  class Impl;
  explicit PeerCore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The counters that /metrics shows.
inline constexpr Counter<PeerCore::Stats> kCoreCounters[] = {
    {"longhaul_peerd_op_retries_total", "Times that an op was redone after a fault",
     &PeerCore::Stats::retries},
    {"longhaul_peerd_frames_stale_total", "Frames received for attempts that were over",
     &PeerCore::Stats::frames_stale},
    {"longhaul_peerd_frames_refused_total",
     "Frames received against the protocol; each closed its link",
     &PeerCore::Stats::frames_refused},
};

}  // namespace longhaul::peerd
