#include <algorithm>

#include "coordinator/core/group.h"
#include "coordinator/core/text.h"

// The part of Group that forms the first epoch of an empty group, when joins wait for each other
// (control::Join::members).
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

uint32_t Group::AssemblySize() const {
  if (AnyAdmitted(record_)) return 0;
  for (const MemberRecord& member : record_.members) {
    if (member.members > 0) return member.members;
  }
  return 0;
}

std::set<MemberId> Group::Founders() const {
  const std::set<MemberId> admissible = Admissible();
  std::set<MemberId> founders = preparation_ ? preparation_->joiners : std::set<MemberId>{};
  const uint32_t size = AssemblySize();
  if (size == 0) {
    founders.insert(admissible.begin(), admissible.end());
    return founders;
  }
  // The group has the size that its members asked for, even if more members have come meanwhile.
  for (const MemberId member : admissible) {
    if (founders.size() < size) founders.insert(member);
  }
  return founders.size() < size ? std::set<MemberId>{} : founders;
}

std::string Group::AssemblyText() const {
  const uint32_t size = AssemblySize();
  if (size == 0) return "";
  std::vector<std::string> present;
  for (const MemberRecord& member : record_.members) {
    if (member.members == 0) continue;
    std::string name = PersonalName(member, PeerOf(member.peer));
    if (member.after == kCohortIncomplete) {
      name.append(" (its cohort ").append(member.cohort).append(" is incomplete)");
    }
    if (directory_->Draining(member.peer)) name += " (draining)";
    if (!directory_->Attached(member.peer)) name += " (its peerd is not connected)";
    present.push_back(std::move(name));
  }
  std::vector<std::string> left;
  for (const auto& [name, why] : left_assembly_) {
    left.push_back(std::string(name).append(" (").append(why).append(")"));
  }
  std::string text = std::to_string(present.size()) + " of " + std::to_string(size) +
                     " members have come: " + Names(present);
  if (!left.empty()) text += "; came and left again: " + Names(left);
  return Clean(std::move(text));
}

void Group::LeaveAssembly(const MemberRecord& member, const std::string& why) {
  if (member.members == 0 || AnyAdmitted(record_)) return;
  assembly_present_ = UINT32_MAX;  // all are told of it
  left_assembly_.emplace_back(PersonalName(member, PeerOf(member.peer)), why);
  if (left_assembly_.size() > kNamesShownMax) left_assembly_.erase(left_assembly_.begin());
}

void Group::TellAssembly(GroupOutput* out) {
  const uint32_t size = AssemblySize();
  if (size == 0) left_assembly_.clear();
  const auto present = static_cast<uint32_t>(
      std::count_if(record_.members.begin(), record_.members.end(),
                    [](const MemberRecord& m) { return m.members > 0 && !IsAdmitted(m); }));
  // Each newcomer changes the text of all others. So in a large assembly only every so many
  // newcomers are told, and the number of messages stays below 64 for each member.
  const bool few = present > assembly_present_ && present < assembly_present_ + 1 + size / 64;
  if (few && assembly_present_ > 0 && size > 64) return;
  assembly_present_ = present;
  std::string text = AssemblyText();
  if (text == assembly_told_) return;
  assembly_told_ = std::move(text);
  for (const MemberRecord& member : record_.members) {
    if (!IsAdmitted(member) && member.members > 0) {
      out->messages.emplace_back(member.peer, PendingOf(member.member));
    }
  }
}

control::JoinPending Group::PendingOf(MemberId id) const {
  const MemberRecord& member = *Find(id);
  const bool waits = member.members > 0 && !IsAdmitted(member);
  return {member.request, record_.group, id, waits ? AssemblyText() : ""};
}

std::string Group::ObjectionTo(PeerId peer, const control::Join& join) const {
  if (std::find(record_.barred.begin(), record_.barred.end(), peer) != record_.barred.end()) {
    return "this peerd told members of the group different things (lhctl events, kind dispute); if "
           "its host is to come back, start its peerd again";
  }
  const uint32_t size = AssemblySize();
  if (size == 0 || join.wish.members == 0 || join.wish.members == size) return "";
  return "the join waits for " + std::to_string(join.wish.members) +
         " members, and those that have come wait for " + std::to_string(size) +
         ": give all the same number";
}

}  // namespace longhaul::coordinator
