// Names one control stream. The driver chooses the number, and never reuses it within a process.
#pragma once

#include "base/ids.h"

namespace longhaul::coordinator {

using SessionId = Id<struct SessionIdKind>;

}  // namespace longhaul::coordinator
