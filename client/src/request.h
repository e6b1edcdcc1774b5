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
/* Waits for an op that peerd answers at once, releases it, returns its status with text. `answer`
 * is filled if all is well and it is not NULL. */
lh_status lhi_call(lh_op *op, const char *call, union lhi_answer *answer);

#endif /* LONGHAUL_CLIENT_REQUEST_H_ */
