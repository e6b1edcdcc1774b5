#include "tests/sim/sent_inputs.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/digest.h"
#include "peerd/collective/block_codec.h"
#include "tests/sim/checker.h"

namespace longhaul::sim {
namespace {

int PositionOf(PeerId peer, const std::vector<PeerId>& ring) {
  return static_cast<int>(std::find(ring.begin(), ring.end(), peer) - ring.begin());
}

}  // namespace

void SentInputs::OnStart(const peerd::StartAttempt& start) {
  const bool segments = start.algorithm == Algorithm::kRing || start.algorithm == Algorithm::kMesh;
  if (!start.desc.Encodes() || !segments) return;
  Op& op = ops_[{start.group, start.ordinal}];
  op.start = start;
  peerd::AttemptSpec spec;
  spec.desc = start.desc;
  spec.pieces.push_back({start.desc.dtype, start.desc.count});
  spec.shares = start.shares;
  spec.sources.resize(start.posts.size());
  spec.targets.resize(start.posts.size());
  for (const peerd::CutOwner& cut : start.cuts) {
    spec.cuts.push_back({cut.position, cut.post, cut.to_position, cut.to_post, cut.count});
  }
  op.layout.emplace(spec, static_cast<int>(start.ring.size()));
}

// Whether such segments of the chunk have nothing but this peer's input. A ring begins at the
// position behind the owner if chunks belong to members, and else at the position of the chunk.
bool SentInputs::IsOwn(const Op& op, const peerd::Layout::Chunk& chunk, Phase phase) const {
  const OpKind kind = op.start.desc.kind;
  if ((phase == Phase::kReduce) != Reduces(kind)) return false;
  const int size = static_cast<int>(op.start.ring.size());
  const int position = PositionOf(self_, op.start.ring);
  if (!Reduces(kind)) return chunk.position == position;
  if (op.start.algorithm == Algorithm::kMesh) return true;
  return position == (op.start.cuts.empty() ? chunk.position : (chunk.position + 1) % size);
}

uint64_t SentInputs::OnSegment(const GroupKey& group, OpOrdinal ordinal, const FrameHeader& header,
                               const uint8_t* data) {
  const auto it = ops_.find({group, ordinal});
  if (it == ops_.end() || it->second.start.attempt != header.attempt) return 0;
  Op& op = it->second;
  const auto& chunks = op.layout->chunks();
  const auto chunk = std::find_if(chunks.begin(), chunks.end(), [&](const auto& each) {
    return header.offset >= each.offset && header.offset < each.offset + each.bytes;
  });
  LH_CHECK(chunk != chunks.end()) << "a segment at " << header.offset;
  if (!IsOwn(op, *chunk, header.phase)) return 0;
  std::vector<peerd::PostRef> posts;
  for (size_t i = 0; i < op.start.posts.size(); ++i) {
    const bool in =
        Reduces(op.start.desc.kind) ? op.start.contributes[i] : static_cast<int>(i) == chunk->local;
    if (in) posts.push_back(op.start.posts[i]);
  }
  const peerd::BlockOptions codec = peerd::CodecOf(op.start.desc);
  const uint64_t size = SizeOf(chunk->dtype);
  uint64_t again = 0;
  uint64_t skip = header.offset - chunk->offset;
  for (uint64_t read = 0; read < header.payload_bytes; skip += codec.block * size) {
    LH_CHECK(skip < chunk->bytes) << "a segment of " << header.payload_bytes;
    const uint64_t count = std::min<uint64_t>(codec.block, (chunk->bytes - skip) / size);
    const uint64_t bytes = peerd::EncodedBytes(codec, count);
    const std::string block(reinterpret_cast<const char*>(data) + read, bytes);
    const uint64_t digest = Digester().Add(block).value();
    const Block key{posts, op.start.desc.quantization, chunk->source + skip};
    Sent& sent = op.sent.try_emplace(key, Sent{digest, header.attempt}).first->second;
    if (sent.digest != digest) {
      Checker::Fail(ToString(self_) + " sends other bytes of the block at byte " +
                    std::to_string(chunk->source + skip) + " in attempt " +
                    longhaul::ToString(header.attempt) + " than in attempt " +
                    longhaul::ToString(sent.attempt) + " (" + ToString(op.start.desc) + ")");
    }
    if (sent.attempt != header.attempt) ++again;
    sent.attempt = header.attempt;
    read += bytes;
  }
  return again;
}

}  // namespace longhaul::sim
