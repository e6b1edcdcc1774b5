// Makes the text of `lhctl links`. Pure functions: no state, any thread, nothing can fail.
#pragma once

#include <string>

#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

// Of each group with at most so many peers, all links are shown, as a matrix. Of a larger one, the
// worst are.
inline constexpr int kMatrixPeersMax = 16;
inline constexpr size_t kWorstLinksShown = 10;

std::string RenderLinks(const v1::GetLinksResponse& links);

}  // namespace longhaul
