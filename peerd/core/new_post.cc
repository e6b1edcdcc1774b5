#include "peerd/core/new_post.h"

#include <algorithm>
#include <string>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// The member of this rank in the newest epoch; 0: there is none.
MemberId OfRank(uint64_t rank, const EpochHistory& history) {
  const std::vector<control::MemberInfo>& members = history.current().members;
  return rank < members.size() ? members[rank].member : MemberId();
}

// Whether the id may be that of a member, also of one that left before this peer came. Ids rise, so
// one beyond all that are known is none.
bool MayBeMember(MemberId member, const EpochHistory& history) {
  if (history.Member(member) != nullptr) return true;
  const std::vector<control::MemberInfo>& members = history.current().members;
  return std::any_of(members.begin(), members.end(),
                     [member](const control::MemberInfo& info) { return member < info.member; });
}

}  // namespace

std::vector<MemberId> SetMembersOf(const NewPost& post, const EpochHistory& history) {
  if (post.local.desc.kind != OpKind::kSendRecv) return post.local.participants;
  MemberId partner = post.local.partner;
  if (post.local.root_rank) partner = OfRank(*post.local.root_rank, history);
  return post.local.is_root ? std::vector{post.member, partner} : std::vector{partner, post.member};
}

std::string ObjectionTo(const NewPost& post, const EpochHistory& history, PeerId self) {
  const OpDesc& desc = post.local.desc;
  if (desc.count > LH_COUNT_MAX) {
    return ToString(desc) + " is beyond the limit of " + std::to_string(LH_COUNT_MAX) + " elements";
  }
  const std::vector<MemberId>& participants = post.local.participants;
  for (size_t i = 0; i < participants.size(); ++i) {
    if (i > 0 && !(participants[i - 1] < participants[i])) {
      return "its participants are not in rising order";
    }
    if (!MayBeMember(participants[i], history)) {
      return ToString(participants[i]) +
             " is among its participants, and is no member of the group; give ids of members";
    }
  }
  if (!participants.empty() &&
      !std::binary_search(participants.begin(), participants.end(), post.member)) {
    return "this member, " + ToString(post.member) + ", is not among its participants";
  }
  if (desc.kind == OpKind::kSendRecv) {
    const std::vector<MemberId> pair = SetMembersOf(post, history);
    if (pair[0] == pair[1]) return "a member cannot send to itself";
    const MemberId partner = pair[post.local.is_root ? 1 : 0];
    if (partner && !MayBeMember(partner, history)) {
      return "its partner, " + ToString(partner) + ", is no member of the group";
    }
  }
  if (!desc.unequal) return "";
  const auto& members = history.For(post.boundary)->members;
  const auto local = std::count_if(members.begin(), members.end(),
                                   [self](const auto& info) { return info.peer == self; });
  const size_t terms = TermsBytes(desc, {post.local.terms});
  constexpr auto kTermsBytesMax = static_cast<size_t>(LH_OP_TERMS_BYTES_MAX);
  if (terms * static_cast<size_t>(local) > kTermsBytesMax) {
    return "the lengths of its parts take " + std::to_string(terms) +
           " bytes, and those of all members of a host may take at most " +
           std::to_string(kTermsBytesMax) + "; use parts of equal lengths";
  }
  return "";
}

PostedInput InputFrom(const NewPost& post, const EpochHistory& history, Tick now) {
  const LocalPost& local = post.local;
  PostedInput input{local.post, post.member,  local.desc, local.terms,
                    now,        std::nullopt, post.step,  local.outline};
  OpDesc& desc = input.desc;
  if (!HasRoot(desc.kind)) return input;
  // A rank that is not there names nobody: the caller has not heard yet that a member is gone.
  if (local.root_rank) desc.root = OfRank(*local.root_rank, history);
  // The same holds if the caller has taken another member for the root: it has not heard yet that
  // ranks have changed. Where its buffers fit both roles, the op would end well with the numbers of
  // a member that nobody meant.
  if ((desc.root == post.member) != local.is_root) desc.root = MemberId();
  return input;
}

}  // namespace longhaul::peerd
