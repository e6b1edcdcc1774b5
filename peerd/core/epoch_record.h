// What one epoch says: who is a member, in which ring, and who of them takes part in an op.
//
// Everything here is a pure function of the epoch, so that all peers come to the same answer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "peerd/core/actions.h"
#include "proto/control/blocked.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

struct EpochRecord {
  Epoch epoch;
  Epoch boundary;
  Epoch last_freeze;
  std::vector<control::MemberInfo> members;  // rank order
  std::vector<PeerId> ring;
  control::BlockedPairs blocked;
  std::string cause;
  control::LinkCost cost;

  // -1 if it is none of the members.
  int RankOf(MemberId member) const;
  bool HasPeer(PeerId peer) const;
  // The member is there, and its input is in no result yet.
  bool InBackground(MemberId member) const;
  bool AnyInBackground() const;
  // Those not in the background, other than `member`: who may have what was agreed on.
  std::vector<control::SyncSource> SourcesFor(MemberId member) const;
  // The peer through which the link of the two goes; 0: it goes straight.
  PeerId RelayOf(PeerId a, PeerId b) const { return control::RelayOf(blocked, a, b); }
};

// Those who take part in the ops of one boundary: admitted by then, and still there.
struct Participants {
  Epoch epoch;
  Epoch boundary;  // of the ops
  std::vector<PeerId> ring;
  std::vector<control::MemberInfo> members;  // rank order
  uint32_t contributing = 0;                 // those whose input is in the result
  // Each of them has a straight link with data lanes to each other one.
  bool mesh = false;
  control::LinkCost cost;

  bool HasPeer(PeerId peer) const;
  int RankOf(MemberId member) const;
  bool Contributes(MemberId member) const;
  // The first member of the peer in rank order: names the peer to people. 0 if it has none.
  MemberId FirstMemberOf(PeerId peer) const;
};

// What makes no sense in the message for peer `self`; "" if nothing.
std::string ProblemOf(const control::PrepareEpoch& prepare, PeerId self);

// Of a message without problem.
EpochRecord RecordOf(const control::PrepareEpoch& prepare);

// The links that `self` needs in the epoch, in ring order: one to every other peer. Both ends of a
// link come to the same `data` and `relay`, and to opposite `dial`.
std::vector<LinkWanted> LinksOf(const control::PrepareEpoch& prepare, PeerId self);

// The committed epochs that ops in flight may still refer to, the newest included.
//
// An op of boundary b in attempt a runs in the ring, and among the members, of the first committed
// epoch that is neither older than b nor than a. Each participant committed that epoch before it
// posted the op or announced it in that attempt. An epoch that only admits later on may order the
// ring anew; it must not touch the op, which some peers announced before it and others announce
// after it.
class EpochHistory {
 public:
  bool empty() const { return records_.empty(); }
  size_t size() const { return records_.size(); }
  // The newest. Not while empty().
  const EpochRecord& current() const { return records_.rbegin()->second; }
  Epoch committed() const { return empty() ? Epoch() : current().epoch; }
  Epoch last_freeze() const { return empty() ? Epoch() : current().last_freeze; }

  // `record.epoch` is newer than committed(). Epochs before its last freeze are forgotten.
  void Add(EpochRecord record);
  void Clear();

  // Those who take part in ops of `boundary` posted or announced now. Not while empty().
  std::shared_ptr<const Participants> For(Epoch boundary) const;

  void AddTo(Digester* digest) const;

 private:
  std::map<Epoch, EpochRecord> records_;
  // A cache of For().
  mutable std::map<Epoch, std::shared_ptr<const Participants>> participants_;
};

}  // namespace longhaul::peerd
