/* lh_op_wait(), lh_op_test(), lh_op_info() and lh_op_free(). */
#ifndef LONGHAUL_CLIENT_OP_H_
#define LONGHAUL_CLIENT_OP_H_

#include "client/src/objects.h"

#define LHI_OP_INFO_FIRST_BYTES (offsetof(lh_op_info_t, seconds_wait) + sizeof(double))

/* Returns what an op did. If the op has not ended, all fields are 0. If its outcome is not LH_OK,
 * all fields but `staged` are 0. */
lh_op_info_t lhi_op_info_locked(const lh_op* op);
/* Copies the ids of the members to the array in the caller's struct `to`, and the array itself to
 * *info, which is the result of lhi_op_info_locked(). */
void lhi_op_members_locked(const lh_op* op, const lh_op_info_t* to, lh_op_info_t* info);

#endif /* LONGHAUL_CLIENT_OP_H_ */
