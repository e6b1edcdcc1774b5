#include "coordinator/core/ballot.h"

#include <algorithm>
#include <iterator>

namespace longhaul::coordinator {

void Ballot::Vote(MemberId member) {
  if (electorate_.contains(member)) voted_.insert(member);
}

void Ballot::Leave(MemberId member) {
  electorate_.erase(member);
  voted_.erase(member);
}

std::vector<MemberId> Ballot::Missing() const {
  std::vector<MemberId> missing;
  std::set_difference(electorate_.begin(), electorate_.end(), voted_.begin(), voted_.end(),
                      std::back_inserter(missing));
  return missing;
}

}  // namespace longhaul::coordinator
