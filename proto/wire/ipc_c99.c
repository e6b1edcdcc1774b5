/* The layout as a C compiler sees it, to be compared with what C++ sees. */
#include <stddef.h>

#include "proto/wire/ipc.h"

size_t IpcRequestBytesInC(void) { return sizeof(struct lh_ipc_request); }
size_t IpcReplyBytesInC(void) { return sizeof(struct lh_ipc_reply); }
size_t IpcReplyUnionOffsetInC(void) { return offsetof(struct lh_ipc_reply, u); }
size_t IpcTensorBytesInC(void) { return sizeof(struct lh_ipc_tensor); }
size_t IpcPieceBytesInC(void) { return sizeof(struct lh_ipc_piece); }
