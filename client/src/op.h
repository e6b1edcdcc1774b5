/* Waiting for operations that the caller has the handle of. */
#ifndef LONGHAUL_CLIENT_OP_H_
#define LONGHAUL_CLIENT_OP_H_

#include "client/src/objects.h"

#define LHI_OP_INFO_FIRST_BYTES (offsetof(lh_op_info_t, seconds_wait) + sizeof(double))

/* What is known of an op that has ended; zeros otherwise. */
lh_op_info_t lhi_op_info_locked(const lh_op *op);

#endif /* LONGHAUL_CLIENT_OP_H_ */
