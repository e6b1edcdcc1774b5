// Trials: whether the members' peers reach a newcomer's data port. The peers try the port before
// the newcomer is admitted. Nobody waits meanwhile, so an unreachable newcomer costs the group
// nothing.
//
//   unknown --(Begin)--> tried --(not TooFewReach)--> reached
//   tried --(TooFewReach)--> refused: unknown again
//
// A newcomer is refused as soon as the missing answers cannot change the result. A newcomer passes
// when all peers that were asked have answered; its links to peers that do not reach it go through
// a relay. A peer that has not answered when the trial's time is up is not counted. If no peer has
// answered, the newcomer passes, and the preparation of its epoch shows whether links can be built.
//
// Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"

namespace longhaul::coordinator {

// The most peers that try a newcomer.
inline constexpr size_t kTriersMax = 8;
// How long a trial waits for answers, in halves of detect_ms. A peer tries for three halves.
inline constexpr int64_t kTrialHalfDetects = 5;

// Whether a newcomer is refused, because `failed` of `asked` peers cannot reach it: all of them, or
// two or more that are at least half of them. If it is not refused, the links of these peers to it
// use a relay.
inline bool TooFewReach(size_t failed, size_t asked) {
  return failed > 0 && (failed >= asked || (failed >= 2 && 2 * failed >= asked));
}

class Trials {
 public:
  bool Reached(PeerId newcomer) const { return reached_.contains(newcomer); }
  bool Running(PeerId newcomer) const { return running_.contains(newcomer); }

  // Begins a trial and returns its number. `asked`: the members' peers that try; not empty.
  uint64_t Begin(PeerId newcomer, const std::set<PeerId>& asked, Tick due);
  // `error` says why the peer `from` cannot reach the newcomer; "": the peer reaches it. An answer
  // to another trial is ignored.
  void Answer(PeerId from, uint64_t trial, PeerId newcomer, const std::string& error);
  struct Ended {
    PeerId newcomer;
    bool reached = false;
    std::map<PeerId, std::string> errors;  // by peer that cannot reach the newcomer
    size_t asked = 0;
  };
  // Ends the trials that are decided by now.
  std::vector<Ended> End(Tick now);

  // Ends running trials without a result. The next trials ask peers of new members, too.
  void Restart() { running_.clear(); }
  void Forget(PeerId newcomer);
  void ForgetIf(const std::function<bool(PeerId)>& stranger);

  // When the first trial's time is up.
  Tick NextDeadline() const;

  LH_STATE(Trials, LH_FIELD(last_), LH_FIELD(running_), LH_FIELD(reached_));

 private:
  struct Trial {
    uint64_t number = 0;
    Tick due;
    std::map<PeerId, std::optional<std::string>> answers;  // one for each peer that was asked
    LH_FIELDS(Trial, LH_FIELD(number), LH_FIELD(due), LH_FIELD(answers));
    // Whether the newcomer counts as reached; nullopt: that is open.
    std::optional<bool> Reached(Tick now) const;
  };

  uint64_t last_ = 0;
  std::map<PeerId, Trial> running_;
  std::set<PeerId> reached_;
};

}  // namespace longhaul::coordinator
