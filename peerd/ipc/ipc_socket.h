// Helpers for the Unix socket: listening on a path, deciding who may connect, and reading
// descriptors from messages.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul::peerd {

// Owns a file descriptor, and closes it. -1: none.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd();
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  std::vector<gid_t> groups;  // the primary one first
};

// Returns the credentials that the process at the other end had when it connected.
absl::StatusOr<PeerCredentials> CredentialsOf(int fd);
// Returns whether the process may connect. Root, `user` and the members of `group` may.
bool Permitted(const PeerCredentials& peer, uid_t user, gid_t group);

// A listening socket and its file. Remove() and the destructor unlink the file, unless another
// process has replaced it.
class ListeningSocket {
 public:
  ListeningSocket(UniqueFd fd, std::string path, gid_t group, dev_t device, ino_t inode)
      : fd_(std::move(fd)), path_(std::move(path)), group_(group), device_(device), inode_(inode) {}
  ListeningSocket(ListeningSocket&& other) noexcept
      : fd_(std::move(other.fd_)),
        path_(std::exchange(other.path_, "")),
        group_(other.group_),
        device_(other.device_),
        inode_(other.inode_) {}
  ~ListeningSocket() { Remove(); }

  int fd() const { return fd_.get(); }
  // The group whose members may connect.
  gid_t group() const { return group_; }
  void Remove();

 private:
  UniqueFd fd_;
  std::string path_;
  gid_t group_;
  dev_t device_;
  ino_t inode_;
};

// Listens on `path` with file mode `mode` and group `group` (name or number; "": that of peerd).
// Replaces a socket file on which no process answers, and never any other file. AlreadyExists: a
// process answers. InvalidArgument, Unavailable: the text has the path and the system's error.
absl::StatusOr<ListeningSocket> ListenOnPath(const std::string& path, mode_t mode,
                                             const std::string& group);

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
