// Runs the attempts that the peer core asks for: joins core, collective and transport.
//
// The core says start, credit, stop, finish; segments go out through the transport and come in from
// it; what happened goes back as core events. Buffers of posts are held from AddPost() to
// TakePost(), and longer while the kernel still refers to them.
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
// Threads: the reactor thread only. Nothing here calls the core: events are collected (TakeEvents).
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
#include "peerd/transport/transport.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {

// Memory of one post, both as long as the op's tensor; the holders keep them mapped.
struct PostBuffers {
  const uint8_t* source = nullptr;
  uint8_t* target = nullptr;
  std::shared_ptr<const void> source_holder;
  std::shared_ptr<const void> target_holder;
};

struct OpTraffic {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

class OpRunner {
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
  ~OpRunner();
  OpRunner(const OpRunner&) = delete;
  OpRunner& operator=(const OpRunner&) = delete;

  void AddPost(const PostRef& post, const OpDesc& desc, PostBuffers buffers);
  // Takes what the attempts at the op may need, before the core hears of the post. Not OK: how the
  // post is to be answered; the core is not to hear of it, and nothing has changed.
  // - InvalidArgument: its tensors overlap those of another local post of the op.
  // - Unavailable: the memory would exceed the scratch limit, or the system has no more.
  Outcome Admit(const LocalPost& post, const PostView& view);
  // Ends the post; what moved for it. Zeros for a post that is not known.
  OpTraffic TakePost(const PostRef& post);

  // The bytes of a SendReady that is eager.
  std::string Payload(const SendReady& ready) const;

  void Start(const StartAttempt& action);
  void Credit(const CreditAttempt& action);
  void Stop(const StopAttempt& action);
  void Finish(const FinishAttempt& action);
  // Once in each turn of the reactor: goes on with what earlier turns left.
  void Work();
  // The next turn should follow at once.
  bool HasWork() const { return !work_.empty(); }

  // As TransportListener.
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header);
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header);
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header);
  void OnSegmentSent(uint64_t cookie);
  uint64_t OnSegmentRepeat(uint64_t owner);
  void OnReceivesDetached(uint64_t cookie);

  // What the core has to be told, in order.
  std::vector<Event> TakeEvents() { return std::exchange(events_, {}); }

  // Bytes that attempts which have ended moved, by group.
  const std::map<GroupKey, OpTraffic>& Traffic() const { return traffic_; }
  void ForgetGroup(const GroupKey& group) { traffic_.erase(group); }
  // No attempt refers to memory any more.
  bool Idle() const { return ops_.empty() && zombies_.empty(); }

 private:
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
                       const std::vector<bool>& counts) const;
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
