// The addresses at which other peers reach this host's data port, and at which this host reaches
// theirs.
//
// A peer that reaches the coordinator over loopback runs on the coordinator's machine, or at the
// end of a tunnel. It cannot know for sure which of its addresses the others reach. But each of the
// others knows one that it reaches itself: that of the coordinator. So such a peer names a loopback
// address at the end of its list, and ReachedFrom() puts the address of the coordinator in its
// place. Whoever starts first, and however many networks the machine has, the others find it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace longhaul::peerd {

// The addresses of this host, without a port; "": there is none of that kind. Never loopback. Calls
// do not block.
struct OwnAddresses {
  // The source address of a packet to `host`, which is numeric.
  std::function<std::string(const std::string& host)> towards;
  // The one on the default route, else that of the first interface that is up; an IPv4 address
  // goes before an IPv6 one.
  std::function<std::string(bool ipv4_only)> general;
};
OwnAddresses SystemAddresses();

// The addresses to tell the others, best first. `listen`: the bound address. A concrete one is the
// answer itself. For a wildcard the answer is an address of this host, of a family in which it
// listens; of those, the one on the route to `coordinator`, numeric or "" (not reached yet). Only a
// host without a network has nothing but loopback.
std::vector<std::string> AdvertisedEndpoints(const std::string& listen,
                                             const std::string& coordinator,
                                             const OwnAddresses& own);

// The addresses at which a host that reaches the coordinator at `coordinator` (numeric, or "": not
// reached yet) may reach a peer that tells `endpoints`; best first.
std::vector<std::string> ReachedFrom(const std::string& coordinator,
                                     const std::vector<std::string>& endpoints);

// `listen`, or with 0.0.0.0 in place of [::] where the kernel has no IPv6.
std::string WhereKernelListens(const std::string& listen);

// The addresses that a peer names in Hello. The peer derives them anew for each control stream,
// because the host may have others by then. Any thread may call it.
class AdvertisedAddress {
 public:
  using Derive = std::function<std::vector<std::string>(const std::string& coordinator)>;

  // `fixed` is the value of --advertise and never changes. Empty: `derive` gives the addresses.
  AdvertisedAddress(std::string fixed, Derive derive);

  // Derives the addresses anew for a coordinator that is reached at this numeric address.
  void Refresh(const std::string& coordinator);
  std::vector<std::string> Get() const;
  // ReachedFrom() for the coordinator of the last Refresh().
  std::vector<std::string> Reached(const std::vector<std::string>& endpoints) const;

 private:
  const Derive derive_;  // null: the address is fixed
  mutable Mutex mutex_;
  std::string coordinator_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> endpoints_ ABSL_GUARDED_BY(mutex_);
  bool unreached_ ABSL_GUARDED_BY(mutex_) = false;  // and the log says so
};

}  // namespace longhaul::peerd
