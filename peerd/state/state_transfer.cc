#include "peerd/state/state_transfer.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// The transfer fails after this many detect_ms without anything of use from any source.
constexpr int64_t kStallAfter = 4;
// How long to wait before a source that was busy or not ready is asked for digests again. The pause
// doubles from the first value to the second one.
constexpr int64_t kRetryMinUs = Millis(10);
constexpr int64_t kRetryMaxUs = Millis(100);
// How many bytes are copied from memory of this host in one turn: less than a millisecond's work.
constexpr uint64_t kCopyBytes = uint64_t{2} << 20;
// What is said of a source that is out.
constexpr char kNoMore[] = "does not have the state any more";

}  // namespace

StateTransfer::StateTransfer(TransferSpec spec, Transport* transport, Hasher* hasher,
                             const StateServer* server, LinkUp link_up, uint64_t* detach_cookies,
                             Tick now)
    : spec_(std::move(spec)),
      transport_(transport),
      hasher_(hasher),
      server_(server),
      link_up_(std::move(link_up)),
      detach_cookies_(detach_cookies),
      now_(now),
      last_news_(now),
      self_(std::make_shared<StateTransfer*>(this)) {
  LH_CHECK(spec_.state != nullptr && spec_.state->inbox.size() == spec_.state->manifest.size());
  ChangeSources(spec_.sources, now);
}

StateTransfer::~StateTransfer() { *self_ = nullptr; }

// ------------------------------------------------------------------------------ sources

void StateTransfer::ChangeSources(const std::vector<StateSource>& sources, Tick now) {
  dirty_ = true;
  std::set<MemberId> named;
  for (const StateSource& source : sources) {
    named.insert(source.member);
    const auto [it, added] = sources_.try_emplace(source.member);
    Source& known = it->second;
    if (!added && !known.left) continue;
    known = Source{.peer = source.peer, .since = now, .asks = std::move(known.asks)};
    last_news_ = now;
    if (plan_ != nullptr) plan_->OnNews(now);
  }
  for (auto& [member, source] : sources_) {
    if (named.contains(member) || source.out) continue;
    PutOut(member, "has left");
    source.left = true;
  }
}

void StateTransfer::PutOut(MemberId member, const std::string& reason) {
  Source& source = sources_.at(member);
  if (source.out) return;
  source.out = true;
  source.reason = reason;
  dirty_ = true;
}

bool StateTransfer::Reachable(MemberId member, const Source& source) const {
  if (Local(source)) return server_->Find(spec_.group, member, spec_.root) != nullptr;
  return link_up_(LinkTo(source.peer));
}

void StateTransfer::LookForLocalEnds() {
  for (const auto& [member, source] : sources_) {
    if (Local(source) && server_->Over(spec_.group, member, spec_.root)) PutOut(member, kNoMore);
  }
}

std::vector<MemberId> StateTransfer::Usable() const {
  std::vector<MemberId> here;
  std::vector<MemberId> elsewhere;
  for (const auto& [member, source] : sources_) {
    if (source.out || !Reachable(member, source)) continue;
    (Local(source) ? here : elsewhere).push_back(member);
  }
  return here.empty() ? elsewhere : here;
}

void StateTransfer::Wrong(MemberId member, const std::string& what) {
  corrupt_.insert(member);
  Log(LogLevel::kWarning,
      absl::StrCat("state corrupt group=", ToString(spec_.group), " source=", ToString(member),
                   " peer=", ToString(sources_.at(member).peer), " transfer=", spec_.id) +
          LogField("what", what));
  PutOut(member, "sent bits that are not what they should be");
}

std::string StateTransfer::WhatSourcesSaid() const {
  std::string text;
  for (const auto& [member, source] : sources_) {
    absl::StrAppend(&text, text.empty() ? " " : ", ", ToString(member), " ");
    if (!source.reason.empty()) {
      text += source.reason;
    } else {
      text += Reachable(member, source) ? "did not answer" : "has no link";
    }
  }
  return text.empty() ? " nobody has it" : text;
}

void StateTransfer::OnLinkChange(const LinkKey& link, Tick now) {
  if (link.run != spec_.group.run) return;
  now_ = now;
  dirty_ = true;
  const bool up = link_up_(link);
  for (auto& [member, source] : sources_) {
    if (source.peer != link.peer) continue;
    if (up) {
      source.since = now;
      source.retry = Tick{};
      if (!source.out) source.reason.clear();
    }
  }
  if (up) return;
  // The plan drops its own asks at this peer. End the asks for digests here.
  std::vector<Asks::iterator> lost;
  for (auto it = asks_.begin(); it != asks_.end(); ++it) {
    if (it->second.peer == link.peer && !it->second.plan && it->second.detaching == 0) {
      lost.push_back(it);
    }
  }
  for (const auto it : lost) {
    if (it->second.got < it->second.bytes) Close(it, Ask::Then::kDropped, "");
  }
}

// ------------------------------------------------------------------------------ digests

void StateTransfer::WorkDigests(Tick now) {
  for (auto it = asks_.begin(); it != asks_.end(); ++it) {
    Ask& ask = it->second;
    if (ask.plan || ask.detaching != 0) continue;
    if (std::exchange(ask.news, false)) last_news_ = ask.heard = now;
    if (now - ask.heard < Millis(spec_.detect_ms)) return;
    Source& source = sources_.at(ask.source);
    source.reason = "did not send its digests in time";
    source.retry = now + Millis(spec_.detect_ms);
    Close(it, Ask::Then::kDropped, "");
    break;
  }
  const bool stalled = now - last_news_ >= kStallAfter * Millis(spec_.detect_ms);
  MemberId best;
  for (const MemberId member : Usable()) {
    const Source& source = sources_.at(member);
    if (source.retry > now || (unequal_ && source.tried_unequal)) continue;
    if (!best || source.retry < sources_.at(best).retry) best = member;
  }
  const bool hope =
      sources_.empty() || std::any_of(sources_.begin(), sources_.end(), [this](const auto& entry) {
        return !entry.second.out && !(unequal_ && entry.second.tried_unequal);
      });
  if (!stalled && (hope || !spec_.background)) {
    if (best) AskForDigests(best, now);
    return;
  }
  Fail(absl::StrCat(hope ? absl::StrCat("nothing came for ", (now - last_news_) / 1000, " ms")
                         : "no source is left",
                    ", the digests of the state are missing;", WhatSourcesSaid()));
}

void StateTransfer::AskForDigests(MemberId member, Tick now) {
  const Source& source = sources_.at(member);
  if (Local(source)) {
    const MemoryState* const state = server_->Find(spec_.group, member, spec_.root);
    return AcceptDigests(member, state->digests, now);
  }
  Ask ask{.source = member, .peer = source.peer, .heard = now};
  ask.bytes = CountChunks(spec_.state->manifest) * kDigestBytes;
  if (ask.bytes == 0) return AcceptDigests(member, ParseDigests(spec_.state->manifest, {}), now);
  ask.buffer.resize(ask.bytes);
  ask.place = ask.buffer.data();
  NewAsk(std::move(ask));
}

// The digests of tensors that are compared must add up to the root. The digests of tensors that may
// be unequal cannot be checked.
void StateTransfer::AcceptDigests(MemberId member, ChunkDigests digests, Tick now) {
  if (RootOf(spec_.state->manifest, digests) != spec_.root) {
    return Wrong(member, "its digests do not add up to the root");
  }
  last_news_ = now;
  digests_from_ = member;
  expected_ = std::move(digests);
  MakePlan(unequal_ ? member : MemberId(), now);
}

void StateTransfer::MakePlan(MemberId only, Tick now) {
  const Manifest& manifest = spec_.state->manifest;
  std::vector<ChunkToFetch> chunks;
  for (uint32_t t = 0; t < manifest.size(); ++t) {
    if (manifest[t].allow_unequal != unequal_) continue;
    for (uint64_t c = 0; c < expected_[t].size(); ++c) {
      if (spec_.state->Has(t, c, expected_[t][c])) continue;
      chunks.push_back({t, c, ChunkBytes(manifest[t].bytes, c)});
    }
  }
  TransferOptions options;
  options.patience_us = Millis(spec_.detect_ms);
  options.stall_us = kStallAfter * Millis(spec_.detect_ms);
  options.wait_for_sources = !only && !spec_.background;
  options.window_bytes_max = LH_STATE_WINDOW_BYTES_MAX;
  options.window_asks_max = LH_STATE_ASKS_MAX / 2;
  plan_ = std::make_unique<TransferPlan>(chunks, options, now);
  plan_only_ = only;
  measured_ = true;
  phase_ = Phase::kChunks;
}

// ------------------------------------------------------------------------------ chunks

void StateTransfer::WorkChunks(Tick now) {
  CopyLocal();
  UpdatePlanSources();
  for (const TransferAction& action : plan_->Advance(now)) {
    if (const auto* ask = std::get_if<AskChunk>(&action)) {
      Do(*ask, now);
    } else {
      Do(std::get<DropAsk>(action));
    }
  }
  EndPlan();
}

void StateTransfer::UpdatePlanSources() {
  for (const auto& [member, source] : sources_) {
    if (plan_only_ && member != plan_only_) continue;
    if (source.out) {
      plan_->AddSource(member);  // so that an error text names the source
      plan_->RemoveSource(member, source.reason);
    } else if (!Reachable(member, source)) {
      plan_->AddSource(member);
      plan_->SuspendSource(member);
    } else if (plan_only_) {
      plan_->AddSource(member);
    }
  }
  if (plan_only_) return;
  for (const MemberId member : Usable()) plan_->AddSource(member);
}

void StateTransfer::Do(const AskChunk& action, Tick now) {
  const ChunkToFetch& chunk = action.chunk;
  if (!spec_.state->FreshInbox(chunk.tensor)) return AskFor(action, now);
  touching_[action.ask] = {action};
  hasher_->Touch({spec_.state->BeginFetch(chunk.tensor, chunk.chunk), chunk.bytes},
                 [self = self_, plan = action.ask] {
                   StateTransfer* const transfer = *self;
                   if (transfer == nullptr) return;
                   transfer->touched_.push_back(plan);
                   transfer->dirty_ = true;
                 });
}

void StateTransfer::OnTouched(AskId plan, Tick now) {
  const Touching touched = touching_.extract(plan).mapped();
  if (phase_ == Phase::kEnding) return;
  if (touched.dropped) return plan_->OnDropped(plan);
  AskFor(touched.action, now);
}

void StateTransfer::AskFor(const AskChunk& action, Tick now) {
  const Source& source = sources_.at(action.source);
  Ask ask{.source = action.source,
          .peer = source.peer,
          .plan = action.ask,
          .chunk = action.chunk,
          .bytes = action.chunk.bytes,
          .heard = now};
  ask.place = spec_.state->BeginFetch(ask.chunk.tensor, ask.chunk.chunk);
  by_plan_.emplace(action.ask, NewAsk(std::move(ask)));
}

void StateTransfer::Do(const DropAsk& action) {
  if (const auto touching = touching_.find(action.ask); touching != touching_.end()) {
    touching->second.dropped = true;
    return;
  }
  const auto it = asks_.find(by_plan_.at(action.ask));
  LH_CHECK(it != asks_.end());
  Ask& ask = it->second;
  if (ask.hashing) {
    ask.dropped = true;
  } else if (ask.detaching == 0) {
    std::erase(local_, it->first);
    Close(it, Ask::Then::kDropped, "");
  }
}

void StateTransfer::CopyLocal() {
  for (uint64_t copied = 0; copied < kCopyBytes && !local_.empty();) {
    const auto it = asks_.find(local_.front());
    local_.pop_front();
    Ask& ask = it->second;
    const MemoryState* const from = server_->Find(spec_.group, ask.source, spec_.root);
    if (from == nullptr) {
      Close(it, Ask::Then::kRefused, kNoMore);
      continue;
    }
    std::memcpy(ask.place, from->Chunk(ask.chunk.tensor, ask.chunk.chunk), ask.bytes);
    copied += ask.bytes;
    ask.placed = ask.got = ask.bytes;
    Hash(it->first, &ask);
  }
}

// If the plan has ended and nothing writes for it any more: fails, ends, or starts the next plan.
void StateTransfer::EndPlan() {
  const bool failed = !plan_->failure().empty();
  if ((!failed && !plan_->done()) || !by_plan_.empty() || !touching_.empty()) return;
  const std::string failure = plan_->failure();
  const size_t left_out = plan_->left_out();
  RetirePlan();
  last_news_ = now_;
  dirty_ = true;
  if (failed && !unequal_) return Fail(failure);
  if (left_out > 0) return Fail(absl::StrCat(left_out, " chunks have changed at all sources"));
  if (failed) {
    // All tensors that may be unequal must come from one source. Begin again with another source.
    Source& source = sources_.at(plan_only_);
    source.tried_unequal = true;
    source.reason = failure;
    phase_ = Phase::kDigests;
    return;
  }
  const Manifest& manifest = spec_.state->manifest;
  const bool more = !unequal_ && spec_.unequal_too &&
                    std::any_of(manifest.begin(), manifest.end(),
                                [](const StateTensor& tensor) { return tensor.allow_unequal; });
  if (!more) {
    phase_ = Phase::kEnding;
    return;
  }
  unequal_ = true;
  phase_ = Phase::kDigests;
  if (!sources_.at(digests_from_).out) MakePlan(digests_from_, now_);
}

void StateTransfer::RetirePlan() {
  past_ += plan_->progress();
  for (const MemberId member : plan_->sources_used()) used_.insert(member);
  plan_.reset();
}

// ------------------------------------------------------------------------------ asks

uint64_t StateTransfer::NewAsk(Ask ask) {
  const uint64_t id = next_ask_++;
  Source& source = sources_.at(ask.source);
  const auto it = asks_.emplace(id, std::move(ask)).first;
  source.asks.insert(id);
  if (Local(source)) {
    local_.push_back(id);
  } else {
    SendRequest(id, it->second);
  }
  return id;
}

void StateTransfer::SendRequest(uint64_t id, const Ask& ask) {
  ChunkRequestBody body;
  body.source = ask.source;
  body.root = spec_.root;
  body.kind = ask.plan ? ChunkKind::kChunk : ChunkKind::kDigests;
  body.tensor = ask.chunk.tensor;
  body.chunk = ask.chunk.chunk;
  FrameHeader header = ChunkFrame(FrameType::kChunkRequest, spec_.group.group, spec_.id, id);
  // Tells the peer that all asks below this number are over. So take the oldest open ask at any
  // member of the peer.
  header.stamp = id;
  for (const auto& [member, source] : sources_) {
    if (source.peer == ask.peer && !source.asks.empty()) {
      header.stamp = std::min(header.stamp, *source.asks.begin());
    }
  }
  asked_.insert(ask.peer);
  transport_->SendControl(LinkTo(ask.peer), header, Encode(body));
}

void StateTransfer::SendCancel(PeerId peer, uint64_t ask) {
  transport_->SendControl(
      LinkTo(peer), ChunkFrame(FrameType::kChunkCancel, spec_.group.group, spec_.id, ask), {});
}

void StateTransfer::Close(Asks::iterator it, Ask::Then then, const std::string& reason) {
  Ask& ask = it->second;
  LH_CHECK(!ask.hashing && ask.detaching == 0);
  dirty_ = true;
  past_.bytes_repeated += ask.placed;
  ask.then = then;
  ask.reason = reason;
  if (then == Ask::Then::kDropped && !Local(sources_.at(ask.source))) {
    SendCancel(ask.peer, it->first);
  }
  if (ask.placed == ask.got) return Closed(it);
  ask.detaching = (*detach_cookies_)++;
  transport_->DetachReceives(spec_.group.run,
                             {.type = FrameType::kChunkData,
                              .group = spec_.group.group,
                              .op = OpOrdinal(spec_.id),
                              .attempt = Epoch(it->first)},
                             ask.detaching);
}

void StateTransfer::Closed(Asks::iterator it) {
  const MemberId source = it->second.source;
  const AskId plan = it->second.plan;
  const Ask::Then then = it->second.then;
  const std::string reason = std::move(it->second.reason);
  Erase(it);
  if (!plan || plan_ == nullptr) return;
  switch (then) {
    case Ask::Then::kDropped:
      return plan_->OnDropped(plan);
    case Ask::Then::kRefused:
      PutOut(source, reason);
      return plan_->OnRefused(plan, reason);
    case Ask::Then::kChanged:
      return plan_->OnChanged(plan);
    case Ask::Then::kBusy:
      return plan_->OnBusy(plan, now_);
  }
}

void StateTransfer::Erase(Asks::iterator it) {
  sources_.at(it->second.source).asks.erase(it->first);
  if (it->second.plan) by_plan_.erase(it->second.plan);
  asks_.erase(it);
  dirty_ = true;
}

bool StateTransfer::OnReceivesDetached(uint64_t cookie) {
  const auto it = std::find_if(asks_.begin(), asks_.end(), [cookie](const auto& entry) {
    return entry.second.detaching == cookie;
  });
  if (it == asks_.end()) return false;
  Closed(it);
  return true;
}

// ------------------------------------------------------------------------------ answers

absl::StatusOr<uint8_t*> StateTransfer::OnDataHeader(const LinkKey& link,
                                                     const FrameHeader& header) {
  const auto it = asks_.find(header.attempt.value());
  if (it == asks_.end() || it->second.detaching != 0) {
    past_.bytes_repeated += header.payload_bytes;
    return nullptr;
  }
  Ask& ask = it->second;
  if (ask.peer != link.peer || link.run != spec_.group.run || header.group != spec_.group.group) {
    return nullptr;
  }
  if (ask.placed == ask.bytes) return nullptr;
  if (header.stamp != ask.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("CHUNK_DATA of an answer of ", header.stamp,
                                                   " bytes where ", ask.bytes, " were asked for"));
  }
  if (header.payload_bytes > ask.bytes - ask.placed) {
    return absl::InvalidArgumentError("CHUNK_DATA of more bytes than the answer has");
  }
  ask.placed += header.payload_bytes;
  return ask.place + header.offset;
}

absl::Status StateTransfer::OnDataReceived(const FrameHeader& header) {
  const auto it = asks_.find(header.attempt.value());
  LH_CHECK(it != asks_.end());
  Ask& ask = it->second;
  ask.got += header.payload_bytes;
  ask.news = true;
  if (!ask.plan) {
    dirty_ = true;
  } else {
    pieces_.emplace_back(ask.plan, header.payload_bytes);
  }
  if (ask.got == ask.bytes) OnComplete(it->first, &ask);
  return absl::OkStatus();
}

void StateTransfer::OnDataAbandoned(const FrameHeader& header) {
  // It is not known how many bytes of the payload had come. Count all of them.
  past_.bytes_repeated += header.payload_bytes;
  const auto it = asks_.find(header.attempt.value());
  if (it != asks_.end()) it->second.placed -= header.payload_bytes;
}

void StateTransfer::OnComplete(uint64_t id, Ask* ask) {
  if (ask->detaching != 0) return;
  if (ask->plan) return Hash(id, ask);
  digests_in_.push_back(id);
  dirty_ = true;
}

void StateTransfer::Hash(uint64_t id, Ask* ask) {
  ask->hashing = true;
  hasher_->Hash(reinterpret_cast<const std::byte*>(ask->place), ask->bytes,
                [self = self_, id](Hash128 digest) {
                  StateTransfer* const transfer = *self;
                  if (transfer == nullptr) return;
                  transfer->hashed_.emplace_back(id, digest);
                  transfer->dirty_ = true;
                });
}

void StateTransfer::OnHashed(uint64_t id, Hash128 digest, Tick now) {
  const auto it = asks_.find(id);
  LH_CHECK(it != asks_.end());
  Ask& ask = it->second;
  ask.hashing = false;
  const ChunkToFetch chunk = ask.chunk;
  const bool good = digest == expected_[chunk.tensor][chunk.chunk];
  // A source on this host may go on writing to its tensors, so a wrong digest is not its fault.
  const bool changed = !good && spec_.background && ask.peer == spec_.self;
  if (good) spec_.state->Fetched(chunk.tensor, chunk.chunk, digest);
  if (!good && !ask.dropped && !changed) {
    Wrong(ask.source, absl::StrCat("chunk ", chunk.chunk, " of tensor ", chunk.tensor, " (",
                                   spec_.state->manifest[chunk.tensor].name, ")"));
  }
  if (phase_ == Phase::kEnding) return Erase(it);
  if (changed && !ask.dropped) {
    const AskId plan = ask.plan;
    Erase(it);
    return plan_->OnChanged(plan);
  }
  plan_->OnChunk(ask.plan, good, now);
  Erase(it);
}

absl::Status StateTransfer::OnRefused(const LinkKey& link, const FrameHeader& header,
                                      std::span<const uint8_t> payload, Tick now) {
  LH_ASSIGN_OR_RETURN(const ChunkRefusedBody body, ParseChunkRefusedBody(payload));
  now_ = now;
  const auto it = asks_.find(header.attempt.value());
  if (it == asks_.end()) return absl::OkStatus();
  Ask& ask = it->second;
  if (ask.peer != link.peer || ask.hashing || ask.detaching != 0) {
    return absl::OkStatus();
  }
  // The answer is complete, so the refusal does not matter. Work() will take the answer.
  if (ask.got == ask.bytes) return absl::OkStatus();
  Source& source = sources_.at(ask.source);
  const bool early = now - source.since < Millis(spec_.detect_ms);
  if (body.code == ChunkRefusal::kBusy) {
    source.reason = "serves too many others";
    // The source is alive and serves others first, which may take long.
    last_news_ = now;
    if (plan_ != nullptr) plan_->OnNews(now);
  } else if (body.code == ChunkRefusal::kNotHere && early) {
    source.reason = "does not have the state yet";
  } else if (body.code == ChunkRefusal::kChanged && spec_.background && ask.plan) {
    Close(it, Ask::Then::kChanged, "");
    return absl::OkStatus();
  } else {
    const std::string reason =
        body.code == ChunkRefusal::kChanged ? "has a state that has changed" : kNoMore;
    if (!ask.plan) PutOut(ask.source, reason);
    Close(it, Ask::Then::kRefused, reason);
    return absl::OkStatus();
  }
  source.retry_us = std::clamp(2 * source.retry_us, kRetryMinUs, kRetryMaxUs);
  source.retry = now + source.retry_us;
  Close(it, Ask::Then::kBusy, source.reason);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------ work and end

// Bytes that arrive show that a source is alive, even if no piece is complete: on a slow link with
// many lanes all pieces arrive side by side, so it may take long until one is complete.
void StateTransfer::LookForNews(Tick now) {
  std::set<PeerId> peers;
  for (const auto& [member, source] : sources_) peers.insert(source.peer);
  uint64_t arrived = 0;
  for (const PeerId peer : peers) arrived += transport_->StateBytes({spec_.group.run, peer});
  if (arrived > arrived_.value_or(arrived)) {
    last_news_ = now;
    if (plan_ != nullptr) plan_->OnNews(now);
  }
  arrived_ = arrived;
}

void StateTransfer::Work(Tick now) {
  if (result_.has_value()) return;
  for (const auto& [ask, bytes] : pieces_) {
    if (plan_ != nullptr) plan_->OnPiece(ask, bytes, now);
  }
  pieces_.clear();
  if (!dirty_ && now < due_) return;
  now_ = now;
  if (!arrived_ || now >= due_) LookForNews(now);
  LookForLocalEnds();
  dirty_ = false;
  for (const AskId plan : std::exchange(touched_, {})) OnTouched(plan, now);
  for (const auto& [id, digest] : std::exchange(hashed_, {})) OnHashed(id, digest, now);
  for (const uint64_t id : std::exchange(digests_in_, {})) {
    const auto it = asks_.find(id);
    if (it == asks_.end()) continue;
    const MemberId source = it->second.source;
    const std::vector<uint8_t> bytes = std::move(it->second.buffer);
    Erase(it);
    if (phase_ == Phase::kDigests && !sources_.at(source).out) {
      AcceptDigests(source, ParseDigests(spec_.state->manifest, bytes), now);
    }
  }
  if (phase_ == Phase::kDigests) WorkDigests(now);
  if (phase_ == Phase::kChunks) WorkChunks(now);
  MaybeEnd();
  due_ = kNever;
  if (phase_ == Phase::kChunks) {
    due_ = plan_->NextDeadline();
  } else if (phase_ == Phase::kDigests) {
    // While an ask is open, WorkDigests() judges only that ask.
    for (const auto& [id, ask] : asks_) {
      if (!ask.plan && ask.detaching == 0) {
        due_ = std::min(due_, ask.heard + Millis(spec_.detect_ms));
      }
    }
    if (due_ == kNever) due_ = last_news_ + kStallAfter * Millis(spec_.detect_ms);
    for (const auto& [member, source] : sources_) {
      if (!source.out && source.retry > now) due_ = std::min(due_, source.retry);
    }
  }
  if (!local_.empty()) dirty_ = true;
}

Tick StateTransfer::NextDeadline() const {
  if (result_.has_value()) return kNever;
  return dirty_ ? Tick{} : due_;
}

void StateTransfer::Stop(const std::string& reason) {
  if (phase_ == Phase::kEnding || result_.has_value()) return;
  Fail(reason);
}

void StateTransfer::Fail(const std::string& reason) {
  LH_CHECK(!reason.empty());
  error_ = reason;
  phase_ = Phase::kEnding;
  dirty_ = true;
  local_.clear();
  std::vector<Asks::iterator> open;
  for (auto it = asks_.begin(); it != asks_.end(); ++it) {
    if (!it->second.hashing && it->second.detaching == 0) open.push_back(it);
  }
  for (const auto it : open) Close(it, Ask::Then::kDropped, "");
}

void StateTransfer::MaybeEnd() {
  if (phase_ != Phase::kEnding || !asks_.empty() || !touching_.empty()) return;
  for (const PeerId peer : asked_) SendCancel(peer, 0);
  if (plan_ != nullptr) RetirePlan();
  result_ = TransferResult{.error = error_,
                           .bytes = past_.bytes_received,
                           .bytes_repeated = past_.bytes_repeated,
                           .sources = {used_.begin(), used_.end()},
                           .corrupt = {corrupt_.begin(), corrupt_.end()}};
}

StateTransfer::Progress StateTransfer::progress() const {
  TransferPlan::Progress sum = past_;
  if (plan_ != nullptr) sum += plan_->progress();
  return {sum.bytes_total,
          sum.bytes_done,
          sum.bytes_received,
          sum.bytes_repeated,
          static_cast<uint32_t>(Usable().size()),
          measured_};
}

}  // namespace longhaul::peerd
