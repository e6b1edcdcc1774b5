#define _GNU_SOURCE
#include "client/src/memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/request.h"

void lhi_give_back_locked(lh_client* client, void* data) {
  if (data != NULL) (void)lhi_arena_give(&client->arena, data);
}

void lhi_trim(lh_client* client) {
  struct lhi_region* region;
  pthread_mutex_lock(&client->mutex);
  lhi_arena_look(&client->arena);
  while ((region = lhi_arena_surplus(&client->arena)) != NULL) {
    struct lh_ipc_request request;
    lh_op* const op = lhi_op_new_locked(client, &lhi_question, NULL);
    /* Out of memory for the request: keep the region. */
    if (op == NULL) break;
    request = lhi_request(LH_IPC_UNREGION, op);
    request.u.region.region = region->id;
    if (client->forked) lhi_region_drop(region);
    lhi_arena_remove(&client->arena, region);
    const bool ask = op->state == LHI_OPEN;
    lhi_op_release_locked(op);
    pthread_mutex_unlock(&client->mutex);
    if (ask) lhi_send(client, &request, -1);
    pthread_mutex_lock(&client->mutex);
  }
  pthread_mutex_unlock(&client->mutex);
}

/* Makes a region of `region_bytes`, registers it with peerd, and takes a block of `bytes` from it.
 * An inbox is one block that covers the region. */
static lh_status add_region(lh_client* client, const char* call, size_t region_bytes, size_t bytes,
                            bool inbox, int64_t deadline_ns, void** data_out) {
  struct lh_ipc_request request;
  struct lhi_region* region;
  uint8_t* base = NULL;
  int fd = -1;
  uint64_t id = 0;
  lh_op* op;
  lh_status status;
  const char* const failed = lhi_region_map(region_bytes, &base, &fd);
  if (failed != NULL) {
    return lhi_fail(LH_UNAVAILABLE,
                    "%s: no shared memory of %zu bytes: %s failed (%s); free memory on this host",
                    call, region_bytes, failed, strerror(errno));
  }
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, &lhi_question, NULL);
  if (op != NULL) {
    id = client->next_region++;
    request = lhi_request(LH_IPC_REGION, op);
    request.u.region.region = id;
    request.u.region.bytes = region_bytes;
    if (inbox) request.u.region.flags = LH_IPC_REGION_INBOX;
  }
  pthread_mutex_unlock(&client->mutex);
  if (op == NULL) {
    status = LH_UNAVAILABLE;
  } else {
    lhi_send(client, &request, fd);
    status = lhi_call(op, call, deadline_ns, NULL);
    if (status == LH_UNAVAILABLE && lhi_now_ns() >= deadline_ns) {
      /* If peerd still answers, it must give the region up again. */
      memset(&request, 0, sizeof request);
      request.type = LH_IPC_UNREGION;
      request.u.region.region = id;
      (void)lhi_tell(client, &request);
    }
  }
  /* A child of fork() gets a view of its own, for which it needs the descriptor; it has no use for
   * an inbox. */
  if (inbox) (void)madvise(base, region_bytes, MADV_DONTFORK);
  if (inbox || status != LH_OK) {
    close(fd);
    fd = -1;
  }
  if (status != LH_OK) {
    munmap(base, region_bytes);
    return status;
  }
  pthread_mutex_lock(&client->mutex);
  region = lhi_arena_add(&client->arena, id, base, region_bytes);
  if (region != NULL) region->fd = fd;
  if (region == NULL) {
    munmap(base, region_bytes);
    if (fd >= 0) close(fd);
    status = lhi_fail(LH_UNAVAILABLE, "%s: out of memory", call);
  } else if (inbox) {
    *data_out = lhi_arena_take_inbox(region);
  } else if ((*data_out = lhi_arena_take(&client->arena, bytes)) == NULL) {
    status = lhi_fail(LH_UNAVAILABLE, "%s: out of memory", call);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

lh_status lhi_inbox(lh_client* client, const char* call, size_t bytes, int64_t deadline_ns,
                    void** data_out) {
  if (bytes > LH_REGION_BYTES_MAX - LHI_REGION_ROUND) {
    return lhi_refuse(call, "%zu bytes in memory from lh_alloc(); a state has at most 2^40", bytes);
  }
  return add_region(client, call, lhi_region_bytes(&client->arena, bytes, true), bytes, true,
                    deadline_ns, data_out);
}

lh_status lhi_alloc(lh_client* client, const char* call, size_t bytes, int64_t deadline_ns,
                    void** data_out) {
  struct lhi_text before;
  size_t region_bytes;
  size_t least_bytes;
  lh_status status;
  if (bytes > LH_REGION_BYTES_MAX - LHI_REGION_ROUND) {
    return lhi_refuse(call, "%zu bytes asked for; one buffer has at most 2^40", bytes);
  }
  pthread_mutex_lock(&client->mutex);
  if (client->dead) {
    status = lhi_dead_locked(client);
    pthread_mutex_unlock(&client->mutex);
    return status;
  }
  *data_out = lhi_arena_take(&client->arena, bytes);
  region_bytes = lhi_region_bytes(&client->arena, bytes, false);
  least_bytes = lhi_region_bytes(&client->arena, bytes, true);
  pthread_mutex_unlock(&client->mutex);
  if (*data_out != NULL) return LH_OK;
  lhi_note_text(&before);
  status = add_region(client, call, region_bytes, bytes, false, deadline_ns, data_out);
  /* The limit of peerd may leave room for this block, if not for a larger region. */
  if (status == LH_UNAVAILABLE && least_bytes < region_bytes && lhi_now_ns() < deadline_ns) {
    status = add_region(client, call, least_bytes, bytes, false, deadline_ns, data_out);
    if (status == LH_OK) lhi_forget_failure(&before);
  }
  return status;
}

lh_status lh_alloc(lh_client* client, size_t bytes, void** data_out) {
  lh_status status;
  if (data_out == NULL) return lhi_refuse("lh_alloc", "data_out is NULL");
  *data_out = NULL;
  if (client == NULL) return lhi_refuse("lh_alloc", "client is NULL");
  if (bytes == 0) return lhi_refuse("lh_alloc", "bytes is 0; ask for at least 1");
  status = lhi_process_check(client, "lh_alloc");
  if (status != LH_OK) return status;
  return lhi_alloc(client, "lh_alloc", bytes, lhi_answer_deadline_ns(client), data_out);
}

lh_status lh_free(lh_client* client, void* data) {
  lh_status status;
  const struct lhi_region* region;
  const struct lhi_block* block = NULL;
  if (data == NULL) return LH_OK;
  if (client == NULL) return lhi_refuse("lh_free", "client is NULL");
  status = lhi_process_check(client, "lh_free");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  region = lhi_arena_region(&client->arena, data);
  if (region != NULL) block = lhi_region_block(region, data, 1);
  /* The operation that used the buffer may have ended: read the replies that have come. */
  if (block != NULL && block->pins > 0) lhi_pump_locked(client);
  if (block == NULL || region->base + block->offset != (uint8_t*)data) {
    status = lhi_refuse("lh_free", "%p is not from lh_alloc(), or was freed already", data);
  } else if (block->pins > 0) {
    status = lhi_fail(LH_FAILED_PRECONDITION,
                      "lh_free: an operation in flight or a state uses the buffer; call "
                      "lh_op_wait() or lh_state_free() first");
  } else {
    (void)lhi_arena_give(&client->arena, data);
  }
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK) lhi_trim(client);
  return status;
}
