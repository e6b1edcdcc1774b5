#include "peerd/state/memory_state.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/prng.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

Manifest Sample() {
  return {{"weights", 9, {3, 5}, 60, false},
          {"", 0, {}, 0, true},
          {"scale", kStateBool, {7}, 7, false}};
}

std::string Refusal(const std::vector<uint8_t>& bytes) {
  return std::string(ParseManifest(bytes).status().message());
}

TEST(MemoryStateTest, ChunksBeyond4GiBAreFoundByArithmetic) {
  const uint64_t bytes = (uint64_t{5} << 40) + 17;
  const uint64_t last = CountChunks(bytes) - 1;
  EXPECT_EQ(last, 5 * kMiB);
  EXPECT_EQ(ChunkOffset(last), bytes - 17);
  EXPECT_EQ(ChunkBytes(bytes, last), 17u);
  EXPECT_EQ(ChunkBytes(bytes, last - 1), kMiB);
  EXPECT_EQ(ChunkOffset(6000), 6000 * kMiB);
  EXPECT_GT(ChunkOffset(6000), uint64_t{1} << 32);
}

TEST(MemoryStateTest, ManifestRoundTrips) {
  EXPECT_EQ(*ParseManifest(EncodeManifest(Sample())), Sample());
  EXPECT_EQ(*ParseManifest(EncodeManifest({})), Manifest());
  Manifest large;
  for (int i = 0; i < LH_STATE_TENSORS_MAX; ++i) {
    large.push_back({std::string(LH_STATE_NAME_BYTES_MAX, 'n'), 1,
                     std::vector<uint64_t>(LH_STATE_DIMS_MAX, uint64_t{1} << 40), 1, false});
  }
  const auto bytes = EncodeManifest(large);
  EXPECT_EQ(bytes.size(), ManifestBytesMax());
  EXPECT_EQ(*ParseManifest(bytes), large);
}

TEST(MemoryStateTest, ManifestIsGolden) {
  const std::vector<uint8_t> bytes = EncodeManifest({{"ab", 9, {3}, 0x0c, true}});
  const std::vector<uint8_t> golden = {1, 0, 0, 0, 2, 0,    'a', 'b', 9, 1, 1, 3, 0, 0,
                                       0, 0, 0, 0, 0, 0x0c, 0,   0,   0, 0, 0, 0, 0};
  EXPECT_EQ(bytes, golden);
}

TEST(MemoryStateTest, ManifestIsBounded) {
  Manifest manifest = Sample();
  manifest[0].name.resize(LH_STATE_NAME_BYTES_MAX + 1);
  EXPECT_EQ(Refusal(EncodeManifest(manifest)),
            "tensor 0 of a manifest: bytes of the name is 257, not at most 256");
  manifest = Sample();
  manifest[2].dtype = kStateBool + 1;
  EXPECT_EQ(Refusal(EncodeManifest(manifest)),
            "tensor 2 of a manifest: dtype is 13, not at most 12");
  manifest = Sample();
  manifest[0].shape.resize(LH_STATE_DIMS_MAX + 1);
  EXPECT_NE(Refusal(EncodeManifest(manifest)), "");
  manifest = Sample();
  manifest[0].bytes = LH_STATE_BYTES_MAX - 7;
  EXPECT_EQ(Refusal(EncodeManifest(manifest)), "") << "as large as a state may be";
  ++manifest[0].bytes;
  EXPECT_EQ(Refusal(EncodeManifest(manifest)),
            "tensor 2 of a manifest: bytes is 7, not within 2^50 of all together");
  EXPECT_EQ(Refusal({255, 255, 255, 255}),
            "a manifest of 4 bytes says that it has 4294967295 tensors");
  std::vector<uint8_t> bytes = EncodeManifest(Sample());
  bytes.push_back(0);
  EXPECT_EQ(Refusal(bytes), "1 bytes follow a manifest of 3 tensors");
}

// A manifest with bytes cut off or changed is refused, or encoding it again gives the same bytes.
TEST(MemoryStateTest, AcceptedManifestsAreCanonical) {
  const std::vector<uint8_t> whole = EncodeManifest(Sample());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(Refusal({whole.begin(), whole.begin() + size}), "") << size;
  }
  Prng random(1);
  for (int i = 0; i < 20000; ++i) {
    std::vector<uint8_t> bytes = whole;
    bytes[random.Below(bytes.size())] = static_cast<uint8_t>(random.Next());
    if (const auto parsed = ParseManifest(bytes); parsed.ok()) {
      EXPECT_EQ(EncodeManifest(*parsed), bytes);
    }
  }
}

TEST(MemoryStateTest, DigestsRoundTripInOrderAndAddUpToTheRoot) {
  const Manifest manifest = {
      {"a", 9, {}, 2 * kMiB + 1, false}, {"b", 9, {}, 0, false}, {"c", 9, {}, 5, true}};
  ChunkDigests digests = {{{1, 2}, {3, 4}, {5, 6}}, {}, {{7, 8}}};
  EXPECT_EQ(CountChunks(manifest), 4u);
  const auto bytes = EncodeDigests(digests);
  ASSERT_EQ(bytes.size(), 4 * kDigestBytes);
  EXPECT_EQ(bytes[0], 1);
  EXPECT_EQ(bytes[8], 2);
  EXPECT_EQ(bytes[16], 3);
  EXPECT_EQ(ParseDigests(manifest, bytes), digests);
  const Hash128 root = RootOf(manifest, digests);
  digests[2][0] = {};
  EXPECT_EQ(RootOf(manifest, digests), root) << "a tensor that may be unequal is not compared";
  digests[0][1] = {};
  EXPECT_NE(RootOf(manifest, digests), root);
}

}  // namespace
}  // namespace longhaul::peerd
