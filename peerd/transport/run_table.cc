#include "peerd/transport/run_table.h"

#include <utility>

#include "peerd/transport/auth.h"

namespace longhaul::peerd {

Run& RunTable::Get(const std::string& name) {
  Run& run = runs_[name];
  if (run.name.empty()) {
    run.name = name;
  }
  return run;
}

Peering& RunTable::GetPeering(Run* run, PeerId peer) {
  Peering& p = run->peers[peer];
  if (p.serial == 0) {
    p.key = {run->name, peer};
    p.serial = next_serial_++;
  }
  return p;
}

void RunTable::SetEndpoints(Peering* p, const std::vector<std::string>& endpoints) {
  if (endpoints.empty() || endpoints == p->endpoints) return;
  p->endpoints = endpoints;
  if (p->endpoints.size() > LH_ENDPOINTS_MAX) p->endpoints.resize(LH_ENDPOINTS_MAX);
  p->blocks.clear();
  for (const std::string& endpoint : p->endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) {
      p->blocks.push_back(AddressBlock::Of(*address));
    }
  }
  known_blocks_stale_ = true;
}

void RunTable::SetLinked(Peering* p, const SocketAddress& remote) {
  p->linked = AddressBlock::Of(remote);
  known_blocks_.insert(*p->linked);
}

std::map<PeerId, Peering>::iterator RunTable::Drop(Run* run,
                                                   std::map<PeerId, Peering>::iterator peering) {
  known_blocks_stale_ = true;
  return run->peers.erase(peering);
}

RunTable::Known RunTable::Find(const LaneHello& hello) {
  for (auto& [name, run] : runs_) {
    const std::string* const token = FindToken(run, hello.group, hello.epoch);
    if (token != nullptr && RunTag(*token, name, hello.nonce) == hello.run) return {&run, token};
  }
  return {};
}

bool RunTable::HasLink(PeerId peer, uint64_t link) const {
  return std::any_of(runs_.begin(), runs_.end(), [&](const auto& run) {
    const auto p = run.second.peers.find(peer);
    return p != run.second.peers.end() && p->second.link != nullptr &&
           p->second.link->options().id == link;
  });
}

Peering* RunTable::Find(const LinkKey& key) {
  const auto run = runs_.find(key.run);
  if (run == runs_.end()) return nullptr;
  const auto peer = run->second.peers.find(key.peer);
  return peer == run->second.peers.end() ? nullptr : &peer->second;
}

const Link* RunTable::FindLink(const LinkKey& key) const {
  const auto run = runs_.find(key.run);
  if (run == runs_.end()) return nullptr;
  const auto peer = run->second.peers.find(key.peer);
  return peer == run->second.peers.end() ? nullptr : peer->second.link.get();
}

Peering* RunTable::FindSerial(const LinkKey& key, uint64_t serial) {
  Peering* p = Find(key);
  return p != nullptr && p->serial == serial ? p : nullptr;
}

Link* RunTable::FindOpen(const LinkKey& key) {
  Peering* p = Find(key);
  return p != nullptr && p->link != nullptr && p->link->open() ? p->link.get() : nullptr;
}

const std::string* RunTable::FindToken(const Run& run, uint32_t group, Epoch epoch) const {
  const auto tokens = run.tokens.find(group);
  if (tokens == run.tokens.end()) return nullptr;
  const auto token = tokens->second.find(epoch);
  return token == tokens->second.end() ? nullptr : &token->second;
}

std::optional<Credential> RunTable::AnyToken(const Peering& p) const {
  const Run& run = RunOf(p);
  std::vector<std::pair<uint32_t, Epoch>> names;
  const auto add = [&](uint32_t g) {
    const auto tokens = run.tokens.find(g);
    if (tokens == run.tokens.end()) return;
    for (auto it = tokens->second.rbegin(); it != tokens->second.rend(); ++it) {
      const std::pair<uint32_t, Epoch> name(g, it->first);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  };
  for (auto it = p.requests.rbegin(); it != p.requests.rend(); ++it) add(it->group);
  add(p.link->options().group);
  for (const auto& [g, relay] : p.groups) add(g);
  if (names.empty()) return std::nullopt;
  const auto& [group, epoch] = names[p.token_attempts % names.size()];
  return Credential{group, epoch, *FindToken(run, group, epoch)};
}

void RunTable::TryNextToken(Peering* p, const LaneDial& dial) const {
  if (dial.refused() != LaneResult::kUnknownEpoch) return;
  const std::optional<Credential> used = AnyToken(*p);
  if (used && used->group == dial.hello().group && used->epoch == dial.hello().epoch) {
    ++p->token_attempts;
  }
}

bool RunTable::PeerIsKnownAt(const AddressBlock& block) {
  if (std::exchange(known_blocks_stale_, false)) {
    known_blocks_.clear();
    for (const auto& [name, run] : runs_) {
      for (const auto& [id, peer] : run.peers) {
        known_blocks_.insert(peer.blocks.begin(), peer.blocks.end());
        if (peer.linked) known_blocks_.insert(*peer.linked);
      }
    }
  }
  return known_blocks_.contains(block);
}

}  // namespace longhaul::peerd
