// Runs the attempts that the peer core asks for: joins core, collective and transport.
//
// The core says start, credit, stop, finish; segments go out through the transport and come in from
// it; what happened goes back as core events. Buffers of posts are held from AddPost() to
// EndPost(), and longer while the kernel still refers to them.
//
// Memory of an op. All that any attempt at an op can need is taken when its posts are admitted,
// once for all local posts of the op, and held until the last of them is taken back. So an op that
// was announced to others never fails for lack of memory. Out of place, a ring needs none.
//
// Work in slices. What takes time in proportion to a tensor (undo, several members' inputs, their
// copies of the result) is done for a bounded number of bytes in each turn of the reactor, so that
// links are served in between: at once as far as that goes, and the rest in later turns (Work()).
// The core hears of its end by an event.
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
#include "base/outcome.h"
#include "peerd/collective/attempt.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/engine/ports.h"
#include "peerd/transport/transport.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {

class OpRunner final : public OpPort, private SegmentListener {
 public:
  struct Options {
    PeerId self;
    // Bytes that the attempts at all posted ops may need at one time: to keep originals, and for
    // what others send.
    uint64_t scratch_limit = uint64_t{4} << 30;
    // Simulations, whose tensors are small, cut them finer; at every peer alike. And what is large
    // begins earlier there.
    uint32_t grain_bytes = kGrainBytes;
    uint64_t cached_bytes_max = kCachedBytesMax;
    uint64_t turn_bytes_max = LH_OP_TURN_BYTES_MAX;
    UnmapFunction unmap;  // of scratch memory; null: at once
  };

  // `transport` outlives the runner's last use of it.
  OpRunner(Transport* transport, Options options);
  ~OpRunner() override;
  OpRunner(const OpRunner&) = delete;
  OpRunner& operator=(const OpRunner&) = delete;

  // ---- OpPort
  void AddPost(const PostRef& post, const OpDesc& desc, PostBuffers buffers) override;
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
  SegmentListener* segments() override { return this; }

  // Bytes that attempts which have ended moved, by group.
  const std::map<GroupKey, OpTraffic>& Traffic() const { return traffic_; }
  // No attempt refers to memory any more.
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
    PostBuffers buffers;
    std::shared_ptr<Scratch> scratch;  // of its op; null until it is admitted
    OpTraffic traffic;
  };
  // A segment in the transport: whose it is.
  struct SegmentOut {
    std::shared_ptr<Op> op;
    uint64_t cookie = 0;
  };

  Op* Find(const LinkKey& link, const FrameHeader& header);
  // InvalidArgument, naming both members: two posts of one op, and one writes where the other does.
  Outcome CheckApart(const LocalPost& post, const PostView& view) const;
  uint64_t NewSegmentCookie(std::shared_ptr<Op> op, uint64_t cookie);
  AttemptSpec MakeSpec(const OpDesc& desc, const std::vector<PostRef>& posts,
                       const std::vector<bool>& contributes) const;
  // Does what is left to do for the attempt, as far as this turn allows; for those before it,
  // first.
  void Advance(const std::shared_ptr<Op>& op);
  void WorkOn();
  // Tells the core what it waits for, once that is so; forgets an attempt that is over.
  void Settle(const std::shared_ptr<Op>& op);
  // Stops an attempt whose receives are detached, once no segment of it is being sent again.
  void MaybeStop(const std::shared_ptr<Op>& op);
  // Accounts the traffic of an attempt that ends; keeps it while the kernel refers to its memory.
  void Retire(const std::shared_ptr<Op>& op);

  Transport* const transport_;
  const Options options_;
  std::unique_ptr<ScratchPool> pool_;
  uint64_t reserved_ = 0;
  std::map<PostRef, Post> posts_;
  std::map<OpKey, std::shared_ptr<Op>> ops_;
  std::unordered_map<uint64_t, Op*> owners_;  // of ops_, what they are called by the transport
  uint64_t next_owner_ = 1;
  std::vector<std::shared_ptr<Op>> zombies_;  // ended, segments still out
  std::map<uint64_t, std::shared_ptr<Op>> detaching_;
  uint64_t next_detach_ = 1;
  std::deque<std::shared_ptr<Op>> work_;  // that have some, a slice of each in turn
  uint64_t turn_bytes_left_ = 0;
  std::vector<SegmentOut> segments_out_;  // by cookie - 1
  std::vector<uint64_t> free_cookies_;
  std::map<GroupKey, OpTraffic> traffic_;
  std::vector<Event> events_;
};

}  // namespace longhaul::peerd
