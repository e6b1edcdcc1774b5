// Checks a request against the rules of proto/wire/ipc.h. Peerd does this before it acts on the
// request. Pure functions: a check returns a text that says what is wrong, or "".
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fields.h"
#include "proto/wire/ipc.h"
#include "proto/wire/ipc_why.h"
#include "proto/wire/limits.h"
#include "proto/wire/op_desc.h"

namespace longhaul {

// Returns how many bytes of `u` a request of this type uses. SIZE_MAX: no request has this type.
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
    case LH_IPC_SYNC:
      return sizeof(lh_ipc_sync);
    case LH_IPC_STATE:
    case LH_IPC_UNSTATE:
    case LH_IPC_KEPT:
    case LH_IPC_PREPARE:
      return sizeof(lh_ipc_state);
    case LH_IPC_TAKE:
      return sizeof(lh_ipc_take);
    case LH_IPC_OP:
      return sizeof(lh_ipc_op);
    case LH_IPC_CANCEL:
      return sizeof(lh_ipc_cancel);
    case LH_IPC_MEMBERS:
      return sizeof(lh_ipc_members);
    case LH_IPC_MEMBER:
      return sizeof(lh_ipc_about);
    case LH_IPC_WHY:
      return sizeof(lh_ipc_why);
    case LH_IPC_LOOK:
      return 0;
    default:
      return SIZE_MAX;
  }
}

inline bool IpcAllZero(const void* data, size_t bytes) {
  uint8_t any = 0;
  for (size_t i = 0; i < bytes; ++i) any |= static_cast<const uint8_t*>(data)[i];
  return any == 0;
}

// Returns whether `field` holds 1 to `bytes_max` bytes of [A-Za-z0-9._-] and then zeros.
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

inline std::string IpcSyncError(const lh_ipc_sync& sync) {
  if (sync.strategy < LH_WIRE_POPULAR || sync.strategy > LH_WIRE_SEND) {
    return "strategy " + std::to_string(sync.strategy);
  }
  if (sync.zero != 0) return "reserved bytes are not zero";
  if (sync.touched.region == 0 && sync.touched.offset != 0) return "an offset in no region";
  return "";
}

// Returns how the request breaks the protocol, or "". Our client library never breaks it.
// `greeted`: HELLO has come on this connection. `descriptors`: how many file descriptors came with
// the request.
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
  const bool look = request.type == LH_IPC_LOOK;
  if ((request.call == 0) != look) return look ? "call of a LOOK is not 0" : "call is 0";
  const size_t least = request.type == LH_IPC_REGION ? 1 : 0;
  const size_t most = request.type == LH_IPC_HELLO ? 1 : least;
  if (descriptors < least || descriptors > most) {
    return std::to_string(descriptors) + " descriptors with request " +
           std::to_string(request.type) + ", " + (least < most ? "at most " : "") +
           std::to_string(most) + " expected";
  }
  if (!IpcAllZero(request.u.bytes + body, sizeof request.u.bytes - body)) {
    return "reserved bytes are not zero";
  }
  const bool of_member = request.type == LH_IPC_STEP || request.type == LH_IPC_OP ||
                         request.type == LH_IPC_MEMBERS || request.type == LH_IPC_SYNC ||
                         request.type == LH_IPC_KEPT || request.type == LH_IPC_TAKE ||
                         request.type == LH_IPC_MEMBER || request.type == LH_IPC_CANCEL;
  if (of_member && request.member == 0) return "no member named";
  switch (request.type) {
    case LH_IPC_LOOK:
      if (request.member != 0) return "member in a request that has none";
      break;
    case LH_IPC_HELLO:
      if (request.member != 0) return "member in a request that has none";
      if (!IsIpcName(request.u.hello.name, LH_MEMBER_NAME_BYTES_MAX)) return "malformed name";
      break;
    case LH_IPC_REGION:
    case LH_IPC_UNREGION:
      if (request.member != 0) return "member in a request that has none";
      if (request.u.region.region == 0) return "region is 0";
      if ((request.u.region.flags & ~uint32_t{LH_IPC_REGION_INBOX}) != 0) {
        return "unknown flags of a region";
      }
      if (request.u.region.zero != 0) return "reserved bytes are not zero";
      break;
    case LH_IPC_JOIN:
      if (request.member != 0) return "member in a request that has none";
      if (!IsIpcName(request.u.join.run, LH_RUN_NAME_BYTES_MAX)) return "malformed run name";
      if (!IpcAllZero(request.u.join.name, sizeof request.u.join.name) &&
          !IsIpcName(request.u.join.name, LH_MEMBER_NAME_BYTES_MAX)) {
        return "malformed name";
      }
      break;
    case LH_IPC_LEAVE:
      if ((request.member == 0) == (request.u.leave.join == 0)) {
        return "LEAVE names a member or a JOIN, not both";
      }
      break;
    case LH_IPC_OP:
      if (!IpcAllZero(request.u.op.zero, sizeof request.u.op.zero)) {
        return "reserved bytes are not zero";
      }
      break;
    case LH_IPC_CANCEL:
      if (request.u.cancel.op == 0) return "op is 0";
      break;
    case LH_IPC_MEMBER:
      if (request.u.about.member_id == 0) return "member_id is 0";
      break;
    case LH_IPC_WHY:
      if (request.member != 0) return "member in a request that has none";
      if (lh_ipc_get_why(&request).zero != 0) return "reserved bytes are not zero";
      if (!IsIpcName(lh_ipc_get_why(&request).run, LH_RUN_NAME_BYTES_MAX)) {
        return "malformed run name";
      }
      break;
    case LH_IPC_MEMBERS:
      if (request.u.members.of_step > 1) return "members of no such epoch";
      break;
    case LH_IPC_STATE:
    case LH_IPC_UNSTATE:
      if (request.member != 0) return "member in a request that has none";
      if (request.u.state.state == 0) return "state is 0";
      if (request.u.state.zero != 0) return "reserved bytes are not zero";
      break;
    case LH_IPC_TAKE:
      if (request.u.take.timeout_ms > LH_STEP_DEADLINE_MS_MAX) return "timeout too long";
      if (request.u.take.zero != 0) return "reserved bytes are not zero";
      break;
    case LH_IPC_PREPARE:
    case LH_IPC_KEPT: {
      if (request.type == LH_IPC_PREPARE && request.member != 0) {
        return "member in a request that has none";
      }
      lh_ipc_state named = {};
      named.state = request.u.state.state;
      if (named.state == 0) return "state is 0";
      if (memcmp(&named, &request.u.state, sizeof named) != 0) return "reserved bytes are not zero";
      break;
    }
    case LH_IPC_STEP:
      if (request.u.sync.state != 0) return IpcSyncError(request.u.sync);
      if (!IpcAllZero(&request.u.sync, sizeof request.u.sync)) return "a sync without state";
      break;
    case LH_IPC_SYNC:
      if (request.u.sync.state == 0) return "state is 0";
      return IpcSyncError(request.u.sync);
    default:
      break;
  }
  return "";
}

// Returns whether `text` is UTF-8 in its shortest form, without control characters.
inline bool IsPlainUtf8(const char* text, size_t bytes) {
  const auto* const at = reinterpret_cast<const uint8_t*>(text);
  for (size_t i = 0; i < bytes;) {
    const uint8_t first = at[i];
    if (first < 0x80) {
      if (first < 0x20 || first == 0x7f) return false;
      ++i;
      continue;
    }
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || length > bytes - i) return false;
    uint32_t point = first & (0x7fu >> length);
    for (size_t k = 1; k < length; ++k) {
      if ((at[i + k] & 0xc0) != 0x80) return false;
      point = point << 6 | (at[i + k] & 0x3fu);
    }
    static constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kLeast[length] || point > 0x10ffff) return false;
    if (point >= 0xd800 && point < 0xe000) return false;
    if (point < 0xa0) return false;  // the control characters beyond ASCII
    i += length;
  }
  return true;
}

// The bytes of one element of a state's tensor; 0: the dtype is unknown.
inline uint64_t IpcStateElementBytes(uint8_t dtype) {
  return dtype < LH_WIRE_DTYPE_COUNT ? SizeOf(static_cast<DType>(dtype)) : 0;
}

// Returns what is wrong with an entry of a state's table, or "". Does not check the region.
inline std::string IpcTensorError(const lh_ipc_tensor& tensor) {
  const size_t length = strnlen(tensor.name, sizeof tensor.name);
  if (length == 0 || length > LH_STATE_NAME_BYTES_MAX || !IsPlainUtf8(tensor.name, length) ||
      !IpcAllZero(tensor.name + length, sizeof tensor.name - length)) {
    return "its name is not 1 to " + std::to_string(LH_STATE_NAME_BYTES_MAX) +
           " bytes of UTF-8 without control characters";
  }
  const uint64_t element = IpcStateElementBytes(tensor.dtype);
  if (element == 0) return "dtype " + std::to_string(tensor.dtype);
  if (tensor.dims > LH_STATE_DIMS_MAX) {
    return std::to_string(tensor.dims) + " dimensions, at most " +
           std::to_string(LH_STATE_DIMS_MAX) + " are possible";
  }
  if ((tensor.flags & ~LH_IPC_ALLOW_UNEQUAL) != 0 || !IpcAllZero(tensor.zero, sizeof tensor.zero)) {
    return "unknown flags";
  }
  uint64_t count = 1;
  bool empty = false;
  for (size_t i = 0; i < LH_STATE_DIMS_MAX; ++i) {
    const uint64_t size = tensor.shape[i];
    if (i >= tensor.dims) {
      if (size != 0) return "a size beyond its dimensions";
      continue;
    }
    if (size > LH_COUNT_MAX) return "too many elements";
    if (size == 0) {
      empty = true;
    } else if (count > LH_COUNT_MAX / size) {
      return "too many elements";
    } else {
      count *= size;
    }
  }
  if (tensor.bytes != (empty ? 0 : count * element)) {
    return "its shape and its " + std::to_string(tensor.bytes) + " bytes do not fit together";
  }
  if (empty && (tensor.data.region != 0 || tensor.data.offset != 0 || tensor.inbox.region != 0 ||
                tensor.inbox.offset != 0)) {
    return "a place for no elements";
  }
  return "";
}

}  // namespace longhaul
