/* A request beside those of ipc.h, by which nothing is decided: why do members of a group wait? Its
 * LH_IPC_DONE has the answer in u.text, for people.
 *
 * In a header of its own, because half of the tree depends on ipc.h.
 */
#ifndef LONGHAUL_PROTO_WIRE_IPC_WHY_H_
#define LONGHAUL_PROTO_WIRE_IPC_WHY_H_

#include <stdint.h>
#include <string.h>

#include "proto/wire/ipc.h"
#include "proto/wire/limits.h"

/* A number of lh_ipc_type. Of no member: one that was removed may ask, too. */
#define LH_IPC_WHY 17u

/* The body of the request. */
struct lh_ipc_why {
  uint32_t group;
  uint32_t zero;
  char run[LH_RUN_NAME_BYTES_MAX + 8]; /* NUL-terminated */
};

static inline void lh_ipc_put_why(const struct lh_ipc_why* why, struct lh_ipc_request* request) {
  memcpy(request->u.bytes, why, sizeof *why);
}
static inline struct lh_ipc_why lh_ipc_get_why(const struct lh_ipc_request* request) {
  struct lh_ipc_why why;
  memcpy(&why, request->u.bytes, sizeof why);
  return why;
}

#endif /* LONGHAUL_PROTO_WIRE_IPC_WHY_H_ */
