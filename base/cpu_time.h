// The processor time of this process, by the part of the program that used it.
//
// A thread that does the work of one part says so for as long as a CpuTime lives on its stack. The
// time of all other threads, for instance those of gRPC, is what remains of the process.
//
// Threads: any. A CpuTime is made and destroyed on the thread that it counts. Both take a lock; the
// thread's own work costs nothing more, because the kernel counts it anyway.
#pragma once

#include <string>
#include <vector>

namespace longhaul {

class CpuTime {
 public:
  // `part` names the thread "lh-<part>", too, except the first thread of the process: that one
  // keeps the name of the program. At most 12 characters, and a literal.
  explicit CpuTime(const char* part);
  ~CpuTime();
  CpuTime(const CpuTime&) = delete;
  CpuTime& operator=(const CpuTime&) = delete;

 private:
  const char* const part_;
};

// Seconds of processor time that these parts have used since the process started: in the order of
// `parts`, and behind them the rest of the process. None ever falls.
std::vector<double> CpuSeconds(const std::vector<std::string>& parts);

}  // namespace longhaul
