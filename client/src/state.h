/* Shared state (state.c): what other parts of the library call. */
#ifndef LONGHAUL_CLIENT_STATE_H_
#define LONGHAUL_CLIENT_STATE_H_

#include "client/src/objects.h"

/* Frees the memory of the object `state`. Touches neither the arena nor the client, and sends
 * nothing to peerd. */
void lhi_state_free_memory(lh_state* state);

#endif /* LONGHAUL_CLIENT_STATE_H_ */
