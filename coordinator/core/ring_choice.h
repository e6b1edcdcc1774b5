// Decides when a better ring is searched for, and keeps the result until the group uses it.
//
//   Measured() --(a wait, in which other measurements come)--> due
//   due --(FallsDue)--> the owner has the ring problem solved
//   solved --(Found)--> better() --(the next boundary)--> Ordered()
//
// What links cost is compared with what peers were told much more often, because shares of the mesh
// depend on it. If it differs by much, better() is the present ring:
//
//   Measured() --(a second)--> telling_due --(TellingFallsDue, Compare)--> better()
//
// A better ring waits for a boundary at which nothing else is to be done. No member is removed for
// it. Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

class RingChoice {
 public:
  // `interval_ms`: the ring may change once in this time; 0: never.
  explicit RingChoice(uint32_t interval_ms) : interval_ms_(interval_ms) {}

  // The measurement of a link between two peers of the group has changed by more than noise.
  void Measured(Tick now);
  // The time of the next scheduled search; kNever: none is scheduled. Measured() and GiveUp()
  // schedule searches.
  Tick due() const { return due_; }
  // Returns true when it is time to start a search for a better ring order. Returns true once for
  // each scheduled search. `peers`: the number of peers; with two or fewer there is nothing to
  // search. `preparing`: an epoch is being prepared, so the ring may soon change. Then the search
  // is put off.
  bool FallsDue(Tick now, size_t peers, bool preparing);

  // Takes what the search found. `present`: the present ring, whose score is `present_score`;
  // `cost` are the costs of its links. Returns a text for operators; "": there is nothing to tell.
  std::string Found(const std::vector<PeerId>& ring, const std::vector<PeerId>& present,
                    const RingScore& score, const RingScore& present_score,
                    const control::LinkCost& cost);
  // Returns true when it is time to compare what links cost now with what peers were told. Returns
  // true once for each time that it falls due.
  bool TellingFallsDue(Tick now, size_t peers, bool preparing);
  Tick telling_due() const { return telling_due_; }
  // Plans an epoch that tells these costs, if they differ by enough from those told before.
  void Compare(const std::vector<PeerId>& present, const control::LinkCost& cost);

  // The peers in a better order; empty: no better order is known. If it is the present order, a new
  // epoch would only bring new link costs to the peers.
  const std::vector<PeerId>& better() const { return better_; }
  const std::string& gain() const { return gain_; }
  void Drop() { better_.clear(); }
  // The better ring cannot be built. Another search comes after `interval_ms` at the earliest.
  void GiveUp(Tick now);

  // An epoch was committed, and its peers were told these link costs.
  void Told(const control::LinkCost& cost, Tick now);
  const control::LinkCost& told() const { return told_; }
  // The told shares if they are so new that they should stay unless others are clearly better;
  // otherwise nullptr.
  const Shares* NewShares(Tick now) const;
  // The epoch that changed the ring to the better order was committed.
  void Ordered(Epoch epoch, Tick now);
  // The last epoch that brought a better order, and what it gained.
  Epoch ordered_epoch() const { return ordered_epoch_; }
  const std::string& ordered_gain() const { return ordered_gain_; }

  LH_STATE(RingChoice, LH_FIELD(interval_ms_, rule::Aside{}), LH_FIELD(better_), LH_FIELD(gain_),
           LH_FIELD(told_), LH_FIELD(shares_at_), LH_FIELD(due_), LH_FIELD(not_before_),
           LH_FIELD(telling_due_), LH_FIELD(telling_not_before_), LH_FIELD(ordered_epoch_),
           LH_FIELD(ordered_gain_));

 private:
  // No search falls due before `until`.
  void Hold(Tick until);

  uint32_t interval_ms_;
  std::vector<PeerId> better_;
  std::string gain_;
  control::LinkCost told_;         // as of the last Told(); unknown after a restart
  Tick shares_at_{INT64_MIN / 2};  // when told_.shares changed last
  Tick due_ = kNever;
  Tick not_before_{INT64_MIN / 2};
  Tick telling_due_ = kNever;
  Tick telling_not_before_{INT64_MIN / 2};
  Epoch ordered_epoch_;
  std::string ordered_gain_;
};

std::string CostText(const control::LinkCost& cost);

}  // namespace longhaul::coordinator
