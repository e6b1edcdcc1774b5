#include "peerd/core/op_terms.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include "peerd/core/algorithm.h"

namespace longhaul::peerd {
namespace {

// The elements of the part between two members, as one of them says. `index`: the rank of the other
// one, among the participants.
std::optional<uint64_t> LengthIn(const std::vector<uint64_t>& lengths, size_t index) {
  if (lengths.size() == 1) return lengths[0];
  if (index < lengths.size()) return lengths[index];
  return std::nullopt;
}

// The world has changed since the op was laid out. Returns whose tensor is too small for the parts
// of the members that are left; nullopt: all fit.
std::optional<std::string> SpaceMissing(const OpState& op) {
  const std::vector<control::MemberInfo>& members = op.participants->members;
  if (op.desc.kind != OpKind::kAllGather && op.desc.kind != OpKind::kGather) return std::nullopt;
  uint64_t whole = 0;  // cannot overflow: at most 2^10 lengths below 2^49
  for (size_t i = 0; i < members.size(); ++i) {
    if (!op.Contributes(members[i].member)) continue;
    whole += LengthIn(op.said.terms.at(members[i].member).gives, i).value_or(0);
  }
  for (const control::MemberInfo& getter : members) {
    if (op.desc.kind == OpKind::kGather && getter.member != op.desc.root) continue;
    const std::vector<uint64_t>& gets = op.said.terms.at(getter.member).gets;
    const uint64_t space = std::accumulate(gets.begin(), gets.end(), uint64_t{0});
    if (space >= whole) continue;
    return "the members give " + std::to_string(whole) + " elements in all, and member " +
           ToString(getter.member) + " has room for " + std::to_string(space);
  }
  return std::nullopt;
}

// Returns how the lengths that two members give for one part differ; nullopt: all fit.
std::optional<std::string> TermsMismatch(const OpState& op) {
  const OpKind kind = op.desc.kind;
  const std::vector<control::MemberInfo>& members = op.participants->members;
  // After a death, ranks no longer say which part is whose. Then the parts are as their owners say.
  const bool same = members.size() == op.desc.world;
  if (!same) {
    if (auto missing = SpaceMissing(op)) return missing;
  }
  const bool reduces = Reduces(kind);
  const OpTerms& first = op.said.terms.at(members.front().member);
  for (size_t i = 0; i < members.size(); ++i) {
    const MemberId giver = members[i].member;
    const OpTerms& gives = op.said.terms.at(giver);
    if (reduces && gives.gives != first.gives) {
      return "members " + ToString(members.front().member) + " and " + ToString(giver) +
             " give different lengths of parts";
    }
    if ((kind == OpKind::kScatter && giver != op.desc.root) || !same) continue;
    for (size_t j = 0; j < members.size(); ++j) {
      const MemberId getter = members[j].member;
      if (kind == OpKind::kGather && getter != op.desc.root) continue;
      const auto given = LengthIn(gives.gives, j);
      // Of an op that reduces, everybody gives the part that its owner gets.
      const auto wanted = LengthIn(op.said.terms.at(getter).gets, reduces ? 0 : i);
      if (given && wanted && *given == *wanted) continue;
      const auto text = [](const std::optional<uint64_t>& length) {
        return length ? std::to_string(*length) + " elements" : "no length";
      };
      return "member " + ToString(giver) + " gives " + text(given) + " to member " +
             ToString(getter) + ", which expects " + text(wanted);
    }
  }
  return std::nullopt;
}

// A text such as "member m3 (host-a)".
std::string TextOf(MemberId member, const EpochHistory& history) {
  const KnownMember* const known = history.Member(member);
  return "member " + ToString(member) + (known == nullptr ? "" : " (" + known->info.name + ")");
}

Outcome UnfitFor(const OpState& op, const std::string& cause) {
  return {Code::kAborted, AbortedBy(op.desc, op.key.tag, cause)};
}

}  // namespace

std::optional<Outcome> UnfitnessOf(const OpState& op, const EpochHistory& history) {
  const Participants& participants = *op.participants;
  const size_t contributing = participants.contributors.size();
  if (contributing < op.desc.min_world) {
    return Outcome{Code::kTooFewMembers,
                   Subject(op.desc, op.key.tag) + " ended: " + std::to_string(contributing) +
                       " members take part, min_world asks for " +
                       std::to_string(op.desc.min_world) + "; the input is intact"};
  }
  if (contributing == 0) {
    return Outcome{
        Code::kTooFewMembers,
        Subject(op.desc, op.key.tag) +
            " ended: all that are left are in the background and contribute nothing yet; "
            "they do from the next step boundary on; the input is intact"};
  }
  if (op.desc.order == Order::kRank && op.algorithm == Algorithm::kRing) {
    return Outcome{Code::kFailedPrecondition,
                   Subject(op.desc, op.key.tag) +
                       " refused: order rank needs links between all hosts, at most " +
                       std::to_string(kMeshPeersMax) +
                       " of them, and no blocked pair (lhctl ring " +
                       "shows them); leave the order to Longhaul"};
  }
  const OpKind kind = op.desc.kind;
  const size_t members = participants.members.size();
  // Other peers see a world that fits nobody (BeginAttempt()), but there may be no other peer.
  for (const PostedInput& input : op.inputs) {
    const PostedInput& first = op.inputs.front();
    if (input.desc.world == first.desc.world) continue;
    return UnfitFor(op, "member " + ToString(first.member) + " laid its tensors out for " +
                            std::to_string(first.desc.world) + " members, member " +
                            ToString(input.member) + " for " + std::to_string(input.desc.world));
  }
  const auto laid_out = [&](size_t present) {
    return UnfitFor(op, "its tensors are laid out for " + std::to_string(op.desc.world) +
                            " members, and " + std::to_string(present) + " take part");
  };
  const auto absent = [&](const std::string& role, MemberId member) {
    return UnfitFor(
        op, "its " + role + ", " + TextOf(member, history) + ", " +
                (participants.RankOf(member) < 0 ? "does not take part" : "is in the background"));
  };
  if (kind == OpKind::kSendRecv) {
    if (!participants.Contributes(op.set[0])) return absent("sender", op.set[0]);
    if (participants.RankOf(op.set[1]) < 0) return absent("receiver", op.set[1]);
  }
  // A root that is gone also changes the number of members; the root says more.
  if (HasRoot(kind)) {
    if (!op.desc.root) return UnfitFor(op, "its root is not in the world any more");
    const bool gives = kind == OpKind::kBroadcast || kind == OpKind::kScatter;
    const bool there =
        gives ? participants.Contributes(op.desc.root) : participants.RankOf(op.desc.root) >= 0;
    if (!there) return absent("root", op.desc.root);
  }
  // In these, a part stands for a member that must be there to get or to give it.
  const bool all = op.desc.InParts() && kind != OpKind::kAllGather && kind != OpKind::kGather;
  if (all && members != op.desc.world) return laid_out(members);
  if (op.desc.InParts() && !all && contributing > op.desc.world) return laid_out(contributing);
  return std::nullopt;
}

void JudgeTerms(OpState* state, PeerId self) {
  OpState& op = *state;
  if (!op.desc.NeedsTerms() || op.said.judged || op.Refused() || op.result) return;
  op.said.judged = true;
  const std::vector<control::MemberInfo>& members = op.participants->members;
  std::map<PeerId, size_t> taken;
  for (const control::MemberInfo& info : members) {
    if (info.peer == self) continue;
    op.said.terms[info.member] = op.said.readies.at(info.peer).terms.at(taken[info.peer]++);
  }
  for (const PostedInput& input : op.inputs) op.said.terms[input.member] = input.terms;
  if (op.desc.weighted) {
    op.said.weight_sum = 0;
    for (const MemberId member : op.participants->contributors) {
      op.said.weight_sum += op.said.terms.at(member).weight;
    }
    if (std::isinf(op.said.weight_sum)) {
      op.said.mismatch =
          "the sum of the members' weights is too large for a double; give smaller ones";
      op.said.differs = true;
    }
    if (!(op.said.weight_sum > 0)) {
      op.said.unfit = Outcome{Code::kTooFewMembers,
                              Subject(op.desc, op.key.tag) +
                                  " ended: the weights of all members are 0; the input is intact"};
    }
  }
  if (!op.desc.unequal || op.said.differs) return;
  op.said.cuts = CutsOf(op);
  op.said.mismatch = TermsMismatch(op);
  op.said.differs = op.said.mismatch.has_value();
}

std::vector<CutOwner> CutsOf(const OpState& op) {
  const OpKind kind = op.desc.kind;
  const std::vector<PeerId>& ring = op.participants->ring;
  const std::vector<control::MemberInfo>& members = op.participants->members;
  std::vector<CutOwner> cuts;
  const auto place = [&](MemberId member, int* position, int* post) {
    const int rank = op.participants->RankOf(member);
    const auto at = std::find(ring.begin(), ring.end(), members[rank].peer);
    *position = static_cast<int>(at - ring.begin());
    *post = -1;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i].member == member) *post = static_cast<int>(i);
    }
  };
  // `index`: of the part among those of the owner.
  const auto add = [&](MemberId owner, std::optional<MemberId> to, size_t index) {
    CutOwner& cut = cuts.emplace_back();
    place(owner, &cut.position, &cut.post);
    if (to) place(*to, &cut.to_position, &cut.to_post);
    if (!op.said.judged || !op.desc.unequal) return;
    cut.count = LengthIn(op.said.terms.at(owner).gives, index).value_or(0);
  };
  if (kind == OpKind::kBroadcast || kind == OpKind::kReduce) {
    add(op.desc.root, std::nullopt, 0);
  } else if (kind == OpKind::kSendRecv) {
    add(op.set[0], op.set[1], 0);
  }
  for (size_t i = 0; i < members.size() && op.desc.InParts(); ++i) {
    const MemberId member = members[i].member;
    const bool gives = op.Contributes(member);
    if (kind == OpKind::kReduceScatter) add(member, std::nullopt, i);
    if (kind == OpKind::kAllGather && gives) add(member, std::nullopt, i);
    if (kind == OpKind::kGather && gives) add(member, op.desc.root, i);
    if (kind == OpKind::kScatter) add(op.desc.root, member, i);
    for (size_t j = 0; j < members.size() && kind == OpKind::kAllToAll; ++j) {
      add(member, members[j].member, j);
    }
  }
  return cuts;
}

}  // namespace longhaul::peerd
