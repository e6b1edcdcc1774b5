// Compares the speed of hashing a state with that of reading memory, in one run.
//
//   bazel run --config=opt //bench:hash_bench [-- GIB]
//
// A row is for one number of threads. It has the GB/s of a loop that only reads, the GB/s of the
// pool with which peerd hashes states for a sync, and the ratio. Reading and hashing take turns, so
// that drift of the machine affects both alike. The state is far larger than every cache: half a
// GiB, or as many GiB as the argument says.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <semaphore>
#include <span>
#include <thread>
#include <vector>

#include "peerd/state/hash_pool.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {
namespace {

constexpr int kRounds = 9;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds up all words in several sums that do not depend on each other, so that the compiler can use
// vector instructions.
uint64_t Read(std::span<const uint64_t> words) {
  uint64_t sums[32] = {};
  for (size_t i = 0; i + 32 <= words.size(); i += 32) {
    for (size_t k = 0; k < 32; ++k) sums[k] += words[i + k];
  }
  uint64_t sum = 0;
  for (const uint64_t each : sums) sum += each;
  return sum;
}

// The threads take chunks in turns, as the threads of the pool do.
double ReadSeconds(std::span<const uint64_t> words, size_t threads) {
  constexpr size_t kWords = kStateChunkBytes / sizeof(uint64_t);
  std::vector<uint64_t> sums(threads);
  std::vector<std::thread> readers;
  const double begin = Seconds();
  for (size_t t = 0; t < threads; ++t) {
    readers.emplace_back([&, t] {
      uint64_t sum = 0;
      for (size_t at = t * kWords; at < words.size(); at += threads * kWords) {
        sum += Read(words.subspan(at, std::min(kWords, words.size() - at)));
      }
      sums[t] = sum;
    });
  }
  for (std::thread& reader : readers) reader.join();
  const double seconds = Seconds() - begin;
  uint64_t all = 0;
  for (const uint64_t sum : sums) all += sum;
  if (all == 42) std::puts("");  // so that the compiler cannot drop the sums
  return seconds;
}

double HashSeconds(std::span<const uint64_t> words, HashPool* pool, std::binary_semaphore* woken) {
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(words.data()),
                                       words.size_bytes());
  bool ended = false;
  const double begin = Seconds();
  pool->HashTensors({bytes}, nullptr, [&](const HashPool::Digests&) { ended = true; });
  while (!ended) {
    woken->acquire();
    pool->Deliver();
  }
  return Seconds() - begin;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + kRounds / 2, values.end());
  return values[kRounds / 2];
}

void Run(size_t bytes) {
  std::vector<uint64_t> words(bytes / sizeof(uint64_t));
  for (size_t i = 0; i < words.size(); ++i) words[i] = i * 0x9e3779b97f4a7c15u;
  std::printf("%-8s %10s %10s %6s\n", "threads", "read GB/s", "hash GB/s", "ratio");
  for (const uint32_t threads : {1u, 2u}) {
    std::binary_semaphore woken(0);
    HashPool pool(threads, [&] { woken.release(); });
    std::vector<double> read;
    std::vector<double> hash;
    for (int round = -1; round < kRounds; ++round) {
      const double r = ReadSeconds(words, threads);
      const double h = HashSeconds(words, &pool, &woken);
      if (round < 0) continue;  // a warm-up round
      read.push_back(static_cast<double>(words.size() * sizeof(uint64_t)) / r / 1e9);
      hash.push_back(static_cast<double>(words.size() * sizeof(uint64_t)) / h / 1e9);
    }
    std::printf("%-8u %10.2f %10.2f %6.2f\n", threads, Median(read), Median(hash),
                Median(hash) / Median(read));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace longhaul::peerd

int main(int argc, char** argv) {
  const double gib = argc > 1 ? std::atof(argv[1]) : 0.5;
  if (gib < 0.01 || gib > 64) {
    std::fprintf(stderr, "give GiB from 0.01 to 64\n");
    return 2;
  }
  longhaul::peerd::Run(static_cast<size_t>(gib * (1 << 30)));
  return 0;
}
