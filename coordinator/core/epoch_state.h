// Where a group stands: its record, the preparation of its next epoch, and why that epoch must
// freeze ops. The parts of a group (group.h) share it.
//
// Plain values: no clock, no thread.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/link_reports.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/peer_directory.h"
#include "coordinator/core/preparation.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// A removed member of a cohort: its record before the removal, and the reason.
struct CohortLoss {
  MemberRecord member;
  std::string reason;
};

// What a group answers to an input.
struct GroupOutput {
  std::vector<std::pair<PeerId, control::CoordinatorMessage>> messages;
  std::vector<EventRecord> notices;
  std::vector<CohortLoss> cohort_losses;
};

// What comes with each input to a group: the time, whom the group may ask, and where its answers
// go. Valid until the input's method returns.
struct GroupStep {
  Tick now;
  const PeerDirectory& peers;
  GroupOutput* out;

  void Send(PeerId peer, control::CoordinatorMessage message) const {
    out->messages.emplace_back(peer, std::move(message));
  }
  FaultReport Fault(std::string cause, std::string detector, uint32_t detect_ms = 0,
                    PeerId of = PeerId()) const {
    return {std::move(cause), std::move(detector), detect_ms, now, of};
  }
};

struct EpochState {
  GroupRecord record;
  // The newest epoch number that the store held at the start, or that was prepared since. Numbers
  // above it, up to the record's `highest`, are known from peers only.
  Epoch issued;
  std::optional<Preparation> preparation;
  std::string must_freeze;  // why the next epoch must freeze; "": it need not
  // The first fault that the next freezing epoch repairs. A later one follows from the first, or is
  // repaired with it, so it is not noted.
  std::optional<FaultReport> fault;
  LH_STATE(EpochState, LH_FIELD(record), LH_FIELD(issued), LH_FIELD(preparation),
           LH_FIELD(must_freeze), LH_FIELD(fault));

  MemberRecord* Find(MemberId member) { return FindMember(record, member); }
  const MemberRecord* Find(MemberId member) const { return FindMember(record, member); }
  // The record of a peer of the group.
  const PeerRecord& PeerOf(PeerId peer) const;
  // Peers with admitted members, in ring order.
  std::vector<PeerId> Ring() const { return RingOf(record); }
  bool InForce(PeerId peer) const { return AdmittedPeers(record).contains(peer); }
  // The peers of the members that stay.
  std::set<PeerId> Staying() const { return PeersOf(record, Survivors(record)); }
  // Returns the peers of the next epoch, as far as they are known: those that stay, and those of
  // the newcomers in the open preparation. The order is that of OrderOf().
  std::vector<PeerId> Participants() const;
  // Returns the relay of the two peers' link, as the peers were told last; 0: it has no relay.
  PeerId RelayNow(PeerId x, PeerId y) const;

  void NoteFault(const FaultReport& report) {
    if (!fault) fault = report;
  }
  // The open preparation, if there is one, can no longer be committed.
  void MarkChanged(const std::string& why) {
    if (preparation && preparation->changed.empty()) preparation->changed = why;
  }
  // The next epoch freezes ops.
  void AskForFreeze(const std::string& why, const FaultReport& report);
  // The fault is repaired by an epoch that will not have the members `removed`: forgets the fault,
  // and returns what is remembered of it.
  FaultRecord EndFault(const std::vector<MemberRecord>& removed, Tick now);
  // Compares what an attaching peer says it has prepared with the preparation here. Makes sure that
  // an epoch that the peer has prepared will end: by a commit, by a preparation with a higher
  // number, or by AbortEpoch. `forgotten`: the peer knows epochs that the store does not.
  void Reconcile(PeerId peer, const control::GroupState& said, bool forgotten,
                 const GroupStep& step);
  // The message for a peer of the committed epoch.
  control::CommitEpoch CommitFor(PeerId peer) const;
  // Adds a notice about the group, and returns it.
  EventRecord& Note(std::string kind, MemberId member, PeerId peer, std::string text,
                    const GroupStep& step) const;
};

}  // namespace longhaul::coordinator
