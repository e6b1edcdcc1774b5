// The pending members of a group: whether the members' peers reach their peers, and which of them
// the next boundary may admit.
//
// The members' peers try a newcomer's data port while the newcomer is pending (trials.h). If an
// unreachable newcomer were admitted without a trial, all members would wait for it. An address
// that was not reached is tried again after a pause (pauses.h).
//
// Plain value: no clock, no thread.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/pauses.h"
#include "coordinator/core/records.h"
#include "coordinator/core/trials.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

class Newcomers {
 public:
  explicit Newcomers(uint32_t detect_ms) : detect_us_(Millis(detect_ms)), pauses_(detect_ms) {}

  // ---- trials

  // A peer has tried a newcomer's data port.
  void Answer(PeerId from, const control::PeerTried& tried);
  // Ends the trials that are decided by now.
  std::vector<Trials::Ended> End(const EpochState& epochs, Tick now);
  // What to tell a newcomer that its trial did not reach, and that is to be refused. nullopt: it
  // stays pending and is tried again later, because other newcomers may become relays for it.
  std::optional<std::string> RefusalAfter(const Trials::Ended& trial, const EpochState& epochs,
                                          Tick now);
  // The text for a newcomer that is refused: `reason`, and what to do about it. Its address is not
  // tried again for a while. `held`: the group has waited for the newcomer.
  std::string Refusal(const PeerRecord& newcomer, const std::string& reason, bool held, Tick now);
  // Begins trials of the newcomers that need one. `asked`: as Triers().
  void Try(const EpochState& epochs, const std::set<PeerId>& asked, const GroupStep& step);
  // Ends the pauses of an address whose newcomer was admitted.
  void Admitted(const PeerRecord& peer);
  // Newcomers were admitted. The next trials ask their peers, too.
  void Restart() { trials_.Restart(); }
  // The peer has another address.
  void Forget(PeerId newcomer) { trials_.Forget(newcomer); }
  void ForgetStrangers(const GroupRecord& group);
  // When a trial's time is up, or a pause is over.
  Tick NextDeadline() const;

  // ---- questions

  // Whether members have reached the peer's data port, or the peer needs no trial.
  bool Reached(PeerId peer, const GroupRecord& group) const;
  // Pending members that the next boundary may admit.
  std::set<MemberId> Admissible(const EpochState& epochs, const PeerDirectory& peers) const;
  // Those of them that the open preparation does not admit.
  std::set<MemberId> Waiting(const EpochState& epochs, const PeerDirectory& peers) const;
  // The members that a preparation admits into a group without admitted members. With an assembly:
  // as many as it waits for, or none.
  std::set<MemberId> Founders(const EpochState& epochs, const PeerDirectory& peers) const;
  // How many pending members the next boundary may admit. PendingCount tells members this number,
  // so that they come to a boundary for these only.
  uint32_t CountComing(const GroupRecord& group) const;
  // The peers of pending members that are not tried yet because of a pause.
  std::vector<PeerId> Pausing(const EpochState& epochs, const PeerDirectory& peers) const;

  LH_STATE(Newcomers, LH_FIELD(detect_us_, rule::Aside{}), LH_FIELD(trials_), LH_FIELD(pauses_),
           LH_FIELD(pause_over_));

 private:
  bool MayAdmit(const MemberRecord& member, const GroupRecord& group) const;
  // The peers of pending members that need a trial, now or after their pause.
  std::set<PeerId> Untried(const EpochState& epochs, const PeerDirectory& peers) const;

  int64_t detect_us_;
  Trials trials_;
  Pauses pauses_;
  Tick pause_over_ = kNever;  // when the first pause of an untried peer is over
};

// The peers that try newcomers: at most kTriersMax of the members' peers that were heard in the
// last `heard_us`, spread over the ring.
std::set<PeerId> Triers(const EpochState& epochs, const PeerDirectory& peers, int64_t heard_us);

}  // namespace longhaul::coordinator
