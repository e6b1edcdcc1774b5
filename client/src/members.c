#include "client/src/members.h"

#include <stdlib.h>

#include "client/src/error.h"

void lhi_member_free_memory(lh_comm* comm) {
  while (comm->queue_first != NULL) {
    struct lhi_queued* const first = comm->queue_first;
    comm->queue_first = first->next;
    free(first);
  }
  free(comm->gone_text);
  free(comm);
}

void lhi_member_add_locked(lh_comm* comm) {
  lh_client* const client = comm->client;
  comm->next = client->comms;
  if (client->comms != NULL) client->comms->previous = comm;
  client->comms = comm;
}

void lhi_member_use_locked(lh_comm* comm) { ++comm->users; }

void lhi_member_unuse_locked(lh_comm* comm) {
  if (--comm->users > 0 || comm->held) return;
  if (comm->previous != NULL) {
    comm->previous->next = comm->next;
  } else {
    comm->client->comms = comm->next;
  }
  if (comm->next != NULL) comm->next->previous = comm->previous;
  if (comm->on_free != NULL) comm->on_free(comm);
  lhi_member_free_memory(comm);
}

lh_comm* lhi_member_find_locked(lh_client* client, uint64_t handle) {
  lh_comm* comm = client->comms;
  while (comm != NULL && (!comm->admitted || comm->handle != handle)) comm = comm->next;
  return comm;
}

void lhi_member_gone_locked(lh_comm* comm, lh_status status, const char* text) {
  if (comm->gone != LH_OK) return;
  comm->gone = status;
  comm->gone_text = text != NULL ? lhi_copy_text(text) : NULL;
}
