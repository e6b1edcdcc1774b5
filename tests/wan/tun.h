// A host's network device: a TUN device in the host's network namespace. The emulator holds its
// other end.
//
// A Tun owns the device. One thread uses it. No call but Open() blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace longhaul::wan {

class Tun {
 public:
  // Makes the device `device` in the namespace at the path `netns`. The device exists as long as
  // this object. The maker of the namespace gives the device addresses and brings it up. With
  // `offload` the host hands over whole super-packets (TSO, USO). InvalidArgument: the name of the
  // device is empty or too long. FailedPrecondition: the namespace, the TUN driver or a privilege
  // is missing; the text says which. After an error there is no device.
  static absl::StatusOr<std::unique_ptr<Tun>> Open(const std::string& netns,
                                                   const std::string& device, bool offload);
  ~Tun();
  Tun(const Tun&) = delete;
  Tun& operator=(const Tun&) = delete;

  // A descriptor that is readable when the host has sent a frame.
  int fd() const { return fd_; }

  // Reads the host's next frame into `buffer`. Returns an empty span if there is none now.
  std::span<const uint8_t> Read(std::span<uint8_t> buffer) const;

  // Hands the host a frame. Returns false if the host did not take the frame.
  bool Write(std::span<const uint8_t> frame) const;

 private:
  explicit Tun(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace longhaul::wan
