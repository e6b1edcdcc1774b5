// The syncs of shared state of the local members, from a trainer's call to its answer
// (docs/life_of_a_sync.md).
//
//   idle --(Begin)--> offered
//   offered --(fetch)--> fetching
//   fetching --(TransferEnded)--> offered: FetchDone, with the reason if it failed
//   fetching --(fetch of another state, after a restart of the coordinator)--> stopping
//   stopping --(TransferEnded)--> fetching
//   any --(end)--> idle, once no transfer writes any more; if it names somebody to compare the
//                  manifest with, after that or after detect_ms
//   any --(the member is gone)--> forgotten, once no transfer writes any more
//
// Whatever is offered is served from then on: whoever is told to fetch may ask before the source
// hears of the election. A member that only receives serves nothing but what was elected.
//
// What is fetched lies apart from the trainer's tensors, which are written when the sync has ended
// well and not before (peerd/state/local_state.h). From the beginning of a transfer until its good
// end the offer is incomplete; the trainer's next call offers its own tensors again. After a
// reconnect each open sync says what is there by then.
//
// The outcome of a sync is the coordinator's, word by word: a member that was refused goes on to
// where others wait for it, one whose sync was aborted waits for them, so all have to be told the
// same.
//
// A member in the background (docs/life_of_a_sync.md, "In the background") has no part in syncs.
// Its calls are answered at once, and its state is held: whatever is agreed on is fetched, the
// newest first, until the trainer takes it or syncs again.
//
//   idle --(BeginBackground)--> held --(Chase)--> fetching, no call open
//   fetching --(Chase of another state)--> stopping, then fetching that
//   fetching --(TransferEnded)--> held; whole, if it ended well
//   held, whole --(Take)--> idle: it is the trainer's
//   held, fetching --(Begin, which Ready() says is due)--> offered, stopping
//
// Several local members are independent of each other, also in one group. Plain state machine: no
// clock, no thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

class LocalSyncs {
 public:
  explicit LocalSyncs(uint32_t detect_ms) : detect_ms_(detect_ms) {}
  void SetDetectMs(uint32_t detect_ms) { detect_ms_ = detect_ms; }

  // Why the member may not begin this sync; OK if it may.
  Outcome MayBegin(LocalId local) const;
  // The answer to a call that was refused, also to one of a member that is out.
  SyncDone Refused(LocalId local, Outcome refusal) const;
  // A trainer's call that MayBegin(). `with_vote`: the offer goes with the vote of its step
  // boundary (OfferOf()), until VoteAnswered().
  void Begin(LocalId local, const GroupKey& group, MemberId member, const SyncRequest& request,
             bool with_vote, std::vector<Action>* out);
  void VoteAnswered(LocalId local);
  // What the vote of the member has to carry; none: nothing.
  std::optional<control::SyncOffer> OfferOf(LocalId local) const;

  // `share`: others fetch in the background, so what is agreed on is served from then on, too.
  void Result(LocalId local, const control::SyncResult& result, bool share, Tick now,
              std::vector<Action>* out);
  void EndSharing(LocalId local, std::vector<Action>* out);
  // ---- a member in the background

  // It is time to take part in syncs like all others. `request`: what the trainer brings, or
  // nullptr; `agreed`: the newest.
  bool Ready(LocalId local, const SyncRequest* request, const control::StateAgreed& agreed) const;
  // A trainer's call that MayBegin(). Answered at once, unless its tensors are not those of
  // `agreed`; `sources`: whose to compare with then.
  void BeginBackground(LocalId local, const GroupKey& group, MemberId member,
                       const SyncRequest& request,
                       const std::optional<control::StateAgreed>& agreed,
                       const std::vector<control::SyncSource>& sources, Tick now,
                       std::vector<Action>* out);
  // What is held is to become this.
  void Chase(LocalId local, const control::StateAgreed& agreed,
             const std::vector<control::SyncSource>& sources, std::vector<Action>* out);
  void NameSources(LocalId local, const std::vector<control::SyncSource>& sources,
                   std::vector<Action>* out);
  void Measured(LocalId local, uint64_t bytes_left, uint64_t bytes_total);
  void Take(LocalId local, Tick deadline, Tick now, std::vector<Action>* out);

  // ---- the driver
  void Ended(const TransferEnded& event, std::vector<Action>* out);
  // `difference`: in words, or why there are none.
  void ManifestCompared(LocalId local, const std::string& difference, std::vector<Action>* out);
  // The member is out; an open sync ends with this.
  void Remove(LocalId local, const Outcome& outcome, std::vector<Action>* out);
  // How far a transfer is; ignored if there is none.
  void SetProgress(LocalId local, const control::FetchProgress& progress);
  std::vector<control::FetchLoad> Fetches() const;
  // The control stream stands, Hello went before. Offers that a vote carries go with it.
  void Resend(std::vector<Action>* out) const;
  void OnTime(Tick now, std::vector<Action>* out);
  Tick NextDeadline() const;

  // A call is not answered.
  bool Open(LocalId local) const;
  // A transfer may still write to what was fetched.
  bool Writing(LocalId local) const;

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  enum class Phase : uint8_t { kIdle, kOffered, kFetching, kStopping };
  // How a member in the background catches up.
  struct Background {
    bool held = false;            // the trainer has handed its state over
    bool taken = false;           // since it last called, it took `newest`
    Tick take_by = kNever;        // it waits until then
    control::StateAgreed newest;  // what it is to become
    std::vector<control::SyncSource> sources;
    uint64_t rounds = 0;          // begun, each for another revision
    uint64_t revision = 0;        // of the newest of them
    bool measured = false;        // what that one has to fetch is known
    uint64_t least = UINT64_MAX;  // that any had to fetch
    uint32_t flat = 0;            // rounds in a row that had no less, or failed
    bool near = false;            // the newest one had little
    std::string
        failed;  // why the newest one did, which is not tried again by itself; "": it did not
  };
  struct Sync {
    GroupKey group;
    MemberId member;
    uint64_t syncs = 0;   // numbers used
    bool agreed = false;  // it has taken part in a commit
    Phase phase = Phase::kIdle;
    bool call = false;  // is not answered
    std::optional<Background> background;
    bool with_vote = false;
    control::SyncOffer offer;         // says what is there now
    bool elected = false;             // that is what all are to have
    bool serving = false;             // it may be asked for that
    bool shared = false;              // it is served although its call is answered
    bool share = false;               // that is wanted
    control::SyncResult told;         // the last fetch
    control::FetchProgress progress;  // of the transfer
    uint64_t bytes = 0;
    uint32_t sources = 0;
    std::optional<control::SyncResult> next;  // kStopping: a fetch that begins then
    std::optional<Outcome> ends;              // how it ends when nothing is waited for any more
    Tick compare_by = kNever;                 // the difference is waited for until then
    bool removed = false;
  };

  // What the trainer brings is what is there now.
  static void Bring(Sync& sync, const SyncRequest& request);
  static bool Writes(const Sync& sync) {
    return sync.phase == Phase::kFetching || sync.phase == Phase::kStopping;
  }
  // Brings what is served in line with what is offered.
  static void Serve(LocalId id, Sync& sync, std::vector<Action>* out);
  void Fetch(LocalId id, Sync& sync, const control::SyncResult& result,
             std::vector<Action>* out) const;
  void End(LocalId id, Sync& sync, const control::SyncResult& result, Tick now,
           std::vector<Action>* out);
  static void StartFetch(LocalId id, Sync& sync, const control::SyncResult& result,
                         std::vector<Action>* out);
  static void SayDone(const Sync& sync, const TransferEnded& event, std::vector<Action>* out);
  // There is nothing to fetch any more.
  static bool Whole(const Sync& sync);
  static void StartRound(LocalId id, Sync& sync, std::vector<Action>* out);
  static void Measure(Sync& sync, uint64_t bytes_left, uint64_t bytes_total);
  void BackgroundEnded(LocalId id, Sync& sync, const TransferEnded& event,
                       std::vector<Action>* out);
  static Outcome Failed(const Background& background);
  static void AnswerTake(LocalId id, Sync& sync, const Outcome& outcome, std::vector<Action>* out);
  static void EndShare(LocalId id, Sync& sync, std::vector<Action>* out);
  // Answers the call if nothing is in the way.
  void Finish(LocalId id, std::vector<Action>* out);

  uint32_t detect_ms_;
  std::map<LocalId, Sync> syncs_;
};

}  // namespace longhaul::peerd
