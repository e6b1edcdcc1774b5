#include <errno.h>
#include <string.h>

#include <fstream>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/fields_json.h"
#include "base/status_macros.h"
#include "coordinator/journal/journal.h"
#include "coordinator/journal/journal_format.h"

namespace longhaul::coordinator {
namespace {

uint32_t Number(const char* bytes) {
  uint32_t number = 0;
  for (int i = 3; i >= 0; --i) number = number << 8 | static_cast<uint8_t>(bytes[i]);
  return number;
}

// Reads a journal, record after record.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(path, std::ios::binary) {}

  absl::Status Open() {
    if (!file_) {
      return absl::NotFoundError(absl::StrCat("cannot open ", path_, ": ", strerror(errno)));
    }
    file_.seekg(0, std::ios::end);
    size_ = static_cast<uint64_t>(file_.tellg());
    file_.seekg(0);
    return absl::OkStatus();
  }

  // Reads the next record. Returns false if the file has no further complete record. If an
  // incomplete record is left, torn() says where.
  absl::StatusOr<bool> Next(v1::JournalRecord* record) {
    if (at_ == size_) return false;
    const uint64_t left = size_ - at_;
    char head[kJournalHeadBytes];
    if (left < kJournalHeadBytes) return Torn(left);
    if (!file_.read(head, kJournalHeadBytes)) return Unreadable();
    const uint32_t length = Number(head);
    if (length > left - kJournalHeadBytes) return Torn(left);
    if (length > kJournalRecordBytesMax) return Damaged("the length of the record is impossible");
    std::string bytes(length, '\0');
    if (!file_.read(bytes.data(), length)) return Unreadable();
    const bool last = length == left - kJournalHeadBytes;
    if (JournalChecksum(bytes) != Number(head + 4)) {
      if (last) return Torn(left);
      return Damaged("the checksum of the record is wrong");
    }
    if (!record->ParseFromString(bytes)) return Damaged("the bytes are no record of a journal");
    at_ += kJournalHeadBytes + length;
    return true;
  }

  const std::string& torn() const { return torn_; }
  absl::Status Damaged(const std::string& what) const {
    return absl::DataLossError(
        absl::StrCat(path_, " is damaged at byte ", at_, " of ", size_, ": ", what));
  }

 private:
  bool Torn(uint64_t left) {
    torn_ = absl::StrCat("the last record, ", left, " bytes at byte ", at_, ", is incomplete");
    return false;
  }
  absl::Status Unreadable() const {
    return absl::UnavailableError(
        absl::StrCat("cannot read ", path_, " at byte ", at_, ": ", strerror(errno)));
  }

  const std::string path_;
  std::ifstream file_;
  uint64_t size_ = 0;
  uint64_t at_ = 0;
  std::string torn_;
};

absl::StatusOr<CoordinatorCore> MakeCore(const Reader& reader, const v1::JournalRecord& record) {
  if (!record.has_start()) return reader.Damaged("the file does not begin as a journal does");
  const v1::JournalStart& start = record.start();
  if (start.format() != kJournalFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("the journal has format ", start.format(), ", this release reads format ",
                     kJournalFormat, "; use the lh-replay of release ", start.version()));
  }
  auto config = ConfigOf(start);
  if (!config.ok()) return reader.Damaged(std::string(config.status().message()));
  auto records = RecordsOf(start);
  if (!records.ok()) return reader.Damaged(std::string(records.status().message()));
  return CoordinatorCore(*std::move(config), *std::move(records));
}

}  // namespace

absl::StatusOr<ReplayReport> Replay(const std::string& path, const ReplayOptions& options) {
  Reader reader(path);
  LH_RETURN_IF_ERROR(reader.Open());
  ReplayReport report;
  v1::JournalRecord record;
  std::optional<CoordinatorCore> core;
  while (report.events < options.until) {
    auto more = reader.Next(&record);
    if (!more.ok()) return more.status();
    if (!*more) break;
    if (!core) {
      auto made = MakeCore(reader, record);
      if (!made.ok()) return made.status();
      core.emplace(*std::move(made));
      report.version = record.start().version();
    } else if (record.has_event()) {
      const auto event = EventOf(record.event());
      if (!event.ok()) return reader.Damaged(std::string(event.status().message()));
      const Tick now{record.event().tick_us()};
      const std::vector<Action> actions = core->Step(*event, now);
      core->CheckInvariants();
      ++report.events;
      if (options.stepped) options.stepped(report.events, now, *event, actions);
    } else if (record.has_digest()) {
      if (record.digest().events() != report.events) return reader.Damaged("events are missing");
      if (record.digest().digest() != core->Digest()) {
        return absl::AbortedError(
            absl::StrCat("after event ", report.events,
                         " the core is in another state than the core of release ", report.version,
                         " was; digests that agreed before: ", report.digests));
      }
      ++report.digests;
    } else if (record.has_end()) {
      report.limit_reached = true;
      break;
    } else {
      return reader.Damaged("the record is of a kind that this release does not know");
    }
  }
  report.torn = reader.torn();
  if (!core) return reader.Damaged("the file holds no complete record");
  report.overview = core->GetOverview();
  return report;
}

std::string Describe(const Event& event) { return ToJson(event, {.secrets = false}); }

std::string Describe(const Action& action) {
  struct Describer {
    std::string operator()(const ToPeer& a) const {
      return absl::StrCat("to stream ", a.session.value(), ": ",
                          ToJson(a.message, {.secrets = false}));
    }
    std::string operator()(const CloseSession& a) const {
      return absl::StrCat("close stream ", a.session.value(), ": ", a.reason);
    }
    std::string operator()(const Persist& a) const {
      return absl::StrCat("persist ", a.mutations.size(), " records");
    }
    std::string operator()(const OrderRing& a) const {
      return absl::StrCat("solve the ring of ", ToString(a.group), ", ", a.peers.size(), " peers");
    }
    std::string operator()(const Notice& a) const {
      return absl::StrCat("notice ", a.event.kind, ": ", a.event.text);
    }
  };
  return std::visit(Describer{}, action);
}

}  // namespace longhaul::coordinator
