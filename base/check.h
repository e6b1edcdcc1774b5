// LH_CHECK: an invariant of our own that, once broken, leaves nothing sensible to do. Always on.
//
//   LH_CHECK(!ring.empty());
//   LH_CHECK(position < size) << "group " << ToString(group) << " position " << position;
//
// Prints file, line, condition and text as one line to stderr and aborts. Never for what the world
// or foreign bytes may cause.
#pragma once

#include <sstream>

namespace longhaul {

// Called once, after the line was printed and before the process aborts: a simulation says there
// how to repeat the run. Not thread-safe; set it before threads start.
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

// Binds weaker than << and stronger than ?:, so that both branches of LH_CHECK are void.
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

// For an absl::Status that cannot fail here.
#define LH_CHECK_OK(expression)                                                          \
  do {                                                                                   \
    const auto& lh_check_status = (expression);                                          \
    LH_CHECK(lh_check_status.ok()) << #expression << ": " << lh_check_status.ToString(); \
  } while (false)
