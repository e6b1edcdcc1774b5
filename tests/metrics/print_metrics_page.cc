// Prints docs/metrics.md.

#include <cstdio>

#include "tests/metrics/metrics_page.h"

int main() {
  std::fputs(longhaul::MetricsPage().c_str(), stdout);
  return 0;
}
