// The fate of each op that was frozen, from what the survivors report of it.
#pragma once

#include <map>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

using Reports = std::map<PeerId, std::vector<control::OpReport>>;

// `reports` holds one entry for each peer of the new epoch, empty ones included: who is not in it
// does not survive and counts for nothing. The result has an entry for each peer that reported or
// missed an op, by peer: one fate for each op that it reported, in the order of the report, and the
// ops that others abort and it has not announced.
//
// Why the rules are safe, and why the judgements of one op agree at all peers, is told in
// docs/life_of_an_op.md ("A fault").
std::vector<FatesRecord> Judge(const Reports& reports);

}  // namespace longhaul::coordinator
