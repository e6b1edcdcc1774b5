#include "coordinator/core/assembly.h"

#include <algorithm>

#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

// How a member is called in texts for people: "trainer-3 at host-a".
std::string PersonalName(const MemberRecord& member, const PeerRecord& peer) {
  return member.name + " at " + (peer.host.empty() ? ToString(peer.peer) : peer.host);
}

// "a, b, c and 5 more".
std::string Names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamesShownMax); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  const size_t more = names.size() - std::min(names.size(), kNamesShownMax);
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

}  // namespace

uint32_t AssemblySize(const GroupRecord& group) {
  if (AnyAdmitted(group)) return 0;
  for (const MemberRecord& member : group.members) {
    if (member.members > 0) return member.members;
  }
  return 0;
}

void Assembly::Join(const std::string& name) {
  std::erase_if(left_, [&](const auto& left) { return left.first.starts_with(name + " at "); });
}

void Assembly::Leave(const MemberRecord& member, const EpochState& epochs, const std::string& why) {
  if (member.members == 0 || AnyAdmitted(epochs.record)) return;
  present_ = UINT32_MAX;  // all are told of it
  left_.emplace_back(PersonalName(member, epochs.PeerOf(member.peer)), why);
  if (left_.size() > kNamesShownMax) left_.erase(left_.begin());
}

std::string Assembly::Text(const EpochState& epochs, const PeerDirectory& peers) const {
  const uint32_t size = AssemblySize(epochs.record);
  if (size == 0) return "";
  std::vector<std::string> present;
  for (const MemberRecord& member : epochs.record.members) {
    if (member.members == 0) continue;
    std::string name = PersonalName(member, epochs.PeerOf(member.peer));
    if (member.after == kCohortIncomplete) {
      name.append(" (its cohort ").append(member.cohort).append(" is incomplete)");
    }
    if (peers.Draining(member.peer)) name += " (draining)";
    if (!peers.Attached(member.peer)) name += " (its peerd is not connected)";
    present.push_back(std::move(name));
  }
  std::vector<std::string> left;
  for (const auto& [name, why] : left_) {
    left.push_back(std::string(name).append(" (").append(why).append(")"));
  }
  std::string text = std::to_string(present.size()) + " of " + std::to_string(size) +
                     " members have come: " + Names(present);
  if (!left.empty()) text += "; came and left again: " + Names(left);
  return Clean(std::move(text));
}

control::JoinPending Assembly::PendingOf(MemberId id, const EpochState& epochs,
                                         const PeerDirectory& peers) const {
  const MemberRecord& member = *epochs.Find(id);
  const bool waits = member.members > 0 && !IsAdmitted(member);
  return {member.request, epochs.record.group, id, waits ? Text(epochs, peers) : ""};
}

void Assembly::Tell(const EpochState& epochs, const GroupStep& step) {
  const std::vector<MemberRecord>& members = epochs.record.members;
  const uint32_t size = AssemblySize(epochs.record);
  if (size == 0) left_.clear();
  const auto waits = [](const MemberRecord& m) { return m.members > 0 && !IsAdmitted(m); };
  const auto present = static_cast<uint32_t>(std::count_if(members.begin(), members.end(), waits));
  // Each newcomer changes the text of all others. So in a large assembly only every so many
  // newcomers are told, and the number of messages stays below 64 for each member.
  const bool few = present > present_ && present < present_ + 1 + size / 64;
  if (few && present_ > 0 && size > 64) return;
  present_ = present;
  std::string text = Text(epochs, step.peers);
  if (text == told_) return;
  told_ = std::move(text);
  for (const MemberRecord& member : members) {
    if (waits(member)) step.Send(member.peer, PendingOf(member.member, epochs, step.peers));
  }
}

}  // namespace longhaul::coordinator
