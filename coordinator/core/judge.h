// The fate of each op that was frozen, from what the survivors report of it.
#pragma once

#include <map>
#include <vector>

#include "base/ids.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

using Reports = std::map<PeerId, std::vector<control::OpReport>>;
using Fates = std::map<PeerId, std::vector<control::OpFate>>;

// `reports` holds one entry for each peer of the new epoch, empty ones included: who is not in it
// does not survive and counts for nothing. The result has an entry for each peer that reported an
// op, with one fate an op, in the order of the report.
//
// Why the rules are safe, and why the judgements of one op agree at all peers, is told in
// docs/life_of_an_op.md ("A fault").
Fates Judge(const Reports& reports);

}  // namespace longhaul::coordinator
