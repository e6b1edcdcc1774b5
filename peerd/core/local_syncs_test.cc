#include "peerd/core/local_syncs.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/prng.h"

namespace longhaul::peerd {
namespace {

using control::SyncAction;
using control::SyncResult;
using control::SyncSource;
using control::SyncStrategy;
// The actions that LocalSyncs emits. They can be compared.
using LocalSyncAction =
    std::variant<ToCoordinator, ServeState, EndServe, StartTransfer, ChangeSources, StopTransfer,
                 CompareManifest, SyncDone, TakeDone>;
using Actions = std::vector<LocalSyncAction>;

Actions Narrow(const std::vector<Action>& actions) {
  Actions narrow;
  for (const Action& action : actions) {
    std::visit(
        [&](const auto& one) {
          if constexpr (std::is_constructible_v<LocalSyncAction, decltype(one)>) {
            narrow.push_back(one);
          } else {
            ADD_FAILURE() << "not an action of a sync";
          }
        },
        action);
  }
  return narrow;
}

const GroupKey kRun{"run", 0};
const std::vector<SyncSource> kSources = {{MemberId(8), PeerId(8)}, {MemberId(9), PeerId(9)}};

template <class T>
std::vector<T> Only(const Actions& actions) {
  std::vector<T> found;
  for (const LocalSyncAction& action : actions) {
    if (const T* one = std::get_if<T>(&action)) found.push_back(*one);
  }
  return found;
}
template <class T>
std::vector<T> Said(const Actions& actions) {
  std::vector<T> found;
  for (const ToCoordinator& action : Only<ToCoordinator>(actions)) {
    if (const T* one = std::get_if<T>(&action.message)) found.push_back(*one);
  }
  return found;
}

class LocalSyncsTest : public testing::Test {
 protected:
  template <class F>
  Actions& Do(F what) {
    given_.clear();
    what();
    syncs_.CheckInvariants();
    return out_ = Narrow(given_);
  }
  Actions& Begin(uint64_t id, uint64_t state, uint64_t revision = 3, bool with_vote = false,
                 SyncStrategy strategy = SyncStrategy::kPopular) {
    const SyncRequest request{strategy, revision, {1, 1}, {state, 0}};
    return Do([&] {
      Outcome refusal = syncs_.MayBegin(LocalId(id));
      if (refusal.ok()) {
        syncs_.Begin(LocalId(id), kRun, MemberId(id), request, with_vote, &given_);
      } else {
        given_.push_back(syncs_.RefusalOf(LocalId(id), std::move(refusal)));
      }
    });
  }
  Actions& Serve(uint64_t id, uint64_t number, uint64_t state, uint64_t revision = 3) {
    return Tell(
        id, {kRun, MemberId(id), number, SyncAction::kServe, {}, revision, {1, 1}, {state, 0}, {}});
  }
  Actions& Fetch(uint64_t id, uint64_t number, uint64_t state, uint64_t revision = 4,
                 std::vector<SyncSource> sources = kSources) {
    return Tell(id, {kRun,
                     MemberId(id),
                     number,
                     SyncAction::kFetch,
                     {},
                     revision,
                     {1, 1},
                     {state, 0},
                     std::move(sources)});
  }
  Actions& Commit(uint64_t id, uint64_t number, uint64_t state, uint64_t revision) {
    return Tell(
        id, {kRun, MemberId(id), number, SyncAction::kEnd, {}, revision, {1, 1}, {state, 0}, {}});
  }
  Actions& Refuse(uint64_t id, uint64_t number, const Outcome& outcome,
                  std::vector<SyncSource> compare = {}) {
    return Tell(
        id, {kRun, MemberId(id), number, SyncAction::kEnd, outcome, 0, {}, {}, std::move(compare)});
  }
  Actions& Tell(uint64_t id, const SyncResult& result) {
    return Do([&] { syncs_.Result(LocalId(id), result, share_, now_, &given_); });
  }
  Actions& Ended(uint64_t id, const Outcome& outcome = {}) {
    return Do([&] { syncs_.Ended({LocalId(id), outcome, 100, {MemberId(8)}, {}}, &given_); });
  }
  Actions& Resend() {
    return Do([&] { syncs_.Resend(&given_); });
  }
  Actions& Remove(uint64_t id) {
    return Do([&] { syncs_.Remove(LocalId(id), {Code::kEvicted, "out"}, &given_); });
  }
  bool Open(uint64_t id) const { return syncs_.Open(LocalId(id)); }

  // ---- in the background: agreed states differ in their revision
  static control::StateAgreed Agreed(uint64_t revision, uint64_t manifest = 1) {
    return {kRun, revision, {manifest, 1}, {100 + revision, 0}};
  }
  static SyncRequest Brought(uint64_t state, uint64_t revision) {
    return {SyncStrategy::kPopular, revision, {1, 1}, {state, 0}};
  }
  // The held member takes part in a sync. A transfer may be in progress.
  void SyncHeld(bool with_vote) {
    const SyncRequest request = Brought(0, 0);
    Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, with_vote, &given_); });
  }
  Actions& Hold(const SyncRequest& request, std::optional<control::StateAgreed> agreed = {}) {
    return Do([&] {
      syncs_.BeginBackground(LocalId(1), kRun, MemberId(1), request, agreed, kSources, now_,
                             &given_);
    });
  }
  Actions& Chase(uint64_t revision) {
    return Do([&] { syncs_.Chase(LocalId(1), Agreed(revision), kSources, &given_); });
  }
  void Measured(uint64_t left, uint64_t total = uint64_t{1} << 30) {
    syncs_.Measured(LocalId(1), left, total);
  }
  Actions& Take(int64_t wait_ms = 0) {
    return Do([&] { syncs_.Take(LocalId(1), now_ + Millis(wait_ms), now_, &given_); });
  }
  bool Ready(uint64_t newest, std::optional<SyncRequest> request = {}) {
    return syncs_.CaughtUp(LocalId(1), request ? &*request : nullptr, Agreed(newest));
  }
  static StartTransfer Round(uint64_t revision) {
    return {LocalId(1), kRun, revision, {1, 1}, {100 + revision, 0}, kSources, false, true};
  }

  LocalSyncs syncs_{1500};
  bool share_ = false;
  Tick now_{Seconds(100)};
  std::vector<Action> given_;
  Actions out_;
};

TEST_F(LocalSyncsTest, WhatAllHaveIsCommittedWithOneMessageEachWay) {
  const auto votes = Said<control::SyncVote>(Begin(1, 5));
  ASSERT_EQ(votes.size(), 1U);
  EXPECT_EQ(votes[0].offer,
            (control::SyncOffer{1, SyncStrategy::kPopular, 3, {1, 1}, {5, 0}, true}));
  EXPECT_EQ(Commit(1, 1, 5, 3),
            (Actions{EndServe{LocalId(1)}, SyncDone{LocalId(1), {}, 3, {5, 0}}}));
  EXPECT_FALSE(Open(1));
  EXPECT_EQ(Said<control::SyncVote>(Begin(1, 6)).at(0).offer.number, 2U);
}

TEST_F(LocalSyncsTest, AfterASyncThatFailedTheTrainersOwnStateIsOfferedWhole) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Ended(1, {Code::kUnavailable, "nobody"});
  Refuse(1, 1, {Code::kAborted, "sync again"});
  const auto vote = Said<control::SyncVote>(Begin(1, 9, 3, false, SyncStrategy::kSend)).at(0);
  EXPECT_TRUE(vote.offer.complete);
  EXPECT_EQ(vote.offer.state, (Hash128{9, 0}));
  EXPECT_EQ(Only<ServeState>(out_).at(0).state, (Hash128{9, 0}));
}

// A fetching peer may ask before the source hears of the election.
TEST_F(LocalSyncsTest, WhatIsOfferedIsServedUntilTheEnd) {
  Begin(1, 5);
  EXPECT_EQ(Only<ServeState>(out_),
            (std::vector<ServeState>{{LocalId(1), kRun, MemberId(1), {5, 0}}}));
  EXPECT_TRUE(Serve(1, 1, 5).empty());
  EXPECT_EQ(Commit(1, 1, 5, 3),
            (Actions{EndServe{LocalId(1)}, SyncDone{LocalId(1), {}, 3, {5, 0}}}));
}

TEST_F(LocalSyncsTest, WhoOnlyReceivesServesWhatItBroughtOnceThatIsElected) {
  EXPECT_TRUE(Only<ServeState>(Begin(1, 5, 3, false, SyncStrategy::kReceive)).empty());
  EXPECT_EQ(Only<ServeState>(Serve(1, 1, 5)).size(), 1U);
  EXPECT_TRUE(Serve(1, 1, 5).empty());
  EXPECT_EQ(Only<EndServe>(Commit(1, 1, 5, 3)).size(), 1U);
}

TEST_F(LocalSyncsTest, WhoOnlyReceivesServesWhatItFetchedAndNothingElse) {
  Begin(1, 9, 3, false, SyncStrategy::kReceive);
  EXPECT_TRUE(Only<ServeState>(out_).empty());
  EXPECT_TRUE(Only<ServeState>(Fetch(1, 1, 5)).empty());
  EXPECT_EQ(Only<ServeState>(Ended(1)),
            (std::vector<ServeState>{{LocalId(1), kRun, MemberId(1), {5, 0}}}));
  EXPECT_EQ(Only<EndServe>(Commit(1, 1, 5, 4)).size(), 1U);
  EXPECT_TRUE(Only<ServeState>(Begin(1, 5, 5, false, SyncStrategy::kReceive)).empty());
}

TEST_F(LocalSyncsTest, AReceiverThatHasTheElectedStateServesItOnceItHasSaidSo) {
  Begin(1, 5, 3, false, SyncStrategy::kReceive);
  EXPECT_EQ(Only<ServeState>(Fetch(1, 1, 5)).size(), 1U);
  EXPECT_EQ(Said<control::FetchDone>(out_).size(), 1U);
}

TEST_F(LocalSyncsTest, AFetcherFetchesSaysDoneAndServesFromThenOn) {
  Begin(1, 9);
  EXPECT_EQ(Fetch(1, 1, 5), (Actions{EndServe{LocalId(1)}, StartTransfer{LocalId(1),
                                                                         kRun,
                                                                         4,
                                                                         {1, 1},
                                                                         {5, 0},
                                                                         kSources,
                                                                         /*unequal_too=*/true}}));
  Ended(1);
  const auto done = Said<control::FetchDone>(out_);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0],
            (control::FetchDone{kRun, MemberId(1), 1, {}, {5, 0}, 100, {MemberId(8)}, {}}));
  EXPECT_EQ(Only<ServeState>(out_).size(), 1U);
  SyncDone ended{LocalId(1), {}, 4, {5, 0}};
  ended.bytes = 100;
  ended.sources = 1;
  EXPECT_EQ(Commit(1, 1, 5, 4), (Actions{EndServe{LocalId(1)}, ended}));
  Begin(1, 9);
  Fetch(1, 2, 5);
  EXPECT_FALSE(Only<StartTransfer>(out_).at(0).unequal_too) << "only once";
}

TEST_F(LocalSyncsTest, AFetchThatIsSaidAgainChangesTheSources) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  const std::vector<SyncSource> left = {kSources[1]};
  EXPECT_EQ(Fetch(1, 1, 5, 4, left), (Actions{ChangeSources{LocalId(1), left}}));
}

TEST_F(LocalSyncsTest, WhatATransferLeftHalfDoneIsNeverOfferedWhole) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  const auto done = Said<control::FetchDone>(Ended(1, {Code::kUnavailable, "nobody"}));
  EXPECT_EQ(done.at(0).outcome, (Outcome{Code::kUnavailable, "nobody"}));
  EXPECT_EQ(done.at(0).state, Hash128());
  EXPECT_TRUE(Only<ServeState>(out_).empty());
  EXPECT_FALSE(Said<control::SyncVote>(Resend()).at(0).offer.complete);
  Refuse(1, 1, {Code::kAborted, "failed"});
  EXPECT_EQ(out_, (Actions{SyncDone{LocalId(1), {Code::kAborted, "failed"}, 0, {}, 100, 1}}));
}

TEST_F(LocalSyncsTest, WhatWasKeptIsOfferedAsSuchUntilSomethingElseIsThere) {
  SyncRequest request{SyncStrategy::kPopular, 7, {1, 1}, {9, 0}};
  request.kept = true;
  Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_); });
  EXPECT_TRUE(Said<control::SyncVote>(out_).at(0).offer.kept);
  // The tensors with allow_unequal were kept, too.
  EXPECT_FALSE(Only<StartTransfer>(Fetch(1, 1, 5)).at(0).unequal_too);
  Ended(1);
  EXPECT_FALSE(Said<control::SyncVote>(Resend()).at(0).offer.kept);
}

TEST_F(LocalSyncsTest, ASyncThatFailsAfterTheFetchLeavesTheStateAsItWas) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Ended(1);
  Refuse(1, 1, {Code::kAborted, "another one failed"});
  const SyncDone ended = Only<SyncDone>(out_).at(0);
  EXPECT_EQ(ended.outcome.code, Code::kAborted);
  EXPECT_EQ(ended.state, Hash128()) << "nothing is to be written";
  const auto vote = Said<control::SyncVote>(Begin(1, 9)).at(0);
  EXPECT_TRUE(vote.offer.complete);
  EXPECT_EQ(vote.offer.state, (Hash128{9, 0}));
}

TEST_F(LocalSyncsTest, AnEndInTheMiddleOfATransferIsToldWhenNothingWritesAnyMore) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  EXPECT_EQ(Refuse(1, 1, {Code::kAborted, "failed"}), (Actions{StopTransfer{LocalId(1)}}));
  EXPECT_TRUE(Open(1));
  const auto ended = Only<SyncDone>(Ended(1, {Code::kAborted, "stopped"}));
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].outcome.text, "failed");
}

// The other members were told the same outcome. They go on, and wait for this member at their next
// call.
TEST_F(LocalSyncsTest, WhoIsRefusedWhileATransferIsOnIsToldWhatTheOthersAreTold) {
  const Outcome refusal{Code::kFailedPrecondition, "no member offers a state"};
  Begin(1, 9);
  Fetch(1, 1, 5);
  Refuse(1, 1, refusal);
  const auto ended = Only<SyncDone>(Ended(1, {Code::kAborted, "no source"}));
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].outcome, refusal);
}

TEST_F(LocalSyncsTest, WhoComesOutOfTheBackgroundInTheMiddleIsToldWhatTheOthersAreTold) {
  const Outcome refusal{Code::kFailedPrecondition, "no member offers a state"};
  Hold(Brought(7, 0));
  Chase(3);
  Begin(1, 7);
  EXPECT_EQ(Refuse(1, 1, refusal), Actions{});
  EXPECT_EQ(Only<SyncDone>(Ended(1, {Code::kAborted, "stopped"})).at(0).outcome, refusal);
}

TEST_F(LocalSyncsTest, WhatIsBeingFetchedIsOfferedAsIncomplete) {
  const auto complete = [this] { return Said<control::SyncVote>(Resend()).at(0).offer.complete; };
  Begin(1, 9);
  EXPECT_TRUE(complete());
  Fetch(1, 1, 5);
  EXPECT_FALSE(complete());
  Fetch(1, 1, 6);  // from a restarted coordinator
  EXPECT_FALSE(complete());
  Ended(1, {Code::kAborted, "stopped"});
  EXPECT_FALSE(complete()) << "the next one has begun";
  Ended(1);
  EXPECT_TRUE(complete());
}

TEST_F(LocalSyncsTest, WhatIsNotWholeIsOfferedAsIncompleteUntilItIsFetched) {
  Do([&] {
    SyncRequest request{SyncStrategy::kPopular, 3, {1, 1}, {7, 0}};
    request.whole = false;
    syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_);
  });
  EXPECT_FALSE(Said<control::SyncVote>(out_).at(0).offer.complete);
  EXPECT_TRUE(Only<ServeState>(out_).empty());
  EXPECT_EQ(Only<StartTransfer>(Fetch(1, 1, 7)).size(), 1u) << "though the digests may be the same";
  EXPECT_EQ(Only<ServeState>(Ended(1)).size(), 1u);
  Commit(1, 1, 7, 4);
  EXPECT_TRUE(Said<control::SyncVote>(Begin(1, 8, 5)).at(0).offer.complete);
}

TEST_F(LocalSyncsTest, WhatWasStoppedIsOfferedAsIncompleteAndThenWhole) {
  Hold(Brought(7, 0));
  Chase(3);
  SyncHeld(/*with_vote=*/true);
  EXPECT_FALSE(syncs_.OfferOf(LocalId(1))->complete);
  Ended(1, {Code::kAborted, "stopped"});
  EXPECT_FALSE(syncs_.OfferOf(LocalId(1))->complete);
  Refuse(1, 1, {Code::kAborted, "m1 was still fetching"});
  EXPECT_TRUE(Said<control::SyncVote>(Begin(1, 7, 0)).at(0).offer.complete);
}

// The coordinator refuses an incomplete offer with the strategy `send`.
TEST_F(LocalSyncsTest, ASenderOffersAllThatItHasOrReceives) {
  SyncRequest request = Brought(103, 3);
  request.strategy = SyncStrategy::kSend;
  request.unequal = true;
  const auto begin = [&] {
    Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_); });
    return Said<control::SyncVote>(out_).at(0).offer;
  };
  Hold(Brought(7, 0));
  Chase(3);
  Ended(1);
  Take();
  const control::SyncOffer taken = begin();
  EXPECT_TRUE(taken.complete);
  EXPECT_EQ(taken.strategy, SyncStrategy::kSend);
  syncs_ = LocalSyncs(1500);
  Hold(Brought(7, 0));
  Chase(3);
  const control::SyncOffer held = begin();
  EXPECT_FALSE(held.complete);
  EXPECT_EQ(held.strategy, SyncStrategy::kReceive);
}

TEST_F(LocalSyncsTest, AnotherManifestIsComparedBeforeTheErrorIsTold) {
  Begin(1, 9);
  EXPECT_EQ(Refuse(1, 1, {Code::kStateMismatch, "differs"}, {kSources[0]}),
            (Actions{CompareManifest{LocalId(1), kSources[0]}}));
  EXPECT_EQ(syncs_.NextDeadline(), now_ + Millis(1500));
  Do([&] {
    syncs_.ManifestCompared(LocalId(1), "tensor 0 is \"a\" here and \"b\" there", &given_);
  });
  EXPECT_EQ(Only<SyncDone>(out_).at(0).outcome.text,
            "differs: tensor 0 is \"a\" here and \"b\" there");
  EXPECT_TRUE(Do([&] { syncs_.ManifestCompared(LocalId(1), "late", &given_); }).empty());
}

TEST_F(LocalSyncsTest, TheErrorDoesNotWaitLongForTheManifest) {
  Begin(1, 9);
  Refuse(1, 1, {Code::kStateMismatch, "differs"}, {kSources[0]});
  now_ = syncs_.NextDeadline();
  Do([&] { syncs_.OnTime(now_, &given_); });
  EXPECT_EQ(Only<SyncDone>(out_).at(0).outcome.text, "differs");
  EXPECT_EQ(syncs_.NextDeadline(), kNever);
}

TEST_F(LocalSyncsTest, AnOfferWithAVoteIsNotSaidAlone) {
  EXPECT_TRUE(Said<control::SyncVote>(Begin(1, 5, 3, /*with_vote=*/true)).empty());
  ASSERT_TRUE(syncs_.OfferOf(LocalId(1)).has_value());
  EXPECT_EQ(syncs_.OfferOf(LocalId(1))->state, (Hash128{5, 0}));
  EXPECT_TRUE(Resend().empty());
  syncs_.VoteAnswered(LocalId(1));
  EXPECT_EQ(syncs_.OfferOf(LocalId(1)), std::nullopt);
  EXPECT_EQ(Said<control::SyncVote>(Resend()).size(), 1U);
  EXPECT_EQ(Only<SyncDone>(Commit(1, 1, 5, 3)).size(), 1U);
  EXPECT_TRUE(Resend().empty());
}

TEST_F(LocalSyncsTest, AfterAReconnectItSaysWhatIsThereNow) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  control::SyncOffer offer = Said<control::SyncVote>(Resend()).at(0).offer;
  EXPECT_FALSE(offer.complete);
  Ended(1);
  offer = Said<control::SyncVote>(Resend()).at(0).offer;
  EXPECT_EQ(offer, (control::SyncOffer{1, SyncStrategy::kPopular, 4, {1, 1}, {5, 0}, true}));
  // The same coordinator, which did not get FetchDone.
  EXPECT_EQ(Said<control::FetchDone>(Fetch(1, 1, 5)).at(0).state, (Hash128{5, 0}));
  // A restarted coordinator, for which this member already has the elected state.
  EXPECT_TRUE(Serve(1, 1, 5, 4).empty()) << "it serves already";
  EXPECT_EQ(Only<SyncDone>(Commit(1, 1, 5, 4)).at(0).revision, 4U);
}

TEST_F(LocalSyncsTest, AnotherCoordinatorMayElectAnotherState) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  EXPECT_EQ(Fetch(1, 1, 6, 5), (Actions{StopTransfer{LocalId(1)}}));
  const auto start = Only<StartTransfer>(Ended(1, {Code::kAborted, "stopped"}));
  ASSERT_EQ(start.size(), 1U);
  EXPECT_EQ(start[0].state, (Hash128{6, 0}));
  Ended(1);
  // Another state is elected again, after the fetched one was complete.
  EXPECT_EQ(Only<EndServe>(Fetch(1, 1, 7, 6)).size(), 1U);
  Ended(1);
  EXPECT_EQ(Only<SyncDone>(Commit(1, 1, 7, 6)).at(0).state, (Hash128{7, 0}));
}

TEST_F(LocalSyncsTest, OneSyncAtATime) {
  Begin(1, 5);
  EXPECT_EQ(Only<SyncDone>(Begin(1, 5)).at(0).outcome.code, Code::kFailedPrecondition);
  EXPECT_TRUE(Said<control::SyncVote>(Begin(2, 5)).size() == 1) << "another member may";
}

TEST_F(LocalSyncsTest, AMemberThatIsOutIsAnsweredWhenNothingWritesAnyMore) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  EXPECT_EQ(Remove(1), (Actions{StopTransfer{LocalId(1)}}));
  EXPECT_TRUE(Open(1));
  EXPECT_TRUE(Resend().empty());
  EXPECT_EQ(Only<SyncDone>(Ended(1, {Code::kAborted, "stopped"})).at(0).outcome.text, "out");
  EXPECT_FALSE(Open(1));
  Begin(2, 5);
  Serve(2, 1, 5);
  EXPECT_EQ(Only<EndServe>(Remove(2)).size(), 1U);
  EXPECT_EQ(Only<SyncDone>(out_).size(), 1U);
  EXPECT_TRUE(Remove(3).empty());
}

TEST_F(LocalSyncsTest, AnswersToOtherSyncsAreLeftAside) {
  EXPECT_TRUE(Commit(1, 1, 5, 3).empty());
  Begin(1, 5);
  Commit(1, 1, 5, 3);
  EXPECT_TRUE(Commit(1, 1, 5, 3).empty());
  Begin(1, 6);
  EXPECT_TRUE(Commit(1, 1, 5, 3).empty());
  EXPECT_TRUE(Open(1));
}

TEST_F(LocalSyncsTest, ACommitOfWhatIsNotThereIsAnError) {
  Begin(1, 5);
  EXPECT_EQ(Only<SyncDone>(Commit(1, 1, 6, 3)).at(0).outcome.code, Code::kInternal);
}

// Events come in any order. Still each call is answered once, no transfer starts while another one
// writes, and an incomplete state is never served.
TEST_F(LocalSyncsTest, RandomStoriesKeepTheContract) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    syncs_ = LocalSyncs(1500);
    out_.clear();
    std::map<uint64_t, int> calls;
    std::map<uint64_t, uint64_t> numbers;
    std::set<uint64_t> transfers;
    std::set<uint64_t> serving;
    const auto look = [&] {
      for (const LocalSyncAction& action : out_) {
        if (const auto* start = std::get_if<StartTransfer>(&action)) {
          EXPECT_TRUE(transfers.insert(start->local.value()).second);
          EXPECT_FALSE(serving.contains(start->local.value()));
        } else if (const auto* serve = std::get_if<ServeState>(&action)) {
          EXPECT_TRUE(serving.insert(serve->local.value()).second);
          EXPECT_FALSE(transfers.contains(serve->local.value()));
        } else if (const auto* end = std::get_if<EndServe>(&action)) {
          EXPECT_EQ(serving.erase(end->local.value()), 1U);
        } else if (const auto* stop = std::get_if<StopTransfer>(&action)) {
          EXPECT_TRUE(transfers.contains(stop->local.value()));
        } else if (const auto* ended = std::get_if<SyncDone>(&action)) {
          EXPECT_EQ(--calls[ended->local.value()], 0);
          EXPECT_FALSE(transfers.contains(ended->local.value()));
          EXPECT_FALSE(serving.contains(ended->local.value()));
        }
      }
    };
    for (int i = 0; i < 200; ++i) {
      const uint64_t id = 1 + prng.Below(3);
      const uint64_t state = 1 + prng.Below(3);
      const uint64_t number = numbers[id];
      switch (prng.Below(9)) {
        case 0:
        case 1:
          if (Open(id)) break;
          ++calls[id];
          ++numbers[id];
          Begin(id, state, 3, prng.Chance(0.3));
          break;
        case 2:
          if (number != 0) Serve(id, number, state);
          break;
        case 3:
        case 4:
          if (number != 0) Fetch(id, number, state);
          break;
        case 5:
          if (number != 0) Commit(id, number, state, 4);
          break;
        case 6:
          if (number == 0) break;
          Refuse(id, number, {Code::kAborted, "x"},
                 prng.Chance(0.5) ? std::vector<SyncSource>{} : std::vector{kSources[0]});
          break;
        case 7:
          if (!transfers.contains(id)) break;
          transfers.erase(id);
          Do([&] {
            TransferEnded ended{LocalId(id), {}, 100, {MemberId(8)}, {}};
            if (prng.Chance(0.5)) ended.outcome = {Code::kUnavailable, "x"};
            syncs_.Ended(ended, &given_);
          });
          break;
        case 8:
          now_ = now_ + Millis(1500);
          Do([&] { syncs_.OnTime(now_, &given_); });
          break;
      }
      look();
      out_.clear();
    }
    for (uint64_t id = 1; id <= 3; ++id) {
      Remove(id);
      look();
      if (transfers.erase(id) != 0) {
        Ended(id, {Code::kAborted, "stopped"});
        look();
      }
      EXPECT_EQ(calls[id], 0);
      EXPECT_FALSE(Open(id));
    }
  }
}

// ------------------------------------------------------------------------------ the background

TEST_F(LocalSyncsTest, ACallInTheBackgroundIsAnsweredAtOnceAndWhatWasAgreedIsFetched) {
  SyncDone ended{LocalId(1)};
  ended.background = true;
  EXPECT_EQ(Hold(Brought(7, 0)), Actions{ended});
  EXPECT_FALSE(Open(1));
  EXPECT_EQ(Chase(3), Actions{Round(3)});
  EXPECT_TRUE(syncs_.Writing(LocalId(1)));
  EXPECT_EQ(Ended(1), Actions{});
  EXPECT_EQ(Take(), (Actions{TakeDone{LocalId(1), {}, 3, {103, 0}, 100, 1}}));
}

TEST_F(LocalSyncsTest, ANewerStateReplacesTheOneThatIsBeingFetched) {
  Hold(Brought(7, 0));
  Chase(3);
  EXPECT_EQ(Chase(4), Actions{StopTransfer{LocalId(1)}});
  EXPECT_EQ(Chase(5), Actions{});
  EXPECT_EQ(Ended(1, {Code::kAborted, "stopped"}), Actions{Round(5)});
  EXPECT_EQ(Chase(5), Actions{});
}

TEST_F(LocalSyncsTest, WhoTakesItsStateBeforeItIsHereWaitsOrIsToldSo) {
  Hold(Brought(7, 0));
  Chase(3);
  EXPECT_EQ(Only<TakeDone>(Take()).size(), 0U);
  Do([&] { syncs_.OnTime(now_, &given_); });
  EXPECT_EQ(Only<TakeDone>(out_).at(0).outcome.code, Code::kDeadlineExceeded);
  EXPECT_EQ(Take(1000), Actions{});
  EXPECT_EQ(syncs_.NextDeadline(), now_ + Millis(1000));
  EXPECT_EQ(Ended(1), (Actions{TakeDone{LocalId(1), {}, 3, {103, 0}, 100, 1}}));
  EXPECT_EQ(syncs_.NextDeadline(), kNever);
}

TEST_F(LocalSyncsTest, NothingIsWrittenToWhatWasTaken) {
  Hold(Brought(7, 0));
  Chase(3);
  Ended(1);
  Take();
  EXPECT_EQ(Chase(4), Actions{});
  EXPECT_EQ(Only<TakeDone>(Take()).at(0).outcome.code, Code::kOk);
  Hold(Brought(103, 3));
  EXPECT_EQ(Chase(4), Actions{Round(4)});
}

TEST_F(LocalSyncsTest, WhatIsHereAlreadyIsNotFetched) {
  Hold(Brought(103, 3));
  EXPECT_EQ(Chase(3), Actions{});
  EXPECT_EQ(Only<TakeDone>(Take()).at(0).revision, 3U);
}

TEST_F(LocalSyncsTest, WhoTookTheNewestAndBringsTheNextIsReady) {
  Hold(Brought(7, 0));
  Chase(3);
  Ended(1);
  EXPECT_FALSE(Ready(3, Brought(8, 4)));  // the trainer has not taken the state
  Take();
  EXPECT_TRUE(Ready(3, Brought(8, 4)));
  EXPECT_FALSE(Ready(3, Brought(8, 3)));
  EXPECT_FALSE(Ready(4, Brought(8, 4)));  // the group has agreed on a newer revision
  const auto votes = Said<control::SyncVote>(Begin(1, 8, 4));
  EXPECT_EQ(votes.at(0).offer,
            (control::SyncOffer{1, SyncStrategy::kPopular, 4, {1, 1}, {8, 0}, true}));
}

TEST_F(LocalSyncsTest, WhoHasLittleLeftToFetchIsReadyButNotInTheFirstRound) {
  Hold(Brought(7, 0));
  Chase(3);
  Measured(1 << 20);
  EXPECT_FALSE(Ready(3));
  Ended(1);
  Hold(Brought(103, 3));
  Chase(4);
  Measured(17 << 20);
  EXPECT_FALSE(Ready(4));
  Chase(5);
  Ended(1, {Code::kAborted, "stopped"});
  Measured(16 << 20);
  EXPECT_TRUE(Ready(5));
}

TEST_F(LocalSyncsTest, AStateThatChangesFasterThanItComesIsSyncedAllTheSame) {
  Hold(Brought(7, 0));
  Chase(3);
  for (uint64_t revision = 4; revision <= 12; ++revision) {
    Measured(uint64_t{1} << 30);
    EXPECT_EQ(Ready(revision), revision == 12) << revision;
    Chase(revision);
    Ended(1, {Code::kAborted, "stopped"});
  }
}

TEST_F(LocalSyncsTest, RoundsThatFindLessAndLessGoOn) {
  Hold(Brought(7, 0));
  Chase(3);
  for (uint64_t revision = 4; revision <= 30; ++revision) {
    Measured((uint64_t{1} << 30) - (revision << 20));
    EXPECT_FALSE(Ready(revision));
    Chase(revision);
    Ended(1, {Code::kAborted, "stopped"});
  }
}

TEST_F(LocalSyncsTest, RoundsThatFailComeToAnEnd) {
  Hold(Brought(7, 0));
  for (int i = 0; i < 8; ++i) {
    EXPECT_FALSE(Ready(3));
    EXPECT_EQ(Chase(3), Actions{Round(3)});
    if (i == 0) Measured(uint64_t{1} << 30);
    EXPECT_EQ(Ended(1, {Code::kAborted, "all have changed"}), Actions{});
  }
  EXPECT_TRUE(Ready(3));
}

TEST_F(LocalSyncsTest, WhoTakesItsStateWhenARoundHasFailedIsToldSoAtOnce) {
  Hold(Brought(7, 0));
  Chase(3);
  Take(60000);
  const TakeDone done = Only<TakeDone>(Ended(1, {Code::kAborted, "2 chunks have changed"})).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("(2 chunks have changed)"), std::string::npos);
  EXPECT_EQ(Only<TakeDone>(Take(60000)).at(0).outcome.code, Code::kAborted);
  Chase(4);
  EXPECT_EQ(Take(60000), Actions{});
}

TEST_F(LocalSyncsTest, WhoIsReadyInTheMiddleOffersWhatIsIncomplete) {
  Hold(Brought(7, 0));
  Chase(3);
  SyncHeld(/*with_vote=*/false);
  EXPECT_EQ(Only<StopTransfer>(out_).size(), 1U);
  EXPECT_FALSE(Said<control::SyncVote>(out_).at(0).offer.complete);
  EXPECT_EQ(Fetch(1, 1, 104), Actions{});
  EXPECT_EQ(Ended(1, {Code::kAborted, "stopped"}),
            (Actions{StartTransfer{LocalId(1), kRun, 4, {1, 1}, {104, 0}, kSources, true, false}}));
  Ended(1);
  EXPECT_EQ(Only<SyncDone>(Commit(1, 1, 104, 4)).at(0).outcome, Outcome{});
}

TEST_F(LocalSyncsTest, WhatEndedBeforeTheOfferIsOfferedAsItIs) {
  Hold(Brought(7, 0));
  Chase(3);
  Ended(1);
  SyncHeld(/*with_vote=*/false);
  EXPECT_EQ(Said<control::SyncVote>(out_).at(0).offer,
            (control::SyncOffer{1, SyncStrategy::kPopular, 3, {1, 1}, {103, 0}, true}));
}

TEST_F(LocalSyncsTest, TensorsThatMayBeUnequalComeWithTheFirstSync) {
  Hold(Brought(103, 3));
  Chase(3);
  SyncRequest request = Brought(103, 3);
  request.unequal = true;
  Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_); });
  EXPECT_FALSE(Said<control::SyncVote>(out_).at(0).offer.complete);
}

TEST_F(LocalSyncsTest, OtherTensorsThanThoseAgreedOnAreRefusedWithTheDifference) {
  EXPECT_EQ(Hold(Brought(7, 0), Agreed(3, 2)),
            Actions{(CompareManifest{LocalId(1), kSources.front()})});
  EXPECT_TRUE(Open(1));
  EXPECT_EQ(Resend(), Actions{});
  Do([&] { syncs_.ManifestCompared(LocalId(1), "tensor 3", &given_); });
  const SyncDone ended = Only<SyncDone>(out_).at(0);
  EXPECT_EQ(ended.outcome.code, Code::kStateMismatch);
  EXPECT_NE(ended.outcome.text.find(": tensor 3"), std::string::npos);
  EXPECT_EQ(Chase(3), Actions{});
}

TEST_F(LocalSyncsTest, OtherTensorsAreRefusedWhenNothingWritesToThemAnyMore) {
  Hold(Brought(7, 0));
  Chase(3);
  // The group has agreed on another manifest meanwhile.
  EXPECT_EQ(Hold(Brought(7, 0), Agreed(4, 2)),
            (Actions{StopTransfer{LocalId(1)}, CompareManifest{LocalId(1), kSources.front()}}));
  Do([&] { syncs_.ManifestCompared(LocalId(1), "tensor 3", &given_); });
  EXPECT_EQ(out_, Actions{});
  const SyncDone ended = Only<SyncDone>(Ended(1, {Code::kAborted, "stopped"})).at(0);
  EXPECT_EQ(ended.outcome.code, Code::kStateMismatch);
  EXPECT_FALSE(ended.background);
}

TEST_F(LocalSyncsTest, NothingIsSaidAgainOfWhatIsFetchedInTheBackground) {
  Hold(Brought(7, 0));
  Chase(3);
  EXPECT_EQ(Resend(), Actions{});
}

TEST_F(LocalSyncsTest, AMemberThatIsOutStopsAndWaitsForItsTransfer) {
  Hold(Brought(7, 0));
  Chase(3);
  EXPECT_EQ(Take(1000), Actions{});
  EXPECT_EQ(Remove(1),
            (Actions{TakeDone{LocalId(1), {Code::kEvicted, "out"}}, StopTransfer{LocalId(1)}}));
  EXPECT_TRUE(syncs_.Writing(LocalId(1)));
  // The answer to a call now says that the trainer may not write to its tensors yet.
  EXPECT_TRUE(syncs_.RefusalOf(LocalId(1), {Code::kEvicted, "out"}).background);
  EXPECT_EQ(Ended(1, {Code::kAborted, "stopped"}), Actions{});
  EXPECT_FALSE(syncs_.Writing(LocalId(1)));
  EXPECT_FALSE(syncs_.RefusalOf(LocalId(1), {Code::kEvicted, "out"}).background);
}

TEST_F(LocalSyncsTest, WhatWasAgreedOnIsServedForOthersInTheBackgroundUntilTheNextOffer) {
  share_ = true;
  Begin(1, 5);
  EXPECT_EQ(Commit(1, 1, 5, 3),
            (Actions{EndServe{LocalId(1)}, ServeState{LocalId(1), kRun, MemberId(1), {5, 0}, true},
                     SyncDone{LocalId(1), {}, 3, {5, 0}}}));
  EXPECT_EQ(Begin(1, 6).front(), LocalSyncAction(EndServe{LocalId(1)}));
  Commit(1, 2, 6, 4);
  EXPECT_EQ(Do([&] { syncs_.EndSharing(LocalId(1), &given_); }), Actions{EndServe{LocalId(1)}});
  EXPECT_EQ(Remove(1), Actions{});
}

}  // namespace
}  // namespace longhaul::peerd
