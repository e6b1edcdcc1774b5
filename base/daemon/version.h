// The version of everything built from this tree; client/include/longhaul/longhaul.h has the same.
#pragma once

namespace longhaul {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace longhaul
