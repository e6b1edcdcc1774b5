/* How the kinds of collectives differ, for this member. The same facts as in proto/wire/op_desc.h,
 * which is C++. */
#ifndef LONGHAUL_CLIENT_KINDS_H_
#define LONGHAUL_CLIENT_KINDS_H_

#include <stdbool.h>

#include "proto/wire/types.h"

/* How many parts a tensor has: none because this member does not need it, one, or one for each
 * member. A tensor of a kind that is not in parts is whole, and one part. */
enum lhi_extent { LHI_NONE, LHI_PART, LHI_WHOLE };

static inline bool lhi_reduces(int kind) {
  return kind == LH_WIRE_ALL_REDUCE || kind == LH_WIRE_BARRIER || kind == LH_WIRE_REDUCE_SCATTER ||
         kind == LH_WIRE_REDUCE;
}
static inline bool lhi_in_parts(int kind) {
  return kind == LH_WIRE_REDUCE_SCATTER || kind == LH_WIRE_ALL_GATHER || kind == LH_WIRE_GATHER ||
         kind == LH_WIRE_SCATTER || kind == LH_WIRE_ALL_TO_ALL;
}
/* Its parts go straight to their receiver. */
static inline bool lhi_direct(int kind) {
  return kind == LH_WIRE_GATHER || kind == LH_WIRE_SCATTER || kind == LH_WIRE_ALL_TO_ALL ||
         kind == LH_WIRE_SEND_RECV;
}

/* `is_root`: of this member. Of a send: it is the sender. */
static inline enum lhi_extent lhi_source_of(int kind, bool is_root) {
  switch (kind) {
    case LH_WIRE_ALL_GATHER:
    case LH_WIRE_GATHER:
      return LHI_PART;
    case LH_WIRE_SCATTER:
    case LH_WIRE_SEND_RECV:
      return is_root ? LHI_WHOLE : LHI_NONE;
    default:
      return LHI_WHOLE;
  }
}
static inline enum lhi_extent lhi_target_of(int kind, bool is_root) {
  switch (kind) {
    case LH_WIRE_REDUCE_SCATTER:
    case LH_WIRE_SCATTER:
      return LHI_PART;
    case LH_WIRE_REDUCE:
    case LH_WIRE_GATHER:
      return is_root ? LHI_WHOLE : LHI_NONE;
    case LH_WIRE_SEND_RECV:
      return is_root ? LHI_NONE : LHI_WHOLE;
    default:
      return LHI_WHOLE;
  }
}

#endif /* LONGHAUL_CLIENT_KINDS_H_ */
