#include "peerd/state/hash_pool.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <semaphore>
#include <string>
#include <vector>

#include "base/prng.h"
#include "gtest/gtest.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes Random(size_t bytes, uint64_t seed) {
  Prng prng(seed);
  Bytes data(bytes);
  for (size_t at = 0; at < bytes; at += 8) {
    const uint64_t word = prng.Next();
    std::memcpy(data.data() + at, &word, std::min<size_t>(8, bytes - at));
  }
  return data;
}

// A pool. The test's thread acts as the reactor.
struct Owner {
  explicit Owner(uint32_t threads) : pool(threads, [this] { woken.release(); }) {}
  // Waits until `condition` holds. Returns false if it did not hold within half a minute.
  template <class Condition>
  bool Until(const Condition& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    pool.Deliver();
    while (!condition()) {
      if (!woken.try_acquire_until(deadline)) return false;
      pool.Deliver();
    }
    return true;
  }

  std::counting_semaphore<> woken{0};
  HashPool pool;
};

HashPool::Digests Expected(const std::vector<Bytes>& tensors) {
  HashPool::Digests digests;
  for (const Bytes& tensor : tensors) {
    std::vector<Hash128>& chunks = digests.emplace_back();
    for (size_t at = 0; at < tensor.size(); at += kStateChunkBytes) {
      const size_t bytes = std::min<size_t>(kStateChunkBytes, tensor.size() - at);
      chunks.push_back(HashChunk({tensor.data() + at, bytes}));
    }
  }
  return digests;
}

std::vector<std::span<const uint8_t>> Spans(const std::vector<Bytes>& tensors) {
  return {tensors.begin(), tensors.end()};
}

TEST(HashPoolTest, DigestsAreThoseOfTheChunksForAnyNumberOfThreads) {
  std::vector<Bytes> tensors;
  const size_t mib = kStateChunkBytes;
  for (const size_t bytes : {size_t{0}, size_t{1}, mib - 1, mib, mib + 1, 5 * mib + 12345}) {
    tensors.push_back(Random(bytes, bytes + 1));
  }
  for (int i = 0; i < 3000; ++i) tensors.push_back(Random(static_cast<size_t>(i), 7));
  const HashPool::Digests expected = Expected(tensors);
  for (const uint32_t threads : {1u, 2u, 8u}) {
    Owner owner(threads);
    HashPool::Digests got;
    owner.pool.HashTensors(Spans(tensors), nullptr, [&](auto digests) { got = digests; });
    ASSERT_TRUE(owner.Until([&] { return !got.empty(); }));
    EXPECT_EQ(got, expected) << threads << " threads";
  }
}

TEST(HashPoolTest, AlignmentMakesNoDifference) {
  Owner owner(2);
  const Bytes data = Random(3 << 20, 3);
  Bytes shifted(data.size() + 64);
  const Hash128 expected = HashTensor(data.size(), Expected({data})[0]);
  for (size_t shift = 0; shift < 64; shift += 7) {
    std::copy(data.begin(), data.end(), shifted.begin() + static_cast<std::ptrdiff_t>(shift));
    HashPool::Digests got;
    owner.pool.HashTensors({std::span<const uint8_t>(shifted).subspan(shift, data.size())}, nullptr,
                           [&](auto digests) { got = digests; });
    ASSERT_TRUE(owner.Until([&] { return !got.empty(); }));
    EXPECT_EQ(HashTensor(data.size(), got[0]), expected) << "shifted by " << shift;
  }
}

TEST(HashPoolTest, EveryStateEndsOnce) {
  Owner owner(4);
  std::vector<Bytes> tensors;
  for (size_t i = 0; i < 20; ++i) tensors.push_back(Random(i % 5 << 20, 1));
  std::vector<int> ended(tensors.size());
  size_t sum = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    owner.pool.HashTensors({tensors[i]}, nullptr, [&, i](auto) {
      ++ended[i];
      ++sum;
    });
  }
  ASSERT_TRUE(owner.Until([&] { return sum >= tensors.size(); }));
  EXPECT_EQ(ended, std::vector<int>(tensors.size(), 1));
}

TEST(HashPoolTest, CallbacksRunInDeliverOnly) {
  const Bytes data = Random(100, 1);
  Owner owner(1);
  bool delivering = false;
  int ended = 0;
  const auto count = [&](auto&&) {
    EXPECT_TRUE(delivering);
    ++ended;
  };
  owner.pool.HashTensors({}, nullptr, count);
  owner.pool.HashTensors({data}, nullptr, count);
  owner.pool.Hash(reinterpret_cast<const std::byte*>(data.data()), data.size(), count);
  EXPECT_EQ(ended, 0);
  delivering = true;
  EXPECT_TRUE(owner.Until([&] { return ended == 3; }));
}

TEST(HashPoolTest, ACallbackMayStartAndCancelWork) {
  const Bytes data = Random(1000, 1);
  Owner owner(1);
  int ended = 0;
  owner.pool.HashTensors({data}, nullptr, [&](auto) {
    const auto id = owner.pool.HashTensors({data}, nullptr, [&](auto) { ended += 100; });
    owner.pool.Cancel(id);
    owner.pool.HashTensors({data}, nullptr, [&](auto) { ++ended; });
  });
  EXPECT_TRUE(owner.Until([&] { return ended > 0; }));
  EXPECT_EQ(ended, 1);
}

// A holder that stores the thread on which it is released.
std::shared_ptr<const void> Holder(std::thread::id* released) {
  return {static_cast<const void*>(nullptr),
          [released](const void*) { *released = std::this_thread::get_id(); }};
}

TEST(HashPoolTest, CancelledWorkIsDroppedAndItsHolderReleasedHere) {
  Owner owner(2);
  const Bytes data = Random(64 << 20, 1);
  for (int round = 0; round < 20; ++round) {
    std::thread::id released;
    const auto id = owner.pool.HashTensors({data}, Holder(&released), [&](auto) { FAIL(); });
    if (round % 2 == 1) std::this_thread::yield();
    owner.pool.Cancel(id);
    owner.pool.Cancel(id);
    EXPECT_TRUE(owner.Until([&] { return released == std::this_thread::get_id(); }));
  }
}

TEST(HashPoolTest, AHolderIsReleasedHereBeforeTheEndIsTold) {
  Owner owner(2);
  const Bytes data = Random(10 << 20, 1);
  std::thread::id released;
  bool ended = false;
  owner.pool.HashTensors({data}, Holder(&released), [&](auto) {
    EXPECT_EQ(released, std::this_thread::get_id());
    ended = true;
  });
  EXPECT_TRUE(owner.Until([&] { return ended; }));
}

TEST(HashPoolTest, AChunkDoesNotWaitForAState) {
  const Bytes data = Random(16 << 20, 1);
  const Bytes chunk = Random(kStateChunkBytes, 2);
  Owner owner(1);
  // So many bytes that hashing them would take far longer than the test.
  const std::vector<std::span<const uint8_t>> large(size_t{1} << 16, data);
  const auto state = owner.pool.HashTensors(large, nullptr, [](auto) { FAIL(); });
  bool ended = false;
  owner.pool.Hash(reinterpret_cast<const std::byte*>(chunk.data()), chunk.size(), [&](Hash128 got) {
    EXPECT_EQ(got, HashChunk(chunk));
    ended = true;
  });
  EXPECT_TRUE(owner.Until([&] { return ended; }));
  owner.pool.Cancel(state);
}

TEST(HashPoolTest, CopiesAreMadeAndHashed) {
  const Bytes data = Random(5 << 20, 4);
  for (const uint32_t threads : {1u, 4u}) {
    Owner owner(threads);
    Bytes copy(data.size() + 1);
    const size_t half = kStateChunkBytes / 2;
    std::vector<HashPool::Copy> chunks;
    for (size_t at = 0; at < data.size(); at += half) {
      chunks.push_back({std::span<const uint8_t>(data).subspan(at, half), copy.data() + 1 + at});
    }
    std::vector<Hash128> got;
    owner.pool.CopyChunks(chunks, nullptr, [&](auto digests) { got = std::move(digests); });
    ASSERT_TRUE(owner.Until([&] { return !got.empty(); }));
    EXPECT_TRUE(std::equal(data.begin(), data.end(), copy.begin() + 1));
    ASSERT_EQ(got.size(), chunks.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], HashChunk(chunks[i].from));
  }
}

TEST(HashPoolTest, NothingIsWrittenAfterACopyWasCancelled) {
  const Bytes data(32 << 20, 1);
  for (int round = 0; round < 20; ++round) {
    Owner owner(3);
    Bytes copy(data.size());
    std::vector<HashPool::Copy> chunks;
    for (size_t at = 0; at < data.size(); at += kStateChunkBytes) {
      chunks.push_back(
          {std::span<const uint8_t>(data).subspan(at, kStateChunkBytes), copy.data() + at});
    }
    const auto id = owner.pool.CopyChunks(chunks, nullptr, [](auto) { FAIL(); });
    for (int i = 0; i < round; ++i) std::this_thread::yield();
    owner.pool.Cancel(id);
    // If a thread still wrote, the thread sanitizer would find the race. The checks below would
    // find it most of the time.
    std::fill(copy.begin(), copy.end(), uint8_t{2});
    bool later = false;
    owner.pool.HashTensors({data}, nullptr, [&](auto) { later = true; });
    ASSERT_TRUE(owner.Until([&] { return later; }));
    EXPECT_EQ(std::count(copy.begin(), copy.end(), uint8_t{2}), data.size());
  }
}

TEST(HashPoolTest, WithoutThreadsTheOwnerWorksOnOneChunkAtATime) {
  int woken = 0;
  HashPool pool(0, [&] { ++woken; });
  const std::vector<Bytes> tensors = {Random(kStateChunkBytes + 1, 5), Random(100, 6)};
  HashPool::Digests got;
  pool.HashTensors(Spans(tensors), nullptr, [&](auto digests) { got = digests; });
  const HashPool::JobId cancelled = pool.HashTensors({tensors[1]}, nullptr, [](auto) { FAIL(); });
  Hash128 alone;
  pool.Hash(reinterpret_cast<const std::byte*>(tensors[1].data()), 100,
            [&](Hash128 digest) { alone = digest; });
  EXPECT_EQ(woken, 0);
  EXPECT_TRUE(pool.WorkHere());  // the single chunk goes first
  EXPECT_EQ(woken, 1);
  pool.Deliver();
  EXPECT_EQ(alone, Expected(tensors)[1][0]);
  for (int i = 0; i < 3; ++i) {
    pool.Deliver();
    EXPECT_TRUE(got.empty());
    EXPECT_TRUE(pool.WorkHere());
  }
  pool.Cancel(cancelled);
  EXPECT_FALSE(pool.WorkHere());
  EXPECT_EQ(woken, 2);
  pool.Deliver();
  EXPECT_EQ(got, Expected(tensors));
  EXPECT_TRUE(pool.idle());
}

TEST(HashPoolTest, EndsInTheMiddleOfItsWork) {
  const Bytes data = Random(32 << 20, 1);
  Owner owner(2);
  for (int i = 0; i < 8; ++i) owner.pool.HashTensors({data}, nullptr, [](auto) { FAIL(); });
}

TEST(HashPoolTest, TheNumberOfThreadsFitsTheMachine) {
  EXPECT_GE(DefaultHashThreads(), 1u);
  EXPECT_LE(DefaultHashThreads(), 8u);
}

TEST(HashPoolTest, MemoryThatIsTouchedKeepsItsBytes) {
  Owner owner(2);
  const Bytes before = Random(kStateChunkBytes, 5);
  Bytes memory = before;
  bool touched = false;
  owner.pool.Touch(memory, [&] { touched = true; });
  EXPECT_FALSE(owner.pool.idle());
  ASSERT_TRUE(owner.Until([&] { return touched; }));
  EXPECT_TRUE(owner.pool.idle());
  EXPECT_EQ(memory, before);
}

}  // namespace
}  // namespace longhaul::peerd
