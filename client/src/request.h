/* Asking peerd. */
#ifndef LONGHAUL_CLIENT_REQUEST_H_
#define LONGHAUL_CLIENT_REQUEST_H_

#include "client/src/objects.h"

/* The question of this op, with nothing asked yet. */
struct lh_ipc_request lhi_request(uint32_t type, const lh_op *op);
/* A place in a pinned block, as peerd is told of it. */
struct lh_ipc_range lhi_range(const struct lhi_pin *pin, const uint8_t *data);
/* Sends; `fd` goes along unless -1. On failure the connection is dead, and with it the op ended. */
void lhi_send(lh_client *client, const struct lh_ipc_request *request, int fd);
/* Asks what no answer is waited for. False: out of memory, and nothing was sent. `request` with
 * its type and what is asked. */
bool lhi_tell(lh_client *client, const struct lh_ipc_request *request);

/* By when peerd has to have answered what a call asks now, all of it together. */
int64_t lhi_answer_deadline_ns(const lh_client *client);
/* Waits for an op that peerd answers at once, releases it, returns its status with text.
 * LH_UNAVAILABLE: peerd has not answered by the deadline; it may do what was asked all the same.
 * `answer` is filled if all is well and it is not NULL. */
lh_status lhi_call(lh_op *op, const char *call, int64_t deadline_ns, union lhi_answer *answer);

#endif /* LONGHAUL_CLIENT_REQUEST_H_ */
