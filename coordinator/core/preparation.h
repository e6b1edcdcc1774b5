// A preparation: a group's try to agree on its next epoch. Who is asked, and
// what each has answered.
//
// Plain values and functions on them. The group decides what is prepared, and
// when it is committed.
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
#include "coordinator/core/peer_directory.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// Set if a message is against the protocol: what is wrong with it. Nothing was
// changed then.
using Violation = std::optional<std::string>;

// How many detect_ms a peer has to answer; it gives its links four.
inline constexpr int64_t kAnswerDetects = 6;

// What one peer of a preparation has answered; the latest answer counts.
struct Answer {
  Tick due = kNever;  // set when PrepareEpoch first went out to an attached peer
  bool ready = false;
  bool failed = false;
  std::vector<control::OpReport> ops;
  std::map<PeerId, std::string> unreachable;
  bool answered() const { return ready || failed; }
};

struct Preparation {
  Epoch epoch;
  uint64_t id = 0;  // PrepareEpoch::preparation
  bool freeze = false;
  std::set<MemberId> survivors;  // admitted before
  std::set<MemberId> joiners;
  std::set<MemberId> raised;  // survivors that contribute from this epoch on
  bool reorders = false;      // to a better ring; it does nothing else then
  bool AtBoundary() const { return !joiners.empty() || !raised.empty() || reorders; }
  std::map<PeerId, Answer> answers;  // exactly the peers of survivors and joiners
  std::vector<PeerId> ring;          // the same peers
  control::BlockedPairs blocked;     // as told to them
  control::LinkCost cost;            // as told to them
  Tick begun;                        // of the first in an unbroken series of preparations
  uint32_t rebuilds = 0;             // lost links in that series
  bool widened = false;              // in that series, by newcomers that waited
  std::string cause;
  std::string changed;  // why it cannot be committed any more; empty: it can
};

// False: the answer is to another preparation, or of a peer that is not asked.
bool NoteReady(PeerId peer, const control::EpochReady &ready, Preparation *preparation);
Violation NoteFailed(PeerId peer, const control::EpochFailed &failed, Preparation *preparation);

// What the peers of a preparation are told.
control::PrepareEpoch MessageOf(const Preparation &preparation, const GroupRecord &record,
                                const std::string &token);
// The record once every peer is ready: who departs is out, newcomers are in,
// the rest waits behind.
void AdoptEpoch(const Preparation &done, GroupRecord *record);

// "" if every peer is ready.
std::string WaitingForAnswers(const Preparation &preparation, const PeerDirectory &directory);
// Peers that have not answered by now.
std::vector<PeerId> Silent(const Preparation &preparation, Tick now);
// When the first of them is.
Tick NextDeadline(const Preparation &preparation);

void CheckInvariants(const Preparation &preparation, const GroupRecord &record,
                     const PeerDirectory &directory);
void AddTo(const Preparation &preparation, Digester *digest);

}  // namespace longhaul::coordinator
