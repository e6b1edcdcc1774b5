// The syncs of shared state of the local members, from a trainer's call to its answer
// (docs/life_of_a_sync.md).
//
//   idle --(Begin)--> offered
//   offered --(fetch)--> fetching
//   fetching --(TransferEnded)--> offered: FetchDone, with the reason if it failed
//   fetching --(fetch of another state, after a restart of the coordinator)--> stopping
//   stopping --(TransferEnded)--> fetching
//   any --(end)--> idle, once no transfer writes any more. If `end` names a member to compare the
//                  manifest with, also waits for the comparison, but at most detect_ms
//   any --(the member is gone)--> forgotten, once no transfer writes any more
//
// A complete offer is served from the moment it is made, because a fetching peer may ask before the
// source hears of the election. Exception: a member with strategy `receive` serves a state only
// after it was elected.
//
// Fetched chunks go to the inbox. They reach the trainer's tensors only after the sync has ended
// well (peerd/state/local_state.h). The offer is incomplete from the start of a transfer until the
// transfer ends well. The trainer's next call offers its own tensors again. After a reconnect each
// open sync sends the offer that is true by then.
//
// A member is told exactly the outcome that the coordinator sent. After a refusal its program goes
// on to its next call, and after an abort it offers again; in both it waits for the other members.
// So the outcomes of all members must fit together, and only the coordinator can ensure that.
//
// A member in the background (docs/life_of_a_sync.md, "In the background") takes no part in syncs.
// Its calls are answered at once, and its state is held: peerd fetches the state that the group
// agreed on last, again and again, until the trainer takes it or the member takes part in a sync.
//
//   idle --(BeginBackground)--> held --(Chase)--> fetching, no call open
//   fetching --(Chase of another state)--> stopping, then fetching that state
//   fetching --(TransferEnded)--> held; whole, if it ended well
//   held, whole --(Take)--> idle: the state is the trainer's again
//   held --(Begin, when CaughtUp() is true)--> offered
//   fetching, no call open --(Begin, when CaughtUp() is true)--> stopping
//
// All local members are independent of each other, also those of one group. Plain state machine: no
// clock, no thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
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

  // Returns why the member may not begin a sync, or OK.
  Outcome MayBegin(LocalId local) const;
  // Returns the answer to a call that was refused, also for a member that is out.
  SyncDone RefusalOf(LocalId local, Outcome refusal) const;
  // Begins the sync of a trainer's call. MayBegin() must be OK. `with_vote`: the offer is sent with
  // the vote of the step boundary (see OfferOf()), until VoteAnswered().
  void Begin(LocalId local, const GroupKey& group, MemberId member, const SyncRequest& request,
             bool with_vote, std::vector<Action>* out);
  void VoteAnswered(LocalId local);
  // Returns the offer that the vote of the member carries, if any.
  std::optional<control::SyncOffer> OfferOf(LocalId local) const;

  // `share`: other members fetch in the background, so this member goes on serving the state after
  // the sync, until EndSharing().
  void Result(LocalId local, const control::SyncResult& result, bool share, Tick now,
              std::vector<Action>* out);
  void EndSharing(LocalId local, std::vector<Action>* out);
  // ---- a member in the background

  // True if the member should come out of the background and take part in syncs. `request`: what
  // the trainer brings to the sync of this step, or nullptr. `agreed`: the state agreed on last.
  bool CaughtUp(LocalId local, const SyncRequest* request,
                const control::StateAgreed& agreed) const;
  // A trainer's call to sync, in the background. MayBegin() must be OK. It is answered at once. But
  // if its manifest is not that of `agreed`, it ends with StateMismatch, after a comparison with
  // the manifest of the first of `sources`.
  void BeginBackground(LocalId local, const GroupKey& group, MemberId member,
                       const SyncRequest& request,
                       const std::optional<control::StateAgreed>& agreed,
                       const std::vector<control::SyncSource>& sources, Tick now,
                       std::vector<Action>* out);
  // Makes the held state become `agreed`: starts a transfer, or stops that of another state first.
  void Chase(LocalId local, const control::StateAgreed& agreed,
             const std::vector<control::SyncSource>& sources, std::vector<Action>* out);
  // Replaces the sources of the held state.
  void NameSources(LocalId local, const std::vector<control::SyncSource>& sources,
                   std::vector<Action>* out);
  // The transfer in progress has to fetch `bytes_left` bytes of a state of `bytes_total`.
  void Measured(LocalId local, uint64_t bytes_left, uint64_t bytes_total);
  void Take(LocalId local, Tick deadline, Tick now, std::vector<Action>* out);

  // ---- the driver
  void Ended(const TransferEnded& event, std::vector<Action>* out);
  // `difference`: in words, or "" if none is known.
  void ManifestCompared(LocalId local, const std::string& difference, std::vector<Action>* out);
  // The member is out; an open sync ends with `outcome`.
  void Remove(LocalId local, const Outcome& outcome, std::vector<Action>* out);
  // How far the member's transfer is; ignored if it has none.
  void SetProgress(LocalId local, const control::FetchProgress& progress);
  std::vector<control::FetchLoad> Fetches() const;
  // The control stream is open, and Hello was sent: sends open offers again. An offer that goes
  // with a vote is sent with the vote.
  void Resend(std::vector<Action>* out) const;
  void OnTime(Tick now, std::vector<Action>* out);
  Tick NextDeadline() const;

  // True if a sync of the member is not answered.
  bool Open(LocalId local) const;
  // True if a transfer may still write to the member's inbox.
  bool Writing(LocalId local) const;

  void CheckInvariants() const;
  LH_FIELDS(LocalSyncs, LH_FIELD(detect_ms_), LH_FIELD(syncs_));

 private:
  enum class Phase : uint8_t { kIdle, kOffered, kFetching, kStopping };
  // How a member in the background catches up.
  struct Background {
    bool held = false;            // the trainer has handed its state over, and not taken it
    bool taken = false;           // since its last call to sync, the trainer took `newest`
    Tick take_by = kNever;        // deadline of the open take; kNever: none is open
    control::StateAgreed newest;  // the state to fetch
    std::vector<control::SyncSource> sources;
    uint64_t rounds = 0;          // rounds begun, each for another revision
    uint64_t revision = 0;        // of the newest round
    bool measured = false;        // it is known how much the newest round has to fetch
    uint64_t least = UINT64_MAX;  // the fewest bytes that any round had to fetch
    uint32_t flat = 0;            // rounds in a row that had no fewer to fetch, or failed
    bool near = false;            // the round measured last had little to fetch
    // Why the last transfer failed; "": it did not. The next call or commit tries again.
    std::string failed;
    LH_FIELDS(Background, LH_FIELD(held), LH_FIELD(taken), LH_FIELD(take_by), LH_FIELD(newest),
              LH_FIELD(sources), LH_FIELD(rounds), LH_FIELD(revision), LH_FIELD(measured),
              LH_FIELD(least), LH_FIELD(flat), LH_FIELD(near), LH_FIELD(failed));
  };
  struct Sync {
    GroupKey group;
    MemberId member;
    uint64_t syncs = 0;   // the number of the last offer
    bool agreed = false;  // it has taken part in a commit, or its state was kept (kept_states.h)
    Phase phase = Phase::kIdle;
    bool call = false;  // a call is not answered
    std::optional<Background> background;
    bool with_vote = false;
    control::SyncOffer offer;         // describes what is here now
    bool elected = false;             // the state in `offer` was elected
    bool serving = false;             // other peers may fetch the state in `offer`
    bool shared = false;              // the state is served, though the call is answered
    bool share = false;               // it is to be served after the call, too
    control::SyncResult told;         // what the last fetch was to bring
    control::FetchProgress progress;  // of the transfer
    uint64_t bytes = 0;               // fetched
    uint32_t sources = 0;
    std::optional<control::SyncResult> next;  // kStopping: the fetch to begin after that
    std::optional<Outcome> ends;              // the outcome, once nothing delays the answer
    Tick compare_by = kNever;                 // deadline of the comparison; kNever: none is open
    bool removed = false;                     // the member is out
    LH_FIELDS(Sync, LH_FIELD(group), LH_FIELD(member), LH_FIELD(syncs), LH_FIELD(agreed),
              LH_FIELD(phase), LH_FIELD(call), LH_FIELD(background), LH_FIELD(with_vote),
              LH_FIELD(offer), LH_FIELD(elected), LH_FIELD(serving), LH_FIELD(shared),
              LH_FIELD(share), LH_FIELD(told), LH_FIELD(progress, rule::Aside{}), LH_FIELD(bytes),
              LH_FIELD(sources), LH_FIELD(next), LH_FIELD(ends), LH_FIELD(compare_by),
              LH_FIELD(removed));
  };

  // Sets the offer to what the trainer brings.
  static void Bring(Sync& sync, const SyncRequest& request);
  static bool Writes(const Sync& sync) {
    return sync.phase == Phase::kFetching || sync.phase == Phase::kStopping;
  }
  // Begins or ends serving, as the offer now demands.
  static void Serve(LocalId id, Sync& sync, std::vector<Action>* out);
  void Fetch(LocalId id, Sync& sync, const control::SyncResult& result,
             std::vector<Action>* out) const;
  void End(LocalId id, Sync& sync, const control::SyncResult& result, Tick now,
           std::vector<Action>* out);
  static void StartFetch(LocalId id, Sync& sync, const control::SyncResult& result,
                         std::vector<Action>* out);
  static void SayDone(const Sync& sync, const TransferEnded& event, std::vector<Action>* out);
  // True if the held state is the state agreed on last.
  static bool Whole(const Sync& sync);
  static void StartRound(LocalId id, Sync& sync, std::vector<Action>* out);
  static void Measure(Sync& sync, uint64_t bytes_left, uint64_t bytes_total);
  void BackgroundEnded(LocalId id, Sync& sync, const TransferEnded& event,
                       std::vector<Action>* out);
  static Outcome Failed(const Background& background);
  static void AnswerTake(LocalId id, Sync& sync, const Outcome& outcome, std::vector<Action>* out);
  static void EndShare(LocalId id, Sync& sync, std::vector<Action>* out);
  // Answers the call if it has an outcome, and no transfer or comparison delays the answer.
  void Finish(LocalId id, std::vector<Action>* out);

  uint32_t detect_ms_;
  std::map<LocalId, Sync> syncs_;
};

}  // namespace longhaul::peerd
