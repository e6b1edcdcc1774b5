/* Error texts, checks of arguments, and time. */
#ifndef LONGHAUL_CLIENT_ERROR_H_
#define LONGHAUL_CLIENT_ERROR_H_

#include <stddef.h>
#include <stdint.h>

#include "client/include/longhaul/longhaul.h"
#include "proto/wire/limits.h"

#define LHI_TEXT_BYTES (LH_ERROR_TEXT_BYTES_MAX + 192)

#define LHI_NEVER INT64_MAX

/* Sets the text of lh_last_error() for this thread, and returns `status`. */
lh_status lhi_fail(lh_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
/* lhi_fail() with LH_INVALID_ARGUMENT. The text begins with the name of the public function. */
lh_status lhi_refuse(const char* call, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
/* Sets a field of a request, if it is wide enough for the option `name`. Otherwise the caller
 * returns what lhi_refuse() does. */
#define LHI_PUT(call, field, name, value) \
  if (((field) = (value)) != (value))     \
  return lhi_refuse(call, "%s is %lld, and there is no such value", name, (long long)(value))
/* Copies the caller's options (`from`) to `to`, which holds the defaults. `from` begins with its
 * own size, which must be at least `first_bytes`, the size in the first release. A longer `from`
 * must be zero beyond `to_bytes`. `init` names the macro for the text of LH_INVALID_ARGUMENT. */
lh_status lhi_take(const char* call, const char* init, const void* from, size_t first_bytes,
                   void* to, size_t to_bytes);
/* LH_OK: the caller's struct begins with its own size, which is possible. Nothing else of the
 * struct may be read or written before. */
lh_status lhi_check_struct(const char* call, const char* init, const void* given,
                           size_t first_bytes);
/* Copies an info (`from`) to the caller's struct (`to`): as much as fits, and zeros beyond. Keeps
 * the caller's struct_size, which must be at least `first_bytes`. */
lh_status lhi_give(const char* call, const char* init, const void* from, size_t from_bytes,
                   size_t first_bytes, void* to);
/* For a call that may succeed after a try that failed: the text of lh_last_error() before the call
 * comes back with lhi_forget_failure(). */
struct lhi_text {
  char bytes[LHI_TEXT_BYTES];
};
void lhi_note_text(struct lhi_text* text);
void lhi_forget_failure(const struct lhi_text* before);
/* LH_OK: the timeout is 0 or more, or LH_FOREVER. */
lh_status lhi_check_timeout(const char* call, int64_t timeout_ms);
/* Checks the name of a run, a member or a cohort; `what` says which it is, for the text. */
lh_status lhi_check_name(const char* call, const char* what, const char* name);
/* The monotonic clock, in nanoseconds. */
int64_t lhi_now_ns(void);
/* Returns the end of a timeout that begins now. LHI_NEVER for LH_FOREVER. */
int64_t lhi_deadline_ns(int64_t timeout_ms);
/* Returns a copy, cut to the length of the longest text. The caller frees the copy with free().
 * NULL: out of memory. */
char* lhi_copy_text(const char* text);

#endif /* LONGHAUL_CLIENT_ERROR_H_ */
