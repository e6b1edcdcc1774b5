// Writes the events of the coordinator into its flight recorder (base/recorder.h).
#pragma once

#include "base/recorder.h"
#include "base/tick.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

// Thread: the one that owns the ring, which is the loop's. Takes no memory from the heap.
void RecordEvent(const EventRecord& event, Tick now, RecordRing* ring);

// Says whether the event deserves a file: a member died or was evicted, or a fault was repaired.
bool IsFault(const EventRecord& event);

}  // namespace longhaul::coordinator
