/* The calls of all collectives: which options each of them has. collective.c does the rest. */
#include <string.h>

#include "client/src/collective.h"
#include "client/src/error.h"

/* Begins lh_NAME_start(): copies the options to `o`, and those that all kinds have to `asked`. */
#define BEGIN(name, init, wire_kind)                                                         \
  lh_##name##_options o = init;                                                              \
  struct lhi_collective asked;                                                               \
  const lh_status taken =                                                                    \
      lhi_collective_take("lh_" #name "_start", #init, comm, options, &o, sizeof o, op_out); \
  if (taken != LH_OK) return taken;                                                          \
  memset(&asked, 0, sizeof asked);                                                           \
  asked.call = "lh_" #name "_start";                                                         \
  asked.kind = (wire_kind);                                                                  \
  asked.tag = o.tag;                                                                         \
  asked.on_fault = o.on_fault

#define TAKE_TENSORS()               \
  asked.dtype = o.dtype;             \
  asked.count = o.count;             \
  asked.slices = o.slices;           \
  asked.slice_count = o.slice_count; \
  asked.algorithm = o.algorithm

#define TAKE_MEMBERS()                           \
  asked.participants = o.participants;           \
  asked.participant_count = o.participant_count; \
  asked.min_world = o.min_world

/* What all kinds with tensors have, but send and receive. */
#define TAKE_COMMON()      \
  TAKE_TENSORS();          \
  TAKE_MEMBERS();          \
  asked.source = o.source; \
  asked.target = o.target

#define TAKE_REDUCTION() \
  asked.op = o.op;       \
  asked.order = o.order; \
  asked.weight = o.weight

#define TAKE_ROOT()         \
  asked.root_name = "root"; \
  asked.root = o.root;      \
  asked.root_member = o.root_member

#define TAKE_PARTS()     \
  asked.world = o.world; \
  asked.counts = o.counts

#define TAKE_CODEC()           \
  asked.quantize = o.quantize; \
  asked.rounding = o.rounding; \
  asked.block = o.block;       \
  asked.codecs = o.codecs

#define TAKE_ERRORS()    \
  asked.error = o.error; \
  asked.errors = o.errors

lh_status lh_all_reduce_start(lh_comm* comm, const lh_all_reduce_options* options, lh_op** op_out) {
  BEGIN(all_reduce, LH_ALL_REDUCE_OPTIONS_INIT, LH_WIRE_ALL_REDUCE);
  TAKE_COMMON();
  TAKE_REDUCTION();
  TAKE_CODEC();
  TAKE_ERRORS();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_reduce_start(lh_comm* comm, const lh_reduce_options* options, lh_op** op_out) {
  BEGIN(reduce, LH_REDUCE_OPTIONS_INIT, LH_WIRE_REDUCE);
  TAKE_COMMON();
  TAKE_REDUCTION();
  TAKE_ROOT();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_reduce_scatter_start(lh_comm* comm, const lh_reduce_scatter_options* options,
                                  lh_op** op_out) {
  BEGIN(reduce_scatter, LH_REDUCE_SCATTER_OPTIONS_INIT, LH_WIRE_REDUCE_SCATTER);
  TAKE_COMMON();
  TAKE_REDUCTION();
  TAKE_PARTS();
  TAKE_CODEC();
  TAKE_ERRORS();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_all_gather_start(lh_comm* comm, const lh_all_gather_options* options, lh_op** op_out) {
  BEGIN(all_gather, LH_ALL_GATHER_OPTIONS_INIT, LH_WIRE_ALL_GATHER);
  TAKE_COMMON();
  TAKE_PARTS();
  TAKE_CODEC();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_broadcast_start(lh_comm* comm, const lh_broadcast_options* options, lh_op** op_out) {
  BEGIN(broadcast, LH_BROADCAST_OPTIONS_INIT, LH_WIRE_BROADCAST);
  TAKE_COMMON();
  TAKE_ROOT();
  TAKE_CODEC();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_gather_start(lh_comm* comm, const lh_gather_options* options, lh_op** op_out) {
  BEGIN(gather, LH_GATHER_OPTIONS_INIT, LH_WIRE_GATHER);
  TAKE_COMMON();
  TAKE_ROOT();
  TAKE_PARTS();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_scatter_start(lh_comm* comm, const lh_scatter_options* options, lh_op** op_out) {
  BEGIN(scatter, LH_SCATTER_OPTIONS_INIT, LH_WIRE_SCATTER);
  TAKE_COMMON();
  TAKE_ROOT();
  TAKE_PARTS();
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_all_to_all_start(lh_comm* comm, const lh_all_to_all_options* options, lh_op** op_out) {
  BEGIN(all_to_all, LH_ALL_TO_ALL_OPTIONS_INIT, LH_WIRE_ALL_TO_ALL);
  TAKE_COMMON();
  TAKE_PARTS();
  asked.target_counts = o.target_counts;
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_send_start(lh_comm* comm, const lh_send_options* options, lh_op** op_out) {
  BEGIN(send, LH_SEND_OPTIONS_INIT, LH_WIRE_SEND_RECV);
  TAKE_TENSORS();
  asked.source = o.source;
  asked.root_name = "to";
  asked.root = o.to;
  asked.root_member = o.to_member;
  asked.is_root = true;
  return lhi_collective_start(comm, &asked, op_out);
}

lh_status lh_recv_start(lh_comm* comm, const lh_recv_options* options, lh_op** op_out) {
  BEGIN(recv, LH_RECV_OPTIONS_INIT, LH_WIRE_SEND_RECV);
  TAKE_TENSORS();
  asked.target = o.target;
  asked.root_name = "from";
  asked.root = o.from;
  asked.root_member = o.from_member;
  return lhi_collective_start(comm, &asked, op_out);
}

/* A barrier is an all-reduce of one byte that nobody reads. */
lh_status lh_barrier_start(lh_comm* comm, const lh_barrier_options* options, lh_op** op_out) {
  static uint8_t byte;
  BEGIN(barrier, LH_BARRIER_OPTIONS_INIT, LH_WIRE_BARRIER);
  TAKE_MEMBERS();
  asked.source = &byte;
  asked.target = &byte;
  asked.count = 1;
  asked.no_result = true;
  asked.dtype = LH_UINT8;
  asked.op = LH_MAX;
  return lhi_collective_start(comm, &asked, op_out);
}

/* Defines lh_NAME(): lh_NAME_start() and a wait. With LH_OK there is always an op. clang's analyser
 * cannot see that. */
#define WAITING(name)                                                                        \
  lh_status lh_##name(lh_comm* comm, const lh_##name##_options* options, int64_t timeout_ms, \
                      lh_op_info_t* info, lh_op** op_out) {                                  \
    static const char kCall[] = "lh_" #name;                                                 \
    lh_op* op = NULL;                                                                        \
    lh_status status = lhi_collective_may_wait(kCall, timeout_ms, info, op_out);             \
    if (status == LH_OK) status = lh_##name##_start(comm, options, &op);                     \
    if (status != LH_OK || op == NULL) return status;                                        \
    return lhi_collective_wait(kCall, op, timeout_ms, info, op_out);                         \
  }

WAITING(all_reduce)
WAITING(reduce)
WAITING(reduce_scatter)
WAITING(all_gather)
WAITING(broadcast)
WAITING(gather)
WAITING(scatter)
WAITING(all_to_all)
WAITING(send)
WAITING(recv)
WAITING(barrier)
