// Decodes garbage, and encodes any floats. All kernels must give the same bits and stay within
// their ranges (AddressSanitizer sees a step beyond). What is encoded must decode to numbers near
// the input.
//
// The first 12 bytes of an input: format and rounding, block, count (2), seed (8). The others are
// what is decoded, and, as floats, what is encoded.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/check.h"
#include "peerd/collective/block_codec.h"

namespace longhaul::peerd {
namespace {

constexpr size_t kHeaderBytes = 12;
constexpr uint64_t kCountMax = 10000;

// Memory of exactly this size, where AddressSanitizer watches both ends.
template <class T>
class Exactly {
 public:
  explicit Exactly(uint64_t count) : data_(new T[count]()), count_(count) {}
  Exactly(const T* from, uint64_t count) : Exactly(count) { std::copy_n(from, count, data()); }
  T* data() { return data_.get(); }
  T operator[](uint64_t i) const { return data_[i]; }
  bool SameBits(const Exactly& other) const {
    return std::memcmp(data_.get(), other.data_.get(), count_ * sizeof(T)) == 0;
  }

 private:
  std::unique_ptr<T[]> data_;
  const uint64_t count_;
};

// Reads bytes, and zeros behind their end.
Exactly<uint8_t> Padded(std::span<const uint8_t> bytes, uint64_t count) {
  Exactly<uint8_t> padded(count);
  std::copy_n(bytes.begin(), std::min<uint64_t>(bytes.size(), count), padded.data());
  return padded;
}

Exactly<float> FloatsOf(std::span<const uint8_t> bytes, uint64_t count) {
  Exactly<uint8_t> padded = Padded(bytes, count * sizeof(float));
  Exactly<float> floats(count);
  if (count > 0) std::memcpy(floats.data(), padded.data(), count * sizeof(float));
  return floats;
}

void TryDecode(const BlockOptions& options, std::span<const uint8_t> bytes, uint64_t count) {
  Exactly<uint8_t> in = Padded(bytes, EncodedBytes(options, count));
  Exactly<float> expected(count);
  Exactly<float> sum = FloatsOf(bytes, count);
  Exactly<float> expected_sum(sum.data(), count);
  const BlockKernels& first = SupportedBlockKernels().front();
  const uint64_t not_finite = first.decode(options, in.data(), count, expected.data());
  LH_CHECK(first.decode_add(options, in.data(), count, expected_sum.data()) == not_finite);
  // A number of an encoder never overflows; garbage may.
  LH_CHECK(not_finite <= BlocksNotFinite(options, expected.data(), count));
  for (const BlockKernels& kernels : SupportedBlockKernels()) {
    Exactly<float> out(count);
    LH_CHECK(kernels.decode(options, in.data(), count, out.data()) == not_finite);
    LH_CHECK(out.SameBits(expected)) << kernels.name;
    Exactly<float> added(sum.data(), count);
    LH_CHECK(kernels.decode_add(options, in.data(), count, added.data()) == not_finite);
    LH_CHECK(added.SameBits(expected_sum)) << kernels.name;
  }
}

// Checks block `in` of `n` floats against what became of it.
void CheckNumbers(const BlockOptions& options, const float* in, const float* out, uint64_t n) {
  double greatest = 0;
  bool finite = true;
  for (uint64_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(in[i]);
    greatest = std::max(greatest, std::fabs(double{in[i]}));
  }
  const double scale = greatest / (options.format == BlockFormat::kInt4 ? 7 : 127);
  for (uint64_t i = 0; i < n; ++i) {
    if (!finite) {
      LH_CHECK(std::isnan(out[i])) << in[i] << " " << out[i];
      continue;
    }
    if (scale < 1.2e-38) {
      LH_CHECK(std::fabs(out[i]) <= 127 * 1.2e-38) << in[i] << " " << out[i];
      continue;
    }
    // The scale and the quotient are rounded to float32, and the chance to 15 bits.
    const double slack = (options.stochastic ? 1.0001 : 0.5001) * scale;
    LH_CHECK(std::fabs(double{in[i]} - out[i]) <= slack) << in[i] << " " << out[i];
  }
}

void CheckBfloat16(const BlockOptions& options, float in, float out) {
  LH_CHECK(std::isnan(in) == std::isnan(out)) << in << " " << out;
  if (std::isnan(in)) return;
  LH_CHECK(std::isinf(in) == std::isinf(out)) << in << " " << out;
  const uint32_t bits = std::bit_cast<uint32_t>(in);
  const uint32_t got = std::bit_cast<uint32_t>(out);
  LH_CHECK((got & 0xffff) == 0 && (got >> 31 == bits >> 31)) << in << " " << out;
  // The two bfloat16 beside it; beyond the last, that one.
  const uint32_t below = bits >> 16;
  const uint32_t above = (below & 0x7fff) == 0x7f7f || (bits & 0xffff) == 0 ? below : below + 1;
  LH_CHECK(got >> 16 == below || got >> 16 == above) << in << " " << out;
  if (options.stochastic || above == below) return;
  const uint32_t rest = bits & 0xffff;
  const bool up = rest > 0x8000 || (rest == 0x8000 && below % 2 == 1);
  LH_CHECK(got >> 16 == (up ? above : below)) << in << " " << out;
}

void TryEncode(const BlockOptions& options, uint64_t seed, std::span<const uint8_t> bytes,
               uint64_t count) {
  Exactly<float> in = FloatsOf(bytes, count);
  const uint64_t size = EncodedBytes(options, count);
  const uint64_t at = seed % 1000 * options.block;
  Exactly<uint8_t> expected(size);
  const uint64_t not_finite = Encode(options, seed, at, in.data(), count, expected.data());
  LH_CHECK(not_finite == BlocksNotFinite(options, in.data(), count));
  for (const BlockKernels& kernels : SupportedBlockKernels()) {
    Exactly<uint8_t> out(size);
    LH_CHECK(kernels.encode(options, seed, at, in.data(), count, out.data()) == not_finite);
    LH_CHECK(out.SameBits(expected)) << kernels.name;
  }
  // In two parts, and from memory that is aligned in another way.
  const uint64_t half = count / 2 / options.block * options.block;
  Exactly<float> moved(count + 1);
  std::copy_n(in.data(), count, moved.data() + 1);
  Exactly<uint8_t> parts(size);
  Encode(options, seed, at, moved.data() + 1, half, parts.data());
  Encode(options, seed, at + half, moved.data() + 1 + half, count - half,
         parts.data() + EncodedBytes(options, half));
  LH_CHECK(parts.SameBits(expected));
  Exactly<float> out(count);
  LH_CHECK(Decode(options, expected.data(), count, out.data()) == not_finite);
  for (uint64_t done = 0; done < count; done += options.block) {
    const uint64_t n = std::min<uint64_t>(options.block, count - done);
    if (options.format != BlockFormat::kBfloat16) {
      CheckNumbers(options, in.data() + done, out.data() + done, n);
      continue;
    }
    for (uint64_t i = done; i < done + n; ++i) CheckBfloat16(options, in[i], out[i]);
  }
}

void One(std::span<const uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes) return;
  BlockOptions options;
  options.format = static_cast<BlockFormat>(bytes[0] % 3);
  options.stochastic = bytes[0] >= 128;
  options.block = kBlockMin << bytes[1] % 8;
  static_assert(kBlockMin << 7 == kBlockMax);
  const uint64_t count = (bytes[2] | uint64_t{bytes[3]} << 8) % kCountMax;
  uint64_t seed = 0;
  std::memcpy(&seed, &bytes[4], sizeof seed);
  TryDecode(options, bytes.subspan(kHeaderBytes), count);
  TryEncode(options, seed, bytes.subspan(kHeaderBytes), count);
}

}  // namespace
}  // namespace longhaul::peerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::peerd::One({data, size});
  return 0;
}
