// What peers report of their links to each other, and what it is worth.
//
// A report says that the reporter lost its link to a suspect. It is used twice:
//   accusation  speaks against the suspect: an accused peer that the
//   coordinator does not hear
//               either is dead. It stands until the reporter says that all its
//               links are up.
//   loss        speaks against the link: if its grace ends and nobody turned
//   out to be dead, the
//               link is to be built again, or to be routed around.
// A pair of peers that cannot keep a link is a *blocked pair*: its link goes
// through a relay until the straight one is tried again. The pairs themselves
// stand in the group's record; here are the times, and relays that failed.
//
// Plain value: no clock, no thread. It knows nothing of members, epochs in
// force or preparations: the group asks, and decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// All times of suspicion. The first ones are shares of detect_ms.
//
//   what                              from        until
//   grace of a loss                   report      the link is to be repaired
//     ... whose suspect is not heard  report      the same: what a short outage swallowed comes
//         here either                             again up to twice as late
//   doubt of a silence                report      the accusation counts; shorter, as the grace, if
//                                                 fewer than two others would report the silence
//   a peer is heard of late           last word   it is not a witness any more
inline constexpr int64_t kGraceShare = 10;          // detect_ms / 10
inline constexpr int64_t kUnheardGraceShare = 5;    // detect_ms / 5
inline constexpr int64_t kDoubtShare = 2;           // detect_ms / 2
inline constexpr int64_t kHeardOfLate[2] = {2, 3};  // detect_ms * 2 / 3
// A pair that lost its link more often than this, each time within a minute of
// the time before, is routed around rather than repaired.
inline constexpr uint32_t kStrikesMax = 3;
inline constexpr int64_t kStrikesForgotten = Seconds(60);
// A blocked pair is tried again with the first freezing preparation that comes
// so much later. One that fell silent after so much less, four times as long
// each time.
inline constexpr int64_t kBlockedRetry = Seconds(600);
inline constexpr int64_t kSilentRetry = Seconds(30);
inline constexpr int64_t kSilencesForgotten = 2 * kBlockedRetry;

// The first report of what the next freeze repairs.
struct Fault {
  std::string cause;
  std::string detector;
  uint32_t detect_ms = 0;
  Tick since;
  PeerId of = PeerId();  // the peer that was reported, if one was
};

inline void AddTo(const Fault &fault, Digester *digest) {
  digest->Add(fault.cause).Add(fault.detector).Add(uint64_t{fault.detect_ms});
  digest->Add(fault.since).Add(fault.of);
}

// Peers through which the link of a pair could not be built or kept.
using FailedRelays = std::map<control::BlockedPair, std::set<PeerId>>;

// The reporter, and the suspect.
using LostLink = std::pair<PeerId, PeerId>;

class Suspicion {
 public:
  explicit Suspicion(uint32_t detect_ms) : detect_us_(Millis(detect_ms)) {}

  // ---- reports

  struct Evidence {
    uint32_t silent_ms = 0;  // of the report; 0: the link broke
    bool unheard = false;    // the suspect is silent on its stream, too
    size_t witnesses = 0;    // that would report the suspect silent if it was dead
  };
  struct Loss {
    Tick due;  // the end of its grace
    Epoch epoch;
    std::string reason;
    Fault fault;
  };

  // How long a peer may be unheard and still be a witness.
  int64_t heard_of_late_us() const { return detect_us_ * kHeardOfLate[0] / kHeardOfLate[1]; }
  // The earliest accusation of a reporter counts.
  void Accuse(const LostLink &link, const Evidence &evidence, Tick now);
  // `loss` without `due`. False: it is known.
  bool Lose(const LostLink &link, const Evidence &evidence, Loss loss, Tick now);
  // All links of the reporter stand in this epoch: what it said of older ones
  // is over.
  void Absolve(PeerId reporter, Epoch epoch);
  // A freeze makes up for these.
  void ForgetLosses(const std::function<bool(const LostLink &, const Loss &)> &made_up) {
    std::erase_if(losses_, [&](const auto &e) { return made_up(e.first, e.second); });
  }
  void ForgetLoss(const LostLink &link) { losses_.erase(link); }

  const std::map<LostLink, Loss> &losses() const { return losses_; }
  std::vector<LostLink> LossesDue(Tick now) const;
  std::optional<Loss> RemoveLoss(const LostLink &link);
  // The accusation stands, and counts by `at`.
  bool Accuses(const LostLink &link, Tick at) const;
  // Suspects of accusations that have come to count; each accusation is told
  // once.
  std::vector<PeerId> NewlyAccused(Tick now);

  // ---- blocked pairs

  // Known from the store: its time counts from Start().
  void Restore(const control::BlockedPair &pair) { retries_[pair] = {kNever, kBlockedRetry}; }
  void Start(Tick now);
  // False: it was blocked before; its time starts again.
  bool Block(const control::BlockedPair &pair, int64_t retry_us, Tick now);
  // The link of the pair was lost, and neither of them is dead.
  void Strike(const control::BlockedPair &pair, Tick now);
  bool StrikesTooOften(const control::BlockedPair &pair) const;
  // Not that relay any more, for as long as the pair is blocked.
  void FailRelay(const control::BlockedPair &pair, PeerId relay);
  FailedRelays failed_relays() const;
  // When a pair that fell silent is tried again; longer each time that it is
  // asked for.
  int64_t NextSilentRetry(const control::BlockedPair &pair);
  // To be tried with the next freeze, whenever that is: the pair; all pairs of
  // the peer.
  void TryAgain(const control::BlockedPair &pair);
  void TryAgain(PeerId peer);
  bool TryDue(const control::BlockedPair &pair, Tick now) const;
  // It was blocked before that time, and is not to be tried again already.
  bool BlockedBefore(const control::BlockedPair &pair, Tick when) const;
  bool Knows(const control::BlockedPair &pair) const { return retries_.contains(pair); }
  size_t CountBlocked() const { return retries_.size(); }

  // ---- both

  // What is said of peers that are not there (any more), and of pairs that are
  // not blocked.
  void ForgetReportsOf(const std::function<bool(PeerId)> &stranger);
  void ForgetPairsOf(const std::function<bool(PeerId)> &stranger,
                     const std::function<bool(const control::BlockedPair &)> &blocked);
  Tick NextDeadline() const;
  // The coordinator itself was held up for so long.
  void Postpone(int64_t us);
  void AddTo(Digester *digest) const;

 private:
  // How often a pair lost its link of late.
  struct Strikes {
    uint32_t count = 0;
    uint32_t silences = 0;  // times that it was blocked since it fell silent
    Tick last;
  };
  struct Retry {
    Tick since;
    int64_t after_us = 0;
    std::set<PeerId> failed_relays = {};
  };
  int64_t Grace(const Evidence &evidence) const {
    return detect_us_ / (evidence.unheard ? kUnheardGraceShare : kGraceShare);
  }

  int64_t detect_us_;
  std::map<LostLink, Loss> losses_;
  // From when on each counts. Long ago: it does, and NewlyAccused() has told.
  std::map<LostLink, Tick> accusations_;
  std::map<control::BlockedPair, Strikes> strikes_;
  std::map<control::BlockedPair, Retry> retries_;  // of each blocked pair
};

}  // namespace longhaul::coordinator
