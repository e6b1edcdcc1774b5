// docs/metrics.md, made from the metrics that both daemons register.
#pragma once

#include <string>

namespace longhaul {

std::string MetricsPage();

}  // namespace longhaul
