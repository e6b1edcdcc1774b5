/* Communicators: joining a group, passing step boundaries, leaving. */
#ifndef LONGHAUL_CLIENT_COMM_H_
#define LONGHAUL_CLIENT_COMM_H_

#include "client/src/objects.h"

/* Fills `info` with what is known of a sync that has ended. Keeps info->struct_size. */
typedef void lhi_sync_info_of(const lh_op* op, lh_sync_info_t* info);

/* LH_OK: `comm` is not NULL, and belongs to this process and not to its parent. */
lh_status lhi_check_comm(const lh_comm* comm, const char* call);
/* LH_OK: the member is admitted, is not leaving and was not removed, and peerd is alive. */
lh_status lhi_member_check_locked(const lh_comm* comm, const char* call);
/* LH_OK: the member may start an op or a sync. A newcomer may not before its first step boundary:
 * the others, which are behind it, would take the op for one of theirs, or wait for the member
 * without end. */
lh_status lhi_boundary_check_locked(const lh_comm* comm, const char* call);
/* LH_OK: the member has no step, no sync and no lh_state_take() in flight. */
lh_status lhi_free_check_locked(const lh_comm* comm, const char* call);
/* Forgets an lh_state_take() that timed out, if peerd has answered meanwhile that the state is not
 * complete. That call has already returned LH_DEADLINE_EXCEEDED. */
void lhi_drop_take_locked(lh_comm* comm);

/* Sends a request that peerd answers at once, and waits for the answer (lhi_call()). The caller
 * fills request->type and request->u; this function fills the rest. */
lh_status lhi_ask(const char* call, lh_comm* comm, const struct lhi_op_type* type,
                  const struct lh_ipc_request* request, int64_t deadline_ns,
                  union lhi_answer* answer);
/* Waits for an op, returns its outcome and releases the op. LH_DEADLINE_EXCEEDED: the op has no
 * outcome in time, and *parked keeps it for the next call. `info_of`, if not NULL, fills `info` at
 * the end. */
lh_status lhi_finish(const char* call, lh_op* op, lh_op** parked, int64_t timeout_ms,
                     lhi_sync_info_of* info_of, lh_sync_info_t* info);
/* lhi_op_type.ended of a step, with or without a sync. */
void lhi_step_ended(lh_op* op, const struct lh_ipc_reply* reply);

#endif /* LONGHAUL_CLIENT_COMM_H_ */
