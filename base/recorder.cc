#include "base/recorder.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul {
namespace {

// Times outside of these bounds are not of a real recording, and sums of them could overflow.
constexpr int64_t kTimeMax = int64_t{1} << 56;

int64_t ClockUs(clockid_t clock) {
  struct timespec now {};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1000000 + now.tv_nsec / 1000;
}

// Calls each(record) for the last `count` records. Allocates nothing.
template <class Each>
bool ForLast(const RecordRing& ring, size_t count, Each each) {
  const uint64_t newest = ring.newest();
  const uint64_t first =
      std::max(ring.oldest(), newest - std::min<uint64_t>(newest, count) + uint64_t{1});
  Record record;
  for (uint64_t n = first; n <= newest; ++n) {
    if (ring.Read(n, &record) && !each(record)) return false;
  }
  return true;
}

bool WriteAll(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = write(fd, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

std::string_view BytesOf(const Record& record) {
  return {reinterpret_cast<const char*>(&record), sizeof record};
}

bool Plausible(int64_t us) { return us >= 0 && us < kTimeMax; }

bool Plausible(const Record& record) {
  const bool known = record.kind >= static_cast<uint8_t>(RecordKind::kOp) &&
                     record.kind <= static_cast<uint8_t>(RecordKind::kNote);
  return known && record.sequence != 0 && Plausible(record.time_us) && Plausible(record.wait_us) &&
         Plausible(record.transfer_us) && Plausible(record.total_us);
}

}  // namespace

const char* Name(RecordKind kind) {
  switch (kind) {
    case RecordKind::kNone:
      break;
    case RecordKind::kOp:
      return "op";
    case RecordKind::kEpoch:
      return "epoch";
    case RecordKind::kLink:
      return "link";
    case RecordKind::kLanes:
      return "lanes";
    case RecordKind::kMember:
      return "member";
    case RecordKind::kSync:
      return "sync";
    case RecordKind::kCoordinator:
      return "coordinator";
    case RecordKind::kFault:
      return "fault";
    case RecordKind::kNote:
      return "note";
  }
  return "?";
}

std::string TextOf(const char* field, size_t size) {
  std::string text(field, strnlen(field, size));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  }
  return text;
}

// ------------------------------------------------------------------------------ the ring

RecordRing::RecordRing(size_t slots)
    : slots_(slots),
      records_(std::make_unique<Slot[]>(slots)),
      stamps_(std::make_unique<std::atomic<uint64_t>[]>(slots)) {
  LH_CHECK(slots > 0);
}

uint64_t RecordRing::oldest() const {
  const uint64_t newest = this->newest();
  return newest > slots_ ? newest - slots_ + 1 : 1;
}

uint64_t RecordRing::Add(Record* record) {
  const uint64_t sequence = newest_.load(std::memory_order_relaxed) + 1;
  record->sequence = sequence;
  Write(*record);
  newest_.store(sequence, std::memory_order_release);
  return sequence;
}

void RecordRing::Update(const Record& record) {
  if (record.sequence >= oldest() && record.sequence <= newest()) Write(record);
}

// A reader that sees any new word also sees the odd stamp: the words are stored with release order,
// and the reader loads them with acquire order. Fences would do the same, but thread sanitizers do
// not understand them.
void RecordRing::Write(const Record& record) {
  const size_t at = record.sequence % slots_;
  std::atomic<uint64_t>& stamp = stamps_[at];
  const uint64_t before = stamp.load(std::memory_order_relaxed);
  uint64_t words[kWords];
  memcpy(words, &record, sizeof words);
  stamp.store(before + 1, std::memory_order_relaxed);
  for (size_t i = 0; i < kWords; ++i) {
    records_[at].words[i].store(words[i], std::memory_order_release);
  }
  stamp.store(before + 2, std::memory_order_release);
}

bool RecordRing::Read(uint64_t sequence, Record* record) const {
  const size_t at = sequence % slots_;
  const uint64_t before = stamps_[at].load(std::memory_order_acquire);
  if (before % 2 != 0) return false;
  uint64_t words[kWords];
  for (size_t i = 0; i < kWords; ++i) {
    words[i] = records_[at].words[i].load(std::memory_order_acquire);
  }
  if (stamps_[at].load(std::memory_order_relaxed) != before) return false;
  memcpy(record, words, sizeof words);
  return record->sequence == sequence && sequence != 0;
}

// ------------------------------------------------------------------------------ recordings

Recorder::Recorder(std::string_view program, std::string_view version, size_t ops, size_t events)
    : ops_(ops), events_(events) {
  identity_.header_bytes = sizeof identity_;
  identity_.pid = static_cast<uint32_t>(getpid());
  SetText(identity_.program, program);
  SetText(identity_.version, version);
  char host[sizeof identity_.host] = {};
  if (gethostname(host, sizeof host - 1) == 0) SetText(identity_.host, host);
}

RecordingHeader Recorder::Header(std::string_view cause) const {
  RecordingHeader header = identity_;
  header.wall_us = ClockUs(CLOCK_REALTIME);
  header.monotonic_us = ClockUs(CLOCK_MONOTONIC);
  header.ops = ops_.newest();
  header.events = events_.newest();
  SetText(header.cause, cause);
  return header;
}

std::string Recorder::Serialize(std::string_view cause, size_t ops_max, size_t events_max) const {
  const RecordingHeader header = Header(cause);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  const auto add = [&](const Record& record) {
    bytes.append(BytesOf(record));
    return true;
  };
  ForLast(events_, events_max, add);
  ForLast(ops_, ops_max, add);
  return bytes;
}

bool Recorder::WriteTo(int fd, std::string_view cause) const {
  const RecordingHeader header = Header(cause);
  const auto add = [&](const Record& record) { return WriteAll(fd, &record, sizeof record); };
  // Events first: they are few, and the disk may become full.
  return WriteAll(fd, &header, sizeof header) && ForLast(events_, events_.size(), add) &&
         ForLast(ops_, ops_.size(), add);
}

absl::StatusOr<Recording> ParseRecording(std::string_view bytes) {
  RecordingHeader header;
  const RecordingHeader expected;
  if (bytes.size() < sizeof header) {
    return absl::InvalidArgumentError(absl::StrCat("not a recording: it has ", bytes.size(),
                                                   " bytes, and the header alone has ",
                                                   sizeof header));
  }
  memcpy(&header, bytes.data(), sizeof header);
  if (memcmp(header.magic, expected.magic, sizeof header.magic) != 0 ||
      header.header_bytes != sizeof header || header.record_bytes != sizeof(Record)) {
    return absl::InvalidArgumentError(
        "not a recording that this lhctl can read: it does not begin with LHREC and the known "
        "version; use the lhctl of the release that wrote it");
  }
  if (!Plausible(header.wall_us) || !Plausible(header.monotonic_us)) {
    return absl::InvalidArgumentError("not a recording: its header has impossible times");
  }
  Recording recording;
  recording.peer = header.peer;
  recording.program = TextOf(header.program, sizeof header.program);
  recording.version = TextOf(header.version, sizeof header.version);
  recording.host = TextOf(header.host, sizeof header.host);
  recording.cause = TextOf(header.cause, sizeof header.cause);
  recording.pid = header.pid;
  recording.wall_us = header.wall_us;
  recording.monotonic_us = header.monotonic_us;
  recording.ops_total = header.ops;
  recording.events_total = header.events;
  bytes.remove_prefix(sizeof header);
  for (; bytes.size() >= sizeof(Record); bytes.remove_prefix(sizeof(Record))) {
    Record record;
    memcpy(&record, bytes.data(), sizeof record);
    if (!Plausible(record)) continue;
    const bool op = record.kind == static_cast<uint8_t>(RecordKind::kOp);
    (op ? recording.ops : recording.events).push_back(record);
  }
  const auto earlier = [](const Record& a, const Record& b) { return a.sequence < b.sequence; };
  std::sort(recording.ops.begin(), recording.ops.end(), earlier);
  std::sort(recording.events.begin(), recording.events.end(), earlier);
  return recording;
}

}  // namespace longhaul
