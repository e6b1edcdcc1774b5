// Feeds any bytes as a request, with the table of an op behind it, or as an entry of a state's
// table. The checks must not crash, and must not accept a range outside its region.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "base/check.h"
#include "proto/wire/ipc_check.h"
#include "proto/wire/ipc_op.h"

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

// `bytes`: the table, as far as it is there; the rest is zeros.
void CheckOp(const lh_ipc_op& asked, const uint8_t* bytes, size_t size, uint64_t region_bytes) {
  using namespace longhaul;
  const uint64_t table_bytes = IpcTableBytes(asked);
  if (table_bytes > 1 << 16) return;
  std::vector<uint8_t> table(table_bytes);
  std::copy_n(bytes, std::min<uint64_t>(size, table_bytes), table.begin());
  // Only the regions 1 to 3 are there.
  const auto op = ParseIpcOp(asked, table, [&](uint64_t region) -> std::optional<uint64_t> {
    return region >= 1 && region <= 3 ? std::optional(region_bytes) : std::nullopt;
  });
  if (!op.ok()) return;
  LH_CHECK(FaultIn(op->desc).empty());
  LH_CHECK(op->pieces.size() == std::max<uint32_t>(asked.pieces, 1));
  LH_CHECK(op->participants.size() == asked.participants);
  const auto check = [&](const IpcPiece& piece, const lh_ipc_range& range, Extent extent,
                         const std::vector<uint64_t>& lengths, size_t element_bytes) {
    const uint64_t parts = extent == Extent::kNone                          ? 0
                           : extent == Extent::kWhole && op->desc.InParts() ? op->desc.world
                                                                            : 1;
    uint64_t count = piece.count * parts;
    if (op->desc.unequal) {
      LH_CHECK(lengths.size() == parts);
      count = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
    }
    const uint64_t bytes = count * element_bytes;
    LH_CHECK((bytes == 0) == (range.region == 0));
    LH_CHECK(bytes <= region_bytes && range.offset <= region_bytes - bytes);
  };
  for (const IpcPiece& piece : op->pieces) {
    const Extent source = SourceOf(op->desc.kind, op->is_root);
    const Extent target = TargetOf(op->desc.kind, op->is_root);
    check(piece, piece.source, source, op->terms.gives, SizeOf(piece.dtype));
    check(piece, piece.target, target, op->terms.gets, SizeOf(piece.dtype));
    if (piece.error.region == 0) continue;
    LH_CHECK(op->desc.Encodes() && Reduces(op->desc.kind) && !IsAuto(op->desc.quantization));
    check(piece, piece.error, source, op->terms.gives, sizeof(float));
  }
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
    CheckOp(request.u.op, data + sizeof request + 2, size - sizeof request - 2, region_bytes);
  }
  return 0;
}
