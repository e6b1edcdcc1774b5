// Decides the fate of each frozen op from the reports of the surviving peers. Pure function.
#pragma once

#include <map>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// Maps each peer to the ops in its EpochReady.
using Reports = std::map<PeerId, std::vector<control::OpReport>>;

// `reports` has one entry for each peer of the new epoch, also for a peer that reported no op. A
// peer without an entry does not survive and is ignored. The result is in order of peers. It has a
// record for each peer that reported or missed an op: one fate for each op that the peer reported,
// in the order of its report, and the aborted ops that the peer has not announced.
//
// docs/life_of_an_op.md ("A fault") tells why the rules are safe, and why all peers get the same
// fate for one op.
std::vector<FatesRecord> FatesOf(const Reports& reports);

}  // namespace longhaul::coordinator
