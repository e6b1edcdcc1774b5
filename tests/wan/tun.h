// A host's network device: a TUN device in its network namespace, whose other end we hold.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace longhaul::wan {

class Tun {
 public:
  // Makes the device `device` in the namespace at path `netns`; it goes with this object. Whoever
  // made the namespace gives it addresses and brings it up. With `offload` hosts hand over
  // super-packets whole (TSO, USO).
  // FailedPrecondition: the namespace, the TUN driver or a privilege is missing; says which.
  static absl::StatusOr<std::unique_ptr<Tun>> Open(const std::string& netns,
                                                   const std::string& device, bool offload);
  ~Tun();
  Tun(const Tun&) = delete;
  Tun& operator=(const Tun&) = delete;

  // Readable when the host has sent something.
  int fd() const { return fd_; }

  // The next frame that the host has sent, in `buffer`; empty: none now.
  std::span<const uint8_t> Read(std::span<uint8_t> buffer) const;

  // Hands the host a frame. False: it did not take it.
  bool Write(std::span<const uint8_t> frame) const;

 private:
  explicit Tun(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace longhaul::wan
