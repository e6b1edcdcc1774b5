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
// Those that there are here; they can be compared.
using LocalSyncAction = std::variant<ToCoordinator, ServeState, EndServe, StartTransfer,
                                     ChangeSources, StopTransfer, CompareManifest, SyncEnded>;
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
      Outcome refusal = syncs_.MayBegin(LocalId(id), request);
      if (refusal.ok()) {
        syncs_.Begin(LocalId(id), kRun, MemberId(id), request, with_vote, &given_);
      } else {
        given_.push_back(syncs_.Refused(LocalId(id), std::move(refusal)));
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
    return Do([&] { syncs_.Result(LocalId(id), result, now_, &given_); });
  }
  Actions& Ended(uint64_t id, const Outcome& outcome = {}, bool wrote = true) {
    return Do([&] {
      syncs_.Ended({LocalId(id), outcome, 100, {MemberId(8)}, {}, wrote}, &given_);
    });
  }
  Actions& Resend() {
    return Do([&] { syncs_.Resend(&given_); });
  }
  Actions& Remove(uint64_t id) {
    return Do([&] { syncs_.Remove(LocalId(id), {Code::kEvicted, "out"}, &given_); });
  }
  bool Open(uint64_t id) const { return syncs_.Open(LocalId(id)); }

  LocalSyncs syncs_{1500};
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
            (Actions{EndServe{LocalId(1)}, SyncEnded{LocalId(1), {}, 3, {5, 0}}}));
  EXPECT_FALSE(Open(1));
  EXPECT_EQ(Said<control::SyncVote>(Begin(1, 6)).at(0).offer.number, 2U);
}

TEST_F(LocalSyncsTest, ATornStateThatItsTrainerHasRestoredIsWhole) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Ended(1, {Code::kUnavailable, "nobody"});
  Refuse(1, 1, {Code::kAborted, "sync again"});
  SyncRequest request{SyncStrategy::kSend, 3, {1, 1}, {7, 0}};
  EXPECT_FALSE(syncs_.MayBegin(LocalId(1), request).ok());
  request.restored = true;
  ASSERT_TRUE(syncs_.MayBegin(LocalId(1), request).ok());
  Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_); });
  EXPECT_TRUE(Said<control::SyncVote>(out_).at(0).offer.complete);
  Refuse(1, 2, {Code::kAborted, "sync again"});
  EXPECT_FALSE(Only<SyncEnded>(out_).at(0).torn);
}

// Whoever is told to fetch may ask before the source hears of the election.
TEST_F(LocalSyncsTest, WhatIsOfferedIsServedUntilTheEnd) {
  Begin(1, 5);
  EXPECT_EQ(Only<ServeState>(out_),
            (std::vector<ServeState>{{LocalId(1), kRun, MemberId(1), {5, 0}}}));
  EXPECT_TRUE(Serve(1, 1, 5).empty());
  EXPECT_EQ(Commit(1, 1, 5, 3),
            (Actions{EndServe{LocalId(1)}, SyncEnded{LocalId(1), {}, 3, {5, 0}}}));
}

TEST_F(LocalSyncsTest, WhoOnlyReceivesServesNothing) {
  Begin(1, 9, 3, false, SyncStrategy::kReceive);
  EXPECT_TRUE(Only<ServeState>(out_).empty());
  Fetch(1, 1, 5);
  EXPECT_TRUE(Only<ServeState>(Ended(1)).empty());
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
  const auto done = Said<control::SyncDone>(out_);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0], (control::SyncDone{kRun, MemberId(1), 1, {}, {5, 0}, 100, {MemberId(8)}, {}}));
  EXPECT_EQ(Only<ServeState>(out_).size(), 1U);
  SyncEnded ended{LocalId(1), {}, 4, {5, 0}};
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

TEST_F(LocalSyncsTest, ATransferThatBreaksOffLeavesATornStateThatIsNeverOfferedWhole) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  const auto done = Said<control::SyncDone>(Ended(1, {Code::kUnavailable, "nobody"}));
  EXPECT_EQ(done.at(0).outcome, (Outcome{Code::kUnavailable, "nobody"}));
  EXPECT_EQ(done.at(0).state, Hash128());
  Refuse(1, 1, {Code::kAborted, "failed"});
  const auto ended = Only<SyncEnded>(out_);
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_TRUE(ended[0].torn);
  EXPECT_EQ(Begin(1, 77, 3, false, SyncStrategy::kSend).size(), 1U);
  EXPECT_EQ(Only<SyncEnded>(out_).at(0).outcome.code, Code::kFailedPrecondition);
  EXPECT_FALSE(Said<control::SyncVote>(Begin(1, 77)).at(0).offer.complete);
  Fetch(1, 2, 5);
  Ended(1);
  Commit(1, 2, 5, 4);
  EXPECT_FALSE(Only<SyncEnded>(out_).at(0).torn);
  EXPECT_TRUE(Said<control::SyncVote>(Begin(1, 6)).at(0).offer.complete);
}

TEST_F(LocalSyncsTest, WhatIsPutBackAfterATransferBrokeOffIsOfferedInItsPlace) {
  Begin(1, 9, 4);
  Fetch(1, 1, 5);
  Do([&] {
    TransferEnded ended{LocalId(1), {Code::kUnavailable, "nobody"}, 100, {}, {}, true};
    ended.put_back = PutBack{2, {8, 0}};
    syncs_.Ended(ended, &given_);
  });
  EXPECT_EQ(Only<ServeState>(out_).at(0).state, (Hash128{8, 0}));
  EXPECT_EQ(Said<control::SyncDone>(out_).at(0).outcome.code, Code::kUnavailable);
  EXPECT_EQ(
      Said<control::SyncVote>(Resend()).at(0).offer,
      (control::SyncOffer{1, SyncStrategy::kPopular, 2, {1, 1}, {8, 0}, true, /*kept=*/true}));
  Refuse(1, 1, {Code::kAborted, "failed"});
  const SyncEnded ended = Only<SyncEnded>(out_).at(0);
  EXPECT_FALSE(ended.torn);
  EXPECT_EQ(ended.revision, 2U);
  EXPECT_EQ(ended.state, (Hash128{8, 0}));
  EXPECT_TRUE(Said<control::SyncVote>(Begin(1, 8, 2)).at(0).offer.complete);
}

TEST_F(LocalSyncsTest, WhatWasKeptIsOfferedAsSuchUntilSomethingElseIsThere) {
  SyncRequest request{SyncStrategy::kPopular, 7, {1, 1}, {9, 0}};
  request.kept = true;
  Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_); });
  EXPECT_TRUE(Said<control::SyncVote>(out_).at(0).offer.kept);
  // What may be unequal was kept, too.
  EXPECT_FALSE(Only<StartTransfer>(Fetch(1, 1, 5)).at(0).unequal_too);
  Ended(1);
  EXPECT_FALSE(Said<control::SyncVote>(Resend()).at(0).offer.kept);
}

TEST_F(LocalSyncsTest, ACopyOfKeptBitsThatBrokeOffLeavesATornState) {
  SyncRequest request{SyncStrategy::kPopular, 7, {1, 1}, {9, 0}, /*restored=*/true};
  request.torn = true;
  Do([&] { syncs_.Begin(LocalId(1), kRun, MemberId(1), request, false, &given_); });
  EXPECT_FALSE(Said<control::SyncVote>(out_).at(0).offer.complete);
  Refuse(1, 1, {Code::kFailedPrecondition, "nobody has any"});
  EXPECT_TRUE(Only<SyncEnded>(out_).at(0).torn);
}

TEST_F(LocalSyncsTest, ATransferThatWroteNothingLeavesTheStateAsItWas) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Ended(1, {Code::kUnavailable, "no digests"}, /*wrote=*/false);
  Refuse(1, 1, {Code::kAborted, "failed"});
  EXPECT_FALSE(Only<SyncEnded>(out_).at(0).torn);
}

TEST_F(LocalSyncsTest, ASyncThatFailsAfterTheFetchLeavesATornState) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Ended(1);
  Refuse(1, 1, {Code::kAborted, "another one failed"});
  const SyncEnded ended = Only<SyncEnded>(out_).at(0);
  EXPECT_EQ(ended.outcome.code, Code::kAborted);
  EXPECT_EQ(ended.state, Hash128());
  EXPECT_TRUE(ended.torn);
}

TEST_F(LocalSyncsTest, WhatWasFetchedIsServedAlsoIfTheNextFetchBroughtNothing) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Ended(1);
  Fetch(1, 1, 6);
  Ended(1, {Code::kUnavailable, "no digests"}, /*wrote=*/false);
  EXPECT_EQ(Only<ServeState>(out_).at(0).state, (Hash128{5, 0}));
  Refuse(1, 1, {Code::kAborted, "failed"});
  EXPECT_TRUE(Only<SyncEnded>(out_).at(0).torn);
}

TEST_F(LocalSyncsTest, AnEndInTheMiddleOfATransferIsToldWhenNothingWritesAnyMore) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  EXPECT_EQ(Refuse(1, 1, {Code::kAborted, "failed"}), (Actions{StopTransfer{LocalId(1)}}));
  EXPECT_TRUE(Open(1));
  const auto ended = Only<SyncEnded>(Ended(1, {Code::kAborted, "stopped"}));
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].outcome.text, "failed");
  EXPECT_TRUE(ended[0].torn);
}

TEST_F(LocalSyncsTest, WhoIsRefusedWhileATransferIsOnMaySyncAgain) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  Refuse(1, 1, {Code::kFailedPrecondition, "no member offers a state"});
  const auto ended = Only<SyncEnded>(Ended(1, {Code::kAborted, "no source"}, /*wrote=*/false));
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].outcome, (Outcome{Code::kAborted, "no member offers a state"}));
  EXPECT_FALSE(ended[0].torn);
  Begin(1, 9);
  Refuse(1, 2, {Code::kFailedPrecondition, "all receive"});
  EXPECT_EQ(Only<SyncEnded>(out_).at(0).outcome.code, Code::kFailedPrecondition);
}

TEST_F(LocalSyncsTest, AnotherManifestIsComparedBeforeTheErrorIsTold) {
  Begin(1, 9);
  EXPECT_EQ(Refuse(1, 1, {Code::kStateMismatch, "differs"}, {kSources[0]}),
            (Actions{CompareManifest{LocalId(1), kSources[0]}}));
  EXPECT_EQ(syncs_.NextDeadline(), now_ + Millis(1500));
  Do([&] {
    syncs_.ManifestCompared(LocalId(1), "tensor 0 is \"a\" here and \"b\" there", &given_);
  });
  EXPECT_EQ(Only<SyncEnded>(out_).at(0).outcome.text,
            "differs: tensor 0 is \"a\" here and \"b\" there");
  EXPECT_TRUE(Do([&] { syncs_.ManifestCompared(LocalId(1), "late", &given_); }).empty());
}

TEST_F(LocalSyncsTest, TheErrorDoesNotWaitLongForTheManifest) {
  Begin(1, 9);
  Refuse(1, 1, {Code::kStateMismatch, "differs"}, {kSources[0]});
  now_ = syncs_.NextDeadline();
  Do([&] { syncs_.OnTime(now_, &given_); });
  EXPECT_EQ(Only<SyncEnded>(out_).at(0).outcome.text, "differs");
  EXPECT_EQ(syncs_.NextDeadline(), kNever);
}

TEST_F(LocalSyncsTest, AnOfferWithAVoteIsNotSaidAlone) {
  EXPECT_TRUE(Said<control::SyncVote>(Begin(1, 5, 3, /*with_vote=*/true)).empty());
  ASSERT_NE(syncs_.OfferOf(LocalId(1)), nullptr);
  EXPECT_EQ(syncs_.OfferOf(LocalId(1))->state, (Hash128{5, 0}));
  EXPECT_TRUE(Resend().empty());
  syncs_.VoteAnswered(LocalId(1));
  EXPECT_EQ(syncs_.OfferOf(LocalId(1)), nullptr);
  EXPECT_EQ(Said<control::SyncVote>(Resend()).size(), 1U);
  EXPECT_EQ(Only<SyncEnded>(Commit(1, 1, 5, 3)).size(), 1U);
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
  // The same coordinator, which did not hear SyncDone.
  EXPECT_EQ(Said<control::SyncDone>(Fetch(1, 1, 5)).at(0).state, (Hash128{5, 0}));
  // Another one, for which this member is a holder.
  EXPECT_TRUE(Serve(1, 1, 5, 4).empty()) << "it serves already";
  EXPECT_EQ(Only<SyncEnded>(Commit(1, 1, 5, 4)).at(0).revision, 4U);
}

TEST_F(LocalSyncsTest, AnotherCoordinatorMayElectAnotherState) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  EXPECT_EQ(Fetch(1, 1, 6, 5), (Actions{StopTransfer{LocalId(1)}}));
  const auto start = Only<StartTransfer>(Ended(1, {Code::kAborted, "stopped"}));
  ASSERT_EQ(start.size(), 1U);
  EXPECT_EQ(start[0].state, (Hash128{6, 0}));
  Ended(1);
  // And once more, when it was there.
  EXPECT_EQ(Only<EndServe>(Fetch(1, 1, 7, 6)).size(), 1U);
  Ended(1);
  EXPECT_EQ(Only<SyncEnded>(Commit(1, 1, 7, 6)).at(0).state, (Hash128{7, 0}));
}

TEST_F(LocalSyncsTest, OneSyncAtATime) {
  Begin(1, 5);
  EXPECT_EQ(Only<SyncEnded>(Begin(1, 5)).at(0).outcome.code, Code::kFailedPrecondition);
  EXPECT_TRUE(Said<control::SyncVote>(Begin(2, 5)).size() == 1) << "another member may";
}

TEST_F(LocalSyncsTest, AMemberThatIsOutIsAnsweredWhenNothingWritesAnyMore) {
  Begin(1, 9);
  Fetch(1, 1, 5);
  EXPECT_EQ(Remove(1), (Actions{StopTransfer{LocalId(1)}}));
  EXPECT_TRUE(Open(1));
  EXPECT_TRUE(Resend().empty());
  EXPECT_EQ(Only<SyncEnded>(Ended(1, {Code::kAborted, "stopped"})).at(0).outcome.text, "out");
  EXPECT_FALSE(Open(1));
  Begin(2, 5);
  Serve(2, 1, 5);
  EXPECT_EQ(Only<EndServe>(Remove(2)).size(), 1U);
  EXPECT_EQ(Only<SyncEnded>(out_).size(), 1U);
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
  EXPECT_EQ(Only<SyncEnded>(Commit(1, 1, 6, 3)).at(0).outcome.code, Code::kInternal);
}

// Whatever comes in whatever order: each call is answered once, no transfer is started while
// another writes, and what is torn is never served.
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
        } else if (const auto* ended = std::get_if<SyncEnded>(&action)) {
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
            TransferEnded ended{LocalId(id), {}, 100, {MemberId(8)}, {}, prng.Chance(0.5)};
            if (prng.Chance(0.5)) ended.outcome = {Code::kUnavailable, "x"};
            if (!ended.outcome.ok() && prng.Chance(0.3)) ended.put_back = PutBack{1, {state, 0}};
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

}  // namespace
}  // namespace longhaul::peerd
