// What lhctl shows of recordings (base/recorder.h): a text for `dump`, and a timeline for `trace`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/recorder.h"

namespace longhaul {

// A recording, and how the clock of its host relates to the coordinator's.
struct TracedRecording {
  Recording recording;
  int64_t offset_us = 0;  // the host's clock shows so much more than the coordinator's
  int64_t error_us = -1;  // the offset is wrong by at most so much; -1: nothing is known
};

// "p1f", or "coordinator".
std::string NameOf(const Recording& recording);

// The recording as text: a head, then a line for each op and event in the order of their times.
std::string RenderRecording(const Recording& recording);
// The same as one JSON object.
std::string RenderRecordingJson(const Recording& recording);

struct TraceOptions {
  std::string run;                  // empty: all runs
  int64_t group = -1;               // -1: all groups
  std::vector<std::string> silent;  // peers that gave no recording, and why: for the metadata
};

// All recordings on one timeline, as JSON in the Chrome trace event format, which ui.perfetto.dev
// reads. Times are microseconds of the coordinator's clock since 1970. See docs/operations.md.
//
// - A peer is a process. A member is a thread of it, and so are the peer's events. Ops of a member
//   that overlap are on threads of their own, because slices of one thread must nest.
// - An op is a slice, with slices in it for its phases. An op that has not ended lasts until the
//   recording was made.
// - An arrow leads from the member that posted an op last to the other members of the op.
// - Events and faults are instants.
std::string RenderTrace(const std::vector<TracedRecording>& recordings,
                        const TraceOptions& options);

}  // namespace longhaul
