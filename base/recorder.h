// The flight recorder of a process: its last ops and events, always on.
//
//   owner thread:  Add(), Update()  ->  ring of fixed-size records  <-  Read(): any thread, or a
//                                                                       signal handler
//
// A Recorder has a ring for ops and one for events, so that many ops do not push events out. Both
// are allocated once: kOpRecordsMax and kEventRecordsMax records of 256 bytes, 2.5 MiB in all.
// Adding a record takes no lock, allocates nothing and makes no system call. A reader never waits
// and never stops the owner; a record that is overwritten while it is read is left out.
//
// A recording is what Serialize() or WriteTo() makes: a header, then records. It is what dump files
// hold, and what crosses the network. ParseRecording() trusts no byte of it. Numbers are little
// endian.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace longhaul {

inline constexpr size_t kOpRecordsMax = 8192;
inline constexpr size_t kEventRecordsMax = 2048;

// The numbers are in files. Never renumber them.
enum class RecordKind : uint8_t {
  kNone = 0,
  kOp = 1,           // one op of one local member
  kEpoch = 2,        // an epoch is prepared, committed or given up
  kLink = 3,         // a link is up, or lost
  kLanes = 4,        // lanes of links were lost
  kMember = 5,       // a local member joins, is admitted, or is gone
  kSync = 6,         // a sync of a local member begins or ends
  kCoordinator = 7,  // the coordinator is reached, or lost
  kFault = 8,        // a fault is over, or was decided on
  kNote = 9,         // any other event of the coordinator
};
const char* Name(RecordKind kind);

inline constexpr uint8_t kRecordOpOpen = 1;  // Record::flags: the op has not ended

// A plain value. Text is not terminated: unused bytes are 0.
struct Record {
  uint64_t sequence = 0;  // in its ring, from 1; 0: no record
  int64_t time_us = 0;    // monotonic clock; of an op: when it was posted
  uint8_t kind = 0;       // RecordKind
  uint8_t code = 0;       // how it ended: Code
  uint8_t algorithm = 0;  // of an op: Algorithm
  uint8_t flags = 0;
  uint32_t group = 0;
  uint64_t epoch = 0;
  uint64_t member = 0;
  uint64_t peer = 0;  // an op: the peer that was waited for longest, 0: none or unknown; else the
                      // peer that the event is about
  // ---- of ops
  uint64_t tag = 0;
  uint64_t bytes = 0;
  int64_t wait_us = 0;      // OpInfo
  int64_t transfer_us = 0;  // OpInfo
  int64_t total_us = 0;     // OpInfo
  uint32_t retries = 0;
  uint32_t world_size = 0;
  // ----
  char run[64] = {};
  char text[96] = {};  // what happened; of an op: why it failed
};
static_assert(sizeof(Record) == 256);

// Copies text into a field of a record, or as much as there is room for.
template <size_t kSize>
void SetText(char (&field)[kSize], std::string_view text) {
  text = text.substr(0, kSize);
  size_t i = 0;
  for (; i < text.size(); ++i) field[i] = text[i];
  for (; i < kSize; ++i) field[i] = 0;
}
// The field up to its first 0, without control characters.
std::string TextOf(const char* field, size_t size);

// The last `slots` records. One thread calls Add() and Update(); any thread calls the rest.
class RecordRing {
 public:
  explicit RecordRing(size_t slots);

  // Adds a record under the next sequence number, which is returned. Forgets the oldest one.
  uint64_t Add(Record* record);
  // Replaces the record of this sequence number. Does nothing if it is forgotten.
  void Update(const Record& record);

  // Copies the record. False: it is forgotten, was not added yet, or is just being written.
  bool Read(uint64_t sequence, Record* record) const;
  // The last sequence number; 0: nothing was added.
  uint64_t newest() const { return newest_.load(std::memory_order_acquire); }
  // The first sequence number that may still be there.
  uint64_t oldest() const;
  size_t size() const { return slots_; }

 private:
  static constexpr size_t kWords = sizeof(Record) / sizeof(uint64_t);
  struct Slot {
    std::atomic<uint64_t> words[kWords];
  };
  void Write(const Record& record);

  const size_t slots_;
  std::unique_ptr<Slot[]> records_;
  // For each slot: odd while it is written, another even number after each write.
  std::unique_ptr<std::atomic<uint64_t>[]> stamps_;
  std::atomic<uint64_t> newest_{0};
};

// What a recording says about its process.
struct RecordingHeader {
  char magic[8] = {'L', 'H', 'R', 'E', 'C', 0, 0, 1};
  uint32_t header_bytes = 0;
  uint32_t record_bytes = sizeof(Record);
  uint64_t peer = 0;         // 0: a coordinator
  int64_t wall_us = 0;       // when the recording was made: since 1970
  int64_t monotonic_us = 0;  // the same moment, on the clock of the records
  uint64_t ops = 0;          // since the start of the process
  uint64_t events = 0;
  uint32_t pid = 0;
  uint32_t reserved = 0;
  char program[32] = {};
  char version[32] = {};
  char host[64] = {};
  char cause[128] = {};  // why the recording was made
};
static_assert(sizeof(RecordingHeader) == 320);

class Recorder {
 public:
  // `ops`, `events`: how many records to keep.
  Recorder(std::string_view program, std::string_view version, size_t ops = kOpRecordsMax,
           size_t events = kEventRecordsMax);

  // Call this before another thread makes a recording.
  void SetPeer(uint64_t peer) { identity_.peer = peer; }

  RecordRing& ops() { return ops_; }
  RecordRing& events() { return events_; }

  // Makes a recording with the last records only. Any thread.
  std::string Serialize(std::string_view cause, size_t ops_max, size_t events_max) const;
  // Writes a whole recording to a file. False: the file could not be written. May be called in a
  // signal handler, where one thread at a time calls it. `cause` must not be longer than its field.
  bool WriteTo(int fd, std::string_view cause) const;

 private:
  RecordingHeader Header(std::string_view cause) const;

  RecordingHeader identity_;
  RecordRing ops_;
  RecordRing events_;
};

// A recording as values. Text has no control characters.
struct Recording {
  uint64_t peer = 0;
  std::string program;
  std::string version;
  std::string host;
  std::string cause;
  uint32_t pid = 0;
  int64_t wall_us = 0;
  int64_t monotonic_us = 0;
  uint64_t ops_total = 0;
  uint64_t events_total = 0;
  std::vector<Record> ops;  // oldest first
  std::vector<Record> events;

  // The time of a record, in microseconds since 1970, by the clock of the process's host.
  int64_t WallOf(int64_t time_us) const { return wall_us - (monotonic_us - time_us); }
};

// InvalidArgument: the bytes are no recording; the text says what is wrong. A recording that was
// cut off in the middle gives the records before the cut.
absl::StatusOr<Recording> ParseRecording(std::string_view bytes);

}  // namespace longhaul
