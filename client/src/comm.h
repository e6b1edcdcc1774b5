/* Communicators: a member's way into a group, through step boundaries, and out. */
#ifndef LONGHAUL_CLIENT_COMM_H_
#define LONGHAUL_CLIENT_COMM_H_

#include "client/src/objects.h"

/* What is known of a sync that has ended; keeps info->struct_size. */
typedef void lhi_sync_info_of(const lh_op *op, lh_sync_info_t *info);

/* NULL and fork() checks of calls that take a communicator. */
lh_status lhi_check_comm(const lh_comm *comm, const char *call);
/* LH_OK: an admitted member that can be used. */
lh_status lhi_member_check_locked(const lh_comm *comm, const char *call);
/* LH_OK: it is neither at a step boundary nor in a sync, and takes no state. */
lh_status lhi_free_check_locked(const lh_comm *comm, const char *call);
/* Forgets a take that was answered late, by "not yet": that is what its caller was told. */
void lhi_drop_take_locked(lh_comm *comm);

/* Asks peerd what it knows at once (lhi_call()): `request` with its type and what is asked; the
 * rest is put in. */
lh_status lhi_ask(const char *call, lh_comm *comm, const struct lhi_op_type *type,
                  const struct lh_ipc_request *request, int64_t deadline_ns,
                  union lhi_answer *answer);
/* Waits for a call of a member that goes on by itself; one that does not end in time is kept in
 * *parked. `info_of` fills `info` at the end if it is not NULL. */
lh_status lhi_finish(const char *call, lh_op *op, lh_op **parked, int64_t timeout_ms,
                     lhi_sync_info_of *info_of, lh_sync_info_t *info);
/* Of a step, with a sync or without: the boundary is behind the member, or was not passed. */
void lhi_step_ended(lh_op *op, const struct lh_ipc_reply *reply);

#endif /* LONGHAUL_CLIENT_COMM_H_ */
