#include "coordinator/core/suspect_contributions.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "coordinator/core/text.h"

namespace longhaul::coordinator {

void SuspectContributions::Suspect(PeerId reporter, const control::ContributionSuspect& suspect,
                                   const EpochState& epochs, const GroupStep& step) {
  // A peer can tell its own members apart, and not those of another peer.
  const bool named_members = reporter == suspect.peer && !suspect.members.empty();
  std::vector<MemberId> members;
  for (const MemberRecord& member : epochs.record.members) {
    const bool named = !named_members || std::find(suspect.members.begin(), suspect.members.end(),
                                                   member.member) != suspect.members.end();
    if (member.peer == suspect.peer && IsAdmitted(member) && named) {
      members.push_back(member.member);
    }
  }
  // Removed meanwhile, or a report about strangers.
  if (members.empty() || !epochs.InForce(reporter)) return;
  const std::optional<uint64_t> held_back = told_.Take({reporter, suspect.peer}, step.now);
  if (!held_back) return;
  epochs.Note(
      "contribution_suspect", members.size() == 1 ? members[0] : MemberId{}, suspect.peer,
      "contribution suspect reporter=" + ToString(reporter) + " peer=" + ToString(suspect.peer) +
          " members=" + List(members) + " tag=" + std::to_string(suspect.tag) +
          " nan=" + std::to_string(suspect.nan) + " inf=" + std::to_string(suspect.inf) +
          " held_back=" + std::to_string(suspect.held_back + *held_back) + " host=\"" +
          Clean(epochs.PeerOf(suspect.peer).host) + "\" norms=\"" + Clean(suspect.norms) + "\"",
      step);
}

}  // namespace longhaul::coordinator
