/* Requests that wait in the client. peerd takes at most LH_OPS_OPEN_MAX open ops of a member.
 * Further ops wait here until one of these has ended. The order of a member's requests stays: while
 * ops wait, its steps, syncs and its leave wait behind them, because an op belongs to the step in
 * which peerd gets it. */
#ifndef LONGHAUL_CLIENT_QUEUE_H_
#define LONGHAUL_CLIENT_QUEUE_H_

#include "client/src/objects.h"

/* Whether the member's next op would wait. */
bool lhi_queue_full_locked(const lh_comm* comm);
/* Returns true if the request waits now, or could not be queued and its op has ended. False: the
 * caller must send it. */
bool lhi_queue_put_locked(lh_client* client, const struct lh_ipc_request* request);
/* Returns a member whose first request peerd may get now; NULL: there is none. The caller sends
 * comm->queue_first->request, and then calls lhi_queue_sent_locked(). The request stays in the
 * queue meanwhile, so that no later one overtakes it. One thread at a time. */
lh_comm* lhi_queue_next_locked(lh_client* client);
void lhi_queue_sent_locked(lh_comm* comm);
/* Whether a thread is sending the request of this op, between these two calls. */
bool lhi_queue_sends_locked(const lh_op* op);

#endif /* LONGHAUL_CLIENT_QUEUE_H_ */
