// Feeds any bytes to the parser of manifests, which come from the peers that a state is fetched
// from, and to the parser of the digests that belong to a manifest.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_hash.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longhaul::peerd;
  const auto manifest = ParseManifest({data, size});
  if (!manifest.ok()) return 0;
  // An accepted manifest, encoded again, gives the same bytes.
  const std::vector<uint8_t> again = EncodeManifest(*manifest);
  LH_CHECK(std::equal(again.begin(), again.end(), data, data + size));
  LH_CHECK(again.size() <= ManifestBytesMax());
  const uint64_t chunks = CountChunks(*manifest);
  if (chunks > 4096) return 0;
  std::vector<uint8_t> digests(chunks * kDigestBytes);
  for (size_t i = 0; i < digests.size(); ++i) digests[i] = data[i % size];
  const ChunkDigests parsed = ParseDigests(*manifest, digests);
  LH_CHECK(EncodeDigests(parsed) == digests);
  (void)RootOf(*manifest, parsed);
  for (const StateTensor& tensor : *manifest) {
    const uint64_t count = (tensor.bytes + kStateChunkBytes - 1) / kStateChunkBytes;
    uint64_t bytes = 0;
    for (uint64_t chunk = 0; chunk < count; ++chunk) bytes += ChunkBytes(tensor.bytes, chunk);
    LH_CHECK(bytes == tensor.bytes);
  }
  return 0;
}
