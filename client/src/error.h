/* Outcomes of calls with their text, checks of what a caller passes, and time. */
#ifndef LONGHAUL_CLIENT_ERROR_H_
#define LONGHAUL_CLIENT_ERROR_H_

#include <stddef.h>
#include <stdint.h>

#include "client/include/longhaul/longhaul.h"

#define LHI_NEVER INT64_MAX

/* Sets the thread's text and returns `status`. */
lh_status lhi_fail(lh_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Copies options or info structs across versions: `from` begins with its own size, at least
 * `first_bytes`; what this library does not know has to be zero. */
lh_status lhi_take(const char *call, const char *init, const void *from, size_t first_bytes,
                   void *to, size_t to_bytes);
/* The reverse: writes as much of `from` as the caller's struct holds, and leaves its struct_size.
 */
lh_status lhi_give(const char *call, const char *init, const void *from, size_t from_bytes,
                   size_t first_bytes, void *to);
lh_status lhi_check_timeout(const char *call, int64_t timeout_ms);
/* Of a run, a member, a cohort: `what` says which. */
lh_status lhi_check_name(const char *call, const char *what, const char *name);
int64_t lhi_now_ns(void);
/* LHI_NEVER for LH_FOREVER. */
int64_t lhi_deadline_ns(int64_t timeout_ms);
char *lhi_copy_text(const char *text); /* NULL when memory is short; cut to one reply's length */

#endif /* LONGHAUL_CLIENT_ERROR_H_ */
