// The description of an op. If the descriptions of two members differ, the op is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/fields.h"
#include "base/ids.h"
#include "proto/wire/kinds.h"
#include "proto/wire/limits.h"
#include "proto/wire/types.h"

namespace longhaul {

enum class DType : uint8_t {
  kUint8 = LH_WIRE_UINT8,
  kInt8 = LH_WIRE_INT8,
  kUint16 = LH_WIRE_UINT16,
  kInt16 = LH_WIRE_INT16,
  kUint32 = LH_WIRE_UINT32,
  kInt32 = LH_WIRE_INT32,
  kUint64 = LH_WIRE_UINT64,
  kInt64 = LH_WIRE_INT64,
  kFloat16 = LH_WIRE_FLOAT16,
  kBfloat16 = LH_WIRE_BFLOAT16,
  kFloat32 = LH_WIRE_FLOAT32,
  kFloat64 = LH_WIRE_FLOAT64,
  kBool = LH_WIRE_BOOL,               // sum and max: or. min: and. No avg, no prod
  kFloat8E4M3 = LH_WIRE_FLOAT8_E4M3,  // moved, never reduced
  kFloat8E5M2 = LH_WIRE_FLOAT8_E5M2,
};

enum class ReduceOp : uint8_t {
  kSum = LH_WIRE_SUM,
  kAvg = LH_WIRE_AVG,
  kProd = LH_WIRE_PROD,
  kMin = LH_WIRE_MIN,
  kMax = LH_WIRE_MAX,
};

enum class OpKind : uint8_t {
  kAllReduce = LH_WIRE_ALL_REDUCE,
  kReduceScatter = LH_WIRE_REDUCE_SCATTER,
  kAllGather = LH_WIRE_ALL_GATHER,
  kBroadcast = LH_WIRE_BROADCAST,
  kBarrier = LH_WIRE_BARRIER,
  kReduce = LH_WIRE_REDUCE,
  kGather = LH_WIRE_GATHER,
  kScatter = LH_WIRE_SCATTER,
  kAllToAll = LH_WIRE_ALL_TO_ALL,
  kSendRecv = LH_WIRE_SEND_RECV,
};
enum class Order : uint8_t { kAny = LH_WIRE_ANY_ORDER, kRank = LH_WIRE_RANK_ORDER };
enum class OnFault : uint8_t { kRetry = LH_WIRE_RETRY, kAbort = LH_WIRE_ABORT };

enum class Algorithm : uint8_t {
  kAuto = LH_WIRE_AUTO,
  kOneShot = LH_WIRE_ONESHOT,
  kMesh = LH_WIRE_MESH,
  kRing = LH_WIRE_RING,
  kLocal = LH_WIRE_LOCAL,  // only reported for an op that has ended; never in a description
};

// How elements travel between hosts (peerd/collective/block_codec.h).
enum class Quantization : uint8_t {
  kNone = LH_WIRE_UNQUANTIZED,
  kBf16 = LH_WIRE_QUANTIZE_BF16,
  kInt8 = LH_WIRE_QUANTIZE_INT8,
  kInt4 = LH_WIRE_QUANTIZE_INT4,
  kAutoFirst = LH_WIRE_QUANTIZE_AUTO,  // up to kAutoLast: the core chooses one of a set, or kNone
  kAutoLast = LH_WIRE_QUANTIZATION_COUNT - 1,
};
constexpr bool IsAuto(Quantization quantization) {
  return quantization >= Quantization::kAutoFirst;
}
// Whether `codec` may be chosen.
constexpr bool IsAmong(Quantization quantization, Quantization codec) {
  if (!IsAuto(quantization)) return quantization == codec;
  const int set = static_cast<int>(quantization) - LH_WIRE_QUANTIZE_AUTO + 1;
  return codec == Quantization::kNone || (set >> (static_cast<int>(codec) - 1) & 1) != 0;
}
enum class Rounding : uint8_t { kNearest = LH_WIRE_NEAREST, kStochastic = LH_WIRE_STOCHASTIC };

constexpr auto NamesOf(DType) {
  return EnumNames{
      0,
      {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
       "bfloat16", "float32", "float64", "bool", "float8_e4m3fn", "float8_e5m2"}};
}
constexpr auto NamesOf(ReduceOp) { return EnumNames{0, {"sum", "avg", "prod", "min", "max"}}; }
constexpr auto NamesOf(OpKind) {
  return EnumNames{1,
                   {"all-reduce", "reduce-scatter", "all-gather", "broadcast", "barrier", "reduce",
                    "gather", "scatter", "all-to-all", "send-recv"}};
}
constexpr auto NamesOf(Order) { return EnumNames{0, {"any", "rank"}}; }
constexpr auto NamesOf(OnFault) { return EnumNames{0, {"retry", "abort"}}; }
constexpr auto NamesOf(Quantization) {
  return EnumNames{
      0,
      {"none", "bf16", "int8", "int4", "auto of bf16", "auto of int8", "auto of bf16, int8",
       "auto of int4", "auto of bf16, int4", "auto of int8, int4", "auto of bf16, int8, int4"}};
}
constexpr auto NamesOf(Rounding) { return EnumNames{0, {"nearest", "stochastic"}}; }
constexpr auto NamesOf(Algorithm) {
  return EnumNames{0, {"auto", "oneshot", "mesh", "ring", "local"}};
}

// Returns the name of a value, such as "float32", "sum" or "oneshot".
template <HasNames T>
const char* Name(T value) {
  return NameOf(value);
}
size_t SizeOf(DType dtype);  // bytes of one element

// Whether a dtype is a float of 16 bits. Its sums are computed in float32 and rounded once.
constexpr bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }
constexpr bool IsFloat8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// How the kinds of ops differ (kinds.h), beside their phases (peerd/collective/attempt.h) and who
// owns which part of the whole tensor (peerd/core/op_terms.h).
constexpr const lh_kind& FactsOf(OpKind kind) { return *lh_kind_of(static_cast<int>(kind)); }
constexpr bool Reduces(OpKind kind) { return FactsOf(kind).reduces != 0; }
constexpr bool Gathers(OpKind kind) { return FactsOf(kind).gathers != 0; }
constexpr bool IsDirect(OpKind kind) { return FactsOf(kind).direct != 0; }
constexpr bool HasRoot(OpKind kind) { return FactsOf(kind).has_root != 0; }
constexpr bool IsInParts(OpKind kind) { return FactsOf(kind).in_parts != 0; }
// Whether the peers own shares of the tensor in the mesh (shares.h).
constexpr bool IsShared(OpKind kind) { return kind == OpKind::kAllReduce; }

// How many parts the tensors of a member have: `world`, one, or none because nobody uses them.
enum class Extent : uint8_t {
  kNone = LH_WIRE_NOTHING,
  kPart = LH_WIRE_PART,
  kWhole = LH_WIRE_WHOLE
};
// `is_root`: of this member; of kSendRecv: it is the sender.
constexpr Extent SourceOf(OpKind kind, bool is_root) {
  return static_cast<Extent>(FactsOf(kind).source[is_root ? 1 : 0]);
}
constexpr Extent TargetOf(OpKind kind, bool is_root) {
  return static_cast<Extent>(FactsOf(kind).target[is_root ? 1 : 0]);
}

// The one definition of an op and its options. The trainer's request (lh_ipc_op in
// proto/wire/ipc.h) has fields of the same names. The checks, the bytes in READY, the text of a
// mismatch and the digests all derive from the list of fields below.
struct OpDesc {
  OpKind kind = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;  // of a list: that of its first piece
  ReduceOp reduce = ReduceOp::kSum;
  OnFault on_fault = OnFault::kRetry;
  Quantization quantization = Quantization::kNone;
  Algorithm algorithm = Algorithm::kAuto;
  // With fewer members of weight 1 the op ends with kTooFewMembers. 0: any number; never 1.
  uint16_t min_world = 0;
  uint64_t count = 0;  // elements; of one part if the op is in parts; 0 if `unequal`
  // The number of members that the tensors are laid out for, if the op is in parts. Otherwise 0.
  uint16_t world = 0;
  MemberId root;  // 0: none, or members of one peer named different roots
  Order order = Order::kAny;
  bool weighted = false;  // each input is multiplied by its member's weight (OpTerms)
  bool unequal = false;   // parts have lengths of their own (OpTerms)
  uint64_t list = 0;      // a digest of the list of tensors; 0: one tensor
  // Of a list: the bytes of the whole, in which every piece begins at a multiple of 64 bytes.
  uint64_t list_bytes = 0;
  uint16_t block = 0;  // elements that share a scale, if int8 or int4: a power of two
  Rounding rounding = Rounding::kNearest;

  bool InParts() const { return IsInParts(kind); }
  // Bytes of one part; not for a list, nor if `unequal`.
  uint64_t part_bytes() const { return count * SizeOf(dtype); }
  // Of the whole, in the layout of peerd/collective/layout.h. 0 if `unequal`: the core does not
  // know it. An all-to-all has `world` * `world` parts.
  uint64_t bytes() const {
    if (list != 0) return list_bytes;
    const uint64_t parts = InParts() ? world : 1;
    return part_bytes() * (kind == OpKind::kAllToAll ? parts * parts : parts);
  }
  // Whether sums are computed in float32 and rounded to `dtype` once (a list: pieces of such
  // dtypes).
  bool Sums() const { return Reduces(kind) && reduce <= ReduceOp::kProd; }
  // The attempt needs the READY of every participant before it starts.
  bool NeedsTerms() const { return weighted || unequal; }
  // Whether elements are encoded before they are sent. A one-shot op sends them as they are.
  bool Encodes() const { return quantization != Quantization::kNone; }
  // The same op with this codec, which may be chosen.
  OpDesc With(Quantization codec) const;
  std::string Fault() const;
  // READY carries the fields in this order. A new field goes last.
  LH_FIELDS(OpDesc, LH_FIELD(kind), LH_FIELD(dtype), LH_FIELD(reduce), LH_FIELD(on_fault),
            LH_FIELD(quantization), LH_FIELD(algorithm),
            LH_FIELD(min_world, rule::Range{0, LH_MEMBERS_MAX}),
            LH_FIELD(count, rule::Range{0, LH_COUNT_MAX}),
            LH_FIELD(world, rule::Range{0, LH_MEMBERS_MAX}), LH_FIELD(root), LH_FIELD(order),
            LH_FIELD(weighted), LH_FIELD(unequal), LH_FIELD(list), LH_FIELD(list_bytes),
            LH_FIELD(block), LH_FIELD(rounding));

  // The same op but for `world` and `root`. Members that hear of a death at different times may
  // differ in these two, so such a difference ends the op with kAborted.
  bool SameButForWorld(const OpDesc& other) const;
};

// What one member alone knows of its part in an op (OpDesc::NeedsTerms). READY carries the terms of
// all members at its peer, in rank order.
struct OpTerms {
  double weight = 1;  // not negative, not infinite
  // If parts are unequal: the elements that the member gives to each member, and gets from each
  // member, in rank order. One number: the same part for all, or from one member. Empty: none.
  //   reduce-scatter  gives: parts of all    gets: its part
  //   all-gather      gives: its part        gets: parts of all
  //   gather          gives: its part        gets: parts of all, at the root
  //   scatter         gives: parts of all, at the root   gets: its part
  //   all-to-all      gives: parts of all    gets: parts of all
  std::vector<uint64_t> gives;
  std::vector<uint64_t> gets;
  LH_FIELDS(OpTerms, LH_FIELD(weight), LH_FIELD(gives), LH_FIELD(gets));
};

// The bytes of these terms in a READY.
size_t TermsBytes(const OpDesc& desc, const std::vector<OpTerms>& terms);

// The outline of a list of tensors, for the texts of errors: how many tensors it has, and the first
// of them, as many as fit into LH_OUTLINE_BYTES_MAX. Numbers of 7 bits a byte, the low ones first;
// the highest bit is set in all bytes of a number but the last. First the number of tensors, then
// for each of them 16 * count + dtype; in parts: the count of one part. "": unknown.
// Returns what is wrong with an outline, or "".
std::string OutlineFault(const std::string& outline);
// How two lists differ, to be put after what two members offered: ": tensor[3] is float32 x 5
// there, and float32 x 6 here", for instance. "": nobody knows.
std::string ListDifference(const std::string& there, const std::string& here);

// The offer of a member whose op differs from that of the first member at the same peer.
struct OtherOffer {
  MemberId member;
  OpDesc desc;
  std::string outline = {};  // of a list
  LH_FIELDS(OtherOffer, LH_FIELD(member), LH_FIELD(desc), LH_FIELD(outline));
};

// A member's call was refused, so the op ends at all participants without a result
// (docs/adr/0058-a-refusal-ends-the-op.md).
struct OpRefusal {
  MemberId member;
  // How many step boundaries the member has passed since the op's `boundary` (NewPost::step).
  uint64_t step = 0;
  std::string why;  // RefusalText()
  LH_FIELDS(OpRefusal, LH_FIELD(member), LH_FIELD(step), LH_FIELD(why));
};
// The most bytes of a reason, as others are told.
inline constexpr size_t kRefusalBytesMax = 255;
// The text as it may travel: at most so many bytes, UTF-8, without control characters. It ends up
// in error texts and logs of other hosts.
std::string RefusalText(const std::string& why);
// The description under which a refused op is announced. It names the kind alone.
OpDesc RefusedDesc(OpKind kind);

// Returns whether the tensors of such an op travel inside READY frames.
bool IsOneShot(const OpDesc& desc);
// Returns whether the inputs of such an op may travel with READY although it is too large for
// IsOneShot(). Each peer offers that (ReadyInput), and it comes to pass if all of them do.
bool MayCarryInput(const OpDesc& desc);
// How an op that MayCarryInput() is announced.
enum class ReadyInput : uint8_t {
  // As any other op: its segments move as soon as two peers have announced it.
  kSegments = 0,
  // READY carries the input. If the READYs of all participants do, each adds up all of them.
  // Otherwise segments move; they move to the sender when it has every READY, and has said so.
  kCarried = 1,
  // The same, but this READY does not carry its input.
  kWithheld = 2,
};

// The bytes of one peer's input in READY. Sums of 16-bit floats travel as float32.
uint64_t OneShotPayloadBytes(const OpDesc& desc);

// Returns what is wrong with such a reduction, or "".
std::string ReductionFault(DType dtype, ReduceOp reduce, bool weighted);
// Returns what is wrong with a tensor of this dtype in an op that encodes, or "".
std::string QuantizedDTypeFault(Quantization quantization, DType dtype);

// Returns a text such as "sum of float32 x 1048576 min_world 5", for the error when descriptions
// differ. Options with their default values are left out.
std::string ToString(const OpDesc& desc);

// Size of an op's description in READY. The bytes after the last field are zero.
inline constexpr size_t kOpDescBytes = 48;
constexpr size_t OpDescFieldBytes() {
  size_t bytes = 0;
  ForEachField<OpDesc>(
      [&](const auto& field) { bytes += sizeof(std::declval<OpDesc>().*field.member); });
  return bytes;
}
static_assert(OpDescFieldBytes() <= kOpDescBytes, "READY has no room for it");
void Write(const OpDesc& desc, ByteWriter* writer);
// Returns what is wrong with the description (FaultIn), or "". The result is valid only if
// reader->ok() afterwards.
std::string Read(ByteReader* reader, OpDesc* desc);

}  // namespace longhaul
