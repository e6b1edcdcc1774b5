/* The members that a client has: who uses the record of each, and what peerd says of them.
 *
 * The record is the communicator that the caller has. It goes when neither the caller nor an
 * operation uses it.
 */
#ifndef LONGHAUL_CLIENT_MEMBERS_H_
#define LONGHAUL_CLIENT_MEMBERS_H_

#include "client/src/objects.h"

void lhi_member_add_locked(lh_comm *comm);
void lhi_member_use_locked(lh_comm *comm);
void lhi_member_unuse_locked(lh_comm *comm);
void lhi_member_free_memory(lh_comm *comm);

/* The admitted member that peerd knows by the handle, or NULL. */
lh_comm *lhi_member_find_locked(lh_client *client, uint64_t handle);
/* It is out, or was never in. The first reason stays. `text` may be NULL. */
void lhi_member_gone_locked(lh_comm *comm, lh_status status, const char *text);

#endif /* LONGHAUL_CLIENT_MEMBERS_H_ */
