#include "peerd/state/transfer_plan.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

// A window holds what the source sends in this time, or in two latencies if that is longer.
constexpr int64_t kWindowUs = Millis(200);
// A window has room for at least this many chunks: one on its way, and the next one.
constexpr uint32_t kWindowChunksMin = 2;
// After this many late answers in a row, a source is asked only if no other source has room.
constexpr uint32_t kLateMax = 3;
// A chunk is late if nothing came from its source for this many times the time that a chunk should
// take.
constexpr int64_t kLateFactor = 4;
// Throughput is measured over at least this time, because one turn of the ring is too short.
constexpr int64_t kMeasureUs = Millis(10);
// A source without work takes a chunk over if it needs less than this part of the time that the
// other source would need.
constexpr double kHelpFactor = 0.5;
constexpr int64_t kBusyUs = Millis(100);
// The assumed throughput of a source that has not answered yet. Only the order of sources depends
// on it.
constexpr double kUnknownBytesPerUs = 50;

}  // namespace

TransferPlan::TransferPlan(const std::vector<ChunkToFetch>& chunks, const TransferOptions& options,
                           Tick now)
    : options_(options), missing_(chunks.size()), last_news_(now) {
  chunks_.reserve(chunks.size());
  for (const ChunkToFetch& what : chunks) {
    LH_CHECK(what.bytes != 0);
    progress_.bytes_total += what.bytes;
    todo_.insert(todo_.end(), chunks_.size());
    chunks_.emplace_back().what = what;
  }
}

// ------------------------------------------------------------------------------ sources

void TransferPlan::AddSource(MemberId member) {
  Source& source = sources_[member];
  if (source.standing == Standing::kSuspended || source.standing == Standing::kGone) {
    source.standing = Standing::kUsable;
  }
}

void TransferPlan::SuspendSource(MemberId member) {
  const auto it = sources_.find(member);
  if (it == sources_.end() || it->second.standing != Standing::kUsable) return;
  it->second.standing = Standing::kSuspended;
  DropAll(member);
}

void TransferPlan::RemoveSource(MemberId member, const std::string& reason) {
  Forgo(member, Standing::kGone, reason);
}

void TransferPlan::Forgo(MemberId member, Standing standing, const std::string& reason) {
  const auto it = sources_.find(member);
  if (it == sources_.end()) return;
  Source& source = it->second;
  if (source.standing == Standing::kRefused || source.standing == Standing::kCorrupt) return;
  source.standing = standing;
  source.reason = reason;
  DropAll(member);
}

void TransferPlan::DropAll(MemberId source) {
  std::vector<AskId> asks;
  for (const auto& [id, ask] : asks_) {
    if (ask.source == source && !ask.dropped) asks.push_back(id);
  }
  for (const AskId id : asks) Drop(id);
}

// ------------------------------------------------------------------------------ answers

void TransferPlan::OnChunk(AskId id, bool good, Tick now) {
  const auto it = asks_.find(id);
  if (it == asks_.end()) return;
  if (it->second.dropped) return OnChunkOfDropped(id, good);
  const Ask ask = it->second;
  const uint32_t bytes = chunks_[ask.chunk].what.bytes;
  Source& source = sources_.at(ask.source);
  Close(id);
  if (!good) {
    progress_.bytes_repeated += bytes;
    Requeue(ask.chunk);
    return Forgo(ask.source, Standing::kCorrupt, "sent bits that are not what they should be");
  }
  Hear(&source, bytes - ask.came, now);
  source.latency_min_us = std::min(source.latency_min_us, std::max<int64_t>(now - ask.asked, 1));
  source.last_answer = now;
  if (!ask.late) source.late_in_a_row = 0;
  last_news_ = now;
  Arrived(ask);
}

void TransferPlan::OnPiece(AskId id, uint32_t bytes, Tick now) {
  const auto it = asks_.find(id);
  if (it == asks_.end() || it->second.dropped) return;
  it->second.came += bytes;
  Source& source = sources_.at(it->second.source);
  last_news_ = now;
  Hear(&source, bytes, now);
}

void TransferPlan::Hear(Source* source, uint32_t bytes, Tick now) {
  source->measured_bytes += bytes;
  source->heard = now;
}

// Measures the throughput of a source. All that came in one turn counts together.
void TransferPlan::Measure(Source* source) {
  const int64_t took = source->heard - source->measured;
  if (took < kMeasureUs || source->measured_bytes == 0) return;
  const double rate = static_cast<double>(source->measured_bytes) / static_cast<double>(took);
  source->bytes_per_us =
      source->bytes_per_us == 0 ? rate : source->bytes_per_us + (rate - source->bytes_per_us) / 4;
  source->measured = source->heard;
  source->measured_bytes = 0;
}

// A chunk has arrived although its ask was dropped. A good chunk need not be asked for again.
void TransferPlan::OnChunkOfDropped(AskId id, bool good) {
  const Ask ask = asks_.at(id);
  const bool wanted = good && failure_.empty();
  if (!wanted) progress_.bytes_repeated += chunks_[ask.chunk].what.bytes;
  OnDropped(id);
  if (!wanted) return;
  todo_.erase(ask.chunk);
  SetHeir(ask.chunk, MemberId());
  Arrived(ask);
}

MemberId TransferPlan::GiveBack(AskId id) {
  const auto it = asks_.find(id);
  if (it == asks_.end()) return {};
  if (it->second.dropped) {
    OnDropped(id);
    return {};
  }
  const Ask ask = it->second;
  Close(id);
  Requeue(ask.chunk);
  return ask.source;
}

void TransferPlan::OnRefused(AskId id, const std::string& reason) {
  if (const MemberId source = GiveBack(id)) Forgo(source, Standing::kRefused, reason);
}

void TransferPlan::OnChanged(AskId id) {
  const auto it = asks_.find(id);
  if (it == asks_.end()) return;
  const size_t index = it->second.chunk;
  const MemberId source = GiveBack(id);
  if (!source || ChangedAt(chunks_[index], source)) return;
  chunks_[index].changed_at.push_back(source);
  changed_.insert(index);
}

void TransferPlan::OnBusy(AskId id, Tick now) {
  if (const MemberId source = GiveBack(id)) sources_.at(source).busy_until = now + kBusyUs;
}

void TransferPlan::OnDropped(AskId id) {
  const auto it = asks_.find(id);
  if (it == asks_.end() || !it->second.dropped) return;
  const size_t index = it->second.chunk;
  asks_.erase(it);
  chunks_[index].ask = AskId();
  Requeue(index);
}

// ------------------------------------------------------------------------------ bookkeeping

void TransferPlan::Count(const Ask& ask) {
  Source& source = sources_.at(ask.source);
  source.in_flight -= chunks_[ask.chunk].what.bytes;
  --source.asks;
}

void TransferPlan::Close(AskId id) {
  const Ask& ask = asks_.at(id);
  Count(ask);
  chunks_[ask.chunk].ask = AskId();
  asks_.erase(id);
}

void TransferPlan::Drop(AskId id, MemberId heir) {
  Ask& ask = asks_.at(id);
  Count(ask);
  ask.dropped = true;
  SetHeir(ask.chunk, heir);
}

void TransferPlan::SetHeir(size_t index, MemberId heir) {
  Chunk& chunk = chunks_[index];
  if (chunk.heir) --sources_.at(chunk.heir).heir;
  chunk.heir = heir;
  if (heir) ++sources_.at(heir).heir;
}

// The chunk must be asked for again.
void TransferPlan::Requeue(size_t index) {
  if (failure_.empty()) todo_.insert(index);
}

void TransferPlan::Arrived(const Ask& ask) {
  Chunk& chunk = chunks_[ask.chunk];
  sources_.at(ask.source).bytes_good += chunk.what.bytes;
  progress_.bytes_received += chunk.what.bytes;
  chunk.here = true;
  progress_.bytes_done += chunk.what.bytes;
  --missing_;
}

// ------------------------------------------------------------------------------ choosing

bool TransferPlan::Usable(const Source& source, Tick now) const {
  return source.standing == Standing::kUsable && source.busy_until <= now;
}

int64_t TransferPlan::LatencyOf(const Source& source) {
  return source.latency_min_us == INT64_MAX ? 0 : source.latency_min_us;
}

uint64_t TransferPlan::WindowOf(const Source& source) const {
  if (source.bytes_per_us == 0) return 0;
  const int64_t us = std::max(kWindowUs, 2 * LatencyOf(source));
  const double bytes = source.bytes_per_us * static_cast<double>(us);
  return static_cast<uint64_t>(std::min(bytes, static_cast<double>(options_.window_bytes_max)));
}

bool TransferPlan::HasRoom(const Source& source, uint64_t bytes) const {
  if (source.asks < kWindowChunksMin) return true;
  return source.asks < options_.window_asks_max && source.in_flight + bytes <= WindowOf(source);
}

double TransferPlan::TimeFor(const Source& source, uint64_t bytes) {
  const double rate = source.bytes_per_us == 0 ? kUnknownBytesPerUs : source.bytes_per_us;
  return static_cast<double>(bytes) / rate;
}

double TransferPlan::FinishOf(const Source& source, uint64_t bytes) const {
  return TimeFor(source, source.in_flight + bytes);
}

MemberId TransferPlan::ChooseSource(const Chunk& chunk, MemberId late, Tick now) const {
  MemberId best;
  std::pair<uint32_t, double> best_rank;
  for (const auto& [member, source] : sources_) {
    if (!Usable(source, now) || !HasRoom(source, chunk.what.bytes)) continue;
    if (member == late || ChangedAt(chunk, member)) continue;
    const uint32_t count = late || source.late_in_a_row >= kLateMax ? source.late_in_a_row : 0;
    const std::pair rank(
        count, late ? static_cast<double>(now - source.heard) : FinishOf(source, chunk.what.bytes));
    if (best && rank >= best_rank) continue;
    best = member;
    best_rank = rank;
  }
  return best;
}

bool TransferPlan::ChangedAt(const Chunk& chunk, MemberId source) {
  return std::find(chunk.changed_at.begin(), chunk.changed_at.end(), source) !=
         chunk.changed_at.end();
}

// Leaves out the chunks that have changed at all sources.
void TransferPlan::LeaveOut() {
  std::vector<size_t> gone;
  for (const size_t index : changed_) {
    const Chunk& chunk = chunks_[index];
    if (!todo_.contains(index)) continue;
    const bool hope = std::any_of(sources_.begin(), sources_.end(), [&](const auto& entry) {
      const Standing standing = entry.second.standing;
      return (standing == Standing::kUsable || standing == Standing::kSuspended) &&
             !ChangedAt(chunk, entry.first);
    });
    if (!hope) gone.push_back(index);
  }
  for (const size_t index : gone) {
    chunks_[index].left_out = true;
    SetHeir(index, MemberId());
    todo_.erase(index);
    changed_.erase(index);
    --missing_;
    ++left_out_;
  }
}

Tick TransferPlan::LateAt(const Ask& ask) const {
  const Source& source = sources_.at(ask.source);
  const Tick since = std::max(ask.asked, source.heard);
  if (source.bytes_per_us == 0) return since + options_.patience_us;
  const auto chunk_us = static_cast<int64_t>(chunks_[ask.chunk].what.bytes / source.bytes_per_us);
  const int64_t latency_us = LatencyOf(source);
  return since + std::max(options_.patience_us, kLateFactor * (chunk_us + latency_us));
}

void TransferPlan::AskFor(size_t index, MemberId member, Tick now,
                          std::vector<TransferAction>* out) {
  Chunk& chunk = chunks_[index];
  Source& source = sources_.at(member);
  const AskId id(++last_ask_);
  SetHeir(index, MemberId());
  chunk.ask = id;
  asks_.emplace(id, Ask{member, index, now});
  if (source.asks == 0) {
    source.measured = now;
    source.measured_bytes = 0;
  }
  source.in_flight += chunk.what.bytes;
  ++source.asks;
  todo_.erase(index);
  out->push_back(AskChunk{id, member, chunk.what});
}

// Drops asks that are late, as soon as another source has room. That source is asked next.
void TransferPlan::AskElsewhere(Tick now) {
  for (auto& [id, ask] : asks_) {
    if (ask.dropped || (!ask.late && LateAt(ask) > now)) continue;
    if (!std::exchange(ask.late, true)) ++sources_.at(ask.source).late_in_a_row;
    const MemberId other = ChooseSource(chunks_[ask.chunk], ask.source, now);
    // A source takes over at most kWindowChunksMin chunks at a time.
    if (other && sources_.at(other).heir < kWindowChunksMin) Drop(id, other);
  }
}

// Called when every missing chunk has been asked for. A source without work takes over the last ask
// of the slowest source, if that source would need far longer for it.
void TransferPlan::Help(Tick now) {
  for (const auto& [member, source] : sources_) {
    if (!Usable(source, now) || source.asks != 0 || source.heir != 0) continue;
    if (source.bytes_per_us == 0 || source.late_in_a_row >= kLateMax) continue;
    AskId slowest;
    double slowest_us = 0;
    std::map<MemberId, uint64_t> before;  // bytes that each source must send first
    for (const auto& [id, ask] : asks_) {
      const Chunk& chunk = chunks_[ask.chunk];
      if (ask.dropped || ask.source == member) continue;
      const uint64_t bytes = before[ask.source] += chunk.what.bytes;
      if (ChangedAt(chunk, member)) continue;
      const Source& other = sources_.at(ask.source);
      const Tick since = std::max(ask.asked, other.last_answer);
      const double left = TimeFor(other, bytes) - static_cast<double>(now - since);
      if (left <= slowest_us) continue;
      slowest = id;
      slowest_us = left;
    }
    if (!slowest) continue;
    const uint32_t bytes = chunks_[asks_.at(slowest).chunk].what.bytes;
    const double own = FinishOf(source, bytes) + static_cast<double>(source.latency_min_us);
    if (own < kHelpFactor * slowest_us) Drop(slowest, member);
  }
}

void TransferPlan::TellDrops(std::vector<TransferAction>* out) {
  for (auto& [id, ask] : asks_) {
    if (ask.dropped && !std::exchange(ask.told, true)) out->push_back(DropAsk{id});
  }
}

std::vector<TransferAction> TransferPlan::Advance(Tick now) {
  std::vector<TransferAction> out;
  for (auto& [member, source] : sources_) {
    if (source.busy_until <= now) source.busy_until = Tick();
    Measure(&source);
  }
  LeaveOut();
  FailIfHopeless(now);
  if (!failure_.empty()) {
    for (auto& [id, ask] : asks_) {
      if (!ask.dropped) Drop(id);
    }
    todo_.clear();
    TellDrops(&out);
    return out;
  }
  AskElsewhere(now);
  for (auto it = todo_.begin(); it != todo_.end();) {
    const size_t index = *it++;
    const Chunk& chunk = chunks_[index];
    MemberId source = chunk.heir;
    if (source && Usable(sources_.at(source), now)) {
      if (!HasRoom(sources_.at(source), chunk.what.bytes)) continue;
    } else {
      source = ChooseSource(chunk, /*late=*/MemberId(), now);
    }
    if (source) {
      AskFor(index, source, now, &out);
    } else if (chunk.changed_at.empty()) {
      break;  // no source has room for the other chunks either
    }
  }
  if (todo_.empty() && missing_ != 0) Help(now);
  TellDrops(&out);
  return out;
}

void TransferPlan::FailIfHopeless(Tick now) {
  if (!failure_.empty() || missing_ == 0) return;
  const bool hope = std::any_of(sources_.begin(), sources_.end(), [](const auto& entry) {
    return entry.second.standing == Standing::kUsable ||
           entry.second.standing == Standing::kSuspended;
  });
  const bool stalled = now - last_news_ >= options_.stall_us;
  if ((hope || sources_.empty() || options_.wait_for_sources) && !stalled) return;
  failure_ = hope || sources_.empty()
                 ? "nothing came for " + std::to_string((now - last_news_) / 1000) + " ms"
                 : "no source is left";
  failure_ += ", " + std::to_string(missing_) + " of " + std::to_string(chunks_.size()) +
              " chunks are missing;";
  for (const auto& [member, source] : sources_) {
    failure_ += " " + ToString(member);
    failure_ += source.standing == Standing::kSuspended ? " has no link"
                : source.reason.empty()                 ? " did not answer"
                                                        : " " + source.reason;
    failure_ += ",";
  }
  failure_.pop_back();
}

Tick TransferPlan::NextDeadline() const {
  if (missing_ == 0 || !failure_.empty()) return kNever;
  Tick due = last_news_ + options_.stall_us;
  for (const auto& [id, ask] : asks_) {
    if (!ask.dropped && !ask.late) due = std::min(due, LateAt(ask));
  }
  for (const auto& [member, source] : sources_) {
    if (source.standing == Standing::kUsable && source.busy_until.us != 0 && !todo_.empty() &&
        source.asks == 0) {
      due = std::min(due, source.busy_until);
    }
  }
  return due;
}

// ------------------------------------------------------------------------------ view

std::vector<MemberId> TransferPlan::sources_used() const {
  std::vector<MemberId> members;
  for (const auto& [member, source] : sources_) {
    if (source.bytes_good != 0) members.push_back(member);
  }
  return members;
}

std::vector<MemberId> TransferPlan::corrupt() const {
  std::vector<MemberId> members;
  for (const auto& [member, source] : sources_) {
    if (source.standing == Standing::kCorrupt) members.push_back(member);
  }
  return members;
}

void TransferPlan::CheckInvariants() const {
  std::map<MemberId, std::pair<uint64_t, uint32_t>> open;
  std::map<MemberId, size_t> heirs;
  size_t missing = 0;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (!chunk.here && !chunk.left_out) ++missing;
    LH_CHECK(!chunk.here || !chunk.ask) << i;
    const bool waits = chunk.here || chunk.left_out || chunk.ask;
    LH_CHECK(!failure_.empty() || waits != todo_.contains(i)) << i;
    LH_CHECK(!chunk.heir || !chunk.here) << i;
    if (chunk.heir) ++heirs[chunk.heir];
    if (!chunk.ask) continue;
    const Ask& ask = asks_.at(chunk.ask);
    LH_CHECK(ask.chunk == i) << i;
    if (ask.dropped) continue;
    open[ask.source].first += chunk.what.bytes;
    open[ask.source].second += 1;
  }
  LH_CHECK(missing == missing_);
  for (const auto& [member, source] : sources_) {
    LH_CHECK(source.in_flight == open[member].first) << ToString(member);
    LH_CHECK(source.asks == open[member].second) << ToString(member);
    LH_CHECK(source.heir == heirs[member]) << ToString(member);
    LH_CHECK(source.asks == 0 || source.standing == Standing::kUsable) << ToString(member);
    LH_CHECK(source.asks <= kWindowChunksMin || source.in_flight <= options_.window_bytes_max);
    LH_CHECK(source.asks <= options_.window_asks_max);
  }
}

}  // namespace longhaul::peerd
