#include "peerd/state/state_server.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// A transfer is forgotten this many detect_ms after its last ask.
constexpr int64_t kForgetAfter = 4;
// Open answers of one transfer that are not chunks. A correct receiver has one.
constexpr size_t kWholeMax = 4;
// How many transfers of one link are served at a time.
constexpr int64_t kTransfersOfLinkMax = LH_STATE_TRANSFERS_MAX * 3 / 4;

}  // namespace

StateServer::StateServer(Transport* transport, Hasher* hasher, uint32_t detect_ms)
    : transport_(transport),
      hasher_(hasher),
      detect_ms_(detect_ms),
      self_(std::make_shared<StateServer*>(this)) {}

StateServer::~StateServer() { *self_ = nullptr; }

// ------------------------------------------------------------------------------ what is here

void StateServer::Register(const GroupKey& group, MemberId member,
                           std::shared_ptr<const MemoryState> state) {
  LH_CHECK(state != nullptr && state->places.size() == state->manifest.size() &&
           state->digests.size() == state->manifest.size());
  Served& served = served_[{group, member}];
  if (served.state == state) return;
  EndServe(group, member);
  served.state = std::move(state);
  served.encoded_manifest = nullptr;
}

void StateServer::Unregister(const GroupKey& group, MemberId member) {
  EndServe(group, member);
  served_.erase({group, member});
}

void StateServer::Serve(const GroupKey& group, MemberId member, const Hash128& root,
                        bool may_change) {
  const auto it = served_.find({group, member});
  LH_CHECK(it != served_.end()) << "served before it was registered";
  Served& served = it->second;
  served.on = true;
  served.root = root;
  served.may_change = may_change;
  if (served.over == root) served.over.reset();
  served.digests = nullptr;
}

void StateServer::EndServe(const GroupKey& group, MemberId member) {
  const auto it = served_.find({group, member});
  if (it == served_.end() || !it->second.on) return;
  Served& served = it->second;
  served.on = false;
  served.digests = nullptr;
  if (served.may_change) served.over = served.root;
  const ChunkRefusal why = served.may_change ? ChunkRefusal::kOver : ChunkRefusal::kNotHere;
  std::vector<std::shared_ptr<Answer>> open;
  for (const auto& [key, transfer] : transfers_) {
    for (const auto& [ask, answer] : transfer.asks) {
      if (answer->member == it->first && !answer->manifest) open.push_back(answer);
    }
  }
  // Refuse also an ask whose pieces have all been sent. Either the receiver has all of them and
  // ignores the refusal, or it lacks pieces that were on a lost lane.
  for (const auto& answer : open) {
    Refuse(answer->transfer, answer->ask, why);
    transfers_.at(answer->transfer).asks.erase(answer->ask);
    End(answer);
  }
}

void StateServer::ServeKept(const GroupKey& group, MemberId member,
                            std::shared_ptr<const MemoryState> state, const Hash128& root) {
  const auto it = served_.find({group, member});
  LH_CHECK(it != served_.end()) << "kept bits of a member that is not registered";
  it->second.kept = std::move(state);
  it->second.kept_root = root;
  it->second.kept_digests = nullptr;
}

void StateServer::EndServeKept(const GroupKey& group, MemberId member) {
  const auto it = served_.find({group, member});
  if (it == served_.end()) return;
  it->second.kept = nullptr;
  it->second.kept_digests = nullptr;
}

bool StateServer::Reading(const MemoryState* state) const {
  return std::any_of(cookies_.begin(), cookies_.end(),
                     [state](const auto& entry) { return entry.second->state.get() == state; });
}

const MemoryState* StateServer::Find(const GroupKey& group, MemberId member,
                                     const Hash128& root) const {
  const auto it = served_.find({group, member});
  if (it == served_.end()) return nullptr;
  switch (it->second.With(root)) {
    case Served::Copy::kLive:
      return it->second.state.get();
    case Served::Copy::kKept:
      return it->second.kept.get();
    case Served::Copy::kNone:
      break;
  }
  return nullptr;
}

bool StateServer::Over(const GroupKey& group, MemberId member, const Hash128& root) const {
  const auto it = served_.find({group, member});
  return it != served_.end() && it->second.over == root &&
         it->second.With(root) == Served::Copy::kNone;
}

const Manifest* StateServer::FindManifest(const GroupKey& group, MemberId member) const {
  const auto it = served_.find({group, member});
  return it == served_.end() ? nullptr : &it->second.state->manifest;
}

// ------------------------------------------------------------------------------ asks

absl::Status StateServer::OnFrame(const LinkKey& link, const FrameHeader& header,
                                  std::span<const uint8_t> payload, bool in_group, Tick now) {
  if (header.type == FrameType::kChunkRequest) {
    return OnRequest(link, header, payload, in_group, now);
  }
  LH_CHECK(header.type == FrameType::kChunkCancel);
  OnCancel(link, header);
  return absl::OkStatus();
}

absl::Status StateServer::OnRequest(const LinkKey& link, const FrameHeader& header,
                                    std::span<const uint8_t> payload, bool in_group, Tick now) {
  LH_ASSIGN_OR_RETURN(const ChunkRequestBody body, ParseChunkRequestBody(payload));
  const TransferKey key{link, header.group, header.op.value()};
  const uint64_t ask = header.attempt.value();
  if (!in_group) {
    Refuse(key, ask, ChunkRefusal::kNotHere);
    return absl::OkStatus();
  }
  if (header.stamp > ask) {
    return absl::InvalidArgumentError(absl::StrCat("CHUNK_REQUEST of ask ", ask,
                                                   " says that those below ", header.stamp,
                                                   " are over, itself among them"));
  }
  const MemberKey member({link.run, header.group}, body.source);
  const auto found = served_.find(member);
  const bool any_root = body.kind == ChunkKind::kManifest && body.root == Hash128{};
  auto copy = Served::Copy::kNone;
  if (found != served_.end()) {
    copy = any_root ? Served::Copy::kLive : found->second.With(body.root);
  }
  const ChunkRefusal why_none =
      Over(member.first, member.second, body.root) ? ChunkRefusal::kOver : ChunkRefusal::kNotHere;
  auto it = transfers_.find(key);
  if (it == transfers_.end()) {
    // If the first ask of a transfer is for something that is not here, the transfer takes no
    // place.
    if (copy == Served::Copy::kNone) {
      Refuse(key, ask, why_none);
      return absl::OkStatus();
    }
    if (!HasRoomFor(link)) {
      Refuse(key, ask, ChunkRefusal::kBusy);
      return absl::OkStatus();
    }
    it = transfers_.emplace(key, Transfer{}).first;
  }
  Transfer& transfer = it->second;
  if (ask <= transfer.ask) {
    return absl::InvalidArgumentError(
        absl::StrCat("CHUNK_REQUEST of ask ", ask, " follows one of ask ", transfer.ask));
  }
  transfer.ask = ask;
  transfer.active = now;
  while (!transfer.asks.empty() && transfer.asks.begin()->first < header.stamp) {
    const std::shared_ptr<Answer> over = transfer.asks.begin()->second;
    transfer.asks.erase(transfer.asks.begin());
    End(over);
  }
  // Allow twice as many asks as a correct receiver has open: its cancels may still be on their way.
  if (transfer.asks.size() >= size_t{2} * LH_STATE_ASKS_MAX) {
    Refuse(key, ask, ChunkRefusal::kBusy);
    return absl::OkStatus();
  }
  if (copy == Served::Copy::kNone) {
    Refuse(key, ask, why_none);
    return absl::OkStatus();
  }
  const bool kept = copy == Served::Copy::kKept;
  Served& served = found->second;
  const std::shared_ptr<const MemoryState>& state = kept ? served.kept : served.state;
  const Manifest& manifest = state->manifest;
  if (body.kind == ChunkKind::kChunk &&
      (body.tensor >= manifest.size() || body.chunk >= CountChunks(manifest[body.tensor].bytes))) {
    return absl::InvalidArgumentError(absl::StrCat("CHUNK_REQUEST of chunk ", body.chunk,
                                                   " of tensor ", body.tensor,
                                                   ", which the state does not have"));
  }
  const bool copied = kept || served.may_change;
  if (!MayAnswer(transfer, body.kind, copied)) {
    Refuse(key, ask, ChunkRefusal::kBusy);
    return absl::OkStatus();
  }
  auto answer = std::make_shared<Answer>();
  answer->transfer = key;
  answer->ask = ask;
  answer->member = member;
  answer->owner = next_owner_++;
  transfer.asks.emplace(ask, answer);
  owners_.emplace(answer->owner, answer);
  transport_->WantDataLanes(link);
  switch (body.kind) {
    case ChunkKind::kManifest:
      if (served.encoded_manifest == nullptr) {
        served.encoded_manifest =
            std::make_shared<const std::vector<uint8_t>>(EncodeManifest(manifest));
      }
      answer->whole = answer->manifest = true;
      answer->bytes = served.encoded_manifest;
      Send(answer, answer->bytes->data(), answer->bytes->size());
      break;
    case ChunkKind::kDigests: {
      auto& digests = kept ? served.kept_digests : served.digests;
      if (digests == nullptr) {
        digests = std::make_shared<const std::vector<uint8_t>>(EncodeDigests(state->digests));
      }
      answer->whole = true;
      answer->bytes = digests;
      Send(answer, answer->bytes->data(), answer->bytes->size());
      break;
    }
    case ChunkKind::kChunk:
      AnswerChunk(answer, state, body, copied);
      break;
  }
  Pump(now);
  return absl::OkStatus();
}

// Leaves some places for other links, so that one peer cannot take all places.
bool StateServer::HasRoomFor(const LinkKey& link) const {
  const auto of_link = std::count_if(transfers_.begin(), transfers_.end(),
                                     [&](const auto& entry) { return entry.first.link == link; });
  return transfers_.size() < LH_STATE_TRANSFERS_MAX && of_link < kTransfersOfLinkMax;
}

// Limits the memory that this peer uses for a receiver that asks too much.
bool StateServer::MayAnswer(const Transfer& transfer, ChunkKind kind, bool copied) {
  if (kind == ChunkKind::kChunk && !copied) return true;
  size_t whole = 0;
  uint64_t copies = 0;
  for (const auto& [ask, answer] : transfer.asks) {
    if (answer->whole) {
      ++whole;
    } else if (answer->bytes != nullptr) {
      copies += answer->bytes->size();
    }
  }
  if (kind != ChunkKind::kChunk) return whole < kWholeMax;
  return copies <= uint64_t{2} * LH_STATE_WINDOW_BYTES_MAX;
}

void StateServer::AnswerChunk(const std::shared_ptr<Answer>& answer,
                              const std::shared_ptr<const MemoryState>& state,
                              const ChunkRequestBody& body, bool copied) {
  const uint32_t bytes = ChunkBytes(state->manifest[body.tensor].bytes, body.chunk);
  const uint8_t* const data = state->Chunk(body.tensor, body.chunk);
  if (copied) {
    AnswerChecked(answer, state->digests[body.tensor][body.chunk], {data, bytes});
  } else {
    answer->state = state;
    Send(answer, data, bytes);
  }
}

void StateServer::AnswerChecked(const std::shared_ptr<Answer>& answer, const Hash128& wanted,
                                std::span<const uint8_t> chunk) {
  answer->bytes = std::make_shared<const std::vector<uint8_t>>(chunk.begin(), chunk.end());
  hasher_->Hash(reinterpret_cast<const std::byte*>(answer->bytes->data()), answer->bytes->size(),
                [self = self_, answer, wanted](Hash128 digest) {
                  StateServer* const server = *self;
                  if (server == nullptr || answer->over) return;
                  if (digest == wanted) {
                    server->Send(answer, answer->bytes->data(), answer->bytes->size());
                    return;
                  }
                  server->Refuse(answer->transfer, answer->ask, ChunkRefusal::kChanged);
                  server->transfers_.at(answer->transfer).asks.erase(answer->ask);
                  server->End(answer);
                });
}

void StateServer::Send(const std::shared_ptr<Answer>& answer, const uint8_t* data, uint64_t bytes) {
  if (bytes == 0) return;
  answer->data = data;
  answer->size = bytes;
  transfers_.at(answer->transfer).queue.push_back(answer);
  ++queued_;
}

void StateServer::Pump(Tick now) {
  while (queued_ > 0 && bucket_.NextAt() <= now) {
    auto it = transfers_.upper_bound(served_last_);
    while (it == transfers_.end() || it->second.queue.empty()) {
      it = it == transfers_.end() ? transfers_.begin() : std::next(it);
    }
    served_last_ = it->first;
    std::deque<std::shared_ptr<Answer>>& queue = it->second.queue;
    const std::shared_ptr<Answer> answer = queue.front();
    SendPiece(answer, now);
    if (answer->sent < answer->size) continue;
    queue.pop_front();
    --queued_;
  }
}

void StateServer::SendPiece(const std::shared_ptr<Answer>& answer, Tick now) {
  FrameHeader header = ChunkFrame(FrameType::kChunkData, answer->transfer.group,
                                  answer->transfer.transfer, answer->ask);
  header.stamp = answer->size;
  header.offset = answer->sent;
  header.payload_bytes =
      static_cast<uint32_t>(std::min<uint64_t>(kPieceBytes, answer->size - answer->sent));
  answer->sent += header.payload_bytes;
  stats_.bytes_sent += header.payload_bytes;
  bucket_.Spend(header.payload_bytes, now);
  transport_->SendSegment(answer->transfer.link, header, answer->data + header.offset,
                          NewCookie(answer), answer->owner);
}

uint64_t StateServer::NewCookie(const std::shared_ptr<Answer>& answer) {
  const uint64_t cookie = next_cookie_++;
  cookies_.emplace(cookie, answer);
  answer->out.insert(cookie);
  return cookie;
}

void StateServer::Refuse(const TransferKey& key, uint64_t ask, ChunkRefusal code) {
  ++stats_.asks_refused;
  transport_->SendControl(key.link,
                          ChunkFrame(FrameType::kChunkRefused, key.group, key.transfer, ask),
                          Encode(ChunkRefusedBody{code}));
}

// ------------------------------------------------------------------------------ ends

void StateServer::OnCancel(const LinkKey& link, const FrameHeader& header) {
  const auto it = transfers_.find({link, header.group, header.op.value()});
  if (it == transfers_.end()) return;
  if (!header.attempt) return Forget(it);
  const auto ask = it->second.asks.find(header.attempt.value());
  if (ask == it->second.asks.end()) return;
  const std::shared_ptr<Answer> answer = ask->second;
  it->second.asks.erase(ask);
  End(answer);
}

// Drops the pieces that wait, and sends none again. The kernel may still read pieces that are on
// their way.
void StateServer::End(const std::shared_ptr<Answer>& answer) {
  answer->over = true;
  if (const auto it = transfers_.find(answer->transfer); it != transfers_.end()) {
    queued_ -= std::erase(it->second.queue, answer);
  }
  owners_.erase(answer->owner);
  if (!answer->out.empty()) {
    transport_->DropSegments(FrameType::kChunkData, {answer->out.begin(), answer->out.end()});
  }
}

void StateServer::Forget(std::map<TransferKey, Transfer>::iterator transfer) {
  for (const auto& [ask, answer] : transfer->second.asks) End(answer);
  transfers_.erase(transfer);
}

void StateServer::OnLinkDown(const LinkKey& link) {
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    const auto gone = it++;
    if (gone->first.link == link) Forget(gone);
  }
}

void StateServer::OnSegmentSent(uint64_t cookie) {
  const auto it = cookies_.find(cookie);
  LH_CHECK(it != cookies_.end());
  it->second->out.erase(cookie);
  cookies_.erase(it);
}

uint64_t StateServer::OnSegmentRepeat(uint64_t owner) {
  const auto it = owners_.find(owner);
  return it == owners_.end() ? 0 : NewCookie(it->second);
}

void StateServer::OnTime(Tick now) {
  Pump(now);
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    const auto next = std::next(it);
    if (it->second.active + kForgetAfter * Millis(detect_ms_) <= now) {
      const bool sending =
          !it->second.queue.empty() ||
          std::any_of(it->second.asks.begin(), it->second.asks.end(),
                      [](const auto& entry) { return !entry.second->out.empty(); });
      if (sending) {
        it->second.active = now;
      } else {
        Forget(it);
      }
    }
    it = next;
  }
}

Tick StateServer::NextDeadline() const {
  Tick due = queued_ > 0 ? bucket_.NextAt() : kNever;
  for (const auto& [key, transfer] : transfers_) {
    due = std::min(due, transfer.active + kForgetAfter * Millis(detect_ms_));
  }
  return due;
}

}  // namespace longhaul::peerd
