#include "base/tls/tls_files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/tls/successor.h"

namespace longhaul::tls {
namespace {

constexpr size_t kFileBytesMax = 1 << 20;
// Broken contents are reported when they were seen so often, unchanged. As long as they stay, they
// are reported again and again: at each look of this number.
constexpr int kLooksMax = 2;
constexpr int kLooksAgain = 600;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  if (path.empty()) return std::string();
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", strerror(errno)));
  std::string bytes(kFileBytesMax + 1, '\0');
  size_t size = 0;
  ssize_t got = 1;
  while (got > 0 && size < bytes.size()) {
    got = read(fd, &bytes[size], bytes.size() - size);
    if (got < 0 && errno == EINTR)
      got = 1;
    else if (got > 0)
      size += static_cast<size_t>(got);
  }
  const int error = errno;
  close(fd);
  if (got < 0) {
    return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", strerror(error)));
  }
  if (size > kFileBytesMax) return absl::InvalidArgumentError(absl::StrCat(path, ": too large"));
  bytes.resize(size);
  return bytes;
}

// What a file of keys lets everybody read is no secret.
void WarnIfReadable(const std::string& key) {
  struct stat status {};
  if (key.empty() || stat(key.c_str(), &status) != 0 || (status.st_mode & S_IROTH) == 0) return;
  Log(LogLevel::kWarning,
      "everybody on this host may read the private key: chmod 600" + LogField("file", key));
}

absl::StatusOr<Material> ReadAll(const Paths& paths) {
  Material material;
  LH_ASSIGN_OR_RETURN(material.cert, ReadFile(paths.cert));
  LH_ASSIGN_OR_RETURN(material.key, ReadFile(paths.key));
  LH_ASSIGN_OR_RETURN(material.ca, ReadFile(paths.ca));
  LH_ASSIGN_OR_RETURN(material.crl, ReadFile(paths.crl));
  return material;
}

absl::Status Check(const Paths& paths, Material* material) {
  if (!paths.cert.empty()) {
    const absl::StatusOr<int64_t> expires = CheckKeyPair(material->cert, material->key);
    if (!expires.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(paths.cert, " and ", paths.key, ": ", expires.status().message()));
    }
    material->expires_s = *expires;
  }
  if (!paths.crl.empty() && material->crl.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(paths.crl,
                     " is empty. A list that revokes nothing is a signed CRL, too: lhctl ca init "
                     "makes one. Put the newest CRL of your CA there, or do without --tls-crl"));
  }
  if (!paths.ca.empty()) {
    auto trust = Trust::Make(material->ca, material->crl);
    if (!trust.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(paths.ca, paths.crl.empty() ? "" : " and ",
                                                     paths.crl, ": ", trust.status().message()));
    }
    material->trust = *std::move(trust);
  }
  return absl::OkStatus();
}

Shown ShownBy(const Material& material) {
  return {material.cert, material.key, material.ca, material.trust.get()};
}

void Report(const Paths& paths, const Material& material) {
  WarnIfReadable(paths.key);
  if (material.trust != nullptr && material.trust->crl_is_old()) {
    Log(LogLevel::kWarning,
        "the CRL is past its time of renewal; it still counts" + LogField("file", paths.crl));
  }
}

}  // namespace

absl::StatusOr<Material> Load(const Paths& paths) {
  LH_ASSIGN_OR_RETURN(Material material, ReadAll(paths));
  LH_RETURN_IF_ERROR(Check(paths, &material));
  return material;
}

absl::StatusOr<std::shared_ptr<Files>> Files::Open(Paths paths, Events events) {
  LH_ASSIGN_OR_RETURN(Material material, Load(paths));
  Report(paths, material);
  return std::shared_ptr<Files>(
      new Files(std::move(paths), std::move(events), std::move(material)));
}

Files::Files(Paths paths, Events events, Material material)
    : paths_(std::move(paths)),
      events_(std::move(events)),
      current_(std::make_shared<const Material>(std::move(material))) {}

Files::~Files() { StopWatching(); }

void Files::StopWatching() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    stop_.SignalAll();
  }
  if (watcher_.joinable()) watcher_.join();
}

std::shared_ptr<const Material> Files::Current() const {
  MutexLock lock(&mutex_);
  return current_;
}

void Files::Refresh() {
  Change change = Change::kUsed;
  {
    MutexLock lock(&refresh_);
    absl::StatusOr<Material> read = ReadAll(paths_);
    if (read.ok() && *read == *Current()) {
      if (std::exchange(broken_times_, 0) < kLooksMax) return;
      change = Change::kRestored;
    } else {
      absl::Status checked = read.ok() ? Check(paths_, &*read) : read.status();
      if (checked.ok()) checked = CheckSuccessor(ShownBy(*Current()), ShownBy(*read));
      if (checked.ok()) {
        broken_times_ = 0;
        Report(paths_, *read);
        auto material = std::make_shared<const Material>(*std::move(read));
        MutexLock current(&mutex_);
        current_ = std::move(material);
      } else {
        std::string seen = read.ok() ? absl::StrCat(read->cert, read->key, read->ca, read->crl)
                                     : std::string(checked.message());
        if (seen != broken_) broken_times_ = 0;
        broken_ = std::move(seen);
        if (++broken_times_ % kLooksAgain != kLooksMax) return;
        Log(LogLevel::kError, "new TLS files are refused; the last good ones stay in use" +
                                  LogField("reason", std::string(checked.message())));
        if (broken_times_ > kLooksMax) return;
        change = Change::kRefused;
      }
    }
  }
  if (change == Change::kUsed) {
    Log(LogLevel::kInfo,
        "new TLS files are in use" + LogField("cert", paths_.cert) + LogField("ca", paths_.ca));
  }
  if (events_.changed) events_.changed(change);
}

void Files::Watch(std::chrono::milliseconds interval) {
  watcher_ = std::thread([this, interval] {
    while (true) {
      {
        MutexLock lock(&mutex_);
        const auto until = std::chrono::steady_clock::now() + interval;
        while (!stopping_ && std::chrono::steady_clock::now() < until) {
          stop_.WaitFor(&mutex_, until - std::chrono::steady_clock::now());
        }
        if (stopping_) return;
      }
      Refresh();
    }
  });
}

}  // namespace longhaul::tls
