#include "peerd/collective/testing.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {

void WorkOff(Attempt* attempt, uint64_t bytes_max) {
  while (attempt->HasWork()) attempt->Work(bytes_max);
}

void CommitWhole(Attempt* attempt) {
  attempt->Commit();
  WorkOff(attempt);
}

// ------------------------------------------------------------------------------ network

void ModelNetwork::Peer::SendSegment(int to, const Segment& segment, const uint8_t* data,
                                     uint64_t cookie) {
  LH_CHECK(!stopped) << "position " << position << " sends after Stop()";
  LH_CHECK(to >= 0 && to < static_cast<int>(network->peers_.size()) && to != position);
  LH_CHECK(network->peers_[to]->started && !network->peers_[to]->credit_due.contains(position))
      << "position " << position << " sends without a credit";
  auto flight = std::make_unique<Flight>();
  flight->from = position;
  flight->to = to;
  flight->segment = segment;
  flight->data = data;
  flight->cookie = cookie;
  flight->as_handed.assign(reinterpret_cast<const char*>(data), segment.bytes);
  network->flights_.push_back(std::move(flight));
}

void ModelNetwork::Peer::Complete() {
  LH_CHECK(!stopped) << "position " << position << " completes after Stop()";
  LH_CHECK(!complete && !in_start) << "position " << position;
  LH_CHECK(attempt->Idle());
  complete = true;
}

ModelNetwork::ModelNetwork(AttemptMaker make, const std::vector<AttemptSpec>& specs,
                           ScratchPool* pool, uint64_t seed)
    : prng_(seed) {
  for (const AttemptSpec& spec : specs) {
    auto peer = std::make_unique<Peer>();
    peer->network = this;
    peer->position = spec.position;
    auto attempt = make(spec, peer.get(), pool);
    LH_CHECK_OK(attempt.status());
    peer->attempt = *std::move(attempt);
    peers_.push_back(std::move(peer));
  }
}

ModelNetwork::~ModelNetwork() {
  for (int i = 0; i < static_cast<int>(peers_.size()); ++i) {
    if (!peers_[i]->attempt->Idle() && !peers_[i]->stopped) Stop(i);
  }
  for (const auto& flight : flights_) {
    if (!flight->returned) peers_[flight->from]->attempt->Sent(flight->cookie);
  }
}

bool ModelNetwork::Step() {
  std::vector<Peer*> waiting;  // peers that must start, get a credit, or have work
  for (const auto& peer : peers_) {
    if ((!peer->started && !peer->stopped) || !peer->credit_due.empty() ||
        peer->attempt->HasWork()) {
      waiting.push_back(peer.get());
    }
  }
  if (waiting.empty() && flights_.empty()) return false;
  const uint64_t choice = prng_.Below(waiting.size() + flights_.size());
  if (choice < waiting.size()) {
    StepPeer(waiting[choice]);
  } else {
    StepFlight(choice - waiting.size());
  }
  return true;
}

void ModelNetwork::StepPeer(Peer* peer) {
  if (peer->attempt->HasWork() && (peer->credit_due.empty() || prng_.Chance(0.5))) {
    peer->attempt->Work(1 + prng_.Below(1000));
    return;
  }
  if (!peer->credit_due.empty()) {
    const auto sender = std::next(peer->credit_due.begin(), prng_.Below(peer->credit_due.size()));
    const int position = *sender;
    peer->credit_due.erase(sender);
    if (!peers_[position]->stopped) peers_[position]->attempt->Credit(peer->position);
    return;
  }
  peer->started = true;
  for (const auto& other : peers_) {
    if (other.get() != peer) peer->credit_due.insert(other->position);
  }
  peer->in_start = true;
  peer->attempt->Start();
  peer->in_start = false;
  peer->complete = peer->attempt->CompleteAtOnce();
}

// Lets one event of a flight happen. For a flight in the list there is always one.
void ModelNetwork::StepFlight(uint64_t index) {
  Flight* const flight = flights_[index].get();
  void (ModelNetwork::*can[4])(Flight*);
  int count = 0;
  if (!flight->read) can[count++] = &ModelNetwork::ReadMemory;
  if (!flight->placed) can[count++] = &ModelNetwork::PlaceHeader;
  if (flight->read && flight->placed && !flight->delivered) can[count++] = &ModelNetwork::Deliver;
  if (flight->read && !flight->returned) can[count++] = &ModelNetwork::Return;
  if (flight->placed && !flight->delivered && prng_.Chance(0.2)) can[count++] = &ModelNetwork::Lose;
  (this->*can[prng_.Below(count)])(flight);
  // The event may have added flights at the end of the list.
  if (flight->delivered && flight->returned) {
    std::swap(flights_[index], flights_.back());
    flights_.pop_back();
  }
}

bool ModelNetwork::Run() {
  while (Step()) {
  }
  for (const auto& peer : peers_) {
    if (!peer->stopped && !peer->complete) return false;
  }
  return true;
}

void ModelNetwork::ReadMemory(Flight* flight) {
  flight->read = true;
  if (flight->returned && peers_[flight->from]->stopped) {
    flight->delivered = true;  // it was lost, and a stopped peer does not send it again
    return;
  }
  LH_CHECK(std::memcmp(flight->data, flight->as_handed.data(), flight->as_handed.size()) == 0)
      << "memory changed under a segment: " << ToString();
}

void ModelNetwork::PlaceHeader(Flight* flight) {
  Peer& peer = *peers_[flight->to];
  flight->placed = true;
  if (peer.stopped) {
    flight->delivered = true;
    return;
  }
  const auto place = peer.attempt->Place(flight->from, flight->segment);
  LH_CHECK_OK(place.status());
  flight->place = *place;
}

void ModelNetwork::Deliver(Flight* flight) {
  flight->delivered = true;
  std::memcpy(flight->place, flight->as_handed.data(), flight->as_handed.size());
  peers_[flight->to]->attempt->Received(flight->from, flight->segment);
}

// Loses a segment that is partly received: it must be read and placed again.
void ModelNetwork::Lose(Flight* flight) {
  std::memset(flight->place, 0x5a, prng_.Below(flight->segment.bytes + 1));
  flight->read = flight->placed = false;
  peers_[flight->to]->attempt->Abandoned(flight->from, flight->segment);
}

void ModelNetwork::Return(Flight* flight) {
  flight->returned = true;
  peers_[flight->from]->attempt->Sent(flight->cookie);
}

void ModelNetwork::Stop(int position) {
  Peer& peer = *peers_[position];
  LH_CHECK(!peer.stopped);
  for (const auto& flight : flights_) {
    if (flight->to != position || !flight->placed || flight->delivered) continue;
    std::memset(flight->place, 0xa5, prng_.Below(flight->segment.bytes + 1));
    flight->delivered = true;
  }
  std::erase_if(flights_, [](const auto& flight) { return flight->delivered && flight->returned; });
  peer.stopped = true;
  peer.attempt->Stop();
}

std::string ModelNetwork::ToString() const {
  std::string text;
  for (const auto& flight : flights_) {
    absl::StrAppend(&text, flight->from, ">", flight->to,
                    flight->segment.phase == Phase::kReduce ? " reduce " : " gather ",
                    flight->segment.offset, "+", flight->segment.bytes, flight->read ? " read" : "",
                    flight->placed ? " placed" : "", flight->delivered ? " delivered" : "",
                    flight->returned ? " returned" : "", "; ");
  }
  return text;
}

// ------------------------------------------------------------------------------ data

namespace {

// The bytes of a small whole number in this dtype.
std::string Encode(DType dtype, int64_t value) {
  std::string bytes(SizeOf(dtype), '\0');
  const auto f = static_cast<float>(value);
  const auto d = static_cast<double>(value);
  uint32_t bits = 0;
  std::memcpy(&bits, &f, sizeof(bits));
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes.data(), &f, sizeof(f));
  } else if (dtype == DType::kFloat64) {
    std::memcpy(bytes.data(), &d, sizeof(d));
  } else if (dtype == DType::kBfloat16) {
    bits >>= 16;
    std::memcpy(bytes.data(), &bits, 2);
  } else if (dtype == DType::kFloat16) {
    // This is exact for whole numbers up to 2048, and for powers of two up to 2^15.
    if (bits != 0) bits = (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - (112u << 23)) >> 13);
    std::memcpy(bytes.data(), &bits, 2);
  } else {
    std::memcpy(bytes.data(), &value, bytes.size());
  }
  return bytes;
}

}  // namespace

ModelOp::ModelOp(const Options& options) {
  Prng prng(options.seed);
  OpDesc desc = options.desc;
  const auto local_members = [&](int position) {
    return options.local_members.empty() ? 1 : options.local_members[position];
  };
  const auto contributes_at = [&](int position, int i) {
    return position >= static_cast<int>(options.contributes.size()) ||
           i >= static_cast<int>(options.contributes[position].size()) ||
           options.contributes[position][i];
  };
  // The ranks of members at one position need not be consecutive.
  int most = 0;
  for (int p = 0; p < options.size; ++p) most = std::max(most, local_members(p));
  for (int i = 0; i < most; ++i) {
    for (int p = options.size - 1; p >= 0; --p) {
      if (i >= local_members(p)) continue;
      if (desc.kind == OpKind::kAllGather && !contributes_at(p, i)) continue;
      if (desc.InParts()) owners_.emplace_back(p, i);
    }
  }
  if (desc.kind == OpKind::kBroadcast) {
    owners_.emplace_back(options.root, local_members(options.root) - 1);
  }
  desc.world = desc.InParts() ? static_cast<uint16_t>(owners_.size()) : 0;
  bytes_ = desc.bytes();
  const uint64_t elements = bytes_ / SizeOf(desc.dtype);
  const auto new_memory = [&] {
    memory_.emplace_back(bytes_ + 64 + options.misalign);
    auto* const raw = memory_.back().data();
    const auto skip = (64 - reinterpret_cast<uintptr_t>(raw) % 64) % 64;
    return raw + skip + options.misalign;
  };
  std::vector<int64_t> sums(elements, desc.reduce == ReduceOp::kProd ? 1 : 0);
  uint32_t members = 0;
  std::vector<bool> ring_contributes;
  for (int position = 0; position < options.size; ++position) {
    AttemptSpec spec;
    spec.desc = desc;
    spec.size = options.size;
    spec.position = position;
    spec.grain_bytes = options.grain_bytes;
    spec.segment_bytes =
        options.grain_bytes * static_cast<uint32_t>(1 + prng.Below(options.segment_grains));
    spec.window_bytes = options.window_bytes;
    spec.cached_bytes_max = options.cached ? UINT64_MAX : 0;
    const int local = local_members(position);
    for (const auto& [owner, i] : owners_) spec.cuts.push_back({owner, owner == position ? i : -1});
    bool any = false;
    for (int i = 0; i < local; ++i) {
      uint8_t* const source = new_memory();
      const bool contributes = contributes_at(position, i);
      spec.contributes.push_back(contributes);
      any = any || contributes;
      for (uint64_t e = 0; e < elements; ++e) {
        // So that products stay small, only few members have a 2 at an element: at most 14.
        const bool two = (e + members) % 16 == 0 && members < 14 * 16;
        const int64_t value = desc.reduce == ReduceOp::kProd ? (two ? 2 : 1) : prng.Below(5);
        const std::string bytes = Encode(desc.dtype, value);
        std::copy(bytes.begin(), bytes.end(), source + e * bytes.size());
        if (!contributes) continue;
        int64_t& sum = sums[e];
        switch (desc.reduce) {
          case ReduceOp::kSum:
          case ReduceOp::kAvg:
            sum += value;
            break;
          case ReduceOp::kProd:
            sum *= value;
            break;
          case ReduceOp::kMin:
            sum = members == 0 ? value : std::min(sum, value);
            break;
          case ReduceOp::kMax:
            sum = members == 0 ? value : std::max(sum, value);
            break;
        }
      }
      inputs_.emplace_back(source, std::string(reinterpret_cast<const char*>(source), bytes_));
      const bool in_place = position < static_cast<int>(options.in_place.size()) &&
                            i < static_cast<int>(options.in_place[position].size()) &&
                            options.in_place[position][i];
      spec.sources.push_back(source);
      spec.targets.push_back(in_place ? source : new_memory());
      if (contributes) ++members;
    }
    ring_contributes.push_back(any);
    specs.push_back(std::move(spec));
  }
  for (AttemptSpec& spec : specs) {
    spec.members = members;
    spec.ring_contributes = ring_contributes;
  }
  for (const int64_t sum : sums) expected_ += Encode(desc.dtype, sum);
  if (desc.reduce == ReduceOp::kAvg && members > 1) {
    Divide(reinterpret_cast<uint8_t*>(expected_.data()), elements, desc.dtype, members);
  }
  if (Reduces(desc.kind)) return;
  const uint64_t part = desc.part_bytes();
  for (size_t c = 0; c < owners_.size(); ++c) {
    const auto& [position, i] = owners_[c];
    const auto* const source = reinterpret_cast<const char*>(specs[position].sources[i]);
    expected_.replace(c * part, part, source, part);
  }
}

std::string ModelOp::InputsDiffer() const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const auto& [data, posted] = inputs_[i];
    for (uint64_t b = 0; b < bytes_; ++b) {
      if (data[b] == static_cast<uint8_t>(posted[b])) continue;
      return absl::StrCat("input ", i, " differs at byte ", b);
    }
  }
  return "";
}

void ModelOp::FillWithFractions(uint64_t seed) {
  const OpDesc& desc = specs.front().desc;
  LH_CHECK(desc.dtype == DType::kFloat32);
  Prng prng(seed);
  for (auto& [data, posted] : inputs_) {
    for (uint64_t e = 0; e < desc.count; ++e) {
      const float value = static_cast<float>(prng.Below(1 << 20)) / 1048573.0f - 0.5f;
      std::memcpy(data + e * sizeof(value), &value, sizeof(value));
    }
    posted.assign(reinterpret_cast<const char*>(data), bytes_);
  }
}

std::string ModelOp::ResultsDiffer() const {
  const auto differ = [this](int position, int i, uint64_t offset, uint64_t bytes) {
    const uint8_t* const target = specs[position].targets[i];
    for (uint64_t b = 0; b < bytes; ++b) {
      if (target[b] == static_cast<uint8_t>(expected_[offset + b])) continue;
      return absl::StrCat("target ", i, " of position ", position, " differs at byte ", b);
    }
    return std::string();
  };
  const OpDesc& desc = specs.front().desc;
  std::string text;
  for (size_t c = 0; !Gathers(desc.kind) && c < owners_.size() && text.empty(); ++c) {
    text = differ(owners_[c].first, owners_[c].second, c * desc.part_bytes(), desc.part_bytes());
  }
  for (const AttemptSpec& spec : specs) {
    const int local = static_cast<int>(spec.targets.size());
    for (int i = 0; Gathers(desc.kind) && i < local && text.empty(); ++i) {
      text = differ(spec.position, i, 0, bytes_);
    }
  }
  return text;
}

}  // namespace longhaul::peerd
