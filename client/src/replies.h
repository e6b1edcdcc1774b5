/* What peerd says: who reads it, and who is told.
 *
 * Replies are read by whoever waits: the first waiting thread becomes the reader (`reading`), takes
 * frames off the socket without the mutex, and hands every operation its outcome; the others sleep
 * until something ended or the reader left.
 */
#ifndef LONGHAUL_CLIENT_REPLIES_H_
#define LONGHAUL_CLIENT_REPLIES_H_

#include "client/src/objects.h"

/* Takes what has arrived, without blocking. */
void lhi_pump_locked(lh_client *client);
/* Waits until the op has ended (true) or the deadline passed; copies a staged result. */
bool lhi_wait_locked(lh_op *op, int64_t deadline_ns);
/* The connection is of no use any more: all that is open ends with this. */
void lhi_die_locked(lh_client *client, lh_status status, const char *text);

#endif /* LONGHAUL_CLIENT_REPLIES_H_ */
