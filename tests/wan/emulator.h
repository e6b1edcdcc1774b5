// The emulator: owns the hosts' devices, the network between them, and the control socket.
//
// One thread does everything, and it never waits for a host or for a client. A frame that a host
// does not take is dropped and counted. A client that does not read its answer is disconnected.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/wan/commands.h"
#include "tests/wan/network.h"
#include "tests/wan/tun.h"

namespace longhaul::wan {

// The most connections to the control socket. A further one is closed at once.
inline constexpr size_t kClientsMax = 16;

struct EmulatorOptions {
  std::string control;  // path of the control socket
  uint64_t seed = 1;
  bool offload = true;
  // While there is traffic, the emulator looks at hosts and at due packets only once per tick. A
  // wake-up costs more than a packet, so packets that are handled together cost half as much or
  // less. A packet may be late by one tick. 0: every packet is handled at once.
  Nanos tick = 500 * kMicrosecond;
};

// How late packets came out of the emulator. Lateness is an error of the emulation.
class Lateness {
 public:
  void Add(Nanos late);
  // An upper bound, within a factor of two.
  Nanos Quantile(double q) const;
  Nanos max() const { return max_; }

 private:
  std::array<int64_t, 40> counts_ = {};  // bucket i: less than 2^i ns
  int64_t total_ = 0;
  Nanos max_ = 0;
};

class Emulator {
 public:
  // Binds the control socket. InvalidArgument: the path is empty or too long. Unavailable: the text
  // says which system call failed, and why. After an error no socket is bound.
  static absl::StatusOr<std::unique_ptr<Emulator>> Make(const EmulatorOptions& options);
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Carries packets and answers clients until `stop_fd` is readable. Unavailable: epoll failed.
  absl::Status Run(int stop_fd);

 private:
  explicit Emulator(const EmulatorOptions& options);

  absl::Status Bind();
  absl::Status Watch(int fd);
  absl::Status Attach(int number, const std::string& netns, const std::string& device);
  // Takes packets off a host. Returns false if the host may have more.
  bool ReadHost(const Tun& tun);
  void Deliver(const Packet& packet, Nanos due);
  void Accept();
  void ReadClient(int fd);
  void CloseClient(int fd);
  struct Woken {
    bool stop = false;
    bool more = false;  // some host has more to read
  };
  absl::StatusOr<Woken> Wait(int stop_fd);
  std::string Describe() const;

  const EmulatorOptions options_;
  Network network_;
  Commands commands_;
  int epoll_ = -1;
  int listener_ = -1;
  std::map<int, std::unique_ptr<Tun>> hosts_;  // by number
  std::map<int, const Tun*> tuns_;             // by descriptor
  std::map<int, std::string> clients_;         // by descriptor: the line that is not complete yet
  std::vector<uint8_t> buffer_;
  Lateness lateness_;
  int64_t refused_ = 0;  // frames that their destination did not take
};

}  // namespace longhaul::wan
