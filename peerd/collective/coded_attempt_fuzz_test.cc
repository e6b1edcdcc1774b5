// Feeds an attempt at an op that encodes with garbage: the description of the op as READY has it,
// then a script of calls. Segments come from any sender, for any bytes of the tensor, and have any
// content. The attempt may refuse them, but must not write beyond its memory (AddressSanitizer sees
// that), and an attempt that is stopped must leave inputs and errors as they were.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/bytes.h"
#include "base/check.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/block_codec.h"
#include "peerd/collective/layout.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kCountMax = 2000;

// The bytes of the fuzzer; zeros behind their end.
class Source {
 public:
  explicit Source(std::span<const uint8_t> bytes) : rest_(bytes) {}
  bool empty() const { return rest_.empty(); }
  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const uint8_t byte = rest_.front();
    rest_ = rest_.subspan(1);
    return byte;
  }
  uint64_t Below(uint64_t n) { return (Byte() | uint64_t{Byte()} << 8) % n; }
  bool Flag() { return Byte() % 2 == 1; }

 private:
  std::span<const uint8_t> rest_;
};

// Every buffer has exactly the bytes that were asked for.
class ExactPool final : public ScratchPool {
 public:
  ~ExactPool() override { LH_CHECK(lent_.empty()) << lent_.size() << " buffers are lent"; }
  absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
    auto* const data = static_cast<uint8_t*>(::operator new (bytes, std::align_val_t{64}));
    std::memset(data, 0xee, bytes);
    lent_[data] = bytes;
    return data;
  }
  void Give(uint8_t* data) override {
    LH_CHECK(lent_.erase(data) == 1);
    ::operator delete (data, std::align_val_t{64});
  }

 private:
  std::map<uint8_t*, uint64_t> lent_;
};

// An attempt of one position, and the tensors of its members.
class Run final : private AttemptSink {
 public:
  Run(const OpDesc& desc, Source* source) : source_(*source) {
    spec_.desc = desc;
    DrawPeers();
    DrawTensors();
    DrawRest();
    const bool ring = desc.order != Order::kRank && spec_.shares.empty() && source_.Flag();
    absl::StatusOr<std::unique_ptr<Attempt>> attempt =
        ring ? MakeRingAttempt(spec_, this, &pool_) : MakeMeshAttempt(spec_, this, &pool_);
    LH_CHECK(attempt.ok()) << attempt.status();
    attempt_ = *std::move(attempt);
    before_ = InputBytes();
  }

  void Play() {
    while (!source_.empty() && !complete_) Move();
    if (!started_) Start();
    if (complete_ && source_.Flag()) {
      attempt_->Commit();
      WorkOff();
      LH_CHECK(attempt_->Idle());
      return;
    }
    // The transport gives back all segments, half received or half sent.
    attempt_->Stop();
    while (!out_.empty()) SendOne();
    WorkOff();
    LH_CHECK(attempt_->Idle());
    LH_CHECK(InputBytes() == before_) << "inputs or errors have changed";
  }

 private:
  struct Placed {
    int from = 0;
    Segment segment;
    uint8_t* place = nullptr;
  };
  struct Out {
    const uint8_t* data = nullptr;
    uint64_t bytes = 0;
    uint64_t cookie = 0;
  };

  // ---- the op

  void DrawPeers() {
    spec_.size = 2 + static_cast<int>(source_.Below(3));
    spec_.position = static_cast<int>(source_.Below(spec_.size));
    const size_t locals = 1 + source_.Below(2);
    uint64_t contributing = 0;
    for (size_t i = 0; i < locals; ++i) {
      spec_.contributes.push_back(source_.Byte() % 4 != 3);
      spec_.seeds.push_back(source_.Byte());
    }
    for (int i = 0; i < spec_.size; ++i) {
      const auto own = std::count(spec_.contributes.begin(), spec_.contributes.end(), true);
      const uint64_t count = i == spec_.position ? own : source_.Byte() % 4 == 3 ? 0 : 1;
      spec_.ring_contributes.push_back(static_cast<uint32_t>(count));
      contributing += count;
    }
    if (contributing == 0) {
      spec_.contributes[0] = true;
      contributing = spec_.ring_contributes[spec_.position] = 1;
    }
    spec_.members = static_cast<uint32_t>(contributing);
    if (spec_.desc.list != 0) {
      for (uint64_t left = 1 + source_.Below(3); left > 0; --left) {
        constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
        spec_.pieces.push_back({kDTypes[source_.Below(3)], source_.Below(kCountMax / 4)});
      }
    } else {
      spec_.pieces.push_back({spec_.desc.dtype, spec_.desc.count});
    }
    DrawCuts(locals);
  }

  void DrawCuts(size_t locals) {
    OpDesc& desc = spec_.desc;
    if (desc.kind == OpKind::kBroadcast) {
      const int root = static_cast<int>(source_.Below(spec_.size));
      spec_.cuts.push_back({root, root == spec_.position ? 0 : -1, 0, -1, 0});
    }
    if (!desc.InParts()) return;
    for (int i = 0; i < spec_.size; ++i) {
      for (size_t k = 0; k < (i == spec_.position ? locals : 1); ++k) {
        const int local = i == spec_.position ? static_cast<int>(k) : -1;
        const uint64_t count = desc.unequal ? source_.Below(kCountMax / 4) : 0;
        spec_.cuts.push_back({i, local, 0, -1, count});
      }
    }
    desc.world = static_cast<uint16_t>(spec_.cuts.size());
  }

  // Elements of the part of a local member, or of the whole.
  uint64_t CountOf(size_t piece, size_t local, Extent extent) const {
    if (extent == Extent::kNone) return 0;
    if (!spec_.desc.unequal) {
      const uint64_t parts =
          extent == Extent::kWhole && spec_.desc.InParts() ? spec_.desc.world : 1;
      return spec_.pieces[piece].count * parts;
    }
    uint64_t count = 0;
    for (const Cut& cut : spec_.cuts) {
      if (extent == Extent::kWhole || cut.local == static_cast<int>(local)) count += cut.count;
    }
    return count;
  }

  void DrawTensors() {
    const OpKind kind = spec_.desc.kind;
    for (size_t i = 0; i < spec_.contributes.size(); ++i) {
      const bool root = !spec_.cuts.empty() && spec_.cuts[0].local == static_cast<int>(i);
      const bool may_be_in_place = kind == OpKind::kAllReduce || (HasRoot(kind) && root);
      const bool in_place = may_be_in_place && source_.Flag();
      const bool keeps = Reduces(kind) && source_.Flag();
      spec_.sources.emplace_back();
      spec_.targets.emplace_back();
      spec_.errors.emplace_back();
      for (size_t k = 0; k < spec_.pieces.size(); ++k) {
        const uint64_t size = SizeOf(spec_.pieces[k].dtype);
        const uint64_t count = CountOf(k, i, SourceOf(kind, root));
        uint8_t* const source = Memory(count * size, &inputs_);
        spec_.sources.back().push_back(source);
        const uint64_t target_bytes = CountOf(k, i, TargetOf(kind, root)) * size;
        spec_.targets.back().push_back(in_place ? source : Memory(target_bytes, &targets_));
        if (!keeps) continue;
        spec_.errors.back().push_back(
            reinterpret_cast<float*>(Memory(count * sizeof(float), &inputs_)));
      }
    }
    if (!Reduces(kind)) spec_.errors.clear();
  }

  void DrawRest() {
    const OpDesc& desc = spec_.desc;
    for (size_t i = 0; desc.weighted && i < spec_.sources.size(); ++i) {
      spec_.weights.push_back(source_.Byte() / 8.0);
    }
    spec_.weight_sum = 1 + source_.Byte();
    spec_.sum_seed = source_.Byte();
    const bool shared = desc.kind == OpKind::kAllReduce || desc.kind == OpKind::kBroadcast;
    if (shared && source_.Flag()) {
      for (int i = 0; i < spec_.size; ++i) spec_.shares.push_back(source_.Byte() / 16);
      const auto sum = std::accumulate(spec_.shares.begin(), spec_.shares.end(), uint64_t{0});
      if (sum == 0) spec_.shares[0] = 1;
    }
    if (desc.order == Order::kRank) {
      for (int i = 0; i < spec_.size; ++i) spec_.order.push_back((i + 1) % spec_.size);
    }
    // Grains have whole blocks of every dtype.
    spec_.grain_bytes =
        CodecOf(spec_.desc).block * 4 * (1 + static_cast<uint32_t>(source_.Below(2)));
    spec_.segment_bytes = spec_.grain_bytes * (1 + static_cast<uint32_t>(source_.Below(4)));
    spec_.window_bytes = 64 << source_.Below(8);
    spec_.cached_bytes_max = source_.Flag() ? 0 : kCachedBytesMax;
  }

  // Memory for a tensor, filled from a few bytes; null if it is empty.
  uint8_t* Memory(uint64_t bytes, std::vector<std::vector<uint8_t>>* list) {
    if (bytes == 0) return nullptr;
    std::vector<uint8_t>& memory = list->emplace_back(bytes);
    memory.shrink_to_fit();
    Fill(memory.data(), bytes);
    return memory.data();
  }
  void Fill(uint8_t* data, uint64_t bytes) {
    uint8_t pattern[8];
    for (uint8_t& byte : pattern) byte = source_.Byte();
    for (uint64_t i = 0; i < bytes; ++i) data[i] = pattern[i % sizeof pattern];
  }
  std::string InputBytes() const {
    std::string all;
    for (const std::vector<uint8_t>& each : inputs_) all.append(each.begin(), each.end());
    return all;
  }

  // ---- the script

  void Move() {
    switch (source_.Byte() % 8) {
      case 0:
        return Start();
      case 1:
        return attempt_->Credit(static_cast<int>(source_.Below(spec_.size)));
      case 2:
        return Place(AnySegment());
      case 3:
        return Place(LikelySegment());
      case 4:
        return Receive();
      case 5:
        return Abandon();
      case 6:
        if (started_ && attempt_->HasWork()) attempt_->Work(1 + source_.Byte() * 16);
        return;
      default:
        if (!out_.empty()) SendOne();
    }
  }

  void Start() {
    if (std::exchange(started_, true)) return;
    attempt_->Start();
    if (attempt_->CompleteAtOnce()) complete_ = true;
  }

  Segment AnySegment() {
    Segment segment;
    segment.phase = static_cast<Phase>(source_.Byte());
    segment.offset = source_.Below(1 << 16);
    if (source_.Byte() == 1) segment.offset = UINT64_MAX - segment.offset;
    segment.bytes = static_cast<uint32_t>(source_.Below(1 << 16));
    if (source_.Byte() == 1) segment.bytes = UINT32_MAX - segment.bytes;
    return segment;
  }
  // Some grains of some chunk.
  Segment LikelySegment() {
    Segment segment;
    segment.phase = source_.Flag() ? Phase::kReduce : Phase::kGather;
    const Layout layout(spec_, spec_.size);
    if (layout.chunks().empty()) return segment;
    const Layout::Chunk& chunk = layout.chunks()[source_.Below(layout.chunks().size())];
    const uint64_t grains = (chunk.bytes + spec_.grain_bytes - 1) / spec_.grain_bytes;
    const uint64_t begin = source_.Below(grains) * spec_.grain_bytes;
    const uint64_t bytes =
        std::min((1 + source_.Below(grains)) * spec_.grain_bytes, chunk.bytes - begin);
    segment.offset = chunk.offset + begin;
    segment.bytes =
        static_cast<uint32_t>(EncodedBytes(CodecOf(spec_.desc), bytes / SizeOf(chunk.dtype)));
    return segment;
  }

  void Place(const Segment& segment) {
    const int drawn = source_.Byte();
    const int from = drawn < 252 ? drawn % spec_.size : drawn - 253;
    if (!started_) return;
    const absl::StatusOr<uint8_t*> place = attempt_->Place(from, segment);
    if (!place.ok()) return;
    LH_CHECK(*place != nullptr && from >= 0 && from < spec_.size && from != spec_.position);
    placed_.push_back({from, segment, *place});
    // The transport may write all of it, whatever becomes of the segment.
    Fill(*place, segment.bytes);
  }
  std::optional<Placed> TakePlaced() {
    if (placed_.empty()) return std::nullopt;
    const auto it = placed_.begin() + static_cast<ptrdiff_t>(source_.Below(placed_.size()));
    const Placed placed = *it;
    placed_.erase(it);
    return placed;
  }
  void Receive() {
    if (const auto placed = TakePlaced()) attempt_->Received(placed->from, placed->segment);
  }
  void Abandon() {
    if (const auto placed = TakePlaced()) attempt_->Abandoned(placed->from, placed->segment);
  }

  void SendSegment(int to, const Segment& segment, const uint8_t* data, uint64_t cookie) override {
    LH_CHECK(to >= 0 && to < spec_.size && to != spec_.position);
    out_.push_back({data, segment.bytes, cookie});
  }
  void SendOne() {
    const auto it = out_.begin() + static_cast<ptrdiff_t>(source_.Below(out_.size()));
    const Out out = *it;
    out_.erase(it);
    // The transport reads all of it.
    sum_ = std::accumulate(out.data, out.data + out.bytes, sum_);
    attempt_->Sent(out.cookie);
  }
  void Complete() override { complete_ = true; }

  void WorkOff() {
    while (attempt_->HasWork()) LH_CHECK(attempt_->Work(4096) > 0);
  }

  Source& source_;
  AttemptSpec spec_;
  std::vector<std::vector<uint8_t>> inputs_;  // sources and errors
  std::vector<std::vector<uint8_t>> targets_;
  std::string before_;
  ExactPool pool_;
  std::unique_ptr<Attempt> attempt_;
  bool started_ = false;
  bool complete_ = false;
  std::vector<Placed> placed_;
  std::vector<Out> out_;
  uint64_t sum_ = 0;
};

void One(std::span<const uint8_t> bytes) {
  if (bytes.size() < kOpDescBytes) return;
  ByteReader reader(bytes.first(kOpDescBytes));
  OpDesc desc;
  if (!Read(&reader, &desc).empty() || !reader.ok()) return;
  std::array<uint8_t, kOpDescBytes> again;
  ByteWriter writer(again);
  Write(desc, &writer);
  LH_CHECK(std::equal(again.begin(), again.end(), bytes.begin()));
  LH_CHECK(!ToString(desc).empty());
  // One-shot ops move no segments.
  if (!desc.Encodes() || desc.count > kCountMax || desc.algorithm == Algorithm::kOneShot) return;
  Source source(bytes.subspan(kOpDescBytes));
  // The core chooses before an attempt starts.
  constexpr Quantization kCodecs[] = {Quantization::kInt4, Quantization::kInt8,
                                      Quantization::kBf16};
  const auto codec = std::find_if(std::begin(kCodecs), std::end(kCodecs), [&](Quantization each) {
    return IsAmong(desc.quantization, each);
  });
  desc = desc.With(*codec);
  Run(desc, &source).Play();
}

}  // namespace
}  // namespace longhaul::peerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::peerd::One({data, size});
  return 0;
}
