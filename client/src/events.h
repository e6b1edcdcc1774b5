/* What lh_close() ends of events.c. */
#ifndef LONGHAUL_CLIENT_EVENTS_H_
#define LONGHAUL_CLIENT_EVENTS_H_

#include "client/src/objects.h"

/* Ends lh_help() in all threads, and waits for that. */
void lhi_end_help(lh_client* client);
void lhi_close_events(lh_client* client);

#endif /* LONGHAUL_CLIENT_EVENTS_H_ */
