/* Reading the replies of peerd.
 *
 * No thread reads in the background, unless one is in lh_help(). The first thread that
 * waits becomes the reader (lh_client.reading): it waits for replies without the mutex, and
 * gives each operation its outcome. The other waiting threads sleep until an operation has ended or
 * the reader stops.
 */
#ifndef LONGHAUL_CLIENT_REPLIES_H_
#define LONGHAUL_CLIENT_REPLIES_H_

#include "client/src/objects.h"

/* Reads and handles the replies that have come. Does not wait. */
void lhi_pump_locked(lh_client* client);
/* Waits until the op has ended, and copies its result to the caller. False: the deadline has passed
 * before that. The mutex is released while waiting. */
bool lhi_wait_locked(lh_op* op, int64_t deadline_ns);
/* The same for several ops: waits until one of them has ended. *index_out: the first that has. */
bool lhi_wait_any_locked(lh_client* client, lh_op* const* ops, uint32_t count, int64_t deadline_ns,
                         uint32_t* index_out);
/* Becomes the reader, waits for replies, and handles them once. No other thread may be the reader.
 * The mutex is released while waiting. `poll_first`: as for lhi_await_replies(). */
void lhi_read_round_locked(lh_client* client, int64_t deadline_ns, bool poll_first);
/* Marks the connection as dead, and ends every open op with this status and text. */
void lhi_die_locked(lh_client* client, lh_status status, const char* text);

#endif /* LONGHAUL_CLIENT_REPLIES_H_ */
