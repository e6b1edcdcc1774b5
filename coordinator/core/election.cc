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

// The key with most votes; of several the lowest.
template <class Key>
Key MostVotes(const std::map<Key, size_t>& votes) {
  return std::max_element(votes.begin(), votes.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

class Count {
 public:
  Count(std::vector<SyncOffer> offers, std::optional<uint64_t> due)
      : offers_(std::move(offers)), due_(due) {
    std::sort(offers_.begin(), offers_.end(),
              [](const SyncOffer& a, const SyncOffer& b) { return a.member < b.member; });
  }

  Election Run() {
    CheckStrategies();
    CheckRevisions();
    CheckManifests();
    Choose();
    for (const SyncOffer& offer : offers_) {
      election_.verdicts.push_back(VerdictOf(offer));
    }
    return std::move(election_);
  }

 private:
  void Refuse(const SyncOffer& offer, Code code, std::string text, MemberId compare_to = {}) {
    SyncVerdict verdict{offer.member, Do::kRefuse, {code, std::move(text)}, compare_to};
    refused_.emplace(offer.member, std::move(verdict));
  }
  template <class Use>
  void ForEachLegal(Use use) const {
    for (const SyncOffer& offer : offers_) {
      if (!refused_.contains(offer.member)) use(offer);
    }
  }
  // The offers that are legal so far, counted by what `key` gives.
  template <class KeyOf>
  auto Votes(KeyOf key) const {
    std::map<decltype(key(offers_.front())), size_t> votes;
    ForEachLegal([&](const SyncOffer& offer) { ++votes[key(offer)]; });
    return votes;
  }

  void CheckStrategies() {
    const auto popular = static_cast<size_t>(std::count_if(
        offers_.begin(), offers_.end(),
        [](const SyncOffer& offer) { return offer.strategy == SyncStrategy::kPopular; }));
    const size_t others = offers_.size() - popular;
    if (popular == 0 || others == 0) return;
    const bool keep_popular = popular >= others;
    for (const SyncOffer& offer : offers_) {
      if ((offer.strategy == SyncStrategy::kPopular) == keep_popular) continue;
      Refuse(offer, Code::kInvalidArgument,
             std::string("strategy is ") + Name(offer.strategy) + ", " +
                 std::to_string(keep_popular ? popular : others) + " of " +
                 std::to_string(offers_.size()) + " members use " +
                 (keep_popular ? "popular" : "send or receive") +
                 ": popular has to be used by all members or by none");
    }
  }

  void CheckRevisions() {
    if (!due_) return;
    for (const SyncOffer& offer : offers_) {
      if (offer.revision <= *due_ || refused_.contains(offer.member)) continue;
      Refuse(offer, Code::kStateMismatch,
             "revision is " + std::to_string(offer.revision) + ", due is " + std::to_string(*due_) +
                 ": between two syncs the revision rises by one, not more");
    }
  }

  void CheckManifests() {
    const auto votes = Votes([](const SyncOffer& offer) { return offer.manifest; });
    if (votes.empty()) return;
    election_.manifest = MostVotes(votes);
    MemberId holder;
    ForEachLegal([&](const SyncOffer& offer) {
      if (offer.manifest == election_.manifest && !holder) holder = offer.member;
    });
    for (const SyncOffer& offer : offers_) {
      if (offer.manifest == election_.manifest || refused_.contains(offer.member)) continue;
      Refuse(offer, Code::kStateMismatch,
             "the tensors that this member declares differ from those of " +
                 std::to_string(votes.at(election_.manifest)) + " of " +
                 std::to_string(offers_.size()) + " members",
             holder);
    }
  }

  static bool Candidate(const SyncOffer& offer) { return offer.strategy != SyncStrategy::kReceive; }

  void Choose() {
    std::optional<uint64_t> highest;
    ForEachLegal([&](const SyncOffer& offer) {
      if (Candidate(offer)) highest = std::max(highest.value_or(0), offer.revision);
    });
    if (!highest) {
      ForEachLegalCopy([this](const SyncOffer& offer) {
        Refuse(offer, Code::kFailedPrecondition,
               "no member offers a state: all of them only receive; one has to use send");
      });
      return;
    }
    std::map<Hash128, size_t> votes;
    ForEachLegal([&](const SyncOffer& offer) {
      if (Candidate(offer) && offer.revision == *highest) ++votes[offer.state];
    });
    election_.elected = true;
    election_.revision = *highest;
    election_.state = MostVotes(votes);
    ForEachLegal([&](const SyncOffer& offer) {
      if (Candidate(offer) && Holds(offer)) election_.holders.push_back(offer.member);
    });
    ForEachLegalCopy([&](const SyncOffer& offer) {
      if (offer.strategy != SyncStrategy::kSend || offer.state == election_.state) return;
      Refuse(offer, Code::kStateMismatch,
             "this member only sends, and its state (revision " + std::to_string(offer.revision) +
                 ") is not the elected one (revision " + std::to_string(*highest) + ", " +
                 std::to_string(votes.at(election_.state)) + " votes)");
    });
  }

  bool Holds(const SyncOffer& offer) const { return offer.state == election_.state; }

  // Like ForEachLegal() for a use that refuses.
  template <class Use>
  void ForEachLegalCopy(Use use) {
    std::vector<SyncOffer> legal;
    ForEachLegal([&](const SyncOffer& offer) { legal.push_back(offer); });
    for (const SyncOffer& offer : legal) use(offer);
  }

  SyncVerdict VerdictOf(const SyncOffer& offer) const {
    const auto refused = refused_.find(offer.member);
    if (refused != refused_.end()) return refused->second;
    return {offer.member, Holds(offer) ? Do::kKeep : Do::kFetch, {}, {}};
  }

  std::vector<SyncOffer> offers_;
  const std::optional<uint64_t> due_;
  std::map<MemberId, SyncVerdict> refused_;
  Election election_;
};

}  // namespace

Election Elect(std::vector<SyncOffer> offers, std::optional<uint64_t> due) {
  std::set<MemberId> members;
  for (const SyncOffer& offer : offers) LH_CHECK(members.insert(offer.member).second);
  return Count(std::move(offers), due).Run();
}

}  // namespace longhaul::coordinator
