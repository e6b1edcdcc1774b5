/* The members of a client.
 *
 * The record of a member is the lh_comm whose handle the caller has. It is freed when the caller
 * has freed its handle and no operation uses the member.
 */
#ifndef LONGHAUL_CLIENT_MEMBERS_H_
#define LONGHAUL_CLIENT_MEMBERS_H_

#include "client/src/objects.h"

/* Adds a new member to the list of its client. */
void lhi_member_add_locked(lh_comm* comm);
/* Called when an operation starts and when it stops using the member. The end may free the member.
 */
void lhi_member_use_locked(lh_comm* comm);
void lhi_member_unuse_locked(lh_comm* comm);
/* Frees the memory only. Does not change the client's list of members. */
void lhi_member_free_memory(lh_comm* comm);

/* Returns the admitted member with this handle at peerd, or NULL. */
lh_comm* lhi_member_find_locked(lh_client* client, uint64_t handle);
/* Notes that the member was removed, or never admitted. The first reason is kept. `text` may be
 * NULL. */
void lhi_member_gone_locked(lh_comm* comm, lh_status status, const char* text);

#endif /* LONGHAUL_CLIENT_MEMBERS_H_ */
