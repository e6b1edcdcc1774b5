// The reports of peers that lost a link, and when each report counts.
//
// A report says that the reporter lost its link to another peer. Each report is used as two things:
//   accusation  Evidence that the other peer is dead. If the coordinator does not hear an accused
//               peer either, the peer is dead. Stands until the reporter says that all its links
//               are up.
//   loss        Evidence that the link is broken. After a grace in which a death would have shown,
//               the link is built again or goes through a relay.
// A pair of peers that cannot keep a link is a *blocked pair*: its link goes through a relay until
// the straight link is tried again. The group's record holds the pairs. This class holds the times
// of the next tries, and the relays that failed.
//
// Plain value: no clock, no thread. It knows nothing of members, epochs or preparations. The group
// (group.h) asks it, and decides.
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

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// All times of reports. The first four are fractions of detect_ms:
//   grace          from the report of a loss until the link is to be repaired
//   unheard grace  the same, if the coordinator does not hear the accused either. It is longer:
//                  TCP repeats what a short outage swallowed, after up to twice the outage.
//   doubt          from the report of a silence until the accusation counts. With fewer than two
//                  witnesses it counts sooner: after the grace or the unheard grace, as applies.
//   heard of late  from the last message of a peer until the peer is no witness any more
inline constexpr int64_t kGraceShare = 10;          // detect_ms / 10
inline constexpr int64_t kUnheardGraceShare = 5;    // detect_ms / 5
inline constexpr int64_t kDoubtShare = 2;           // detect_ms / 2
inline constexpr int64_t kHeardOfLate[2] = {2, 3};  // detect_ms * 2 / 3
// A pair becomes blocked if it loses its link more often than this, each time less than
// kStrikesForgotten after the time before.
inline constexpr uint32_t kStrikesMax = 3;
inline constexpr int64_t kStrikesForgotten = Seconds(60);
// How long a pair stays blocked: the first freezing preparation after that time tries the straight
// link. If the link fell silent, the time is kSilentRetry at first, and four times as long each
// time, up to kBlockedRetry. Without a loss for kSilencesForgotten it is kSilentRetry again.
inline constexpr int64_t kBlockedRetry = Seconds(600);
inline constexpr int64_t kSilentRetry = Seconds(30);
inline constexpr int64_t kSilencesForgotten = 2 * kBlockedRetry;

// A report of a fault that the next freezing epoch repairs. Fields as in FaultRecord.
struct FaultReport {
  std::string cause;
  std::string detector;
  uint32_t detect_ms = 0;
  Tick since;
  PeerId of = PeerId();  // the peer that was reported; 0: none
  LH_FIELDS(FaultReport, LH_FIELD(cause), LH_FIELD(detector), LH_FIELD(detect_ms), LH_FIELD(since),
            LH_FIELD(of));
};

// By blocked pair: the relays through which its link could not be built or kept.
using FailedRelays = std::map<control::BlockedPair, std::set<PeerId>>;

// The reporter, and the peer to which it has no link.
using LinkEnds = std::pair<PeerId, PeerId>;

class LinkReports {
 public:
  explicit LinkReports(uint32_t detect_ms) : detect_us_(Millis(detect_ms)) {}

  // ---- reports

  struct Evidence {
    uint32_t silent_ms = 0;  // as in the report; 0: the link broke
    bool unheard = false;    // the coordinator does not hear the accused, or the link had a relay
    size_t witnesses = 0;    // how many peers would report the accused silent if it were dead
  };
  struct Loss {
    Tick due;  // the end of its grace
    Epoch epoch;
    std::string reason;
    FaultReport fault;
    LH_FIELDS(Loss, LH_FIELD(due), LH_FIELD(epoch), LH_FIELD(reason), LH_FIELD(fault));
  };

  // How long ago a peer may have been heard and still be a witness, in microseconds.
  int64_t heard_of_late_us() const { return detect_us_ * kHeardOfLate[0] / kHeardOfLate[1]; }
  // Notes an accusation. If the reporter has accused that peer before, nothing changes.
  void Accuse(const LinkEnds& link, const Evidence& evidence, Tick now);
  // Notes a loss, and sets its `due`. Returns false, and changes nothing, if the loss is known.
  bool Lose(const LinkEnds& link, const Evidence& evidence, Loss loss, Tick now);
  // The reporter says that all its links of this epoch are up. Drops its accusations, and its
  // losses of older epochs.
  void Absolve(PeerId reporter, Epoch epoch);
  // Drops the losses that a freezing preparation repairs.
  void ForgetLosses(const std::function<bool(const LinkEnds&, const Loss&)>& repaired) {
    std::erase_if(losses_, [&](const auto& e) { return repaired(e.first, e.second); });
  }
  void ForgetLoss(const LinkEnds& link) { losses_.erase(link); }

  const std::map<LinkEnds, Loss>& losses() const { return losses_; }
  // The losses whose grace is over.
  std::vector<LinkEnds> LossesDue(Tick now) const;
  std::optional<Loss> RemoveLoss(const LinkEnds& link);
  // Whether the reporter accuses the other peer, and the accusation counts at `at`.
  bool Accuses(const LinkEnds& link, Tick at) const;
  // Returns the peers accused of silence whose accusation counts by now. Uses each accusation only
  // once.
  std::vector<PeerId> NewlyAccused(Tick now);

  // ---- blocked pairs

  // Adds a blocked pair that the store held. The time until its retry begins with Start().
  void Restore(const control::BlockedPair& pair) {
    retries_[control::MakeBlockedPair(pair.a, pair.b)] = {kNever, kBlockedRetry};
  }
  void Start(Tick now);
  // Blocks a pair for `retry_us` from now. Returns false if the pair was blocked already.
  bool Block(const control::BlockedPair& pair, int64_t retry_us, Tick now);
  // Counts a loss of the pair's link, while neither peer is dead.
  void Strike(const control::BlockedPair& pair, Tick now);
  bool StrikesTooOften(const control::BlockedPair& pair) const;
  // The relay has failed: the pair does not use it again while the pair is blocked.
  void FailRelay(const control::BlockedPair& pair, PeerId relay);
  FailedRelays failed_relays() const;
  // Returns for how long, in microseconds, to block a pair whose link fell silent. Each call counts
  // as one silence.
  int64_t NextSilentRetry(const control::BlockedPair& pair);
  // The next freezing preparation tries the straight link of this pair, or of all pairs of this
  // peer.
  void TryAgain(const control::BlockedPair& pair);
  void TryAgain(PeerId peer);
  bool TryDue(const control::BlockedPair& pair, Tick now) const;
  // Whether the pair has been blocked since before `when`, or TryAgain() was called for it.
  bool BlockedBefore(const control::BlockedPair& pair, Tick when) const;
  bool Knows(const control::BlockedPair& pair) const { return retries_.contains(pair); }
  size_t CountBlocked() const { return retries_.size(); }

  // ---- both

  // ForgetReportsOf() drops accusations by strangers and of strangers. ForgetPairsOf() drops the
  // times of pairs that are not blocked any more, and the strikes of pairs with a stranger.
  void ForgetReportsOf(const std::function<bool(PeerId)>& stranger);
  void ForgetPairsOf(const std::function<bool(PeerId)>& stranger,
                     const std::function<bool(const control::BlockedPair&)>& blocked);
  Tick NextDeadline() const;
  // The coordinator itself was held up for `us`. Moves all deadlines of reports by that time.
  void Postpone(int64_t us);

  LH_STATE(LinkReports, LH_FIELD(detect_us_, rule::Aside{}), LH_FIELD(losses_),
           LH_FIELD(accusations_), LH_FIELD(strikes_), LH_FIELD(retries_));

 private:
  // How often a pair has lost its link recently.
  struct Strikes {
    uint32_t count = 0;
    uint32_t silences = 0;  // how often the pair was blocked because its link fell silent
    Tick last;              // when the last loss was counted
    LH_FIELDS(Strikes, LH_FIELD(count), LH_FIELD(silences), LH_FIELD(last));
  };
  struct Retry {
    Tick since;  // kNever: until Start(); long ago: TryAgain() was called
    int64_t after_us = 0;
    std::set<PeerId> failed_relays = {};
    LH_FIELDS(Retry, LH_FIELD(since), LH_FIELD(after_us), LH_FIELD(failed_relays));
  };
  int64_t Grace(const Evidence& evidence) const {
    return detect_us_ / (evidence.unheard ? kUnheardGraceShare : kGraceShare);
  }

  int64_t detect_us_;
  std::map<LinkEnds, Loss> losses_;
  // When each accusation starts to count. Long ago: it counts, and NewlyAccused() has returned it.
  std::map<LinkEnds, Tick> accusations_;
  std::map<control::BlockedPair, Strikes> strikes_;
  std::map<control::BlockedPair, Retry> retries_;  // one for each blocked pair
};

}  // namespace longhaul::coordinator
