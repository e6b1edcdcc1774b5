// The side of a transfer that has the state: answers asks of other peers.
//
// A peer's ask names a local member and the root of the state that it wants. A member is known from
// Register() to Unregister(), so that its manifest can be compared; chunks are given out from
// Serve() to EndServe(). What is not (any more) here is refused, and so are asks of a ninth
// transfer at a time.
//
// An answer is sent straight from the tensors, in pieces of kPieceBytes. Where nobody writes to
// them (the trainer is blocked in its call) that is all there is to it; the receiver checks what it
// gets. A state that may change meanwhile is copied chunk by chunk and the copy hashed first: what
// is not what it should be is refused as changed, not sent.
//
// Besides, a member may have kept bits of another root, which stay as they are while its trainer
// trains: ServeKept(). Of these copies are sent, too, so that EndServeKept() has to wait for
// nothing.
//
// A rate may bound what all answers together send (SetRate()): pieces wait here then, and transfers
// take turns.
//
// A transfer is forgotten when its receiver says so, when the link is down, and when nothing was
// asked of it for long.
//
// Threads: the reactor's. Calls of the transport's listener go to those methods that have their
// names. Nothing here reads a clock: `now` comes from the caller.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
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

// Cookies and owners that the transport knows from here have this bit; those of ops do not.
inline constexpr uint64_t kStateCookie = uint64_t{1} << 63;

// Of one answer go in one frame: what an op has to wait for on a lane.
inline constexpr uint32_t kPieceBytes = 256 << 10;

class StateServer {
 public:
  struct Stats {
    uint64_t bytes_sent = 0;  // handed to the transport
    uint64_t asks_refused = 0;
  };

  // `transport` and `hasher` outlive it.
  StateServer(Transport* transport, Hasher* hasher, uint32_t detect_ms);
  ~StateServer();
  StateServer(const StateServer&) = delete;
  StateServer& operator=(const StateServer&) = delete;
  void SetDetectMs(uint32_t detect_ms) { detect_ms_ = detect_ms; }
  // Bytes per second that are sent at most; 0: no limit. Before the first ask.
  void SetRate(uint64_t bytes_per_second) { bucket_ = TokenBucket(bytes_per_second); }

  // In place of what was registered for the member before; what is being served goes on.
  void Register(const GroupKey& group, MemberId member, std::shared_ptr<const MemoryState> state);
  // Also ends what is being served.
  void Unregister(const GroupKey& group, MemberId member);

  // Of a member that is registered: its tensors have this root. `may_change`: somebody may write to
  // them.
  void Serve(const GroupKey& group, MemberId member, const Hash128& root, bool may_change = false);
  // Asks that are open are refused. What is on its way is still read: see Reading().
  void EndServe(const GroupKey& group, MemberId member);
  // Of a member that is registered: these bits have this root and do not change until
  // EndServeKept() or Unregister(). They are given out to whoever asks for this root, unless the
  // member serves it by Serve().
  void ServeKept(const GroupKey& group, MemberId member, std::shared_ptr<const MemoryState> state,
                 const Hash128& root);
  // Nothing reads them any more.
  void EndServeKept(const GroupKey& group, MemberId member);
  // Whether the kernel may still read this state for an answer.
  bool Reading(const MemoryState* state) const;

  // For a transfer on this host: what it would get, or nullptr.
  const MemoryState* Find(const GroupKey& group, MemberId member, const Hash128& root) const;
  const Manifest* FindManifest(const GroupKey& group, MemberId member) const;

  // CHUNK_REQUEST and CHUNK_CANCEL. InvalidArgument: against the protocol, close the link.
  absl::Status OnFrame(const LinkKey& link, const FrameHeader& header,
                       std::span<const uint8_t> payload, Tick now);
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
    bool on = false;  // between Serve() and EndServe()
    Hash128 root;
    bool may_change = false;
    std::shared_ptr<const MemoryState> kept;  // nullptr: nothing
    Hash128 kept_root;
    // Once somebody asked:
    std::shared_ptr<const std::vector<uint8_t>> encoded_manifest;
    std::shared_ptr<const std::vector<uint8_t>> digests;  // encoded
    std::shared_ptr<const std::vector<uint8_t>> kept_digests;

    enum class Copy : uint8_t { kNone, kLive, kKept };
    // Which one has this root. What is kept does not change: it goes before what may.
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
    bool over = false;                         // nobody wants it any more
    bool whole = false;                        // not a chunk
    bool manifest = false;                     // true of the member as long as it is there
    std::shared_ptr<const MemoryState> state;  // what is read; nullptr: `bytes` is
    std::shared_ptr<const std::vector<uint8_t>> bytes;
    // What is sent, and how much of it the transport has.
    const uint8_t* data = nullptr;
    uint64_t size = 0;
    uint64_t sent = 0;
    std::set<uint64_t> out;  // cookies
  };
  struct Transfer {
    Tick active;       // the last ask, or later: something was being sent
    uint64_t ask = 0;  // the newest
    std::map<uint64_t, std::shared_ptr<Answer>> asks;  // that are not over
    std::deque<std::shared_ptr<Answer>> queue;         // those that are not sent whole
  };

  absl::Status OnRequest(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload, Tick now);
  void OnCancel(const LinkKey& link, const FrameHeader& header);
  void Refuse(const TransferKey& key, uint64_t ask, ChunkRefusal code);
  // `copied`: of chunks a copy is sent.
  bool HasRoomFor(const LinkKey& link) const;
  static bool MayAnswer(const Transfer& transfer, ChunkKind kind, bool copied);
  void AnswerChunk(const std::shared_ptr<Answer>& answer,
                   const std::shared_ptr<const MemoryState>& state, const ChunkRequestBody& body,
                   bool copied);
  // Sends a copy if it is what it should be.
  void AnswerChecked(const std::shared_ptr<Answer>& answer, const Hash128& wanted,
                     std::span<const uint8_t> chunk);
  // It goes out with the next Pump().
  void Send(const std::shared_ptr<Answer>& answer, const uint8_t* data, uint64_t bytes);
  // Hands to the transport what the rate allows.
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
  size_t queued_ = 0;  // answers in queues
  TransferKey served_last_;
  std::unordered_map<uint64_t, std::shared_ptr<Answer>> owners_;   // that may have to repeat
  std::unordered_map<uint64_t, std::shared_ptr<Answer>> cookies_;  // in the transport
  uint64_t next_owner_ = kStateCookie + 1;
  uint64_t next_cookie_ = kStateCookie + 1;
  Stats stats_;
  std::shared_ptr<StateServer*> self_;  // digests that come later find out if we are gone
};

}  // namespace longhaul::peerd
