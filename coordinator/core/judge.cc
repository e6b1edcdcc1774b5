#include "coordinator/core/judge.h"

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

}  // namespace

Fates Judge(const Reports& reports) {
  std::map<PeerId, DoneByOrdinal> done;
  for (const auto& [peer, ops] : reports) {
    DoneByOrdinal& by_ordinal = done[peer];
    for (const control::OpReport& op : ops) by_ordinal[op.ordinal] = op.done;
  }
  Fates fates;
  for (const auto& [peer, ops] : reports) {
    for (const control::OpReport& op : ops) {
      const bool commit = op.done && !SomebodyIsNotDone(op, done);
      const control::Fate again = op.abort_on_fault ? control::Fate::kAbort : control::Fate::kRedo;
      fates[peer].push_back({op.ordinal, commit ? control::Fate::kCommit : again});
    }
  }
  return fates;
}

}  // namespace longhaul::coordinator
