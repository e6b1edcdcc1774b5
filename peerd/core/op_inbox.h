// The frames of other peers that wait for something here, and the peers whose frames count.
//
//   early      frames of attempts that have not begun here; they wait for the commit
//   unmatched  READYs of the attempt in force that no op here has met; they wait for the op
//
// A peer is *lost* in an attempt if frames to or from it may be missing: its frames are ignored
// until the next attempt.
//
// What a peer can make this table keep is bounded. The frame that goes beyond is not kept, and the
// caller has to break the peer's link. Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/op_state.h"

namespace longhaul::peerd {

// Returns what is wrong with the input or the result that a READY carries, whatever op it meets;
// or "".
std::string PayloadProblem(const PeerReady& ready);

class OpInbox {
 public:
  using Frame = std::variant<PeerReady, PeerDone>;

  // From now on frames are taken from the peers of the newest epoch of the history and from
  // `peers`, those of the prepared epoch. Waiting frames of all other peers are forgotten.
  void Expect(std::set<PeerId> peers, const EpochHistory& history);
  bool Expects(PeerId peer, const EpochHistory& history) const;
  void Lose(PeerId peer, Epoch attempt);
  bool Lost(PeerId peer, Epoch attempt) const;

  // Each returns why the frame cannot be kept, or "".
  std::string KeepEarly(const PeerDone& done);
  std::string KeepEarly(const PeerReady& ready);
  // A refusal too many takes the place of one of an older step.
  std::string KeepUnmatched(const PeerReady& ready);
  // The oldest unmatched READY of the peer for an op of this key, or nullptr.
  const PeerReady* Unmatched(PeerId peer, const OpKey& key) const;
  // Unmatched() must not be nullptr.
  PeerReady TakeUnmatched(PeerId peer, const OpKey& key);
  // The oldest later boundary at which the peer has announced an op of this tag and set that no op
  // here has met; 0: none.
  Epoch LaterCall(PeerId peer, const OpKey& key) const;
  // Forgets the unmatched READYs of older boundaries, except those that `wanted` says.
  void ForgetBefore(Epoch boundary, const std::function<bool(const OpKey&)>& wanted);

  // The attempt begins: what is unmatched belonged to an older one.
  void BeginAttempt(Epoch attempt);
  // The early frames, those of one peer in order of arrival. Some may be early still.
  std::vector<Frame> TakeEarly();
  // Begins anew, with an empty history. Early frames from the peers of a prepared epoch are kept.
  void Reset(const EpochHistory& history);

  void CheckInvariants() const;
  LH_STATE(OpInbox, LH_FIELD(unmatched_), LH_FIELD(early_), LH_FIELD(lost_), LH_FIELD(expected_));

 private:
  // Of one peer.
  struct Waiting {
    std::map<OpKey, std::deque<PeerReady>> by_key;
    size_t count = 0;
    uint64_t bytes = 0;  // of larger inputs and results
    LH_FIELDS(Waiting, LH_FIELD(by_key), LH_FIELD(count), LH_FIELD(bytes));
  };
  std::map<PeerId, Waiting> unmatched_;
  std::map<PeerId, std::vector<Frame>> early_;
  std::map<PeerId, Epoch> lost_;  // the last attempt for which Lost() is true
  std::set<PeerId> expected_;     // the peers of the prepared epoch
};

}  // namespace longhaul::peerd
