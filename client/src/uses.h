/* Keeps operations and syncs apart: an operation in flight and a sync of a state must not use the
 * same memory of the caller. Otherwise one could read an unfinished result of the other. */
#ifndef LONGHAUL_CLIENT_USES_H_
#define LONGHAUL_CLIENT_USES_H_

#include "client/src/objects.h"

/* Returns whether peerd fetches the state for a member in the background. */
bool lhi_state_held_locked(const lh_state* state);
/* LH_OK: no operation in flight uses memory of a tensor of this state. */
lh_status lhi_check_ops_locked(const char* call, const lh_state* state);
/* LH_OK: this collective shares no memory with a state that is in a sync, and its target shares
 * none with a state that is fetched in the background. */
lh_status lhi_check_states_locked(const char* call, const lh_op* op);

#endif /* LONGHAUL_CLIENT_USES_H_ */
