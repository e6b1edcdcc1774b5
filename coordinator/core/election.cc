#include "coordinator/core/election.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"

namespace longhaul::coordinator {
namespace {

using Do = SyncVerdict::Do;

const char* Name(SyncStrategy strategy) {
  switch (strategy) {
    case SyncStrategy::kPopular:
      return "popular";
    case SyncStrategy::kReceive:
      return "receive";
    case SyncStrategy::kSend:
      return "send";
  }
  return "unknown";
}

// The key with the most votes; with equal votes the lowest key.
template <class Key>
Key MostVotes(const std::map<Key, size_t>& votes) {
  return std::max_element(votes.begin(), votes.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

class Count {
 public:
  Count(std::vector<Candidate> offers, std::optional<Agreed> agreed)
      : offers_(std::move(offers)), agreed_(agreed) {
    std::sort(offers_.begin(), offers_.end(),
              [](const Candidate& a, const Candidate& b) { return a.member < b.member; });
  }

  Election Run() {
    CheckStrategies();
    CheckRevisions();
    CheckManifests();
    Choose();
    if (!election_.again.empty()) return std::move(election_);
    for (const Candidate& c : offers_) {
      election_.verdicts.push_back(VerdictOf(c));
    }
    return std::move(election_);
  }

 private:
  void Refuse(const Candidate& c, Code code, std::string text, MemberId compare_to = {}) {
    SyncVerdict verdict{c.member, Do::kRefuse, {code, std::move(text)}, compare_to};
    refused_.emplace(c.member, std::move(verdict));
  }
  // Whether the offer speaks for what the group has agreed on.
  bool Stands(const Candidate& c) const {
    if (!agreed_) return false;
    return c.holds || (c.offer.complete && c.offer.revision == agreed_->revision &&
                       c.offer.state == agreed_->state && c.offer.manifest == agreed_->manifest);
  }
  // Whether the offer has a vote on strategies and manifests.
  bool MayVote(const Candidate& c) const {
    if (refused_.contains(c.member)) return false;
    return Stands(c) || std::none_of(offers_.begin(), offers_.end(), [this](const Candidate& o) {
             return !refused_.contains(o.member) && Stands(o);
           });
  }
  // Calls use(offer) for each offer that is not refused. `use` may refuse it.
  template <class Use>
  void ForEachLegal(Use use) const {
    for (const Candidate& c : offers_) {
      if (!refused_.contains(c.member)) use(c);
    }
  }

  void CheckStrategies() {
    size_t popular = 0;
    size_t others = 0;
    ForEachLegal([&](const Candidate& c) {
      if (MayVote(c)) ++(c.offer.strategy == SyncStrategy::kPopular ? popular : others);
    });
    const bool keep_popular = popular >= others;
    for (const Candidate& c : offers_) {
      if ((c.offer.strategy == SyncStrategy::kPopular) == keep_popular) continue;
      Refuse(c, Code::kInvalidArgument,
             std::string("strategy is ") + Name(c.offer.strategy) + ", " +
                 std::to_string(keep_popular ? popular : others) + " of " +
                 std::to_string(popular + others) + " members with a vote use " +
                 (keep_popular ? "popular" : "send or receive") +
                 ": popular has to be used by all members or by none");
    }
  }

  void CheckRevisions() {
    if (!agreed_) return;
    for (Candidate& c : offers_) {
      if (c.offer.revision <= agreed_->due || refused_.contains(c.member)) continue;
      if (c.offer.kept) {
        c.offer.strategy = SyncStrategy::kReceive;
        continue;
      }
      Refuse(c, Code::kStateMismatch,
             "revision is " + std::to_string(c.offer.revision) + ", due is " +
                 std::to_string(agreed_->due) +
                 ": a revision rises by at most one in each step since the last sync");
    }
  }

  void CheckManifests() {
    std::map<Hash128, size_t> votes;
    size_t voters = 0;
    ForEachLegal([&](const Candidate& c) {
      if (!MayVote(c)) return;
      ++votes[c.offer.manifest];
      ++voters;
    });
    if (votes.empty()) return;
    election_.manifest = MostVotes(votes);
    if (agreed_) {
      const auto stands = votes.find(agreed_->manifest);
      const bool tie = stands != votes.end() && stands->second == votes.at(election_.manifest);
      if (tie) election_.manifest = agreed_->manifest;
    }
    MemberId holder;
    ForEachLegal([&](const Candidate& c) {
      if (c.offer.manifest == election_.manifest && !holder) holder = c.member;
    });
    for (const Candidate& c : offers_) {
      if (c.offer.manifest == election_.manifest || refused_.contains(c.member)) continue;
      Refuse(c, Code::kStateMismatch,
             "the tensors that this member declares differ from those of " +
                 std::to_string(votes.at(election_.manifest)) + " of " + std::to_string(voters) +
                 " members with a vote",
             holder);
    }
  }

  bool MayWin(const Candidate& c) const {
    return c.offer.complete && c.offer.strategy != SyncStrategy::kReceive &&
           (!defended_ || Stands(c) || c.offer.kept);
  }

  // Whether an incomplete offer may be a candidate in a later election. Sets Election.again then.
  bool Postpone() {
    std::optional<MemberId> fetching;
    ForEachLegal([&](const Candidate& c) {
      if (c.offer.complete || c.offer.strategy == SyncStrategy::kReceive || fetching) return;
      fetching = c.member;
      election_.revision = c.offer.revision;
    });
    if (!fetching) return false;
    election_.again = "no member offers a state that can be elected, and " + ToString(*fetching) +
                      " was still fetching one";
    return true;
  }

  void Choose() {
    bool defended = false;
    ForEachLegal([&](const Candidate& c) {
      if (MayWin(c) && Stands(c) && c.offer.revision >= agreed_->revision) defended = true;
    });
    defended_ = defended;
    std::optional<uint64_t> highest;
    ForEachLegal([&](const Candidate& c) {
      if (MayWin(c)) highest = std::max(highest.value_or(0), c.offer.revision);
    });
    if ((!highest || (agreed_ && *highest < agreed_->revision)) && Postpone()) return;
    if (!highest) {
      ForEachLegal([this](const Candidate& c) {
        Refuse(c, Code::kFailedPrecondition,
               "no member offers a state: each of them only receives; one has to use send");
      });
      return;
    }
    if (agreed_ && *highest < agreed_->revision) {
      ForEachLegal([&](const Candidate& c) {
        Refuse(c, Code::kStateMismatch,
               "the highest revision that anybody offers is " + std::to_string(*highest) +
                   ", committed was " + std::to_string(agreed_->revision) +
                   ": load a checkpoint of it, or let all members leave: a group that was empty "
                   "starts at any revision");
      });
      return;
    }
    std::map<Hash128, size_t> votes;
    ForEachLegal([&](const Candidate& c) {
      if (MayWin(c) && c.offer.revision == *highest) ++votes[c.offer.state];
    });
    election_.elected = true;
    election_.revision = *highest;
    election_.state = MostVotes(votes);
    ForEachLegal([&](const Candidate& c) {
      if (c.offer.complete && Holds(c)) election_.holders.push_back(c.member);
    });
    ForEachLegal([&](const Candidate& c) {
      if (c.offer.strategy != SyncStrategy::kSend || c.offer.state == election_.state) return;
      Refuse(c, Code::kStateMismatch,
             "this member only sends, and its state (revision " + std::to_string(c.offer.revision) +
                 ") is not the elected one (revision " + std::to_string(*highest) + ", " +
                 std::to_string(votes.at(election_.state)) + " votes)");
    });
  }

  bool Holds(const Candidate& c) const { return c.offer.state == election_.state; }

  SyncVerdict VerdictOf(const Candidate& c) const {
    const auto refused = refused_.find(c.member);
    if (refused != refused_.end()) return refused->second;
    // An incomplete offer always fetches. Its transfer may find that nothing is missing.
    return {c.member, Holds(c) && c.offer.complete ? Do::kKeep : Do::kFetch, {}, {}};
  }

  std::vector<Candidate> offers_;
  const std::optional<Agreed> agreed_;
  std::map<MemberId, SyncVerdict> refused_;
  bool defended_ = false;  // a candidate stands for the group, so newcomers' states may not win
  Election election_;
};

}  // namespace

Election Elect(std::vector<Candidate> offers, std::optional<Agreed> agreed) {
  std::set<MemberId> members;
  for (const Candidate& c : offers) LH_CHECK(members.insert(c.member).second);
  return Count(std::move(offers), agreed).Run();
}

}  // namespace longhaul::coordinator
