// The description of an op. If the descriptions of two members differ, the op is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/fields.h"
#include "base/ids.h"
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
};
enum class OnFault : uint8_t { kRetry = LH_WIRE_RETRY, kAbort = LH_WIRE_ABORT };

enum class Algorithm : uint8_t {
  kAuto = LH_WIRE_AUTO,
  kOneShot = LH_WIRE_ONESHOT,
  kMesh = LH_WIRE_MESH,
  kRing = LH_WIRE_RING,
  kLocal = LH_WIRE_LOCAL,  // only reported for an op that has ended; never in a description
};

constexpr auto NamesOf(DType) {
  return EnumNames{0,
                   {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
                    "float16", "bfloat16", "float32", "float64"}};
}
constexpr auto NamesOf(ReduceOp) { return EnumNames{0, {"sum", "avg", "prod", "min", "max"}}; }
constexpr auto NamesOf(OpKind) {
  return EnumNames{1, {"all-reduce", "reduce-scatter", "all-gather", "broadcast", "barrier"}};
}
constexpr auto NamesOf(OnFault) { return EnumNames{0, {"retry", "abort"}}; }
constexpr auto NamesOf(Algorithm) {
  return EnumNames{0, {"auto", "oneshot", "mesh", "ring", "local"}};
}

// Returns the name of a value, such as "float32", "sum" or "oneshot".
template <HasNames T>
const char* Name(T value) {
  return NameOf(value);
}
size_t SizeOf(DType dtype);  // bytes of one element

// The kinds of ops differ in two ways: in their phases (peerd/collective/attempt.h), and in who
// owns which part of the whole tensor (OpTable::CutsOf).
//
//   kind                the whole                     inputs            results
//   all-reduce, barrier one tensor                    added up          everybody gets the whole
//   reduce-scatter      a part for each member        added up          each member gets its part
//   all-gather          a part from each member       put side by side  everybody gets the whole
//   broadcast           the tensor of the root        -                 everybody gets the whole
constexpr bool Reduces(OpKind kind) {
  return kind != OpKind::kAllGather && kind != OpKind::kBroadcast;
}
constexpr bool Gathers(OpKind kind) { return kind != OpKind::kReduceScatter; }

// The one definition of an op and its options. The trainer's request (lh_ipc_op in
// proto/wire/ipc.h) has fields of the same names. The checks, the bytes in READY, the text of a
// mismatch and the digests all derive from the list of fields below. READY has room for 9
// more bytes.
struct OpDesc {
  OpKind kind = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp reduce = ReduceOp::kSum;
  OnFault on_fault = OnFault::kRetry;
  uint8_t quantization = 0;  // 0: none; other values are reserved
  // With fewer members of weight 1 the op ends with kTooFewMembers. 0: any number; never 1.
  uint16_t min_world = 0;
  Algorithm algorithm = Algorithm::kAuto;
  uint64_t count = 0;  // elements; of one member's part for reduce-scatter and all-gather
  // Reduce-scatter and all-gather: the number of members that the tensors are laid out for. 0 for
  // all other kinds.
  uint16_t world = 0;
  MemberId root;  // broadcast; 0: nobody, or members of one peer named different roots

  bool InParts() const { return kind == OpKind::kReduceScatter || kind == OpKind::kAllGather; }
  uint64_t part_bytes() const { return count * SizeOf(dtype); }
  uint64_t bytes() const { return part_bytes() * (InParts() ? world : 1); }  // of the whole
  uint64_t source_bytes() const { return kind == OpKind::kAllGather ? part_bytes() : bytes(); }
  uint64_t target_bytes() const { return kind == OpKind::kReduceScatter ? part_bytes() : bytes(); }
  std::string Fault() const;
  // READY carries the fields in this order. A new field goes last.
  LH_FIELDS(OpDesc, LH_FIELD(kind), LH_FIELD(dtype), LH_FIELD(reduce), LH_FIELD(on_fault),
            LH_FIELD(quantization, rule::Range{0, 0}), LH_FIELD(algorithm),
            LH_FIELD(min_world, rule::Range{0, LH_MEMBERS_MAX}),
            LH_FIELD(count, rule::Range{0, LH_COUNT_MAX}),
            LH_FIELD(world, rule::Range{0, LH_MEMBERS_MAX}), LH_FIELD(root));

  // The same op but for `world` and `root`. Members that hear of a death at different times may
  // differ in these two, so such a difference ends the op with kAborted.
  bool SameButForWorld(const OpDesc& other) const;
};

// The offer of a member whose op differs from that of the first member at the same peer.
struct OtherOffer {
  MemberId member;
  OpDesc desc;
  friend bool operator==(const OtherOffer&, const OtherOffer&) = default;
};

// Returns whether the tensors of such an op travel inside READY frames.
bool IsOneShot(const OpDesc& desc);

// Returns a text such as "sum of float32 x 1048576 min_world 5", for the error when descriptions
// differ. Options with their default values are left out.
std::string ToString(const OpDesc& desc);

// Size of an op's description in READY. The bytes after the last field are zero.
inline constexpr size_t kOpDescBytes = 35;
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
