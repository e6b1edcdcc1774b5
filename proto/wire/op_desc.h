// What an op is: equal at every member, or the op is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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

enum class OpKind : uint8_t { kAllReduce = LH_WIRE_ALL_REDUCE };
enum class OnFault : uint8_t { kRetry = LH_WIRE_RETRY, kAbort = LH_WIRE_ABORT };

enum class Algorithm : uint8_t {
  kAuto = LH_WIRE_AUTO,
  kOneShot = LH_WIRE_ONESHOT,
  kMesh = LH_WIRE_MESH,
  kRing = LH_WIRE_RING,
  kLocal = LH_WIRE_LOCAL,  // of ops that ran, not of descriptors
};

size_t SizeOf(DType dtype);             // bytes of one element
const char* Name(DType dtype);          // "float32"
const char* Name(ReduceOp op);          // "sum"
const char* Name(Algorithm algorithm);  // "oneshot"

struct OpDesc {
  OpKind kind = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp reduce = ReduceOp::kSum;
  OnFault on_fault = OnFault::kRetry;
  uint8_t quantization = 0;  // 0 none; others reserved
  // Fewer members than this: the op ends with kTooFewMembers. 0: any number; never 1.
  uint16_t min_world = 0;
  Algorithm algorithm = Algorithm::kAuto;
  uint64_t count = 0;  // elements

  uint64_t bytes() const { return count * SizeOf(dtype); }
  friend bool operator==(const OpDesc&, const OpDesc&) = default;
};

// Whether an op of this description travels inside its READYs.
bool IsEager(const OpDesc& desc);

// "sum of float32 x 1048576": as it stands in the error when descriptors differ.
std::string ToString(const OpDesc& desc);

}  // namespace longhaul
