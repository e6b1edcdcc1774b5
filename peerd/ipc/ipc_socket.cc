#include "peerd/ipc/ipc_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace longhaul::peerd {
namespace {

constexpr int kBacklog = 128;
constexpr size_t kGroupsMax = 65536;
constexpr int kLockPollMs = 20;  // a daemon that starts holds the lock for milliseconds

std::string System(int error) { return absl::StrCat("(", strerror(error), ")"); }

absl::StatusOr<gid_t> GroupId(const std::string& group, const char* flag) {
  if (group.empty()) return getegid();
  uint32_t number = 0;
  if (absl::SimpleAtoi(group, &number)) return number;
  struct group entry;
  struct group* found = nullptr;
  std::vector<char> buffer(65536);
  if (getgrnam_r(group.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 ||
      found == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no group \"", group, "\" on this host; check ", flag));
  }
  return found->gr_gid;
}

absl::StatusOr<uid_t> UserId(const std::string& user) {
  uint32_t number = 0;
  if (absl::SimpleAtoi(user, &number)) return number;
  struct passwd entry;
  struct passwd* found = nullptr;
  std::vector<char> buffer(65536);
  if (getpwnam_r(user.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 ||
      found == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no user \"", user, "\" on this host; check --allow-users"));
  }
  return found->pw_uid;
}

// `kind`: "uid" or "gid". The id that the kernel shows for ids that this user namespace lacks.
uint32_t OverflowId(const std::string& kind) {
  uint32_t id = 65534;
  std::ifstream("/proc/sys/kernel/overflow" + kind) >> id;
  return id;
}

absl::Status OverflowError(const char* flag, const std::string& id) {
  return absl::InvalidArgumentError(
      absl::StrCat(flag, "=", id, " refused: the kernel shows this id for everybody that a user ",
                   "namespace does not know; name a user or group of this host"));
}

// Opens the lock of the path of a socket. A file that others may lock, such as one that a daemon of
// another user has left, is replaced if this user may do that.
absl::StatusOr<UniqueFd> OpenLock(const std::string& path, const std::string& name) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    UniqueFd fd(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    struct stat status;
    if (fd.get() >= 0 && fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode) &&
        status.st_uid == geteuid() && (status.st_mode & 0077) == 0) {
      return fd;
    }
    if (unlink(name.c_str()) != 0 && errno != ENOENT) break;
  }
  return absl::UnavailableError(absl::StrCat(
      "socket ", path, " refused: ", name, " cannot be a lock of this user alone ", System(errno),
      "; check the directory and its permissions, or choose another --socket"));
}

// Locks the path of a socket until the descriptor is closed. Without the lock, two daemons that
// start at once could each take the other's new socket for a stale one. Unavailable: it cannot be
// had within `wait_ms`.
absl::StatusOr<UniqueFd> LockPath(const std::string& path, int wait_ms) {
  const std::string name = path + ".lock";
  LH_ASSIGN_OR_RETURN(UniqueFd fd, OpenLock(path, name));
  for (int waited_ms = 0; flock(fd.get(), LOCK_EX | LOCK_NB) != 0; waited_ms += kLockPollMs) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("cannot lock ", name, " ", System(errno)));
    }
    if (waited_ms >= wait_ms) {
      char holder[32] = {};
      const ssize_t got = pread(fd.get(), holder, sizeof holder - 1, 0);
      return absl::UnavailableError(absl::StrCat(
          "socket ", path, " refused: process ", got > 0 ? holder : "unknown", " has held ", name,
          " for ", wait_ms, " ms; stop it, or choose another --socket"));
    }
    usleep(kLockPollMs * 1000);
  }
  const std::string self = std::to_string(getpid());
  // Only the message above reads the process number, so a failure here does no harm.
  if (ftruncate(fd.get(), 0) == 0) (void)!pwrite(fd.get(), self.data(), self.size(), 0);
  return fd;
}

// Removes a socket file on which no process answers. Returns OK if there is no file.
absl::Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("socket ", path, " refused ", System(errno)));
  }
  if (!S_ISSOCK(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("socket ", path,
                     " refused: the path is taken by a file that is no socket; "
                     "choose another --socket"));
  }
  // The probe does not block: if the backlog of a live daemon is full, connect() gives EAGAIN.
  UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (probe.get() < 0) {
    return absl::UnavailableError(absl::StrCat("socket ", path, " refused ", System(errno)));
  }
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
      errno == EAGAIN) {
    return absl::AlreadyExistsError(
        absl::StrCat("socket ", path,
                     " refused: another process answers there; stop it or choose "
                     "another --socket"));
  }
  if (errno != ECONNREFUSED) {
    return absl::UnavailableError(absl::StrCat(
        "socket ", path, " refused: cannot tell whether it is in use ", System(errno)));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::UnavailableError(
        absl::StrCat("stale socket ", path, " cannot be removed ", System(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PeerCredentials> CredentialsOf(int fd) {
  ucred credentials;
  socklen_t length = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return absl::UnavailableError(absl::StrCat("SO_PEERCRED failed ", System(errno)));
  }
  PeerCredentials peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.groups = {credentials.gid};
  std::vector<gid_t> more(64);
  length = static_cast<socklen_t>(more.size() * sizeof(gid_t));
  int result = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, more.data(), &length);
  if (result != 0 && errno == ERANGE && length / sizeof(gid_t) <= kGroupsMax) {
    more.resize(length / sizeof(gid_t));
    result = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, more.data(), &length);
  }
  // Older kernels do not know SO_PEERGROUPS. Then only the primary group counts.
  if (result == 0) {
    more.resize(length / sizeof(gid_t));
    peer.groups.insert(peer.groups.end(), more.begin(), more.end());
  }
  return peer;
}

bool Permitted(const PeerCredentials& peer, const SocketAccess& access) {
  return peer.uid == 0 || access.everyone || access.users.contains(peer.uid) ||
         std::any_of(peer.groups.begin(), peer.groups.end(),
                     [&](gid_t group) { return access.groups.contains(group); });
}

std::string ToString(const SocketAccess& access) {
  if (access.everyone) return "everybody";
  const auto list = [](const char* one, const char* many, const auto& ids) {
    return ids.empty()
               ? ""
               : absl::StrCat(", ", ids.size() == 1 ? one : many, " ", absl::StrJoin(ids, ","));
  };
  return absl::StrCat("root", list("user", "users", access.users),
                      list("members of group", "members of groups", access.groups));
}

absl::StatusOr<SocketAccess> ResolveSocketAccess(const SocketAccessOptions& options) {
  SocketAccess access;
  access.users.insert(geteuid());
  if (options.allow_users.empty() && options.allow_groups.empty()) {
    LH_ASSIGN_OR_RETURN(const gid_t group, GroupId(options.group, "--socket-group"));
    if ((options.mode & 0060) != 0) access.groups.insert(group);
    access.everyone = (options.mode & 0006) != 0;
    return access;
  }
  if ((options.mode & 0066) == 0) {
    return absl::InvalidArgumentError(
        "--socket-mode=0600 lets nobody but root and peerd's own user open the socket, so "
        "--allow-users and --allow-groups can admit nobody; give --socket-mode=0660 or 0666");
  }
  for (const std::string& user : options.allow_users) {
    LH_ASSIGN_OR_RETURN(const uid_t uid, UserId(user));
    access.users.insert(uid);
  }
  for (const std::string& group : options.allow_groups) {
    LH_ASSIGN_OR_RETURN(const gid_t gid, GroupId(group, "--allow-groups"));
    // In a user namespace, all users and groups from outside of it look like this one.
    if (gid == OverflowId("gid")) return OverflowError("--allow-groups", group);
    access.groups.insert(gid);
  }
  if (!options.allow_users.empty() && access.users.contains(OverflowId("uid"))) {
    return OverflowError("--allow-users", absl::StrCat(OverflowId("uid")));
  }
  return access;
}

absl::StatusOr<mode_t> ParseSocketMode(const std::string& text) {
  for (const auto& [word, mode] : {std::pair{"600", 0600u}, {"660", 0660u}, {"666", 0666u}}) {
    if (text == word || text == absl::StrCat("0", word)) return mode;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--socket-mode=", text, ": give 0600, 0660 or 0666"));
}

void ListeningSocket::Remove() {
  if (path_.empty()) return;
  struct stat status;
  // Unlink the file only if it is still the same: another daemon may have replaced it.
  if (lstat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_) {
    unlink(path_.c_str());
  }
  path_.clear();
}

absl::StatusOr<ListeningSocket> ListenOnPath(const std::string& path, mode_t mode,
                                             const std::string& group, int lock_wait_ms) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path ||
      path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("socket path \"", path, "\" refused: it has ", path.size(), " bytes, 1 to ",
                     sizeof address.sun_path - 1, " are possible; choose another --socket"));
  }
  memcpy(address.sun_path, path.data(), path.size());
  LH_ASSIGN_OR_RETURN(const gid_t gid, GroupId(group, "--socket-group"));

  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "."
                                : slash == 0               ? "/"
                                                           : path.substr(0, slash);
  if (mkdir(directory.c_str(), 0755) != 0 && errno != EEXIST) {
    return absl::UnavailableError(absl::StrCat("socket ", path, " refused: directory ", directory,
                                               " is missing and cannot be made ", System(errno)));
  }
  LH_ASSIGN_OR_RETURN(const UniqueFd lock, LockPath(path, lock_wait_ms));
  LH_RETURN_IF_ERROR(RemoveStale(path, address));

  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  struct stat status;
  // Nobody can connect before listen(). By then the file has its mode and group.
  if (fd.get() < 0 ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return absl::UnavailableError(absl::StrCat("socket ", path, " refused ", System(errno),
                                               "; check the directory and its permissions"));
  }
  const bool ready = (gid == getegid() || lchown(path.c_str(), static_cast<uid_t>(-1), gid) == 0) &&
                     chmod(path.c_str(), mode) == 0 && lstat(path.c_str(), &status) == 0 &&
                     listen(fd.get(), kBacklog) == 0;
  if (!ready) {
    const int error = errno;
    unlink(path.c_str());
    return absl::UnavailableError(absl::StrCat("socket ", path, " cannot be given to group ", gid,
                                               " or listened on ", System(error)));
  }
  return ListeningSocket(std::move(fd), path, status.st_dev, status.st_ino);
}

}  // namespace longhaul::peerd
