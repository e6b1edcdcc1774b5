#include "peerd/transport/callers.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {

AddressBlock AddressBlock::Of(const SocketAddress& address) {
  AddressBlock block;
  const auto set = [&block](uint8_t version, const uint8_t* from, size_t bytes) {
    block.bytes[0] = version;
    std::copy_n(from, bytes, block.bytes.begin() + 1);
  };
  if (address.family() == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
    set(4, reinterpret_cast<const uint8_t*>(&v4->sin_addr), 3);
  } else if (address.family() == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
    const uint8_t* bytes = v6->sin6_addr.s6_addr;
    // A socket that listens on [::] maps IPv4 addresses like this. As IPv6 they would be one block.
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
      set(4, bytes + 12, 3);
    } else {
      set(6, bytes, 8);
    }
  }
  return block;
}

std::string ToString(const AddressBlock& block) {
  std::array<uint8_t, sizeof(in6_addr)> address{};
  std::copy(block.bytes.begin() + 1, block.bytes.end(), address.begin());
  const bool v4 = block.bytes[0] == 4;
  char text[INET6_ADDRSTRLEN] = "?";
  inet_ntop(v4 ? AF_INET : AF_INET6, address.data(), text, sizeof(text));
  return absl::StrCat(text, v4 ? "/24" : "/64");
}

uint64_t Callers::Add(const AddressBlock& block, bool known) {
  Held* held = &blocks_[block];
  ++held->silent;
  callers_.push_back({.number = next_, .block = block, .held = held, .known = known});
  return next_++;
}

std::vector<Callers::Caller>::iterator Callers::Find(uint64_t caller) {
  return std::find_if(callers_.begin(), callers_.end(),
                      [caller](const Caller& c) { return c.number == caller; });
}

void Callers::SetJudged(uint64_t caller) {
  const auto found = Find(caller);
  if (found == callers_.end()) return;
  --found->alike();
  found->judged = true;
  ++found->alike();
}

void Callers::Remove(uint64_t caller) {
  const auto found = Find(caller);
  if (found == callers_.end()) return;
  --found->alike();
  if (found->held->silent + found->held->judged == 0) blocks_.erase(found->block);
  callers_.erase(found);
}

int Callers::Caller::Worth() const {
  if (alike() > kCallersPerBlockMax) return 0;
  return 1 + (judged ? 1 : 0) + (known ? 2 : 0);
}

Callers::Victim Callers::First() const {
  LH_CHECK(!callers_.empty());
  // Among equals min_element() returns the first one, which is the oldest.
  const auto first =
      std::min_element(callers_.begin(), callers_.end(), [](const Caller& a, const Caller& b) {
        const int worth_a = a.Worth();
        const int worth_b = b.Worth();
        return worth_a != worth_b ? worth_a < worth_b : a.alike() > b.alike();
      });
  return {first->number, first->block};
}

}  // namespace longhaul::peerd
