#include "tests/wan/emulator.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace longhaul::wan {
namespace {

// How many frames are taken off one host before the other hosts get their turn.
constexpr int kReadBatch = 32;

Nanos Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void SleepUntil(Nanos time) {
  const timespec until = {.tv_sec = time / kSecond, .tv_nsec = time % kSecond};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

absl::Status SystemError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

double Us(Nanos time) { return static_cast<double>(time) / kMicrosecond; }

}  // namespace

void Lateness::Add(Nanos late) {
  const auto bits =
      static_cast<size_t>(std::bit_width(static_cast<uint64_t>(std::max<Nanos>(late, 0))));
  ++counts_[std::min(bits, counts_.size() - 1)];
  ++total_;
  max_ = std::max(max_, late);
}

Nanos Lateness::Quantile(double q) const {
  auto left = static_cast<int64_t>(static_cast<double>(total_) * q);
  for (size_t i = 0; i < counts_.size(); ++i) {
    left -= counts_[i];
    if (left <= 0) return std::min(max_, Nanos{1} << i);
  }
  return max_;
}

Emulator::Emulator(const EmulatorOptions& options)
    : options_(options),
      network_(options.seed, [this](const Packet& packet, Nanos due) { Deliver(packet, due); }),
      commands_(
          &network_,
          {.attach = [this](int number, const std::string& netns,
                            const std::string& device) { return Attach(number, netns, device); },
           .emulator = [this] { return Describe(); },
           .reset =
               [this] {
                 lateness_ = {};
                 refused_ = 0;
               }}),
      buffer_(kFrameBytesMax) {}

Emulator::~Emulator() {
  for (const auto& [fd, line] : clients_) close(fd);
  if (listener_ >= 0) {
    close(listener_);
    unlink(options_.control.c_str());
  }
  if (epoll_ >= 0) close(epoll_);
}

absl::StatusOr<std::unique_ptr<Emulator>> Emulator::Make(const EmulatorOptions& options) {
  std::unique_ptr<Emulator> emulator(new Emulator(options));
  LH_RETURN_IF_ERROR(emulator->Bind());
  return emulator;
}

absl::Status Emulator::Bind() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) return SystemError("epoll_create1");
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  if (options_.control.empty() || options_.control.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("control socket '", options_.control, "': 1 to ",
                                                   sizeof(address.sun_path) - 1, " characters"));
  }
  memcpy(address.sun_path, options_.control.data(), options_.control.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return SystemError("socket");
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const absl::Status status = SystemError(absl::StrCat("bind control socket ", options_.control));
    close(fd);
    return status;
  }
  listener_ = fd;
  if (listen(listener_, kClientsMax) != 0) return SystemError("listen");
  return Watch(listener_);
}

absl::Status Emulator::Watch(int fd) {
  epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return SystemError("epoll_ctl");
  return absl::OkStatus();
}

absl::Status Emulator::Attach(int number, const std::string& netns, const std::string& device) {
  LH_ASSIGN_OR_RETURN(std::unique_ptr<Tun> tun, Tun::Open(netns, device, options_.offload));
  LH_RETURN_IF_ERROR(Watch(tun->fd()));
  tuns_[tun->fd()] = tun.get();
  hosts_[number] = std::move(tun);
  return absl::OkStatus();
}

absl::Status Emulator::Run(int stop_fd) {
  LH_RETURN_IF_ERROR(Watch(stop_fd));
  while (true) {
    LH_ASSIGN_OR_RETURN(const Woken woken, Wait(stop_fd));
    if (woken.stop) return absl::OkStatus();
    const Nanos now = Now();
    network_.Run(now);
    if (!woken.more && options_.tick > 0) SleepUntil(now + options_.tick);
  }
}

absl::StatusOr<Emulator::Woken> Emulator::Wait(int stop_fd) {
  const Nanos due = network_.NextDue();
  const Nanos left = std::max<Nanos>(0, due - Now());
  const timespec timeout = {.tv_sec = left / kSecond, .tv_nsec = left % kSecond};
  epoll_event events[64];
  const int count = epoll_pwait2(epoll_, events, std::size(events), due < 0 ? nullptr : &timeout,
                                 /*sigmask=*/nullptr);
  if (count < 0 && errno != EINTR) return SystemError("epoll_pwait2");
  Woken woken;
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    if (fd == stop_fd) {
      woken.stop = true;
    } else if (fd == listener_) {
      Accept();
    } else if (const auto tun = tuns_.find(fd); tun != tuns_.end()) {
      if (!ReadHost(*tun->second)) woken.more = true;
    } else {
      ReadClient(fd);
    }
  }
  return woken;
}

bool Emulator::ReadHost(const Tun& tun) {
  for (int i = 0; i < kReadBatch; ++i) {
    const std::span<const uint8_t> frame = tun.Read(buffer_);
    if (frame.empty()) return true;
    if (std::optional<Packet> packet = Packet::FromFrame(frame)) {
      network_.Enter(*std::move(packet), Now());
    }
  }
  return false;
}

void Emulator::Deliver(const Packet& packet, Nanos due) {
  lateness_.Add(Now() - due);
  const auto host = hosts_.find(packet.dst());
  if (host == hosts_.end() || !host->second->Write(packet.frame())) ++refused_;
}

void Emulator::Accept() {
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return;
  if (clients_.size() >= kClientsMax || !Watch(fd).ok()) {
    close(fd);
    return;
  }
  clients_[fd];
}

void Emulator::ReadClient(int fd) {
  const auto client = clients_.find(fd);
  if (client == clients_.end()) return;
  char piece[kLineBytesMax];
  const ssize_t bytes = recv(fd, piece, sizeof(piece), 0);
  if (bytes <= 0) {
    if (bytes == 0 || errno != EAGAIN) CloseClient(fd);
    return;
  }
  std::string& line = client->second;
  line.append(piece, static_cast<size_t>(bytes));
  size_t begin = 0;
  for (size_t end; (end = line.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string answer =
        absl::StrCat(commands_.Execute(std::string_view(line).substr(begin, end - begin)), "\n");
    // A client that does not read its answers is disconnected.
    const ssize_t sent = send(fd, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(answer.size())) return CloseClient(fd);
  }
  line.erase(0, begin);
  if (line.size() > kLineBytesMax) CloseClient(fd);
}

void Emulator::CloseClient(int fd) {
  clients_.erase(fd);
  close(fd);
}

std::string Emulator::Describe() const {
  return absl::StrFormat(
      "{\"late_p50_us\":%.0f,\"late_p99_us\":%.0f,\"late_max_us\":%.0f,\"refused\":%d,"
      "\"cpu_s\":%.3f}",
      Us(lateness_.Quantile(0.5)), Us(lateness_.Quantile(0.99)), Us(lateness_.max()), refused_,
      CpuSeconds());
}

}  // namespace longhaul::wan
