#include "peerd/state/state_exchange.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

// The number of the only ask of a comparison.
constexpr uint64_t kManifestAsk = 1;

}  // namespace

StateExchange::StateExchange(PeerId self, Transport* transport, Hasher* hasher, uint32_t detect_ms)
    : self_(self),
      transport_(transport),
      hasher_(hasher),
      detect_ms_(detect_ms),
      server_(transport, hasher, detect_ms) {}

StateExchange::~StateExchange() = default;

void StateExchange::SetDetectMs(uint32_t detect_ms) {
  detect_ms_ = detect_ms;
  server_.SetDetectMs(detect_ms);
}

// ------------------------------------------------------------------------------ transfers

StateTransfer* StateExchange::FindTransfer(Local local) const {
  for (const auto& [id, transfer] : transfers_) {
    if (transfer.local == local) return transfer.transfer.get();
  }
  return nullptr;
}

void StateExchange::StartTransfer(Start start, Tick now) {
  LH_CHECK(FindTransfer(start.local) == nullptr) << "a transfer of this member is on";
  const uint64_t id = next_transfer_++;
  TransferSpec spec{.id = id,
                    .self = self_,
                    .group = start.group,
                    .root = start.root,
                    .state = std::move(start.state),
                    .sources = std::move(start.sources),
                    .unequal_too = start.unequal_too,
                    .background = start.background,
                    .detect_ms = detect_ms_};
  transfers_[id] = {start.local, std::make_unique<StateTransfer>(
                                     std::move(spec), transport_, hasher_, &server_,
                                     [this](const LinkKey& link) { return up_.contains(link); },
                                     &next_detach_, now)};
}

void StateExchange::ChangeSources(Local local, const std::vector<StateSource>& sources, Tick now) {
  if (StateTransfer* const transfer = FindTransfer(local)) transfer->ChangeSources(sources, now);
}

void StateExchange::StopTransfer(Local local) {
  if (StateTransfer* const transfer = FindTransfer(local)) transfer->Stop("was stopped");
}

StateTransfer::Progress StateExchange::ProgressOf(Local local) const {
  const StateTransfer* const transfer = FindTransfer(local);
  return transfer == nullptr ? StateTransfer::Progress{} : transfer->progress();
}

// ------------------------------------------------------------------------------ comparisons

void StateExchange::CompareManifest(Local local, const GroupKey& group,
                                    std::shared_ptr<const Manifest> ours, const StateSource& other,
                                    Tick now) {
  if (other.peer == self_) {
    const Manifest* const theirs = server_.FindManifest(group, other.member);
    compared_.push_back({local, theirs == nullptr ? "" : FirstDifference(*ours, *theirs)});
    return;
  }
  if (!up_.contains({group.run, other.peer})) {
    compared_.push_back({local, ""});
    return;
  }
  const uint64_t id = next_transfer_++;
  comparisons_[id] = {.local = local,
                      .group = group,
                      .other = other,
                      .ours = std::move(ours),
                      .deadline = now + 2 * Millis(detect_ms_)};
  ChunkRequestBody body;
  body.source = other.member;
  body.kind = ChunkKind::kManifest;
  FrameHeader header = ChunkFrame(FrameType::kChunkRequest, group.group, id, kManifestAsk);
  header.stamp = kManifestAsk;
  transport_->SendControl({group.run, other.peer}, header, Encode(body));
}

void StateExchange::EndComparison(Comparisons::iterator it, const std::string& difference) {
  Comparison& comparison = it->second;
  if (comparison.over) return;
  comparison.over = true;
  compared_.push_back({comparison.local, difference});
  transport_->SendControl(
      LinkOf(comparison),
      ChunkFrame(FrameType::kChunkCancel, comparison.group.group, it->first, /*ask=*/0), {});
  if (comparison.placed == comparison.got) return;
  comparison.detaching = next_detach_++;
  transport_->DetachReceives(comparison.group.run,
                             {.type = FrameType::kChunkData,
                              .group = comparison.group.group,
                              .op = OpOrdinal(it->first),
                              .attempt = Epoch(kManifestAsk)},
                             comparison.detaching);
}

void StateExchange::FinishComparisons() {
  std::erase_if(comparisons_,
                [](const auto& entry) { return entry.second.over && entry.second.detaching == 0; });
}

// ------------------------------------------------------------------------------ the transport

void StateExchange::OnLinkUp(const LinkKey& link, Tick now) {
  up_.insert(link);
  for (auto& [id, transfer] : transfers_) transfer.transfer->OnLinkChange(link, now);
}

void StateExchange::OnLinkDown(const LinkKey& link, Tick now) {
  up_.erase(link);
  server_.OnLinkDown(link);
  for (auto& [id, transfer] : transfers_) transfer.transfer->OnLinkChange(link, now);
  for (auto it = comparisons_.begin(); it != comparisons_.end(); ++it) {
    if (LinkOf(it->second) == link) EndComparison(it, "");
  }
}

absl::Status StateExchange::OnControlFrame(const LinkKey& link, const FrameHeader& header,
                                           std::span<const uint8_t> payload, bool in_group,
                                           Tick now) {
  if (header.type != FrameType::kChunkRefused) {
    return server_.OnFrame(link, header, payload, in_group, now);
  }
  if (const auto it = transfers_.find(header.op.value()); it != transfers_.end()) {
    return it->second.transfer->OnRefused(link, header, payload, now);
  }
  const auto it = comparisons_.find(header.op.value());
  if (it != comparisons_.end() && LinkOf(it->second) == link) EndComparison(it, "");
  return ParseChunkRefusedBody(payload).status();
}

absl::StatusOr<uint8_t*> StateExchange::OnDataHeader(const LinkKey& link,
                                                     const FrameHeader& header) {
  if (const auto it = transfers_.find(header.op.value()); it != transfers_.end()) {
    return it->second.transfer->OnDataHeader(link, header);
  }
  const auto it = comparisons_.find(header.op.value());
  if (it == comparisons_.end() || it->second.over || LinkOf(it->second) != link) return nullptr;
  Comparison& comparison = it->second;
  // EndComparison() detaches receives of this ask only. Data of another ask could still be written
  // to the buffer after the buffer's end.
  if (header.group != comparison.group.group || header.attempt != Epoch(kManifestAsk)) {
    return absl::InvalidArgumentError("CHUNK_DATA of a manifest that was not asked for");
  }
  if (comparison.buffer.empty()) {
    if (header.stamp > ManifestBytesMax()) {
      return absl::InvalidArgumentError(
          absl::StrCat("CHUNK_DATA of a manifest of ", header.stamp, " bytes"));
    }
    comparison.buffer.resize(header.stamp);
  }
  if (header.stamp != comparison.buffer.size() ||
      header.payload_bytes > comparison.buffer.size() - comparison.placed) {
    return absl::InvalidArgumentError("CHUNK_DATA of more bytes than the manifest has");
  }
  comparison.placed += header.payload_bytes;
  return comparison.buffer.data() + header.offset;
}

absl::Status StateExchange::OnDataReceived(const LinkKey&, const FrameHeader& header) {
  if (const auto it = transfers_.find(header.op.value()); it != transfers_.end()) {
    return it->second.transfer->OnDataReceived(header);
  }
  const auto it = comparisons_.find(header.op.value());
  LH_CHECK(it != comparisons_.end());
  Comparison& comparison = it->second;
  comparison.got += header.payload_bytes;
  if (comparison.over || comparison.got < comparison.buffer.size()) return absl::OkStatus();
  const absl::StatusOr<Manifest> theirs = ParseManifest(comparison.buffer);
  if (!theirs.ok()) return theirs.status();
  EndComparison(it, FirstDifference(*comparison.ours, *theirs));
  return absl::OkStatus();
}

void StateExchange::OnDataAbandoned(const LinkKey&, const FrameHeader& header) {
  if (const auto it = transfers_.find(header.op.value()); it != transfers_.end()) {
    return it->second.transfer->OnDataAbandoned(header);
  }
  const auto it = comparisons_.find(header.op.value());
  if (it != comparisons_.end()) it->second.placed -= header.payload_bytes;
}

void StateExchange::OnReceivesDetached(uint64_t cookie) {
  for (auto& [id, comparison] : comparisons_) {
    if (comparison.detaching == cookie) comparison.detaching = 0;
  }
  for (auto& [id, transfer] : transfers_) {
    if (transfer.transfer->OnReceivesDetached(cookie)) return;
  }
}

// ------------------------------------------------------------------------------ work

void StateExchange::Work(Tick now) {
  if (server_.NextDeadline() <= now) server_.OnTime(now);
  for (auto it = comparisons_.begin(); it != comparisons_.end(); ++it) {
    if (it->second.deadline <= now) EndComparison(it, "");
  }
  FinishComparisons();
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    const auto next = std::next(it);
    it->second.transfer->Work(now);
    if (const auto& result = it->second.transfer->result(); result.has_value()) {
      past_.bytes_received += result->bytes;
      past_.bytes_repeated += result->bytes_repeated;
      past_.chunks_corrupt += result->corrupt.size();
      ended_.push_back({it->second.local, *result});
      transfers_.erase(it);
    }
    it = next;
  }
}

Tick StateExchange::NextDeadline() const {
  if (!ended_.empty() || !compared_.empty()) return Tick{};
  Tick due = server_.NextDeadline();
  for (const auto& [id, comparison] : comparisons_) {
    if (!comparison.over) due = std::min(due, comparison.deadline);
  }
  for (const auto& [id, transfer] : transfers_) {
    due = std::min(due, transfer.transfer->NextDeadline());
  }
  return due;
}

StateExchange::Stats StateExchange::GetStats() const {
  Stats stats = past_;
  for (const auto& [id, transfer] : transfers_) {
    const StateTransfer::Progress progress = transfer.transfer->progress();
    stats.bytes_received += progress.bytes_received;
    stats.bytes_repeated += progress.bytes_repeated;
  }
  stats.bytes_sent = server_.stats().bytes_sent;
  stats.transfers = static_cast<uint32_t>(transfers_.size());
  stats.serving = static_cast<uint32_t>(server_.transfers());
  return stats;
}

}  // namespace longhaul::peerd
