#include "peerd/core/local_syncs.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {

using control::SyncAction;
using control::SyncResult;
using control::SyncStrategy;

namespace {

// A member comes out of the background if a round after its first one begins with at most
// kNearBytes to fetch, or at most 1/kNearPart of the state. A sync then delays nobody for long.
constexpr uint64_t kNearBytes = uint64_t{16} << 20;
constexpr uint64_t kNearPart = 64;
// After so many rounds in a row that had no less to fetch than an earlier round, the member comes
// out of the background as well: the state changes as fast as it is fetched.
constexpr uint32_t kFlatRoundsMax = 8;

}  // namespace

// ------------------------------------------------------------------------------ trainers

Outcome LocalSyncs::MayBegin(LocalId local) const {
  if (!Open(local)) return {};
  return {Code::kFailedPrecondition, "this member is in a sync already: wait for its end"};
}

SyncDone LocalSyncs::RefusalOf(LocalId local, Outcome refusal) const {
  SyncDone ended{local, std::move(refusal)};
  const auto it = syncs_.find(local);
  if (it == syncs_.end()) return ended;
  // The trainer may not write to its tensors while they are held. Nor may it while a transfer still
  // writes, which may be so after the member is out.
  const Sync& sync = it->second;
  ended.background = (sync.background && sync.background->held) || (!sync.call && Writes(sync));
  return ended;
}

void LocalSyncs::Begin(LocalId local, const GroupKey& group, MemberId member,
                       const SyncRequest& request, bool with_vote, std::vector<Action>* out) {
  LH_CHECK(MayBegin(local).ok()) << "local " << local.value();
  Sync& sync = syncs_[local];
  EndShare(local, sync, out);
  sync.group = group;
  sync.member = member;
  sync.call = true;
  sync.with_vote = with_vote;
  sync.elected = false;
  const bool held = sync.background && sync.background->held;
  if (sync.phase == Phase::kFetching) {
    out->push_back(StopTransfer{local});
    sync.phase = Phase::kStopping;
  } else if (sync.phase == Phase::kIdle) {
    sync.phase = Phase::kOffered;
  }
  AnswerTake(local, sync, {Code::kAborted, "this member has called again"}, out);
  // If the state is held, the offer describes it already.
  if (!held) Bring(sync, request);
  sync.offer.number = ++sync.syncs;
  sync.offer.strategy = request.strategy;
  // In the background, tensors with allow_unequal were not fetched. If the member lacks them, its
  // offer is incomplete, so that they are fetched in this sync, while the sources wait. A member
  // that sends its own state fetches nothing.
  const bool sends = request.strategy == SyncStrategy::kSend;
  const bool lacks = request.unequal && !sync.agreed && (held || !sends);
  if (sync.background && lacks) sync.offer.complete = false;
  // A member whose state is incomplete has nothing to send.
  if (sends && !sync.offer.complete) sync.offer.strategy = SyncStrategy::kReceive;
  sync.background.reset();
  Serve(local, sync, out);
  if (!with_vote) out->push_back(ToCoordinator{control::SyncVote{group, member, sync.offer}});
}

void LocalSyncs::Bring(Sync& sync, const SyncRequest& request) {
  sync.bytes = 0;
  sync.sources = 0;
  // A kept state has the tensors with allow_unequal, too: they need not be fetched.
  if (request.kept) sync.agreed = true;
  sync.offer = {sync.syncs,    request.strategy, request.revision, request.manifest,
                request.state, request.whole,    request.kept};
}

void LocalSyncs::VoteAnswered(LocalId local) {
  const auto it = syncs_.find(local);
  if (it != syncs_.end()) it->second.with_vote = false;
}

std::optional<control::SyncOffer> LocalSyncs::OfferOf(LocalId local) const {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || !it->second.with_vote) return std::nullopt;
  return it->second.offer;
}

void LocalSyncs::Remove(LocalId local, const Outcome& outcome, std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.removed) return;
  Sync& sync = it->second;
  EndShare(local, sync, out);
  AnswerTake(local, sync, outcome, out);
  sync.background.reset();
  sync.removed = true;
  sync.next.reset();
  sync.compare_by = kNever;
  if (sync.phase == Phase::kIdle && !sync.ends) {
    syncs_.erase(it);
    return;
  }
  if (sync.phase == Phase::kFetching) {
    out->push_back(StopTransfer{local});
    sync.phase = Phase::kStopping;
  }
  if (!sync.call) return;
  if (!sync.ends) sync.ends = outcome;
  Finish(local, out);
}

// ------------------------------------------------------------------------------ the coordinator

void LocalSyncs::Result(LocalId local, const SyncResult& result, bool share, Tick now,
                        std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end()) return;
  Sync& sync = it->second;
  // The message is repeated, or belongs to a sync that is over.
  if (!sync.call || sync.ends || sync.offer.number != result.number) return;
  sync.with_vote = false;
  sync.share = share;
  switch (result.action) {
    case SyncAction::kServe:
      sync.elected = true;
      return Serve(local, sync, out);
    case SyncAction::kFetch:
      return Fetch(local, sync, result, out);
    case SyncAction::kEnd:
      return End(local, sync, result, now, out);
  }
}

void LocalSyncs::Serve(LocalId id, Sync& sync, std::vector<Action>* out) {
  const bool may = sync.elected || sync.offer.strategy != SyncStrategy::kReceive;
  const bool serves = sync.phase == Phase::kOffered && sync.offer.complete && may;
  if (serves == sync.serving) return;
  sync.serving = serves;
  if (serves) {
    out->push_back(ServeState{id, sync.group, sync.member, sync.offer.state});
  } else {
    out->push_back(EndServe{id});
  }
}

void LocalSyncs::Fetch(LocalId id, Sync& sync, const SyncResult& result,
                       std::vector<Action>* out) const {
  const bool same = sync.told.state == result.state && sync.told.number == result.number;
  switch (sync.phase) {
    case Phase::kOffered:
      if (!sync.offer.complete || sync.offer.state != result.state) {
        return StartFetch(id, sync, result, out);
      }
      // The state is here already: FetchDone was lost with the control stream.
      sync.told = result;
      sync.elected = true;
      Serve(id, sync, out);
      return SayDone(sync, {id, {}, 0, {}, {}}, out);
    case Phase::kFetching:
      sync.told = result;
      if (same) {
        out->push_back(ChangeSources{id, result.sources});
        return;
      }
      // A restarted coordinator has elected another state.
      sync.phase = Phase::kStopping;
      sync.next = result;
      out->push_back(StopTransfer{id});
      return;
    case Phase::kStopping:
      sync.told = result;
      sync.next = result;
      return;
    case Phase::kIdle:
      return;
  }
}

void LocalSyncs::StartFetch(LocalId id, Sync& sync, const SyncResult& result,
                            std::vector<Action>* out) {
  sync.phase = Phase::kFetching;
  sync.told = result;
  sync.progress = {};
  sync.offer.complete = false;
  sync.elected = false;
  Serve(id, sync, out);
  const bool background = sync.background.has_value();
  out->push_back(StartTransfer{id, sync.group, result.revision, result.manifest, result.state,
                               result.sources, !background && !sync.agreed, background});
}

void LocalSyncs::End(LocalId id, Sync& sync, const SyncResult& result, Tick now,
                     std::vector<Action>* out) {
  sync.ends = result.outcome;
  if (result.outcome.ok()) {
    if (sync.offer.state == result.state && sync.offer.complete) {
      sync.offer.revision = result.revision;
      sync.agreed = true;
    } else {
      sync.ends = {Code::kInternal, "the coordinator ended the sync with state " +
                                        ToString(result.state) +
                                        ", which this member does not have: report this"};
    }
  } else if (!result.sources.empty()) {
    sync.compare_by = now + Millis(detect_ms_);
    out->push_back(CompareManifest{id, result.sources.front()});
  }
  sync.next.reset();
  if (sync.phase == Phase::kFetching) {
    out->push_back(StopTransfer{id});
    sync.phase = Phase::kStopping;
  }
  Finish(id, out);
}

void LocalSyncs::Resend(std::vector<Action>* out) const {
  for (const auto& [id, sync] : syncs_) {
    if (!sync.call || sync.ends || sync.with_vote) continue;
    out->push_back(ToCoordinator{control::SyncVote{sync.group, sync.member, sync.offer}});
  }
}

// ------------------------------------------------------------------------------ the driver

void LocalSyncs::Ended(const TransferEnded& event, std::vector<Action>* out) {
  const auto it = syncs_.find(event.local);
  LH_CHECK(it != syncs_.end()) << "a transfer of nobody ended: local " << event.local.value();
  Sync& sync = it->second;
  LH_CHECK(sync.phase == Phase::kFetching || sync.phase == Phase::kStopping)
      << "local " << event.local.value() << " fetches nothing";
  sync.bytes += event.bytes;
  sync.sources += static_cast<uint32_t>(event.sources.size());
  if (!sync.call) return BackgroundEnded(event.local, sync, event, out);
  // A transfer that was told to stop may still end well; its result does not count.
  const bool told = sync.phase == Phase::kFetching;
  if (event.outcome.ok() && told) {
    sync.offer.state = sync.told.state;
    sync.offer.revision = sync.told.revision;
    sync.offer.complete = true;
    sync.offer.kept = false;
    sync.elected = true;
    sync.phase = Phase::kOffered;
    Serve(event.local, sync, out);
    return SayDone(sync, event, out);
  }
  if (told) {
    // The transfer failed. The coordinator ends the sync for all members.
    sync.phase = Phase::kOffered;
    return SayDone(sync, event, out);
  }
  if (sync.next) {
    const SyncResult next = *std::exchange(sync.next, std::nullopt);
    return StartFetch(event.local, sync, next, out);
  }
  sync.phase = Phase::kOffered;
  Finish(event.local, out);
}

void LocalSyncs::SetProgress(LocalId local, const control::FetchProgress& progress) {
  const auto it = syncs_.find(local);
  if (it != syncs_.end() && it->second.phase == Phase::kFetching) it->second.progress = progress;
}

std::vector<control::FetchLoad> LocalSyncs::Fetches() const {
  std::vector<control::FetchLoad> fetches;
  for (const auto& [id, sync] : syncs_) {
    if (sync.phase == Phase::kFetching) {
      fetches.push_back({sync.group, sync.member, sync.progress});
    }
  }
  return fetches;
}

void LocalSyncs::SayDone(const Sync& sync, const TransferEnded& event, std::vector<Action>* out) {
  control::FetchDone done{sync.group, sync.member, sync.offer.number, event.outcome};
  if (event.outcome.ok()) done.state = sync.offer.state;
  done.bytes = event.bytes;
  done.sources = event.sources;
  done.corrupt = event.corrupt;
  out->push_back(ToCoordinator{std::move(done)});
}

void LocalSyncs::ManifestCompared(LocalId local, const std::string& difference,
                                  std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.compare_by == kNever) return;
  it->second.compare_by = kNever;
  if (!difference.empty()) it->second.ends->text += ": " + difference;
  Finish(local, out);
}

void LocalSyncs::OnTime(Tick now, std::vector<Action>* out) {
  std::vector<LocalId> due;
  for (auto& [id, sync] : syncs_) {
    if (sync.compare_by <= now) due.push_back(id);
    if (!sync.background || sync.background->take_by > now) continue;
    AnswerTake(id, sync,
               {Code::kDeadlineExceeded, "the state that was agreed on last is not all here yet"},
               out);
  }
  for (const LocalId id : due) ManifestCompared(id, "", out);
}

Tick LocalSyncs::NextDeadline() const {
  Tick due = kNever;
  for (const auto& [id, sync] : syncs_) {
    due = std::min(due, sync.compare_by);
    if (sync.background) due = std::min(due, sync.background->take_by);
  }
  return due;
}

void LocalSyncs::Finish(LocalId id, std::vector<Action>* out) {
  Sync& sync = syncs_.at(id);
  if (!sync.ends || sync.phase == Phase::kStopping || sync.compare_by != kNever) return;
  SyncDone ended{id, *std::exchange(sync.ends, std::nullopt)};
  if (ended.outcome.ok()) {
    ended.revision = sync.offer.revision;
    ended.state = sync.offer.state;
  }
  ended.bytes = sync.bytes;
  ended.sources = sync.sources;
  const bool served = std::exchange(sync.serving, false);
  sync.phase = Phase::kIdle;
  sync.call = false;
  if (served) out->push_back(EndServe{id});
  // After the answer the trainer may write to its tensors, so the state may change.
  if (sync.share && served && ended.outcome.ok() && !sync.removed) {
    sync.shared = true;
    out->push_back(ServeState{id, sync.group, sync.member, sync.offer.state, true});
  }
  sync.with_vote = false;
  out->push_back(std::move(ended));
  if (sync.removed) syncs_.erase(id);
}

// ------------------------------------------------------------------------------ the background

bool LocalSyncs::CaughtUp(LocalId local, const SyncRequest* request,
                          const control::StateAgreed& agreed) const {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || !it->second.background) return false;
  const Background& b = *it->second.background;
  // The trainer took the newest revision and made the next step from it, as the others did.
  const bool abreast = request != nullptr && b.taken && b.newest == agreed &&
                       request->revision == agreed.revision + 1;
  return abreast || b.near || b.flat >= kFlatRoundsMax;
}

void LocalSyncs::BeginBackground(LocalId local, const GroupKey& group, MemberId member,
                                 const SyncRequest& request,
                                 const std::optional<control::StateAgreed>& agreed,
                                 const std::vector<control::SyncSource>& sources, Tick now,
                                 std::vector<Action>* out) {
  LH_CHECK(MayBegin(local).ok()) << "local " << local.value();
  Sync& sync = syncs_[local];
  sync.group = group;
  sync.member = member;
  AnswerTake(local, sync, {Code::kAborted, "this member has called again"}, out);
  if (!sync.background) sync.background = Background{};
  Background& b = *sync.background;
  if (b.held && sync.offer.manifest != request.manifest) {
    if (sync.phase != Phase::kIdle) {
      out->push_back(RefusalOf(local, {Code::kFailedPrecondition,
                                       "another state is being fetched for this member in the "
                                       "background: take that one first"}));
      return;
    }
    b.held = false;
  }
  if (!std::exchange(b.held, true)) Bring(sync, request);
  b.taken = false;
  if (agreed && agreed->manifest != request.manifest) {
    b.held = false;
    sync.call = true;
    if (sync.phase == Phase::kFetching) out->push_back(StopTransfer{local});
    sync.phase = Writes(sync) ? Phase::kStopping : Phase::kOffered;
    sync.ends = {
        Code::kStateMismatch,
        "the tensors that this member declares differ from those that the group agreed on"};
    if (!sources.empty()) {
      sync.compare_by = now + Millis(detect_ms_);
      out->push_back(CompareManifest{local, sources.front()});
    }
    return Finish(local, out);
  }
  SyncDone ended{local};
  ended.background = true;
  out->push_back(std::move(ended));
}

bool LocalSyncs::Whole(const Sync& sync) {
  return sync.phase == Phase::kIdle && sync.offer.complete && sync.background->rounds > 0 &&
         sync.offer.state == sync.background->newest.state;
}

void LocalSyncs::Chase(LocalId local, const control::StateAgreed& agreed,
                       const std::vector<control::SyncSource>& sources, std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || !it->second.background || !it->second.background->held) return;
  Sync& sync = it->second;
  Background& b = *sync.background;
  // The manifests differ. The member's next call gets StateMismatch.
  if (sync.offer.manifest != agreed.manifest) return;
  const bool same = b.newest.state == agreed.state;
  b.newest = agreed;
  b.sources = sources;
  if (sync.phase == Phase::kIdle) return StartRound(local, sync, out);
  if (same || sync.phase == Phase::kStopping) return;
  if (!b.measured) ++b.flat;
  sync.phase = Phase::kStopping;
  out->push_back(StopTransfer{local});
}

void LocalSyncs::StartRound(LocalId id, Sync& sync, std::vector<Action>* out) {
  Background& b = *sync.background;
  if (b.rounds == 0 || b.revision != b.newest.revision) {
    ++b.rounds;
    b.revision = b.newest.revision;
    b.measured = false;
  }
  b.failed.clear();
  if (sync.offer.complete && sync.offer.state == b.newest.state) {
    sync.offer.revision = b.newest.revision;
    if (!b.measured) Measure(sync, 0, 0);
    if (b.take_by != kNever) AnswerTake(id, sync, {}, out);
    return;
  }
  if (b.sources.empty()) return;
  sync.offer.kept = false;
  SyncResult newest;
  newest.revision = b.newest.revision;
  newest.manifest = b.newest.manifest;
  newest.state = b.newest.state;
  newest.sources = b.sources;
  StartFetch(id, sync, newest, out);
}

void LocalSyncs::Measure(Sync& sync, uint64_t bytes_left, uint64_t bytes_total) {
  Background& b = *sync.background;
  b.measured = true;
  b.flat = bytes_left < b.least ? 0 : b.flat + 1;
  b.least = std::min(b.least, bytes_left);
  // The first round does not show how much changes from one revision to the next.
  b.near = b.rounds > 1 && bytes_left <= std::max(kNearBytes, bytes_total / kNearPart);
}

void LocalSyncs::Measured(LocalId local, uint64_t bytes_left, uint64_t bytes_total) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || !it->second.background) return;
  if (it->second.phase != Phase::kFetching || it->second.background->measured) return;
  Measure(it->second, bytes_left, bytes_total);
}

void LocalSyncs::NameSources(LocalId local, const std::vector<control::SyncSource>& sources,
                             std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || !it->second.background) return;
  it->second.background->sources = sources;
  if (it->second.phase != Phase::kFetching) return;
  out->push_back(ChangeSources{local, sources});
}

// No other member waits for this transfer. If it has failed, the next call or commit begins
// another.
void LocalSyncs::BackgroundEnded(LocalId id, Sync& sync, const TransferEnded& event,
                                 std::vector<Action>* out) {
  const bool told = sync.phase == Phase::kFetching;
  sync.phase = Phase::kIdle;
  if (event.outcome.ok() && told) {
    sync.offer.state = sync.told.state;
    sync.offer.revision = sync.told.revision;
    sync.offer.complete = true;
    if (!sync.background->measured) Measure(sync, event.bytes, 0);
    if (sync.background->take_by != kNever) AnswerTake(id, sync, {}, out);
    return;
  }
  if (sync.removed) {
    syncs_.erase(id);
    return;
  }
  if (!told) return StartRound(id, sync, out);
  ++sync.background->flat;
  sync.background->failed = event.outcome.text;
  AnswerTake(id, sync, Failed(*sync.background), out);
}

void LocalSyncs::Take(LocalId local, Tick deadline, Tick now, std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || !it->second.background ||
      (!it->second.background->held && !it->second.background->taken)) {
    out->push_back(TakeDone{
        local,
        {Code::kFailedPrecondition, "nothing is fetched for this member in the background"}});
    return;
  }
  Sync& sync = it->second;
  // A member has one open take: the newer one replaces the older.
  AnswerTake(local, sync, {Code::kAborted, "this member has asked again"}, out);
  sync.background->take_by = std::max(deadline, now);
  const bool idle = sync.phase == Phase::kIdle;
  if (sync.background->taken || Whole(sync)) {
    AnswerTake(local, sync, {}, out);
  } else if (idle && !sync.background->failed.empty()) {
    AnswerTake(local, sync, Failed(*sync.background), out);
  }
}

Outcome LocalSyncs::Failed(const Background& background) {
  return {Code::kAborted, "what the group agreed on last could not be fetched (" +
                              background.failed +
                              "); it is tried again with the next step. Members with --keep-state "
                              "of peerd give it also while they train"};
}

// Answers the open take, if there is one. OK: all of the state is here.
void LocalSyncs::AnswerTake(LocalId id, Sync& sync, const Outcome& outcome,
                            std::vector<Action>* out) {
  if (!sync.background || std::exchange(sync.background->take_by, kNever) == kNever) return;
  TakeDone done{id, outcome};
  if (outcome.ok()) {
    sync.background->held = false;
    sync.background->taken = true;
    done.revision = sync.offer.revision;
    done.state = sync.offer.state;
    done.bytes = sync.bytes;
    done.sources = sync.sources;
  }
  out->push_back(std::move(done));
}

void LocalSyncs::EndSharing(LocalId local, std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it != syncs_.end()) EndShare(local, it->second, out);
}

void LocalSyncs::EndShare(LocalId id, Sync& sync, std::vector<Action>* out) {
  if (std::exchange(sync.shared, false)) out->push_back(EndServe{id});
}

// ------------------------------------------------------------------------------ view

bool LocalSyncs::Open(LocalId local) const {
  const auto it = syncs_.find(local);
  return it != syncs_.end() && it->second.call;
}

bool LocalSyncs::Writing(LocalId local) const {
  const auto it = syncs_.find(local);
  return it != syncs_.end() && Writes(it->second);
}

void LocalSyncs::CheckInvariants() const {
  for (const auto& [id, sync] : syncs_) {
    const std::string name = "local " + std::to_string(id.value());
    LH_CHECK(!sync.with_vote || sync.phase == Phase::kOffered || sync.phase == Phase::kStopping)
        << name;
    LH_CHECK(sync.call || !sync.ends) << name << " ends without a call";
    LH_CHECK(sync.call == (sync.phase == Phase::kOffered) || sync.phase == Phase::kFetching ||
             sync.phase == Phase::kStopping)
        << name;
    LH_CHECK(sync.call || sync.background || sync.removed || sync.phase == Phase::kIdle) << name;
    LH_CHECK(!sync.call || !sync.background || sync.ends) << name;
    LH_CHECK(!sync.shared || (!sync.call && !sync.serving)) << name;
    if (sync.background && !sync.background->held) {
      LH_CHECK(!Writing(id) || sync.call) << name << " is written to, and not held";
      LH_CHECK(sync.background->take_by == kNever) << name << " waits for what it has";
    }
    LH_CHECK(!sync.next || (sync.phase == Phase::kStopping && !sync.ends)) << name;
    LH_CHECK(sync.compare_by == kNever || sync.ends) << name;
    LH_CHECK(!sync.ends || sync.phase != Phase::kFetching) << name << " ends while it fetches";
    LH_CHECK(!sync.ends || sync.phase == Phase::kStopping || sync.compare_by != kNever) << name;
    LH_CHECK(sync.phase != Phase::kFetching || !sync.offer.complete) << name;
    LH_CHECK(!sync.serving || (sync.phase == Phase::kOffered && sync.offer.complete)) << name;
  }
}

}  // namespace longhaul::peerd
