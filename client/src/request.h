/* Requests to peerd. */
#ifndef LONGHAUL_CLIENT_REQUEST_H_
#define LONGHAUL_CLIENT_REQUEST_H_

#include "client/src/objects.h"

/* Returns a request of this type for an op. The caller fills request.member and request.u. */
struct lh_ipc_request lhi_request(uint32_t type, const lh_op* op);
/* Returns an address in a pinned block in the form that requests use. */
struct lh_ipc_range lhi_range(const struct lhi_pin* pin, const uint8_t* data);
/* Sends a request, with `fd` unless that is -1, or lets it wait (queue.h). If sending fails, the
 * connection is dead, and all open ops have ended. Mutex not held. */
void lhi_send(lh_client* client, const struct lh_ipc_request* request, int fd);
/* Sends the requests that need not wait any more. The mutex is released meanwhile. It is
 * lh_client.flush, so that reading replies can call it. */
void lhi_flush_locked(lh_client* client);
/* Sends a request whose answer nobody waits for. The caller fills request->type,
 * request->member and request->u, the rest is 0. False: out of memory; nothing was sent. Mutex not
 * held. */
bool lhi_tell(lh_client* client, const struct lh_ipc_request* request);

/* Returns the time by which peerd must have answered all requests of a call that begins now. */
int64_t lhi_answer_deadline_ns(const lh_client* client);
/* Waits for an op that peerd answers at once, releases it, and returns its outcome. LH_UNAVAILABLE:
 * peerd has not answered by the deadline; peerd may still do what was asked. With LH_OK, *answer is
 * filled unless `answer` is NULL. Mutex not held. */
lh_status lhi_call(lh_op* op, const char* call, int64_t deadline_ns, union lhi_answer* answer);

#endif /* LONGHAUL_CLIENT_REQUEST_H_ */
