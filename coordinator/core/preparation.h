// A preparation: a group's attempt to agree on its next epoch. Holds the peers that are asked, and
// what each has answered.
//
// Plain values and functions on them. The group (group.h) decides what is prepared, and when it is
// committed.
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
#include "coordinator/core/peer_directory.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// Set if a message breaks the protocol: what is wrong with it. Such a message has changed nothing.
using Violation = std::optional<std::string>;

// How many detect_ms a peer has to answer. It gives up building a link after four detect_ms.
inline constexpr int64_t kAnswerDetects = 6;

// What one peer has answered. A later answer replaces an earlier one.
struct Answer {
  Tick due = kNever;  // the answer's deadline; set when PrepareEpoch is first sent to the peer
  bool ready = false;
  bool failed = false;
  std::vector<control::OpReport> ops;
  std::map<PeerId, std::string> unreachable;
  bool answered() const { return ready || failed; }
  LH_FIELDS(Answer, LH_FIELD(due), LH_FIELD(ready), LH_FIELD(failed), LH_FIELD(ops),
            LH_FIELD(unreachable));
};

struct Preparation {
  Epoch epoch;
  uint64_t id = 0;  // PrepareEpoch::preparation
  bool freeze = false;
  std::set<MemberId> survivors;  // admitted members that stay
  std::set<MemberId> joiners;
  std::set<MemberId> raised;  // survivors that contribute from this epoch on
  bool reorders = false;      // for a better ring or new link costs, and for nothing else
  bool AtBoundary() const { return !joiners.empty() || !raised.empty() || reorders; }
  std::map<PeerId, Answer> answers;  // exactly the peers of survivors and joiners
  std::vector<PeerId> ring;          // the same peers, in ring order
  control::BlockedPairs blocked;     // as in PrepareEpoch
  control::LinkCost cost;            // as in PrepareEpoch
  // A preparation and those that it supersedes without a pause are a series. These three are about
  // the whole series.
  Tick begun;             // when the first preparation began
  uint32_t rebuilds = 0;  // how many links were lost
  bool widened = false;   // further pending members were taken in, because they can be relays
  std::string cause;
  std::string changed;  // why it can no longer be committed; "": it can
  LH_FIELDS(Preparation, LH_FIELD(epoch), LH_FIELD(id), LH_FIELD(freeze), LH_FIELD(survivors),
            LH_FIELD(joiners), LH_FIELD(raised), LH_FIELD(reorders), LH_FIELD(answers),
            LH_FIELD(ring), LH_FIELD(blocked), LH_FIELD(cost), LH_FIELD(begun), LH_FIELD(rebuilds),
            LH_FIELD(widened), LH_FIELD(cause), LH_FIELD(changed));
};

// Notes that the peer is ready. Returns false, and changes nothing, if the answer is for another
// preparation or the peer was not asked.
bool NoteReady(PeerId peer, const control::EpochReady& ready, Preparation* preparation);
Violation NoteFailed(PeerId peer, const control::EpochFailed& failed, Preparation* preparation);

// The message for the peers of a preparation.
control::PrepareEpoch MessageOf(const Preparation& preparation, const GroupRecord& record,
                                const std::string& token);
// Changes the record when the preparation is committed: removes the members that depart, admits the
// joiners, and puts them before the members that stay pending.
void AdoptEpoch(const Preparation& done, GroupRecord* record);

// The peers that are not ready, as text; "" if every peer is ready.
std::string WaitingForAnswers(const Preparation& preparation, const PeerDirectory& directory);
// The peers that have not answered in time.
std::vector<PeerId> Silent(const Preparation& preparation, Tick now);
// The earliest deadline of the peers that have not answered; kNever: there is none.
Tick NextDeadline(const Preparation& preparation);

void CheckInvariants(const Preparation& preparation, const GroupRecord& record,
                     const PeerDirectory& directory);

}  // namespace longhaul::coordinator
