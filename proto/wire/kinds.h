/* How the kinds of collectives differ, and how long their elements are. C99, because the C client
 * includes this file, as peerd does.
 *
 *   kind                the whole                     inputs            results
 *   all-reduce, barrier one tensor                    added up          everybody gets the whole
 *   reduce-scatter      a part for each member        added up          each member gets its part
 *   reduce              one tensor                    added up          the root gets the whole
 *   all-gather          a part from each member       put side by side  everybody gets the whole
 *   gather              a part from each member       put side by side  the root gets the whole
 *   broadcast           the tensor of the root        -                 everybody gets the whole
 *   scatter             the tensor of the root        -                 each member gets its part
 *   all-to-all          a part for each pair          -                 each member gets N parts
 *   send-recv           the tensor of the sender      -                 the receiver gets the whole
 */
#ifndef LONGHAUL_PROTO_WIRE_KINDS_H_
#define LONGHAUL_PROTO_WIRE_KINDS_H_

#include <stdint.h>

#include "proto/wire/types.h"

#if defined(__cplusplus)
#define LH_KINDS_TABLE inline constexpr
#define LH_KINDS_FUNCTION constexpr
#else
#define LH_KINDS_TABLE static const
#define LH_KINDS_FUNCTION static inline
#endif

/* How many parts a tensor of a member has: none because the member does not need it, one, or one
 * for each member. A tensor of a kind that is not in parts is whole, and one part. */
enum lh_wire_extent { LH_WIRE_NOTHING = 0, LH_WIRE_PART = 1, LH_WIRE_WHOLE = 2 };

struct lh_kind {
  uint8_t reduces; /* inputs are added up */
  uint8_t gathers; /* results go to members that do not own them */
  /* The tensors are laid out for a number of members, which may differ from the number that takes
   * part. */
  uint8_t in_parts;
  uint8_t direct; /* each part goes to one member only, so straight from its owner to that member */
  uint8_t has_root;
  uint8_t source[2]; /* lh_wire_extent; [1]: of the root, or of the sender */
  uint8_t target[2];
};

LH_KINDS_TABLE struct lh_kind LH_KINDS[] = {
    /* no kind */
    {0, 1, 0, 0, 0, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}},
    /* all-reduce */
    {1, 1, 0, 0, 0, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}},
    /* reduce-scatter */
    {1, 0, 1, 0, 0, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_PART, LH_WIRE_PART}},
    /* all-gather */
    {0, 1, 1, 0, 0, {LH_WIRE_PART, LH_WIRE_PART}, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}},
    /* broadcast */
    {0, 1, 0, 0, 1, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}},
    /* barrier */
    {1, 1, 0, 0, 0, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}},
    /* reduce */
    {1, 0, 0, 0, 1, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_NOTHING, LH_WIRE_WHOLE}},
    /* gather */
    {0, 1, 1, 1, 1, {LH_WIRE_PART, LH_WIRE_PART}, {LH_WIRE_NOTHING, LH_WIRE_WHOLE}},
    /* scatter */
    {0, 1, 1, 1, 1, {LH_WIRE_NOTHING, LH_WIRE_WHOLE}, {LH_WIRE_PART, LH_WIRE_PART}},
    /* all-to-all */
    {0, 1, 1, 1, 0, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}, {LH_WIRE_WHOLE, LH_WIRE_WHOLE}},
    /* send-recv; its partner is no root */
    {0, 1, 0, 1, 0, {LH_WIRE_NOTHING, LH_WIRE_WHOLE}, {LH_WIRE_WHOLE, LH_WIRE_NOTHING}},
};

LH_KINDS_FUNCTION const struct lh_kind* lh_kind_of(int kind) {
  return &LH_KINDS[kind > 0 && kind < LH_WIRE_KIND_END ? kind : 0];
}

/* The bytes of one element. 0: there is no such dtype. */
LH_KINDS_FUNCTION uint32_t lh_wire_dtype_bytes(int dtype) {
  switch (dtype) {
    case LH_WIRE_UINT8:
    case LH_WIRE_INT8:
    case LH_WIRE_BOOL:
    case LH_WIRE_FLOAT8_E4M3:
    case LH_WIRE_FLOAT8_E5M2:
      return 1;
    case LH_WIRE_UINT16:
    case LH_WIRE_INT16:
    case LH_WIRE_FLOAT16:
    case LH_WIRE_BFLOAT16:
      return 2;
    case LH_WIRE_UINT32:
    case LH_WIRE_INT32:
    case LH_WIRE_FLOAT32:
      return 4;
    case LH_WIRE_UINT64:
    case LH_WIRE_INT64:
    case LH_WIRE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

#if defined(__cplusplus)
static_assert(sizeof LH_KINDS == LH_WIRE_KIND_END * sizeof(struct lh_kind), "a row for each kind");
#endif

#endif /* LONGHAUL_PROTO_WIRE_KINDS_H_ */
