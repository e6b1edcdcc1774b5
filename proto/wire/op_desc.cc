#include "proto/wire/op_desc.h"

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

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kUint16:
      return "uint16";
    case DType::kInt16:
      return "int16";
    case DType::kUint32:
      return "uint32";
    case DType::kInt32:
      return "int32";
    case DType::kUint64:
      return "uint64";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

const char* Name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kProd:
      return "prod";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

const char* Name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kOneShot:
      return "oneshot";
    case Algorithm::kMesh:
      return "mesh";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kLocal:
      return "local";
  }
  return "unknown";
}

bool IsEager(const OpDesc& desc) {
  const bool may = desc.algorithm == Algorithm::kAuto || desc.algorithm == Algorithm::kOneShot;
  return may && desc.count <= LH_EAGER_BYTES_MAX && desc.bytes() <= LH_EAGER_BYTES_MAX;
}

std::string ToString(const OpDesc& desc) {
  std::string text = std::string(Name(desc.reduce)) + " of " + Name(desc.dtype) + " x " +
                     std::to_string(desc.count);
  if (desc.quantization != 0) text += " quantization " + std::to_string(desc.quantization);
  if (desc.on_fault == OnFault::kAbort) text += " abort on fault";
  if (desc.min_world != 0) text += " min_world " + std::to_string(desc.min_world);
  if (desc.algorithm != Algorithm::kAuto) {
    text += std::string(" algorithm ") + Name(desc.algorithm);
  }
  return text;
}

}  // namespace longhaul
