#include "coordinator/core/sync_ballot.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "coordinator/core/text.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

using control::SyncAction;
using control::SyncStrategy;
using Do = SyncVerdict::Do;

EventRecord Note(std::string kind, MemberId member, std::string text) {
  return {std::move(kind), {}, {}, member, {}, std::move(text)};
}

// The holders that `member` is to ask, at most LH_SYNC_SOURCES_MAX. The list begins with the next
// member in rank, so that fetchers do not all ask the same holder.
std::vector<control::SyncSource> SourcesFor(MemberId member, const std::set<MemberId>& holders,
                                            const GroupRecord& record) {
  const size_t size = record.members.size();
  size_t rank = 0;
  while (record.members[rank].member != member) ++rank;
  std::vector<control::SyncSource> sources;
  for (size_t i = 1; i < size && sources.size() < LH_SYNC_SOURCES_MAX; ++i) {
    const MemberRecord& other = record.members[(rank + i) % size];
    if (holders.contains(other.member)) sources.push_back({other.member, other.peer});
  }
  return sources;
}

}  // namespace

// ------------------------------------------------------------------------------ input

void SyncBallot::Release(MemberId member, const GroupRecord& record, Tick now, SyncOutput* out) {
  const auto held = held_.extract(member);
  if (held.empty()) return;
  Offer(member, held.mapped(), record, now, out);
  if (offers_.contains(member) && first_offer_ == kNever) first_offer_ = now;
}

void SyncBallot::Offer(MemberId member, const control::SyncOffer& offer, const GroupRecord& record,
                       Tick now, SyncOutput* out) {
  if (fetching_ && fetching_->offers.contains(member)) {
    out->results.push_back(ResultFor(member, record));
    return;
  }
  if (fetching_ && fetching_->refused.contains(member)) return;
  const auto aborted = aborted_.find(member);
  if (aborted != aborted_.end()) {
    if (offer.number <= aborted->second.number) {
      out->results.push_back(aborted->second);
      return;
    }
    aborted_.erase(aborted);
  }
  const auto refused = refused_.find(member);
  if (offer.number <= FindMember(record, member)->syncs) {
    const bool known = refused != refused_.end() && refused->second.number == offer.number;
    out->results.push_back(known ? refused->second : Ended(member, offer, record));
    return;
  }
  offers_[member] = offer;
  if (first_offer_ == kNever && refused == refused_.end()) first_offer_ = now;
}

void SyncBallot::FetchDone(const control::FetchDone& done, SyncOutput* out) {
  if (!fetching_ || !fetching_->fetching.contains(done.member)) return;
  Fetching& f = *fetching_;
  if (f.offers.at(done.member).number != done.number) return;
  for (const MemberId source : done.corrupt) {
    out->notices.push_back(Note("state_corrupt", source,
                                "corrupt state member=" + ToString(source) +
                                    " detector=" + ToString(done.member) +
                                    " revision=" + std::to_string(f.revision)));
  }
  f.bytes += done.bytes;
  f.sources.insert(done.sources.begin(), done.sources.end());
  if (!done.outcome.ok()) {
    f.failed = ToString(done.member) + ": " + Clean(done.outcome.text);
    return;
  }
  if (done.state != f.state) {
    f.failed = ToString(done.member) + " ended with state " + ToString(done.state) +
               " in place of " + ToString(f.state);
    return;
  }
  f.fetching.erase(done.member);
  f.fetched.push_back(done.member);
  // A member with kReceive becomes a holder, too: some fetcher may reach this member, but no
  // sender.
  f.holders.insert(done.member);
  f.sources_changed = true;
}

void SyncBallot::Leave(MemberId member) {
  held_.erase(member);
  offers_.erase(member);
  if (offers_.empty()) first_offer_ = kNever;
  refused_.erase(member);
  aborted_.erase(member);
  if (!fetching_) return;
  Fetching& f = *fetching_;
  f.offers.erase(member);
  f.refused.erase(member);
  f.fetching.erase(member);
  if (f.holders.erase(member) != 0) f.sources_changed = true;
}

void SyncBallot::Postpone(int64_t us) {
  if (first_offer_ != kNever) first_offer_ = first_offer_ + us;
  if (last_end_ != Tick()) last_end_ = last_end_ + us;
}

// ------------------------------------------------------------------------------ deciding

std::set<MemberId> SyncBallot::Missing(const std::set<MemberId>& electorate) const {
  std::set<MemberId> missing;
  for (const MemberId member : electorate) {
    if (!offers_.contains(member)) missing.insert(member);
  }
  return missing;
}

void SyncBallot::Advance(const std::set<MemberId>& electorate,
                         const std::set<MemberId>& at_boundary, GroupRecord* record, Tick now,
                         SyncOutput* out) {
  if (fetching_) {
    Fetching& f = *fetching_;
    const bool bereft = f.offers.empty() || (!f.fetching.empty() && f.holders.empty());
    if (f.failed.empty() && bereft) f.failed = "nobody is left who has it";
    if (f.offers.empty() && f.refused.empty()) {
      fetching_.reset();
    } else if (!f.failed.empty()) {
      Fail(*std::exchange(fetching_, std::nullopt), now, out);
    } else if (f.fetching.empty()) {
      Commit(*std::exchange(fetching_, std::nullopt), record, now, out);
    } else if (std::exchange(f.sources_changed, false)) {
      for (const MemberId member : f.fetching) out->results.push_back(ResultFor(member, *record));
    }
  }
  if (offers_.empty()) return;
  const std::set<MemberId> missing = Missing(electorate);
  if (missing.empty()) return Elect(record, now, out);
  const bool stalemate =
      std::includes(at_boundary.begin(), at_boundary.end(), missing.begin(), missing.end());
  if (stalemate) RefuseStalemate(missing, record, now, out);
}

void SyncBallot::Elect(GroupRecord* record, Tick now, SyncOutput* out) {
  LH_CHECK(!fetching_) << ToString(record->group) << " elects while members fetch";
  std::vector<Candidate> candidates;
  for (const auto& [member, offer] : offers_) {
    candidates.push_back({member, offer, FindMember(*record, member)->holds});
  }
  std::optional<Agreed> agreed;
  if (record->state) {
    const uint64_t boundaries = record->ballots - record->state->ballots;
    const uint64_t revision = record->state->revision;
    agreed = Agreed{revision, revision + std::max<uint64_t>(boundaries, 1), record->state->state,
                    record->state->manifest};
  }
  const Election election = coordinator::Elect(std::move(candidates), agreed);
  Fetching f;
  f.revision = election.revision;
  f.manifest = election.manifest;
  f.state = election.state;
  f.holders = {election.holders.begin(), election.holders.end()};
  f.begun = std::exchange(first_offer_, kNever);
  if (f.begun == kNever) f.begun = now;
  f.offers = std::exchange(offers_, {});
  f.failed = election.again;
  if (!f.failed.empty()) return Fail(f, now, out);
  for (const SyncVerdict& verdict : election.verdicts) {
    if (verdict.action == Do::kFetch) f.fetching.insert(verdict.member);
    if (verdict.action != Do::kRefuse) continue;
    control::SyncResult refusal{
        {}, verdict.member, f.offers.at(verdict.member).number, SyncAction::kEnd, verdict.refusal};
    if (verdict.compare_to) {
      refusal.sources = {{verdict.compare_to, FindMember(*record, verdict.compare_to)->peer}};
    }
    f.offers.erase(verdict.member);
    f.refused.emplace(verdict.member, std::move(refusal));
  }
  if (!election.elected) {
    for (const auto& [member, refusal] : f.refused) Refuse(refusal, record, out);
    last_end_ = now;
    return;
  }
  if (f.fetching.empty()) return Commit(std::move(f), record, now, out);
  fetching_ = std::move(f);
  out->notices.push_back(Note("fetch", {},
                              "state elected revision=" + std::to_string(fetching_->revision) +
                                  " state=" + ToString(fetching_->state) +
                                  " sources=" + List(fetching_->holders, ",", kNamesShownMax) +
                                  " fetching=" + List(fetching_->fetching, ",", kNamesShownMax)));
  for (const auto& [member, offer] : fetching_->offers) {
    out->results.push_back(ResultFor(member, *record));
  }
}

void SyncBallot::Commit(Fetching done, GroupRecord* record, Tick now, SyncOutput* out) {
  record->state = StateRecord{done.revision, done.state, done.manifest, record->ballots};
  for (MemberRecord& member : record->members) {
    const auto offer = done.offers.find(member.member);
    member.holds = offer != done.offers.end();
    if (!member.holds) continue;
    member.syncs = offer->second.number;
    refused_.erase(member.member);
    control::SyncResult result{{}, member.member, offer->second.number};
    result.revision = done.revision;
    result.manifest = done.manifest;
    result.state = done.state;
    out->results.push_back(std::move(result));
  }
  for (const auto& [member, refusal] : done.refused) Refuse(refusal, record, out);
  last_end_ = now;
  const auto took_ms = static_cast<uint32_t>((now - done.begun) / Millis(1));
  EventRecord note =
      Note("sync", {},
           "state committed revision=" + std::to_string(done.revision) +
               " state=" + ToString(done.state) + " members=" + std::to_string(done.offers.size()) +
               " fetched=" + List(done.fetched, ",", kNamesShownMax) +
               " sources=" + List(done.sources, ",", kNamesShownMax) +
               " bytes=" + std::to_string(done.bytes) + " took_ms=" + std::to_string(took_ms));
  note.sync = SyncRecord{done.revision, done.state, done.bytes, took_ms};
  out->notices.push_back(std::move(note));
}

// Tells every member of the sync, refused or not, to sync again.
void SyncBallot::Fail(const Fetching& f, Tick now, SyncOutput* out) {
  const std::string text =
      "sync of revision " + std::to_string(f.revision) + " failed: " + f.failed + "; sync again";
  const auto end = [&](MemberId member, uint64_t number) {
    aborted_[member] = {{}, member, number, SyncAction::kEnd, {Code::kAborted, Clean(text)}};
    out->results.push_back(aborted_[member]);
  };
  for (const auto& [member, offer] : f.offers) end(member, offer.number);
  for (const auto& [member, refusal] : f.refused) end(member, refusal.number);
  last_end_ = now;
  out->notices.push_back(Note("sync_failed", {},
                              "state not committed revision=" + std::to_string(f.revision) +
                                  " bytes=" + std::to_string(f.bytes) +
                                  LogField("reason", f.failed)));
}

// The members that have offered would wait for the members in `missing`, and these would wait for
// them at the next step boundary. So the offers are refused.
void SyncBallot::RefuseStalemate(const std::set<MemberId>& missing, GroupRecord* record, Tick now,
                                 SyncOutput* out) {
  const std::string text = "sync refused: " + List(missing, " ", kNamesShownMax) +
                           " came to the next step boundary without one: all members of a group "
                           "sync between the same two boundaries, or none";
  first_offer_ = kNever;
  last_end_ = now;
  for (const auto& [member, offer] : std::exchange(offers_, {})) {
    Refuse({{}, member, offer.number, SyncAction::kEnd, {Code::kFailedPrecondition, text}}, record,
           out);
  }
}

void SyncBallot::Refuse(const control::SyncResult& result, GroupRecord* record, SyncOutput* out) {
  out->notices.push_back(Note(
      "sync_refused", result.member,
      "sync refused member=" + ToString(result.member) + LogField("reason", result.outcome.text)));
  FindMember(*record, result.member)->syncs = result.number;
  refused_[result.member] = result;
  out->results.push_back(result);
}

// A member that had fetched the state offers that state. So if the offer is the committed state,
// the sync was committed; otherwise it was refused.
control::SyncResult SyncBallot::Ended(MemberId member, const control::SyncOffer& offer,
                                      const GroupRecord& record) {
  control::SyncResult result{{}, member, offer.number};
  if (record.state && offer.complete && offer.state == record.state->state) {
    result.revision = record.state->revision;
    result.manifest = offer.manifest;
    result.state = offer.state;
  } else {
    result.outcome = {Code::kStateMismatch,
                      "this sync was refused, and the coordinator restarted before it could say "
                      "why: its log has a line \"sync refused\" with the reason"};
  }
  return result;
}

control::SyncResult SyncBallot::ResultFor(MemberId member, const GroupRecord& record) const {
  const Fetching& f = *fetching_;
  control::SyncResult result{{}, member, f.offers.at(member).number, SyncAction::kServe};
  result.revision = f.revision;
  result.manifest = f.manifest;
  result.state = f.state;
  if (!f.fetching.contains(member)) return result;
  result.action = SyncAction::kFetch;
  result.sources = SourcesFor(member, f.holders, record);
  return result;
}

// ------------------------------------------------------------------------------ view

std::string SyncBallot::WaitingFor(const std::set<MemberId>& electorate) const {
  if (fetching_) {
    return "sync of revision " + std::to_string(fetching_->revision) + ": " +
           List(fetching_->fetching, " ", kNamesShownMax) + " of " +
           std::to_string(fetching_->offers.size()) + " still fetch it";
  }
  if (offers_.empty()) return "";
  const std::set<MemberId> missing = Missing(electorate);
  return "sync waiting for " + std::to_string(missing.size()) + " of " +
         std::to_string(electorate.size()) + " members: " + List(missing, " ", kNamesShownMax);
}

bool SyncBallot::Awaits(MemberId member) const {
  return !offers_.empty() && !offers_.contains(member) && !(fetching_ && InSync(member));
}

bool SyncBallot::InSync(MemberId member) const {
  if (offers_.contains(member)) return true;
  return fetching_ && (fetching_->offers.contains(member) || fetching_->refused.contains(member));
}

void SyncBallot::CheckInvariants(const std::set<MemberId>& voters,
                                 const std::set<MemberId>& electorate) const {
  const auto stays = [&](const auto& entry) { return electorate.contains(entry.first); };
  for (const auto& [member, offer] : held_) {
    LH_CHECK(voters.contains(member)) << "offer of a stranger is held";
  }
  LH_CHECK(std::all_of(offers_.begin(), offers_.end(), stays)) << "offer of a stranger";
  LH_CHECK(std::all_of(refused_.begin(), refused_.end(), stays)) << "answer for a stranger";
  LH_CHECK(std::all_of(aborted_.begin(), aborted_.end(), stays)) << "answer for a stranger";
  LH_CHECK(!offers_.empty() || first_offer_ == kNever);
  LH_CHECK(offers_.empty() || !Missing(electorate).empty()) << "an election is due";
  if (!fetching_) return;
  const Fetching& f = *fetching_;
  LH_CHECK(std::all_of(f.offers.begin(), f.offers.end(), stays)) << "a stranger takes part";
  LH_CHECK(std::all_of(f.refused.begin(), f.refused.end(), stays)) << "a stranger takes part";
  LH_CHECK(f.failed.empty() && !f.sources_changed) << "a sync is not ended";
  LH_CHECK(!f.fetching.empty() && !f.holders.empty()) << "a sync is not ended";
  for (const MemberId member : f.fetching) {
    LH_CHECK(f.offers.contains(member) && !f.holders.contains(member)) << ToString(member);
  }
  for (const MemberId member : f.holders) {
    LH_CHECK(f.offers.contains(member)) << ToString(member);
  }
  for (const auto& [member, offer] : f.offers) {
    LH_CHECK(!offers_.contains(member) && !f.refused.contains(member))
        << ToString(member) << " takes part twice";
  }
}

}  // namespace longhaul::coordinator
