#include "peerd/state/state_hash.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

std::vector<uint8_t> Bytes(size_t count, uint8_t seed = 1) {
  std::vector<uint8_t> bytes(count);
  uint32_t x = seed;
  for (uint8_t& byte : bytes) {
    x = x * 1664525 + 1013904223;
    byte = static_cast<uint8_t>(x >> 24);
  }
  return bytes;
}

Manifest TwoTensors() { return {{"w", 10, {2, 3}, 24, false}, {"m", 11, {4}, 32, true}}; }

// The expected values are those of the reference implementation, so every machine computes them.
TEST(StateHash, IsXxh3) {
  EXPECT_EQ(ToString(HashChunk({})), "99aa06d3014798d86001c324468d497f");
  const uint8_t a = 'a';
  EXPECT_EQ(ToString(HashChunk({&a, 1})), "a96faf705af16834e6c632b61e964e1f");
}

TEST(StateHash, DoesNotDependOnAlignment) {
  const std::vector<uint8_t> bytes = Bytes(100003);
  const Hash128 hash = HashChunk(bytes);
  std::vector<uint8_t> moved(bytes.size() + 64);
  for (size_t shift = 1; shift < 64; ++shift) {
    memcpy(moved.data() + shift, bytes.data(), bytes.size());
    EXPECT_EQ(HashChunk({moved.data() + shift, bytes.size()}), hash) << shift;
  }
}

TEST(StateHash, EachBitCounts) {
  std::vector<uint8_t> bytes = Bytes(1000);
  const Hash128 hash = HashChunk(bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= static_cast<uint8_t>(1 << bit);
      EXPECT_NE(HashChunk(bytes), hash) << i;
      bytes[i] ^= static_cast<uint8_t>(1 << bit);
    }
  }
}

TEST(StateHash, ChunksCoverTheTensor) {
  EXPECT_EQ(CountChunks(0), 0U);
  EXPECT_EQ(CountChunks(1), 1U);
  EXPECT_EQ(CountChunks(kStateChunkBytes), 1U);
  EXPECT_EQ(CountChunks(kStateChunkBytes + 1), 2U);
  EXPECT_EQ(CountChunks(uint64_t{5} << 30), uint64_t{5} << 10);
  EXPECT_EQ(CountChunks(UINT64_MAX), (UINT64_MAX >> 20) + 1);
}

TEST(StateHash, LengthAndOrderOfChunksCount) {
  const Hash128 a{1, 2};
  const Hash128 b{3, 4};
  const uint64_t bytes = 2 * kStateChunkBytes;
  const Hash128 hash = HashTensor(bytes, std::vector{a, b});
  EXPECT_NE(HashTensor(bytes, std::vector{b, a}), hash);
  EXPECT_NE(HashTensor(bytes - 1, std::vector{a, b}), hash);
}

TEST(StateHash, WhateverTheManifestSaysCounts) {
  const Manifest manifest = TwoTensors();
  const Hash128 hash = HashManifest(manifest);
  const auto changed = [&](auto change) {
    Manifest other = manifest;
    change(&other);
    return HashManifest(other);
  };
  EXPECT_EQ(changed([](Manifest*) {}), hash);
  EXPECT_NE(changed([](Manifest* m) { (*m)[0].name = "v"; }), hash);
  EXPECT_NE(changed([](Manifest* m) { (*m)[0].dtype = 5; }), hash);
  EXPECT_NE(changed([](Manifest* m) { (*m)[0].shape = {3, 2}; }), hash);
  EXPECT_NE(changed([](Manifest* m) { (*m)[0].bytes = 25; }), hash);
  EXPECT_NE(changed([](Manifest* m) { (*m)[0].allow_unequal = true; }), hash);
  EXPECT_NE(changed([](Manifest* m) { std::swap((*m)[0], (*m)[1]); }), hash);
  EXPECT_NE(changed([](Manifest* m) { m->pop_back(); }), hash);
}

TEST(StateHash, NamesCannotRunIntoEachOther) {
  EXPECT_NE(HashManifest({{"ab", 0, {}, 0, false}, {"c", 0, {}, 0, false}}),
            HashManifest({{"a", 0, {}, 0, false}, {"bc", 0, {}, 0, false}}));
}

TEST(StateHash, TensorsThatMayDifferAreNotCompared) {
  const Manifest manifest = TwoTensors();
  const Hash128 hash = HashState(manifest, std::vector<Hash128>{{1, 1}, {2, 2}});
  EXPECT_EQ(HashState(manifest, std::vector<Hash128>{{1, 1}, {9, 9}}), hash);
  EXPECT_NE(HashState(manifest, std::vector<Hash128>{{9, 9}, {2, 2}}), hash);
}

TEST(FirstDifference, NamesBothSides) {
  const Manifest ours = TwoTensors();
  const auto differs = [&](auto change) {
    Manifest theirs = ours;
    change(&theirs);
    return FirstDifference(ours, theirs);
  };
  EXPECT_EQ(differs([](Manifest*) {}), "");
  EXPECT_EQ(differs([](Manifest* m) { (*m)[1].name = "v"; }),
            "tensor 1 is \"m\" here and \"v\" there");
  EXPECT_EQ(differs([](Manifest* m) { (*m)[0].dtype = 12; }),
            "tensor 0 \"w\" is of float32 here and bool there");
  EXPECT_EQ(differs([](Manifest* m) { (*m)[0].shape = {6}; }),
            "tensor 0 \"w\" has shape [2, 3] here and [6] there");
  EXPECT_EQ(differs([](Manifest* m) { (*m)[1].allow_unequal = false; }),
            "tensor 1 \"m\" may differ here and not there");
  EXPECT_EQ(differs([](Manifest* m) { m->pop_back(); }), "tensor 1 \"m\" is declared here only");
  EXPECT_EQ(differs([](Manifest* m) {
              m->push_back({"x", 0, {}, 0, false});
            }),
            "tensor 2 \"x\" is declared there only");
}

}  // namespace
}  // namespace longhaul::peerd
