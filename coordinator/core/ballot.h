// One unanimous vote among a fixed set of members.
//
// The ballot is undecided until every remaining member has voted. A vote is a yes and cannot be
// taken back. A member that leaves no longer counts, so Leave() may decide the ballot. Once
// decided, it never becomes undecided. A ballot without members is decided. Plain value: no
// threads, no clock.
#pragma once

#include <set>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"

namespace longhaul::coordinator {

class Ballot {
 public:
  Ballot() = default;
  explicit Ballot(std::set<MemberId> electorate) : electorate_(std::move(electorate)) {}

  // Both calls may be repeated. A vote of a member outside the electorate is ignored.
  void Vote(MemberId member);
  void Leave(MemberId member);

  bool Decided() const { return voted_.size() == electorate_.size(); }
  bool HasVoted(MemberId member) const { return voted_.contains(member); }
  // The members that have not voted yet, in order of number.
  std::vector<MemberId> Missing() const;

  const std::set<MemberId>& electorate() const { return electorate_; }
  const std::set<MemberId>& voted() const { return voted_; }

  LH_STATE(Ballot, LH_FIELD(electorate_), LH_FIELD(voted_));

 private:
  std::set<MemberId> electorate_;
  std::set<MemberId> voted_;  // a subset of electorate_
};

}  // namespace longhaul::coordinator
