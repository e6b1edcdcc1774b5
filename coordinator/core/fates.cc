#include "coordinator/core/fates.h"

#include <algorithm>
#include <set>
#include <utility>

namespace longhaul::coordinator {
namespace {

// What a peer's DONE says of each of its ops (OpReport::verdict); 0: it is not done.
using VerdictByOrdinal = std::map<OpOrdinal, uint64_t>;

uint64_t VerdictOf(const control::OpReport& op) {
  return op.done ? std::max<uint64_t>(op.verdict, 1) : 0;
}

// Returns true if all survivors that report their part of the op are done, with the same verdict. A
// survivor that does not report its part has settled the op, and needed the DONE of every survivor
// for that.
bool AllAgree(const control::OpReport& op, const std::map<PeerId, VerdictByOrdinal>& verdicts) {
  for (const control::OpMatch& match : op.matches) {
    const auto survivor = verdicts.find(match.peer);
    if (survivor == verdicts.end()) continue;
    const auto theirs = survivor->second.find(match.ordinal);
    if (theirs != survivor->second.end() && theirs->second != VerdictOf(op)) return false;
  }
  return true;
}

// All reports of ops with one name (boundary, tag, set and kind). The reports of one peer are in
// order of their ordinals; all ops before the last one linger.
struct OpsOfName {
  using ByPeer = std::map<PeerId, std::vector<const control::OpReport*>>;
  ByPeer reported;
  ByPeer aborted;
  std::set<PeerId> redone;                // the peers whose newest op of the name is to be redone
  std::map<PeerId, OpOrdinal> cancelled;  // the op of the name that a peer has cancelled
  uint64_t step = 0;                      // the latest of those that are to be aborted
};

// Returns the peers among `reports` that have not announced an op of this name that another peer
// aborts. Goes through the matches of the name only once, because their number grows with the
// number of pairs of peers.
std::set<PeerId> MissedBy(const OpsOfName& name, const Reports& reports) {
  std::set<PeerId> missed;
  if (name.aborted.empty()) return missed;
  for (const auto& [peer, ops] : reports) {
    if (!name.reported.contains(peer)) missed.insert(peer);
  }
  // A peer B that reports an op of the name may be one op behind a peer A that aborts: B's newest
  // op of the name is the op before. A knows that op by a lower ordinal, and has settled it or is
  // done with it. The report of B or of A may show this. First: B's newest op matches an ordinal of
  // A that is not the aborted op's.
  for (const auto& [peer, ops] : name.reported) {
    for (const control::OpMatch& match : ops.back()->matches) {
      const auto aborted = name.aborted.find(match.peer);
      if (aborted == name.aborted.end() || match.peer == peer) continue;
      if (std::any_of(aborted->second.begin(), aborted->second.end(),
                      [&](const auto* op) { return op->ordinal != match.ordinal; })) {
        missed.insert(peer);
      }
    }
  }
  // Second: an earlier op in A's report matches B's newest op.
  for (const auto& [peer, aborted] : name.aborted) {
    const auto newest_aborted =
        std::max_element(aborted.begin(), aborted.end(),
                         [](const auto* a, const auto* b) { return a->ordinal < b->ordinal; });
    for (const control::OpReport* const before : name.reported.at(peer)) {
      if (before->ordinal >= (*newest_aborted)->ordinal) continue;
      for (const control::OpMatch& match : before->matches) {
        const auto other = name.reported.find(match.peer);
        if (other == name.reported.end() || match.peer == peer) continue;
        if (other->second.back()->ordinal == match.ordinal) missed.insert(match.peer);
      }
    }
  }
  return missed;
}

void Redo(const std::vector<const control::OpReport*>& ops, std::vector<control::OpFate>* fates) {
  for (const control::OpReport* const op : ops) {
    for (control::OpFate& fate : *fates) {
      if (fate.ordinal == op->ordinal) fate.fate = control::Fate::kRedo;
    }
  }
}

// Sets the fate of the newest op of each peer.
void AbortAll(const OpsOfName& name, const std::set<PeerId>& missed,
              std::map<PeerId, std::vector<control::OpFate>>* fates) {
  for (const auto& [peer, ops] : name.reported) {
    if (missed.contains(peer)) continue;
    for (control::OpFate& fate : fates->at(peer)) {
      if (fate.ordinal == ops.back()->ordinal) fate.fate = control::Fate::kAbort;
    }
  }
}

// Returns true if all peers that have announced the cancelled op can abort it: none of them has its
// result. A peer that has the result may have given it to its trainers already, if the op is
// one-shot. It may even have announced the next op of the name, so all its ops of the name count.
bool MayCancel(const OpsOfName& name, const std::set<PeerId>& missed) {
  // Who has missed the newest op has cancelled the op before, which others are done with.
  std::map<PeerId, OpOrdinal> cancelled = name.cancelled;
  for (const PeerId peer : missed) cancelled.erase(peer);
  if (cancelled.empty()) return false;
  for (const auto& [peer, ops] : name.reported) {
    for (const control::OpReport* const op : ops) {
      if (!op->done) continue;
      for (const control::OpMatch& match : op->matches) {
        const auto theirs = cancelled.find(match.peer);
        if (theirs != cancelled.end() && theirs->second == match.ordinal) return false;
      }
    }
  }
  return true;
}

// Returns true if the members differ in `on_fault`: some peer aborts the op, and another peer,
// which has announced the same op, is to redo it. Then all peers announce the op again, see that
// their offers differ, and refuse it.
// The same holds for an op that was cancelled too late: the peer of the member that cancelled it
// redoes it.
bool DiffersAboutFaults(const OpsOfName& name, const std::set<PeerId>& missed) {
  if (name.aborted.empty()) return false;
  return std::any_of(name.reported.begin(), name.reported.end(), [&](const auto& entry) {
    const auto& [peer, ops] = entry;
    return !missed.contains(peer) && !ops.back()->abort_on_fault && name.redone.contains(peer);
  });
}

}  // namespace

std::vector<FatesRecord> FatesOf(const Reports& reports) {
  std::map<PeerId, VerdictByOrdinal> verdicts;
  for (const auto& [peer, ops] : reports) {
    VerdictByOrdinal& by_ordinal = verdicts[peer];
    for (const control::OpReport& op : ops) by_ordinal[op.ordinal] = VerdictOf(op);
  }
  std::map<PeerId, std::vector<control::OpFate>> fates;
  std::map<control::MissedOp, OpsOfName> names;  // all of step 0
  for (const auto& [peer, ops] : reports) {
    for (const control::OpReport& op : ops) {
      const bool commit = op.done && AllAgree(op, verdicts);
      const control::Fate again = op.abort_on_fault ? control::Fate::kAbort : control::Fate::kRedo;
      fates[peer].push_back({op.ordinal, commit ? control::Fate::kCommit : again});
      OpsOfName& name = names[{op.boundary, op.tag, op.set, op.kind}];
      name.reported[peer].push_back(&op);
      // It is too late to cancel what is done.
      const bool cancelled = op.cancelled && !op.done;
      if (!commit && (op.abort_on_fault || cancelled)) {
        name.aborted[peer].push_back(&op);
        name.step = std::max(name.step, op.step);
      }
      if (cancelled) name.cancelled[peer] = op.ordinal;
      if (commit || op.abort_on_fault) {
        name.redone.erase(peer);
      } else {
        name.redone.insert(peer);
      }
    }
  }
  std::map<PeerId, std::set<control::MissedOp>> missed;
  for (const auto& [name, ops] : names) {
    const std::set<PeerId> missed_by = MissedBy(ops, reports);
    if (MayCancel(ops, missed_by)) {
      AbortAll(ops, missed_by, &fates);
    } else if (DiffersAboutFaults(ops, missed_by)) {
      for (const auto& [peer, aborted] : ops.aborted) Redo(aborted, &fates[peer]);
      continue;
    }
    control::MissedOp op = name;
    op.step = ops.step;
    for (const PeerId peer : missed_by) missed[peer].insert(op);
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
