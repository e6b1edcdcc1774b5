#define _GNU_SOURCE
#include "client/src/shared.h"

#include <sys/mman.h>

bool lhi_shared_open(lh_client* client, int* fd_out) {
  uint8_t* base;
  if (lhi_region_map(sizeof *client->shared, &base, fd_out) != NULL) return false;
  (void)madvise(base, sizeof *client->shared, MADV_DONTFORK);
  client->shared = (struct lh_ipc_shared*)(void*)base;
  return true;
}

void lhi_shared_close(lh_client* client) {
  if (client->shared != NULL) munmap(client->shared, sizeof *client->shared);
  client->shared = NULL;
}

bool lhi_shared_put(lh_client* client, const struct lh_ipc_request* request, bool* look) {
  struct lh_ipc_shared* const shared = client->shared;
  struct lh_ipc_queued_request* next;
  if (shared == NULL || !lh_ipc_queue_open(&shared->requests, client->put, client->sent))
    return false;
  next = &shared->request[client->put % LH_IPC_QUEUE_ENTRIES];
  next->frames = client->sent;
  next->request = *request;
  *look = !lh_ipc_queue_show(&shared->requests, ++client->put, client->sent);
  return true;
}

void lhi_shared_wake(lh_client* client, bool awake) {
  if (client->shared != NULL) lh_ipc_queue_wake(&client->shared->replies, awake);
}

void lhi_shared_look(lh_client* client, uint64_t frames) {
  if (client->shared != NULL) (void)lh_ipc_queue_look(&client->shared->replies, frames);
}

/* How many replies peerd has put in that were not taken. peerd is another program: it may say
 * anything. */
static uint32_t waiting(const lh_client* client) {
  if (client->shared == NULL) return 0;
  return __atomic_load_n(&client->shared->replies.put, __ATOMIC_SEQ_CST) - client->taken;
}

bool lhi_shared_broken(const lh_client* client) { return waiting(client) > LH_IPC_QUEUE_ENTRIES; }

struct lh_ipc_reply* lhi_shared_next(const lh_client* client) {
  struct lh_ipc_shared* const shared = client->shared;
  const uint32_t count = waiting(client);
  struct lh_ipc_queued_reply* next;
  if (count == 0 || count > LH_IPC_QUEUE_ENTRIES) return NULL;
  next = &shared->reply[client->taken % LH_IPC_QUEUE_ENTRIES];
  return next->frames <= client->read ? &next->reply : NULL;
}

void lhi_shared_pop(lh_client* client) {
  lh_ipc_queue_take(&client->shared->replies, ++client->taken);
}
