/* Operations: what peerd is asked, from the question to the outcome.
 *
 * An operation is open from lhi_op_open_locked() until it has an outcome, by peerd's answer or
 * because there will be none. It is freed when it has ended and nobody has the handle.
 */
#ifndef LONGHAUL_CLIENT_OPS_H_
#define LONGHAUL_CLIENT_OPS_H_

#include "client/src/objects.h"

/* Of questions that mean nothing beyond their answer. */
extern const struct lhi_op_type lhi_question;

/* An op that nobody else sees yet, held; NULL: out of memory (the text says so). */
lh_op *lhi_op_make(lh_client *client, const struct lhi_op_type *type, lh_comm *comm);
/* Gives it a call of its own and makes it known; it ends at once if the connection is dead. */
void lhi_op_open_locked(lh_op *op);
/* Both. */
lh_op *lhi_op_new_locked(lh_client *client, const struct lhi_op_type *type, lh_comm *comm);
/* Gives the handle up: frees the op now or at its end. */
void lhi_op_release_locked(lh_op *op);

/* The open op of this call, or NULL. */
lh_op *lhi_op_find_locked(const lh_client *client, uint64_t call);
/* Ends an op that is open. `text` is of an error; `reply` is NULL when peerd did not answer. */
void lhi_op_end_locked(lh_op *op, lh_status status, const char *text,
                       const struct lh_ipc_reply *reply);
/* Copies what has arrived; the mutex is not held meanwhile. */
void lhi_op_collect_locked(lh_op *op);

/* The op's outcome as return value and text. The op has ended. */
lh_status lhi_outcome_locked(const lh_op *op);
/* What was heard last of how far it is. */
lh_progress lhi_progress_locked(const lh_op *op);

#endif /* LONGHAUL_CLIENT_OPS_H_ */
