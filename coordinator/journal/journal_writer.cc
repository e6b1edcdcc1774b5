#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/journal/journal.h"
#include "coordinator/journal/journal_format.h"
#include "coordinator/store/files.h"

namespace longhaul::coordinator {

class JournalWriter::Impl {
 public:
  Impl(JournalOptions options, Fd lock, Fd file)
      : options_(std::move(options)), lock_(std::move(lock)), file_(std::move(file)) {}

  void Write(const v1::JournalRecord& record) {
    if (ended_) return;
    const std::string frame = FrameOf(record);
    if (bytes_ + frame.size() > options_.bytes_max) {
      v1::JournalRecord end;
      end.mutable_end();
      Append(FrameOf(end));
      End(absl::StrCat("it has reached its limit of ", options_.bytes_max,
                       " bytes (--journal-limit)"));
      return;
    }
    Append(frame);
  }
  void Count() { ++events_; }
  bool DigestDue() const { return !ended_ && events_ % options_.digest_every == 0; }
  uint64_t events() const { return events_; }

 private:
  void Append(const std::string& frame) {
    size_t done = 0;
    while (done < frame.size()) {
      const ssize_t wrote = write(file_.get(), frame.data() + done, frame.size() - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return End(strerror(errno));
      done += static_cast<size_t>(wrote);
    }
    bytes_ += frame.size();
  }
  void End(const std::string& why) {
    ended_ = true;
    Log(LogLevel::kWarning, "the journal ends, the coordinator goes on" +
                                LogField("path", options_.path) + LogField("reason", why));
  }

  const JournalOptions options_;
  const Fd lock_;
  const Fd file_;
  uint64_t bytes_ = 0;
  uint64_t events_ = 0;
  bool ended_ = false;
};

JournalWriter::JournalWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JournalWriter::~JournalWriter() = default;

absl::StatusOr<std::unique_ptr<JournalWriter>> JournalWriter::Begin(const JournalOptions& options,
                                                                    const CoreConfig& config,
                                                                    const Records& records) {
  LH_RETURN_IF_ERROR(MakeDirectoryOf("journal", options.path));
  // The lock comes first: the file may belong to a coordinator that is running.
  LH_ASSIGN_OR_RETURN(Fd lock, LockFile("journal", options.path));
  const std::string older = options.path + ".1";
  if (rename(options.path.c_str(), older.c_str()) != 0 && errno != ENOENT) {
    return absl::UnavailableError(absl::StrCat("cannot keep the journal ", options.path, " as ",
                                               older, ": ", strerror(errno)));
  }
  // The journal holds names of hosts and runs, so only the owner may read it.
  Fd file(open(options.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600));
  if (file.get() < 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot make the journal ", options.path, ": ", strerror(errno)));
  }
  auto impl = std::make_unique<Impl>(options, std::move(lock), std::move(file));
  v1::JournalRecord record;
  *record.mutable_start() = StartOf(config, records);
  impl->Write(record);
  return std::unique_ptr<JournalWriter>(new JournalWriter(std::move(impl)));
}

void JournalWriter::Write(const Event& event, Tick now) {
  v1::JournalRecord record;
  *record.mutable_event() = EventOf(event, now);
  impl_->Write(record);
  impl_->Count();
}

void JournalWriter::Stepped(const CoordinatorCore& core) {
  if (!impl_->DigestDue()) return;
  v1::JournalRecord record;
  record.mutable_digest()->set_events(impl_->events());
  record.mutable_digest()->set_digest(core.Digest());
  impl_->Write(record);
}

}  // namespace longhaul::coordinator
