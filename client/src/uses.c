#include "client/src/uses.h"

#include "client/src/error.h"
#include "client/src/tensors.h"

/* Returns the name of a tensor. */
static const char* name_of(const lh_state* state, uint32_t index) {
  return ((const struct lh_ipc_tensor*)(const void*)state->table)[index].name;
}

/* Returns the index of the first tensor that shares bytes with the op's tensors, or state->count.
 * `written`: only with those in which the result is written. */
static uint32_t tensor_of(const lh_state* state, const lh_op* op, bool written) {
  uint32_t i = 0;
  for (; i < state->count; ++i) {
    const struct lhi_tensor* const tensor = &state->tensors[i];
    if (tensor->bytes > 0 && lhi_tensors_touch(&op->tensors, tensor->own, tensor->bytes, written)) {
      break;
    }
  }
  return i;
}

bool lhi_state_held_locked(const lh_state* state) {
  const lh_comm* const comm = state->holder;
  return comm != NULL && comm->gone == LH_OK && !comm->left && !state->client->dead;
}

lh_status lhi_check_ops_locked(const char* call, const lh_state* state) {
  for (const lh_op* op = state->client->ops; op != NULL; op = op->next) {
    uint32_t tensor = state->count;
    if (!op->collective || op->state == LHI_ENDED) continue;
    /* If the handle of an op was freed, nothing is copied between the caller's memory and staged
     * blocks. */
    if (op->reads || op->held) tensor = tensor_of(state, op, false);
    if (tensor == state->count && (op->writes || op->held)) tensor = tensor_of(state, op, true);
    if (tensor == state->count) continue;
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: the op of tag %llu in flight uses tensor \"%.64s\" of the state; "
                    "call lh_op_wait() for it first",
                    call, (unsigned long long)op->tag, name_of(state, tensor));
  }
  return LH_OK;
}

lh_status lhi_check_states_locked(const char* call, const lh_op* op) {
  for (const lh_state* state = op->client->states; state != NULL; state = state->next) {
    const bool in_use = state->op != NULL || state->starting;
    const char* what = "target";
    uint32_t tensor;
    if (!in_use && !lhi_state_held_locked(state)) continue;
    tensor = tensor_of(state, op, true);
    if (tensor == state->count && in_use) {
      what = "source";
      tensor = tensor_of(state, op, false);
    }
    if (tensor == state->count) continue;
    return lhi_fail(LH_FAILED_PRECONDITION,
                    in_use
                        ? "%s: the %s of tag %llu has memory of tensor \"%.64s\" of a state that "
                          "is in a sync; wait for its end first"
                        : "%s: the %s of tag %llu has memory of tensor \"%.64s\" of a state that "
                          "peerd fetches in the background; call lh_state_take() first",
                    call, what, (unsigned long long)op->tag, name_of(state, tensor));
  }
  return LH_OK;
}
