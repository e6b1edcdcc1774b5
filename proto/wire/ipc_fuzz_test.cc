// Feeds any bytes as a request, or as an entry of a state's table. The checks must not crash, and
// must not accept a range outside its region.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "proto/wire/ipc_check.h"

namespace {

void CheckTensor(const uint8_t* data) {
  using namespace longhaul;
  lh_ipc_tensor tensor;
  memcpy(&tensor, data, sizeof tensor);
  if (!IpcTensorError(tensor).empty()) return;
  LH_CHECK(strlen(tensor.name) <= LH_STATE_NAME_BYTES_MAX);
  LH_CHECK(tensor.dims <= LH_STATE_DIMS_MAX);
  LH_CHECK(tensor.bytes <= LH_COUNT_MAX * 8);
  uint64_t bytes = IpcStateElementBytes(tensor.dtype);
  for (uint8_t i = 0; i < tensor.dims; ++i) bytes *= tensor.shape[i];
  LH_CHECK(bytes == tensor.bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longhaul;
  if (size == sizeof(lh_ipc_tensor)) CheckTensor(data);
  lh_ipc_request request;
  if (size < sizeof request + 2) return 0;
  memcpy(&request, data, sizeof request);
  const bool greeted = (data[sizeof request] & 1) != 0;
  const size_t descriptors = data[sizeof request] >> 6;
  const uint64_t region_bytes = uint64_t{1} << (data[sizeof request + 1] % 41);
  const std::string error = IpcProtocolError(request, greeted, descriptors);
  if (!error.empty()) return 0;
  if (request.type == LH_IPC_JOIN) {
    LH_CHECK(strlen(request.u.join.run) <= LH_RUN_NAME_BYTES_MAX);
  }
  if (request.type == LH_IPC_SYNC) {
    LH_CHECK(request.u.sync.state != 0);
    LH_CHECK(request.u.sync.strategy <= LH_WIRE_SEND);
  }
  if (request.type == LH_IPC_OP) {
    const auto desc = ParseIpcOp(request.u.op, region_bytes, region_bytes);
    if (desc.ok()) {
      LH_CHECK(desc->bytes() > 0 && desc->bytes() <= region_bytes);
      LH_CHECK(request.u.op.source.offset <= region_bytes - desc->bytes());
      LH_CHECK(request.u.op.target.offset <= region_bytes - desc->bytes());
    }
  }
  return 0;
}
