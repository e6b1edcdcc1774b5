// Memory that nobody has written to has no pages yet. The kernel needs 0.3 to 30 ms to create the
// pages of one MiB. The reactor thread must not spend that time (docs/adr/0015-no-fresh-memory.md).
//
// Threads: any.
#pragma once

#include <cstdint>
#include <span>

namespace longhaul::peerd {

// Makes the kernel create all pages of this memory. The bytes do not change, and other threads may
// write to them meanwhile. If memory is short, some pages are not created, without an error.
void TouchPages(std::span<uint8_t> memory);

}  // namespace longhaul::peerd
