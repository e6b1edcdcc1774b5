#define _GNU_SOURCE
#include "client/src/state.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/src/comm.h"
#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/memory.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/uses.h"

#define LHI_SYNC_FIRST_BYTES (offsetof(lh_sync_options, progress_context) + sizeof(void*))
#define LHI_SYNC_INFO_FIRST_BYTES (offsetof(lh_sync_info_t, background) + sizeof(uint32_t))
/* How much longer than the timeout lh_state_take() waits for the answer of peerd. */
#define LHI_TAKE_GRACE_MS 1000
#define LHI_TENSOR_FIRST_BYTES (offsetof(lh_tensor, flags) + sizeof(uint32_t))

static const char kNew[] = "lh_state_new";

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static size_t chunks_of(size_t bytes) {
  return bytes / LH_STATE_CHUNK_BYTES + (bytes % LH_STATE_CHUNK_BYTES != 0);
}

/* ------------------------------------------------------------------ checks of the declaration */

/* LH_OK and the bytes of the tensor in *bytes_out, or LH_INVALID_ARGUMENT. */
static lh_status check_tensor(uint32_t index, const lh_tensor* tensor, size_t* bytes_out) {
  const size_t element = lh_dtype_size(tensor->dtype);
  uint64_t bytes = element;
  const char* wrong = NULL;
  size_t length = 0;
  if (tensor->name != NULL) length = strnlen(tensor->name, LH_STATE_NAME_BYTES_MAX + 1);
  if (tensor->name == NULL) {
    wrong = "name is NULL";
  } else if (length == 0 || length > LH_STATE_NAME_BYTES_MAX) {
    wrong = "name must have 1 to 256 bytes";
  } else if (element == 0) {
    wrong = "dtype is not an lh_dtype";
  } else if (tensor->dims > LH_STATE_DIMS_MAX) {
    wrong = "it has more than 8 dimensions";
  } else if (tensor->dims > 0 && tensor->shape == NULL) {
    wrong = "shape is NULL";
  } else if ((tensor->flags & ~(uint32_t)(LH_ALLOW_UNEQUAL | LH_STAGED)) != 0) {
    wrong = "flags has bits other than LH_ALLOW_UNEQUAL and LH_STAGED";
  }
  if (wrong == NULL) {
    bool empty = false;
    for (uint32_t i = 0; i < tensor->dims; ++i) empty |= tensor->shape[i] == 0;
    if (empty) bytes = 0;
    for (uint32_t i = 0; i < tensor->dims && wrong == NULL && !empty; ++i) {
      if (bytes > LH_REGION_BYTES_MAX / tensor->shape[i]) {
        wrong = "it has more than 2^40 bytes";
      } else {
        bytes *= tensor->shape[i];
      }
    }
    if (wrong == NULL && bytes > 0 && tensor->data == NULL) wrong = "data is NULL";
  }
  if (wrong != NULL) {
    return lhi_refuse(kNew, "tensor %u%s%.64s: %s", (unsigned)index,
                      tensor->name != NULL ? " " : "", tensor->name != NULL ? tensor->name : "",
                      wrong);
  }
  *bytes_out = (size_t)bytes;
  return LH_OK;
}

static const lh_tensor* tensor_at(const lh_tensor* tensors, uint32_t index) {
  return (const lh_tensor*)(const void*)((const uint8_t*)tensors +
                                         (size_t)index * tensors->struct_size);
}

static lh_status check_tensors(lh_state* state, const lh_tensor* tensors) {
  size_t total = 0;
  for (uint32_t i = 0; i < state->count; ++i) {
    const lh_tensor* const tensor = tensor_at(tensors, i);
    lh_tensor known = LH_TENSOR_INIT;
    struct lhi_tensor* const own = &state->tensors[i];
    lh_status status;
    if (tensor->struct_size != tensors->struct_size) {
      return lhi_refuse(kNew, "tensor %u: struct_size differs from that of tensor 0", (unsigned)i);
    }
    status = lhi_take(kNew, "LH_TENSOR_INIT", tensor, LHI_TENSOR_FIRST_BYTES, &known, sizeof known);
    if (status == LH_OK) status = check_tensor(i, &known, &own->bytes);
    if (status != LH_OK) return status;
    if (own->bytes > LH_STATE_BYTES_MAX - total) {
      return lhi_refuse(kNew, "all tensors together have more than 2^50 bytes");
    }
    total += own->bytes;
    own->data = own->own = known.data;
    own->first_chunk = state->chunks;
    own->staged = (known.flags & LH_STAGED) != 0;
    state->chunks += chunks_of(own->bytes);
  }
  return LH_OK;
}

/* ------------------------------------------------------------------ memory of the tensors */

static int by_address(const void* a, const void* b) {
  const struct lhi_tensor* const left = *(struct lhi_tensor* const*)a;
  const struct lhi_tensor* const right = *(struct lhi_tensor* const*)b;
  if (left->data != right->data) return left->data < right->data ? -1 : 1;
  return left < right ? -1 : 1;
}

/* Pins the tensors that are in the arena and can be used in place. All others will be copied. A
 * tensor that shares bytes with the one before it is copied, too: chunks fetched for one would
 * change the other. */
static lh_status find_places_locked(lh_state* state, struct lhi_tensor** order) {
  lh_client* const client = state->client;
  size_t in_place = 0;
  const uint8_t* end = NULL;
  for (uint32_t i = 0; i < state->count; ++i) {
    struct lhi_tensor* const tensor = &state->tensors[i];
    if (tensor->bytes == 0) continue;
    if (!lhi_arena_pin(&client->arena, tensor->data, tensor->bytes, &tensor->pin)) {
      return lhi_refuse(kNew, "tensor %u is not within one buffer from lh_alloc()", (unsigned)i);
    }
    if (tensor->pin.region != NULL) order[in_place++] = tensor;
  }
  qsort(order, in_place, sizeof(struct lhi_tensor*), by_address);
  for (size_t i = 0; i < in_place; ++i) {
    struct lhi_tensor* const tensor = order[i];
    if (end != NULL && tensor->data < end) {
      lhi_unpin(&tensor->pin);
    } else {
      end = tensor->data + tensor->bytes;
    }
  }
  return LH_OK;
}

/* Takes a block of the arena with `take`, and pins it. */
static lh_status take_block(lh_client* client,
                            lh_status (*take)(lh_client*, const char*, size_t, int64_t, void**),
                            size_t bytes, int64_t deadline_ns, uint8_t** data_out,
                            struct lhi_pin* pin) {
  void* data = NULL;
  const lh_status status = take(client, kNew, bytes, deadline_ns, &data);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  *data_out = data;
  (void)lhi_arena_pin(&client->arena, data, bytes, pin);
  pthread_mutex_unlock(&client->mutex);
  return LH_OK;
}

/* Returns whether `data` is the library's copy of the caller's tensor. */
static bool is_copy(const struct lhi_tensor* tensor) {
  return tensor->pin.region == NULL && tensor->bytes > 0;
}

/* Returns whether peerd reads the caller's tensor in place. Then fetched chunks need other memory:
 * the inbox. */
static bool needs_inbox(const struct lhi_tensor* tensor) {
  return tensor->pin.region != NULL && !tensor->staged;
}

/* Allocates memory for copies of tensors that are not in the arena, and an inbox for those that
 * are. */
static lh_status make_copies(lh_state* state, int64_t deadline_ns) {
  size_t copies = 0;
  size_t inbox = 0;
  lh_status status = LH_OK;
  for (uint32_t i = 0; i < state->count; ++i) {
    const size_t bytes = round_up(state->tensors[i].bytes, LHI_ALIGN);
    if (is_copy(&state->tensors[i])) copies += bytes;
    if (needs_inbox(&state->tensors[i])) inbox += bytes;
  }
  state->inbox_bytes = inbox;
  if (copies > 0) {
    status = take_block(state->client, lhi_alloc, copies, deadline_ns, &state->copies,
                        &state->copies_pin);
  }
  if (status == LH_OK && inbox > 0) {
    status =
        take_block(state->client, lhi_inbox, inbox, deadline_ns, &state->inbox, &state->inbox_pin);
  }
  if (status != LH_OK) return status;
  copies = inbox = 0;
  for (uint32_t i = 0; i < state->count; ++i) {
    struct lhi_tensor* const tensor = &state->tensors[i];
    const size_t bytes = round_up(tensor->bytes, LHI_ALIGN);
    if (is_copy(tensor)) {
      tensor->data = state->copies + copies;
      copies += bytes;
    }
    tensor->inbox = tensor->data;
    if (needs_inbox(tensor)) {
      tensor->inbox = state->inbox + inbox;
      inbox += bytes;
    }
  }
  return LH_OK;
}

/* ------------------------------------------------------------------ the table */

static void write_entry(const lh_state* state, const struct lhi_tensor* own,
                        const lh_tensor* tensor, struct lh_ipc_tensor* entry) {
  memset(entry, 0, sizeof *entry);
  memcpy(entry->name, tensor->name, strlen(tensor->name));
  entry->dtype = (uint8_t)tensor->dtype;
  entry->dims = (uint8_t)tensor->dims;
  for (uint32_t i = 0; i < tensor->dims; ++i) entry->shape[i] = tensor->shape[i];
  entry->bytes = own->bytes;
  if (own->bytes > 0) {
    entry->data = lhi_range(is_copy(own) ? &state->copies_pin : &own->pin, own->data);
    entry->inbox = needs_inbox(own) ? lhi_range(&state->inbox_pin, own->inbox) : entry->data;
  }
  entry->flags = (tensor->flags & LH_ALLOW_UNEQUAL) != 0 ? LH_IPC_ALLOW_UNEQUAL : 0;
}

static lh_status make_table(lh_state* state, const lh_tensor* tensors, int64_t deadline_ns) {
  const size_t entries = (size_t)state->count * sizeof(struct lh_ipc_tensor);
  struct lh_ipc_tensor* table;
  lh_status status = take_block(state->client, lhi_alloc, entries + state->count + state->chunks,
                                deadline_ns, &state->table, &state->table_pin);
  if (status != LH_OK) return status;
  state->touched = state->table + entries;
  state->changed = state->touched + state->count;
  memset(state->touched, 1, state->count);
  memset(state->changed, 0, state->chunks);
  table = (struct lh_ipc_tensor*)(void*)state->table;
  for (uint32_t i = 0; i < state->count; ++i) {
    write_entry(state, &state->tensors[i], tensor_at(tensors, i), &table[i]);
  }
  return LH_OK;
}

/* Asks peerd to forget the state. False: out of memory. */
static bool tell_unstate(const lh_state* state) {
  struct lh_ipc_request request;
  memset(&request, 0, sizeof request);
  request.type = LH_IPC_UNSTATE;
  request.u.state.state = state->id;
  return lhi_tell(state->client, &request);
}

static lh_status register_state(lh_state* state, int64_t deadline_ns) {
  lh_client* const client = state->client;
  struct lh_ipc_request request;
  lh_status status;
  lh_op* op;
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, &lhi_question, NULL);
  if (op != NULL) {
    state->id = client->next_state++;
    request = lhi_request(LH_IPC_STATE, op);
    request.u.state.state = state->id;
    request.u.state.table = lhi_range(&state->table_pin, state->table);
    request.u.state.changed = lhi_range(&state->table_pin, state->changed);
    request.u.state.count = state->count;
  }
  pthread_mutex_unlock(&client->mutex);
  if (op == NULL) return LH_UNAVAILABLE;
  lhi_send(client, &request, -1);
  status = lhi_call(op, kNew, deadline_ns, NULL);
  /* If peerd still answers, it must forget the state again. */
  if (status == LH_UNAVAILABLE && lhi_now_ns() >= deadline_ns) (void)tell_unstate(state);
  return status;
}

/* ------------------------------------------------------------------ new and free */

void lhi_state_free_memory(lh_state* state) {
  free(state->tensors);
  free(state);
}

/* Gives back the blocks and pins of the state, and frees it. */
static void discard_locked(lh_state* state) {
  lh_client* const client = state->client;
  for (uint32_t i = 0; i < state->count; ++i) lhi_unpin(&state->tensors[i].pin);
  lhi_unpin(&state->table_pin);
  lhi_unpin(&state->copies_pin);
  lhi_unpin(&state->inbox_pin);
  lhi_give_back_locked(client, state->table);
  lhi_give_back_locked(client, state->copies);
  lhi_give_back_locked(client, state->inbox);
  if (state->previous != NULL) {
    state->previous->next = state->next;
  } else {
    client->states = state->next;
  }
  if (state->next != NULL) state->next->previous = state->previous;
  lhi_state_free_memory(state);
}

lh_status lh_state_new(lh_client* client, const lh_tensor* tensors, uint32_t count,
                       lh_state** state_out) {
  lh_state* state;
  struct lhi_tensor** order;
  int64_t deadline_ns;
  lh_status status;
  if (state_out == NULL) return lhi_refuse(kNew, "state_out is NULL");
  *state_out = NULL;
  if (client == NULL) return lhi_refuse(kNew, "client is NULL");
  if (tensors == NULL) return lhi_refuse(kNew, "tensors is NULL");
  if (count == 0 || count > LH_STATE_TENSORS_MAX) {
    return lhi_refuse(kNew, "%u tensors; a state has 1 to %d", (unsigned)count,
                      LH_STATE_TENSORS_MAX);
  }
  status = lhi_client_check(client, kNew);
  if (status != LH_OK) return status;
  deadline_ns = lhi_answer_deadline_ns(client);
  state = calloc(1, sizeof *state);
  order = calloc(count, sizeof(struct lhi_tensor*));
  if (state != NULL) state->tensors = calloc(count, sizeof *state->tensors);
  if (state == NULL || order == NULL || state->tensors == NULL) {
    if (state != NULL) lhi_state_free_memory(state);
    free(order);
    return lhi_fail(LH_UNAVAILABLE, "%s: out of memory", kNew);
  }
  state->client = client;
  state->count = count;
  pthread_mutex_lock(&client->mutex);
  state->next = client->states;
  if (client->states != NULL) client->states->previous = state;
  client->states = state;
  status = check_tensors(state, tensors);
  if (status == LH_OK) status = find_places_locked(state, order);
  pthread_mutex_unlock(&client->mutex);
  free(order);
  if (status == LH_OK) status = make_copies(state, deadline_ns);
  if (status == LH_OK) status = make_table(state, tensors, deadline_ns);
  if (status == LH_OK) status = register_state(state, deadline_ns);
  if (status != LH_OK) {
    pthread_mutex_lock(&client->mutex);
    discard_locked(state);
    pthread_mutex_unlock(&client->mutex);
    lhi_trim(client);
    return status;
  }
  *state_out = state;
  return LH_OK;
}

static bool is_of(const lh_op* parked, const lh_state* state) {
  return parked != NULL && parked->of_state == state->id;
}

/* Returns whether a call with this state timed out, and was not made again to get its outcome. */
static bool outcome_owed_locked(const lh_state* state) {
  for (const lh_comm* comm = state->client->comms; comm != NULL; comm = comm->next) {
    if (is_of(comm->parked_step, state) || is_of(comm->parked_sync, state) ||
        is_of(comm->parked_take, state)) {
      return true;
    }
  }
  return false;
}

lh_status lh_state_free(lh_state* state) {
  lh_client* client;
  lh_status status;
  if (state == NULL) return LH_OK;
  client = state->client;
  status = lhi_process_check(client, "lh_state_free");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client);
  if (lhi_state_held_locked(state)) {
    pthread_mutex_unlock(&client->mutex);
    return lhi_fail(
        LH_FAILED_PRECONDITION,
        "lh_state_free: peerd fetches the state in the background; call lh_state_take() or "
        "lh_leave() first");
  }
  if (state->op != NULL || state->starting || outcome_owed_locked(state)) {
    pthread_mutex_unlock(&client->mutex);
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "lh_state_free: a sync uses the state; wait for its end first");
  }
  pthread_mutex_unlock(&client->mutex);
  /* Tell peerd before the memory is freed: peerd keeps a region as long as a state is in it. */
  if (!tell_unstate(state)) return LH_UNAVAILABLE;
  pthread_mutex_lock(&client->mutex);
  discard_locked(state);
  pthread_mutex_unlock(&client->mutex);
  lhi_trim(client);
  return LH_OK;
}

static lh_status check_state(const lh_state* state, uint32_t tensor, const char* call) {
  lh_status status;
  if (state == NULL) return lhi_refuse(call, "state is NULL");
  status = lhi_process_check(state->client, call);
  if (status != LH_OK) return status;
  if (tensor >= state->count) {
    return lhi_refuse(call, "tensor is %u, but the state has only %u tensors", (unsigned)tensor,
                      (unsigned)state->count);
  }
  return LH_OK;
}

lh_status lh_state_touch(lh_state* state, uint32_t tensor) {
  const bool all = tensor == LH_ALL_TENSORS;
  const lh_status status = check_state(state, all ? 0 : tensor, "lh_state_touch");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&state->client->mutex);
  memset(state->touched + (all ? 0 : tensor), 1, all ? state->count : 1);
  pthread_mutex_unlock(&state->client->mutex);
  return LH_OK;
}

/* Finds the next run of changed chunks from *first on. Sets *first to its first chunk, and returns
 * the number of chunks, or 0. */
static size_t next_changed(const uint8_t* changed, size_t chunks, size_t* first) {
  size_t end;
  while (*first < chunks && changed[*first] == 0) ++*first;
  end = *first;
  while (end < chunks && changed[end] != 0) ++end;
  return end - *first;
}

lh_status lh_state_next_change(lh_state* state, uint32_t tensor, uint64_t* offset,
                               uint64_t* bytes) {
  const struct lhi_tensor* own;
  size_t first;
  size_t count;
  const lh_status status = check_state(state, tensor, "lh_state_next_change");
  if (status != LH_OK) return status;
  if (offset == NULL || bytes == NULL) {
    return lhi_refuse("lh_state_next_change", "%s is NULL", offset == NULL ? "offset" : "bytes");
  }
  own = &state->tensors[tensor];
  *bytes = 0;
  if (*offset >= own->bytes) return LH_OK;
  first = (size_t)(*offset / LH_STATE_CHUNK_BYTES);
  count = next_changed(state->changed + own->first_chunk, chunks_of(own->bytes), &first);
  if (count == 0) return LH_OK;
  if (first * LH_STATE_CHUNK_BYTES > *offset) *offset = first * LH_STATE_CHUNK_BYTES;
  *bytes = (first + count) * LH_STATE_CHUNK_BYTES;
  if (*bytes > own->bytes) *bytes = own->bytes;
  *bytes -= *offset;
  return LH_OK;
}

static lh_status check_same_client(const char* call, const lh_comm* comm, const lh_state* state) {
  if (state->client == comm->client) return LH_OK;
  return lhi_refuse(call, "state and comm belong to different clients");
}

static void kept_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  if (op->status == LH_OK) op->reply.kept = reply->u.kept;
}

static const struct lhi_op_type kKept = {kept_ended, NULL, NULL, NULL};

lh_status lh_kept_revision(lh_comm* comm, lh_state* state, uint64_t* revision_out) {
  static const char kCall[] = "lh_kept_revision";
  struct lh_ipc_request request;
  union lhi_answer answer;
  lh_status status = lhi_check_comm(comm, kCall);
  if (status == LH_OK) status = check_state(state, 0, kCall);
  if (status != LH_OK) return status;
  if (revision_out == NULL) return lhi_refuse(kCall, "revision_out is NULL");
  *revision_out = LH_NO_REVISION;
  status = check_same_client(kCall, comm, state);
  if (status != LH_OK) return status;
  memset(&request, 0, sizeof request);
  request.type = LH_IPC_KEPT;
  request.u.state.state = state->id;
  status = lhi_ask(kCall, comm, &kKept, &request, lhi_answer_deadline_ns(comm->client), &answer);
  if (status == LH_OK && answer.kept.kept != 0) *revision_out = answer.kept.revision;
  return status;
}

/* ------------------------------------------------------------------ copies */

/* Copies tensors that are not in the arena to the arena: all, or only touched ones. No mutex. */
static void copy_in(const lh_state* state, bool touched_only) {
  for (uint32_t i = 0; i < state->count; ++i) {
    const struct lhi_tensor* const tensor = &state->tensors[i];
    if (!is_copy(tensor) || (touched_only && state->touched[i] == 0)) continue;
    memcpy(tensor->data, tensor->own, tensor->bytes);
  }
}

/* Copies the changed chunks from the inbox to the caller's tensors. No mutex. */
static void write_changed(const lh_state* state) {
  for (uint32_t i = 0; i < state->count; ++i) {
    const struct lhi_tensor* const tensor = &state->tensors[i];
    const uint8_t* const changed = state->changed + tensor->first_chunk;
    const size_t chunks = chunks_of(tensor->bytes);
    size_t first = 0;
    size_t count;
    if (tensor->staged && !is_copy(tensor)) continue;
    while ((count = next_changed(changed, chunks, &first)) > 0) {
      const size_t at = first * LH_STATE_CHUNK_BYTES;
      size_t end = (first + count) * LH_STATE_CHUNK_BYTES;
      if (end > tensor->bytes) end = tensor->bytes;
      memcpy(tensor->own + at, tensor->inbox + at, end - at);
      first += count;
    }
  }
}

/* lhi_op_type.collect: gives the caller what came from other members. */
static void sync_collect(lh_op* op) {
  lh_state* const state = op->synced;
  if ((op->reply_flags & LH_IPC_CHANGED) != 0) write_changed(state);
  /* Between two syncs the inbox needs no memory. */
  if (state->inbox != NULL) (void)madvise(state->inbox, state->inbox_bytes, MADV_REMOVE);
  state->fetched = false;
}

/* ------------------------------------------------------------------ syncs */

/* peerd no longer fetches the state, because the member is gone. */
static void lost_locked(lh_state* state) {
  state->holder = NULL;
  /* The copies may differ from the caller's tensors: the next sync copies all of them. */
  memset(state->touched, 1, state->count);
}

/* lh_comm.on_free: the communicator is about to be freed. */
static void forget_locked(lh_comm* comm) {
  for (lh_state* state = comm->client->states; state != NULL; state = state->next) {
    if (state->holder == comm) lost_locked(state);
  }
}

static void sync_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  lh_state* const state = op->synced;
  state->holder = NULL;
  if (reply != NULL) {
    op->reply_flags = reply->flags;
    if (op->status == LH_OK) op->reply.sync = reply->u.sync;
    if (op->status != LH_OK || (reply->flags & (LH_IPC_CHANGED | LH_IPC_BACKGROUND)) != 0) {
      state->fetched = true;
    }
    if ((reply->flags & LH_IPC_BACKGROUND) != 0) {
      state->holder = op->comm;
      op->comm->on_free = forget_locked;
    }
  }
  if (op->comm->sync == op) op->comm->sync = NULL;
}

static void step_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  sync_ended(op, reply);
  lhi_step_ended(op, reply);
}

static bool sync_arrived(const lh_op* op) {
  return op->status == LH_OK && (op->reply_flags & LH_IPC_BACKGROUND) == 0 && op->synced->fetched;
}

/* lhi_op_type.over. `good`: the caller's tensors hold the state that all members agreed on. */
static void sync_over(lh_op* op, bool good) {
  lh_state* const state = op->synced;
  op->synced = NULL;
  state->op = NULL;
  /* If not `good`, the copies may differ from the caller's tensors: the next sync copies all. */
  memset(state->touched, good ? 0 : 1, state->count);
}

static const struct lhi_op_type kSync = {sync_ended, sync_arrived, sync_collect, sync_over};
static const struct lhi_op_type kStep = {step_ended, sync_arrived, sync_collect, sync_over};
static const struct lhi_op_type kTake = {sync_ended, sync_arrived, sync_collect, sync_over};
static const struct lhi_op_type kPrepare = {NULL, NULL, NULL, sync_over};

static void sync_info_locked(const lh_op* op, lh_sync_info_t* info) {
  const uint32_t size = info->struct_size;
  const bool ok = op->status == LH_OK;
  memset(info, 0, sizeof *info);
  info->struct_size = size;
  info->background = (op->reply_flags & LH_IPC_BACKGROUND) != 0;
  info->passed = op->passed || (op->reply_flags & LH_IPC_PASSED) != 0;
  if (!ok) return;
  info->resumed = (op->reply_flags & LH_IPC_RESUMED) != 0;
  info->sources = op->reply.sync.sources;
  info->revision = op->reply.sync.revision;
  info->hash_high = op->reply.sync.hash_high;
  info->hash_low = op->reply.sync.hash_low;
  info->bytes = op->reply.sync.bytes;
  info->seconds = (double)op->reply.sync.seconds_ns * 1e-9;
}

static lh_status check_sync(const char* call, const lh_comm* comm, const lh_sync_options* options,
                            lh_sync_options* given) {
  lh_status status = lhi_check_comm(comm, call);
  if (status != LH_OK) return status;
  if (options == NULL) return lhi_refuse(call, "options is NULL");
  status =
      lhi_take(call, "LH_SYNC_OPTIONS_INIT", options, LHI_SYNC_FIRST_BYTES, given, sizeof *given);
  if (status != LH_OK) return status;
  if (given->strategy < LH_POPULAR || given->strategy > LH_SEND) {
    return lhi_refuse(call, "strategy is %d; give an lh_strategy", (int)given->strategy);
  }
  if ((unsigned)given->hash > LH_HASH_ON_CHANGE) {
    return lhi_refuse(call, "hash is %d; give an lh_hash", (int)given->hash);
  }
  if (given->revision > LH_REVISION_MAX) {
    return lhi_refuse(call, "revision is %llu; at most 2^63 is possible",
                      (unsigned long long)given->revision);
  }
  return LH_OK;
}

/* LH_OK: no other call uses the state, and no operation uses its tensors. */
static lh_status check_unused_locked(const char* call, const lh_state* state) {
  if (state->op == NULL && !state->starting) return lhi_check_ops_locked(call, state);
  return lhi_fail(LH_FAILED_PRECONDITION,
                  "%s: another sync uses this state; wait for its end first", call);
}

/* LH_OK: the member may begin a sync of this state now. */
static lh_status may_sync_locked(const char* call, const lh_comm* comm, const lh_state* state,
                                 bool step) {
  lh_status status = lhi_member_check_locked(comm, call);
  if (status == LH_OK && !step) status = lhi_boundary_check_locked(comm, call);
  if (status == LH_OK) status = lhi_free_check_locked(comm, call);
  if (status == LH_OK && state->holder != comm && lhi_state_held_locked(state)) {
    status = lhi_fail(LH_FAILED_PRECONDITION,
                      "%s: peerd fetches the state for another member of this client; it must call "
                      "lh_state_take() first",
                      call);
  }
  return status == LH_OK ? check_unused_locked(call, state) : status;
}

static struct lh_ipc_request sync_request(const lh_op* op, uint32_t type,
                                          const lh_sync_options* given) {
  const lh_state* const state = given->state;
  struct lh_ipc_request request = lhi_request(type, op);
  request.member = op->comm->handle;
  request.u.sync.state = state->id;
  request.u.sync.revision = given->revision;
  request.u.sync.strategy = (uint32_t)given->strategy;
  if (given->hash == LH_HASH_ON_CHANGE) {
    request.u.sync.touched = lhi_range(&state->table_pin, state->touched);
  }
  return request;
}

/* Opens an op that uses the state. Returns true if the request must be sent, and false if the op
 * has ended already. */
static bool open_locked(lh_op* op, lh_comm* comm, lh_state* state) {
  op->synced = state;
  op->of_state = state->id;
  state->op = op;
  comm->sync = op;
  lhi_op_open_locked(op);
  return op->state == LHI_OPEN;
}

/* LH_OK: the op of a call that timed out used this state, so that this call may go on waiting. */
static lh_status check_parked_locked(const char* call, const lh_op* parked, const lh_state* state) {
  if (parked->of_state == state->id) return LH_OK;
  return lhi_fail(LH_FAILED_PRECONDITION,
                  parked->of_state == 0
                      ? "%s: a step without a state waits at this boundary already; call "
                        "lh_begin_step() again"
                      : "%s: a sync of another state goes on; call again with that state first",
                  call);
}

/* Begins a sync, or gives the op of an earlier call that timed out. With `step` the call also
 * passes a step boundary. */
static lh_status start(const char* call, lh_comm* comm, const lh_sync_options* given, bool step,
                       lh_op** op_out) {
  lh_client* const client = comm->client;
  lh_op** const parked = step ? &comm->parked_step : &comm->parked_sync;
  lh_state* const state = given->state;
  struct lh_ipc_request request;
  lh_op* op = NULL;
  lh_status status;
  bool send = false;
  bool held;
  if (state == NULL) return lhi_refuse(call, "state is NULL");
  status = check_same_client(call, comm, state);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client);
  lhi_drop_take_locked(comm);
  if (*parked != NULL) {
    status = check_parked_locked(call, *parked, state);
    if (status == LH_OK) {
      *op_out = *parked;
      *parked = NULL;
      (*op_out)->on_progress = given->progress;
      (*op_out)->progress_context = given->progress_context;
    }
    pthread_mutex_unlock(&client->mutex);
    return status;
  }
  if (state->holder != NULL && !lhi_state_held_locked(state)) lost_locked(state);
  status = may_sync_locked(call, comm, state, step);
  if (status == LH_OK) state->starting = true;
  held = lhi_state_held_locked(state);
  pthread_mutex_unlock(&client->mutex);
  if (status != LH_OK) return status;

  if (!held) copy_in(state, given->hash == LH_HASH_ON_CHANGE);

  pthread_mutex_lock(&client->mutex);
  state->starting = false;
  status = may_sync_locked(call, comm, state, step);
  if (status == LH_OK) {
    op = lhi_op_make(client, step ? &kStep : &kSync, comm);
    if (op == NULL) status = LH_UNAVAILABLE;
  }
  if (op != NULL) {
    op->on_progress = given->progress;
    op->progress_context = given->progress_context;
    send = open_locked(op, comm, state);
  }
  if (send) {
    /* The other members have passed the boundary that admitted this member. So this member only
     * takes part in the sync. */
    op->passed = step && comm->at_join;
    comm->stepping = step && !op->passed;
    request = sync_request(op, comm->stepping ? LH_IPC_STEP : LH_IPC_SYNC, given);
    comm->at_join = false;
  }
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &request, -1);
  *op_out = op;
  return status;
}

/* ------------------------------------------------------------------ ahead of a sync */

static lh_status may_prepare_locked(const char* call, const lh_state* state) {
  if (state->client->dead) return lhi_dead_locked(state->client);
  if (lhi_state_held_locked(state)) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: peerd fetches the state in the background; call lh_state_take() first",
                    call);
  }
  return check_unused_locked(call, state);
}

static lh_status prepare_start(const char* call, lh_state* state, lh_op** op_out) {
  struct lh_ipc_request request;
  lh_client* client;
  lh_op* op = NULL;
  bool send = false;
  lh_status status = check_state(state, 0, call);
  if (status != LH_OK) return status;
  client = state->client;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client);
  status = may_prepare_locked(call, state);
  if (status == LH_OK) state->starting = true;
  pthread_mutex_unlock(&client->mutex);
  if (status != LH_OK) return status;

  copy_in(state, false);

  pthread_mutex_lock(&client->mutex);
  state->starting = false;
  op = lhi_op_make(client, &kPrepare, NULL);
  if (op == NULL) status = LH_UNAVAILABLE;
  if (op != NULL) {
    op->synced = state;
    state->op = op;
    lhi_op_open_locked(op);
    send = op->state == LHI_OPEN;
    request = lhi_request(LH_IPC_PREPARE, op);
    request.u.state.state = state->id;
  }
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &request, -1);
  *op_out = op;
  return status;
}

lh_status lh_state_prepare_start(lh_state* state, lh_op** op_out) {
  static const char kCall[] = "lh_state_prepare_start";
  if (op_out == NULL) return lhi_refuse(kCall, "op_out is NULL");
  *op_out = NULL;
  return prepare_start(kCall, state, op_out);
}

lh_status lh_state_prepare(lh_state* state, int64_t timeout_ms) {
  static const char kCall[] = "lh_state_prepare";
  lh_op* op = NULL;
  lh_client* client;
  lh_status status = lhi_check_timeout(kCall, timeout_ms);
  if (status == LH_OK) status = prepare_start(kCall, state, &op);
  if (status != LH_OK) return status;
  client = state->client;
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, lhi_deadline_ns(timeout_ms))) {
    status = lhi_outcome_locked(op);
  } else {
    status = lhi_fail(
        LH_DEADLINE_EXCEEDED,
        "%s: peerd has not hashed all tensors in time; the state is in use until it has", kCall);
  }
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

/* ------------------------------------------------------------------ syncs, as calls */

static lh_status check_info(const char* call, lh_sync_info_t* info, lh_sync_info_t* own) {
  if (info == NULL) return LH_OK;
  *own = (lh_sync_info_t)LH_SYNC_INFO_INIT;
  return lhi_give(call, "LH_SYNC_INFO_INIT", own, sizeof *own, LHI_SYNC_INFO_FIRST_BYTES, info);
}

/* Fills info->background for a call that could not begin. */
static void info_before_sync(const lh_state* state, lh_sync_info_t* info) {
  if (state == NULL) return;
  pthread_mutex_lock(&state->client->mutex);
  info->background = lhi_state_held_locked(state);
  pthread_mutex_unlock(&state->client->mutex);
}

static lh_status sync_and_wait(const char* call, lh_comm* comm, const lh_sync_options* options,
                               int64_t timeout_ms, bool step, lh_sync_info_t* info) {
  lh_sync_options given = LH_SYNC_OPTIONS_INIT;
  lh_sync_info_t own = LH_SYNC_INFO_INIT;
  lh_op* op = NULL;
  lh_status status = check_sync(call, comm, options, &given);
  if (status == LH_OK) status = lhi_check_timeout(call, timeout_ms);
  if (status == LH_OK) status = check_info(call, info, &own);
  if (status != LH_OK) return status;
  status = start(call, comm, &given, step, &op);
  if (status == LH_OK) {
    status = lhi_finish(call, op, step ? &comm->parked_step : &comm->parked_sync, timeout_ms,
                        sync_info_locked, &own);
  } else {
    info_before_sync(given.state, &own);
  }
  if (info != NULL) {
    /* Cannot fail: check_info() has checked struct_size. */
    (void)lhi_give(call, "LH_SYNC_INFO_INIT", &own, sizeof own, LHI_SYNC_INFO_FIRST_BYTES, info);
  }
  return status;
}

lh_status lh_sync_state(lh_comm* comm, const lh_sync_options* options, int64_t timeout_ms,
                        lh_sync_info_t* info) {
  return sync_and_wait("lh_sync_state", comm, options, timeout_ms, false, info);
}

lh_status lh_begin_step_sync(lh_comm* comm, const lh_sync_options* options, int64_t timeout_ms,
                             lh_sync_info_t* info) {
  return sync_and_wait("lh_begin_step_sync", comm, options, timeout_ms, true, info);
}

/* Begins to take a fetched state, or gives the op of an earlier call that peerd did not answer. */
static lh_status take_start(const char* call, lh_comm* comm, lh_state* state, int64_t timeout_ms,
                            lh_op** op_out) {
  lh_client* const client = comm->client;
  struct lh_ipc_request request;
  lh_op* op = NULL;
  bool send = false;
  lh_status status = LH_OK;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client);
  if (comm->parked_take != NULL && comm->parked_take->of_state != state->id) {
    status = lhi_fail(
        LH_FAILED_PRECONDITION,
        "%s: lh_state_take() of another state has no outcome yet; call it again first", call);
  } else if (comm->parked_take != NULL) {
    op = comm->parked_take;
    comm->parked_take = NULL;
  } else {
    if (state->holder != NULL && !lhi_state_held_locked(state)) lost_locked(state);
    status = lhi_member_check_locked(comm, call);
    if (status == LH_OK) status = lhi_free_check_locked(comm, call);
    if (status == LH_OK && state->holder != comm) {
      status = lhi_fail(LH_FAILED_PRECONDITION,
                        "%s: peerd fetches nothing into this state in the background", call);
    }
    if (status == LH_OK) status = lhi_check_ops_locked(call, state);
    if (status == LH_OK) {
      op = lhi_op_make(client, &kTake, comm);
      if (op == NULL) status = LH_UNAVAILABLE;
    }
    if (op != NULL) {
      send = open_locked(op, comm, state);
      request = lhi_request(LH_IPC_TAKE, op);
      request.member = comm->handle;
      request.u.take.timeout_ms = (uint32_t)timeout_ms;
    }
  }
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &request, -1);
  *op_out = op;
  return status;
}

lh_status lh_state_take(lh_comm* comm, lh_state* state, int64_t timeout_ms, lh_sync_info_t* info) {
  static const char kCall[] = "lh_state_take";
  lh_sync_info_t own = LH_SYNC_INFO_INIT;
  lh_op* op = NULL;
  lh_status status = lhi_check_comm(comm, kCall);
  if (status == LH_OK) status = check_state(state, 0, kCall);
  if (status == LH_OK) status = lhi_check_timeout(kCall, timeout_ms);
  if (status == LH_OK) status = check_info(kCall, info, &own);
  if (status != LH_OK) return status;
  if (timeout_ms < 0 || timeout_ms > LH_STEP_DEADLINE_MS_MAX) timeout_ms = LH_STEP_DEADLINE_MS_MAX;
  status = take_start(kCall, comm, state, timeout_ms, &op);
  if (status == LH_OK) {
    /* peerd answers at the timeout, and its answer says whether the caller may use the tensors. If
     * peerd does not answer, for instance because it is stopped, give up a second later. */
    status = lhi_finish(kCall, op, &comm->parked_take, timeout_ms + LHI_TAKE_GRACE_MS,
                        sync_info_locked, &own);
  } else {
    info_before_sync(state, &own);
  }
  if (info != NULL) {
    (void)lhi_give(kCall, "LH_SYNC_INFO_INIT", &own, sizeof own, LHI_SYNC_INFO_FIRST_BYTES, info);
  }
  return status;
}

lh_status lh_sync_progress(lh_comm* comm, lh_progress* progress) {
  static const char kCall[] = "lh_sync_progress";
  lh_progress own = LH_PROGRESS_INIT;
  lh_status status = lhi_check_comm(comm, kCall);
  if (status != LH_OK) return status;
  if (progress == NULL) return lhi_refuse(kCall, "progress is NULL");
  pthread_mutex_lock(&comm->client->mutex);
  lhi_pump_locked(comm->client);
  if (comm->sync != NULL) own = lhi_progress_locked(comm->sync);
  pthread_mutex_unlock(&comm->client->mutex);
  return lhi_give(kCall, "LH_PROGRESS_INIT", &own, sizeof own, sizeof own, progress);
}

static lh_status sync_start(const char* call, lh_comm* comm, const lh_sync_options* options,
                            bool step, lh_op** op_out) {
  lh_sync_options given = LH_SYNC_OPTIONS_INIT;
  lh_status status;
  if (op_out == NULL) return lhi_refuse(call, "op_out is NULL");
  *op_out = NULL;
  status = check_sync(call, comm, options, &given);
  if (status != LH_OK) return status;
  return start(call, comm, &given, step, op_out);
}

lh_status lh_sync_state_start(lh_comm* comm, const lh_sync_options* options, lh_op** op_out) {
  return sync_start("lh_sync_state_start", comm, options, false, op_out);
}

lh_status lh_begin_step_sync_start(lh_comm* comm, const lh_sync_options* options, lh_op** op_out) {
  return sync_start("lh_begin_step_sync_start", comm, options, true, op_out);
}

lh_status lh_sync_info(lh_op* op, lh_sync_info_t* info) {
  lh_sync_info_t own = LH_SYNC_INFO_INIT;
  lh_status status;
  bool ended;
  if (op == NULL) return lhi_refuse("lh_sync_info", "op is NULL");
  if (info == NULL) return lhi_refuse("lh_sync_info", "info is NULL");
  status = lhi_process_check(op->client, "lh_sync_info");
  if (status != LH_OK) return status;
  if (op->of_state == 0) {
    return lhi_refuse("lh_sync_info", "op is not a sync; use lh_op_info() for a collective");
  }
  pthread_mutex_lock(&op->client->mutex);
  ended = op->state == LHI_ENDED;
  if (ended) sync_info_locked(op, &own);
  pthread_mutex_unlock(&op->client->mutex);
  if (!ended) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "lh_sync_info: there is no outcome yet; call lh_op_wait() first");
  }
  return lhi_give("lh_sync_info", "LH_SYNC_INFO_INIT", &own, sizeof own, LHI_SYNC_INFO_FIRST_BYTES,
                  info);
}
