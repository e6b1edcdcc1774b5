#include "peerd/collective/screen.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {
namespace {

// Elements that are looked at together. As float32 they take half of a first-level cache.
constexpr uint64_t kStep = 4096;

// The lanes make the order of the additions plain to the compiler, so that it can use vectors.
template <class T>
[[gnu::always_inline]] inline double SumOfSquares(const uint8_t* data, uint64_t count) {
  constexpr uint64_t kLanes = 16;
  double lanes[kLanes] = {};
  uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    T block[kLanes];
    std::memcpy(block, data + i * sizeof(T), sizeof(block));
    for (uint64_t lane = 0; lane < kLanes; ++lane) {
      const double value = block[lane];
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof(T));
    lanes[0] += static_cast<double>(value) * static_cast<double>(value);
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
struct Loops {
  using Function = double (*)(const uint8_t* data, uint64_t count);
  static double Generic(const uint8_t* data, uint64_t count) {
    return SumOfSquares<T>(data, count);
  }
#if defined(__x86_64__)
  __attribute__((target("avx2"))) static double Avx2(const uint8_t* data, uint64_t count) {
    return SumOfSquares<T>(data, count);
  }
#endif
  static Function Best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &Avx2;
#endif
    return &Generic;
  }
};

// One by one. Only for a step with a value that is not finite, or with squares that overflow.
template <class T>
void LookClosely(const uint8_t* data, uint64_t count, Tally* tally) {
  for (uint64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof(T));
    if (std::isnan(value)) {
      ++tally->nan;
    } else if (std::isinf(value)) {
      ++tally->inf;
    } else {
      ++tally->finite;
      tally->squares += static_cast<double>(value) * static_cast<double>(value);
    }
  }
}

template <class T>
void LookAtStep(const uint8_t* data, uint64_t count, Tally* tally) {
  static const auto kSum = Loops<T>::Best();
  const double squares = kSum(data, count);
  if (!std::isfinite(squares)) return LookClosely<T>(data, count, tally);
  tally->finite += count;
  tally->squares += squares;
}

}  // namespace

double Tally::Rms() const {
  return finite == 0 ? 0 : std::sqrt(squares / static_cast<double>(finite));
}

void Look(const uint8_t* data, uint64_t count, DType dtype, Tally* tally) {
  alignas(64) uint8_t single[kStep * sizeof(float)];
  for (uint64_t done = 0; done < count; done += kStep) {
    const uint64_t n = std::min(kStep, count - done);
    const uint8_t* const from = data + done * SizeOf(dtype);
    if (dtype == DType::kFloat32) {
      LookAtStep<float>(from, n, tally);
    } else if (dtype == DType::kFloat64) {
      LookAtStep<double>(from, n, tally);
    } else if (IsHalf(dtype)) {
      const Term half{from, /*wide=*/false, 1};
      Combine(single, /*out_wide=*/true, {&half, 1}, n, dtype, ReduceOp::kSum, /*divisor=*/0);
      LookAtStep<float>(single, n, tally);
    }
  }
}

bool MayScreen(const OpDesc& desc) { return desc.Sums(); }

std::vector<Suspicion> Judge(const Seen& seen, int self, double factor) {
  std::vector<double> norms;
  for (const Tally& tally : seen.positions) {
    if (tally.finite > 0) norms.push_back(tally.Rms());
  }
  double median = 0;
  if (norms.size() >= 3) {
    const auto middle = norms.begin() + static_cast<std::ptrdiff_t>((norms.size() - 1) / 2);
    std::nth_element(norms.begin(), middle, norms.end());
    median = *middle;
  }
  std::vector<Suspicion> found;
  for (int i = 0; i < static_cast<int>(seen.positions.size()); ++i) {
    const Tally& tally = seen.positions[i];
    Suspicion suspicion{.position = i};
    if (i != self) {
      suspicion.nan = tally.nan;
      suspicion.inf = tally.inf;
    }
    for (size_t k = 0; i == self && k < seen.locals.size(); ++k) {
      const Tally& local = seen.locals[k];
      if (local.nan + local.inf == 0) continue;
      suspicion.locals.push_back(static_cast<int>(k));
      suspicion.nan += local.nan;
      suspicion.inf += local.inf;
    }
    const bool large = median > 0 && std::isfinite(median) && tally.Rms() > factor * median;
    if (large) {
      suspicion.rms = tally.Rms();
      suspicion.median = median;
      suspicion.hosts = static_cast<uint32_t>(norms.size());
    }
    if (large || suspicion.nan + suspicion.inf > 0) found.push_back(std::move(suspicion));
  }
  return found;
}

std::string NormText(const Suspicion& suspicion) {
  if (suspicion.hosts == 0) return "";
  return absl::StrCat("rms=", suspicion.rms, " median=", suspicion.median,
                      " hosts=", suspicion.hosts);
}

}  // namespace longhaul::peerd
