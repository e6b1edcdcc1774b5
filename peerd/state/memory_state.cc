#include "peerd/state/memory_state.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bytes.h"
#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kTensorBytesMin = 2 + 3 + 8;

absl::Status Refuse(size_t tensor, const char* what, uint64_t value, const char* wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", tensor, " of a manifest: ", what, " is ", value, ", not ", wanted));
}

}  // namespace

void MemoryState::FetchInto(std::vector<uint8_t*> where) {
  LH_CHECK(where.size() == places.size() && digests.size() == places.size());
  inbox = std::move(where);
  fetched.clear();
  for (const std::vector<Hash128>& tensor : digests) fetched.emplace_back(tensor.size());
}

bool MemoryState::InInbox(size_t tensor, uint64_t chunk) const {
  if (inbox.empty()) return false;
  const Hash128& digest = fetched[tensor][chunk];
  return digest != Hash128{} && digest == digests[tensor][chunk];
}

const uint8_t* MemoryState::Chunk(size_t tensor, uint64_t chunk) const {
  return (InInbox(tensor, chunk) ? inbox : places)[tensor] + ChunkOffset(chunk);
}

uint8_t* MemoryState::BeginFetch(size_t tensor, uint64_t chunk) {
  fetched[tensor][chunk] = {};
  digests[tensor][chunk] = {};
  return inbox[tensor] + ChunkOffset(chunk);
}

void MemoryState::Fetched(size_t tensor, uint64_t chunk, const Hash128& digest) {
  fetched[tensor][chunk] = digest;
  digests[tensor][chunk] = digest;
}

bool MemoryState::Has(size_t tensor, uint64_t chunk, const Hash128& digest) {
  if (digests[tensor][chunk] == digest) return true;
  if (fetched[tensor][chunk] != digest) return false;
  digests[tensor][chunk] = digest;
  return true;
}

uint32_t ChunkBytes(uint64_t tensor_bytes, uint64_t chunk) {
  LH_CHECK(chunk < CountChunks(tensor_bytes));
  return static_cast<uint32_t>(std::min(kStateChunkBytes, tensor_bytes - ChunkOffset(chunk)));
}

uint64_t CountChunks(const Manifest& manifest) {
  uint64_t chunks = 0;
  for (const StateTensor& tensor : manifest) chunks += CountChunks(tensor.bytes);
  return chunks;
}

Hash128 RootOf(const Manifest& manifest, const ChunkDigests& digests) {
  std::vector<Hash128> tensors;
  tensors.reserve(manifest.size());
  for (size_t i = 0; i < manifest.size(); ++i) {
    tensors.push_back(HashTensor(manifest[i].bytes, digests[i]));
  }
  return HashState(manifest, tensors);
}

std::vector<uint8_t> EncodeDigests(const ChunkDigests& digests) {
  size_t count = 0;
  for (const auto& tensor : digests) count += tensor.size();
  std::vector<uint8_t> bytes(count * kDigestBytes);
  ByteWriter writer(bytes);
  for (const auto& tensor : digests) {
    for (const Hash128& digest : tensor) {
      writer.U64(digest.high);
      writer.U64(digest.low);
    }
  }
  return bytes;
}

ChunkDigests ParseDigests(const Manifest& manifest, std::span<const uint8_t> bytes) {
  LH_CHECK(bytes.size() == CountChunks(manifest) * kDigestBytes);
  ByteReader reader(bytes);
  ChunkDigests digests;
  digests.reserve(manifest.size());
  for (const StateTensor& tensor : manifest) {
    std::vector<Hash128>& chunks = digests.emplace_back(CountChunks(tensor.bytes));
    for (Hash128& digest : chunks) {
      digest.high = reader.U64();
      digest.low = reader.U64();
    }
  }
  return digests;
}

std::vector<uint8_t> EncodeManifest(const Manifest& manifest) {
  size_t size = 4;
  for (const StateTensor& tensor : manifest) {
    size += kTensorBytesMin + tensor.name.size() + 8 * tensor.shape.size();
  }
  std::vector<uint8_t> bytes(size);
  ByteWriter writer(bytes);
  writer.U32(static_cast<uint32_t>(manifest.size()));
  for (const StateTensor& tensor : manifest) {
    writer.U16(static_cast<uint16_t>(tensor.name.size()));
    for (const char c : tensor.name) writer.U8(static_cast<uint8_t>(c));
    writer.U8(tensor.dtype);
    writer.U8(tensor.allow_unequal ? 1 : 0);
    writer.U8(static_cast<uint8_t>(tensor.shape.size()));
    for (const uint64_t dimension : tensor.shape) writer.U64(dimension);
    writer.U64(tensor.bytes);
  }
  return bytes;
}

absl::StatusOr<Manifest> ParseManifest(std::span<const uint8_t> bytes) {
  ByteReader reader(bytes);
  const uint32_t count = reader.U32();
  if (!reader.ok() || count > LH_STATE_TENSORS_MAX ||
      uint64_t{count} * kTensorBytesMin > reader.remaining()) {
    return absl::InvalidArgumentError(absl::StrCat("a manifest of ", bytes.size(),
                                                   " bytes says that it has ", count, " tensors"));
  }
  Manifest manifest(count);
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    StateTensor& tensor = manifest[i];
    const uint16_t name_bytes = reader.U16();
    if (name_bytes > LH_STATE_NAME_BYTES_MAX) {
      return Refuse(i, "bytes of the name", name_bytes, "at most 256");
    }
    const auto name = reader.Bytes(name_bytes);
    tensor.name.assign(name.begin(), name.end());
    tensor.dtype = reader.U8();
    const uint8_t flags = reader.U8();
    const uint8_t dims = reader.U8();
    if (tensor.dtype > kStateBool) return Refuse(i, "dtype", tensor.dtype, "at most 12");
    if (flags > 1) return Refuse(i, "flags", flags, "0 or 1");
    if (dims > LH_STATE_DIMS_MAX) return Refuse(i, "number of dimensions", dims, "at most 8");
    tensor.allow_unequal = flags != 0;
    for (int d = 0; d < dims; ++d) tensor.shape.push_back(reader.U64());
    tensor.bytes = reader.U64();
    if (!reader.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a manifest of ", bytes.size(), " bytes ends in tensor ", i, " of ", count));
    }
    if (tensor.bytes > LH_STATE_BYTES_MAX - total) {
      return Refuse(i, "bytes", tensor.bytes, "within 2^50 of all together");
    }
    total += tensor.bytes;
  }
  if (reader.remaining() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(reader.remaining(), " bytes follow a manifest of ", count, " tensors"));
  }
  return manifest;
}

uint64_t ManifestBytesMax() {
  return 4 + LH_STATE_TENSORS_MAX *
                 (kTensorBytesMin + LH_STATE_NAME_BYTES_MAX + 8 * uint64_t{LH_STATE_DIMS_MAX});
}

}  // namespace longhaul::peerd
