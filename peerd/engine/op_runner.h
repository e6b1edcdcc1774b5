// Runs the attempts that the peer core asks for. It connects core, collective and transport.
//
// The core starts, credits, stops and finishes attempts. Segments travel through the transport. The
// runner reports results to the core as events. It holds the buffers of a post from AddPost() to
// EndPost(), and longer while the kernel still refers to them.
//
// Memory of an op: when a post is admitted, the runner takes all the scratch memory that any
// attempt at the op can need. All local posts of the op share this memory, and it is held until the
// last of them ends. So an op that was announced to other peers never fails for lack of memory. A
// ring that is out of place needs none.
//
// Work in slices: some work takes time in proportion to a tensor, such as undo, adding up several
// local inputs, and copying the result. Each turn of the reactor does a bounded number of bytes of
// it, so that links are served in between. The first bytes are done at once, the rest in Work() of
// later turns. An event tells the core when the work is done.
//
// Threads: the reactor thread only. Nothing here calls the core: events are collected (PopEvents).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/counters.h"
#include "base/outcome.h"
#include "peerd/collective/attempt.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/engine/ports.h"
#include "peerd/transport/transport.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {

// What the attempts of all ops have found.
struct OpCounts {
  uint64_t blocks_not_finite = 0;  // Attempt::blocks_not_finite()
};
inline constexpr Counter<OpCounts> kOpCounters[] = {
    {"longhaul_peerd_blocks_not_finite_total",
     "Blocks with a NaN or an infinity in results of quantized ops, for each local member",
     &OpCounts::blocks_not_finite},
};

class OpRunner final : public OpPort, private SegmentListener {
 public:
  struct Options {
    PeerId self;
    // The most scratch memory, in bytes, that all admitted ops may hold together: for originals,
    // and for inputs that other peers send.
    uint64_t scratch_limit = uint64_t{4} << 30;
    // Simulations set smaller values, because their tensors are small. grain_bytes must be the same
    // at every peer.
    uint32_t grain_bytes = kGrainBytes;
    uint64_t cached_bytes_max = kCachedBytesMax;
    uint64_t turn_bytes_max = LH_OP_TURN_BYTES_MAX;
    UnmapFunction unmap;  // unmaps scratch memory; null: munmap(), at once
  };

  // `transport` must outlive the runner's last use of it.
  OpRunner(Transport* transport, Options options);
  ~OpRunner() override;
  OpRunner(const OpRunner&) = delete;
  OpRunner& operator=(const OpRunner&) = delete;

  // ---- OpPort
  void AddPost(const LocalPost& post, PostBuffers buffers) override;
  Outcome Admit(const LocalPost& post, const PostView& view) override;
  OpTraffic EndPost(const PostRef& post) override;
  std::string Payload(const SendReady& ready) const override;
  void Start(const StartAttempt& action) override;
  void Credit(const CreditAttempt& action) override;
  void Stop(const StopAttempt& action) override;
  void Finish(const FinishAttempt& action) override;
  void ForgetGroup(const GroupKey& group) override { traffic_.erase(group); }
  void Work() override;
  bool HasWork() const override { return !work_.empty(); }
  std::vector<Event> PopEvents() override { return std::exchange(events_, {}); }

  // For Transport::SetSegmentListeners().
  SegmentListener* segments() { return this; }

  // For each group, the bytes that ended attempts have moved.
  const std::map<GroupKey, OpTraffic>& Traffic() const { return traffic_; }
  // The scratch memory that admitted ops hold, in bytes, and the most that they may hold.
  uint64_t scratch_bytes() const { return reserved_; }
  uint64_t scratch_limit() const { return options_.scratch_limit; }
  const OpCounts& counts() const { return counts_; }
  // True if no attempt refers to memory any more.
  bool Idle() const { return ops_.empty() && zombies_.empty(); }

 private:
  // ---- SegmentListener
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override;
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override;
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override;
  void OnSegmentSent(uint64_t cookie) override;
  uint64_t OnSegmentRepeat(uint64_t owner) override;
  void OnReceivesDetached(uint64_t cookie) override;

  class Op;
  class Scratch;
  struct OpKey {
    GroupKey group;
    OpOrdinal ordinal;
    friend auto operator<=>(const OpKey&, const OpKey&) = default;
    friend bool operator==(const OpKey&, const OpKey&) = default;
  };
  struct Post {
    OpDesc desc;
    uint64_t tag = 0;
    bool is_root = false;
    OpTerms terms;
    PostBuffers buffers;
    MemberId member;                   // set when the post is admitted
    std::shared_ptr<Scratch> scratch;  // of its op; null until the post is admitted
    OpTraffic traffic;
  };
  // The owner of a segment that is in the transport.
  struct SegmentOut {
    std::shared_ptr<Op> op;
    uint64_t cookie = 0;
  };

  Op* Find(const LinkKey& link, const FrameHeader& header);
  // InvalidArgument: the target of one of two posts of an op overlaps memory of the other post. The
  // text names both members.
  Outcome CheckApart(const LocalPost& post, const PostView& view) const;
  uint64_t NewSegmentCookie(std::shared_ptr<Op> op, uint64_t cookie);
  // What SendReady and StartAttempt have in common.
  template <class Action>
  AttemptSpec MakeSpec(const Action& action) const;
  // For random numbers of a post's input. An op that is redone has the same.
  uint64_t SeedOf(uint64_t op_seed, const PostRef& post) const;
  // Queues the attempt if it has work, and works on the queue as far as this turn allows.
  void Advance(const std::shared_ptr<Op>& op);
  // Works on the queue, until it is empty or the turn has no bytes left.
  void WorkOn();
  // Sends AttemptFinished or AttemptStopped when it is due. Forgets an attempt that is over.
  void Settle(const std::shared_ptr<Op>& op);
  // Stops an attempt whose receives are detached, once no segment of it is being sent again.
  void MaybeStop(const std::shared_ptr<Op>& op);
  // Counts the traffic of an attempt that ends. Keeps the attempt while it has work or the kernel
  // refers to its memory.
  void Retire(const std::shared_ptr<Op>& op);

  Transport* const transport_;
  const Options options_;
  std::unique_ptr<ScratchPool> pool_;
  uint64_t reserved_ = 0;
  std::map<PostRef, Post> posts_;
  std::map<OpKey, std::shared_ptr<Op>> ops_;
  std::unordered_map<uint64_t, Op*> owners_;  // by the owner number that the transport knows
  uint64_t next_owner_ = 1;
  std::vector<std::shared_ptr<Op>> zombies_;  // ended, but with work or segments in the transport
  std::map<uint64_t, std::shared_ptr<Op>> detaching_;  // by the cookie of DetachReceives()
  uint64_t next_detach_ = 1;
  std::deque<std::shared_ptr<Op>> work_;  // attempts with work; each gets a slice in turn
  uint64_t turn_bytes_left_ = 0;
  std::vector<SegmentOut> segments_out_;  // by cookie - 1
  std::vector<uint64_t> free_cookies_;
  std::map<GroupKey, OpTraffic> traffic_;
  OpCounts counts_;
  std::vector<Event> events_;
};

}  // namespace longhaul::peerd
