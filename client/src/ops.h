/* Operations: the requests that peerd answers with LH_IPC_DONE.
 *
 * An op is open from lhi_op_open_locked() until it has an outcome: the answer of peerd, or an error
 * if the connection ends. An op is freed when it has ended and nobody has its handle.
 */
#ifndef LONGHAUL_CLIENT_OPS_H_
#define LONGHAUL_CLIENT_OPS_H_

#include "client/src/objects.h"

/* The type of requests whose answer is only a status. */
extern const struct lhi_op_type lhi_question;

/* Makes an op with a handle. Other threads cannot find the op yet. NULL: out of memory, and
 * lh_last_error() says so. Needs no mutex. */
lh_op* lhi_op_make(lh_client* client, const struct lhi_op_type* type, lh_comm* comm);
/* Gives the op a number and adds it to the open ops. If the connection is dead, the op ends at
 * once. */
void lhi_op_open_locked(lh_op* op);
/* lhi_op_make() and lhi_op_open_locked(). */
lh_op* lhi_op_new_locked(lh_client* client, const struct lhi_op_type* type, lh_comm* comm);
/* Gives up the handle. Frees the op now if it has ended, else when it ends. */
void lhi_op_release_locked(lh_op* op);

/* Returns the open op with this number, or NULL. */
lh_op* lhi_op_find_locked(const lh_client* client, uint64_t call);
/* Gives an open op its outcome. `text` is the text of an error. `reply` is NULL if peerd did not
 * answer. */
void lhi_op_end_locked(lh_op* op, lh_status status, const char* text,
                       const struct lh_ipc_reply* reply);
/* Tells the program's event loop that something has ended or arrived. */
void lhi_announce_locked(const lh_client* client);
/* Copies the result of an op in LHI_ARRIVED to the caller. The mutex is released meanwhile. */
void lhi_op_collect_locked(lh_op* op);

/* Returns the outcome of an op that has ended, and sets the text of lh_last_error(). */
lh_status lhi_outcome_locked(const lh_op* op);
/* Returns the progress that peerd last reported. */
lh_progress lhi_progress_locked(const lh_op* op);

#endif /* LONGHAUL_CLIENT_OPS_H_ */
