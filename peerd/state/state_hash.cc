#include "peerd/state/state_hash.h"

// XXH3 is compiled into this file, so its instruction set is chosen at build time. The value is the
// same with every instruction set.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include "base/check.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {
namespace {

// Feeds values to XXH3 in a fixed byte order, and strings with their length.
class Stream {
 public:
  Stream() { XXH3_128bits_reset(&state_); }
  Stream& Add(uint64_t value) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
    XXH3_128bits_update(&state_, bytes, sizeof bytes);
    return *this;
  }
  Stream& Add(const Hash128& hash) { return Add(hash.high).Add(hash.low); }
  Stream& Add(const std::string& text) {
    Add(text.size());
    XXH3_128bits_update(&state_, text.data(), text.size());
    return *this;
  }
  Hash128 End() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.high64, hash.low64};
  }

 private:
  XXH3_state_t state_;
};

const char* DTypeName(uint8_t dtype) {
  if (dtype == kStateBool) return "bool";
  return dtype < LH_WIRE_DTYPE_COUNT ? Name(static_cast<DType>(dtype)) : "unknown";
}

std::string ShapeText(const StateTensor& tensor) {
  std::string text = "[";
  for (const uint64_t size : tensor.shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::string Quoted(const std::string& name) { return "\"" + name + "\""; }

}  // namespace

Hash128 HashChunk(std::span<const uint8_t> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

Hash128 HashTensor(uint64_t bytes, std::span<const Hash128> chunks) {
  LH_CHECK(chunks.size() == CountChunks(bytes));
  Stream stream;
  stream.Add(bytes);
  for (const Hash128& chunk : chunks) stream.Add(chunk);
  return stream.End();
}

Hash128 HashManifest(const Manifest& manifest) {
  Stream stream;
  stream.Add(manifest.size());
  for (const StateTensor& tensor : manifest) {
    stream.Add(tensor.name).Add(tensor.dtype).Add(tensor.shape.size());
    for (const uint64_t size : tensor.shape) stream.Add(size);
    stream.Add(tensor.bytes).Add(uint64_t{tensor.allow_unequal});
  }
  return stream.End();
}

Hash128 HashState(const Manifest& manifest, std::span<const Hash128> tensors) {
  LH_CHECK(manifest.size() == tensors.size());
  Stream stream;
  stream.Add(HashManifest(manifest));
  for (size_t i = 0; i < manifest.size(); ++i) {
    if (!manifest[i].allow_unequal) stream.Add(tensors[i]);
  }
  return stream.End();
}

std::string FirstDifference(const Manifest& ours, const Manifest& theirs) {
  const size_t common = std::min(ours.size(), theirs.size());
  for (size_t i = 0; i < common; ++i) {
    const StateTensor& a = ours[i];
    const StateTensor& b = theirs[i];
    const std::string where = "tensor " + std::to_string(i);
    if (a.name != b.name) {
      return where + " is " + Quoted(a.name) + " here and " + Quoted(b.name) + " there";
    }
    const std::string what = where + " " + Quoted(a.name);
    if (a.dtype != b.dtype) {
      return what + " is of " + DTypeName(a.dtype) + " here and " + DTypeName(b.dtype) + " there";
    }
    if (a.shape != b.shape) {
      return what + " has shape " + ShapeText(a) + " here and " + ShapeText(b) + " there";
    }
    if (a.bytes != b.bytes) {
      return what + " has " + std::to_string(a.bytes) + " bytes here and " +
             std::to_string(b.bytes) + " there";
    }
    if (a.allow_unequal != b.allow_unequal) {
      return what + (a.allow_unequal ? " may differ here and not there"
                                     : " may differ there and not here");
    }
  }
  if (ours.size() > common) {
    return "tensor " + std::to_string(common) + " " + Quoted(ours[common].name) +
           " is declared here only";
  }
  if (theirs.size() > common) {
    return "tensor " + std::to_string(common) + " " + Quoted(theirs[common].name) +
           " is declared there only";
  }
  return "";
}

}  // namespace longhaul::peerd
