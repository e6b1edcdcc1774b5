/* The way to peerd, over the socket or through the queues (shared.h): checks whether it can be
 * used, and transfers requests and replies. */
#ifndef LONGHAUL_CLIENT_CONNECTION_H_
#define LONGHAUL_CLIENT_CONNECTION_H_

#include <sys/types.h>

#include "client/src/objects.h"

/* LH_OK: the client belongs to this process, and its connection is open. */
lh_status lhi_client_check(lh_client* client, const char* call);
/* LH_OK: the client belongs to this process. */
lh_status lhi_process_check(const lh_client* client, const char* call);
/* Returns the status with which the connection of a dead client ended, and sets the text. */
lh_status lhi_dead_locked(const lh_client* client);

/* How long a thread of this process polls before it sleeps: not at all on few processors. */
int64_t lhi_spin_ns(void);

/* Connects to `path`, which fits into a sockaddr_un. Returns 0 and the socket in *fd_out, or an
 * errno. */
int lhi_connect(const char* path, int* fd_out);
/* Writes one whole request. Requests of other threads come before or after it, never inside. Sends
 * `fd` with the request unless `fd` is -1. Returns 0 or an errno. ETIMEDOUT: peerd has read nothing
 * for 30 s. A request in the queue of a peerd that has just died counts as written. Whoever reads
 * replies finds out.
 *
 * Waits only a moment for room in the socket, unless there is an fd. Then it keeps the request, and
 * all that come after it, for lhi_write_kept(). */
int lhi_write_request(lh_client* client, const struct lh_ipc_request* request, int fd);
/* Writes kept requests for which there is room. Does not wait. Returns 0, or ETIMEDOUT: peerd has
 * read nothing for 30 s. Needs no mutex. */
int lhi_write_kept(lh_client* client);
/* Frees kept requests. */
void lhi_forget_kept(lh_client* client);

/* Reads replies into client->inbox, without waiting. Only the reader (replies.h) calls it, without
 * the mutex. Returns the number of bytes, 0 at the end of the connection, or -errno. */
ssize_t lhi_read_replies(lh_client* client);
/* The same, but waits until there is something to read, here or in the queue, or until the
 * deadline. -EAGAIN: nothing has come over the socket. With `poll_first` the thread stays awake for
 * the first part of the wait. */
ssize_t lhi_await_replies(lh_client* client, int64_t deadline_ns, bool poll_first);

#endif /* LONGHAUL_CLIENT_CONNECTION_H_ */
