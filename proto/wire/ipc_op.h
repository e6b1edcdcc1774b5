// Reads the request for a collective (lh_ipc_op in proto/wire/ipc.h). Pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "proto/wire/ipc.h"
#include "proto/wire/op_desc.h"

namespace longhaul {

// One tensor of an op, or one piece of a list of tensors.
struct IpcPiece {
  DType dtype = DType::kFloat32;
  uint64_t count = 0;  // elements, as in lh_ipc_piece
  // Region 0: the member has no such tensor, or the tensor has no elements.
  lh_ipc_range source = {};
  lh_ipc_range target = {};
  lh_ipc_range error = {};
};

struct IpcOp {
  OpDesc desc;
  std::optional<uint64_t> root_rank;  // set: the root or partner is the member of this rank
  bool is_root = false;
  MemberId partner;                    // kSendRecv without `root_rank`
  std::vector<MemberId> participants;  // rising; empty: all members
  OpTerms terms;
  std::vector<IpcPiece> pieces;  // at least one
  std::string outline;           // of a list; see OutlineFault()
};

// The name of an op: what has to be right in a request that is refused, so that the other
// participants can be told.
struct IpcOpName {
  OpKind kind = OpKind::kAllReduce;
  std::optional<uint64_t> root_rank;
  bool is_root = false;
  MemberId partner;
  std::vector<MemberId> participants;
  std::string refusal;  // the text in the table
};
// `table` as in ParseIpcOp(). nullopt: the request names no op.
std::optional<IpcOpName> NameOf(const lh_ipc_op& op, const std::vector<uint8_t>& table);

// The bytes of the table that comes with the op. SIZE_MAX: a number in the request is too large.
uint64_t IpcTableBytes(const lh_ipc_op& op);

// Returns the size of an arena region; nullopt: the region is unknown.
using RegionBytes = std::function<std::optional<uint64_t>(uint64_t region)>;

// Returns the op that a request asks for. `table` is a copy of IpcTableBytes() bytes.
// InvalidArgument says which field is wrong, or which range does not lie inside its region.
absl::StatusOr<IpcOp> ParseIpcOp(const lh_ipc_op& op, const std::vector<uint8_t>& table,
                                 const RegionBytes& region_bytes);

}  // namespace longhaul
