// Helpers for the Unix socket: listening on a path, deciding who may connect, and reading
// descriptors from messages.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace longhaul::peerd {

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  std::vector<gid_t> groups;  // the primary one first
};

// Returns the credentials that the process at the other end had when it connected.
absl::StatusOr<PeerCredentials> CredentialsOf(int fd);

// Who may connect, besides root.
struct SocketAccess {
  bool everyone = false;
  std::set<uid_t> users;
  std::set<gid_t> groups;
};
bool Permitted(const PeerCredentials& peer, const SocketAccess& access);
// "root, user 1000, and members of group 50": for people.
std::string ToString(const SocketAccess& access);

// What the flags of peerd say of who may connect.
struct SocketAccessOptions {
  mode_t mode = 0660;  // of the socket file; one of those that ParseSocketMode() takes
  std::string group;   // of the socket file: name or number; "": that of peerd
  // Names or numbers. Empty: the mode alone decides.
  std::vector<std::string> allow_users;
  std::vector<std::string> allow_groups;
};
// Peerd's own user may always connect. Without lists the mode decides: 0600 admits nobody else,
// 0660 also the members of the group, 0666 everybody. A list admits whom it names, and then the
// mode and the group admit nobody by themselves. (The file still has them, so the kernel refuses a
// user of the list who may not open the file.)
//
// InvalidArgument: there is no such user or group; or the lists can admit nobody, because the mode
// is 0600.
absl::StatusOr<SocketAccess> ResolveSocketAccess(const SocketAccessOptions& options);
// Reads "0600", "0660" or "0666"; the zero may be missing. InvalidArgument: anything else.
absl::StatusOr<mode_t> ParseSocketMode(const std::string& text);

// A listening socket and its file. Remove() and the destructor unlink the file, unless another
// process has replaced it.
class ListeningSocket {
 public:
  ListeningSocket(UniqueFd fd, std::string path, dev_t device, ino_t inode)
      : fd_(std::move(fd)), path_(std::move(path)), device_(device), inode_(inode) {}
  ListeningSocket(ListeningSocket&& other) noexcept
      : fd_(std::move(other.fd_)),
        path_(std::exchange(other.path_, "")),
        device_(other.device_),
        inode_(other.inode_) {}
  ~ListeningSocket() { Remove(); }

  int fd() const { return fd_.get(); }
  void Remove();

 private:
  UniqueFd fd_;
  std::string path_;
  dev_t device_;
  ino_t inode_;
};

// Listens on `path` with file mode `mode` and group `group` (name or number; "": that of peerd).
// Replaces a socket file on which no process answers, and never any other file. AlreadyExists: a
// process answers. InvalidArgument, Unavailable: the text has the path and the system's error.
// Leaves a small file of the daemon's user, `path` + ".lock", beside the socket; waits
// `lock_wait_ms` for another daemon that has locked it.
absl::StatusOr<ListeningSocket> ListenOnPath(const std::string& path, mode_t mode,
                                             const std::string& group, int lock_wait_ms = 5000);

// Calls `take` with each descriptor of a received message. `take` must close the descriptor or keep
// it.
template <class Take>
void ForEachDescriptor(const msghdr& message, Take take) {
  msghdr& m = const_cast<msghdr&>(message);  // CMSG_NXTHDR is not const-correct
  for (cmsghdr* c = CMSG_FIRSTHDR(&m); c != nullptr; c = CMSG_NXTHDR(&m, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      take(fd);
    }
  }
}

}  // namespace longhaul::peerd
