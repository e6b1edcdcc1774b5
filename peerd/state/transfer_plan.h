// Decides which chunk of a state is asked of which source: the plan of one member that fetches.
//
//   todo --(AskChunk)--> asked --(the chunk arrives, good)--> here
//   asked --(the chunk arrives, wrong bits; or the source refuses, is busy, has changed it)--> todo
//   asked --(the source is gone or late, or a faster source has nothing to do)--> dropped
//   dropped --(OnDropped())--> todo; if another source is to take over, it is asked first
//   dropped --(the chunk arrives all the same, good)--> here
//   todo --(the chunk has changed at all sources)--> left out
//
// Each source has a window. It limits the bytes that are asked of the source and not here yet. The
// window grows with the throughput of the source, so fast sources serve more. A source that sent
// wrong bits, or refused, is not asked any more.
//
// A source answers asks in their order, so only its oldest open ask has begun to arrive. While
// anything comes from a source, none of its asks is late. A source without work takes over the
// newest ask of a slower source.
//
// A chunk has one place in memory, and only one ask at a time may write there. So a chunk whose ask
// was dropped is asked for again only after OnDropped(): then the old ask writes nothing any more.
//
// Plain state machine: no clock, no thread. The same calls give the same actions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"

namespace longhaul::peerd {

// The number of an ask. Never reused in one plan.
using AskId = Id<struct AskIdKind>;

struct ChunkToFetch {
  uint32_t tensor = 0;  // its number in the manifest
  uint64_t chunk = 0;   // its number in the tensor
  uint32_t bytes = 0;
  friend bool operator==(const ChunkToFetch&, const ChunkToFetch&) = default;
};

// An order to the caller: ask the source for the chunk. Answer with OnChunk(), OnRefused(),
// OnChanged() or OnBusy().
struct AskChunk {
  AskId ask;
  MemberId source;
  ChunkToFetch chunk;
  friend bool operator==(const AskChunk&, const AskChunk&) = default;
};
// An order to the caller: give the ask up. Answer with OnDropped() when nothing is written for the
// ask any more.
struct DropAsk {
  AskId ask;
  friend bool operator==(const DropAsk&, const DropAsk&) = default;
};
using TransferAction = std::variant<AskChunk, DropAsk>;

struct TransferOptions {
  // A chunk is not late before this time: detect_ms.
  int64_t patience_us = Millis(1500);
  // If nothing comes from any source for this time, the transfer fails.
  int64_t stall_us = Millis(6000);
  // What happens if no source is left. True: the plan waits for stall_us, because other sources may
  // be named. False: the plan fails at once.
  bool wait_for_sources = false;
  // The largest window of one source, in bytes and in asks.
  uint64_t window_bytes_max = uint64_t{64} << 20;
  uint32_t window_asks_max = 512;
};

class TransferPlan {
 public:
  TransferPlan(const std::vector<ChunkToFetch>& chunks, const TransferOptions& options, Tick now);

  // ---- sources

  // Adds a source, which may be asked from now on. Brings back a source that was suspended or
  // removed, unless it refused or sent wrong bits.
  void AddSource(MemberId source);
  // The link of a source is gone, and may come back. The source is not asked until AddSource().
  void SuspendSource(MemberId source);
  // A source is gone. The source is not asked until AddSource().
  void RemoveSource(MemberId source, const std::string& reason);

  // A source has shown that it is alive, without sending a chunk: stall_us begins again.
  void OnNews(Tick now) { last_news_ = now; }

  // ---- answers. Answers to asks that have ended are ignored.

  // A part of the chunk has come. The rest follows, then OnChunk().
  void OnPiece(AskId ask, uint32_t bytes, Tick now);
  // The chunk is complete. `good`: its digest is right.
  void OnChunk(AskId ask, bool good, Tick now);
  // The source does not have the state, or no longer has it.
  void OnRefused(AskId ask, const std::string& reason);
  // The source has changed the chunk. A chunk that has changed at all sources is left out.
  void OnChanged(AskId ask);
  // The source serves too many other peers. It is asked again later.
  void OnBusy(AskId ask, Tick now);
  // The answer to DropAsk.
  void OnDropped(AskId ask);

  // Returns what the caller must do now, in this order. Call it after each change, and at
  // NextDeadline().
  std::vector<TransferAction> Advance(Tick now);
  Tick NextDeadline() const;

  // Every chunk is in its place or left out, and nothing is written any more. A transfer without
  // chunks is done at once.
  bool done() const { return missing_ == 0 && asks_.empty(); }
  // Why the plan has failed; "": it has not. Advance() then drops all asks. Until OnDropped() for
  // all of them, bits may still be written.
  const std::string& failure() const { return failure_; }
  size_t left_out() const { return left_out_; }

  struct Progress {
    uint64_t bytes_total = 0;
    uint64_t bytes_done = 0;
    uint64_t bytes_received = 0;  // of good chunks
    uint64_t bytes_repeated = 0;  // of chunks that were wrong, or came after the plan had failed

    Progress& operator+=(const Progress& other) {
      bytes_total += other.bytes_total;
      bytes_done += other.bytes_done;
      bytes_received += other.bytes_received;
      bytes_repeated += other.bytes_repeated;
      return *this;
    }
  };
  const Progress& progress() const { return progress_; }
  // The sources that have sent good chunks, and those that have sent wrong bits.
  std::vector<MemberId> sources_used() const;
  std::vector<MemberId> corrupt() const;

  void CheckInvariants() const;

 private:
  enum class Standing : uint8_t { kUsable, kSuspended, kGone, kRefused, kCorrupt };
  struct Source {
    Standing standing = Standing::kUsable;
    std::string reason;                  // kGone, kRefused, kCorrupt
    uint64_t in_flight = 0;              // bytes that are asked for and not here
    uint32_t asks = 0;                   // open asks that are not dropped
    double bytes_per_us = 0;             // throughput; 0: not known yet
    int64_t latency_min_us = INT64_MAX;  // the shortest time from ask to answer
    Tick heard;                          // when the last piece came
    Tick last_answer;                    // when the last chunk was complete
    // Since when throughput is being measured, and the bytes that came since then.
    Tick measured;
    uint64_t measured_bytes = 0;
    Tick busy_until;
    uint32_t late_in_a_row = 0;  // late answers since the last one in time
    uint64_t bytes_good = 0;     // of good chunks
    size_t heir = 0;             // number of chunks that have this source as Chunk::heir
  };
  struct Chunk {
    ChunkToFetch what;
    bool here = false;  // good bits are in its place
    bool left_out = false;
    std::vector<MemberId> changed_at;
    AskId ask;      // the open ask, which may be dropped; 0: none
    MemberId heir;  // the source to ask next, after the ask was dropped; 0: any
  };
  struct Ask {
    MemberId source;
    size_t chunk = 0;
    Tick asked;
    uint32_t came = 0;     // bytes reported with OnPiece()
    bool late = false;     // counted in late_in_a_row
    bool dropped = false;  // OnDropped() is still to come
    bool told = false;     // Advance() has given DropAsk
  };

  bool Usable(const Source& source, Tick now) const;
  // Returns the shortest time from ask to answer; 0: the source has answered nothing yet.
  static int64_t LatencyOf(const Source& source);
  uint64_t WindowOf(const Source& source) const;
  bool HasRoom(const Source& source, uint64_t bytes) const;
  static double TimeFor(const Source& source, uint64_t bytes);
  // Returns in how many us all that was asked of the source, and `bytes` more, would be here.
  double FinishOf(const Source& source, uint64_t bytes) const;
  // Returns the best source with room in its window; 0: there is none. The best source is the one
  // that would deliver the chunk first. If the chunk is late at source `late`, the best is another
  // source: among those with the fewest late answers in a row, the one that was heard last.
  MemberId ChooseSource(const Chunk& chunk, MemberId late, Tick now) const;
  Tick LateAt(const Ask& ask) const;
  static void Hear(Source* source, uint32_t bytes, Tick now);
  static void Measure(Source* source);
  void Forgo(MemberId source, Standing standing, const std::string& reason);
  void AskFor(size_t index, MemberId source, Tick now, std::vector<TransferAction>* out);
  static bool ChangedAt(const Chunk& chunk, MemberId source);
  void LeaveOut();
  void AskElsewhere(Tick now);
  void TellDrops(std::vector<TransferAction>* out);
  void Help(Tick now);
  // Ends an ask that has brought nothing; its chunk is asked for again. Returns the source, or 0 if
  // the ask had ended already or was dropped.
  MemberId GiveBack(AskId id);
  // Ends an ask that was answered.
  void Close(AskId id);
  // Takes an ask out of the window of its source.
  void Count(const Ask& ask);
  void Drop(AskId id, MemberId heir = {});
  void SetHeir(size_t index, MemberId heir);
  void OnChunkOfDropped(AskId id, bool good);
  void DropAll(MemberId source);
  void Requeue(size_t index);
  void Arrived(const Ask& ask);
  void FailIfHopeless(Tick now);

  const TransferOptions options_;
  std::vector<Chunk> chunks_;
  std::set<size_t> todo_;  // chunks that are neither here nor asked for
  std::map<MemberId, Source> sources_;
  std::map<AskId, Ask> asks_;
  uint64_t last_ask_ = 0;
  size_t missing_ = 0;        // chunks that are neither here nor left out
  size_t left_out_ = 0;       // chunks that have changed at all sources
  std::set<size_t> changed_;  // chunks that have changed at some source
  Tick last_news_;            // when something came last
  std::string failure_;
  Progress progress_;
};

}  // namespace longhaul::peerd
