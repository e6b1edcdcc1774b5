/* Copies whole tensors. */
#ifndef LONGHAUL_CLIENT_COPY_H_
#define LONGHAUL_CLIENT_COPY_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Smaller copies use memcpy(): their target is probably still in a cache at its next use. */
#define LHI_STREAM_BYTES_MIN ((size_t)8 << 20)

/* memcpy() for tensors. A large target is written past the caches, which takes half to two thirds
 * of the time. The C library does the same, but only for copies above a size that it derives from
 * the size of the caches. A virtual machine reports the caches of the whole host, so that size is
 * too large there. */
void lhi_copy(void* to, const void* from, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* LONGHAUL_CLIENT_COPY_H_ */
