// Which chunk is asked of which source: the plan of one member that fetches a state.
//
//   todo --(AskChunk)--> asked --(arrived, good)--> here
//   asked --(arrived bad | refused)--> todo
//   asked --(its source is gone | late | a faster source has nothing else to do)--> dropped
//   dropped --(OnDropped)--> todo, for that other source first
//
// Each source has a window of bytes that are asked for and not here; it grows with the throughput
// that the source shows, so that fast sources serve more. A source that sent bits that are not what
// they should be, or refused, is asked nothing more.
//
// A source answers in the order in which it was asked, so of what it is asked only the oldest has
// begun to arrive. Nothing of it is late while anything comes from it; whoever helps it takes over
// what it was asked last.
//
// A chunk has one place, and one ask at a time writes there: what is dropped is asked for again
// when nothing writes for it any more, which OnDropped() says.
//
// Plain state machine: no clock, no thread, the same for the same calls.
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

// One ask of one transfer; never reused within it.
using AskId = Id<struct AskIdKind>;

struct ChunkToFetch {
  uint32_t tensor = 0;  // of the manifest
  uint64_t chunk = 0;   // of the tensor
  uint32_t bytes = 0;
  friend bool operator==(const ChunkToFetch&, const ChunkToFetch&) = default;
};

// Ask the source for the chunk; answered with OnChunk(), OnRefused() or OnBusy().
struct AskChunk {
  AskId ask;
  MemberId source;
  ChunkToFetch chunk;
  friend bool operator==(const AskChunk&, const AskChunk&) = default;
};
// What still comes for the ask goes nowhere; answered with OnDropped() when nothing is written for
// it any more.
struct DropAsk {
  AskId ask;
  friend bool operator==(const DropAsk&, const DropAsk&) = default;
};
using TransferAction = std::variant<AskChunk, DropAsk>;

struct TransferOptions {
  // A chunk is not late before; the failure detector's detect_ms.
  int64_t patience_us = Millis(1500);
  // Nothing came from anybody for so long: the transfer has failed.
  int64_t stall_us = Millis(6000);
  // Where no source is left, others may be named until then; false: that is the end at once.
  bool wait_for_sources = false;
  // Of what is asked of one source and not here.
  uint64_t window_bytes_max = uint64_t{64} << 20;
  uint32_t window_asks_max = 512;
};

class TransferPlan {
 public:
  TransferPlan(const std::vector<ChunkToFetch>& chunks, const TransferOptions& options, Tick now);

  // ---- sources. Those that are known already, and have not refused or sent wrong bits, are back.
  void AddSource(MemberId source);
  // Its link is gone, and may come back: it is asked nothing until AddSource().
  void SuspendSource(MemberId source);
  // It is gone, and asked nothing until AddSource().
  void RemoveSource(MemberId source, const std::string& reason);

  // Somebody has news, if nothing else yet: the transfer does not stall now.
  void OnNews(Tick now) { last_news_ = now; }

  // ---- answers; those to asks that are over are ignored.
  // A part of the chunk is here; the rest follows, and OnChunk().
  void OnPiece(AskId ask, uint32_t bytes, Tick now);
  void OnChunk(AskId ask, bool good, Tick now);
  // The source has not got it (any more).
  void OnRefused(AskId ask, const std::string& reason);
  // The source has other bits there by now. A chunk that has changed at all sources is left out.
  void OnChanged(AskId ask);
  // The source serves too many others: it is asked again later.
  void OnBusy(AskId ask, Tick now);
  void OnDropped(AskId ask);

  // What is to be done now, in this order. Also when NextDeadline() has come.
  std::vector<TransferAction> Advance(Tick now);
  Tick NextDeadline() const;

  // Every chunk that is not left out is in its place and nothing writes any more. Empty transfers
  // are done at once.
  bool done() const { return missing_ == 0 && asks_.empty(); }
  // Why it cannot go on; "": it can. What is asked is dropped by the next Advance(); until all of
  // it is, bits may still be written.
  const std::string& failure() const { return failure_; }
  size_t left_out() const { return left_out_; }

  struct Progress {
    uint64_t bytes_total = 0;
    uint64_t bytes_done = 0;
    uint64_t bytes_received = 0;  // good ones
    uint64_t bytes_repeated = 0;  // came again, or were bad

    Progress& operator+=(const Progress& other) {
      bytes_total += other.bytes_total;
      bytes_done += other.bytes_done;
      bytes_received += other.bytes_received;
      bytes_repeated += other.bytes_repeated;
      return *this;
    }
  };
  const Progress& progress() const { return progress_; }
  // Those that have sent something good; those that have sent something bad.
  std::vector<MemberId> sources_used() const;
  std::vector<MemberId> corrupt() const;

  void CheckInvariants() const;

 private:
  enum class Standing : uint8_t { kUsable, kSuspended, kGone, kRefused, kCorrupt };
  struct Source {
    Standing standing = Standing::kUsable;
    std::string reason;                  // kGone, kRefused, kCorrupt
    uint64_t in_flight = 0;              // bytes
    uint32_t asks = 0;                   // open
    double bytes_per_us = 0;             // 0: not known yet
    int64_t latency_min_us = INT64_MAX;  // from ask to answer
    Tick heard;                          // the last piece
    Tick last_answer;
    // What came since then, for the next measurement.
    Tick measured;
    uint64_t measured_bytes = 0;
    Tick busy_until;
    uint32_t late_in_a_row = 0;
    uint64_t bytes_good = 0;
    size_t heir = 0;  // of so many chunks
  };
  struct Chunk {
    ChunkToFetch what;
    bool here = false;  // good bits are in its place
    bool left_out = false;
    std::vector<MemberId> changed_at;
    AskId ask;      // asked, and not over; it may be dropped
    MemberId heir;  // dropped: who is to be asked next
  };
  struct Ask {
    MemberId source;
    size_t chunk = 0;
    Tick asked;
    uint32_t came = 0;     // bytes that OnPiece() has told of
    bool late = false;     // is counted as such
    bool dropped = false;  // OnDropped() is to come
    bool told = false;     // the DropAsk was given out
  };

  bool Usable(const Source& source, Tick now) const;
  // From ask to answer, at best; 0: nothing was answered yet.
  static int64_t LatencyOf(const Source& source);
  uint64_t WindowOf(const Source& source) const;
  bool HasRoom(const Source& source, uint64_t bytes) const;
  static double TimeFor(const Source& source, uint64_t bytes);
  // When what is asked of it would be here, if one more chunk was asked now.
  double FinishOf(const Source& source, uint64_t bytes) const;
  // The best source with room in its window, other than `late`; none: none. With `late`, whose
  // chunk it is, the one that was heard last is best.
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
  // The ask is over and has brought nothing: its chunk is to be asked for again. Its source; none:
  // it was over already.
  MemberId GiveBack(AskId id);
  // The ask is answered.
  void Close(AskId id);
  // Its source is asked for less.
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
  std::set<size_t> todo_;  // neither here nor asked
  std::map<MemberId, Source> sources_;
  std::map<AskId, Ask> asks_;
  uint64_t last_ask_ = 0;
  size_t missing_ = 0;
  size_t left_out_ = 0;
  std::set<size_t> changed_;  // chunks that some source has not got any more
  Tick last_news_;
  std::string failure_;
  Progress progress_;
};

}  // namespace longhaul::peerd
