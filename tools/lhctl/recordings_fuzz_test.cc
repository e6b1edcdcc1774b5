// Feeds any bytes to the readers of recordings: of dump files and of what peers send in pieces. The
// first byte chooses. What is read is shown, too, as lhctl does.
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/recorder.h"
#include "proto/control/recording.h"
#include "tools/lhctl/recordings.h"

namespace longhaul {
namespace {

void One(uint8_t which, const std::string& bytes) {
  switch (which % 3) {
    case 0: {
      const auto recording = ParseRecording(bytes);
      if (!recording.ok()) return;
      LH_CHECK(recording->ops.size() + recording->events.size() <= bytes.size() / 8);
      RenderRecording(*recording);
      RenderRecordingJson(*recording);
      TraceOptions options;
      options.run = (bytes.size() & 1) != 0 ? "run" : "";
      RenderTrace({{*recording, 0, -1}, {*recording, 5, 1}}, options);
      return;
    }
    case 1:
      if (const auto request = control::ParseReadRecording(bytes); request.ok()) {
        LH_CHECK(control::ParseReadRecording(control::Serialize(*request)).ok());
      }
      return;
    case 2:
      control::IsRecordingMessage(bytes);
      if (const auto piece = control::ParseRecordingPiece(bytes); piece.ok()) {
        LH_CHECK(piece->data.size() <= control::kPieceBytesMax);
        LH_CHECK(control::ParseRecordingPiece(control::Serialize(*piece)).ok());
      }
      return;
  }
}

}  // namespace
}  // namespace longhaul

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  longhaul::One(data[0], std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
