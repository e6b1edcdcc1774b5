#include "base/check.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace longhaul {
namespace {

void (*check_hook)() = nullptr;

}  // namespace

void SetCheckHook(void (*hook)()) { check_hook = hook; }

namespace internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  stream_ << file << ":" << line << ": check failed: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  std::string text = stream_.str();
  while (!text.empty() && text.back() == ' ') text.pop_back();
  text += '\n';
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
  // A check that fails within the hook must not call it again.
  if (auto* const hook = check_hook; hook != nullptr) {
    check_hook = nullptr;
    hook();
  }
  std::abort();
}

}  // namespace internal
}  // namespace longhaul
