/* Memory shared with peerd: blocks for callers, and blocks for copies of tensors that are not in
 * the arena. */
#ifndef LONGHAUL_CLIENT_MEMORY_H_
#define LONGHAUL_CLIENT_MEMORY_H_

#include "client/src/objects.h"

/* Takes a block from the arena; adds a region if none has room. LH_UNAVAILABLE: out of memory, the
 * limit of peerd is reached, or peerd has not answered by the deadline. Mutex not held. */
lh_status lhi_alloc(lh_client* client, const char* call, size_t bytes, int64_t deadline_ns,
                    void** data_out);
/* Takes a block in a region of its own, for what a sync fetches. The block uses no memory until
 * peerd writes to it. The caller may give the pages back (MADV_REMOVE) while no sync uses them.
 * Mutex not held. */
lh_status lhi_inbox(lh_client* client, const char* call, size_t bytes, int64_t deadline_ns,
                    void** data_out);
/* Frees a block of the arena; NULL is allowed. */
void lhi_give_back_locked(lh_client* client, void* data);
/* Removes the empty regions that need not be kept (lhi_arena_surplus()). Mutex not held. */
void lhi_trim(lh_client* client);

#endif /* LONGHAUL_CLIENT_MEMORY_H_ */
