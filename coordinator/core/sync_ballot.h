// The syncs of one group, one after another. A SyncBallot collects the offers of the members, holds
// the election (election.h), waits for the members that fetch, and ends the sync
// (docs/life_of_a_sync.md).
//
// Words: the electorate are the admitted members that stay and contribute. A holder is a member
// that has the elected state. A sync ends for all its members at the same time.
//
//   collecting --(every member of the electorate has offered)--> election
//   collecting --(every member without an offer stands at a step boundary)--> refused
//   election --(every offer is refused)--> refused
//   election --(no member with a complete state may win, but a member that still fetches its state
//               may win a later sync: Election.again)--> failed
//   election --(a state is elected, and every member has it)--> committed
//   election --(a state is elected, and some members must fetch it)--> fetching
//   fetching --(each of these members has sent a good FetchDone)--> committed
//   fetching --(a FetchDone is not OK, or the last holder is gone)--> failed
//
// committed: the group's record gets the new state, and the members go on.
// refused: a member gets an error, and goes on without the sync. The number of its offer becomes
//   durable, as in a commit.
// failed: every member, also a refused one, is told to offer again. Nothing is stored.
//
// A member that the election refuses is told so at the commit and not before, in the same
// transaction. If the member went on earlier and the coordinator restarted, the coordinator would
// wait for an offer of that member, while that member waited for the others elsewhere.
//
// The store holds nothing else about a sync in progress. After a restart of the coordinator the
// members offer again what they have then.
//
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
#include "coordinator/core/election.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

struct SyncOutput {
  std::vector<control::SyncResult> results;  // to send to the peers of the members
  std::vector<EventRecord> notices;          // the caller fills in group and epoch
};

class SyncBallot {
 public:
  // Keeps an offer that came with a vote. It takes effect with Release(), which the caller calls
  // when it answers the vote.
  void Hold(MemberId member, const control::SyncOffer& offer) { held_[member] = offer; }
  void Release(MemberId member, const GroupRecord& record, Tick now, SyncOutput* out);
  // Takes the offer of a member of the electorate. A repeated offer gets its answer again.
  void Offer(MemberId member, const control::SyncOffer& offer, const GroupRecord& record, Tick now,
             SyncOutput* out);
  // A member has fetched the elected state, or failed to.
  void FetchDone(const control::FetchDone& done, SyncOutput* out);
  // The member has left the group, or will leave it with the next epoch.
  void Leave(MemberId member);
  void Clear() { *this = SyncBallot(); }
  // Moves first_offer() and last_end() by `us`, so that this time does not count for the members.
  void Postpone(int64_t us);

  // Makes all decisions that are possible now. Call it after each change. `at_boundary`: the
  // members that have voted, and so stand at a step boundary. A commit changes `state` of
  // `*record`; a commit or a refusal changes `syncs` of the members.
  void Advance(const std::set<MemberId>& electorate, const std::set<MemberId>& at_boundary,
               GroupRecord* record, Tick now, SyncOutput* out);

  // What the open sync waits for, as text; "" if no sync is open.
  std::string WaitingFor(const std::set<MemberId>& electorate) const;
  // When the first of the present offers came: since then its member waits for the others. kNever:
  // no member waits. An offer without a vote, of a member that was refused in its last sync, does
  // not count, because the others may not intend to sync now.
  Tick first_offer() const { return first_offer_; }
  // Whether other members wait for an offer of this member.
  bool Awaits(MemberId member) const;
  // Whether the member waits for the end of a sync.
  bool InSync(MemberId member) const;
  // When the last sync ended, with whatever outcome. Tick(): no sync has ended yet.
  Tick last_end() const { return last_end_; }

  // `voters`: the members that may have an offer from Hold(); they include the electorate.
  void CheckInvariants(const std::set<MemberId>& voters,
                       const std::set<MemberId>& electorate) const;

  LH_STATE(SyncBallot, LH_FIELD(held_), LH_FIELD(offers_), LH_FIELD(first_offer_),
           LH_FIELD(last_end_), LH_FIELD(fetching_), LH_FIELD(refused_), LH_FIELD(aborted_));

 private:
  struct Fetching {
    uint64_t revision = 0;
    Hash128 manifest;
    Hash128 state;
    std::map<MemberId, control::SyncOffer> offers;    // of the members that were not refused
    std::map<MemberId, control::SyncResult> refused;  // told at the commit
    std::set<MemberId> fetching;                      // members that still fetch
    std::set<MemberId> holders;                       // members that fetchers may ask for chunks
    bool sources_changed = false;                     // `holders` changed since fetchers were told
    std::vector<MemberId> fetched;                    // members that have fetched, in order
    std::set<MemberId> sources;                       // members that sent chunks
    uint64_t bytes = 0;                               // sent in all
    Tick begun;                                       // first_offer() of this sync
    std::string failed;                               // why the sync failed; "": it has not
    LH_FIELDS(Fetching, LH_FIELD(revision), LH_FIELD(manifest), LH_FIELD(state), LH_FIELD(offers),
              LH_FIELD(refused), LH_FIELD(fetching), LH_FIELD(holders), LH_FIELD(sources_changed),
              LH_FIELD(fetched), LH_FIELD(sources), LH_FIELD(bytes), LH_FIELD(begun),
              LH_FIELD(failed));
  };

  void Elect(GroupRecord* record, Tick now, SyncOutput* out);
  void Commit(Fetching done, GroupRecord* record, Tick now, SyncOutput* out);
  void Fail(const Fetching& f, Tick now, SyncOutput* out);
  void RefuseStalemate(const std::set<MemberId>& missing, GroupRecord* record, Tick now,
                       SyncOutput* out);
  // Sends a refusal and notes it in the record, so that a repeated offer gets it again. After a
  // restart of the coordinator the reason is lost (Ended()).
  void Refuse(const control::SyncResult& result, GroupRecord* record, SyncOutput* out);
  // The answer to an offer whose sync ended before this coordinator started.
  static control::SyncResult Ended(MemberId member, const control::SyncOffer& offer,
                                   const GroupRecord& record);
  control::SyncResult ResultFor(MemberId member, const GroupRecord& record) const;
  std::set<MemberId> Missing(const std::set<MemberId>& electorate) const;

  std::map<MemberId, control::SyncOffer> held_;    // Hold(), not released
  std::map<MemberId, control::SyncOffer> offers_;  // while collecting
  Tick first_offer_ = kNever;
  Tick last_end_;
  std::optional<Fetching> fetching_;  // set while members fetch
  // By member that was refused in its last sync: the refusal.
  std::map<MemberId, control::SyncResult> refused_;
  // By member whose last sync failed: the answer. The member may have sent its offer again before
  // it knew of the failure; such an offer gets this answer.
  std::map<MemberId, control::SyncResult> aborted_;
};

}  // namespace longhaul::coordinator
