#include "coordinator/core/judge.h"

#include <algorithm>
#include <set>
#include <utility>

namespace longhaul::coordinator {
namespace {

using DoneByOrdinal = std::map<OpOrdinal, bool>;

// True if some survivor that takes part has the op and is not done with it. A survivor that does
// not report its op has settled it, which takes the DONE of every survivor.
bool SomebodyIsNotDone(const control::OpReport& op, const std::map<PeerId, DoneByOrdinal>& done) {
  for (const control::OpMatch& match : op.matches) {
    const auto survivor = done.find(match.peer);
    if (survivor == done.end()) continue;
    const auto theirs = survivor->second.find(match.ordinal);
    if (theirs != survivor->second.end() && !theirs->second) return true;
  }
  return false;
}

// In order of their ordinals: those before the last one linger.
using ReportsByName = std::map<control::MissedOp, std::vector<const control::OpReport*>>;

bool Matches(const control::OpReport& op, PeerId peer, OpOrdinal ordinal) {
  return std::find(op.matches.begin(), op.matches.end(), control::OpMatch{peer, ordinal}) !=
         op.matches.end();
}

// Whether the peer `other`, whose ops are `theirs`, has announced `op` of `owner`, whose ops are
// `owners`. It may be behind: then its op of that name is the one before, which `owner` knew by
// another ordinal, and has settled or is done with.
bool HasAnnounced(PeerId other, const ReportsByName& theirs, PeerId owner,
                  const ReportsByName& owners, const control::OpReport& op) {
  const control::MissedOp name{op.boundary, op.tag};
  const auto it = theirs.find(name);
  if (it == theirs.end()) return false;
  const control::OpReport& newest = *it->second.back();
  for (const control::OpReport* const before : owners.at(name)) {
    if (before->ordinal < op.ordinal && Matches(*before, other, newest.ordinal)) return false;
  }
  return std::all_of(newest.matches.begin(), newest.matches.end(),
                     [&](const control::OpMatch& match) {
                       return match.peer != owner || match.ordinal == op.ordinal;
                     });
}

}  // namespace

std::vector<FatesRecord> Judge(const Reports& reports) {
  std::map<PeerId, DoneByOrdinal> done;
  std::map<PeerId, ReportsByName> names;
  for (const auto& [peer, ops] : reports) {
    DoneByOrdinal& by_ordinal = done[peer];
    ReportsByName& by_name = names[peer];
    for (const control::OpReport& op : ops) {
      by_ordinal[op.ordinal] = op.done;
      by_name[{op.boundary, op.tag}].push_back(&op);
    }
  }
  std::map<PeerId, std::vector<control::OpFate>> fates;
  std::map<PeerId, std::set<control::MissedOp>> missed;
  for (const auto& [peer, ops] : reports) {
    for (const control::OpReport& op : ops) {
      const bool commit = op.done && !SomebodyIsNotDone(op, done);
      const control::Fate again = op.abort_on_fault ? control::Fate::kAbort : control::Fate::kRedo;
      fates[peer].push_back({op.ordinal, commit ? control::Fate::kCommit : again});
      if (commit || !op.abort_on_fault) continue;
      for (const auto& [other, theirs] : names) {
        if (other != peer && !HasAnnounced(other, theirs, peer, names.at(peer), op)) {
          missed[other].insert({op.boundary, op.tag});
        }
      }
    }
  }
  std::vector<FatesRecord> records;
  for (const auto& [peer, ops] : reports) {
    if (!fates.contains(peer) && !missed.contains(peer)) continue;
    const std::set<control::MissedOp>& unseen = missed[peer];
    records.push_back({peer, std::move(fates[peer]), {unseen.begin(), unseen.end()}});
  }
  return records;
}

}  // namespace longhaul::coordinator
