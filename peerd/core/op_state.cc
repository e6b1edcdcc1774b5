#include "peerd/core/op_state.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "peerd/core/algorithm.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {

uint64_t SetOf(OpKind kind, const std::vector<MemberId>& members) {
  if (members.empty()) return 0;
  Digester digest;
  digest.Add(kind == OpKind::kSendRecv);
  for (const MemberId member : members) digest.Add(member);
  return std::max<uint64_t>(1, digest.value());
}

std::string Subject(const OpDesc& desc, uint64_t tag) {
  return std::string(Name(desc.kind)) + " tag " + std::to_string(tag);
}

std::string AbortedBy(const OpDesc& desc, uint64_t tag, const std::string& cause) {
  // In these, the only tensor of a member may be a target.
  const bool one_way = desc.kind == OpKind::kBroadcast || desc.kind == OpKind::kSendRecv;
  return Subject(desc, tag) + " aborted: " + cause +
         (one_way ? "; the sender's tensor is unchanged, what receivers have may be anything"
                  : "; the source is unchanged") +
         ": look at the world and start it again";
}

Outcome RefusedBy(const OpRefusal& refusal, OpKind kind, const OpDesc& desc, uint64_t tag) {
  return {Code::kInvalidArgument, Subject(desc, tag) + " refused: the " + Name(kind) +
                                      " of member " + ToString(refusal.member) +
                                      " was refused there, so it ends at all: " + refusal.why};
}

bool MayEndAtOnce(const OpDesc& desc) {
  const bool whole = desc.kind == OpKind::kAllReduce || desc.kind == OpKind::kBarrier ||
                     desc.kind == OpKind::kAllGather || desc.kind == OpKind::kBroadcast;
  return whole && desc.on_fault == OnFault::kRetry;
}

void SetPhases(Tick complete_at, Tick moved_at, Tick posted, OpInfo* info) {
  info->wait_us = std::max<int64_t>(0, complete_at - posted);
  info->transfer_us = std::max<int64_t>(0, moved_at - std::max(complete_at, posted));
}

bool OpState::AllEvicted() const {
  return !refusal && std::all_of(inputs.begin(), inputs.end(), [](const PostedInput& input) {
    return input.evicted.has_value();
  });
}

bool OpState::EndsAtOnce() const {
  // With signed READYs, nothing is answered before all participants agree on what each has said.
  return algorithm == Algorithm::kOneShot && MayEndAtOnce(desc) && !Refused() &&
         said.verdicts.signed_as() == nullptr;
}

// The fate of an op may depend on its ordinals at other peers if the op is done, or may be aborted.
// An op whose inputs travel with READY needs them too, because an earlier op of the same key may
// linger at another peer.
// All other ops are redone, and their ordinals would only make reports longer.
bool OpState::NeedsMatches() const {
  return said.done || desc.on_fault == OnFault::kAbort || IsOneShot(desc) || offered ||
         cancelled == Cancelled::kWanted;
}

uint64_t OpState::Step() const {
  if (refusal) return refusal->step;
  uint64_t step = 0;
  for (const PostedInput& input : inputs) step = std::max(step, input.step);
  return step;
}

std::vector<bool> OpState::ContributesOf() const {
  std::vector<bool> contributes;
  for (const PostedInput& input : inputs) contributes.push_back(Contributes(input.member));
  return contributes;
}

// ------------------------------------------------------------------------------ an attempt

bool OpState::HasInputOf(MemberId member) const {
  return std::any_of(inputs.begin(), inputs.end(),
                     [member](const PostedInput& input) { return input.member == member; });
}

bool OpState::Gathered(const Participants& all, PeerId self) const {
  return std::all_of(all.members.begin(), all.members.end(), [&](const auto& info) {
    return info.peer != self || HasInputOf(info.member);
  });
}

void OpState::BeginAttempt(std::shared_ptr<const Participants> all) {
  participants = std::move(all);
  said.announced = true;
  if (refusal) {
    said.differs = true;
    return;
  }
  std::sort(inputs.begin(), inputs.end(), [&](const PostedInput& a, const PostedInput& b) {
    return participants->RankOf(a.member) < participants->RankOf(b.member);
  });
  desc = inputs.front().desc;
  const auto other = std::find_if(inputs.begin(), inputs.end(), [&](const PostedInput& input) {
    return !input.desc.SameButForWorld(desc);
  });
  const bool same_world = std::all_of(inputs.begin(), inputs.end(), [&](const PostedInput& input) {
    return input.desc.world == desc.world && input.desc.root == desc.root;
  });
  // No world of several members is like this one, so all participants find the op unfit.
  if (!same_world) {
    desc.world = desc.InParts() ? 1 : 0;
    desc.root = MemberId();
  }
  if (other != inputs.end())
    said.other_offer = OtherOffer{other->member, other->desc, other->outline};
  said.differs = said.other_offer.has_value();
  const bool mesh = IsShared(desc.kind) ? participants->mesh_of_owners : participants->mesh;
  const size_t peers = participants->ring.size();
  codec = ChooseCodec(desc, peers, mesh, participants->cost);
  algorithm = ChooseAlgorithm(desc.With(codec), peers, mesh, participants->cost);
}

void OpState::ForgetAttempt() {
  said = Said();
  overdue = false;
  if (!lingers) result.reset();
}

void OpState::NoteComplete(Tick now) {
  if (complete_once) return;
  complete_once = true;
  complete_at = now;
}

std::string OpState::TakeReady(PeerReady ready, const std::map<PeerId, std::string>& keys) {
  const PeerId peer = ready.peer;
  std::string problem = said.verdicts.TakeSignature(peer, ready.signature, keys);
  if (!problem.empty()) return problem;
  if (refusal) {
    // All local members are answered.
    said.readies.emplace(peer, std::move(ready));
    return "";
  }
  if (ready.refusal) {
    if (lingers) return "is announced again, and is refused now";
    said.differs = true;
    said.readies.emplace(peer, std::move(ready));
    return "";
  }
  if (ready.desc != desc || ready.other_offer) {
    if (lingers) return "is announced again, and is another op than before";
    if (ready.desc.SameButForWorld(desc) && !ready.other_offer) {
      const MemberId other = participants->FirstMemberOf(peer);
      const std::string cause = "member " + ToString(other) + " posted " + ToString(ready.desc) +
                                ", this peer " + ToString(desc) +
                                ", as members do that hear of a change of the world at different "
                                "times";
      said.unfit = Outcome{Code::kAborted, AbortedBy(desc, key.tag, cause)};
      said.readies.emplace(peer, std::move(ready));
      return "";
    }
    said.differs = true;
  }
  const auto& members = participants->members;
  const auto expected = std::count_if(members.begin(), members.end(),
                                      [&](const auto& info) { return info.peer == peer; });
  if (!ready.terms.empty() && ready.terms.size() != static_cast<size_t>(expected)) {
    return "with the terms of " + std::to_string(ready.terms.size()) + " members, not of " +
           std::to_string(expected);
  }
  // A peer that could have been sent a result has to wait for it.
  if (ready.result && !IsOneShot(desc) && !lingers && said.input == ReadyInput::kSegments) {
    return "carries a result of an op whose inputs were never sent with READY";
  }
  if (lingers) ready.payload.clear();
  if (ready.result && !result) result = std::move(ready.result);
  ready.result.reset();
  said.readies.emplace(peer, std::move(ready));
  return "";
}

void OpState::JudgeInputs() {
  if (said.input == ReadyInput::kSegments || algorithm == Algorithm::kOneShot) return;
  const bool all = said.input == ReadyInput::kCarried &&
                   std::all_of(said.readies.begin(), said.readies.end(), [](const auto& ready) {
                     return ready.second.input == ReadyInput::kCarried;
                   });
  if (all || result) {
    algorithm = Algorithm::kOneShot;
  } else {
    for (auto& [peer, ready] : said.readies) ready.payload = {};
  }
}

// ------------------------------------------------------------------------------ messages

SendReady OpState::Ready(const GroupKey& group, Epoch attempt) const {
  SendReady ready;
  ready.group = group;
  ready.ordinal = ordinal;
  ready.attempt = attempt;
  ready.boundary = key.boundary;
  ready.tag = key.tag;
  ready.set = key.set;
  ready.desc = desc;
  ready.step = Step();
  ready.other_offer = said.other_offer;
  if (said.verdicts.signed_as() != nullptr) ready.sign = said.verdicts.signed_as()->index;
  if (lingers) {
    ready.refusal = refusal;
    ready.result = result;
    return ready;
  }
  // If the offers of local members differ, no input is sent: tensors of different sizes cannot be
  // added up, and the op will be refused anyway.
  ready.input = said.input;
  ready.one_shot = (IsOneShot(desc) && !said.other_offer) || said.input == ReadyInput::kCarried;
  ready.contributes = ContributesOf();
  ready.cuts = said.cuts;
  ready.outline = inputs.front().outline;
  for (const PostedInput& input : inputs) {
    ready.posts.push_back(input.post);
    if (desc.NeedsTerms() && !said.other_offer) ready.terms.push_back(input.terms);
    if (desc.weighted) ready.weights.push_back(input.terms.weight);
  }
  return ready;
}

StartAttempt OpState::Start(const GroupKey& group, Epoch attempt) {
  StartAttempt start;
  start.group = group;
  start.ordinal = ordinal;
  start.attempt = attempt;
  start.desc = desc.With(codec);
  start.ring = participants->ring;
  start.members = static_cast<uint32_t>(participants->contributors.size());
  for (const PostedInput& input : inputs) start.posts.push_back(input.post);
  start.contributes = ContributesOf();
  const auto& members = participants->members;
  std::vector<int> first_rank;  // by position: of the first member that contributes
  for (const PeerId peer : start.ring) {
    uint32_t contributing = 0;
    int first = static_cast<int>(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].peer != peer || !Contributes(members[i].member)) continue;
      if (contributing++ == 0) first = static_cast<int>(i);
    }
    start.ring_contributes.push_back(contributing);
    first_rank.push_back(first);
  }
  if (desc.order == Order::kRank) {
    for (size_t i = 0; i < start.ring.size(); ++i) start.order.push_back(static_cast<int>(i));
    std::sort(start.order.begin(), start.order.end(), [&](int a, int b) {
      return std::pair(first_rank[a], a) < std::pair(first_rank[b], b);
    });
  }
  if (desc.weighted) {
    for (const PostedInput& input : inputs) start.weights.push_back(input.terms.weight);
    start.weight_sum = said.weight_sum;
  }
  start.algorithm = algorithm;
  start.cuts = said.cuts;
  if (start.desc.Encodes()) {
    start.seed = Digester().Add(group).Add(key.boundary).Add(key.tag).Add(key.set).value();
  }
  if (algorithm == Algorithm::kMesh) {
    if (IsShared(desc.kind)) start.shares = participants->cost.shares;
    if (desc.kind == OpKind::kBroadcast && !result) {
      const auto root = static_cast<size_t>(said.cuts.front().position);
      start.shares = PassedOn(start.desc, root, start.ring.size(), participants->cost);
    }
  }
  if (result) {
    // The result may be of an older epoch, in which other members took part.
    if (desc.kind == OpKind::kAllGather) start.cuts.assign(result->members.size(), {});
    if (desc.kind == OpKind::kBroadcast) start.cuts.assign(1, {});
    start.result = result->bytes;
  } else if (algorithm == Algorithm::kOneShot) {
    for (const PeerId peer : start.ring) {
      const auto it = said.readies.find(peer);
      const bool own = it == said.readies.end();
      start.payloads.push_back(own ? "" : std::exchange(it->second.payload, {}));
    }
  }
  return start;
}

control::OpReport OpState::Report(PeerId self) const {
  control::OpReport report;
  report.ordinal = ordinal;
  report.boundary = key.boundary;
  report.tag = key.tag;
  report.set = key.set;
  report.kind = static_cast<uint32_t>(Offered().kind);
  report.step = Step();
  report.cancelled = cancelled == Cancelled::kWanted;
  report.done = said.done;
  if (said.done) {
    const OpVerdict verdict = said.verdicts.Own(self, Refused());
    report.verdict = verdict.refused ? 2 : 0;
    // The digest says whether the op is refused, too.
    if (verdict.readies_digest) report.verdict = std::max(verdict.readies_digest->low, uint64_t{3});
  }
  report.abort_on_fault = desc.on_fault == OnFault::kAbort;
  if (!said.announced) return report;
  for (const PeerId peer : participants->ring) {
    if (!NeedsMatches()) break;
    const auto it = said.readies.find(peer);
    if (it != said.readies.end()) report.matches.push_back({peer, it->second.ordinal});
  }
  return report;
}

OpInfo OpState::Info(const EpochHistory& history) const {
  OpInfo info;
  if (participants) {
    info.epoch = participants->epoch;
    info.members = participants->contributors;
    info.hosts = participants->hosts;
  }
  if (result && !Refused()) {
    info.epoch = result->epoch;
    info.members = result->members;
    // The result may be of an older epoch, with other members.
    const bool same = participants && participants->contributors == info.members;
    info.hosts = same ? participants->hosts : history.HostsOf(info.members);
  }
  info.algorithm = algorithm;
  const bool encodes = algorithm == Algorithm::kMesh || algorithm == Algorithm::kRing;
  info.codec = encodes ? codec : Quantization::kNone;
  info.retries = retries;
  return info;
}

Outcome OpState::Mismatch(const PostedInput& input) const {
  const auto refused = [&](const std::string& why) {
    return Outcome{Code::kInvalidArgument, Subject(desc, key.tag) + " refused: " + why};
  };
  const auto offered_by = [&](MemberId member, const OpDesc& theirs, const std::string& outline) {
    const std::string lists =
        theirs.list != input.desc.list ? ListDifference(outline, input.outline) : "";
    return refused("member " + ToString(member) + " offered " + ToString(theirs) +
                   ", this member " + ToString(input.desc) + lists);
  };
  if (said.mismatch) return refused(*said.mismatch);
  for (const auto& [peer, ready] : said.readies) {
    if (ready.refusal) return RefusedBy(*ready.refusal, ready.desc.kind, desc, key.tag);
  }
  for (const PostedInput& other : inputs) {
    if (!other.desc.SameButForWorld(input.desc)) {
      return offered_by(other.member, other.desc, other.outline);
    }
  }
  for (const PeerId peer : participants->ring) {
    const auto it = said.readies.find(peer);
    if (it == said.readies.end() || it->second.desc.SameButForWorld(input.desc)) continue;
    return offered_by(participants->FirstMemberOf(peer), it->second.desc, it->second.outline);
  }
  for (const auto& [peer, ready] : said.readies) {
    if (!ready.other_offer) continue;
    const OtherOffer& other = *ready.other_offer;
    return offered_by(other.member, other.desc, other.outline);
  }
  LH_CHECK(false) << "refused without a difference " << Subject(desc, key.tag);
  return {};
}

void OpState::Explain(const EpochHistory& history, PeerId self, bool frozen,
                      control::OldestOp* oldest) const {
  oldest->tag = key.tag;
  oldest->boundary = key.boundary;
  const auto await = [oldest](auto id, auto* list) {
    if (list->size() < control::kAwaitedMax) list->push_back(id);
    ++oldest->awaited;
  };
  const auto await_peers = [&](const auto& has) {
    for (const PeerId peer : participants->ring) {
      if (peer != self && !has(peer)) await(peer, &oldest->peers);
    }
  };
  if (frozen || said.halted || run == Run::kStopping) {
    oldest->phase = control::OpPhase::kFrozen;
  } else if (!said.announced) {
    oldest->phase = control::OpPhase::kStart;
    // If the op is for a set of members, the participants live only as long as this pointer.
    const std::shared_ptr<const Participants> all = history.For(key.boundary, set);
    for (const control::MemberInfo& info : all->members) {
      if (info.peer == self && !HasInputOf(info.member)) await(info.member, &oldest->members);
    }
  } else if (!AllReady()) {
    oldest->phase = control::OpPhase::kReady;
    await_peers([this](PeerId peer) { return said.readies.contains(peer); });
  } else if (!said.done) {
    oldest->phase = control::OpPhase::kTransfer;
  } else {
    oldest->phase = control::OpPhase::kDone;
    await_peers([this](PeerId peer) { return said.verdicts.HasDone(peer); });
  }
}

// ------------------------------------------------------------------------------ for tests

void OpState::CheckInvariants(PeerId self, const std::string& name) const {
  LH_CHECK(!said.announced || ordinal) << name;
  LH_CHECK(said.announced || (said.readies.empty() && said.verdicts.count() == 0 && !said.done))
      << name;
  for (const auto& [peer, ready] : said.readies) {
    LH_CHECK(peer != self && participants->HasPeer(peer)) << name;
  }
  for (const auto& [peer, verdict] : said.verdicts.dones()) {
    LH_CHECK(said.readies.contains(peer)) << name;
  }
  LH_CHECK(!said.verdicts.disputed() || AllReady()) << name;
  LH_CHECK(!abort || !said.announced) << name;
  if (lingers) {
    LH_CHECK(run == Run::kNone && !said.halted && !abort && !redone) << name;
    if (refusal) {
      LH_CHECK(inputs.empty() && !result && (!said.announced || Refused())) << name;
    } else {
      LH_CHECK(said.announced && result && !Refused()) << name;
    }
    return;
  }
  LH_CHECK(!inputs.empty()) << name;
  LH_CHECK(!Live() || said.announced) << name;
  if (!said.done) return;
  LH_CHECK(AllReady()) << name;
  LH_CHECK(Refused() ? run == Run::kNone : run == Run::kComplete || run == Run::kStopping) << name;
}

}  // namespace longhaul::peerd
