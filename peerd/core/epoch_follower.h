// Follows the epochs of one group at this peer: prepares them, answers the coordinator, commits
// them. Also notes which links broke.
//
//   following --(PrepareEpoch)--> preparing: links are opened
//   preparing --(links up, ops frozen if it freezes)--> answered EpochReady
//   preparing --(some link cannot be built)--> answered EpochFailed
//   preparing, answered --(PrepareEpoch of a higher number)--> preparing that epoch
//   answered EpochReady --(CommitEpoch)--> following
//   preparing, answered --(AbortEpoch, unless it freezes)--> following
//
// A message that makes no sense is ignored, with a log line: the coordinator repeats what matters.
// Plain state machine: no clock, no thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

class EpochFollower {
 public:
  EpochFollower(GroupKey group, PeerId self);
  EpochFollower(const EpochFollower&) = default;
  EpochFollower& operator=(const EpochFollower&) = delete;

  const EpochHistory& history() const { return history_; }
  bool preparing() const { return prepared_.has_value(); }
  // nullptr: there is no preparation.
  const control::PrepareEpoch* prepared() const {
    return prepared_ ? &prepared_->message : nullptr;
  }
  // True if an epoch that freezes is prepared.
  bool freezing() const { return prepared_ && prepared_->message.freeze; }
  // The peers of the prepared epoch; empty if there is none.
  std::set<PeerId> PreparedPeers() const;
  // The other peers of the committed and of the prepared epoch.
  std::set<PeerId> OtherPeers() const;

  // Returns true if this starts a preparation; then the links are asked for. If this preparation is
  // known, only sends its answer again, if it has one.
  bool Prepare(const control::PrepareEpoch& message, uint32_t detect_ms, Tick now,
               std::vector<Action>* out);
  // Returns true if the epoch is in force now: it is the newest of the history.
  bool Commit(const control::CommitEpoch& message, Tick now, std::vector<Action>* out);
  // Returns true if the preparation is dropped.
  bool Abort(const control::AbortEpoch& message, std::vector<Action>* out);

  void LinkUp(PeerId peer);
  struct WhyLost {
    std::string reason;
    uint32_t silent_ms = 0;
    LH_FIELDS(WhyLost, LH_FIELD(reason), LH_FIELD(silent_ms));
  };
  // `was_up`: there was a LinkUp since the last LinkDown.
  void LinkDown(PeerId peer, bool was_up, const WhyLost& why, std::vector<Action>* out);
  // Peers of the committed epoch whose frames may be missing: the link to them broke after the
  // commit, or between LinkUp in the preparation and the commit.
  std::set<PeerId> LostPeers() const;

  // True if all links are up and there is no answer yet: only the reports on ops are missing, and
  // only if the epoch freezes.
  bool WantsReady() const;
  // Sends EpochReady. WantsReady() must be true.
  void AnswerReady(std::vector<control::OpReport> ops, std::vector<Action>* out);
  // Sends EpochFailed if no link is still being built, and some link could not be built.
  void FailIfDue(Tick now, std::vector<Action>* out);
  Tick NextDeadline() const;

  void ForgetMembersBefore(Epoch epoch) { history_.ForgetMembersBefore(epoch); }

  // Sends again what the coordinator may not have received: the answer, and links that broke.
  void Resend(std::vector<Action>* out) const;
  // Forgets all committed epochs, because no local member is admitted any more. A preparation goes
  // on.
  void Reset();
  // Forgets the preparation: the coordinator knows no local member, so the epoch contains none.
  void Forget(std::vector<Action>* out);

  void CheckInvariants() const;
  LH_STATE(EpochFollower, LH_FIELD(group_, rule::Aside{}), LH_FIELD(self_, rule::Aside{}),
           LH_FIELD(history_), LH_FIELD(prepared_), LH_FIELD(lost_), LH_FIELD(reported_));

 private:
  enum class LinkState : uint8_t { kWanted, kUp, kFailed, kLost };
  struct WantedLink {
    LinkState state = LinkState::kWanted;
    std::string reason;  // kFailed
    LH_FIELDS(WantedLink, LH_FIELD(state), LH_FIELD(reason));
  };
  enum class Answer : uint8_t { kNone, kReady, kFailed };
  struct Prepared {
    control::PrepareEpoch message;
    EpochRecord record;
    std::map<PeerId, WantedLink> links;
    // The links to these peers go another way than before: now through a relay and before straight,
    // or the reverse, or through another relay. The end of such an old link is not a loss.
    std::set<PeerId> relinked;
    Tick begun;
    Tick deadline;  // by then the driver has given up on links that are not up
    Answer answer = Answer::kNone;
    std::vector<control::OpReport> ops;             // in EpochReady
    std::vector<control::Unreachable> unreachable;  // in EpochFailed; later links do not change it
    LH_FIELDS(Prepared, LH_FIELD(message), LH_FIELD(record, rule::Aside{}), LH_FIELD(links),
              LH_FIELD(relinked), LH_FIELD(begun, rule::Aside{}), LH_FIELD(deadline),
              LH_FIELD(answer), LH_FIELD(ops), LH_FIELD(unreachable));
  };

  // Returns why this peer cannot prepare the epoch, or "".
  std::string ProblemWith(const control::PrepareEpoch& message) const;
  Epoch Newest() const;
  // True for another peer of the committed epoch.
  bool InCommitted(PeerId peer) const;
  void ReportLost(PeerId peer, const WhyLost& why, std::vector<Action>* out);
  void SendAnswer(std::vector<Action>* out) const;

  const GroupKey group_;
  const PeerId self_;
  EpochHistory history_;
  std::optional<Prepared> prepared_;
  std::map<PeerId, WhyLost> lost_;      // of LostPeers()
  std::map<PeerId, WhyLost> reported_;  // LinkLost was sent, and named the newest epoch
};

}  // namespace longhaul::peerd
