#include "peerd/transport/trying.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

// In a minute.
constexpr int kTriesOfAddressMax = 600;
constexpr size_t kAddressesOfPeerMax = 32;
constexpr size_t kAddressesMax = 256;
constexpr char kTooOften[] = "the peer names too many addresses, or one of them too often";

}  // namespace

void Trying::Begin(PeerId peer, const std::vector<std::string>& endpoints, Tick deadline,
                   Done done) {
  const uint64_t id = ++last_;
  Trial& trial = trials_[id];
  trial.peer = peer;
  trial.deadline = deadline;
  trial.done = std::move(done);
  trial.error = "the peer has no endpoint to connect to";
  for (const std::string& endpoint : endpoints) Resolve(id, &trial, endpoint);
  alarm_->Set(ring_->Now());
}

void Trying::Resolve(uint64_t id, Trial* trial, const std::string& endpoint) {
  const auto host_port = ParseHostPort(endpoint);
  if (!host_port.ok()) {
    trial->error = std::string(host_port.status().message());
    return;
  }
  if (const auto address = NumericAddress(*host_port)) {
    trial->candidates.push_back(*address);
    return;
  }
  ++trial->resolving;
  resolver_->Resolve(*host_port, [this, id](Resolver::Addresses addresses) {
    const auto it = trials_.find(id);
    if (it == trials_.end()) return;
    Trial& resolved = it->second;
    --resolved.resolving;
    if (addresses.ok()) {
      resolved.candidates.insert(resolved.candidates.end(), addresses->begin(), addresses->end());
    } else {
      resolved.error = std::string(addresses.status().message());
    }
    alarm_->Set(ring_->Now());
  });
}

Tick Trying::Work(Tick now) {
  std::vector<uint64_t> over;
  Tick next = kNever;
  for (auto& [id, trial] : trials_) {
    if (!trial.dialling && !trial.candidates.empty()) Dial(id, &trial, now);
    const bool failed = !trial.dialling && trial.candidates.empty() && trial.resolving == 0;
    // If a dial is running, waits for its end: the dial has a deadline, and its error says more.
    if (failed || (trial.deadline <= now && !trial.dialling)) {
      over.push_back(id);
    } else {
      next = std::min(next, std::max(trial.deadline, now + 1));
    }
  }
  for (const uint64_t id : over) End(id, std::string(trials_.at(id).error));
  return next;
}

bool Trying::Allows(PeerId peer, const std::string& address, Tick now) {
  if (now - minute_ >= Seconds(60)) {
    minute_ = now;
    tries_.clear();
    addresses_.clear();
  }
  std::set<std::string>& named = addresses_[peer];
  if (!named.contains(address) && named.size() >= kAddressesOfPeerMax) return false;
  if (!tries_.contains(address) && tries_.size() >= kAddressesMax) return false;
  int& tries = tries_[address];
  if (tries >= kTriesOfAddressMax) return false;
  ++tries;
  named.insert(address);
  return true;
}

void Trying::Dial(uint64_t id, Trial* trial, Tick now) {
  const SocketAddress address = trial->candidates.front();
  trial->candidates.pop_front();
  if (!Allows(trial->peer, ToString(address), now)) {
    trial->error = kTooOften;
    return alarm_->Set(now);
  }
  // An address that does not answer must not use up the time of the addresses behind it.
  const int64_t share =
      (trial->deadline - now) / static_cast<int64_t>(trial->candidates.size() + 1);
  trial->dialling = true;
  handshakes_->Dial(handshakes_->LookFor(trial->peer, address), now + std::max<int64_t>(share, 1),
                    [this, id](LaneDial* dial) { OnDialled(id, dial); });
}

void Trying::OnDialled(uint64_t id, LaneDial* dial) {
  if (dial->ok()) ring_->sockets().Abort(dial->TakeFd());  // cannot happen: nobody has such a token
  const auto it = trials_.find(id);
  if (it == trials_.end()) return;
  Trial& trial = it->second;
  trial.dialling = false;
  const std::string address = ToString(dial->address());
  if (dial->refused() == LaneResult::kUnknownEpoch) {
    // Where the peer listens, nobody has scanned anything.
    tries_.erase(address);
    addresses_[trial.peer].erase(address);
    return End(id, "");
  }
  trial.error = dial->connected()
                    ? absl::StrCat("something else than the peer answers at ", address)
                    : absl::StrCat("no connection to ", address);
  if (const auto held_back = log_.Take(address, ring_->Now())) {
    Log(LogLevel::kInfo, absl::StrCat("a newcomer does not answer peer=", ToString(trial.peer),
                                      " address=", address, " held_back=", *held_back) +
                             LogField("error", dial->error()));
  }
  alarm_->Set(ring_->Now());
}

void Trying::End(uint64_t id, const std::string& error) {
  Done done = std::move(trials_.at(id).done);
  trials_.erase(id);
  done(error);
}

}  // namespace longhaul::peerd
