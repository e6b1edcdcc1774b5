// What an epoch says: its members, its ring, and which of them take part in an op.
//
// Everything here is a pure function of the epoch, so all peers get the same result.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "peerd/core/actions.h"
#include "proto/control/blocked.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

struct EpochRecord {
  Epoch epoch;
  Epoch boundary;
  Epoch last_freeze;
  bool sign_ops = false;                     // as in PrepareEpoch
  std::vector<control::MemberInfo> members;  // rank order
  std::vector<PeerId> ring;
  std::map<PeerId, std::string> hosts;  // names
  std::map<PeerId, std::string> keys;   // public keys
  control::BlockedPairs blocked;
  std::string cause;
  control::LinkCost cost;

  // Returns -1 if `member` is not in the epoch.
  int RankOf(MemberId member) const;
  bool HasPeer(PeerId peer) const;
  // True if the member is in the epoch and in the background.
  bool InBackground(MemberId member) const;
  bool AnyInBackground() const;
  // The members that may have the state that was agreed on last: those not in the background, but
  // not `member` itself. At most LH_SYNC_SOURCES_MAX.
  std::vector<control::SyncSource> SourcesFor(MemberId member) const;
  // The relay of the link between the two peers; 0: the link goes straight.
  PeerId RelayOf(PeerId a, PeerId b) const { return control::RelayOf(blocked, a, b); }
  // What the peer owns of a tensor in the mesh, from 0 to 1. 0 if it is not in the epoch.
  double ShareOf(PeerId peer) const;

  LH_FIELDS(EpochRecord, LH_FIELD(epoch), LH_FIELD(boundary), LH_FIELD(last_freeze),
            LH_FIELD(sign_ops), LH_FIELD(members), LH_FIELD(ring), LH_FIELD(hosts), LH_FIELD(keys),
            LH_FIELD(blocked), LH_FIELD(cause), LH_FIELD(cost));
};

// The members that take part in the ops of one boundary, and their peers. A member takes part if it
// was admitted by then and is still in the epoch.
struct Participants {
  Epoch epoch;
  Epoch boundary;  // of the ops
  std::vector<PeerId> ring;
  std::vector<control::MemberInfo> members;  // rank order
  std::vector<MemberId> contributors;        // members whose inputs are in the result; rank order
  uint64_t hosts = 0;                        // HostsOf(contributors)
  // Any two of these peers have a straight link with data lanes.
  bool mesh = false;
  // The same, except for pairs of peers without a share.
  bool mesh_of_owners = false;
  // `cost.shares` are those of the peers in `ring`.
  control::LinkCost cost;

  bool HasPeer(PeerId peer) const;
  int RankOf(MemberId member) const;
  bool Contributes(MemberId member) const;
  // The first member of the peer in rank order. Error texts name this member in place of the peer.
  // 0 if the peer has none.
  MemberId FirstMemberOf(PeerId peer) const;
  // Keeps these members and their peers. The peers' shares stay in proportion.
  void KeepMembers(const std::vector<MemberId>& stay);
  // Takes the peers at these places of `ring`, in this order, for all.
  void Arrange(const std::vector<size_t>& places);
};

// Returns what makes no sense in a message to peer `self`, or "".
std::string ProblemOf(const control::PrepareEpoch& prepare, PeerId self);

// Makes the record of an epoch. ProblemOf() says whether the message makes sense.
EpochRecord RecordOf(const control::PrepareEpoch& prepare);

// Returns the links that `self` needs in the epoch, in ring order: one to every other peer. Both
// ends of a link compute the same `data` and `relay`. The peer that came into the group first
// dials.
std::vector<LinkWanted> LinksOf(const control::PrepareEpoch& prepare, PeerId self);

// What trainers can ask of a member.
struct KnownMember {
  control::MemberInfo info;
  std::string host;  // name; that of its peer's last epoch
  friend bool operator==(const KnownMember&, const KnownMember&) = default;
};

// The committed epochs that ops in flight may still refer to, including the newest.
//
// An op of boundary b in attempt a uses the ring and the members of one epoch: the first committed
// epoch that is older than neither b nor a. Each participant commits that epoch before it posts the
// op (its member calls it), or before it announces the op in that attempt (sends READY). A later
// epoch that does not freeze may have another ring. It must not change the op, because some peers
// announce the op before that epoch and other peers after it.
class EpochHistory {
 public:
  bool empty() const { return records_.empty(); }
  // The newest record. Must not be called while empty().
  const EpochRecord& current() const { return records_.rbegin()->second; }
  Epoch committed() const { return empty() ? Epoch() : current().epoch; }
  Epoch last_freeze() const { return empty() ? Epoch() : current().last_freeze; }

  // Adds an epoch, which must be newer than committed(). Forgets epochs before record.last_freeze.
  void Add(EpochRecord record);
  void Clear();

  // Returns the participants of an op of `boundary` that is posted or announced now. Of an op for
  // some members only: those of `set`; empty: all. Must not be called while empty().
  std::shared_ptr<const Participants> For(Epoch boundary,
                                          const std::vector<MemberId>& set = {}) const;

  // The members of a committed epoch in rank order; nullptr: the epoch is not known, or forgotten.
  // For the boundaries that members here stand at or have passed last.
  const std::vector<MemberId>* MembersOf(Epoch epoch) const;
  // Forgets the members of epochs before this one.
  void ForgetMembersBefore(Epoch epoch);

  // Returns what is known of a member of the newest epoch or of an older one; nullptr: nothing. The
  // last 4096 members and more are known.
  const KnownMember* Member(MemberId member) const;
  // A digest of the set of hosts of these members. A member that is not known counts as a host of
  // its own. Not 0.
  uint64_t HostsOf(const std::vector<MemberId>& members) const;

  // No decision depends on what is known of former members.
  LH_STATE(EpochHistory, LH_FIELD(records_), LH_FIELD(members_), LH_FIELD(known_, rule::Aside{}),
           LH_FIELD(participants_, rule::Aside{}));

 private:
  std::map<Epoch, EpochRecord> records_;
  std::map<Epoch, std::vector<MemberId>> members_;
  std::map<MemberId, KnownMember> known_;
  // A cache of For().
  mutable std::map<Epoch, std::shared_ptr<const Participants>> participants_;
};

}  // namespace longhaul::peerd
