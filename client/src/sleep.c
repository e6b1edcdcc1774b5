#define _GNU_SOURCE
#include "client/src/sleep.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/src/error.h"

void lhi_sleep_locked(lh_client* client, int64_t deadline_ns) {
  const uint32_t seen = client->wakes;
  struct timespec left;
  struct timespec* timeout = NULL;
  if (deadline_ns != LHI_NEVER) {
    int64_t ns = deadline_ns - lhi_now_ns();
    if (ns < 0) ns = 0;
    left.tv_sec = (time_t)(ns / 1000000000);
    left.tv_nsec = (long)(ns % 1000000000);
    timeout = &left;
  }
  ++client->sleepers;
  pthread_mutex_unlock(&client->mutex);
  /* A condition variable with the monotonic clock would need a newer C library. */
  syscall(SYS_futex, &client->wakes, FUTEX_WAIT_PRIVATE, seen, timeout, NULL, 0);
  pthread_mutex_lock(&client->mutex);
  --client->sleepers;
}

void lhi_wake_locked(lh_client* client) {
  __atomic_add_fetch(&client->wakes, 1, __ATOMIC_SEQ_CST);
  if (client->sleepers > 0) {
    syscall(SYS_futex, &client->wakes, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
  }
}
