#include "peerd/core/local_syncs.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {

using control::SyncAction;
using control::SyncResult;
using control::SyncStrategy;

// ------------------------------------------------------------------------------ trainers

Outcome LocalSyncs::MayBegin(LocalId local, const SyncRequest& request) const {
  if (Open(local)) {
    return {Code::kFailedPrecondition, "this member is in a sync already: wait for its end"};
  }
  const auto it = syncs_.find(local);
  const bool torn = request.torn || (it != syncs_.end() && it->second.torn && !request.restored);
  if (torn && request.strategy == SyncStrategy::kSend) {
    return {Code::kFailedPrecondition,
            "the state of this member is torn, since a transfer into it broke off: it cannot be "
            "sent; load a checkpoint, or sync with popular or receive first"};
  }
  return {};
}

SyncEnded LocalSyncs::Refused(LocalId local, Outcome refusal) const {
  SyncEnded ended{local, std::move(refusal)};
  const auto it = syncs_.find(local);
  ended.torn = it != syncs_.end() && it->second.torn;
  return ended;
}

void LocalSyncs::Begin(LocalId local, const GroupKey& group, MemberId member,
                       const SyncRequest& request, bool with_vote, std::vector<Action>* out) {
  LH_CHECK(MayBegin(local, request).ok()) << "local " << local.value();
  Sync& sync = syncs_[local];
  sync.group = group;
  sync.member = member;
  sync.phase = Phase::kOffered;
  sync.with_vote = with_vote;
  if (request.restored) sync.torn = false;
  if (request.torn) sync.torn = true;
  // It has what may be unequal as well.
  if (request.kept) sync.agreed = true;
  sync.brought = false;
  sync.put_back = false;
  sync.bytes = 0;
  sync.sources = 0;
  sync.offer = {++sync.syncs,  request.strategy, request.revision, request.manifest,
                request.state, !sync.torn,       request.kept};
  Serve(local, sync, out);
  if (!with_vote) out->push_back(ToCoordinator{control::SyncVote{group, member, sync.offer}});
}

void LocalSyncs::VoteAnswered(LocalId local) {
  const auto it = syncs_.find(local);
  if (it != syncs_.end()) it->second.with_vote = false;
}

const control::SyncOffer* LocalSyncs::OfferOf(LocalId local) const {
  const auto it = syncs_.find(local);
  return it == syncs_.end() || !it->second.with_vote ? nullptr : &it->second.offer;
}

void LocalSyncs::Remove(LocalId local, const Outcome& outcome, std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.removed) return;
  Sync& sync = it->second;
  sync.removed = true;
  sync.next.reset();
  sync.compare_by = kNever;
  if (sync.phase == Phase::kIdle && !sync.ends) {
    syncs_.erase(it);
    return;
  }
  if (!sync.ends) sync.ends = outcome;
  if (sync.phase == Phase::kFetching) {
    out->push_back(StopTransfer{local});
    sync.phase = Phase::kStopping;
  }
  Finish(local, out);
}

// ------------------------------------------------------------------------------ the coordinator

void LocalSyncs::Result(LocalId local, const SyncResult& result, Tick now,
                        std::vector<Action>* out) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end()) return;
  Sync& sync = it->second;
  // Repeated, or of a sync that is over.
  if (sync.phase == Phase::kIdle || sync.ends || sync.offer.number != result.number) return;
  sync.with_vote = false;
  switch (result.action) {
    case SyncAction::kServe:
      return;  // it does
    case SyncAction::kFetch:
      return Fetch(local, sync, result, out);
    case SyncAction::kEnd:
      return End(local, sync, result, now, out);
  }
}

void LocalSyncs::Serve(LocalId id, Sync& sync, std::vector<Action>* out) {
  const bool serves = sync.phase == Phase::kOffered && sync.offer.complete &&
                      sync.offer.strategy != SyncStrategy::kReceive;
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
      // SyncDone was lost with the stream.
      sync.told = result;
      return SayDone(sync, {id, {}, 0, {}, {}, false}, out);
    case Phase::kFetching:
      sync.told = result;
      if (same) {
        out->push_back(ChangeSources{id, result.sources});
        return;
      }
      // Another coordinator has elected another state.
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
  Serve(id, sync, out);
  out->push_back(StartTransfer{id, sync.group, result.revision, result.manifest, result.state,
                               result.sources, !sync.agreed});
}

void LocalSyncs::End(LocalId id, Sync& sync, const SyncResult& result, Tick now,
                     std::vector<Action>* out) {
  sync.ends = result.outcome;
  if (result.outcome.code == Code::kFailedPrecondition && sync.phase != Phase::kOffered) {
    // Offered while a transfer is on, what is there may turn out to be whole all the same.
    sync.ends->code = Code::kAborted;
  }
  if (result.outcome.ok()) {
    if (sync.offer.state == result.state && sync.offer.complete) {
      sync.offer.revision = result.revision;
      sync.agreed = true;
      sync.torn = false;
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
    if (sync.phase == Phase::kIdle || sync.ends || sync.with_vote) continue;
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
  // What was asked to stop may have come to its end all the same.
  const bool told = sync.phase == Phase::kFetching;
  if (event.outcome.ok() && told) {
    sync.offer.state = sync.told.state;
    sync.offer.revision = sync.told.revision;
    sync.offer.complete = true;
    sync.offer.kept = false;
    sync.brought = true;
    sync.put_back = false;
    sync.torn = false;
    sync.phase = Phase::kOffered;
    Serve(event.local, sync, out);
    return SayDone(sync, event, out);
  }
  if (event.put_back) {
    sync.offer.state = event.put_back->state;
    sync.offer.revision = event.put_back->revision;
    sync.offer.kept = true;
    sync.brought = false;
    sync.put_back = true;
    sync.torn = false;
  } else if (event.outcome.ok() || event.wrote) {
    sync.torn = true;
    sync.brought = false;
    sync.put_back = false;
  }
  if (told) {
    // The coordinator ends it for all.
    sync.offer.complete = !sync.torn;
    sync.phase = Phase::kOffered;
    Serve(event.local, sync, out);
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
  control::SyncDone done{sync.group, sync.member, sync.offer.number, event.outcome};
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
  for (const auto& [id, sync] : syncs_) {
    if (sync.compare_by <= now) due.push_back(id);
  }
  for (const LocalId id : due) ManifestCompared(id, "", out);
}

Tick LocalSyncs::NextDeadline() const {
  Tick due = kNever;
  for (const auto& [id, sync] : syncs_) due = std::min(due, sync.compare_by);
  return due;
}

void LocalSyncs::Finish(LocalId id, std::vector<Action>* out) {
  Sync& sync = syncs_.at(id);
  if (!sync.ends || sync.phase == Phase::kStopping || sync.compare_by != kNever) return;
  // Nobody else may have what was brought, and where the trainer's tensors are copies, its own
  // bits are still the old ones.
  if (!sync.ends->ok() && sync.brought) {
    sync.torn = true;
    sync.offer.complete = false;
  }
  SyncEnded ended{id, *std::exchange(sync.ends, std::nullopt)};
  if (ended.outcome.ok() || sync.put_back) {
    ended.revision = sync.offer.revision;
    ended.state = sync.offer.state;
  }
  ended.torn = sync.torn;
  ended.bytes = sync.bytes;
  ended.sources = sync.sources;
  sync.phase = Phase::kIdle;
  Serve(id, sync, out);
  sync.with_vote = false;
  out->push_back(std::move(ended));
  if (sync.removed) syncs_.erase(id);
}

// ------------------------------------------------------------------------------ view

bool LocalSyncs::Open(LocalId local) const {
  const auto it = syncs_.find(local);
  return it != syncs_.end() && (it->second.phase != Phase::kIdle || it->second.ends);
}

void LocalSyncs::CheckInvariants() const {
  for (const auto& [id, sync] : syncs_) {
    const std::string name = "local " + std::to_string(id.value());
    LH_CHECK(!sync.with_vote || sync.phase == Phase::kOffered) << name;
    LH_CHECK(!sync.next || (sync.phase == Phase::kStopping && !sync.ends)) << name;
    LH_CHECK(sync.compare_by == kNever || sync.ends) << name;
    LH_CHECK(!sync.ends || sync.phase != Phase::kFetching) << name << " ends while it fetches";
    LH_CHECK(!sync.ends || sync.phase == Phase::kStopping || sync.compare_by != kNever) << name;
    LH_CHECK(sync.phase != Phase::kFetching || !sync.offer.complete) << name;
    LH_CHECK(!sync.serving || (sync.phase == Phase::kOffered && sync.offer.complete)) << name;
    LH_CHECK(!sync.torn || !sync.offer.complete) << name << " offers what is torn";
  }
}

void LocalSyncs::AddTo(Digester* digest) const {
  digest->Add(uint64_t{syncs_.size()});
  for (const auto& [id, sync] : syncs_) {
    digest->Add(id).Add(sync.group).Add(sync.member).Add(sync.syncs).Add(sync.compare_by);
    digest->Add(static_cast<uint64_t>(sync.phase) | uint64_t{sync.agreed} << 8 |
                uint64_t{sync.torn} << 9 | uint64_t{sync.with_vote} << 10 |
                uint64_t{sync.brought} << 11 | uint64_t{sync.removed} << 12 |
                uint64_t{sync.next.has_value()} << 13 | uint64_t{sync.offer.complete} << 14 |
                uint64_t{sync.serving} << 15 | uint64_t{sync.offer.kept} << 16 |
                uint64_t{sync.put_back} << 17);
    digest->Add(sync.bytes).Add(uint64_t{sync.sources}).Add(sync.offer.revision);
    digest->Add(static_cast<uint64_t>(sync.offer.strategy));
    digest->Add(sync.offer.manifest);
    digest->Add(sync.offer.state);
    digest->Add(sync.told.revision).Add(uint64_t{sync.told.sources.size()});
    digest->Add(sync.told.state);
    if (sync.next) digest->Add(sync.next->state);
    digest->Add(sync.ends ? sync.ends->text : "-");
  }
}

}  // namespace longhaul::peerd
