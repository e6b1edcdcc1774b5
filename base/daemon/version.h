// The version of everything that is built from this tree. The same version is in
// client/include/longhaul/longhaul.h and client/python/longhaul/_version.py.
#pragma once

namespace longhaul {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace longhaul
