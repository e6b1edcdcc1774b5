// Feeds garbage to every parser of the data port. The first byte chooses the parser.
#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "base/check.h"
#include "proto/wire/frame.h"
#include "proto/wire/handshake.h"

namespace longhaul {
namespace {

template <size_t kSize>
bool Fixed(std::span<const uint8_t> bytes, std::array<uint8_t, kSize>* out) {
  if (bytes.size() < kSize) return false;
  std::copy_n(bytes.begin(), kSize, out->begin());
  return true;
}

// Encoding an accepted value again must give the same bytes.
template <size_t kSize, class Parse>
void Try(std::span<const uint8_t> bytes, Parse parse) {
  std::array<uint8_t, kSize> fixed;
  if (!Fixed(bytes, &fixed)) return;
  if (const auto parsed = parse(fixed); parsed.ok()) LH_CHECK(Encode(*parsed) == fixed);
}

void One(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  const uint8_t which = bytes[0] % 8;
  bytes = bytes.subspan(1);
  switch (which) {
    case 0:
    case 1: {
      const LaneKind kind = which == 0 ? LaneKind::kControl : LaneKind::kData;
      Try<kFrameHeaderBytes>(bytes, [&](const auto& b) { return ParseFrameHeader(b, kind); });
      break;
    }
    case 2: {
      std::span<const uint8_t> rest;
      if (const auto body = ParseReadyBody(bytes, &rest); body.ok()) {
        std::string again = Encode(*body);
        if (body->other_offer) again += Encode(*body->other_offer);
        if (body->refusal) again += Encode(*body->refusal);
        again.append(rest.begin(), rest.end());
        LH_CHECK(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end(),
                            [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; }));
      }
      break;
    }
    case 3:
      Try<kLaneHelloBytes>(bytes, [](const auto& b) { return ParseLaneHello(b); });
      break;
    case 4:
      Try<kLaneAnswerBytes>(bytes, [](const auto& b) { return ParseLaneAnswer(b); });
      break;
    case 5:
      Try<kLaneConfirmBytes>(bytes, [](const auto& b) { return ParseLaneConfirm(b); });
      break;
    case 6:
      Try<kChunkRequestBodyBytes>(bytes, [](const auto& b) { return ParseChunkRequestBody(b); });
      break;
    case 7:
      Try<kChunkRefusedBodyBytes>(bytes, [](const auto& b) { return ParseChunkRefusedBody(b); });
      break;
  }
}

}  // namespace
}  // namespace longhaul

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::One({data, size});
  return 0;
}
