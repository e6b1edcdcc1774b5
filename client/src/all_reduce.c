/* All-reduces: the options that only they have. collective.c does the rest. */
#include <string.h>

#include "client/src/collective.h"
#include "client/src/error.h"

#define LHI_ALL_REDUCE_FIRST_BYTES (offsetof(lh_all_reduce_options, on_fault) + sizeof(lh_on_fault))

lh_status lh_all_reduce_start(lh_comm *comm, const lh_all_reduce_options *options, lh_op **op_out) {
  static const char kCall[] = "lh_all_reduce_start";
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  struct lhi_collective asked;
  lh_status status = lhi_collective_take(kCall, "LH_ALL_REDUCE_OPTIONS_INIT", comm, options,
                                         LHI_ALL_REDUCE_FIRST_BYTES, &o, sizeof o, op_out);
  if (status == LH_OK) status = lhi_collective_check(kCall, o.op, o.min_world);
  if (status != LH_OK) return status;
  memset(&asked, 0, sizeof asked);
  asked.call = kCall;
  asked.source = o.source;
  asked.target = o.target;
  asked.count = o.count;
  asked.slices = o.slices;
  asked.slice_count = o.slice_count;
  asked.dtype = o.dtype;
  asked.on_fault = o.on_fault;
  asked.algorithm = o.algorithm;
  asked.asked.kind = LH_WIRE_ALL_REDUCE;
  asked.asked.tag = o.tag;
  asked.asked.reduce = (uint8_t)o.op;
  asked.asked.min_world = o.min_world;
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_all_reduce(lh_comm *comm, const lh_all_reduce_options *options, int64_t timeout_ms,
                        lh_op_info_t *info, lh_op **op_out) {
  static const char kCall[] = "lh_all_reduce";
  lh_op *op = NULL;
  lh_status status = lhi_collective_may_wait(kCall, timeout_ms, info, op_out);
  if (status == LH_OK) status = lh_all_reduce_start(comm, options, &op);
  /* With LH_OK there is always an op. clang's analyser cannot see that. */
  if (status != LH_OK || op == NULL) return status;
  return lhi_collective_wait(kCall, op, timeout_ms, info, op_out);
}
