#include "proto/wire/op_desc.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul {

size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
      return 1;
    case DType::kUint16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kUint32:
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kUint64:
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  LH_CHECK(false) << "dtype " << static_cast<int>(dtype);
  return 0;
}

bool IsOneShot(const OpDesc& desc) {
  const bool may = desc.algorithm == Algorithm::kAuto || desc.algorithm == Algorithm::kOneShot;
  return may && desc.count <= LH_ONE_SHOT_BYTES_MAX && desc.bytes() <= LH_ONE_SHOT_BYTES_MAX;
}

std::string OpDesc::Fault() const {
  if (algorithm == Algorithm::kLocal) return Refusal("algorithm", "4", "at most 3");
  if (InParts() ? world == 0 : world != 0) {
    return Refusal("world", std::to_string(world), InParts() ? "1 or more" : "0 for this kind");
  }
  if (InParts() && count > LH_COUNT_MAX / world) {
    return Refusal("count", std::to_string(count),
                   "so that all parts together have at most " + std::to_string(LH_COUNT_MAX));
  }
  if (kind != OpKind::kBroadcast && root) {
    return Refusal("root", std::to_string(root.value()), "0 for this kind");
  }
  if (!Reduces(kind) && reduce != ReduceOp::kSum) {
    return Refusal("reduce", Name(reduce), "sum, because this kind reduces nothing");
  }
  if (kind != OpKind::kAllReduce && algorithm == Algorithm::kMesh) {
    return Refusal("algorithm", "mesh", "auto, oneshot or ring for this kind");
  }
  if (min_world == 1) {
    return Refusal("min_world", "1", "0 or 2 to " + std::to_string(LH_MEMBERS_MAX));
  }
  if (algorithm != Algorithm::kOneShot || IsOneShot(*this)) return "";
  return "a one-shot op has at most " + std::to_string(LH_ONE_SHOT_BYTES_MAX) +
         " bytes, this one " + std::to_string(bytes()) +
         "; leave the algorithm to Longhaul, or choose mesh or ring";
}

bool OpDesc::SameButForWorld(const OpDesc& other) const {
  OpDesc like = other;
  like.world = world;
  like.root = root;
  return *this == like;
}

std::string ToString(const OpDesc& desc) {
  const std::string tensor = std::string(Name(desc.dtype)) + " x " + std::to_string(desc.count);
  std::string text = Reduces(desc.kind) ? Name(desc.reduce) + (" of " + tensor) : tensor;
  if (desc.kind != OpKind::kAllReduce) text = std::string(Name(desc.kind)) + ", " + text;
  static constexpr std::string_view kSaid[] = {"kind", "reduce", "dtype", "count"};
  ForEachField<OpDesc>([&](const auto& field) {
    const auto value = desc.*field.member;
    if (std::count(std::begin(kSaid), std::end(kSaid), field.name) != 0) return;
    if (value == OpDesc().*field.member) return;
    text += std::string(" ") + field.name + " ";
    if constexpr (HasNames<std::remove_const_t<decltype(value)>>) {
      text += NameOf(value);
    } else if constexpr (std::is_same_v<std::remove_const_t<decltype(value)>, MemberId>) {
      text += ToString(value);
    } else {
      text += std::to_string(value);
    }
  });
  return text;
}

namespace {
constexpr size_t kReservedBytes = kOpDescBytes - OpDescFieldBytes();
}  // namespace

// Fields are numbers and enums of 1, 2 or 8 bytes, and ids.
void Write(const OpDesc& desc, ByteWriter* writer) {
  ForEachField<OpDesc>([&](const auto& field) {
    const auto value = desc.*field.member;
    if constexpr (sizeof(value) == 1) {
      writer->U8(static_cast<uint8_t>(value));
    } else if constexpr (sizeof(value) == 2) {
      writer->U16(static_cast<uint16_t>(value));
    } else if constexpr (std::is_same_v<std::remove_const_t<decltype(value)>, MemberId>) {
      writer->U64(value.value());
    } else {
      writer->U64(static_cast<uint64_t>(value));
    }
  });
  for (size_t i = 0; i < kReservedBytes; ++i) writer->U8(0);
}

std::string Read(ByteReader* reader, OpDesc* desc) {
  ForEachField<OpDesc>([&](const auto& field) {
    auto& value = desc->*field.member;
    using Value = std::remove_reference_t<decltype(value)>;
    if constexpr (sizeof(value) == 1) {
      value = static_cast<Value>(reader->U8());
    } else if constexpr (sizeof(value) == 2) {
      value = static_cast<Value>(reader->U16());
    } else {
      value = static_cast<Value>(reader->U64());
    }
  });
  if (!reader->Zeros(kReservedBytes)) return "reserved bytes of the op are not zero";
  return FaultIn(*desc);
}

}  // namespace longhaul
