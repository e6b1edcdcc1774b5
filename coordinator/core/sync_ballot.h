// The syncs of one group: who has offered which state, who fetches, when all have the same
// (docs/adr/0014-shared-state.md).
//
//   collecting --(every member of the electorate has offered)--> elected (election.h)
//   collecting --(all that have not offered stand at a step boundary)--> refused
//   elected --(nobody is)--> refused
//   elected --(nobody is, but somebody may be the next time)--> failed
//   elected --(nobody fetches)--> committed
//   elected --(somebody does)--> fetching
//   fetching --(FetchDone OK of each)--> committed
//   fetching --(a FetchDone that is not OK | nobody is left who has it)--> failed
//
// All that have offered end together. Those that the election refuses are told so with the commit,
// and by one transaction: if they went on before it, a coordinator that restarts would wait for
// offers of theirs, while they wait for the others elsewhere. For the same reason the number of a
// refused offer is made durable like that of a committed one. A sync that failed leaves nothing
// behind: all vote again, the refused ones too.
//
// Nothing else of this is in the store: peers offer again, what they have then, when the
// coordinator is another one.
//
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
#include "coordinator/core/election.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

struct SyncOutput {
  std::vector<control::SyncResult> results;  // each for the peer of its member
  std::vector<EventRecord> notices;          // group and epoch are for the caller to fill in
};

class SyncBallot {
 public:
  // An offer that came with a vote: it counts from Release() on.
  void Hold(MemberId member, const control::SyncOffer& offer) { held_[member] = offer; }
  void Release(MemberId member, const GroupRecord& record, Tick now, SyncOutput* out);
  // Of an admitted member that stays. A repeated one is answered again.
  void Offer(MemberId member, const control::SyncOffer& offer, const GroupRecord& record, Tick now,
             SyncOutput* out);
  void FetchDone(const control::FetchDone& done, SyncOutput* out);
  // The member is gone, or is about to.
  void Leave(MemberId member);
  void Clear() { *this = SyncBallot(); }
  void Postpone(int64_t us);

  // Decides and applies. `electorate`: the admitted members that stay and count; `at_boundary`: who
  // has voted. A commit changes the state and its members' `syncs` of `*record`.
  void Advance(const std::set<MemberId>& electorate, const std::set<MemberId>& at_boundary,
               GroupRecord* record, Tick now, SyncOutput* out);

  // What the sync waits for, in words; "" if none is open.
  std::string WaitingFor(const std::set<MemberId>& electorate) const;
  // Since when the offers that are in wait for the others; kNever: none waits. An offer of a member
  // that was refused last does not count: the others may not be about to sync.
  Tick first_offer() const { return first_offer_; }
  // Others wait for an offer of this member.
  bool Awaits(MemberId member) const;
  // The member waits for the end of a sync.
  bool InSync(MemberId member) const;
  // When the last one ended, however. Tick(): none has.
  Tick last_end() const { return last_end_; }

  // `voters`: the electorate, and who may have an offer held.
  void CheckInvariants(const std::set<MemberId>& voters,
                       const std::set<MemberId>& electorate) const;
  void AddTo(Digester* digest) const;

 private:
  struct Fetching {
    uint64_t revision = 0;
    Hash128 manifest;
    Hash128 state;
    std::map<MemberId, control::SyncOffer> offers;  // of all that are to end with it
    std::map<MemberId, control::SyncResult> refused;
    std::set<MemberId> fetching;
    std::set<MemberId> holders;     // whom others may ask
    bool sources_changed = false;   // since the fetchers were told
    std::vector<MemberId> fetched;  // done, in order
    std::set<MemberId> sources;     // that sent something
    uint64_t bytes = 0;
    Tick begun;
    std::string failed;  // why; "": it has not
  };

  void Elect(GroupRecord* record, Tick now, SyncOutput* out);
  void Commit(Fetching done, GroupRecord* record, Tick now, SyncOutput* out);
  void Fail(const Fetching& f, Tick now, SyncOutput* out);
  void RefuseStalemate(const std::set<MemberId>& missing, GroupRecord* record, Tick now,
                       SyncOutput* out);
  // A repeated offer is answered with it; after a restart without the reason.
  void Refuse(const control::SyncResult& result, GroupRecord* record, SyncOutput* out);
  static control::SyncResult Ended(MemberId member, const control::SyncOffer& offer,
                                   const GroupRecord& record);
  control::SyncResult ResultFor(MemberId member, const GroupRecord& record) const;
  std::set<MemberId> Missing(const std::set<MemberId>& electorate) const;

  std::map<MemberId, control::SyncOffer> held_;
  std::map<MemberId, control::SyncOffer> offers_;
  Tick first_offer_ = kNever;
  Tick last_end_;
  std::optional<Fetching> fetching_;
  std::map<MemberId, control::SyncResult> refused_;  // in their last sync
  // Those whose last sync failed for all. Their offer may be on its way again from before they
  // knew.
  std::map<MemberId, control::SyncResult> aborted_;
};

}  // namespace longhaul::coordinator
