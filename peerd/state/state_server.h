// The serving side of transfers of shared state: answers the asks of other peers.
//
// An ask names a local member and the root of the state that the asking peer wants. From Register()
// to Unregister() a member is known, and its manifest is given out. From Serve() to EndServe() its
// chunks are given out. Any other ask is refused. The server serves at most LH_STATE_TRANSFERS_MAX
// transfers at a time, and at most three quarters of them for one link. It refuses asks of further
// transfers as busy.
//
// An answer is sent in pieces of kPieceBytes, straight from the tensors. While the trainer waits in
// its call, nobody writes to the tensors, so this is safe. (The receiver checks all chunks anyway.)
// If the trainer may write meanwhile (`may_change`), the server copies a chunk, hashes the copy,
// and sends the copy only if its digest is right. Otherwise it refuses the ask as changed.
//
// A member may also have a kept state (KeptStates), which does not change while its trainer trains:
// ServeKept(). The server sends copies of its chunks, too, so EndServeKept() need not wait.
//
// SetRate() limits the bytes a second of all answers together. Pieces beyond the limit wait in the
// server, and the transfers take turns.
//
// The server forgets a transfer when the receiver ends it, when the link is down, and when nothing
// was asked for 4 * detect_ms and nothing is being sent.
//
// Threads: the reactor thread. OnSegmentSent() and OnSegmentRepeat() take the calls that the
// transport makes to its SegmentListener. Nothing here reads a clock: the caller passes `now`.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/state/hasher.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/token_bucket.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

// The most bytes of an answer in one frame. An op may have to wait for such a frame on a lane.
inline constexpr uint32_t kPieceBytes = 256 << 10;

class StateServer {
 public:
  struct Stats {
    uint64_t bytes_sent = 0;    // handed to the transport
    uint64_t asks_refused = 0;  // for any reason
  };

  // `transport` and `hasher` must outlive this object.
  StateServer(Transport* transport, Hasher* hasher, uint32_t detect_ms);
  ~StateServer();
  StateServer(const StateServer&) = delete;
  StateServer& operator=(const StateServer&) = delete;
  void SetDetectMs(uint32_t detect_ms) { detect_ms_ = detect_ms; }
  // Limits the bytes that are sent per second; 0: no limit. Call it before the first ask.
  void SetRate(uint64_t bytes_per_second) { bucket_ = TokenBucket(bytes_per_second); }

  // Registers the state of a member. Replaces another state that was registered before, and ends
  // Serve() for it. Does nothing if the state is the same.
  void Register(const GroupKey& group, MemberId member, std::shared_ptr<const MemoryState> state);
  // Ends Serve() and ServeKept() as well.
  void Unregister(const GroupKey& group, MemberId member);

  // From now on gives out the tensors of a registered member, which have this root. `may_change`:
  // the trainer may write to the tensors meanwhile.
  void Serve(const GroupKey& group, MemberId member, const Hash128& root, bool may_change = false);
  // Refuses all open asks for digests and chunks. The kernel may still read pieces that are on
  // their way: see Reading(). If the tensors could change, the state is over: all further asks for
  // this root are refused as over, until it is served again or the tensors of another root are
  // over.
  void EndServe(const GroupKey& group, MemberId member);
  // From now on gives out a kept state of a registered member. The state has this root, and must
  // not change until EndServeKept() or Unregister(). If Serve() gives out the same root, the
  // tensors are sent, unless they may change.
  void ServeKept(const GroupKey& group, MemberId member, std::shared_ptr<const MemoryState> state,
                 const Hash128& root);
  // Nothing reads the kept state after this call.
  void EndServeKept(const GroupKey& group, MemberId member);
  // Returns whether the kernel may still read this state for an answer that is on its way.
  bool Reading(const MemoryState* state) const;

  // For a transfer on this host: returns the member's state that has this root, or nullptr.
  const MemoryState* Find(const GroupKey& group, MemberId member, const Hash128& root) const;
  // For a transfer on this host: returns whether the member's state of this root is over.
  bool Over(const GroupKey& group, MemberId member, const Hash128& root) const;
  const Manifest* FindManifest(const GroupKey& group, MemberId member) const;

  // Takes CHUNK_REQUEST and CHUNK_CANCEL. A peer that is not in the group gets nothing.
  // InvalidArgument: the peer broke the protocol; close the link.
  absl::Status OnFrame(const LinkKey& link, const FrameHeader& header,
                       std::span<const uint8_t> payload, bool in_group, Tick now);
  void OnLinkDown(const LinkKey& link);
  void OnSegmentSent(uint64_t cookie);
  uint64_t OnSegmentRepeat(uint64_t owner);

  void OnTime(Tick now);
  Tick NextDeadline() const;

  size_t transfers() const { return transfers_.size(); }
  const Stats& stats() const { return stats_; }

 private:
  using MemberKey = std::pair<GroupKey, MemberId>;
  struct Served {
    std::shared_ptr<const MemoryState> state;
    bool on = false;  // after Serve(), before EndServe()
    Hash128 root;
    bool may_change = false;
    std::optional<Hash128> over;              // the root for which asks are refused as over
    std::shared_ptr<const MemoryState> kept;  // nullptr: nothing is kept
    Hash128 kept_root;
    // Encoded when a peer first asks for them:
    std::shared_ptr<const std::vector<uint8_t>> encoded_manifest;
    std::shared_ptr<const std::vector<uint8_t>> digests;  // encoded
    std::shared_ptr<const std::vector<uint8_t>> kept_digests;

    enum class Copy : uint8_t { kNone, kLive, kKept };
    // Returns which of `state` (live) and `kept` has this root. If both have it, prefers the live
    // one, unless it may change.
    Copy With(const Hash128& root) const {
      const bool live = on && this->root == root;
      const bool has_kept = kept != nullptr && kept_root == root;
      if (live && !(has_kept && may_change)) return Copy::kLive;
      return has_kept ? Copy::kKept : Copy::kNone;
    }
  };
  struct TransferKey {
    LinkKey link;
    uint32_t group = 0;
    uint64_t transfer = 0;
    friend auto operator<=>(const TransferKey&, const TransferKey&) = default;
  };
  struct Answer {
    TransferKey transfer;
    uint64_t ask = 0;
    MemberKey member;
    uint64_t owner = 0;
    bool over = false;      // refused, or no longer needed by the receiver
    bool whole = false;     // the answer is all digests, or the manifest; not a chunk
    bool manifest = false;  // the answer is the manifest, which EndServe() does not refuse
    // Keeps the memory that is sent: memory of `state`, or `bytes` if `state` is nullptr.
    std::shared_ptr<const MemoryState> state;
    std::shared_ptr<const std::vector<uint8_t>> bytes;
    const uint8_t* data = nullptr;  // the first byte to send
    uint64_t size = 0;              // bytes to send
    uint64_t sent = 0;              // bytes that were handed to the transport
    std::set<uint64_t> out;         // cookies of pieces that are on their way
  };
  struct Transfer {
    Tick active;       // when something was last asked, or last seen being sent
    uint64_t ask = 0;  // the number of the newest ask
    std::map<uint64_t, std::shared_ptr<Answer>> asks;  // open asks
    std::deque<std::shared_ptr<Answer>> queue;         // answers that are not sent completely
  };

  absl::Status OnRequest(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload, bool in_group, Tick now);
  void OnCancel(const LinkKey& link, const FrameHeader& header);
  void Refuse(const TransferKey& key, uint64_t ask, ChunkRefusal code);
  // Returns whether one more transfer of this link may be served.
  bool HasRoomFor(const LinkKey& link) const;
  // Returns whether the transfer may get one more answer of this kind. `copied`: chunks are copied
  // first.
  static bool MayAnswer(const Transfer& transfer, ChunkKind kind, bool copied);
  void AnswerChunk(const std::shared_ptr<Answer>& answer,
                   const std::shared_ptr<const MemoryState>& state, const ChunkRequestBody& body,
                   bool copied);
  // Copies the chunk, and sends the copy if its digest is `wanted`.
  void AnswerChecked(const std::shared_ptr<Answer>& answer, const Hash128& wanted,
                     std::span<const uint8_t> chunk);
  // Puts the answer into the queue of its transfer; Pump() sends it.
  void Send(const std::shared_ptr<Answer>& answer, const uint8_t* data, uint64_t bytes);
  // Hands pieces to the transport, as many as the rate allows.
  void Pump(Tick now);
  void SendPiece(const std::shared_ptr<Answer>& answer, Tick now);
  uint64_t NewCookie(const std::shared_ptr<Answer>& answer);
  void End(const std::shared_ptr<Answer>& answer);
  void Forget(std::map<TransferKey, Transfer>::iterator transfer);

  Transport* const transport_;
  Hasher* const hasher_;
  uint32_t detect_ms_;
  std::map<MemberKey, Served> served_;
  std::map<TransferKey, Transfer> transfers_;
  TokenBucket bucket_;
  size_t queued_ = 0;        // answers in all queues
  TransferKey served_last_;  // the transfer that had the last turn
  // By owner: answers whose segments may be sent again. By cookie: segments in the transport.
  std::unordered_map<uint64_t, std::shared_ptr<Answer>> owners_;
  std::unordered_map<uint64_t, std::shared_ptr<Answer>> cookies_;
  uint64_t next_owner_ = 1;
  uint64_t next_cookie_ = 1;
  Stats stats_;
  // Holds `this`, and nullptr after the end of this object. Callbacks of the hasher look at it.
  std::shared_ptr<StateServer*> self_;
};

}  // namespace longhaul::peerd
