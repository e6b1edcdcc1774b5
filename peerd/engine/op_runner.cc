#include "peerd/engine/op_runner.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/digest.h"
#include "peerd/core/algorithm.h"

namespace longhaul::peerd {
namespace {

// How many bytes of work one op gets before the next op gets its turn.
constexpr uint64_t kSliceBytes = 256 << 10;

// Stands for the attempt's cookie if a segment is sent again: the attempt was told of Sent()
// before.
constexpr uint64_t kRepeat = UINT64_MAX;

// On a short way the cost of a segment is its system calls and wake-ups. So a chunk is cut into few
// segments, just enough to keep all hops of a ring busy.
constexpr uint64_t kShortWaySegments = 8;
constexpr uint64_t kShortWayGrainsMin = 8;
constexpr uint64_t kShortWayGrainsMax = 16;

// Returns the length of the segments that this peer sends. On a long way segments are short: many
// slow lanes share a chunk, and the end of the chunk waits for the slowest of them.
uint32_t SegmentBytes(uint64_t chunk_bytes, uint32_t grain_bytes, bool long_way) {
  if (long_way) return grain_bytes;
  const uint64_t wanted = chunk_bytes / kShortWaySegments / grain_bytes;
  return grain_bytes *
         static_cast<uint32_t>(std::clamp(wanted, kShortWayGrainsMin, kShortWayGrainsMax));
}

// The bytes of the whole of an op with parts of unequal lengths, as far as a member knows it.
// Otherwise 0.
uint64_t WholeBytes(const OpDesc& desc, const OpTerms& terms) {
  if (!desc.unequal) return 0;
  const auto sum = [](const std::vector<uint64_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
  };
  return std::max(sum(terms.gives), sum(terms.gets)) * SizeOf(desc.dtype);
}

// A tensor of a post.
struct Range {
  const uint8_t* data;
  const uint8_t* end;
  const char* name;
  size_t of;  // the index of the post's member
};

}  // namespace

// The scratch memory of one op. The op's attempts use it one after the other. An attempt first
// borrows the buffer that it needs, and gets this memory. Further buffers only make the attempt
// faster, and come from the pool.
class OpRunner::Scratch final : public ScratchPool {
 public:
  explicit Scratch(OpRunner* runner) : runner_(runner) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() override {
    LH_CHECK(!lent_) << bytes_ << " bytes of an op are in use";
    Resize(nullptr, 0);
  }

  uint64_t bytes() const { return bytes_; }

  // Must be called while no attempt runs. ResourceExhausted: the system has no more memory, and
  // nothing has changed.
  absl::Status Grow(uint64_t bytes) {
    LH_CHECK(!lent_) << bytes_ << " bytes of an op are in use";
    if (bytes <= bytes_) return absl::OkStatus();
    const absl::StatusOr<uint8_t*> data = runner_->pool_->Borrow(bytes);
    if (!data.ok()) return data.status();
    Resize(*data, bytes);
    return absl::OkStatus();
  }

  absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
    if (lent_ || data_ == nullptr) return runner_->pool_->Borrow(bytes);
    LH_CHECK(bytes <= bytes_) << "an attempt needs " << bytes << " of " << bytes_ << " bytes";
    lent_ = true;
    return data_;
  }
  void Give(uint8_t* data) override {
    if (data != data_) return runner_->pool_->Give(data);
    lent_ = false;
  }

 private:
  void Resize(uint8_t* data, uint64_t bytes) {
    if (data_ != nullptr) runner_->pool_->Give(data_);
    runner_->reserved_ += bytes - bytes_;
    data_ = data;
    bytes_ = bytes;
  }

  OpRunner* const runner_;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  bool lent_ = false;
};

// One attempt at one op, and where its segments go.
class OpRunner::Op final : public AttemptSink, public std::enable_shared_from_this<Op> {
 public:
  Op(OpRunner* runner, const StartAttempt& action)
      : runner_(runner),
        key_{action.group, action.ordinal},
        owner_(runner->next_owner_++),
        attempt_number_(action.attempt),
        desc_(action.desc),
        ring_(action.ring),
        posts_(action.posts),
        theirs_(action.ring.size()) {
    for (const PeerId peer : ring_) links_.push_back({action.group.run, peer});
  }

  int PositionOf(PeerId peer) const {
    const auto it = std::find(ring_.begin(), ring_.end(), peer);
    return it == ring_.end() ? -1 : static_cast<int>(it - ring_.begin());
  }

  void SendSegment(int to, const Segment& segment, const uint8_t* data, uint64_t cookie) override {
    FrameHeader header;
    header.type = FrameType::kData;
    header.group = key_.group.group;
    header.payload_bytes = segment.bytes;
    header.op = theirs_[to];
    header.attempt = attempt_number_;
    header.offset = segment.offset;
    header.phase = segment.phase;
    const uint64_t out = runner_->NewSegmentCookie(shared_from_this(), cookie);
    out_.insert(out);
    runner_->transport_->SendSegment(links_[to], header, data, out, owner_);
  }

  // True if nothing in the transport refers to the attempt's memory.
  bool Idle() const { return out_.empty() && attempt_->Idle(); }

  // False between StopAttempt and the stop of the attempt: nothing more must be sent then.
  bool HasWork() const { return (!stopping_ || stopped_) && attempt_->HasWork(); }

  // From now on no segment of this attempt is sent again.
  void Forget() { runner_->owners_.erase(owner_); }

  void Complete() override {
    runner_->events_.push_back(
        AttemptComplete{key_.group, key_.ordinal, attempt_number_, std::move(result_)});
  }

  OpRunner* const runner_;
  const OpKey key_;
  const uint64_t owner_;
  const Epoch attempt_number_;
  const OpDesc desc_;
  const std::vector<PeerId> ring_;
  const std::vector<PostRef> posts_;
  std::vector<OpOrdinal> theirs_;  // by ring position; 0: not known yet
  std::vector<LinkKey> links_;
  std::shared_ptr<Scratch> scratch_;  // outlives the attempt
  std::unique_ptr<Attempt> attempt_;
  std::string result_;          // one-shot op: the result
  std::set<uint64_t> out_;      // cookies of segments in the transport
  size_t repeats_ = 0;          // how many of these are sent again
  bool detached_ = false;       // stopping, and nothing is received any more
  bool answer_stop_ = false;    // AttemptStopped is due once the attempt is idle
  bool answer_finish_ = false;  // AttemptFinished is due once the attempt has no more work
  bool working_ = false;        // this is in work_
  bool stopping_ = false;       // after StopAttempt: segments that arrive are thrown away
  bool stopped_ = false;        // Attempt::Stop() was called
  // Keeps the memory that segments in the transport refer to. They may outlive their posts.
  std::vector<PostBuffers> buffers_;
};

OpRunner::OpRunner(Transport* transport, Options options)
    : transport_(transport),
      options_(std::move(options)),
      pool_(MakeScratchPool(options_.scratch_limit, options_.unmap)),
      turn_bytes_left_(options_.turn_bytes_max) {}

OpRunner::~OpRunner() = default;

void OpRunner::AddPost(const LocalPost& post, PostBuffers buffers) {
  LH_CHECK(!buffers.pieces.empty() && buffers.sources.size() == buffers.pieces.size() &&
           buffers.targets.size() == buffers.pieces.size());
  Post added{post.desc, post.tag, post.is_root, post.terms, std::move(buffers), {}, nullptr, {}};
  LH_CHECK(posts_.emplace(post.post, std::move(added)).second);
}

Outcome OpRunner::Admit(const LocalPost& post, const PostView& view) {
  if (Outcome refusal = CheckApart(post, view); !refusal.ok()) return refusal;
  Post& added = posts_.at(post.post);
  std::shared_ptr<Scratch> scratch;
  for (const auto& [other, member] : view.together) scratch = posts_.at(other).scratch;
  if (scratch == nullptr) scratch = std::make_shared<Scratch>(this);
  bool keeps_errors = !added.buffers.errors.empty();
  for (const auto& [other, member] : view.together) {
    keeps_errors = keeps_errors || !posts_.at(other).buffers.errors.empty();
  }
  const bool mesh = MayUseMesh(post.desc, view.peers);
  const size_t positions = mesh ? std::min(view.peers, kMeshPeersMax) : view.peers;
  const uint64_t needed =
      view.peers <= 1 || IsOneShot(post.desc)
          ? 0
          : ScratchBytesMax(post.desc, added.buffers.in_place(), positions, view.crowded, mesh,
                            WholeBytes(post.desc, post.terms), keeps_errors);
  if (needed > scratch->bytes()) {
    const auto refusal = [&](const std::string& why) {
      return Outcome{Code::kUnavailable,
                     absl::StrCat(Name(post.desc.kind), " tag ", post.tag, " refused: it needs ",
                                  needed, " bytes of scratch memory, ", why)};
    };
    if (reserved_ + (needed - scratch->bytes()) > options_.scratch_limit) {
      return refusal(absl::StrCat("ops in flight hold ", reserved_, " and the limit is ",
                                  options_.scratch_limit,
                                  ": wait for some of them, or raise --scratch-limit of peerd"));
    }
    if (const absl::Status grown = scratch->Grow(needed); !grown.ok()) {
      return refusal(absl::StrCat("and the host has no more (", std::string(grown.message()),
                                  "): wait for ops in flight, or give the op a target of its own"));
    }
  }
  added.scratch = std::move(scratch);
  added.member = view.member;
  return {};
}

Outcome OpRunner::CheckApart(const LocalPost& post, const PostView& view) const {
  std::vector<Range> ranges;
  std::vector<MemberId> members{view.member};
  const auto add = [&](const PostRef& ref, size_t of) {
    const Post& added = posts_.at(ref);
    const PostBuffers& buffers = added.buffers;
    for (size_t k = 0; k < buffers.pieces.size(); ++k) {
      const Piece& piece = buffers.pieces[k];
      const auto range = [&](const char* name, const uint8_t* data, Extent extent,
                             const std::vector<uint64_t>& lengths, uint64_t size) {
        uint64_t count = piece.count;
        if (extent == Extent::kWhole && added.desc.InParts()) count *= added.desc.world;
        if (added.desc.unequal) count = std::accumulate(lengths.begin(), lengths.end(), count);
        if (data != nullptr && count > 0) ranges.push_back({data, data + count * size, name, of});
      };
      const Extent source = SourceOf(added.desc.kind, added.is_root);
      const uint64_t size = SizeOf(piece.dtype);
      range("source", buffers.sources[k], source, added.terms.gives, size);
      range("target", buffers.targets[k], TargetOf(added.desc.kind, added.is_root),
            added.terms.gets, size);
      if (buffers.errors.empty()) continue;
      range("error", reinterpret_cast<const uint8_t*>(buffers.errors[k]), source, added.terms.gives,
            sizeof(float));
    }
  };
  if (view.together.empty()) return {};
  add(post.post, 0);
  for (const auto& [other, member] : view.together) {
    add(other, members.size());
    members.push_back(member);
  }
  // In order of their addresses, a range that overlaps an earlier one overlaps the one of these
  // that ends last, of all members or of all but its own.
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.data < b.data; });
  const auto written = [](const Range& range) { return range.name[0] != 's'; };
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t k = i + 1; k < ranges.size() && ranges[k].data < ranges[i].end; ++k) {
      const Range& a = ranges[i].of == 0 ? ranges[i] : ranges[k];
      const Range& b = ranges[i].of == 0 ? ranges[k] : ranges[i];
      if (a.of == b.of || (!written(a) && !written(b))) continue;
      return {Code::kInvalidArgument,
              absl::StrCat(Name(post.desc.kind), " tag ", post.tag, " refused: the ", a.name,
                           " of member ", ToString(members[a.of]), " shares memory with the ",
                           b.name, " of member ", ToString(members[b.of]),
                           " in the same op; post it again with a tensor of its own")};
    }
  }
  return {};
}

OpTraffic OpRunner::EndPost(const PostRef& post) {
  const auto it = posts_.find(post);
  if (it == posts_.end()) return {};
  const OpTraffic traffic = it->second.traffic;
  posts_.erase(it);
  return traffic;
}

template <class Action>
AttemptSpec OpRunner::MakeSpec(const Action& action) const {
  AttemptSpec spec;
  spec.desc = action.desc;
  for (const CutOwner& cut : action.cuts) {
    spec.cuts.push_back({cut.position, cut.post, cut.to_position, cut.to_post, cut.count});
  }
  spec.contributes = action.contributes;
  spec.weights = action.weights;
  spec.grain_bytes = options_.grain_bytes;
  spec.cached_bytes_max = options_.cached_bytes_max;
  for (const PostRef& post : action.posts) {
    const PostBuffers& buffers = posts_.at(post).buffers;
    spec.pieces = buffers.pieces;
    spec.sources.push_back(buffers.sources);
    spec.targets.push_back(buffers.targets);
    if (buffers.errors.empty()) continue;
    spec.errors.resize(action.posts.size());
    spec.errors[spec.sources.size() - 1] = buffers.errors;
  }
  return spec;
}

uint64_t OpRunner::SeedOf(uint64_t op_seed, const PostRef& post) const {
  // Two ops of one name have different calls.
  return Digester().Add(op_seed).Add(posts_.at(post).member).Add(post.call).value();
}

std::string OpRunner::Payload(const SendReady& ready) const {
  // It may be too long for the control lane.
  if (ready.input == ReadyInput::kCarried) transport_->WantDataLanes({ready.group.run, ready.to});
  return OneShotPayload(MakeSpec(ready));
}

void OpRunner::Start(const StartAttempt& action) {
  auto op = std::make_shared<Op>(this, action);
  AttemptSpec spec = MakeSpec(action);
  spec.size = static_cast<int>(action.ring.size());
  spec.members = action.members;
  spec.position = op->PositionOf(options_.self);
  LH_CHECK(spec.position >= 0);
  bool long_way = false;
  uint64_t window = 0;
  const bool segments =
      action.algorithm == Algorithm::kRing || action.algorithm == Algorithm::kMesh;
  const auto owns_nothing = [&](int position) {
    return !action.shares.empty() && action.shares[position] == 0;
  };
  for (int to = 0; segments && to < spec.size; ++to) {
    if (action.algorithm == Algorithm::kRing && to != (spec.position + 1) % spec.size) continue;
    // Two positions of which neither owns anything send each other nothing.
    if (owns_nothing(to) && owns_nothing(spec.position)) continue;
    // A direct op, or an op of a part of the group, may need a link that the epoch has built
    // without data lanes.
    if (to != spec.position) transport_->WantDataLanes(op->links_[to]);
    const LinkUse use = transport_->BestUse(op->links_[to]);
    window = std::max(window, use.window_bytes);
    long_way = long_way || use.long_way;
  }
  // In a mesh all links share the window.
  if (action.algorithm == Algorithm::kMesh) window = std::max(window, spec.window_bytes);
  if (window > 0) spec.window_bytes = window;
  uint64_t bytes = action.desc.bytes();
  for (const CutOwner& cut : action.cuts) bytes += cut.count * SizeOf(action.desc.dtype);
  spec.segment_bytes = SegmentBytes(bytes / spec.size, spec.grain_bytes, long_way);
  for (const PostRef& post : action.posts) {
    op->buffers_.push_back(posts_.at(post).buffers);
    op->scratch_ = posts_.at(post).scratch;
  }
  spec.ring_contributes = action.ring_contributes;
  spec.weight_sum = action.weight_sum;
  if (spec.desc.Encodes()) {
    for (const PostRef& post : action.posts) spec.seeds.push_back(SeedOf(action.seed, post));
    spec.sum_seed = Digester().Add(spec.seeds.front()).Add(uint64_t{1}).value();
  }
  spec.shares = action.shares;
  spec.order = action.order;
  if (action.algorithm == Algorithm::kOneShot) {
    absl::StatusOr<std::string> result = action.result ? absl::StatusOr<std::string>(*action.result)
                                                       : ReducePayloads(spec, action.payloads);
    LH_CHECK(result.ok()) << result.status();
    op->result_ = *result;
    op->attempt_ = MakeOneShotAttempt(spec, *std::move(result));
  } else {
    // A single peer has a local attempt, whichever function makes it; the mesh takes every kind.
    absl::StatusOr<std::unique_ptr<Attempt>> attempt =
        action.algorithm == Algorithm::kRing ? MakeRingAttempt(spec, op.get(), op->scratch_.get())
                                             : MakeMeshAttempt(spec, op.get(), op->scratch_.get());
    // Admit() has taken the memory that the attempt needs.
    LH_CHECK(attempt.ok()) << attempt.status();
    op->attempt_ = *std::move(attempt);
  }
  const bool added = ops_.emplace(op->key_, op).second;
  LH_CHECK(added);
  owners_.emplace(op->owner_, op.get());
  op->attempt_->Start();
  if (op->attempt_->CompleteAtOnce()) op->Complete();
  Advance(op);
}

void OpRunner::Credit(const CreditAttempt& action) {
  const auto it = ops_.find({action.group, action.ordinal});
  if (it == ops_.end()) return;
  const std::shared_ptr<Op> op = it->second;
  const int position = op->PositionOf(action.peer);
  if (op->attempt_number_ != action.attempt || op->stopping_ || position < 0) return;
  op->theirs_[position] = action.theirs;
  op->attempt_->Credit(position);
  Advance(op);
}

// ------------------------------------------------------------------------------ slices

void OpRunner::Work() {
  turn_bytes_left_ = options_.turn_bytes_max;
  WorkOn();
}

void OpRunner::Advance(const std::shared_ptr<Op>& op) {
  if (!op->working_ && op->HasWork()) {
    op->working_ = true;
    work_.push_back(op);
  }
  WorkOn();
}

void OpRunner::WorkOn() {
  while (turn_bytes_left_ > 0 && !work_.empty()) {
    const std::shared_ptr<Op> op = std::move(work_.front());
    work_.pop_front();
    if (op->HasWork()) {
      const uint64_t slice = std::min(turn_bytes_left_, kSliceBytes);
      turn_bytes_left_ -= std::min(turn_bytes_left_, op->attempt_->Work(slice));
    }
    op->working_ = op->HasWork();
    if (op->working_) {
      work_.push_back(op);
    } else {
      Settle(op);
    }
  }
}

void OpRunner::Settle(const std::shared_ptr<Op>& op) {
  if (op->attempt_->HasWork()) return;
  const OpKey& key = op->key_;
  if (std::exchange(op->answer_finish_, false)) {
    // Results in place are decoded only now.
    for (size_t i = 0; op->desc_.Encodes() && i < op->posts_.size(); ++i) {
      const uint64_t blocks = op->attempt_->blocks_not_finite(i);
      counts_.blocks_not_finite += blocks;
      const auto it = posts_.find(op->posts_[i]);
      if (it != posts_.end()) it->second.traffic.blocks_not_finite = blocks;
    }
    events_.push_back(AttemptFinished{key.group, key.ordinal});
  }
  if (!op->Idle()) return;
  std::erase(zombies_, op);
  // The inputs are restored only when all segments in the transport have returned.
  if (std::exchange(op->answer_stop_, false)) {
    events_.push_back(AttemptStopped{key.group, key.ordinal, op->attempt_number_});
  }
}

// ------------------------------------------------------------------------------ the end

void OpRunner::Stop(const StopAttempt& action) {
  const auto it = ops_.find({action.group, action.ordinal});
  LH_CHECK(it != ops_.end() && it->second->attempt_number_ == action.attempt);
  const std::shared_ptr<Op> op = it->second;
  op->stopping_ = true;
  op->Forget();
  transport_->DropSegments(FrameType::kData, {op->out_.begin(), op->out_.end()});
  const uint64_t cookie = next_detach_++;
  detaching_.emplace(cookie, op);
  transport_->DetachReceives(
      action.group.run,
      {.group = action.group.group, .op = action.ordinal, .attempt = action.attempt}, cookie);
}

void OpRunner::OnReceivesDetached(uint64_t cookie) {
  const auto it = detaching_.find(cookie);
  LH_CHECK(it != detaching_.end());
  const std::shared_ptr<Op> op = std::move(it->second);
  detaching_.erase(it);
  op->detached_ = true;
  MaybeStop(op);
}

void OpRunner::MaybeStop(const std::shared_ptr<Op>& op) {
  // The attempt may restore memory after its Sent(). But a segment that is sent again still reads
  // that memory.
  if (!op->detached_ || op->repeats_ > 0) return;
  op->attempt_->Stop();
  op->stopped_ = true;
  // For segments dropped before, the attempt may have handed over new ones. They are dropped, too,
  // because the stop waits for them.
  transport_->DropSegments(FrameType::kData, {op->out_.begin(), op->out_.end()});
  op->Forget();
  op->answer_stop_ = true;
  Retire(op);
}

void OpRunner::Finish(const FinishAttempt& action) {
  const auto it = ops_.find({action.group, action.ordinal});
  if (it == ops_.end()) {
    // The attempt was stopped before, or never started.
    LH_CHECK(!action.commit);
    return;
  }
  const std::shared_ptr<Op> op = it->second;
  LH_CHECK(action.commit);
  op->Forget();
  // Only segments that are sent again can be in the transport. All participants have the result, so
  // nobody needs them.
  transport_->DropSegments(FrameType::kData, {op->out_.begin(), op->out_.end()});
  op->attempt_->Commit();
  op->answer_finish_ = true;
  Retire(op);
}

void OpRunner::Retire(const std::shared_ptr<Op>& op) {
  const OpTraffic moved{op->attempt_->bytes_sent(), op->attempt_->bytes_received()};
  OpTraffic& group = traffic_[op->key_.group];
  group.bytes_sent += moved.bytes_sent;
  group.bytes_received += moved.bytes_received;
  for (const PostRef& post : op->posts_) {
    const auto it = posts_.find(post);
    if (it == posts_.end()) continue;
    it->second.traffic.bytes_sent += moved.bytes_sent;
    it->second.traffic.bytes_received += moved.bytes_received;
  }
  ops_.erase(op->key_);
  zombies_.push_back(op);
  Advance(op);
  Settle(op);
}

OpRunner::Op* OpRunner::Find(const LinkKey& link, const FrameHeader& header) {
  const auto it = ops_.find({{link.run, header.group}, header.op});
  if (it == ops_.end() || it->second->attempt_number_ != header.attempt) return nullptr;
  return it->second->stopping_ ? nullptr : it->second.get();
}

absl::StatusOr<uint8_t*> OpRunner::OnDataHeader(const LinkKey& link, const FrameHeader& header) {
  Op* const op = Find(link, header);
  if (op == nullptr) return nullptr;
  const int from = op->PositionOf(link.peer);
  if (from < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("DATA for ", ToString(header.op), " from a peer that takes no part in it"));
  }
  return op->attempt_->Place(from, {header.phase, header.offset, header.payload_bytes});
}

void OpRunner::OnDataAbandoned(const LinkKey& link, const FrameHeader& header) {
  Op* const op = Find(link, header);
  if (op == nullptr) return;
  op->attempt_->Abandoned(op->PositionOf(link.peer),
                          {header.phase, header.offset, header.payload_bytes});
}

absl::Status OpRunner::OnDataReceived(const LinkKey& link, const FrameHeader& header) {
  Op* const op = Find(link, header);
  // The attempt was stopped since the header came. The transport writes to the memory no more.
  if (op == nullptr) return absl::OkStatus();
  op->attempt_->Received(op->PositionOf(link.peer),
                         {header.phase, header.offset, header.payload_bytes});
  return absl::OkStatus();
}

uint64_t OpRunner::NewSegmentCookie(std::shared_ptr<Op> op, uint64_t cookie) {
  if (free_cookies_.empty()) {
    segments_out_.emplace_back();
    free_cookies_.push_back(segments_out_.size());
  }
  const uint64_t out = free_cookies_.back();
  free_cookies_.pop_back();
  segments_out_[out - 1] = {std::move(op), cookie};
  return out;
}

void OpRunner::OnSegmentSent(uint64_t cookie) {
  LH_CHECK(cookie >= 1 && cookie <= segments_out_.size() && segments_out_[cookie - 1].op);
  const SegmentOut out = std::exchange(segments_out_[cookie - 1], {});
  free_cookies_.push_back(cookie);
  out.op->out_.erase(cookie);
  if (out.cookie == kRepeat) {
    --out.op->repeats_;
    MaybeStop(out.op);
  } else {
    out.op->attempt_->Sent(out.cookie);
  }
  Advance(out.op);
  Settle(out.op);
}

uint64_t OpRunner::OnSegmentRepeat(uint64_t owner) {
  const auto it = owners_.find(owner);
  if (it == owners_.end()) return 0;
  Op* const op = it->second;
  const uint64_t out = NewSegmentCookie(op->shared_from_this(), kRepeat);
  op->out_.insert(out);
  ++op->repeats_;
  return out;
}

}  // namespace longhaul::peerd
