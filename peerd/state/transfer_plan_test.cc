#include "peerd/state/transfer_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "base/prng.h"

namespace longhaul::peerd {
namespace {

constexpr uint32_t kMiB = 1u << 20;
using Actions = std::vector<TransferAction>;

MemberId M(uint64_t n) { return MemberId(n); }

std::vector<ChunkToFetch> Chunks(uint64_t count, uint32_t bytes = kMiB) {
  std::vector<ChunkToFetch> chunks;
  for (uint64_t i = 0; i < count; ++i) chunks.push_back({0, i, bytes});
  return chunks;
}

template <class T>
std::vector<T> Get(const Actions& actions) {
  std::vector<T> found;
  for (const TransferAction& action : actions) {
    if (const T* one = std::get_if<T>(&action)) found.push_back(*one);
  }
  return found;
}

class TransferPlanTest : public testing::Test {
 protected:
  void Begin(uint64_t chunks, uint64_t sources) {
    plan_.emplace(Chunks(chunks), TransferOptions(), now_);
    for (uint64_t n = 1; n <= sources; ++n) plan_->AddSource(M(n));
  }
  Actions Advance(int64_t ms = 0) {
    now_ = now_ + Millis(ms);
    Actions actions = plan_->Advance(now_);
    plan_->CheckInvariants();
    return actions;
  }
  std::vector<AskChunk> Asks(int64_t ms = 0) { return Get<AskChunk>(Advance(ms)); }
  void Good(const AskChunk& ask) { plan_->OnChunk(ask.ask, true, now_); }
  void Bad(const AskChunk& ask) { plan_->OnChunk(ask.ask, false, now_); }

  Tick now_{Seconds(100)};
  std::optional<TransferPlan> plan_;
};

TEST_F(TransferPlanTest, NothingToFetchIsDoneAtOnce) {
  Begin(0, 1);
  EXPECT_TRUE(plan_->done());
  EXPECT_TRUE(Advance().empty());
  EXPECT_EQ(plan_->NextDeadline(), kNever);
}

TEST_F(TransferPlanTest, AllSourcesAreAskedAtTheSameTimeForDifferentChunks) {
  Begin(100, 3);
  const auto asks = Asks();
  ASSERT_EQ(asks.size(), 6U);
  std::map<MemberId, int> count;
  std::set<uint64_t> chunks;
  for (const AskChunk& ask : asks) {
    ++count[ask.source];
    EXPECT_TRUE(chunks.insert(ask.chunk.chunk).second);
  }
  EXPECT_EQ(count, (std::map<MemberId, int>{{M(1), 2}, {M(2), 2}, {M(3), 2}}));
}

TEST_F(TransferPlanTest, EveryChunkIsAskedOnceIfAllGoesWell) {
  Begin(10, 2);
  std::vector<AskChunk> all;
  for (auto asks = Asks(); !asks.empty(); asks = Asks(1)) {
    for (const AskChunk& ask : asks) {
      Good(ask);
      all.push_back(ask);
    }
  }
  EXPECT_EQ(all.size(), 10U);
  EXPECT_TRUE(plan_->done());
  EXPECT_EQ(plan_->progress().bytes_done, 10 * kMiB);
  EXPECT_EQ(plan_->progress().bytes_repeated, 0U);
  EXPECT_EQ(plan_->sources_used(), (std::vector<MemberId>{M(1), M(2)}));
}

TEST_F(TransferPlanTest, TheWindowGrowsWithWhatTheSourceDelivers) {
  Begin(10000, 1);
  std::vector<AskChunk> open = Asks();
  EXPECT_EQ(open.size(), 2U);
  // The source sends 1 MiB in each ms.
  for (int i = 0; i < 600; ++i) {
    now_ = now_ + Millis(1);
    Good(open.front());
    open.erase(open.begin());
    for (const AskChunk& ask : Asks()) open.push_back(ask);
  }
  EXPECT_EQ(open.size(), 64U) << "bounded by window_bytes_max";
}

TEST_F(TransferPlanTest, SmallChunksFillTheWindowBySteps) {
  plan_.emplace(Chunks(100000, 8), TransferOptions(), now_);
  plan_->AddSource(M(1));
  std::vector<AskChunk> open = Asks();
  int rounds = 0;
  // The path takes 50 ms. Each round brings all chunks that were asked for.
  for (; open.size() < TransferOptions().window_asks_max && rounds < 20; ++rounds) {
    now_ = now_ + Millis(50);
    for (const AskChunk& ask : open) Good(ask);
    open = Asks();
  }
  EXPECT_EQ(open.size(), TransferOptions().window_asks_max) << "and no more";
  EXPECT_LT(rounds, 10);
}

TEST_F(TransferPlanTest, ASourceThatIsGoneIsAskedNoMoreAndItsChunksAreAskedElsewhere) {
  Begin(4, 2);
  const auto asks = Asks();
  ASSERT_EQ(asks.size(), 4U);
  plan_->RemoveSource(M(2), "left");
  EXPECT_FALSE(plan_->failure().size());
  const auto drops = Get<DropAsk>(Advance());
  EXPECT_EQ(drops.size(), 2U);
  for (const AskChunk& ask : asks) {
    if (ask.source == M(1)) Good(ask);
  }
  EXPECT_TRUE(Asks(1).empty()) << "the first may still write to their places";
  EXPECT_FALSE(plan_->done());
  for (const DropAsk& drop : drops) plan_->OnDropped(drop.ask);
  const auto again = Asks();
  EXPECT_EQ(again.size(), 2U);
  for (const AskChunk& ask : again) {
    EXPECT_EQ(ask.source, M(1));
    Good(ask);
  }
  EXPECT_TRUE(plan_->done());
}

TEST_F(TransferPlanTest, WhatIsDroppedIsAskedForWhenNothingWritesForItAnyMore) {
  Begin(1, 2);
  const auto asks = Asks();
  plan_->SuspendSource(asks[0].source);
  plan_->AddSource(asks[0].source);
  const Actions actions = Advance();
  EXPECT_EQ(actions, (Actions{DropAsk{asks[0].ask}}));
  EXPECT_TRUE(Advance(1).empty()) << "once";
  plan_->OnDropped(asks[0].ask);
  EXPECT_EQ(Asks().size(), 1U);
}

TEST_F(TransferPlanTest, ALateChunkIsAskedForAtAnotherSource) {
  Begin(2, 2);
  const auto asks = Asks();
  const AskChunk slow = asks[0].source == M(1) ? asks[0] : asks[1];
  for (const AskChunk& ask : asks) {
    if (ask.source != slow.source) Good(ask);
  }
  EXPECT_EQ(plan_->NextDeadline(), now_ + Millis(1500));
  EXPECT_EQ(Advance(1500), (Actions{DropAsk{slow.ask}}));
  plan_->OnDropped(slow.ask);
  const auto again = Asks();
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].chunk, slow.chunk);
  EXPECT_NE(again[0].source, slow.source);
  Good(again[0]);
  EXPECT_TRUE(plan_->done());
  EXPECT_EQ(plan_->progress().bytes_repeated, 0U);
}

TEST_F(TransferPlanTest, ALateChunkOfTheOnlySourceIsWaitedFor) {
  Begin(1, 1);
  const auto asks = Asks();
  EXPECT_TRUE(Advance(1500).empty());
  Good(asks[0]);
  EXPECT_TRUE(plan_->done());
}

TEST_F(TransferPlanTest, ALateChunkThatComesBeforeItIsDroppedCounts) {
  Begin(1, 2);
  const auto asks = Asks();
  EXPECT_EQ(Advance(1500), (Actions{DropAsk{asks[0].ask}}));
  Good(asks[0]);
  EXPECT_TRUE(plan_->done());
  plan_->OnDropped(asks[0].ask);
  EXPECT_TRUE(Advance().empty());
  EXPECT_EQ(plan_->progress().bytes_repeated, 0U);
}

TEST_F(TransferPlanTest, AWrongChunkThatComesBeforeItIsDroppedIsAskedForAgain) {
  Begin(1, 2);
  const auto asks = Asks();
  Advance(1500);
  Bad(asks[0]);
  EXPECT_EQ(plan_->progress().bytes_repeated, kMiB);
  const auto again = Asks();
  ASSERT_EQ(again.size(), 1U);
  EXPECT_NE(again[0].source, asks[0].source);
}

TEST_F(TransferPlanTest, WhereTheOneThatWasToTakeOverIsGoneAnotherOneDoes) {
  Begin(1, 3);
  const AskChunk late = Asks()[0];
  Advance(1500);
  // The two sources other than the late one.
  const MemberId others[] = {late.source == M(1) ? M(2) : M(1), late.source == M(3) ? M(2) : M(3)};
  plan_->RemoveSource(others[0], "left");
  plan_->OnDropped(late.ask);
  plan_->RemoveSource(late.source, "left");
  const auto again = Asks();
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].source, others[1]);
}

TEST_F(TransferPlanTest, ASourceThatSendsWrongBitsIsAskedNothingMoreAndNamed) {
  Begin(3, 2);
  const auto asks = Asks();
  const AskChunk bad = asks[0];
  Bad(bad);
  EXPECT_EQ(plan_->corrupt(), std::vector<MemberId>{bad.source});
  plan_->AddSource(bad.source);
  for (int i = 0; i < 4; ++i) {
    for (const AskChunk& ask : Asks(1)) {
      EXPECT_NE(ask.source, bad.source);
      Good(ask);
    }
    for (const AskChunk& ask : asks) {
      if (ask.source == bad.source) {
        plan_->OnDropped(ask.ask);
      } else if (i == 0) {
        Good(ask);
      }
    }
  }
  EXPECT_TRUE(plan_->done());
  EXPECT_EQ(plan_->progress().bytes_repeated, kMiB);
}

TEST_F(TransferPlanTest, ARefusalIsTheEndOfTheSourceAndOfTheLastOneTheFailure) {
  Begin(2, 2);
  const auto asks = Asks();
  for (const AskChunk& ask : asks) {
    plan_->OnRefused(ask.ask, ask.source == M(1) ? "has another state" : "left");
  }
  const auto drops = Get<DropAsk>(Advance());
  for (const DropAsk& drop : drops) plan_->OnDropped(drop.ask);
  EXPECT_EQ(plan_->failure(),
            "no source is left, 2 of 2 chunks are missing; m1 has another state, m2 left");
  EXPECT_EQ(plan_->NextDeadline(), kNever);
  EXPECT_FALSE(plan_->done());
}

TEST_F(TransferPlanTest, ABusySourceIsAskedAgainLater) {
  Begin(1, 1);
  const auto asks = Asks();
  plan_->OnBusy(asks[0].ask, now_);
  EXPECT_TRUE(Asks().empty());
  const Tick due = plan_->NextDeadline();
  EXPECT_EQ(due, now_ + Millis(100));
  now_ = due;
  const auto again = Asks();
  ASSERT_EQ(again.size(), 1U);
  Good(again[0]);
  EXPECT_TRUE(plan_->done());
}

TEST_F(TransferPlanTest, ThatASourceWasBusyIsForgotten) {
  Begin(1, 2);
  const AskChunk first = Asks().at(0);
  const MemberId busy = first.source;
  plan_->OnBusy(first.ask, now_);
  const AskChunk second = Asks().at(0);
  plan_->SuspendSource(second.source);
  Advance();
  plan_->OnDropped(second.ask);
  now_ = plan_->NextDeadline();
  const auto again = Asks();
  ASSERT_EQ(again.size(), 1U);
  ASSERT_EQ(again[0].source, busy);
  plan_->OnChanged(again[0].ask);
  EXPECT_TRUE(Asks().empty());
  EXPECT_GT(plan_->NextDeadline(), now_) << "there is nothing to do";
}

TEST_F(TransferPlanTest, WhenNothingComesForLongItFailsAndSaysWhoDidNotAnswer) {
  Begin(2, 2);
  Asks();
  plan_->SuspendSource(M(2));
  Advance(1500);
  now_ = now_ + Millis(3000);
  Advance();
  EXPECT_EQ(plan_->failure(), "");
  const Actions actions = Advance(1500);
  EXPECT_EQ(plan_->failure(),
            "nothing came for 6000 ms, 2 of 2 chunks are missing; m1 did not answer, m2 has no "
            "link");
  EXPECT_FALSE(Get<DropAsk>(actions).empty());
}

TEST_F(TransferPlanTest, ASourceWithoutWorkHelpsOneThatIsFarSlower) {
  Begin(6, 2);
  std::vector<AskChunk> fast;
  std::vector<AskChunk> slow;
  const auto sort = [&](const std::vector<AskChunk>& asks) {
    for (const AskChunk& ask : asks) (ask.source == M(1) ? fast : slow).push_back(ask);
  };
  sort(Asks());
  // The second source delivers a chunk in 500 ms, the first one in 10 ms.
  for (int i = 0; i < 2; ++i) {
    now_ = now_ + Millis(10);
    Good(fast[i]);
  }
  sort(Asks());
  now_ = now_ + Millis(480);
  Good(slow[0]);
  while (fast.size() < 4) sort(Asks());
  for (size_t i = 2; i < fast.size(); ++i) Good(fast[i]);
  const auto drops = Get<DropAsk>(Advance());
  ASSERT_EQ(drops.size(), 1U) << "one at a time";
  plan_->OnDropped(drops[0].ask);
  const auto help = Asks();
  ASSERT_FALSE(help.empty());
  EXPECT_EQ(help[0].source, M(1));
}

TEST_F(TransferPlanTest, WhoHelpsTakesOverWhatTheOtherWasAskedLast) {
  Begin(4, 2);
  std::vector<AskChunk> fast;
  std::vector<AskChunk> slow;
  for (const AskChunk& ask : Asks()) (ask.source == M(1) ? fast : slow).push_back(ask);
  ASSERT_EQ(slow.size(), 2U);
  now_ = now_ + Millis(10);
  plan_->OnPiece(slow[0].ask, 100 << 10, now_);
  for (const AskChunk& ask : fast) Good(ask);
  EXPECT_EQ(Advance(), (Actions{DropAsk{slow[1].ask}})) << "the first one is arriving";
  plan_->OnDropped(slow[1].ask);
  const auto help = Asks();
  ASSERT_EQ(help.size(), 1U);
  EXPECT_EQ(help[0].source, M(1));
  EXPECT_EQ(help[0].chunk, slow[1].chunk);
}

TEST_F(TransferPlanTest, NothingIsLateWhileItsSourceSends) {
  Begin(2, 2);
  std::vector<AskChunk> asks = Asks();
  ASSERT_EQ(asks.size(), 2U);
  // Both sources are slow: a chunk takes 4 s.
  for (int i = 0; i < 3; ++i) {
    now_ = now_ + Seconds(1);
    for (const AskChunk& ask : asks) plan_->OnPiece(ask.ask, 256 << 10, now_);
    EXPECT_TRUE(Asks().empty());
  }
  now_ = now_ + Seconds(1);
  for (const AskChunk& ask : asks) Good(ask);
  EXPECT_TRUE(plan_->done());
  EXPECT_EQ(plan_->progress().bytes_repeated, 0U);
}

TEST_F(TransferPlanTest, PiecesAreNewsAndSilenceIsTheEnd) {
  Begin(1, 1);
  const auto asks = Asks();
  for (int i = 0; i < 4; ++i) {
    Advance(5000);
    EXPECT_EQ(plan_->failure(), "");
    plan_->OnPiece(asks[0].ask, 100, now_);
  }
  Advance(5999);
  EXPECT_EQ(plan_->failure(), "");
  Advance(1);
  EXPECT_EQ(plan_->failure(),
            "nothing came for 6000 ms, 1 of 1 chunks are missing; m1 did not answer");
}

TEST_F(TransferPlanTest, WhereOthersMayBeNamedALastSourceThatGoesIsNotTheEnd) {
  TransferOptions options;
  options.wait_for_sources = true;
  plan_.emplace(Chunks(1), options, now_);
  plan_->AddSource(M(1));
  const auto asks = Asks();
  plan_->RemoveSource(M(1), "has left");
  for (const DropAsk& drop : Get<DropAsk>(Advance(5000))) plan_->OnDropped(drop.ask);
  EXPECT_EQ(plan_->failure(), "");
  // The source is named again.
  plan_->AddSource(M(1));
  ASSERT_EQ(Asks().size(), 1U);
  plan_->RemoveSource(M(1), "has left");
  EXPECT_EQ(plan_->NextDeadline(), now_ + Millis(1000));
  Advance(1000);
  EXPECT_EQ(plan_->failure(), "no source is left, 1 of 1 chunks are missing; m1 has left");
}

TEST_F(TransferPlanTest, WhoHasRefusedIsNotAskedAgain) {
  TransferOptions options;
  options.wait_for_sources = true;
  plan_.emplace(Chunks(1), options, now_);
  plan_->AddSource(M(1));
  plan_->OnRefused(Asks()[0].ask, "has another state");
  plan_->RemoveSource(M(1), "has left");
  plan_->AddSource(M(1));
  EXPECT_TRUE(Asks().empty());
  plan_->AddSource(M(2));
  EXPECT_EQ(Asks()[0].source, M(2));
}

// ------------------------------------------------------------------------------ a world

// A model of sources and a receiver. Each source delivers in order at its own rate. It may die,
// lie, refuse, fall silent, be busy, or lose its link for a while. The receiver knows which places
// hold good bits and which hold garbage.
class World {
 public:
  struct Source {
    double bytes_per_us = 100;
    int64_t latency_us = 1000;
    double lies = 0;
    double busy = 0;
    Tick dies = kNever;
    Tick silent = kNever;  // from this time on it takes asks and answers none
    Tick refuses = kNever;
    Tick free = {};
    uint64_t bytes = 0;  // bytes that it has delivered
  };

  World(uint64_t seed, uint64_t chunks, std::map<uint64_t, Source> sources,
        const TransferOptions& options = {})
      : prng_(seed), sources_(std::move(sources)), good_(chunks, false) {
    plan_.emplace(Chunks(chunks), options, now_);
    for (const auto& [n, source] : sources_) plan_->AddSource(M(n));
  }

  // Runs until the plan is done or has failed. Returns false if the plan got stuck.
  bool Run() {
    for (int steps = 0; steps < 2000000; ++steps) {
      for (const TransferAction& action : plan_->Advance(now_)) {
        std::visit([this](const auto& a) { Take(a); }, action);
      }
      if (steps % 64 == 0) plan_->CheckInvariants();
      if (plan_->done()) return true;
      if (!plan_->failure().empty() && events_.empty()) return true;
      Tick next = plan_->NextDeadline();
      if (!events_.empty()) next = std::min(next, events_.begin()->first.first);
      if (next == kNever) return false;
      now_ = std::max(now_, next);
      while (!events_.empty() && events_.begin()->first.first <= now_) {
        const auto event = events_.begin()->second;
        events_.erase(events_.begin());
        event();
      }
    }
    return false;
  }
  bool AllGood() const {
    return std::all_of(good_.begin(), good_.end(), [](bool g) { return g; });
  }
  const TransferPlan& plan() const { return *plan_; }
  const Source& source(uint64_t n) const { return sources_.at(n); }
  Tick now() const { return now_; }
  uint64_t trace() const { return trace_; }
  void At(Tick when, std::function<void()> what) { events_.emplace(Key(when), std::move(what)); }
  void Suspend(uint64_t n) { plan_->SuspendSource(M(n)); }
  void Resume(uint64_t n) { plan_->AddSource(M(n)); }

 private:
  std::pair<Tick, uint64_t> Key(Tick when) { return {when, ++serial_}; }

  void Take(const AskChunk& ask) {
    trace_ = (trace_ ^ ask.ask.value() ^ (ask.source.value() << 32)) * 0x100000001b3u;
    const uint64_t n = ask.source.value();
    Source& source = sources_.at(n);
    EXPECT_FALSE(good_[ask.chunk.chunk]);
    EXPECT_EQ(writers_.count(ask.chunk.chunk), 0U) << "two write in one place";
    writers_[ask.chunk.chunk] = ask.ask;
    open_.emplace(ask.ask, ask);
    if (now_ >= source.dies || now_ >= source.silent) return;
    const AskId id = ask.ask;
    if (now_ >= source.refuses) {
      At(now_ + source.latency_us, [=, this] { Refuse(id, n); });
      return;
    }
    if (prng_.Chance(source.busy)) {
      At(now_ + source.latency_us, [=, this] { Busy(id); });
      return;
    }
    const Tick begin = std::max(now_ + source.latency_us, source.free);
    source.free = begin + static_cast<int64_t>(ask.chunk.bytes / source.bytes_per_us) + 1;
    At(source.free, [=, this] { Deliver(id, n); });
  }
  void Take(const DropAsk& drop) {
    trace_ = (trace_ ^ drop.ask.value()) * 0x100000001b3u;
    const AskId id = drop.ask;
    At(now_ + prng_.Between(0, 3000), [=, this] {
      const auto it = open_.find(id);
      if (it == open_.end()) return;
      // Half of the chunk may be written by now.
      End(id, /*good=*/false);
      plan_->OnDropped(id);
    });
  }
  // Ends an ask: nothing comes for the ask any more. Returns the ask.
  AskChunk End(AskId id, bool good) {
    const AskChunk ask = open_.at(id);
    open_.erase(id);
    writers_.erase(ask.chunk.chunk);
    good_[ask.chunk.chunk] = good;
    return ask;
  }
  void Deliver(AskId id, uint64_t n) {
    if (!open_.contains(id) || now_ >= sources_.at(n).dies || now_ >= sources_.at(n).silent) return;
    const bool good = !prng_.Chance(sources_.at(n).lies);
    const AskChunk ask = End(id, good);
    sources_.at(n).bytes += ask.chunk.bytes;
    plan_->OnChunk(id, good, now_);
  }
  void Refuse(AskId id, uint64_t) {
    if (!open_.contains(id)) return;
    End(id, false);
    plan_->OnRefused(id, "has another state");
  }
  void Busy(AskId id) {
    if (!open_.contains(id)) return;
    End(id, false);
    plan_->OnBusy(id, now_);
  }

  Prng prng_;
  Tick now_{Seconds(100)};
  std::map<uint64_t, Source> sources_;
  std::vector<bool> good_;
  std::optional<TransferPlan> plan_;
  std::map<AskId, AskChunk> open_;
  std::map<uint64_t, AskId> writers_;
  std::map<std::pair<Tick, uint64_t>, std::function<void()>> events_;
  uint64_t serial_ = 0;
  uint64_t trace_ = 0;
};

TEST(TransferWorld, SourcesServeInProportionToTheirRates) {
  World world(1, 1024, {{1, {.bytes_per_us = 400}}, {2, {.bytes_per_us = 100}}, {3, {}}});
  ASSERT_TRUE(world.Run());
  EXPECT_TRUE(world.AllGood());
  // The time for 1 GiB at 600 bytes a microsecond.
  const double ideal_us = 1024.0 * kMiB / 600;
  EXPECT_LT(static_cast<double>(world.now() - Tick{Seconds(100)}), 1.1 * ideal_us);
  EXPECT_GT(world.source(1).bytes, 3 * world.source(2).bytes);
  EXPECT_LT(world.plan().progress().bytes_repeated, uint64_t{16} * kMiB);
}

TEST(TransferWorld, ALongPathIsFilled) {
  World world(1, 4096, {{1, {.bytes_per_us = 100, .latency_us = Millis(150)}}});
  ASSERT_TRUE(world.Run());
  const double ideal_us = 4096.0 * kMiB / 100;
  EXPECT_LT(static_cast<double>(world.now() - Tick{Seconds(100)}), 1.1 * ideal_us);
}

TEST(TransferWorld, OneOfThreeThatDiesHalfWayCostsLessThanAnyTwentieth) {
  std::map<uint64_t, World::Source> sources = {{1, {}}, {2, {}}, {3, {}}};
  sources[2].dies = Tick{Seconds(100)} + static_cast<int64_t>(512.0 * kMiB / 300);
  World world(1, 1024, sources);
  world.At(sources[2].dies + Millis(20), [&] { world.Suspend(2); });
  ASSERT_TRUE(world.Run());
  EXPECT_TRUE(world.AllGood());
  const uint64_t delivered = world.source(1).bytes + world.source(2).bytes + world.source(3).bytes;
  EXPECT_LT(delivered - uint64_t{1024} * kMiB, uint64_t{51} * kMiB);
  const double ideal_us = 512.0 * kMiB / 300 + 512.0 * kMiB / 200;
  EXPECT_LT(static_cast<double>(world.now() - Tick{Seconds(100)}), 1.15 * ideal_us);
}

TEST(TransferWorld, ALinkThatComesBackGoesOnWithWhatIsMissing) {
  World world(1, 256, {{1, {}}});
  world.At(Tick{Seconds(101)}, [&] { world.Suspend(1); });
  world.At(Tick{Seconds(103)}, [&] { world.Resume(1); });
  ASSERT_TRUE(world.Run());
  EXPECT_TRUE(world.AllGood());
  EXPECT_LT(world.source(1).bytes, uint64_t{256 + 64} * kMiB);
}

TEST(TransferWorld, TheSameCallsGiveTheSamePlan) {
  const auto trace = [](uint64_t seed) {
    World world(seed, 200, {{1, {.lies = 0.002}}, {2, {.busy = 0.1}}, {3, {.bytes_per_us = 10}}});
    world.Run();
    return world.trace();
  };
  EXPECT_EQ(trace(5), trace(5));
  EXPECT_NE(trace(5), trace(6));
}

// One source is honest and stays. Whatever the other sources do, all chunks arrive with good bits.
TEST(TransferWorld, OneGoodSourceIsEnough) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    std::map<uint64_t, World::Source> sources;
    const uint64_t count = 1 + prng.Below(5);
    const uint64_t honest = 1 + prng.Below(count);
    const auto some_time = [&] { return Tick{Seconds(100)} + prng.Between(0, Seconds(2)); };
    for (uint64_t n = 1; n <= count; ++n) {
      World::Source& source = sources[n];
      source.bytes_per_us = 5 + static_cast<double>(prng.Below(500));
      source.latency_us = prng.Between(50, Millis(80));
      if (n == honest) continue;
      if (prng.Chance(0.3)) source.lies = 0.05;
      if (prng.Chance(0.3)) source.busy = 0.2;
      if (prng.Chance(0.3)) source.dies = some_time();
      if (prng.Chance(0.3)) source.silent = some_time();
      if (prng.Chance(0.3)) source.refuses = some_time();
    }
    // The honest source's link may be down while every other source falls silent with the same
    // chunk.
    TransferOptions options;
    options.stall_us = Seconds(20);
    World world(seed, 1 + prng.Below(150), sources, options);
    for (uint64_t n = 1; n <= count; ++n) {
      if (!prng.Chance(0.3)) continue;
      const Tick down = some_time();
      world.At(down, [&world, n] { world.Suspend(n); });
      world.At(down + prng.Between(0, Seconds(2)), [&world, n] { world.Resume(n); });
    }
    ASSERT_TRUE(world.Run());
    EXPECT_EQ(world.plan().failure(), "");
    EXPECT_TRUE(world.AllGood());
    EXPECT_EQ(world.plan().progress().bytes_done, world.plan().progress().bytes_total);
    const std::vector<MemberId> corrupt = world.plan().corrupt();
    EXPECT_EQ(std::count(corrupt.begin(), corrupt.end(), M(honest)), 0);
  }
}

// Even if no source stays, the plan ends: it is done or has failed, and nothing writes afterwards.
TEST(TransferWorld, ItAlwaysEnds) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    std::map<uint64_t, World::Source> sources;
    for (uint64_t n = 1 + prng.Below(3); n > 0; --n) {
      World::Source& source = sources[n];
      source.lies = 0.1;
      source.dies = Tick{Seconds(100)} + prng.Between(0, Seconds(1));
    }
    World world(seed, 400, sources);
    ASSERT_TRUE(world.Run());
    EXPECT_NE(world.plan().done() && world.AllGood(), !world.plan().failure().empty());
  }
}

TEST_F(TransferPlanTest, AChunkThatHasChangedAtOneSourceIsAskedOfAnother) {
  Begin(1, 2);
  const auto first = Asks();
  ASSERT_EQ(first.size(), 1U);
  plan_->OnChanged(first[0].ask);
  const auto second = Asks();
  ASSERT_EQ(second.size(), 1U);
  EXPECT_NE(second[0].source, first[0].source);
  Good(second[0]);
  Advance();
  EXPECT_TRUE(plan_->done());
  EXPECT_EQ(plan_->left_out(), 0U);
}

TEST_F(TransferPlanTest, WhatHasChangedAtAllSourcesIsLeftOutAndTheRestComes) {
  Begin(6, 2);
  size_t good = 0;
  for (auto asks = Asks(); !asks.empty(); asks = Asks(1)) {
    for (const AskChunk& ask : asks) {
      if (ask.chunk.chunk == 3) {
        plan_->OnChanged(ask.ask);
      } else {
        Good(ask);
        ++good;
      }
    }
  }
  EXPECT_EQ(good, 5U);
  EXPECT_TRUE(plan_->done());
  EXPECT_EQ(plan_->left_out(), 1U);
  EXPECT_EQ(plan_->failure(), "");
}

TEST_F(TransferPlanTest, AChunkThatHasChangedIsNotLeftOutWhileAnotherSourceMayComeBack) {
  Begin(1, 2);
  plan_->SuspendSource(M(2));
  plan_->OnChanged(Asks().at(0).ask);
  EXPECT_TRUE(Asks().empty());
  EXPECT_FALSE(plan_->done());
  plan_->RemoveSource(M(2), "left");
  EXPECT_TRUE(Asks().empty());
  EXPECT_EQ(plan_->left_out(), 1U);
  EXPECT_TRUE(plan_->done());
}

}  // namespace
}  // namespace longhaul::peerd
