#include "client/src/uses.h"

#include "client/src/error.h"
#include "client/src/slices.h"

bool lhi_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
  const uintptr_t a_at = (uintptr_t)a;
  const uintptr_t b_at = (uintptr_t)b;
  return a_at < b_at + b_bytes && b_at < a_at + a_bytes;
}

/* Returns the name of a tensor. */
static const char *name_of(const lh_state *state, uint32_t index) {
  return ((const struct lh_ipc_tensor *)(const void *)state->table)[index].name;
}

/* Returns the index of the first tensor that shares bytes with the range, or state->count. */
static uint32_t tensor_in(const lh_state *state, const void *data, size_t bytes) {
  uint32_t i = 0;
  while (i < state->count &&
         (state->tensors[i].bytes == 0 ||
          !lhi_overlap(state->tensors[i].own, state->tensors[i].bytes, data, bytes))) {
    ++i;
  }
  return i;
}

/* The same for the slices of an op: those that are written, or all. */
static uint32_t tensor_in_slices(const lh_state *state, const struct lhi_slices *slices, bool all) {
  uint32_t i = 0;
  for (; i < state->count; ++i) {
    const struct lhi_tensor *const tensor = &state->tensors[i];
    bool written = false;
    if (tensor->bytes == 0) continue;
    if (lhi_slices_touch(slices, tensor->own, tensor->bytes, &written) && (all || written)) break;
  }
  return i;
}

/* Returns the index of the first tensor that shares bytes with the op's target, or source. */
static uint32_t tensor_of_target(const lh_state *state, const lh_op *op) {
  if (op->slices != NULL) return tensor_in_slices(state, op->slices, false);
  return tensor_in(state, op->to, op->target_bytes);
}
static uint32_t tensor_of_source(const lh_state *state, const lh_op *op) {
  if (op->slices != NULL) return tensor_in_slices(state, op->slices, true);
  return tensor_in(state, op->from, op->source_bytes);
}

bool lhi_state_held_locked(const lh_state *state) {
  const lh_comm *const comm = state->holder;
  return comm != NULL && comm->gone == LH_OK && !comm->left && !state->client->dead;
}

/* Return whether an operation still uses the caller's source, or target. If the handle of an
 * operation was freed, nothing is copied between the caller's memory and staged blocks. */
static bool uses_source(const lh_op *op) { return op->staged_source == NULL || op->held; }
static bool uses_target(const lh_op *op) { return !op->copy_back || op->held; }

lh_status lhi_check_ops_locked(const char *call, const lh_state *state) {
  for (const lh_op *op = state->client->ops; op != NULL; op = op->next) {
    uint32_t tensor = state->count;
    if (!op->collective || op->state == LHI_ENDED) continue;
    if (uses_source(op)) tensor = tensor_of_source(state, op);
    if (tensor == state->count && uses_target(op)) tensor = tensor_of_target(state, op);
    if (tensor == state->count) continue;
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: the op of tag %llu in flight uses tensor \"%.64s\" of the state; "
                    "call lh_op_wait() for it first",
                    call, (unsigned long long)op->tag, name_of(state, tensor));
  }
  return LH_OK;
}

lh_status lhi_check_states_locked(const char *call, const lh_op *op) {
  for (const lh_state *state = op->client->states; state != NULL; state = state->next) {
    const bool in_use = state->op != NULL || state->starting;
    const char *what = "target";
    uint32_t tensor;
    if (!in_use && !lhi_state_held_locked(state)) continue;
    tensor = tensor_of_target(state, op);
    if (tensor == state->count && in_use) {
      what = "source";
      tensor = tensor_of_source(state, op);
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
