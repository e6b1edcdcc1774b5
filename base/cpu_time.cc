#include "base/cpu_time.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "base/mutex.h"

namespace longhaul {
namespace {

double Read(clockid_t clock) {
  timespec time{};
  if (clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Part {
  std::map<const CpuTime*, clockid_t> running;
  double ended = 0;  // of threads that have ended, or that do other work now
};

struct Parts {
  Mutex mutex;
  std::map<std::string, Part> parts ABSL_GUARDED_BY(mutex);
  double rest ABSL_GUARDED_BY(mutex) = 0;  // the last answer
};

// Threads may end after main() has returned, so this is never destroyed.
Parts& All() {
  static Parts& all = *new Parts;
  return all;
}

}  // namespace

CpuTime::CpuTime(const char* part) : part_(part) {
  if (gettid() != getpid()) {
    (void)pthread_setname_np(pthread_self(), (std::string("lh-") + part).c_str());
  }
  clockid_t clock{};
  if (pthread_getcpuclockid(pthread_self(), &clock) != 0) return;
  MutexLock lock(&All().mutex);
  All().parts[part].running.emplace(this, clock);
}

CpuTime::~CpuTime() {
  MutexLock lock(&All().mutex);
  Part& part = All().parts[part_];
  if (part.running.erase(this) != 0) part.ended += Read(CLOCK_THREAD_CPUTIME_ID);
}

std::vector<double> CpuSeconds(const std::vector<std::string>& parts) {
  Parts& all = All();
  MutexLock lock(&all.mutex);
  std::vector<double> result;
  double known = 0;
  for (const std::string& name : parts) {
    double sum = 0;
    if (const auto it = all.parts.find(name); it != all.parts.end()) {
      sum = it->second.ended;
      // The lock keeps these threads alive: they need it to end.
      for (const auto& [owner, clock] : it->second.running) sum += Read(clock);
    }
    known += sum;
    result.push_back(sum);
  }
  // Threads run between these readings, so the rest could seem to fall.
  all.rest = std::max(all.rest, Read(CLOCK_PROCESS_CPUTIME_ID) - known);
  result.push_back(all.rest);
  return result;
}

}  // namespace longhaul
