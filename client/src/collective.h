/* The part that all kinds of collectives share: checks the call, stages tensors that are not in the
 * arena, starts the op, and waits for its outcome. */
#ifndef LONGHAUL_CLIENT_COLLECTIVE_H_
#define LONGHAUL_CLIENT_COLLECTIVE_H_

#include "client/src/objects.h"

/* The arguments of a call. Options that the kind does not have are 0. */
struct lhi_collective {
  const char* call; /* name of the public function, for error texts */
  uint8_t kind;     /* lh_wire_kind */
  lh_dtype dtype;
  const void* source;
  void* target;
  uint64_t count;
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  /* reductions */
  lh_reduce_op op;
  lh_order order;
  const double* weight;
  /* kinds with a root or a partner; else root_name is NULL */
  const char* root_name; /* "root", "to" or "from", for error texts */
  uint64_t root_member;
  uint32_t root;
  bool is_root; /* set by the call for a send; else by lhi_collective_start() */
  /* kinds in parts */
  uint32_t world;
  const uint64_t* counts;
  const uint64_t* target_counts;
  /* kinds that can be quantized */
  lh_quantization quantize;
  lh_rounding rounding;
  uint32_t block, codecs;
  float* error;
  float* const* errors;
  bool no_result; /* nobody wants the result */
};

/* Checks the pointers that the caller has passed, and copies its options to *taken, which has
 * `size` bytes. `init` is the name of the macro that initializes them, for error texts. Sets
 * *op_out to NULL. */
lh_status lhi_collective_take(const char* call, const char* init, const lh_comm* comm,
                              const void* options, void* taken, size_t size, lh_op** op_out);
/* Checks the arguments, and starts the op. If the result is not LH_OK, *op_out is unchanged. */
lh_status lhi_collective_start(lh_comm* comm, struct lhi_collective* asked, lh_op** op_out);

/* Checks the arguments of a call that starts an op and waits for it, such as lh_all_reduce(). Call
 * this before the op is started. Sets *op_out to NULL. */
lh_status lhi_collective_may_wait(const char* call, int64_t timeout_ms, lh_op_info_t* info,
                                  lh_op** op_out);
/* Waits for the op, fills *info unless `info` is NULL, frees the op, and returns its outcome. If
 * the op has no outcome within timeout_ms, returns LH_DEADLINE_EXCEEDED; then the op is not freed,
 * and *op_out is the op. */
lh_status lhi_collective_wait(const char* call, lh_op* op, int64_t timeout_ms, lh_op_info_t* info,
                              lh_op** op_out);

#endif /* LONGHAUL_CLIENT_COLLECTIVE_H_ */
