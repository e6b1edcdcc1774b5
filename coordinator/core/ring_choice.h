// Which ring a group would rather have, and when a better one is looked for.
//
//   a link was measured --(others are, too)--> due --(FallsDue)--> solved
//   elsewhere --(Found)--> better() --(the next boundary)--> Ordered()
//
// A better ring is a wish: it waits for a boundary at which nothing else is to
// be done, and nobody is removed for it. Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

class RingChoice {
 public:
  // `interval_ms`: the ring may change once in that time; 0: never.
  explicit RingChoice(uint32_t interval_ms) : interval_ms_(interval_ms) {}

  // A link between two of its peers was measured, and is another than was
  // thought.
  void Measured(Tick now);
  // When FallsDue() is due; kNever: not before something changes.
  Tick due() const { return due_; }
  // A better ring is to be looked for among so many peers. Says so once.
  // `preparing`: there may soon be another ring.
  bool FallsDue(Tick now, size_t peers, bool preparing);

  // What the search found for the present ring, whose links cost that much.
  // What an operator is to be told; "" if nothing.
  std::string Found(const std::vector<PeerId> &ring, const std::vector<PeerId> &present,
                    const RingScore &score, const RingScore &present_score,
                    const control::LinkCost &cost);
  // The peers in a better order; empty: none is known. The present order: its
  // epoch only tells what the links cost by now.
  const std::vector<PeerId> &better() const { return better_; }
  const std::string &gain() const { return gain_; }
  void Drop() { better_.clear(); }
  // It cannot be had: nobody tries for a while.
  void GiveUp(Tick now);

  // An epoch is in force whose peers were told this.
  void Told(const control::LinkCost &cost) { told_ = cost; }
  // The better ring is that of this epoch.
  void Ordered(Epoch epoch, Tick now);
  // The last epoch that was there to order the ring anew, and what it gained.
  Epoch ordered_epoch() const { return ordered_epoch_; }
  const std::string &ordered_gain() const { return ordered_gain_; }

  void AddTo(Digester *digest) const;

 private:
  void Hold(Tick until);

  uint32_t interval_ms_;
  std::vector<PeerId> better_;
  std::string gain_;
  control::LinkCost told_;  // unknown after a restart
  Tick due_ = kNever;
  Tick not_before_{INT64_MIN / 2};
  Epoch ordered_epoch_;
  std::string ordered_gain_;
};

std::string CostText(const control::LinkCost &cost);

}  // namespace longhaul::coordinator
