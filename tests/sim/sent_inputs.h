// What a peer has sent of its own inputs to ops that encode.
//
// An op that is redone must send the same bytes again: whatever the attempt and its participants
// are, an encoded block depends on the inputs and the op only. With other random numbers, two
// members could count one input in two ways, and errors would belong to bytes that nobody has.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "peerd/collective/layout.h"
#include "peerd/core/actions.h"
#include "proto/wire/frame.h"

namespace longhaul::sim {

class SentInputs {
 public:
  explicit SentInputs(PeerId self) : self_(self) {}

  void OnStart(const peerd::StartAttempt& start);
  // The op is over.
  void OnEnd(const GroupKey& group, OpOrdinal ordinal) { ops_.erase({group, ordinal}); }
  // The attempt that runs sends a segment. Returns how many blocks of it another attempt at the op
  // has sent. Fails if these were different.
  uint64_t OnSegment(const GroupKey& group, OpOrdinal ordinal, const FrameHeader& header,
                     const uint8_t* data);

 private:
  // The posts whose tensors are encoded together, the codec, and the byte of the tensor where a
  // block begins. Attempts may have different codecs, if the op leaves the choice to the core.
  using Block = std::tuple<std::vector<peerd::PostRef>, Quantization, uint64_t>;
  struct Sent {
    uint64_t digest = 0;
    Epoch attempt;  // that sent the block last
  };
  struct Op {
    peerd::StartAttempt start;
    std::optional<peerd::Layout> layout;
    std::map<Block, Sent> sent;
  };

  bool IsOwn(const Op& op, const peerd::Layout::Chunk& chunk, Phase phase) const;

  const PeerId self_;
  std::map<std::pair<GroupKey, OpOrdinal>, Op> ops_;  // that encode
};

}  // namespace longhaul::sim
