// One group's epochs as this peer follows them: prepared, answered, committed; and links that
// broke.
//
//   following --(PrepareEpoch)--> preparing: links are opened
//   preparing --(links up, ops frozen if it freezes)--> answered EpochReady
//   preparing --(some link cannot be built)--> answered EpochFailed
//   preparing, answered --(PrepareEpoch of a higher number)--> preparing that one
//   answered EpochReady --(CommitEpoch)--> following
//   preparing, answered --(AbortEpoch, unless it freezes)--> following
//
// Whatever makes no sense is left aside with a log line: the coordinator sends again what counts.
// Plain state machine: no clock, no thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/digest.h"
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
  bool preparing() const { return preparation_.has_value(); }
  // nullptr: there is no preparation.
  const control::PrepareEpoch* prepared() const {
    return preparation_ ? &preparation_->message : nullptr;
  }
  // A preparation that freezes stands.
  bool freezing() const { return preparation_ && preparation_->message.freeze; }
  // Of the preparation; empty if there is none.
  std::set<PeerId> PreparedPeers() const;
  // The other peers of the committed and of the prepared epoch.
  std::set<PeerId> OtherPeers() const;

  // True if it starts a preparation: links were asked for. Answers again if it is known and
  // answered.
  bool Prepare(const control::PrepareEpoch& message, uint32_t detect_ms, Tick now,
               std::vector<Action>* out);
  // True if the epoch is in force now: it is the newest of the history.
  bool Commit(const control::CommitEpoch& message, Tick now, std::vector<Action>* out);
  // True if the preparation is gone.
  bool Abort(const control::AbortEpoch& message, std::vector<Action>* out);

  void LinkUp(PeerId peer);
  struct LostLink {
    std::string reason;
    uint32_t silent_ms = 0;
  };
  // `was_up`: LinkUp had been told since the last LinkDown.
  void LinkDown(PeerId peer, bool was_up, const LostLink& why, std::vector<Action>* out);
  // Peers of the committed epoch from whom frames may be missing: the link to them broke since the
  // last commit, or after it was prepared.
  std::set<PeerId> LostPeers() const;

  // Nothing but the state of the ops (if it freezes) is missing for EpochReady.
  bool WantsReady() const;
  // EpochReady. WantsReady() was true.
  void Ready(std::vector<control::OpReport> ops, std::vector<Action>* out);
  // EpochFailed, if that is what it comes to by now.
  void FailIfDue(Tick now, std::vector<Action>* out);
  Tick NextDeadline() const;

  // What the coordinator may not have heard: the answer, and links that broke.
  void Resend(std::vector<Action>* out) const;
  // No local member is admitted any more: back to no epoch. A preparation goes on.
  void Reset();
  // The coordinator knows no local member (any more), so nobody is in the preparation.
  void Forget(std::vector<Action>* out);

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  enum class Link : uint8_t { kWanted, kUp, kFailed, kLost };
  struct WantedLink {
    Link state = Link::kWanted;
    std::string reason;  // kFailed
  };
  enum class Answer : uint8_t { kNone, kReady, kFailed };
  struct Preparation {
    control::PrepareEpoch message;
    EpochRecord record;
    std::map<PeerId, WantedLink> links;
    // The links to these peers go another way than before: through a relay and not straight, the
    // other way round, or through another relay. The end of the old one means nothing.
    std::set<PeerId> relinked;
    Tick begun;
    Tick deadline;  // the driver has given up on a link by then
    Answer answer = Answer::kNone;
    std::vector<control::OpReport> ops;             // of EpochReady
    std::vector<control::Unreachable> unreachable;  // of EpochFailed, whatever links did since
  };

  // Why the message cannot be followed; "" if it can.
  std::string ProblemWith(const control::PrepareEpoch& message) const;
  Epoch Newest() const;
  // Is another peer of the committed epoch.
  bool Committed(PeerId peer) const;
  void ReportLost(PeerId peer, const LostLink& why, std::vector<Action>* out);
  void SendAnswer(std::vector<Action>* out) const;

  const GroupKey group_;
  const PeerId self_;
  EpochHistory history_;
  std::optional<Preparation> preparation_;
  std::map<PeerId, LostLink> lost_;
  std::map<PeerId, LostLink> reported_;  // LinkLost was sent with the newest epoch
};

}  // namespace longhaul::peerd
