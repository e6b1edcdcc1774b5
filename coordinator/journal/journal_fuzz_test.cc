// Feeds any bytes to the reader of journals (lh-replay). The first byte chooses: the file as a
// whole, or the parser of one record behind the checksum.

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/check.h"
#include "coordinator/journal/journal.h"
#include "coordinator/journal/journal_format.h"
#include "tests/support/fuzz_files.h"

namespace longhaul::coordinator {
namespace {

void One(uint8_t which, const std::string& bytes) {
  switch (which % 4) {
    case 0:
      (void)Replay(FuzzFile(bytes), {});
      return;
    case 1: {
      v1::JournalRecord record;
      if (!record.ParseFromString(bytes)) return;
      (void)ConfigOf(record.start());
      (void)RecordsOf(record.start());
      if (const auto event = EventOf(record.event()); event.ok()) {
        // An event that was read, recorded again, must be read with the same value.
        Describe(*event);
        const auto again = EventOf(EventOf(*event, Tick{1}));
        LH_CHECK(again.ok() && Describe(*again) == Describe(*event));
      }
      return;
    }
    case 2: {
      v1::JournalStart start;
      start.set_records(bytes);
      if (const auto records = RecordsOf(start); records.ok()) {
        LH_CHECK(*RecordsOf(StartOf(CoreConfig(), *records)) == *records);
      }
      return;
    }
    case 3: {
      v1::JournalStart start;
      start.set_config(bytes);
      (void)ConfigOf(start);
      v1::JournalEvent event;
      event.set_other(bytes);
      if (const auto parsed = EventOf(event); parsed.ok()) Describe(*parsed);
      return;
    }
  }
}

}  // namespace
}  // namespace longhaul::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  longhaul::coordinator::One(data[0],
                             std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
