// The files of --tls-cert, --tls-key, --tls-ca and --tls-crl. They may be replaced at any time, in
// any order: new contents are checked as a whole before they are used, and until then the last good
// ones stay in use.
//
//   good --(a file changes)--> new contents
//   new contents --(all checks pass)--> good, logged, used from now on
//   new contents --(a check fails twice, unchanged)--> refused: an error in the log, counted; the
//                                                      last good stay in use
//   refused --(the last good contents are there again)--> restored
//
// The checks: each file can be read, key and certificate belong together, the certificate is valid
// now, it does not cut off whoever relies on the one in use, and no CRL has been lost
// (successor.h).
//
// The second look is for a rotation that replaces the certificate and the key one after the other.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/tls/certificate.h"

namespace longhaul::tls {

// Empty: no such file.
struct Paths {
  std::string cert;  // this program's certificate, then CAs between it and a root
  std::string key;   // its private key
  std::string ca;    // the CAs that this program trusts
  std::string crl;   // what these CAs have revoked

  // Whether any file is named.
  bool any() const { return !cert.empty() || !key.empty() || !ca.empty() || !crl.empty(); }
};

// Contents that belong together and passed all checks.
struct Material {
  std::string cert, key, ca, crl;      // PEM; empty where no file is named
  std::shared_ptr<const Trust> trust;  // null without CAs
  int64_t expires_s = 0;               // when the certificate expires, since 1970; 0: none
  bool operator==(const Material& other) const {
    return cert == other.cert && key == other.key && ca == other.ca && crl == other.crl;
  }
};

// Reads and checks the files once. NotFound: a file cannot be read. InvalidArgument: the contents
// are wrong. The text names the file, and never quotes a key.
absl::StatusOr<Material> Load(const Paths& paths);

class Files {
 public:
  enum class Change { kUsed, kRefused, kRestored };
  struct Events {
    // Called without a lock, by the thread that looked. May be null.
    std::function<void(Change change)> changed;
  };

  // Fails as Load() does, if the files are not good at the start.
  static absl::StatusOr<std::shared_ptr<Files>> Open(Paths paths, Events events = {});
  ~Files();
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  // The last good contents. Any thread.
  std::shared_ptr<const Material> Current() const;
  // Looks for new contents, now. Any thread.
  void Refresh();
  // Calls Refresh() again and again, in a thread of its own. Call it once.
  void Watch(std::chrono::milliseconds interval = std::chrono::seconds(1));
  // Ends this thread: it does not call Events any more. The destructor does the same.
  void StopWatching();

 private:
  Files(Paths paths, Events events, Material material);

  const Paths paths_;
  const Events events_;
  Mutex refresh_;  // held while files are read
  // What was found broken last: its contents or its error, and how often in a row.
  std::string broken_ ABSL_GUARDED_BY(refresh_);
  int broken_times_ ABSL_GUARDED_BY(refresh_) = 0;

  mutable Mutex mutex_;
  CondVar stop_;
  std::shared_ptr<const Material> current_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

}  // namespace longhaul::tls
