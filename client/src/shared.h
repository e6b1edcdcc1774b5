/* Queues in memory that is shared with peerd (struct lh_ipc_shared in proto/wire/ipc.h). While both
 * sides are awake, requests and replies need no system call.
 */
#ifndef LONGHAUL_CLIENT_SHARED_H_
#define LONGHAUL_CLIENT_SHARED_H_

#include "client/src/objects.h"

/* Makes the memory, to be sent to peerd with *fd_out. Returns false if the system refuses. */
bool lhi_shared_open(lh_client* client, int* fd_out);
void lhi_shared_close(lh_client* client);

/* Puts a request into the queue. Returns false if it must take the socket. *look: peerd must be
 * sent a LOOK over the socket. The caller holds the send mutex. */
bool lhi_shared_put(lh_client* client, const struct lh_ipc_request* request, bool* look);

/* The following ones are for the reader (replies.h). */

/* Tells peerd whether the reader looks into the queue without being told. */
void lhi_shared_wake(lh_client* client, bool awake);
/* Tells peerd that `frames` replies have been read from the socket. Afterwards the reader must look
 * for further replies in the queue. */
void lhi_shared_look(lh_client* client, uint64_t frames);
/* Returns the next reply that comes before all further ones of the socket, or NULL. It stays valid
 * until lhi_shared_pop(). */
struct lh_ipc_reply* lhi_shared_next(const lh_client* client);
/* Removes that reply. */
void lhi_shared_pop(lh_client* client);

/* Whether peerd says something impossible of its queue. Then there is no next reply. */
bool lhi_shared_broken(const lh_client* client);

#endif /* LONGHAUL_CLIENT_SHARED_H_ */
