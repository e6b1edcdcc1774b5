// LH_CHECK(condition): aborts the process if an invariant of our own code is broken. Always on.
//
//   LH_CHECK(!ring.empty());
//   LH_CHECK(position < size) << "group " << ToString(group) << " position " << position;
//
// Before it aborts, it prints file, line, condition and text as one line to stderr. Never use it
// for what the outside world or foreign bytes can cause: return an absl::Status there.
#pragma once

#include <sstream>

namespace longhaul {

// Sets a function to call after the line was printed and before the process aborts. A simulation
// prints there how to repeat the run. Not thread-safe: set it before threads start.
void SetCheckHook(void (*hook)());

namespace internal {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// The operator & binds weaker than << and stronger than ?:, so both branches of LH_CHECK are void.
struct CheckVoidify {
  void operator&(std::ostream&) {}
};

}  // namespace internal
}  // namespace longhaul

#define LH_CHECK(condition)                           \
  (__builtin_expect(static_cast<bool>(condition), 1)) \
      ? static_cast<void>(0)                          \
      : ::longhaul::internal::CheckVoidify() &        \
            ::longhaul::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

// LH_CHECK for an expression that gives an absl::Status. The status must be OK here.
#define LH_CHECK_OK(expression)                                                          \
  do {                                                                                   \
    const auto& lh_check_status = (expression);                                          \
    LH_CHECK(lh_check_status.ok()) << #expression << ": " << lh_check_status.ToString(); \
  } while (false)
