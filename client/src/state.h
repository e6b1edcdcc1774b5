/* Shared state: its tensors, those of them that are copies, and syncs. */
#ifndef LONGHAUL_CLIENT_STATE_H_
#define LONGHAUL_CLIENT_STATE_H_

#include "client/src/objects.h"

void lhi_state_free_memory(lh_state *state);

#endif /* LONGHAUL_CLIENT_STATE_H_ */
