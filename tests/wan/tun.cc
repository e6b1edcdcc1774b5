#include "tests/wan/tun.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/check.h"

// Kernels have these since 6.2. The headers of some distributions are older.
#ifndef TUN_F_USO4
#define TUN_F_USO4 0x20
#define TUN_F_USO6 0x40
#endif

namespace longhaul::wan {
namespace {

absl::Status SystemError(const std::string& what, const char* remedy) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": ", strerror(errno), "; ", remedy));
}

// A file descriptor that is closed unless it is taken.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  int Take() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

// Opens the driver in `netns`, then returns to `home`. A TUN device belongs to the namespace of the
// thread that opens the driver.
int OpenDriverIn(int netns, int home) {
  if (setns(netns, CLONE_NEWNET) != 0) return -1;
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  const int error = errno;
  LH_CHECK(setns(home, CLONE_NEWNET) == 0) << strerror(errno);
  errno = error;
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tun>> Tun::Open(const std::string& netns, const std::string& device,
                                               bool offload) {
  if (device.empty() || device.size() >= IFNAMSIZ) {
    return absl::InvalidArgumentError(
        absl::StrCat("device name ", device, ": 1 to ", IFNAMSIZ - 1, " characters"));
  }
  const Fd home(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (home.get() < 0) return SystemError("open /proc/thread-self/ns/net", "is /proc mounted?");
  const Fd target(open(netns.c_str(), O_RDONLY | O_CLOEXEC));
  if (target.get() < 0) {
    return SystemError(absl::StrCat("open network namespace ", netns),
                       "make it first, with `ip netns add`");
  }
  Fd tun(OpenDriverIn(target.get(), home.get()));
  if (tun.get() < 0) {
    return SystemError(absl::StrCat("open /dev/net/tun in ", netns),
                       "this needs the TUN driver (modprobe tun) and root");
  }
  ifreq request = {};
  memcpy(request.ifr_name, device.data(), device.size());
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tun.get(), TUNSETIFF, &request) != 0) {
    return SystemError(absl::StrCat("make TUN device ", device, " in ", netns),
                       "the name must be free, and this needs CAP_NET_ADMIN there");
  }
  if (offload) {
    const unsigned tso = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
    if (ioctl(tun.get(), TUNSETOFFLOAD, tso | TUN_F_USO4 | TUN_F_USO6) != 0 &&
        ioctl(tun.get(), TUNSETOFFLOAD, tso) != 0) {
      return SystemError(absl::StrCat("segmentation offload of ", device), "use --offload=false");
    }
  }
  return std::unique_ptr<Tun>(new Tun(tun.Take()));
}

Tun::~Tun() { close(fd_); }

std::span<const uint8_t> Tun::Read(std::span<uint8_t> buffer) const {
  const ssize_t bytes = read(fd_, buffer.data(), buffer.size());
  return buffer.first(bytes > 0 ? static_cast<size_t>(bytes) : 0);
}

bool Tun::Write(std::span<const uint8_t> frame) const {
  return write(fd_, frame.data(), frame.size()) == static_cast<ssize_t>(frame.size());
}

}  // namespace longhaul::wan
