/* Copies of whole tensors. */
#ifndef LONGHAUL_CLIENT_COPY_H_
#define LONGHAUL_CLIENT_COPY_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What is smaller is likely to be still in a cache when it is used next, and goes by memcpy(). */
#define LHI_STREAM_BYTES_MIN ((size_t)8 << 20)

/* memcpy() for tensors: of large ones the target goes to memory past the caches, in two thirds of
 * the time. The C library does the same, but from a size on that it takes from the caches' own: in
 * a virtual machine those of the whole host. */
void lhi_copy(void *to, const void *from, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* LONGHAUL_CLIENT_COPY_H_ */
