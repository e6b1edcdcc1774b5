/* The caller's memory: what an operation in flight uses, no sync of a state may use, and the
 * reverse. Two that do would read each other's half of a result. */
#ifndef LONGHAUL_CLIENT_USES_H_
#define LONGHAUL_CLIENT_USES_H_

#include "client/src/objects.h"

/* Peerd fetches into the state, for a member in the background. */
bool lhi_state_held_locked(const lh_state *state);
/* LH_OK: no operation in flight uses memory of a tensor of the state. */
lh_status lhi_check_ops_locked(const char *call, const lh_state *state);
/* LH_OK: no state that a call uses has a tensor in the memory of this all-reduce; the target lies
 * in no state that is held. */
lh_status lhi_check_states_locked(const char *call, const lh_op *op);

#endif /* LONGHAUL_CLIENT_USES_H_ */
