/* The part that all kinds of collectives share: checks the call, stages tensors that are not in the
 * arena, starts the op, and waits for its outcome. */
#ifndef LONGHAUL_CLIENT_COLLECTIVE_H_
#define LONGHAUL_CLIENT_COLLECTIVE_H_

#include "client/src/objects.h"

/* The arguments of a call. */
struct lhi_collective {
  const char *call; /* name of the public function, for error texts */
  const void *source;
  void *target; /* equal to source, or without overlap, unless `in_parts` */
  uint64_t count;
  const lh_slice *slices; /* NULL: source and target are one tensor each. Else they are NULL, and
                             `count` is 0 */
  uint64_t slice_count;
  bool in_parts;  /* `asked` has a world, and source or target is one member's part of `count` */
  bool no_result; /* nobody wants the result */
  lh_dtype dtype;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  /* Kind, tag, and the options that only this kind has. lhi_collective_start() fills in the other
   * fields from those above. */
  struct lh_ipc_op asked;
};

/* Checks the pointers that the caller has passed, and copies its options to *taken, which has
 * `size` bytes. `first_bytes` is the size of the options in the first release. `init` is the name
 * of the macro that initializes them, for error texts. Sets *op_out to NULL. */
lh_status lhi_collective_take(const char *call, const char *init, const lh_comm *comm,
                              const void *options, size_t first_bytes, void *taken, size_t size,
                              lh_op **op_out);
/* Checks two options of the caller. */
lh_status lhi_collective_check(const char *call, lh_reduce_op op, uint32_t min_world);
/* Checks the fields that all kinds have, and starts the op. If the result is not LH_OK, *op_out is
 * unchanged. */
lh_status lhi_collective_start(lh_comm *comm, const struct lhi_collective *asked, lh_op **op_out);

/* Checks the arguments of a call that starts an op and waits for it, such as lh_all_reduce(). Call
 * this before the op is started. Sets *op_out to NULL. */
lh_status lhi_collective_may_wait(const char *call, int64_t timeout_ms, lh_op_info_t *info,
                                  lh_op **op_out);
/* Waits for the op, fills *info unless `info` is NULL, frees the op, and returns its outcome. If
 * the op has no outcome within timeout_ms, returns LH_DEADLINE_EXCEEDED; then the op is not freed,
 * and *op_out is the op. */
lh_status lhi_collective_wait(const char *call, lh_op *op, int64_t timeout_ms, lh_op_info_t *info,
                              lh_op **op_out);

#endif /* LONGHAUL_CLIENT_COLLECTIVE_H_ */
