/* The arena, with peerd: memory for callers, and for copies of what they have elsewhere. */
#ifndef LONGHAUL_CLIENT_MEMORY_H_
#define LONGHAUL_CLIENT_MEMORY_H_

#include "client/src/objects.h"

/* A block from the arena; adds a region when none has room. LH_UNAVAILABLE also where peerd has not
 * answered by the deadline. */
lh_status lhi_alloc(lh_client *client, const char *call, size_t bytes, int64_t deadline_ns,
                    void **data_out);
/* A block in a region of its own: pages come as peerd writes to them, and may be given back
 * (MADV_REMOVE) while no sync is on. */
lh_status lhi_inbox(lh_client *client, const char *call, size_t bytes, int64_t deadline_ns,
                    void **data_out);
void lhi_give_back_locked(lh_client *client, void *data);
/* Removes empty regions beyond those kept. Not locked. */
void lhi_trim(lh_client *client);

#endif /* LONGHAUL_CLIENT_MEMORY_H_ */
