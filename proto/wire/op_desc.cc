#include "proto/wire/op_desc.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul {

size_t SizeOf(DType dtype) {
  const size_t bytes = lh_wire_dtype_bytes(static_cast<int>(dtype));
  LH_CHECK(bytes > 0) << "dtype " << static_cast<int>(dtype);
  return bytes;
}

bool IsOneShot(const OpDesc& desc) {
  const bool may = desc.algorithm == Algorithm::kAuto || desc.algorithm == Algorithm::kOneShot;
  return may && !desc.unequal && desc.count <= LH_ONE_SHOT_BYTES_MAX &&
         desc.bytes() <= LH_ONE_SHOT_BYTES_MAX;
}

bool MayCarryInput(const OpDesc& desc) {
  return desc.kind == OpKind::kAllReduce && desc.algorithm == Algorithm::kAuto &&
         (desc.quantization == Quantization::kNone || IsAuto(desc.quantization)) &&
         !IsOneShot(desc) && desc.count <= LH_READY_INPUT_BYTES_MAX &&
         OneShotPayloadBytes(desc) <= LH_READY_INPUT_BYTES_MAX;
}

uint64_t OneShotPayloadBytes(const OpDesc& desc) {
  const bool wide = desc.Sums() && (IsHalf(desc.dtype) || desc.list != 0);
  return desc.bytes() * (wide ? 2 : 1);
}

namespace {

// What is wrong with the world, the root and the lengths of the parts; or "".
std::string LayoutFault(const OpDesc& desc) {
  const uint64_t world = desc.world;
  if (desc.InParts() ? world == 0 : world != 0) {
    return Refusal("world", std::to_string(world),
                   desc.InParts() ? "1 or more" : "0 for this kind");
  }
  if (desc.kind == OpKind::kAllToAll && world > LH_ALL_TO_ALL_MEMBERS_MAX) {
    return Refusal("world", std::to_string(world),
                   "at most " + std::to_string(LH_ALL_TO_ALL_MEMBERS_MAX) + " for an all-to-all");
  }
  const uint64_t parts = desc.kind == OpKind::kAllToAll ? world * world : world;
  if (desc.InParts() && desc.count > LH_COUNT_MAX / parts) {
    return Refusal("count", std::to_string(desc.count),
                   "so that all parts together have at most " + std::to_string(LH_COUNT_MAX));
  }
  if (!HasRoot(desc.kind) && desc.root) {
    return Refusal("root", std::to_string(desc.root.value()), "0 for this kind");
  }
  if (desc.unequal && !desc.InParts()) return Refusal("unequal", "1", "0 for this kind");
  if (desc.unequal && desc.count != 0) {
    return Refusal("count", std::to_string(desc.count), "0 with parts of unequal lengths");
  }
  if (desc.unequal && desc.list != 0) return Refusal("unequal", "1", "0 for a list of tensors");
  if (desc.list == 0 && desc.list_bytes != 0) {
    return Refusal("list_bytes", std::to_string(desc.list_bytes), "0 for one tensor");
  }
  if (desc.list_bytes > LH_COUNT_MAX) {
    return Refusal("list_bytes", std::to_string(desc.list_bytes),
                   "at most " + std::to_string(LH_COUNT_MAX));
  }
  return "";
}

// What is wrong with the reduction; or "".
std::string ReductionFault(const OpDesc& desc) {
  if (!Reduces(desc.kind)) {
    if (desc.reduce != ReduceOp::kSum) {
      return Refusal("reduce", Name(desc.reduce), "sum, because this kind reduces nothing");
    }
    if (desc.order != Order::kAny) {
      return Refusal("order", Name(desc.order), "any, because this kind reduces nothing");
    }
    if (desc.weighted) return Refusal("weighted", "1", "0, because this kind reduces nothing");
    return "";
  }
  std::string fault = ReductionFault(desc.dtype, desc.reduce, desc.weighted);
  if (!fault.empty()) return fault;
  if (desc.order == Order::kRank && desc.algorithm == Algorithm::kRing) {
    return Refusal(
        "algorithm", "ring",
        "auto, oneshot or mesh with order rank: in a ring, the order of the sums follows "
        "the ring");
  }
  return "";
}

// What is wrong with the codec; or "".
std::string QuantizationFault(const OpDesc& desc) {
  const bool blocks = IsAmong(desc.quantization, Quantization::kInt8) ||
                      IsAmong(desc.quantization, Quantization::kInt4);
  const std::string name = Name(desc.quantization);
  if (!blocks && desc.block != 0) {
    return Refusal("block", std::to_string(desc.block), "0 with quantization " + name);
  }
  if (!desc.Encodes()) {
    if (desc.rounding == Rounding::kNearest) return "";
    return Refusal("rounding", Name(desc.rounding), "nearest without quantization");
  }
  if (blocks && (!std::has_single_bit(desc.block) || desc.block < LH_QUANTIZE_BLOCK_MIN ||
                 desc.block > LH_QUANTIZE_BLOCK_MAX)) {
    return Refusal("block", std::to_string(desc.block), "a power of two from 32 to 4096");
  }
  switch (desc.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
    case OpKind::kAllGather:
    case OpKind::kBroadcast:
      break;
    default:
      return Refusal("quantization", name, std::string("none for a ") + Name(desc.kind));
  }
  if (desc.reduce != ReduceOp::kSum && desc.reduce != ReduceOp::kAvg) {
    return Refusal("reduce", Name(desc.reduce), "sum or avg with quantization " + name);
  }
  return QuantizedDTypeFault(desc.quantization, desc.dtype);
}

}  // namespace

std::string QuantizedDTypeFault(Quantization quantization, DType dtype) {
  if (dtype == DType::kFloat32 || IsHalf(dtype)) return "";
  return Refusal(
      "dtype", Name(dtype),
      std::string("float32, float16 or bfloat16 with quantization ") + Name(quantization));
}

std::string ReductionFault(DType dtype, ReduceOp reduce, bool weighted) {
  if (IsFloat8(dtype)) {
    return Refusal("dtype", Name(dtype), "one that can be reduced; float8 can only be moved");
  }
  if (dtype == DType::kBool && (reduce == ReduceOp::kAvg || reduce == ReduceOp::kProd)) {
    return Refusal("reduce", Name(reduce), "sum, min or max for bool");
  }
  if (!weighted) return "";
  if (reduce != ReduceOp::kSum && reduce != ReduceOp::kAvg) {
    return Refusal("reduce", Name(reduce), "sum or avg with weights");
  }
  if (IsHalf(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64) return "";
  return Refusal("dtype", Name(dtype), "a float with weights");
}

std::string OpDesc::Fault() const {
  if (algorithm == Algorithm::kLocal) return Refusal("algorithm", "4", "at most 3");
  if (std::string fault = LayoutFault(*this); !fault.empty()) return fault;
  if (std::string fault = ReductionFault(*this); !fault.empty()) return fault;
  if (std::string fault = QuantizationFault(*this); !fault.empty()) return fault;
  if (IsDirect(kind) && algorithm == Algorithm::kRing) {
    return Refusal("algorithm", "ring", "auto, oneshot or mesh for this kind");
  }
  if (min_world == 1) {
    return Refusal("min_world", "1", "0 or 2 to " + std::to_string(LH_MEMBERS_MAX));
  }
  if (algorithm != Algorithm::kOneShot || IsOneShot(*this)) return "";
  if (unequal)
    return "parts of unequal lengths cannot travel as a one-shot op; choose mesh or ring";
  return "a one-shot op has at most " + std::to_string(LH_ONE_SHOT_BYTES_MAX) +
         " bytes, this one " + std::to_string(bytes()) +
         "; leave the algorithm to Longhaul, or choose mesh or ring";
}

namespace {

struct Outline {
  uint64_t tensors = 0;
  std::vector<std::pair<DType, uint64_t>> first;  // dtype and count
};

// nullopt: it is none.
std::optional<Outline> ParseOutline(const std::string& bytes) {
  Outline outline;
  std::vector<uint64_t> numbers;
  constexpr unsigned kBitsMax = 56;  // 48 of a count, and 4 of a dtype
  for (size_t at = 0; at < bytes.size(); ++at) {
    uint64_t number = 0;
    for (unsigned shift = 0;; shift += 7, ++at) {
      if (shift == kBitsMax || at == bytes.size()) return std::nullopt;
      const auto byte = static_cast<uint8_t>(bytes[at]);
      number |= uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) break;
    }
    numbers.push_back(number);
  }
  if (numbers.empty()) return outline;
  outline.tensors = numbers.front();
  for (size_t i = 1; i < numbers.size(); ++i) {
    const auto dtype = static_cast<uint8_t>(numbers[i] & 15);
    const uint64_t count = numbers[i] >> 4;
    if (!NamesOf(DType()).Has(dtype) || count > LH_COUNT_MAX) return std::nullopt;
    outline.first.emplace_back(static_cast<DType>(dtype), count);
  }
  if (outline.tensors == 0 || outline.first.size() > outline.tensors) return std::nullopt;
  return outline;
}

}  // namespace

std::string OutlineFault(const std::string& outline) {
  if (outline.size() > LH_OUTLINE_BYTES_MAX) {
    return Refusal("bytes of an outline", std::to_string(outline.size()),
                   "at most " + std::to_string(LH_OUTLINE_BYTES_MAX));
  }
  return ParseOutline(outline) ? "" : "the outline of the list is none";
}

std::string ListDifference(const std::string& there, const std::string& here) {
  const Outline theirs = ParseOutline(there).value_or(Outline());
  const Outline ours = ParseOutline(here).value_or(Outline());
  if (theirs.tensors == 0 || ours.tensors == 0) return "";
  std::string text;
  if (theirs.tensors != ours.tensors) {
    text = ": " + std::to_string(theirs.tensors) + " tensors there, and " +
           std::to_string(ours.tensors) + " here";
  }
  const size_t known = std::min(theirs.first.size(), ours.first.size());
  const auto differ =
      std::mismatch(theirs.first.begin(), theirs.first.begin() + known, ours.first.begin()).first;
  const auto at = static_cast<size_t>(differ - theirs.first.begin());
  if (at == known) {
    return text + ": the first " + std::to_string(known) + " tensors are equal" +
           (text.empty() ? ", and a later one differs" : "");
  }
  const auto name = [](const std::pair<DType, uint64_t>& tensor) {
    return Name(tensor.first) + (" x " + std::to_string(tensor.second));
  };
  return text + ": tensor[" + std::to_string(at) + "] is " + name(theirs.first[at]) +
         " there, and " + name(ours.first[at]) + " here";
}

std::string RefusalText(const std::string& why) {
  std::string text = CleanText(why, kRefusalBytesMax);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const bool wide = byte == 0xc2 && static_cast<uint8_t>(text[i + 1]) < 0xa0;  // a C1 control
    if (byte < 0x20 || byte == 0x7f || wide) text.replace(i, wide ? 2 : 1, 1, ' ');
  }
  return text;
}

OpDesc RefusedDesc(OpKind kind) {
  OpDesc desc;
  desc.kind = kind;
  desc.world = desc.InParts() ? 1 : 0;
  return desc;
}

OpDesc OpDesc::With(Quantization codec) const {
  OpDesc desc = *this;
  desc.quantization = codec;
  if (codec != Quantization::kInt8 && codec != Quantization::kInt4) desc.block = 0;
  if (codec == Quantization::kNone) desc.rounding = Rounding::kNearest;
  return desc;
}

bool OpDesc::SameButForWorld(const OpDesc& other) const {
  OpDesc like = other;
  like.world = world;
  like.root = root;
  // That of equal lists follows from the world.
  if (InParts() && list != 0 && list == other.list) like.list_bytes = list_bytes;
  return *this == like;
}

size_t TermsBytes(const OpDesc& desc, const std::vector<OpTerms>& terms) {
  size_t bytes = 0;
  for (const OpTerms& each : terms) {
    if (desc.weighted) bytes += 8;
    if (desc.unequal) bytes += 4 + 8 * (each.gives.size() + each.gets.size());
  }
  return bytes;
}

std::string ToString(const OpDesc& desc) {
  const std::string tensor =
      desc.list != 0 ? "tensors of " + std::to_string(desc.list_bytes) + " bytes"
                     : std::string(Name(desc.dtype)) + " x " + std::to_string(desc.count);
  std::string text = Reduces(desc.kind) ? Name(desc.reduce) + (" of " + tensor) : tensor;
  if (desc.kind != OpKind::kAllReduce) text = std::string(Name(desc.kind)) + ", " + text;
  static constexpr std::string_view kSaid[] = {"kind",  "reduce", "dtype",
                                               "count", "list",   "list_bytes"};
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
  std::string fault;
  ForEachField<OpDesc>([&](const auto& field) {
    auto& value = desc->*field.member;
    using Value = std::remove_reference_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, bool>) {
      const uint8_t byte = reader->U8();
      value = byte != 0;
      if (byte > 1 && fault.empty()) fault = Refusal(field.name, std::to_string(byte), "0 or 1");
    } else if constexpr (sizeof(value) == 1) {
      value = static_cast<Value>(reader->U8());
    } else if constexpr (sizeof(value) == 2) {
      value = static_cast<Value>(reader->U16());
    } else {
      value = static_cast<Value>(reader->U64());
    }
  });
  if (!reader->Zeros(kReservedBytes)) return "reserved bytes of the op are not zero";
  if (!fault.empty()) return fault;
  return FaultIn(*desc);
}

}  // namespace longhaul
