// What the rules of proto/wire/ipc.h say about a request, before anything is done with it. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/wire/ipc.h"
#include "proto/wire/limits.h"
#include "proto/wire/op_desc.h"

namespace longhaul {

// Bytes of `u` that have a meaning for the type; SIZE_MAX for a type that is no request.
inline size_t IpcBodyBytes(uint32_t type) {
  switch (type) {
    case LH_IPC_HELLO:
      return sizeof(lh_ipc_hello);
    case LH_IPC_REGION:
    case LH_IPC_UNREGION:
      return sizeof(lh_ipc_region);
    case LH_IPC_JOIN:
      return sizeof(lh_ipc_join);
    case LH_IPC_LEAVE:
      return sizeof(lh_ipc_leave);
    case LH_IPC_STEP:
      return 0;
    case LH_IPC_ALL_REDUCE:
      return sizeof(lh_ipc_op);
    case LH_IPC_MEMBERS:
      return sizeof(lh_ipc_members);
    default:
      return SIZE_MAX;
  }
}

inline bool IpcAllZero(const void* data, size_t bytes) {
  uint8_t any = 0;
  for (size_t i = 0; i < bytes; ++i) any |= static_cast<const uint8_t*>(data)[i];
  return any == 0;
}

// Whether `field` holds at most `bytes_max` of [A-Za-z0-9._-], at least one, and zeros behind it.
template <size_t N>
bool IsIpcName(const char (&field)[N], size_t bytes_max) {
  const size_t length = strnlen(field, N);
  if (length == 0 || length > bytes_max || length == N) return false;
  for (size_t i = 0; i < length; ++i) {
    const char c = field[i];
    const bool good = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                      c == '.' || c == '_' || c == '-';
    if (!good) return false;
  }
  return IpcAllZero(field + length, N - length);
}

inline std::string IpcCohortError(const lh_ipc_join& join) {
  if (IpcAllZero(join.cohort, sizeof join.cohort)) {
    return join.cohort_size == 0 ? "" : "a size of a cohort without name";
  }
  if (!IsIpcName(join.cohort, LH_COHORT_NAME_BYTES_MAX)) return "malformed cohort name";
  if (join.cohort_size == 0 || join.cohort_size > LH_LOCAL_MEMBERS_MAX) {
    return "cohort of " + std::to_string(join.cohort_size) + " members";
  }
  return "";
}

// What is wrong with the request as such, "" if nothing is: a trainer that keeps to the protocol
// never sends such a thing. `greeted`: HELLO was said on this connection. `descriptors`: how many
// came with the request.
inline std::string IpcProtocolError(const lh_ipc_request& request, bool greeted,
                                    size_t descriptors) {
  if (request.magic != LH_IPC_MAGIC) return "no request: wrong magic";
  const size_t body = IpcBodyBytes(request.type);
  if (body == SIZE_MAX) return "unknown request " + std::to_string(request.type);
  if (request.type == LH_IPC_HELLO && request.u.hello.version != LH_IPC_VERSION) {
    return "client library speaks version " + std::to_string(request.u.hello.version) +
           " of the socket's protocol, peerd version " + std::to_string(LH_IPC_VERSION) +
           "; install matching releases";
  }
  if (request.type == LH_IPC_HELLO && greeted) return "second HELLO";
  if (request.type != LH_IPC_HELLO && !greeted) return "request before HELLO";
  if (request.call == 0) return "call is 0";
  const size_t wanted = request.type == LH_IPC_REGION ? 1 : 0;
  if (descriptors != wanted) {
    return std::to_string(descriptors) + " descriptors with request " +
           std::to_string(request.type) + ", " + std::to_string(wanted) + " expected";
  }
  if (!IpcAllZero(request.u.bytes + body, sizeof request.u.bytes - body)) {
    return "reserved bytes are not zero";
  }
  const bool of_member = request.type == LH_IPC_STEP || request.type == LH_IPC_ALL_REDUCE ||
                         request.type == LH_IPC_MEMBERS;
  if (of_member && request.member == 0) return "no member named";
  switch (request.type) {
    case LH_IPC_HELLO:
      if (request.member != 0) return "member in a request that has none";
      if (!IsIpcName(request.u.hello.name, LH_MEMBER_NAME_BYTES_MAX)) return "malformed name";
      break;
    case LH_IPC_REGION:
    case LH_IPC_UNREGION:
      if (request.member != 0) return "member in a request that has none";
      if (request.u.region.region == 0) return "region is 0";
      break;
    case LH_IPC_JOIN:
      if (request.member != 0) return "member in a request that has none";
      if (request.u.join.zero != 0) return "reserved bytes are not zero";
      if (!IsIpcName(request.u.join.run, LH_RUN_NAME_BYTES_MAX)) return "malformed run name";
      if (request.u.join.step_deadline_ms > LH_STEP_DEADLINE_MS_MAX)
        return "step deadline too long";
      return IpcCohortError(request.u.join);
    case LH_IPC_LEAVE:
      if ((request.member == 0) == (request.u.leave.join == 0)) {
        return "LEAVE names a member or a JOIN, not both";
      }
      break;
    case LH_IPC_MEMBERS:
      if (request.u.members.zero != 0) return "reserved bytes are not zero";
      break;
    default:
      break;
  }
  return "";
}

// The op that a request asks for; its ranges lie inside regions of these sizes. InvalidArgument
// says what does not fit.
inline absl::StatusOr<OpDesc> ParseIpcOp(const lh_ipc_op& op, uint64_t source_region_bytes,
                                         uint64_t target_region_bytes) {
  const auto refuse = [](const std::string& what) {
    return absl::InvalidArgumentError("all-reduce refused: " + what);
  };
  if (op.dtype >= LH_WIRE_DTYPE_COUNT) return refuse("dtype " + std::to_string(op.dtype));
  if (op.reduce >= LH_WIRE_REDUCE_COUNT) return refuse("reduce op " + std::to_string(op.reduce));
  if (op.on_fault > LH_WIRE_ABORT) return refuse("on_fault " + std::to_string(op.on_fault));
  if (op.quantization != 0) return refuse("quantization " + std::to_string(op.quantization));
  if (op.count == 0) return refuse("count is 0");
  if (op.count > LH_COUNT_MAX) return refuse("count " + std::to_string(op.count));
  if (op.min_world > LH_MEMBERS_MAX) {
    return refuse("min_world " + std::to_string(op.min_world) + ", and a group has at most " +
                  std::to_string(LH_MEMBERS_MAX) + " members");
  }
  OpDesc desc;
  desc.dtype = static_cast<DType>(op.dtype);
  desc.reduce = static_cast<ReduceOp>(op.reduce);
  desc.on_fault = static_cast<OnFault>(op.on_fault);
  desc.count = op.count;
  // One is there in any case: members that say 0 and 1 mean the same.
  if (op.min_world > 1) desc.min_world = static_cast<uint16_t>(op.min_world);
  const uint64_t bytes = desc.bytes();
  const auto inside = [bytes](const lh_ipc_range& range, uint64_t region_bytes) {
    return range.offset <= region_bytes && bytes <= region_bytes - range.offset;
  };
  if (!inside(op.source, source_region_bytes)) return refuse("source goes beyond its region");
  if (!inside(op.target, target_region_bytes)) return refuse("target goes beyond its region");
  const uint64_t element = SizeOf(desc.dtype);
  if (op.source.offset % element != 0 || op.target.offset % element != 0) {
    return refuse("source and target must be aligned to their elements");
  }
  const bool same_region = op.source.region == op.target.region;
  const uint64_t low = op.source.offset < op.target.offset ? op.source.offset : op.target.offset;
  const uint64_t high = op.source.offset < op.target.offset ? op.target.offset : op.source.offset;
  if (same_region && low != high && high - low < bytes) {
    return refuse("source and target overlap without being equal");
  }
  return desc;
}

}  // namespace longhaul
