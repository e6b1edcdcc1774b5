// What the core adds to the types that a Digester takes.
#pragma once

#include <cstdint>

#include "base/digest.h"
#include "proto/wire/op_desc.h"

namespace longhaul {

inline void AddTo(const OpDesc& desc, Digester* digest) {
  digest->Add(static_cast<uint64_t>(desc.kind)).Add(static_cast<uint64_t>(desc.dtype));
  digest->Add(static_cast<uint64_t>(desc.reduce)).Add(static_cast<uint64_t>(desc.on_fault));
  digest->Add(uint64_t{desc.quantization}).Add(uint64_t{desc.min_world}).Add(desc.count);
  digest->Add(static_cast<uint64_t>(desc.algorithm));
}

}  // namespace longhaul
