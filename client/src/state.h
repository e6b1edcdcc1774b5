/* Shared state: declaring tensors, copying them where needed, and syncs. */
#ifndef LONGHAUL_CLIENT_STATE_H_
#define LONGHAUL_CLIENT_STATE_H_

#include "client/src/objects.h"

/* Frees the memory only; the arena, the client and peerd are left alone. */
void lhi_state_free_memory(lh_state *state);

#endif /* LONGHAUL_CLIENT_STATE_H_ */
