#define _GNU_SOURCE
#include "client/src/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/wire/kinds.h"

/* No struct of a later release will be larger. A larger struct_size is garbage. */
#define LHI_STRUCT_BYTES_MAX 4096

#define LHI_STRING(x) #x
#define LHI_VERSION_TEXT(a, b, c) LHI_STRING(a) "." LHI_STRING(b) "." LHI_STRING(c)

static __thread char last_error[LHI_TEXT_BYTES];

const char* lh_version(void) {
  return LHI_VERSION_TEXT(LH_VERSION_MAJOR, LH_VERSION_MINOR, LH_VERSION_PATCH);
}

const char* lh_strerror(lh_status status) {
  switch (status) {
    case LH_OK:
      return "LH_OK";
    case LH_INVALID_ARGUMENT:
      return "LH_INVALID_ARGUMENT";
    case LH_FAILED_PRECONDITION:
      return "LH_FAILED_PRECONDITION";
    case LH_UNAVAILABLE:
      return "LH_UNAVAILABLE";
    case LH_ABORTED:
      return "LH_ABORTED";
    case LH_DEADLINE_EXCEEDED:
      return "LH_DEADLINE_EXCEEDED";
    case LH_TOO_FEW_MEMBERS:
      return "LH_TOO_FEW_MEMBERS";
    case LH_EVICTED:
      return "LH_EVICTED";
    case LH_STATE_MISMATCH:
      return "LH_STATE_MISMATCH";
    case LH_INTERNAL:
      return "LH_INTERNAL";
  }
  return "unknown lh_status";
}

const char* lh_last_error(void) { return last_error; }

void lhi_note_text(struct lhi_text* text) { memcpy(text->bytes, last_error, sizeof last_error); }

void lhi_forget_failure(const struct lhi_text* before) {
  memcpy(last_error, before->bytes, sizeof last_error);
}

size_t lh_dtype_size(lh_dtype dtype) { return lh_wire_dtype_bytes((int)dtype); }

/* A copy first: an argument may point to last_error. */
static lh_status fail(lh_status status, const char* call, const char* format, va_list arguments) {
  char text[LHI_TEXT_BYTES];
  const int begin = call == NULL ? 0 : snprintf(text, sizeof text, "%s: ", call);
  vsnprintf(text + begin, sizeof text - (size_t)begin, format, arguments);
  memcpy(last_error, text, sizeof text);
  return status;
}

lh_status lhi_fail(lh_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fail(status, NULL, format, arguments);
  va_end(arguments);
  return status;
}

lh_status lhi_refuse(const char* call, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fail(LH_INVALID_ARGUMENT, call, format, arguments);
  va_end(arguments);
  return LH_INVALID_ARGUMENT;
}

lh_status lhi_check_struct(const char* call, const char* init, const void* given,
                           size_t first_bytes) {
  uint32_t size;
  memcpy(&size, given, sizeof size);
  if (size >= first_bytes && size <= LHI_STRUCT_BYTES_MAX) return LH_OK;
  return lhi_refuse(call, "struct_size is %u; initialize the struct with %s", (unsigned)size, init);
}

lh_status lhi_take(const char* call, const char* init, const void* from, size_t first_bytes,
                   void* to, size_t to_bytes) {
  uint32_t size;
  const lh_status status = lhi_check_struct(call, init, from, first_bytes);
  if (status != LH_OK) return status;
  memcpy(&size, from, sizeof size);
  for (size_t i = to_bytes; i < size; ++i) {
    if (((const uint8_t*)from)[i] != 0) {
      return lhi_refuse(
          call, "an option is set that this library (%s) does not know; install a newer library",
          lh_version());
    }
  }
  memcpy(to, from, size < to_bytes ? size : to_bytes);
  return LH_OK;
}

lh_status lhi_give(const char* call, const char* init, const void* from, size_t from_bytes,
                   size_t first_bytes, void* to) {
  uint32_t size;
  const lh_status status = lhi_check_struct(call, init, to, first_bytes);
  if (status != LH_OK) return status;
  memcpy(&size, to, sizeof size);
  memset((uint8_t*)to + sizeof size, 0, size - sizeof size);
  memcpy((uint8_t*)to + sizeof size, (const uint8_t*)from + sizeof size,
         (size < from_bytes ? size : from_bytes) - sizeof size);
  return LH_OK;
}

lh_status lhi_check_timeout(const char* call, int64_t timeout_ms) {
  if (timeout_ms >= LH_FOREVER) return LH_OK;
  return lhi_refuse(call, "timeout_ms is %lld; give LH_FOREVER, or 0 or more",
                    (long long)timeout_ms);
}

typedef char lhi_names_are_of_one_length[LH_RUN_NAME_BYTES_MAX == LH_MEMBER_NAME_BYTES_MAX &&
                                                 LH_RUN_NAME_BYTES_MAX == LH_COHORT_NAME_BYTES_MAX
                                             ? 1
                                             : -1];

lh_status lhi_check_name(const char* call, const char* what, const char* name) {
  static const char kAllowed[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  size_t length;
  if (name == NULL) return lhi_refuse(call, "%s is NULL", what);
  length = strlen(name);
  if (length > 0 && length <= LH_RUN_NAME_BYTES_MAX && strspn(name, kAllowed) == length)
    return LH_OK;
  return lhi_refuse(call, "%s must be 1 to %d characters of [A-Za-z0-9._-]", what,
                    LH_RUN_NAME_BYTES_MAX);
}

int64_t lhi_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t lhi_deadline_ns(int64_t timeout_ms) {
  const int64_t now = lhi_now_ns();
  if (timeout_ms < 0 || timeout_ms > (INT64_MAX - now) / 1000000 - 1) return LHI_NEVER;
  return now + timeout_ms * 1000000;
}

char* lhi_copy_text(const char* text) {
  const size_t length = strnlen(text, LHI_TEXT_BYTES);
  char* const copy = malloc(length + 1);
  if (copy == NULL) return NULL;
  memcpy(copy, text, length);
  copy[length] = '\0';
  return copy;
}
