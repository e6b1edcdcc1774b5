/* Waiting until another thread has changed a client. */
#ifndef LONGHAUL_CLIENT_SLEEP_H_
#define LONGHAUL_CLIENT_SLEEP_H_

#include "client/src/objects.h"

/* Sleeps until lhi_wake_locked() or the deadline. May return early. The mutex is released
 * meanwhile. */
void lhi_sleep_locked(lh_client* client, int64_t deadline_ns);
/* Wakes up all threads that sleep. */
void lhi_wake_locked(lh_client* client);

#endif /* LONGHAUL_CLIENT_SLEEP_H_ */
