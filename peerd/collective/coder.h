// The arithmetic of an op that encodes (OpDesc::Encodes()): from tensors to the bytes that are
// sent, and back. Pure.
//
// All sums are float32. A tensor's elements are encoded in blocks (block_codec.h), counted from the
// beginning of a piece, or of a part that belongs to a member. Chunks begin at blocks. So what a
// member sends depends on its tensors and its seed only, not on how the tensor is cut into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "peerd/collective/attempt.h"
#include "peerd/collective/block_codec.h"
#include "peerd/collective/layout.h"
#include "peerd/collective/local.h"

namespace longhaul::peerd {

// Bytes [skip, skip + bytes) of a chunk, as its tensor has them. `skip` is a multiple of a block.
struct Stretch {
  const Layout::Chunk* chunk = nullptr;
  uint64_t skip = 0;
  uint64_t bytes = 0;
};

// What Coder::Add() adds up, and what becomes of the sum.
struct CodedSum {
  // Encoded inputs, in the order of the additions. nullptr stands for the own input.
  std::vector<const uint8_t*> inputs;
  // The own input is rounded as if it had been sent. Otherwise it is added as it is.
  bool own_as_sent = false;
  double divisor = 0;  // 0: the sum is not divided
  // One of these is set: where the encoded sum goes, or where it goes in the dtype of the chunk.
  // `encoded` may be one of the inputs.
  uint8_t* encoded = nullptr;
  uint8_t* result = nullptr;
  uint64_t seed = 0;  // of the encoded sum
  // Float32, by element: gets what own input and sum lost when they were encoded, in units of the
  // own input. nullptr: nobody wants it. An error that is not finite is 0.
  float* error = nullptr;
};

class Coder {
 public:
  // Keeps references to both. The op encodes.
  Coder(const AttemptSpec& spec, const Inputs& inputs);

  // The bytes of so many bytes of a tensor when they are encoded.
  uint64_t BytesOf(DType dtype, uint64_t bytes) const;
  // Encodes the own input: of a reduction the sum of the local inputs and their errors, else the
  // source of the local owner. `error` is as in CodedSum.
  void EncodeInput(const Stretch& stretch, uint8_t* out, float* error) const;
  // Returns how many blocks of `result` have an element that is not finite.
  uint64_t Add(const Stretch& stretch, const CodedSum& sum) const;
  // Decodes into all of these tensors, in their dtype. Returns how many blocks have an element that
  // is not finite.
  uint64_t Decode(const Stretch& stretch, const uint8_t* in, std::span<uint8_t* const> out) const;

 private:
  void LoadInput(const Stretch& stretch, float* out) const;
  uint64_t Encode(const Stretch& stretch, uint64_t seed, const float* in, uint8_t* out) const;
  uint64_t SeedOfInput(const Layout::Chunk& chunk) const;

  const AttemptSpec& spec_;
  const Inputs& inputs_;
  const BlockOptions options_;
};

}  // namespace longhaul::peerd
