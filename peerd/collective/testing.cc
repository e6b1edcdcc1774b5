#include "peerd/collective/testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

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

bool IsFloat(DType dtype) {
  return IsHalf(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}
bool IsSigned(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kInt16 || dtype == DType::kInt32 ||
         dtype == DType::kInt64;
}

// Rounds to the nearest float of `digits` binary digits, to an even one between two. For results
// far from the ends of the range of exponents.
double RoundTo(double value, int digits) {
  if (value == 0) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, exponent - digits);
  return std::nearbyint(value / unit) * unit;
}
int DigitsOf(DType dtype) { return dtype == DType::kFloat16 ? 11 : 8; }

// The bytes of a number in this dtype. Integers wrap. A float must be exact.
std::string Encode(DType dtype, double number, int64_t integer) {
  std::string bytes(SizeOf(dtype), '\0');
  const auto f = static_cast<float>(number);
  uint32_t bits = 0;
  std::memcpy(&bits, &f, sizeof(bits));
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes.data(), &f, sizeof(f));
  } else if (dtype == DType::kFloat64) {
    std::memcpy(bytes.data(), &number, sizeof(number));
  } else if (dtype == DType::kBfloat16) {
    bits >>= 16;
    std::memcpy(bytes.data(), &bits, 2);
  } else if (dtype == DType::kFloat16) {
    if (bits != 0) bits = (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - (112u << 23)) >> 13);
    std::memcpy(bytes.data(), &bits, 2);
  } else {
    std::memcpy(bytes.data(), &integer, bytes.size());
  }
  return bytes;
}

// The number of a float that Encode() made, or an integer without its sign.
double DecodeFloat(DType dtype, const char* data) {
  uint32_t bits = 0;
  float f = 0;
  double d = 0;
  if (dtype == DType::kFloat64) {
    std::memcpy(&d, data, sizeof(d));
    return d;
  }
  std::memcpy(&bits, data, SizeOf(dtype));
  if (dtype == DType::kBfloat16) bits <<= 16;
  if (dtype == DType::kFloat16 && bits != 0) {
    bits = (bits & 0x8000) << 16 | (((bits & 0x7fff) << 13) + (112u << 23));
  }
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
int64_t DecodeInteger(DType dtype, const char* data) {
  uint64_t bits = 0;
  std::memcpy(&bits, data, SizeOf(dtype));
  const int unused = 64 - 8 * static_cast<int>(SizeOf(dtype));
  if (IsSigned(dtype)) return static_cast<int64_t>(bits << unused) >> unused;
  return static_cast<int64_t>(bits);
}

template <typename T>
T Fold(T a, T b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kProd:
      return a * b;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
  }
  return a;
}

// An element of an input.
std::string RandomElement(DType dtype, ReduceOp reduce, uint64_t rank, uint64_t element,
                          Prng* prng) {
  if (dtype == DType::kBool) return std::string(1, static_cast<char>(prng->Below(3) == 0));
  int64_t value = 0;
  double scale = 1;
  if (reduce == ReduceOp::kProd) {
    // So that products stay small, only few members have a 2 at an element.
    value = (element + rank) % 16 == 0 && rank < 10 * 16 ? 2 : 1;
  } else if (IsHalf(dtype)) {
    // The sum of two needs more digits than a half has. No sum is too large for a half.
    value = static_cast<int64_t>(prng->Below(1u << DigitsOf(dtype)));
    scale = 0.25;
  } else if (IsFloat(dtype)) {
    value = static_cast<int64_t>(prng->Below(1000)) - 500;
  } else {
    value = static_cast<int64_t>(prng->Next());  // sums wrap
  }
  return Encode(dtype, static_cast<double>(value) * scale, value);
}

std::string RandomBytes(uint64_t bytes, Prng* prng) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(prng->Next());
  return text;
}

constexpr uint64_t kBeside = 64;  // bytes that are watched beside a tensor
constexpr uint8_t kBesideByte = 0xee;

}  // namespace

uint8_t* ModelOp::NewMemory(uint64_t bytes, uint64_t misalign) {
  auto& memory = memory_.emplace_back(bytes + 3 * kBeside + misalign, kBesideByte);
  const auto skip = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  uint8_t* const data = memory.data() + kBeside + skip + misalign;
  tensors_.emplace_back(data, bytes);
  return data;
}

uint64_t ModelOp::PartCount(const Options& options, size_t from, size_t to, size_t k) const {
  return options.desc.unequal ? lengths_[from][to] : pieces_[k].count;
}

// The sums of tensors with counts[k] elements in piece k.
ModelOp::Values ModelOp::Sums(const Options& options, const std::vector<Values>& inputs,
                              const std::vector<uint64_t>& counts) const {
  const ReduceOp reduce = options.desc.reduce;
  double weight_sum = 0;
  for (const Member& member : members_) weight_sum += member.contributes ? member.weight : 0;
  Values sums;
  for (size_t k = 0; k < pieces_.size(); ++k) {
    const DType dtype = pieces_[k].dtype;
    const size_t size = SizeOf(dtype);
    std::string& sum = sums.emplace_back();
    for (uint64_t e = 0; e < counts[k]; ++e) {
      bool first = true;
      double number = 0;
      int64_t integer = 0;
      for (size_t m = 0; m < members_.size(); ++m) {
        if (!members_[m].contributes || members_[m].weight == 0) continue;
        const char* const data = inputs[m][k].data() + e * size;
        if (dtype == DType::kBool) {
          const auto bit = static_cast<int64_t>(*data);
          integer = first ? bit : reduce == ReduceOp::kMin ? integer & bit : integer | bit;
        } else if (IsFloat(dtype)) {
          const double value = DecodeFloat(dtype, data) * members_[m].weight;
          number = first ? value : Fold(number, value, reduce);
        } else if (IsSigned(dtype) || reduce == ReduceOp::kSum || reduce == ReduceOp::kAvg ||
                   reduce == ReduceOp::kProd) {
          const int64_t value = DecodeInteger(dtype, data);
          const bool order = reduce == ReduceOp::kMin || reduce == ReduceOp::kMax;
          integer = first   ? value
                    : order ? Fold(integer, value, reduce)
                            : static_cast<int64_t>(Fold(static_cast<uint64_t>(integer),
                                                        static_cast<uint64_t>(value), reduce));
        } else {
          const auto value = static_cast<uint64_t>(DecodeInteger(dtype, data));
          integer = static_cast<int64_t>(
              first ? value : Fold(static_cast<uint64_t>(integer), value, reduce));
        }
        first = false;
      }
      if (reduce == ReduceOp::kAvg) {
        if (dtype == DType::kFloat64) {
          number /= weight_sum;
        } else if (IsFloat(dtype)) {
          number = static_cast<float>(number) / static_cast<float>(weight_sum);
        } else {
          // The sum as an element holds it.
          const std::string held = Encode(dtype, 0, integer);
          integer = DecodeInteger(dtype, held.data());
          const auto divisor = static_cast<int64_t>(weight_sum);
          integer = IsSigned(dtype) ? integer / divisor
                                    : static_cast<int64_t>(static_cast<uint64_t>(integer) /
                                                           static_cast<uint64_t>(divisor));
        }
      }
      if (IsHalf(dtype)) number = RoundTo(number, DigitsOf(dtype));
      sum += Encode(dtype, number, integer);
    }
  }
  return sums;
}

Shares RandomShares(Prng* prng, size_t positions) {
  if (prng->Chance(0.4)) return {};
  std::vector<uint64_t> weights;
  uint64_t sum = 0;
  for (size_t i = 0; i < positions; ++i) {
    weights.push_back(prng->Chance(0.4) ? 0 : prng->Below(uint64_t{1} << prng->Below(16)));
    sum += weights.back();
  }
  if (sum == 0) return {};
  Shares shares;
  uint32_t left = kShareUnits;
  for (const uint64_t weight : weights) {
    shares.push_back(static_cast<uint32_t>(weight * kShareUnits / sum));
    left -= shares.back();
  }
  *std::max_element(shares.begin(), shares.end()) += left;
  return SharesFault(shares, positions).empty() ? shares : Shares();
}

ModelOp::ModelOp(const Options& options) : desc_(options.desc), pieces_(options.pieces) {
  Prng prng(options.seed);
  if (pieces_.empty()) pieces_ = {{desc_.dtype, desc_.unequal ? 0 : desc_.count}};
  const auto flag = [](const std::vector<std::vector<bool>>& flags, int position, int i,
                       bool other) {
    if (position >= static_cast<int>(flags.size())) return other;
    if (i >= static_cast<int>(flags[position].size())) return other;
    return static_cast<bool>(flags[position][i]);
  };
  const auto local_members = [&](int position) {
    return options.local_members.empty() ? 1 : options.local_members[position];
  };
  // The ranks of members at one position need not be consecutive.
  int most = 0;
  for (int p = 0; p < options.size; ++p) most = std::max(most, local_members(p));
  for (int i = 0; i < most; ++i) {
    for (int p = options.size - 1; p >= 0; --p) {
      if (i >= local_members(p)) continue;
      Member& member = members_.emplace_back();
      member = {p, i, flag(options.contributes, p, i, true), 1};
      if (desc_.weighted) member.weight = std::vector{0.0, 0.5, 1.0, 2.0, 2.5}[prng.Below(5)];
    }
  }
  if (desc_.weighted) {
    const auto first = std::find_if(members_.begin(), members_.end(),
                                    [](const Member& member) { return member.contributes; });
    first->weight = 1.5;
  }
  const size_t n = members_.size();
  const auto rank_of = [&](int position, int local) {
    const auto at = std::find_if(members_.begin(), members_.end(), [&](const Member& member) {
      return member.position == position && member.local == local;
    });
    return static_cast<size_t>(at - members_.begin());
  };
  const size_t root = rank_of(options.root, local_members(options.root) - 1);
  const size_t receiver = rank_of((options.root + 1) % options.size, 0);

  // Who gives a part to whom. `owners`: the ranks that have a part, in order.
  const OpKind kind = desc_.kind;
  std::vector<size_t> owners;
  for (size_t m = 0; m < n; ++m) {
    if (kind != OpKind::kAllGather || members_[m].contributes) owners.push_back(m);
  }
  lengths_.assign(n, std::vector<uint64_t>(n));
  for (auto& of_sender : lengths_) {
    for (uint64_t& length : of_sender) {
      length = prng.Chance(0.2) ? 0 : prng.Below(options.desc.count + 1);
    }
  }
  // The rank that a part's length depends on, if it is not that of a pair.
  const auto part = [&](size_t from, size_t to, size_t k) {
    switch (kind) {
      case OpKind::kAllToAll:
        return PartCount(options, from, to, k);
      case OpKind::kScatter:
      case OpKind::kReduceScatter:
        return PartCount(options, to, to, k);
      default:
        return PartCount(options, from, from, k);
    }
  };

  std::vector<Cut> cuts;  // without the locals
  std::vector<std::pair<size_t, size_t>> cut_members;
  const auto cut = [&](size_t from, size_t to) {
    cut_members.emplace_back(from, to);
    const uint64_t count = desc_.unequal ? part(from, to, 0) : 0;
    cuts.push_back({members_[from].position, -1, members_[to].position, -1, count});
  };
  for (const size_t m : owners) {
    if (kind == OpKind::kReduceScatter || kind == OpKind::kAllGather) cut(m, m);
    if (kind == OpKind::kGather) cut(m, root);
    if (kind == OpKind::kScatter) cut(root, m);
    for (size_t to = 0; kind == OpKind::kAllToAll && to < n; ++to) cut(m, to);
  }
  if (kind == OpKind::kBroadcast || kind == OpKind::kReduce) cut(root, root);
  if (kind == OpKind::kSendRecv) cut(root, receiver);

  // What the members have: values, and then memory.
  const bool reduces = Reduces(kind);
  const auto piece_bytes = [&](size_t k, uint64_t count) {
    return count * SizeOf(pieces_[k].dtype);
  };
  const auto uses_source = [&](size_t m) { return SourceOf(kind, m == root) != Extent::kNone; };
  const auto uses_target = [&](size_t m) {
    if (kind == OpKind::kSendRecv) return m == receiver;
    return TargetOf(kind, m == root) != Extent::kNone;
  };
  const auto source_count = [&](size_t m, size_t k) {
    uint64_t count = 0;
    if (kind == OpKind::kAllGather || kind == OpKind::kGather) return part(m, m, k);
    if (!desc_.InParts()) return pieces_[k].count;
    for (size_t to = 0; to < n; ++to) count += part(m, to, k);
    return count;
  };
  std::vector<Values> sources(n);
  for (size_t m = 0; m < n; ++m) {
    const bool is_read = !reduces || (members_[m].contributes && members_[m].weight != 0);
    for (size_t k = 0; k < pieces_.size(); ++k) {
      const DType dtype = pieces_[k].dtype;
      const uint64_t count = source_count(m, k);
      std::string& values = sources[m].emplace_back();
      if (!reduces || !is_read) {
        values = RandomBytes(piece_bytes(k, count), &prng);
      } else {
        for (uint64_t e = 0; e < count; ++e) {
          values += RandomElement(dtype, desc_.reduce, m, e, &prng);
        }
      }
    }
  }
  Values sums;
  if (reduces) {
    std::vector<uint64_t> counts;
    for (size_t k = 0; k < pieces_.size(); ++k) counts.push_back(source_count(0, k));
    sums = Sums(options, sources, counts);
  }
  // Bytes of the parts before that of `to` in a tensor with parts for all.
  const auto before = [&](size_t from, size_t to, size_t k) {
    uint64_t count = 0;
    for (size_t other = 0; other < to; ++other) count += part(from, other, k);
    return piece_bytes(k, count);
  };
  const auto result = [&](size_t m, size_t k) {
    std::string text;
    switch (kind) {
      case OpKind::kAllReduce:
      case OpKind::kBarrier:
      case OpKind::kReduce:
        return sums[k];
      case OpKind::kReduceScatter:
        return sums[k].substr(before(0, m, k), piece_bytes(k, part(m, m, k)));
      case OpKind::kAllGather:
      case OpKind::kGather:
        for (const size_t owner : owners) text += sources[owner][k];
        return text;
      case OpKind::kBroadcast:
      case OpKind::kSendRecv:
        return sources[root][k];
      case OpKind::kScatter:
        return sources[root][k].substr(before(root, m, k), piece_bytes(k, part(root, m, k)));
      case OpKind::kAllToAll:
        for (size_t from = 0; from < n; ++from) {
          text += sources[from][k].substr(before(from, m, k), piece_bytes(k, part(from, m, k)));
        }
        return text;
    }
    return text;
  };

  desc_.world = desc_.InParts() ? static_cast<uint16_t>(n) : 0;
  if (desc_.unequal) desc_.count = 0;
  if (!options.pieces.empty()) {
    desc_.dtype = pieces_[0].dtype;
    desc_.count = pieces_[0].count;
    desc_.list = 1;
    const uint64_t parts = !desc_.InParts() ? 1 : kind == OpKind::kAllToAll ? n * n : n;
    for (size_t k = 0; k < pieces_.size(); ++k) {
      desc_.list_bytes += (piece_bytes(k, pieces_[k].count) * parts + 63) / 64 * 64;
    }
  }
  std::vector<uint32_t> ring_contributes(options.size);
  uint32_t contributors = 0;
  double weight_sum = 0;
  for (const Member& member : members_) {
    if (!member.contributes) continue;
    ++contributors;
    ++ring_contributes[member.position];
    weight_sum += member.weight;
  }
  std::vector<int> order(options.size);
  for (int i = 0; i < options.size; ++i) order[i] = i;
  for (int i = options.size - 1; i > 0; --i) std::swap(order[i], order[prng.Below(i + 1)]);

  for (int position = 0; position < options.size; ++position) {
    AttemptSpec& spec = specs.emplace_back();
    spec.desc = desc_;
    spec.size = options.size;
    spec.position = position;
    spec.members = contributors;
    if (desc_.weighted) spec.weight_sum = weight_sum;
    spec.pieces = pieces_;
    if (IsShared(kind) || kind == OpKind::kBroadcast) spec.shares = options.shares;
    spec.ring_contributes = ring_contributes;
    spec.order = order;
    spec.grain_bytes = options.grain_bytes;
    spec.segment_bytes =
        options.grain_bytes * static_cast<uint32_t>(1 + prng.Below(options.segment_grains));
    spec.window_bytes = options.window_bytes;
    spec.cached_bytes_max = options.cached ? UINT64_MAX : 0;
    spec.cuts = cuts;
    for (size_t c = 0; c < cuts.size(); ++c) {
      const auto [from, to] = cut_members[c];
      if (members_[from].position == position) spec.cuts[c].local = members_[from].local;
      if (members_[to].position == position) spec.cuts[c].to_local = members_[to].local;
    }
    for (int i = 0; i < local_members(position); ++i) {
      const size_t m = rank_of(position, i);
      spec.contributes.push_back(members_[m].contributes);
      if (desc_.weighted) spec.weights.push_back(members_[m].weight);
      auto& own_sources = spec.sources.emplace_back();
      auto& own_targets = spec.targets.emplace_back();
      const bool may = kind == OpKind::kAllReduce || kind == OpKind::kBroadcast ||
                       (kind == OpKind::kReduce && m == root);
      const bool in_place = may && flag(options.in_place, position, i, false);
      for (size_t k = 0; k < pieces_.size(); ++k) {
        const std::string where =
            absl::StrCat("piece ", k, " of member ", i, " of position ", position);
        uint8_t* source = nullptr;
        if (uses_source(m) && !sources[m][k].empty()) {
          source = NewMemory(sources[m][k].size(), options.misalign);
          std::copy(sources[m][k].begin(), sources[m][k].end(), source);
          // What others would get from a broadcast is no input if it is overwritten.
          if (kind != OpKind::kBroadcast || m == root || !in_place) {
            inputs_.push_back(
                {source, sources[m][k].size(), sources[m][k], pieces_[k].dtype, where});
          }
        }
        own_sources.push_back(source);
        uint8_t* target = nullptr;
        if (uses_target(m)) {
          std::string expected = result(m, k);
          if (!expected.empty()) {
            target = in_place ? source : NewMemory(expected.size(), options.misalign);
            const uint64_t bytes = expected.size();
            targets_.push_back({target, bytes, std::move(expected), pieces_[k].dtype, where});
          }
        }
        own_targets.push_back(target);
      }
    }
  }
}

std::string ModelOp::InputsDiffer() const {
  for (const Tensor& input : inputs_) {
    for (uint64_t b = 0; b < input.bytes; ++b) {
      if (input.data[b] == static_cast<uint8_t>(input.expected[b])) continue;
      return absl::StrCat("source ", input.where, " differs at byte ", b);
    }
  }
  for (const auto& [data, bytes] : tensors_) {
    for (uint64_t b = 0; b < kBeside; ++b) {
      if ((data - kBeside)[b] != kBesideByte || data[bytes + b] != kBesideByte) {
        return absl::StrCat("memory beside a tensor of ", bytes, " bytes was written to");
      }
    }
  }
  return "";
}

std::string ModelOp::TargetsTouched() const {
  for (const Tensor& target : targets_) {
    if (desc_.kind != OpKind::kReduceScatter) break;
    for (uint64_t b = 0; b < target.bytes; ++b) {
      if (target.data[b] != kBesideByte) {
        return absl::StrCat("target ", target.where, " was written to at byte ", b);
      }
    }
  }
  return "";
}

void ModelOp::FillWithFractions(uint64_t seed) {
  Prng prng(seed);
  for (Tensor& input : inputs_) {
    const size_t size = SizeOf(input.dtype);
    for (uint64_t e = 0; IsFloat(input.dtype) && e < input.bytes / size; ++e) {
      double value = (static_cast<double>(prng.Below(1 << 20)) + 1) / 1048573.0 - 0.5;
      if (IsHalf(input.dtype)) value = RoundTo(value, DigitsOf(input.dtype));
      const std::string bytes = Encode(input.dtype, std::abs(value) < 1e-3 ? 1 : value, 0);
      std::copy(bytes.begin(), bytes.end(), input.data + e * size);
    }
    input.expected.assign(reinterpret_cast<const char*>(input.data), input.bytes);
  }
}

std::string ModelOp::ResultsDiffer() const {
  for (const Tensor& target : targets_) {
    for (uint64_t b = 0; b < target.bytes; ++b) {
      if (target.data[b] == static_cast<uint8_t>(target.expected[b])) continue;
      return absl::StrCat("target ", target.where, " differs at byte ", b);
    }
  }
  return "";
}

std::string ModelOp::TargetsOf(int position, int member) const {
  std::string all;
  for (const uint8_t* target : specs[position].targets[member]) {
    for (const Tensor& tensor : targets_) {
      if (tensor.data != target) continue;
      all.append(reinterpret_cast<const char*>(target), tensor.bytes);
    }
  }
  return all;
}

}  // namespace longhaul::peerd
