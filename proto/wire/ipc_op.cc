#include "proto/wire/ipc_op.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/status/status.h"
#include "base/digest.h"
#include "base/fields.h"
#include "base/status_macros.h"
#include "proto/wire/ipc_fields.h"

namespace longhaul {
namespace {

absl::Status Refuse(const lh_ipc_op& op, const std::string& what) {
  const bool known = NamesOf(OpKind()).Has(op.kind);
  const char* const kind = known ? Name(static_cast<OpKind>(op.kind)) : "op";
  return absl::InvalidArgumentError(std::string(kind) + " refused: " + what);
}

std::string ParticipantsFault(const std::vector<MemberId>& ids, MemberId root) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!ids[i]) return "its participants have the member id 0, which nobody has";
    if (i == 0 || ids[i - 1] < ids[i]) continue;
    return ids[i - 1] == ids[i] ? "its participants have member " + ToString(ids[i]) +
                                      " twice; give each id of a member once"
                                : "its participants are not in rising order";
  }
  if (ids.empty() || !root || std::binary_search(ids.begin(), ids.end(), root)) return "";
  return "the root, member " + ToString(root) + ", is not among its participants";
}

// Reads the table, part after part.
class TableReader {
 public:
  explicit TableReader(const std::vector<uint8_t>& table) : table_(table) {}

  std::vector<uint64_t> Numbers(size_t count) {
    std::vector<uint64_t> numbers(count);
    Take(numbers.data(), 8 * count);
    return numbers;
  }
  lh_ipc_piece Piece() {
    lh_ipc_piece piece;
    Take(&piece, sizeof piece);
    return piece;
  }

 private:
  void Take(void* to, size_t bytes) {
    if (bytes > 0) std::memcpy(to, table_.data() + at_, bytes);
    at_ += bytes;
  }

  const std::vector<uint8_t>& table_;
  size_t at_ = 0;
};

std::string TermsFault(const OpTerms& terms, const OpDesc& desc, bool is_root) {
  if (!desc.unequal) {
    return terms.gives.empty() && terms.gets.empty() ? ""
                                                     : "lengths of parts, and unequal is not set";
  }
  const auto wanted = [&](Extent extent) -> size_t {
    return extent == Extent::kWhole ? desc.world : extent == Extent::kPart ? 1 : 0;
  };
  if (terms.gives.size() != wanted(SourceOf(desc.kind, is_root))) {
    return Refusal("gives", std::to_string(terms.gives.size()),
                   std::to_string(wanted(SourceOf(desc.kind, is_root))));
  }
  if (terms.gets.size() != wanted(TargetOf(desc.kind, is_root))) {
    return Refusal("gets", std::to_string(terms.gets.size()),
                   std::to_string(wanted(TargetOf(desc.kind, is_root))));
  }
  for (const std::vector<uint64_t>* lengths : {&terms.gives, &terms.gets}) {
    uint64_t sum = 0;
    for (const uint64_t length : *lengths) {
      if (length > LH_COUNT_MAX - sum) return "its parts have more than 2^48 elements together";
      sum += length;
    }
  }
  return "";
}

// The bytes of a member's tensor.
uint64_t BytesOf(const OpDesc& desc, const IpcPiece& piece, Extent extent,
                 const std::vector<uint64_t>& lengths) {
  if (extent == Extent::kNone) return 0;
  if (desc.unequal) {
    return SizeOf(piece.dtype) * std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
  }
  const uint64_t parts = extent == Extent::kWhole && desc.InParts() ? desc.world : 1;
  return piece.count * SizeOf(piece.dtype) * parts;
}

// A tensor in the arena.
struct Place {
  uint64_t region = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Checks the ranges of all pieces.
std::string RangesFault(const IpcOp& op, const RegionBytes& region_bytes) {
  const Extent source = SourceOf(op.desc.kind, op.is_root);
  const Extent target = TargetOf(op.desc.kind, op.is_root);
  const bool may_be_in_place =
      op.desc.kind == OpKind::kAllReduce || op.desc.kind == OpKind::kBarrier ||
      op.desc.kind == OpKind::kBroadcast || op.desc.kind == OpKind::kReduce;
  std::vector<Place> places;
  size_t in_place = 0;
  size_t apart = 0;
  size_t errors = 0;
  size_t with_elements = 0;
  for (const IpcPiece& piece : op.pieces) {
    const auto take = [&](const char* name, const lh_ipc_range& range,
                          uint64_t bytes) -> std::string {
      if (bytes == 0) {
        return range.region == 0 && range.offset == 0
                   ? ""
                   : std::string("a place for its ") + name + ", which has no elements";
      }
      const std::optional<uint64_t> whole = region_bytes(range.region);
      if (!whole) return "unknown arena region";
      if (range.offset > *whole || bytes > *whole - range.offset) {
        return std::string(name) + " goes beyond its region";
      }
      if (range.offset % SizeOf(piece.dtype) != 0) {
        return "source and target must be aligned to their elements";
      }
      places.push_back({range.region, range.offset, range.offset + bytes});
      return "";
    };
    const uint64_t source_bytes = BytesOf(op.desc, piece, source, op.terms.gives);
    if (piece.error.region == 0 && piece.error.offset != 0) return "unknown arena region";
    if (piece.error.region != 0) {
      const uint64_t error_bytes = source_bytes / SizeOf(piece.dtype) * sizeof(float);
      if (std::string fault = take("error", piece.error, error_bytes); !fault.empty()) return fault;
      if (piece.error.offset % sizeof(float) != 0) return "error must be aligned to 4 bytes";
      ++errors;
    }
    with_elements += source_bytes > 0 ? 1 : 0;
    const uint64_t target_bytes = BytesOf(op.desc, piece, target, op.terms.gets);
    if (std::string fault = take("source", piece.source, source_bytes); !fault.empty()) {
      return fault;
    }
    const bool same = source_bytes > 0 && source_bytes == target_bytes &&
                      piece.source.region == piece.target.region &&
                      piece.source.offset == piece.target.offset;
    if (same && may_be_in_place) {
      ++in_place;
      continue;
    }
    apart += target_bytes > 0 ? 1 : 0;
    if (std::string fault = take("target", piece.target, target_bytes); !fault.empty()) {
      return fault;
    }
  }
  if (errors > 0 && !(op.desc.Encodes() && Reduces(op.desc.kind))) {
    return "an error is given, and only a quantized all-reduce or reduce-scatter keeps one";
  }
  if (errors > 0 && IsAuto(op.desc.quantization)) {
    return "an error is given, and peerd chooses the codec; name the codec to keep its errors";
  }
  if (errors > 0 && errors != with_elements) {
    return "an error for some pieces, and none for others";
  }
  if (in_place > 0 && apart > 0) return "some pieces are in place, and others are not";
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::pair(a.region, a.begin) < std::pair(b.region, b.begin);
  });
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i - 1].region != places[i].region || places[i - 1].end <= places[i].begin) continue;
    if (errors > 0) return "source, target and error overlap";
    return may_be_in_place ? "source and target overlap without being equal"
                           : "source and target overlap";
  }
  return "";
}

// Takes the pieces of a list from the table, and sets what the description says of them.
absl::Status TakePieces(const lh_ipc_op& op, TableReader* table, IpcOp* taken) {
  OpDesc& desc = taken->desc;
  Digester digest;
  digest.Add(op.list);
  uint64_t parts = desc.InParts() ? desc.world : 1;
  if (desc.kind == OpKind::kAllToAll) parts *= parts;
  for (uint32_t i = 0; i < op.pieces; ++i) {
    const lh_ipc_piece asked = table->Piece();
    const auto refuse = [&](const std::string& what) {
      return Refuse(op, "piece " + std::to_string(i) + ": " + what);
    };
    if (!NamesOf(DType()).Has(asked.dtype)) {
      return refuse(Refusal("dtype", std::to_string(asked.dtype), "known"));
    }
    for (const uint8_t byte : asked.zero) {
      if (byte != 0) return refuse("reserved bytes are not zero");
    }
    const auto dtype = static_cast<DType>(asked.dtype);
    if (Reduces(desc.kind)) {
      const std::string fault = ReductionFault(dtype, desc.reduce, desc.weighted);
      if (!fault.empty()) return refuse(fault);
    }
    if (desc.Encodes()) {
      const std::string fault = QuantizedDTypeFault(desc.quantization, dtype);
      if (!fault.empty()) return refuse(fault);
    }
    if (asked.count > LH_COUNT_MAX / SizeOf(dtype) / std::max<uint64_t>(parts, 1)) {
      return refuse("its " + std::to_string(asked.count) + " elements are too many");
    }
    desc.list_bytes += (asked.count * SizeOf(dtype) * parts + 63) / 64 * 64;
    if (desc.list_bytes > LH_COUNT_MAX) return refuse("the tensors are too large together");
    digest.Add(uint64_t{asked.dtype}).Add(asked.count);
    taken->pieces.push_back({dtype, asked.count, asked.source, asked.target, asked.error});
  }
  desc.list = std::max<uint64_t>(1, digest.value());
  desc.dtype = taken->pieces.front().dtype;
  return absl::OkStatus();
}

}  // namespace

std::optional<IpcOpName> NameOf(const lh_ipc_op& op, const std::vector<uint8_t>& table) {
  if (!NamesOf(OpKind()).Has(op.kind)) return std::nullopt;
  IpcOpName name;
  name.kind = static_cast<OpKind>(op.kind);
  name.is_root = (op.flags & LH_IPC_IS_ROOT) != 0;
  if (name.kind == OpKind::kSendRecv) {
    if (op.participants != 0) return std::nullopt;
    if ((op.flags & LH_IPC_ROOT_IS_RANK) != 0) {
      name.root_rank = op.root;
    } else if (op.root == 0) {
      return std::nullopt;
    } else {
      name.partner = MemberId(op.root);
    }
  }
  TableReader reader(table);
  for (const uint64_t id : reader.Numbers(op.participants)) name.participants.emplace_back(id);
  if (!ParticipantsFault(name.participants, MemberId()).empty()) return std::nullopt;
  name.refusal.assign(table.end() - op.refusal, table.end());
  return name;
}

uint64_t IpcTableBytes(const lh_ipc_op& op) {
  if (op.participants > LH_MEMBERS_MAX || op.gives > LH_MEMBERS_MAX || op.gets > LH_MEMBERS_MAX ||
      op.pieces > LH_PIECES_MAX || op.outline > LH_OUTLINE_BYTES_MAX) {
    return UINT64_MAX;
  }
  return 8 * (uint64_t{op.participants} + op.gives + op.gets) + sizeof(lh_ipc_piece) * op.pieces +
         op.outline + op.refusal;
}

absl::StatusOr<IpcOp> ParseIpcOp(const lh_ipc_op& op, const std::vector<uint8_t>& table,
                                 const RegionBytes& region_bytes) {
  IpcOp taken;
  OpDesc& desc = taken.desc;
  std::string fault = TakeFields(op, &desc);
  // 0 and 1 mean the same, because one member is always there.
  if (desc.min_world == 1) desc.min_world = 0;
  if (!fault.empty()) return Refuse(op, fault);
  if (op.refusal != 0) return Refuse(op, "a refused op has no tensors");
  constexpr uint8_t kFlags = LH_IPC_ROOT_IS_RANK | LH_IPC_IS_ROOT;
  if ((op.flags & ~kFlags) != 0) {
    return Refuse(op, Refusal("flags", std::to_string(op.flags), "0 to 3"));
  }
  if (!NamesOf(OpKind()).Has(op.kind)) {
    return Refuse(op, Refusal("kind", std::to_string(op.kind), "known"));
  }
  taken.is_root = (op.flags & LH_IPC_IS_ROOT) != 0;
  const bool send = desc.kind == OpKind::kSendRecv;
  if (HasRoot(desc.kind) || send) {
    if ((op.flags & LH_IPC_ROOT_IS_RANK) != 0) {
      taken.root_rank = op.root;
    } else if (op.root == 0) {
      return Refuse(op, Refusal("root", "0", "a member"));
    } else {
      (send ? taken.partner : desc.root) = MemberId(op.root);
    }
  } else if (op.flags != 0 || op.root != 0) {
    return Refuse(op, "a root, and this kind has none");
  }
  if (send && op.participants != 0) return Refuse(op, "participants besides its two members");
  if ((op.pieces == 0) != (op.list == 0)) return Refuse(op, "list and pieces do not fit together");
  desc.list = 0;
  TableReader reader(table);
  for (const uint64_t id : reader.Numbers(op.participants)) taken.participants.emplace_back(id);
  fault = ParticipantsFault(taken.participants, desc.root);
  if (!fault.empty()) return Refuse(op, fault);
  taken.terms.gives = reader.Numbers(op.gives);
  taken.terms.gets = reader.Numbers(op.gets);
  if (op.pieces != 0) {
    if (op.count != 0)
      return Refuse(op, Refusal("count", std::to_string(op.count), "0 with pieces"));
    LH_RETURN_IF_ERROR(TakePieces(op, &reader, &taken));
    taken.outline.assign(table.end() - op.outline, table.end());
    fault = OutlineFault(taken.outline);
    if (!fault.empty()) return Refuse(op, fault);
  } else {
    if (op.outline != 0) return Refuse(op, "an outline, and no list");
    taken.pieces.push_back({desc.dtype, desc.count, op.source, op.target, op.error});
  }
  taken.terms.weight = op.weight;
  if (!(desc.weighted ? std::isfinite(op.weight) && op.weight >= 0 : op.weight == 0)) {
    return Refuse(op, "weight is " + std::to_string(op.weight) + ", not " +
                          (desc.weighted ? "a finite number, 0 or more" : "0 without weighted"));
  }
  if (!desc.weighted) taken.terms.weight = 1;
  fault = FaultIn(desc);
  if (fault.empty()) fault = TermsFault(taken.terms, desc, taken.is_root);
  if (fault.empty()) fault = RangesFault(taken, region_bytes);
  if (!fault.empty()) return Refuse(op, fault);
  return taken;
}

}  // namespace longhaul
