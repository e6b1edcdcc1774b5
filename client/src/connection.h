/* The socket to peerd: whether it can be used, and bytes in and out. */
#ifndef LONGHAUL_CLIENT_CONNECTION_H_
#define LONGHAUL_CLIENT_CONNECTION_H_

#include <sys/types.h>

#include "client/src/objects.h"

/* LH_OK: this process may use the client, and its connection stands. */
lh_status lhi_client_check(lh_client *client, const char *call);
/* The same without asking for the connection. */
lh_status lhi_process_check(const lh_client *client, const char *call);
lh_status lhi_dead_locked(const lh_client *client);

/* 0 and a connected socket, or an errno. `path` fits into a sockaddr_un. */
int lhi_connect(const char *path, int *fd_out);
/* Writes a whole request, and no other one in between; `fd` goes along unless -1. 0 or an errno;
 * ETIMEDOUT: peerd takes none. */
int lhi_write_request(lh_client *client, const struct lh_ipc_request *request, int fd);

/* Reads replies into the client's inbox, without blocking. The reader's, without the mutex. Bytes,
 * 0 at the end, or -errno. */
ssize_t lhi_read_replies(lh_client *client);
/* The same, and waits until there is something to read, or until the deadline. */
ssize_t lhi_await_replies(lh_client *client, int64_t deadline_ns);

#endif /* LONGHAUL_CLIENT_CONNECTION_H_ */
