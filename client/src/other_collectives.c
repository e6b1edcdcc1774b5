/* Reduce-scatter, all-gather, broadcast and barrier: the options that only they have. collective.c
 * does the rest. */
#include <string.h>

#include "client/src/collective.h"
#include "client/src/error.h"

static lh_status check_world(const char *call, uint32_t world) {
  if (world != 0 && world <= LH_MEMBERS_MAX) return LH_OK;
  return lhi_fail(
      LH_INVALID_ARGUMENT,
      "%s: world is %u; give the number of members that the tensors are laid out for, 1 "
      "to %d",
      call, (unsigned)world, LH_MEMBERS_MAX);
}

lh_status lh_reduce_scatter_start(lh_comm *comm, const lh_reduce_scatter_options *options,
                                  lh_op **op_out) {
  static const char kCall[] = "lh_reduce_scatter_start";
  lh_reduce_scatter_options o = LH_REDUCE_SCATTER_OPTIONS_INIT;
  struct lhi_collective asked;
  lh_status status = lhi_collective_take(kCall, "LH_REDUCE_SCATTER_OPTIONS_INIT", comm, options,
                                         sizeof o, &o, sizeof o, op_out);
  if (status == LH_OK) status = lhi_collective_check(kCall, o.op, o.min_world);
  if (status == LH_OK) status = check_world(kCall, o.world);
  if (status != LH_OK) return status;
  memset(&asked, 0, sizeof asked);
  asked.call = kCall;
  asked.source = o.source;
  asked.target = o.target;
  asked.count = o.count;
  asked.in_parts = true;
  asked.dtype = o.dtype;
  asked.on_fault = o.on_fault;
  asked.algorithm = o.algorithm;
  asked.asked.kind = LH_WIRE_REDUCE_SCATTER;
  asked.asked.tag = o.tag;
  asked.asked.reduce = (uint8_t)o.op;
  asked.asked.min_world = o.min_world;
  asked.asked.world = (uint16_t)o.world;
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_all_gather_start(lh_comm *comm, const lh_all_gather_options *options, lh_op **op_out) {
  static const char kCall[] = "lh_all_gather_start";
  lh_all_gather_options o = LH_ALL_GATHER_OPTIONS_INIT;
  struct lhi_collective asked;
  lh_status status = lhi_collective_take(kCall, "LH_ALL_GATHER_OPTIONS_INIT", comm, options,
                                         sizeof o, &o, sizeof o, op_out);
  if (status == LH_OK) status = lhi_collective_check(kCall, LH_SUM, o.min_world);
  if (status == LH_OK) status = check_world(kCall, o.world);
  if (status != LH_OK) return status;
  memset(&asked, 0, sizeof asked);
  asked.call = kCall;
  asked.source = o.source;
  asked.target = o.target;
  asked.count = o.count;
  asked.in_parts = true;
  asked.dtype = o.dtype;
  asked.on_fault = o.on_fault;
  asked.algorithm = o.algorithm;
  asked.asked.kind = LH_WIRE_ALL_GATHER;
  asked.asked.tag = o.tag;
  asked.asked.min_world = o.min_world;
  asked.asked.world = (uint16_t)o.world;
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_broadcast_start(lh_comm *comm, const lh_broadcast_options *options, lh_op **op_out) {
  static const char kCall[] = "lh_broadcast_start";
  lh_broadcast_options o = LH_BROADCAST_OPTIONS_INIT;
  struct lhi_collective asked;
  lh_world_info world = LH_WORLD_INFO_INIT;
  lh_status status = lhi_collective_take(kCall, "LH_BROADCAST_OPTIONS_INIT", comm, options,
                                         sizeof o, &o, sizeof o, op_out);
  if (status == LH_OK) status = lhi_collective_check(kCall, LH_SUM, o.min_world);
  if (status == LH_OK) status = lh_world(comm, &world);
  if (status != LH_OK) return status;
  if (o.root_member == 0 && o.root >= world.size) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: root is rank %u, and the group has %u members", kCall,
                    (unsigned)o.root, (unsigned)world.size);
  }
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
  asked.asked.kind = LH_WIRE_BROADCAST;
  asked.asked.tag = o.tag;
  asked.asked.min_world = o.min_world;
  asked.asked.root_is_rank = o.root_member == 0;
  asked.asked.root = o.root_member == 0 ? o.root : o.root_member;
  return lhi_collective_start(comm, &asked, op_out);
}

/* A barrier is an all-reduce of one byte that nobody reads. */
lh_status lh_barrier_start(lh_comm *comm, const lh_barrier_options *options, lh_op **op_out) {
  static const char kCall[] = "lh_barrier_start";
  static uint8_t byte;
  lh_barrier_options o = LH_BARRIER_OPTIONS_INIT;
  struct lhi_collective asked;
  lh_status status = lhi_collective_take(kCall, "LH_BARRIER_OPTIONS_INIT", comm, options, sizeof o,
                                         &o, sizeof o, op_out);
  if (status == LH_OK) status = lhi_collective_check(kCall, LH_SUM, o.min_world);
  if (status != LH_OK) return status;
  memset(&asked, 0, sizeof asked);
  asked.call = kCall;
  asked.source = &byte;
  asked.target = &byte;
  asked.count = 1;
  asked.no_result = true;
  asked.dtype = LH_UINT8;
  asked.on_fault = o.on_fault;
  asked.asked.kind = LH_WIRE_BARRIER;
  asked.asked.reduce = LH_WIRE_MAX;
  asked.asked.tag = o.tag;
  asked.asked.min_world = o.min_world;
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_reduce_scatter(lh_comm *comm, const lh_reduce_scatter_options *options,
                            int64_t timeout_ms, lh_op_info_t *info, lh_op **op_out) {
  static const char kCall[] = "lh_reduce_scatter";
  lh_op *op = NULL;
  lh_status status = lhi_collective_may_wait(kCall, timeout_ms, info, op_out);
  if (status == LH_OK) status = lh_reduce_scatter_start(comm, options, &op);
  if (status != LH_OK || op == NULL) return status;
  return lhi_collective_wait(kCall, op, timeout_ms, info, op_out);
}

lh_status lh_all_gather(lh_comm *comm, const lh_all_gather_options *options, int64_t timeout_ms,
                        lh_op_info_t *info, lh_op **op_out) {
  static const char kCall[] = "lh_all_gather";
  lh_op *op = NULL;
  lh_status status = lhi_collective_may_wait(kCall, timeout_ms, info, op_out);
  if (status == LH_OK) status = lh_all_gather_start(comm, options, &op);
  if (status != LH_OK || op == NULL) return status;
  return lhi_collective_wait(kCall, op, timeout_ms, info, op_out);
}

lh_status lh_broadcast(lh_comm *comm, const lh_broadcast_options *options, int64_t timeout_ms,
                       lh_op_info_t *info, lh_op **op_out) {
  static const char kCall[] = "lh_broadcast";
  lh_op *op = NULL;
  lh_status status = lhi_collective_may_wait(kCall, timeout_ms, info, op_out);
  if (status == LH_OK) status = lh_broadcast_start(comm, options, &op);
  if (status != LH_OK || op == NULL) return status;
  return lhi_collective_wait(kCall, op, timeout_ms, info, op_out);
}

lh_status lh_barrier(lh_comm *comm, const lh_barrier_options *options, int64_t timeout_ms,
                     lh_op_info_t *info, lh_op **op_out) {
  static const char kCall[] = "lh_barrier";
  lh_op *op = NULL;
  lh_status status = lhi_collective_may_wait(kCall, timeout_ms, info, op_out);
  if (status == LH_OK) status = lh_barrier_start(comm, options, &op);
  if (status != LH_OK || op == NULL) return status;
  return lhi_collective_wait(kCall, op, timeout_ms, info, op_out);
}
