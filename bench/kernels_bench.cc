// Compares the speed of the reduction kernels with that of memcpy, in one run.
//
//   bazel run --config=opt //bench:kernels_bench
//
// A row is for one op and one dtype on one instruction set. It has the bytes of tensor reduced per
// second, and the ratio to memcpy of as many bytes, both for a range that fits into the cache and
// for one that does not. A reduction reads two streams and writes one; a copy reads one and writes
// one. So at a ratio of 0.67 both cause the same memory traffic.
//
// Rows such as "sum4" are calls of Combine() with as many terms, in place of the first: "by pairs"
// adds the same terms two at a time, "weights" multiplies each, "avg" divides. "sum2 wide" adds a
// term of float32 to one of the dtype, and "to wide" does so in place of the term of float32; their
// bytes are those in float32.
//
// Rows of "int8" and "int4" encode and decode blocks of 128 float32; "sr" is stochastic rounding.
// The bytes are those of the float32.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "peerd/collective/block_codec.h"
#include "peerd/collective/kernels.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {
namespace {

constexpr size_t kCacheBytes = 64 << 10;
constexpr size_t kMemoryBytes = 64 << 20;
constexpr int kRounds = 7;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// GB/s as the median over rounds of some milliseconds.
double Measure(size_t bytes, const std::function<void()>& work) {
  const int repeats = static_cast<int>(std::max<size_t>(1, (32 << 20) / bytes));
  work();
  std::vector<double> rates;
  for (int round = 0; round < kRounds; ++round) {
    const double begin = Seconds();
    for (int i = 0; i < repeats; ++i) work();
    rates.push_back(static_cast<double>(bytes) * repeats / (Seconds() - begin) / 1e9);
  }
  std::nth_element(rates.begin(), rates.begin() + kRounds / 2, rates.end());
  return rates[kRounds / 2];
}

// Fills with ones: their sums and products stay ordinary numbers as long as the benchmark runs.
void Fill(std::vector<uint8_t>* data, DType dtype) {
  const size_t width = SizeOf(dtype);
  uint64_t one = 1;
  if (dtype == DType::kFloat16) one = 0x3c00;
  if (dtype == DType::kBfloat16) one = 0x3f80;
  if (dtype == DType::kFloat32) one = 0x3f800000;
  if (dtype == DType::kFloat64) one = 0x3ff0000000000000;
  for (size_t i = 0; i < data->size(); i += width) std::memcpy(data->data() + i, &one, width);
}

// The speed of memcpy in GB/s, in the cache and beyond it.
struct CopySpeed {
  double cache = 0;
  double memory = 0;
};

// Measures `work` on so many bytes, in the cache and beyond it, and prints a row.
void Row(const char* isa, const char* dtype, const char* op, const CopySpeed& copy,
         const std::function<void(size_t)>& work) {
  const double cache = Measure(kCacheBytes, [&] { work(kCacheBytes); });
  const double memory = Measure(kMemoryBytes, [&] { work(kMemoryBytes); });
  std::printf("%-8s %-9s %-13s  %8.1f %6.2f  %8.1f %6.2f\n", isa, dtype, op, cache,
              cache / copy.cache, memory, memory / copy.memory);
  std::fflush(stdout);
}

// out = out op in
void Reduce(const Kernels& kernels, uint8_t* out, const uint8_t* in, uint64_t count, DType dtype,
            ReduceOp op) {
  const Term terms[] = {{.data = out}, {.data = in}};
  kernels.combine(out, false, std::span<const Term>(terms), count, dtype, op, 0);
}

void RunCodecs(const CopySpeed& copy) {
  std::vector<float> values(kMemoryBytes / sizeof(float));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) - 125;
  std::vector<float> out(values.size());
  std::vector<uint8_t> encoded(kMemoryBytes);
  for (const BlockFormat format : {BlockFormat::kInt8, BlockFormat::kInt4}) {
    const char* const name = format == BlockFormat::kInt8 ? "int8" : "int4";
    const BlockOptions nearest{.format = format};
    const BlockOptions stochastic{.format = format, .stochastic = true};
    const auto rows = [&](const char* op,
                          const std::function<void(const BlockKernels&, uint64_t)>& work) {
      for (const BlockKernels& kernels : SupportedBlockKernels()) {
        Row(kernels.name, name, op, copy,
            [&](size_t bytes) { work(kernels, bytes / sizeof(float)); });
      }
    };
    rows("encode", [&](const BlockKernels& kernels, uint64_t count) {
      kernels.encode(nearest, 1, 0, values.data(), count, encoded.data());
    });
    rows("encode sr", [&](const BlockKernels& kernels, uint64_t count) {
      kernels.encode(stochastic, 1, 0, values.data(), count, encoded.data());
    });
    Encode(nearest, 1, 0, values.data(), values.size(), encoded.data());
    rows("decode", [&](const BlockKernels& kernels, uint64_t count) {
      kernels.decode(nearest, encoded.data(), count, out.data());
    });
    rows("decode+add", [&](const BlockKernels& kernels, uint64_t count) {
      kernels.decode_add(nearest, encoded.data(), count, out.data());
    });
  }
}

void Run() {
  std::vector<uint8_t> a(kMemoryBytes);
  std::vector<uint8_t> b(kMemoryBytes);
  std::vector<uint8_t> out(kMemoryBytes, 1);
  std::vector<std::vector<uint8_t>> others(7, std::vector<uint8_t>(kMemoryBytes));
  const auto copy = [&](size_t bytes) {
    return Measure(bytes, [&] { std::memcpy(out.data(), a.data(), bytes); });
  };
  std::fill(a.begin(), a.end(), uint8_t{1});
  const CopySpeed speed{.cache = copy(kCacheBytes), .memory = copy(kMemoryBytes)};
  std::printf("%-8s %-9s %-13s  %8s %6s  %8s %6s\n", "isa", "dtype", "op", "cache", "ratio",
              "memory", "ratio");
  std::printf("%-8s %-9s %-13s  %8.1f %6.2f  %8.1f %6.2f\n", "", "memcpy", "", speed.cache, 1.0,
              speed.memory, 1.0);
  for (int d = 0; d < LH_WIRE_DTYPE_COUNT; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (IsFloat8(dtype)) continue;  // never reduced
    Fill(&b, dtype);
    // All instruction sets do the same work in turns, so that other work of the machine affects
    // all.
    const auto rows = [&](const char* op, const std::function<void(const Kernels&, size_t)>& work) {
      for (const Kernels& kernels : SupportedKernels()) {
        Fill(&a, dtype);
        Row(kernels.name, Name(dtype), op, speed,
            [&](size_t bytes) { work(kernels, bytes / SizeOf(dtype)); });
      }
    };
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin}) {
      if (dtype == DType::kBool && op == ReduceOp::kProd) continue;
      rows(Name(op), [&](const Kernels& kernels, size_t count) {
        Reduce(kernels, a.data(), b.data(), count, dtype, op);
      });
    }
    if (dtype == DType::kBool) continue;
    rows("divide", [&](const Kernels& kernels, size_t count) {
      const Term term = {.data = a.data()};
      kernels.combine(a.data(), false, {&term, 1}, count, dtype, ReduceOp::kAvg, 3);
    });
    if (!IsHalf(dtype) && dtype != DType::kFloat32) continue;
    const auto terms = [&](size_t n, double weight) {
      std::vector<Term> terms = {{.data = a.data(), .weight = weight}};
      for (size_t i = 1; i < n; ++i) {
        Fill(&others[i - 1], dtype);
        terms.push_back({.data = others[i - 1].data(), .weight = weight});
      }
      return terms;
    };
    const auto combine = [&](const char* name, const std::vector<Term>& terms, ReduceOp op,
                             double divisor) {
      rows(name, [&](const Kernels& kernels, size_t count) {
        kernels.combine(a.data(), false, terms, count, dtype, op, divisor);
      });
    };
    combine("sum2", terms(2, 1), ReduceOp::kSum, 0);
    combine("sum2 weights", terms(2, 0.5), ReduceOp::kSum, 0);
    combine("avg2", terms(2, 1), ReduceOp::kAvg, 2);
    const std::vector<Term> four = terms(4, 1);
    rows("sum4 by pairs", [&](const Kernels& kernels, size_t count) {
      const size_t block = (32 << 10) / SizeOf(dtype);
      for (size_t done = 0; done < count; done += block) {
        const size_t at = done * SizeOf(dtype);
        for (size_t i = 1; i < four.size(); ++i) {
          Reduce(kernels, a.data() + at, four[i].data + at, std::min(block, count - done), dtype,
                 ReduceOp::kSum);
        }
      }
    });
    combine("sum4", four, ReduceOp::kSum, 0);
    combine("sum8", terms(8, 1), ReduceOp::kSum, 0);
    if (!IsHalf(dtype)) continue;
    Fill(&others[0], DType::kFloat32);
    const Term narrow = {.data = a.data()};
    const Term wide = {.data = others[0].data(), .wide = true};
    rows("sum2 wide", [&](const Kernels& kernels, size_t count) {
      kernels.combine(a.data(), false, std::vector<Term>{wide, narrow}, count / 2, dtype,
                      ReduceOp::kSum, 0);
    });
    rows("to wide", [&](const Kernels& kernels, size_t count) {
      kernels.combine(others[0].data(), true, std::vector<Term>{wide, narrow}, count / 2, dtype,
                      ReduceOp::kSum, 0);
    });
  }
  RunCodecs(speed);
}

}  // namespace
}  // namespace longhaul::peerd

int main() {
  longhaul::peerd::Run();
  return 0;
}
