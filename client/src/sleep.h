/* Threads that wait for a change of a client. */
#ifndef LONGHAUL_CLIENT_SLEEP_H_
#define LONGHAUL_CLIENT_SLEEP_H_

#include "client/src/objects.h"

/* Sleeps until lhi_wake_locked() or the deadline; spurious returns. */
void lhi_sleep_locked(lh_client *client, int64_t deadline_ns);
void lhi_wake_locked(lh_client *client);

#endif /* LONGHAUL_CLIENT_SLEEP_H_ */
