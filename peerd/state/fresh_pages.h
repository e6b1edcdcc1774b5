// Memory that nobody has written to has no pages yet. To make them takes the kernel 0.3 to 30 ms a
// MiB, which the thread of the network must not spend (docs/adr/0015-no-fresh-memory.md).
//
// Threads: any.
#pragma once

#include <cstdint>
#include <span>

namespace longhaul::peerd {

// Has the kernel make the pages of this memory, as a write to each of them would; the bytes stay
// what they are, also while others write to them. Where memory is short some pages stay unmade.
void TouchPages(std::span<uint8_t> memory);

}  // namespace longhaul::peerd
