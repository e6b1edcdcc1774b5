// Stories in which the coordinator dies, at every point where it can.

#include <functional>
#include <string>
#include <vector>

#include "base/prng.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

PeerId P(uint64_t n) { return PeerId(n); }
GroupKey G() { return Harness::G(); }

// A harness, and the peers that are alive. A dead peer stays dead when the coordinator restarts.
struct Story {
  Harness h;
  std::set<PeerId> alive;

  void Add(uint64_t n) {
    h.AddLively(P(n));
    alive.insert(P(n));
  }
  void Kill(uint64_t n) {
    h.Kill(P(n));
    alive.erase(P(n));
  }
  // All admitted members of all living peers vote.
  void VoteAll() {
    for (PeerId peer : alive) {
      std::vector<MemberId> members;
      for (const auto& [id, member] : h.Lively(peer).members) {
        // A pending member may not vote.
        for (const MemberView& view : h.View(member.group).members) {
          if (view.member == id && view.joined) members.push_back(id);
        }
      }
      for (MemberId member : members) h.LivelyVote(peer, member);
    }
  }
  void Leave(uint64_t n) {
    const auto& members = h.Lively(P(n)).members;
    if (!members.empty()) h.LivelyLeave(P(n), members.begin()->first);
  }
  void RecoverIfCrashed() {
    if (!h.crashed()) return;
    h.Boot();
    for (PeerId peer : alive) {
      h.Reattach(peer);
      if (h.crashed()) return RecoverIfCrashed();
    }
  }
  void Settle() {
    h.Run();
    h.Wait(3000);
    RecoverIfCrashed();
    h.Run();
    h.Wait(6000);
  }
  // Adds hosts 1 to `n`, one after the other, with a member each.
  void Found(uint64_t n) {
    for (uint64_t i = 1; i <= n; ++i) {
      Add(i);
      h.LivelyJoin(P(i), 1);
      h.Run();
      VoteAll();
      Settle();
    }
  }
};

using Scene = std::function<void(Story&)>;

control::OpReport Op(uint64_t ordinal, bool done) {
  control::OpReport op;
  op.ordinal = OpOrdinal(ordinal);
  op.done = done;
  return op;
}

const std::vector<Scene>& Scenes() {
  static const std::vector<Scene> scenes = {
      [](Story& s) {
        s.Add(1);
        s.h.LivelyJoin(P(1), 1);
      },
      [](Story& s) {
        s.Add(2);
        s.Add(3);
        s.h.LivelyJoin(P(2), 1);
        s.h.LivelyJoin(P(3), 1);
        s.h.Run();
        s.VoteAll();
      },
      [](Story& s) { s.VoteAll(); },
      [](Story& s) {
        for (uint64_t n : {1, 2}) s.h.Lively(P(n)).groups[G()].ops = {Op(n, true)};
        s.Kill(3);
      },
      [](Story& s) { s.VoteAll(); },
      [](Story& s) {
        s.Add(4);
        s.h.LivelyJoin(P(4), 1);
        s.h.LivelyJoin(P(1), 2);
        s.h.Run();
        s.VoteAll();
      },
      [](Story& s) { s.Leave(2); },
      [](Story& s) { s.VoteAll(); },
      [](Story& s) {
        if (!s.h.HasStream(P(1))) return;
        s.h.Say(P(1), control::LinkLost{G(), s.h.View().committed, P(4), "reset"});
      },
      [](Story& s) { s.VoteAll(); },
      [](Story& s) {
        s.Leave(1);
        s.Leave(4);
      },
  };
  return scenes;
}

// Checks what must be true when nothing is in progress any more.
void CheckAtRest(Story& s, const std::string& where) {
  const GroupView view = s.h.View();
  EXPECT_EQ(view.preparing, Epoch()) << where << ": " << view.waiting_for;
  std::map<MemberId, PeerId> at_coordinator;
  for (const MemberView& member : view.members) {
    if (member.joined) at_coordinator[member.member] = member.peer;
  }
  std::map<MemberId, PeerId> at_peers;
  for (PeerId peer : s.alive) {
    const LivelyPeer& lively = s.h.Lively(peer);
    EXPECT_TRUE(s.h.HasStream(peer)) << where << " " << ToString(peer);
    EXPECT_TRUE(lively.joins.empty()) << where << " " << ToString(peer) << ": join not answered";
    for (const auto& [id, member] : lively.members) {
      at_peers[id] = peer;
      EXPECT_FALSE(member.leaving) << where << " " << ToString(id) << ": leave not answered";
      EXPECT_FALSE(member.voting) << where << " " << ToString(id) << ": vote not answered";
      EXPECT_EQ(lively.groups.at(G()).committed, view.committed) << where << " " << ToString(peer);
      EXPECT_FALSE(lively.groups.at(G()).frozen) << where << " " << ToString(peer);
    }
  }
  EXPECT_EQ(at_coordinator, at_peers) << where;
}

// Votes several times, because after the crash a newcomer may miss the first boundary.
void Finish(Story& s) {
  for (int round = 0; round < 3; ++round) {
    s.VoteAll();
    s.Settle();
  }
}

int CountPersists() {
  Story s;
  for (const Scene& scene : Scenes()) {
    scene(s);
    s.Settle();
  }
  Finish(s);
  CheckAtRest(s, "without a crash");
  return s.h.persists();
}

TEST(Recovery, EveryPersistOfAStoryMayBeTheLast) {
  const int persists = CountPersists();
  ASSERT_GT(persists, 15);
  for (bool kept : {false, true}) {
    for (int at = 1; at <= persists; ++at) {
      const std::string where =
          "crash " + std::string(kept ? "after" : "before") + " persist " + std::to_string(at);
      Story s;
      s.h.CrashAt(at, kept);
      for (const Scene& scene : Scenes()) {
        scene(s);
        s.Settle();
      }
      Finish(s);
      CheckAtRest(s, where);
      // m1 and the member of p4 have left. A member that joined at p1 later may still be there.
      EXPECT_LE(s.h.View().members.size(), 2u) << where;
      if (testing::Test::HasFailure()) return;
    }
  }
}

// A pair becomes blocked, an operator evicts a member, and then the pair has no relay any more.
TEST(Recovery, EveryPersistOfARoutingMayBeTheLast) {
  int crashes = 0;
  for (bool kept : {false, true}) {
    for (int at = 1;; ++at) {
      const std::string where =
          "crash " + std::string(kept ? "after" : "before") + " persist " + std::to_string(at);
      Story s;
      s.Found(4);
      const auto order = [&](const std::function<void()>& say, const std::function<bool()>& done) {
        for (int again = 0; again < 3 && !done(); ++again) {
          say();
          s.Settle();
        }
        EXPECT_TRUE(done()) << where;
      };
      const int before = s.h.persists();
      s.h.CrashAt(at, kept);
      s.h.Lively(P(1)).cannot_reach = {P(2)};
      s.h.Lively(P(2)).cannot_reach = {P(1)};
      order(
          [&] {
            s.h.Say(P(1), control::LinkLost{G(), s.h.View().committed, P(2), "reset"});
          },
          [&] { return s.h.View().blocked.size() == 1; });
      EXPECT_EQ(s.h.View().members.size(), 4u) << where;
      CheckAtRest(s, where);
      for (const size_t left : {3, 2}) {
        order([&] { s.h.Evict(MemberId(left + 1)); },
              [&] { return s.h.View().members.size() <= left; });
        s.VoteAll();
        s.Settle();
        CheckAtRest(s, where);
        if (left == 3) {
          ASSERT_EQ(s.h.View().members.size(), 3u) << where << ": the third is their relay";
        }
      }
      ASSERT_EQ(s.h.View().members.size(), 1u) << where;
      EXPECT_EQ(s.h.View().members[0].member, MemberId(1)) << where;
      if (testing::Test::HasFailure()) return;
      if (s.h.persists() - before < at) break;
      ++crashes;
    }
  }
  EXPECT_GT(crashes, 10);
}

// Hosts with a cohort of two members, in two groups, come and go. No crash may separate a cohort.
TEST(Recovery, EveryPersistOfACohortMayBeTheLast) {
  int crashes = 0;
  for (bool kept : {false, true}) {
    for (int at = 1;; ++at) {
      const std::string where =
          "crash " + std::string(kept ? "after" : "before") + " persist " + std::to_string(at);
      Story s;
      const auto vote_all = [&s] {
        for (PeerId peer : s.alive) {
          const auto members = s.h.Lively(peer).members;
          for (const auto& [id, member] : members) {
            if (member.admitted) s.h.LivelyVote(peer, id);
          }
        }
        s.Settle();
      };
      s.h.CrashAt(at, kept);
      for (uint64_t n = 1; n <= 3; ++n) {
        s.Add(n);
        for (uint32_t group : {0, 1}) {
          control::Join join{.request = group + 1, .group = {"run", group}, .name = "t"};
          join.wish.cohort = "host";
          join.wish.cohort_size = 2;
          s.h.LivelyJoin(P(n), join);
        }
        s.Settle();
        for (int i = 0; i < 3; ++i) vote_all();
      }
      s.Leave(2);
      s.Settle();
      for (int i = 0; i < 3; ++i) vote_all();
      for (const uint32_t group : {0, 1}) {
        const GroupView view = s.h.View({"run", group});
        ASSERT_EQ(view.members.size(), 2u) << where;
        EXPECT_TRUE(view.members[0].joined && view.members[1].joined) << where;
        EXPECT_EQ(view.preparing, Epoch()) << where;
        EXPECT_NE(view.members[0].peer, P(2)) << where;
        EXPECT_NE(view.members[1].peer, P(2)) << where;
      }
      if (testing::Test::HasFailure()) return;
      if (s.h.persists() < at) break;
      ++crashes;
    }
  }
  EXPECT_GT(crashes, 20);
}

TEST(Recovery, KnownMembersHaveTwiceTheTimeToAttachIfSilentToOthers) {
  Story s;
  s.Found(2);
  s.h.Boot();
  s.h.Pass();
  EXPECT_EQ(s.h.Notices("restart").size(), 1u);
  s.h.Wait(1999);
  EXPECT_EQ(s.h.View().members.size(), 2u);
  s.h.Reattach(P(1));
  // A lost link is no proof of death while the other peer may still come back.
  s.h.Say(P(1), control::LinkLost{G(), Epoch(2), P(2), "reset"});
  EXPECT_EQ(s.h.View().members.size(), 2u);
  s.h.Wait(1);
  s.h.Run();
  EXPECT_EQ(s.h.View().members.size(), 1u);
  EXPECT_EQ(s.h.Lively(P(1)).groups[G()].committed, Epoch(3));
}

TEST(Recovery, WhomNobodyHearsIsNotWaitedFor) {
  for (const bool heard_by_one : {false, true}) {
    Story s;
    s.Found(4);
    s.h.Boot();
    s.h.Pass();
    const uint64_t accusers = heard_by_one ? 2 : 3;
    for (uint64_t n : {1, 2, 3}) s.h.Reattach(P(n));
    s.h.Lively(P(2)).mute = s.h.Lively(P(3)).mute = true;  // wait for their link to P4
    for (uint64_t n = 1; n <= accusers; ++n) {
      s.h.Say(P(n), control::LinkLost{G(), Epoch(4), P(4), "silent", 1000});
      s.h.Wait(20);  // the first pair becomes blocked before the last grace is over
    }
    s.h.Wait(200);
    s.h.Run();
    EXPECT_EQ(s.h.Notices("death").size(), heard_by_one ? 0u : 1u);
  }
}

TEST(Recovery, WhoseAddressAnotherPeerHasIsNotWaitedFor) {
  Story s;
  s.Found(3);
  s.h.Boot();
  s.h.Pass();
  s.h.Reattach(P(1));
  s.h.Reattach(P(2));
  s.h.Say(P(1), control::LinkLost{G(), Epoch(3), P(3), "refused"});
  EXPECT_EQ(s.h.View().members.size(), 3u);
  s.h.SetAddress(P(4), P(3));
  s.h.AddLively(P(4));
  s.h.Run();
  EXPECT_EQ(s.h.View().members.size(), 2u);
  EXPECT_EQ(s.h.Notices("death"),
            std::vector<std::string>{"member removed member=m3 peer=p3 why=died reason=\"another "
                                     "peer listens at its address and lost by p1 of run/0\""});
}

// Two peers have the same address by mistake. No peer has lost its link to the peer that has a
// member.
TEST(Recovery, AnAddressThatIsTakenAloneIsNoProof) {
  Story s;
  s.Found(2);
  s.h.Boot();
  s.h.Pass();
  s.h.Reattach(P(1));
  s.h.SetAddress(P(3), P(2));
  s.h.AddLively(P(3));
  s.h.Reattach(P(2));
  s.h.Run();
  EXPECT_EQ(s.h.View().members.size(), 2u);
}

TEST(Recovery, AFreezeThatWasOpenIsFollowedByTheNextFreeze) {
  Story s;
  s.Found(2);
  s.h.Lively(P(2)).mute = true;
  s.h.Say(P(1), control::LinkLost{G(), Epoch(2), P(2), "reset"});
  s.h.Wait(100);
  ASSERT_EQ(s.h.View().preparing, Epoch(3));
  s.h.Boot();
  s.h.ForgetReceived();
  s.h.Lively(P(2)).mute = false;
  s.h.Reattach(P(1));
  s.h.Reattach(P(2));
  s.h.Run();
  EXPECT_EQ(s.h.Take(P(2)),
            (std::vector<std::string>{
                "Prepare 4 base=2 boundary=2 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
                "Commit 4"}));
}

TEST(Recovery, AnAdmissionThatWasOpenBeginsAgainWithTheVotes) {
  Story s;
  s.Add(1);
  s.h.LivelyJoin(P(1), 1);
  s.Settle();
  s.Add(2);
  s.h.Lively(P(2)).mute = true;
  s.h.LivelyJoin(P(2), 1);
  s.h.Run();
  s.VoteAll();
  s.h.Run();
  ASSERT_EQ(s.h.View().preparing, Epoch(2));
  s.h.Boot();
  s.h.ForgetReceived();
  s.h.Lively(P(2)).mute = false;
  s.h.Reattach(P(2));
  s.h.Reattach(P(1));
  s.h.Run();
  EXPECT_EQ(s.h.Take(P(1)),
            (std::vector<std::string>{
                "Abort 2", "Prepare 3 base=1 boundary=3 last_freeze=0 members=m1@1,m2@3 ring=p1,p2",
                "Commit 3", "VoteResult m1 number=1 epoch=3"}));
}

TEST(Recovery, WithAStoreThatLostEverythingMembersAreRemoved) {
  Harness old;
  Harness fresh;
  fresh.Attach(P(1), {{G(), Epoch(12), {MemberId(1)}}});
  EXPECT_EQ(fresh.Take(P(1)), std::vector<std::string>{"Removed m1 unknown"});
}

// The store was restored from a backup, which does not know epoch 9 of the peer. The peer's members
// are removed. The numbers that the peer knows are not given out again.
TEST(Recovery, WithAStoreThatWentBackInTimeMembersAreRemovedAndNumbersGoOn) {
  Harness h;
  h.AddLively(P(1));
  h.LivelyJoin(P(1), 1);
  h.Run();
  h.Close(P(1));
  h.ForgetReceived();
  h.Attach(P(1), {{G(), Epoch(9), {MemberId(1)}}});
  EXPECT_EQ(h.Take(P(1)), std::vector<std::string>{"Removed m1 unknown"});
  EXPECT_EQ(h.Stored().committed, Epoch(10));
  EXPECT_TRUE(h.Stored().members.empty());
}

// Epoch 3 is prepared, and p1 answers. Then the store goes back to a time before that.
TEST(Recovery, APreparationThatTheStoreForgotLeadsToANewFreeze) {
  Story s;
  s.Found(2);
  const Records backup = s.h.store();
  s.h.Lively(P(2)).mute = true;
  s.h.Say(P(1), control::LinkLost{G(), Epoch(2), P(2), "reset"});
  s.h.Wait(100);
  ASSERT_EQ(s.h.View().preparing, Epoch(3));
  s.h.Restore(backup);
  s.h.ForgetReceived();
  s.h.Lively(P(2)).mute = false;
  // A peer repeats a message that was not answered.
  const uint64_t forgotten = s.h.Prepared(P(1)).preparation;
  s.h.Reattach(P(1));
  s.h.Say(P(1), control::EpochReady{G(), Epoch(3), {}, forgotten});
  s.h.Reattach(P(2));
  s.h.Run();
  EXPECT_TRUE(s.h.closings().empty()) << s.h.closings().front();
  // p1 has named number 3, so it is not given out again.
  for (const PeerId peer : {P(1), P(2)}) {
    EXPECT_EQ(s.h.Take(peer),
              (std::vector<std::string>{
                  "Prepare 4 base=2 boundary=2 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
                  "Commit 4"}));
  }
}

// The store forgets a preparation that p2 has answered. Before p2 attaches again, the coordinator
// has prepared another epoch with the same number. The old answer does not count for it.
TEST(Recovery, AnAnswerToAForgottenPreparationDoesNotCommitTheNewOneOfItsNumber) {
  Story s;
  s.Found(3);
  const Records backup = s.h.store();
  s.h.Lively(P(1)).mute = true;
  s.h.Say(P(1), control::LinkLost{G(), Epoch(3), P(2), "reset"});
  s.h.Wait(100);
  ASSERT_EQ(s.h.View().preparing, Epoch(4));
  s.h.Lively(P(1)).mute = false;
  // As if p1 and p3 had not received that preparation.
  s.h.Lively(P(1)).groups.at(G()).prepared.reset();
  s.h.Lively(P(1)).groups.at(G()).frozen = false;
  s.h.Lively(P(3)).groups.at(G()).prepared.reset();
  s.h.Lively(P(3)).groups.at(G()).frozen = false;
  const uint64_t forgotten = s.h.Prepared(P(2)).preparation;
  s.h.Restore(backup);
  s.h.Reattach(P(1));
  s.h.Reattach(P(3));
  s.h.LivelyLeave(P(3), MemberId(3));
  s.h.Run();
  ASSERT_EQ(s.h.View().preparing, Epoch(4));
  s.h.ForgetReceived();
  s.h.Lively(P(2)).mute = true;
  s.h.Reattach(P(2));
  s.h.Say(P(2), control::EpochReady{G(), Epoch(4), {}, forgotten});
  EXPECT_EQ(s.h.View().committed, Epoch(3));
  EXPECT_EQ(s.h.View().preparing, Epoch(5));
}

// An admission freezes nothing. But a peer that was ready for it may have heard that it was
// committed, so it cannot just be aborted.
TEST(Recovery, AForgottenAdmissionLeadsToANewFreezeToo) {
  Story s;
  s.Add(1);
  s.h.LivelyJoin(P(1), 1);
  s.Settle();
  s.Add(2);
  s.h.LivelyJoin(P(2), 1);
  s.h.Run();
  const Records backup = s.h.store();
  s.h.Lively(P(2)).mute = true;
  s.VoteAll();
  s.h.Run();
  ASSERT_EQ(s.h.View().preparing, Epoch(2));
  s.h.Restore(backup);
  s.h.ForgetReceived();
  s.h.Lively(P(2)).mute = false;
  s.h.Reattach(P(2));
  s.h.Reattach(P(1));
  s.h.Run();
  EXPECT_EQ(s.h.Take(P(1)),
            (std::vector<std::string>{
                "Prepare 3 base=1 boundary=1 last_freeze=3 freeze members=m1@1 ring=p1", "Commit 3",
                "Prepare 4 base=3 boundary=4 last_freeze=3 members=m1@1,m2@4 ring=p1,p2",
                "Commit 4", "VoteResult m1 number=1 epoch=4"}));
}

// Terms and numbers of members that peers know are not given out again.
TEST(Recovery, AStoreThatWentBackLearnsItsTermAndItsNumbersFromThePeers) {
  Story s;
  s.Found(1);
  const Records backup = s.h.store();
  s.h.Boot();
  s.h.Reattach(P(1));
  ASSERT_EQ(s.h.Welcomed(P(1)).term, 2u);
  s.Add(2);
  s.h.LivelyJoin(P(2), 1);
  s.h.Run();
  ASSERT_EQ(s.h.Lively(P(2)).members.count(MemberId(2)), 1u);
  s.h.Restore(backup);
  // The harness checks that each Welcome of a new start has a higher term than the one before.
  s.h.Reattach(P(2));
  EXPECT_EQ(s.h.Welcomed(P(2)).term, 3u);
  EXPECT_EQ(s.h.store().store.term, 3u);
  EXPECT_EQ(s.h.Notices("restart").back(), "store went back term=2 known_term=2 peer=p2");
  s.h.Reattach(P(1));
  s.h.LivelyJoin(P(1), 2);
  s.h.Run();
  EXPECT_EQ(s.h.Lively(P(1)).members.count(MemberId(3)), 1u);
}

// Any host may claim to know more. Its claim must not use terms, members and epochs up for ever.
TEST(Recovery, NumbersThatNoBackupExplainsAreNotBelieved) {
  for (const uint64_t claim : {uint64_t{1} << 61, (uint64_t{1} << 20) + 100}) {
    Harness h;
    h.AddLively(P(1));
    h.LivelyJoin(P(1), 1);
    h.Run();
    const Records before = h.store();
    h.Claim(P(9), claim);
    h.Attach(P(9), {{G(), Epoch(claim), {MemberId(claim)}}});
    h.Run();
    EXPECT_EQ(h.store().store.term, before.store.term);
    EXPECT_EQ(h.store().runs.begin()->second.next_member, before.runs.begin()->second.next_member);
    EXPECT_LT(h.store().groups.begin()->second.highest, Epoch(100));
  }
}

TEST(Recovery, APeerWithMembersInAnotherStoreIsLeftAlone) {
  Harness h;
  h.AddLively(P(1));
  h.LivelyJoin(P(1), 1);
  h.Run();
  Harness other;
  const auto say_hello = [&](std::vector<control::GroupState> groups) {
    other.Step(SessionOpened{SessionId(77)});
    control::Hello hello;
    hello.peer = P(1);
    hello.endpoints = {"10.0.0.1:29700"};
    hello.protocol = control::kProtocolVersion;
    hello.groups = std::move(groups);
    hello.store = 5;
    hello.term = 1;
    hello.coordinator = "another";
    other.Step(FromPeer{SessionId(77), hello});
  };
  say_hello({{G(), Epoch(1), {MemberId(1)}}});
  ASSERT_EQ(other.closings().size(), 1u);
  EXPECT_EQ(other.closings().back(),
            "refused: p1 has members in store 0000000000000005, and this coordinator has store "
            "0000000000000001: list only coordinators of one store in --coordinator, or let the "
            "members leave first");
  EXPECT_FALSE(other.core().HasPeer(P(1)));
}

TEST(Recovery, ADrainOfAPeerWithoutMembersWaitsForItToComeBack) {
  Harness h;
  h.Attach(P(1));
  h.Drain(P(1));
  EXPECT_EQ(h.store().drains.count(P(1)), 1u);
  h.Boot();
  h.Pass();
  h.Attach(P(1));
  EXPECT_EQ(h.Take(P(1)), (std::vector<std::string>{"Drain", "Drain"}));
  h.Close(P(1));
  EXPECT_EQ(h.store().drains.count(P(1)), 1u);
  h.Wait(2000);
  EXPECT_TRUE(h.store().drains.empty());
  EXPECT_FALSE(h.core().HasPeer(P(1)));
}

TEST(Recovery, ADrainedPeerWithoutMembersThatFallsSilentIsForgotten) {
  Harness h;
  h.Attach(P(1));
  h.Drain(P(1));
  h.Hang(P(1));
  h.Wait(4001);
  EXPECT_FALSE(h.core().HasPeer(P(1)));
  EXPECT_TRUE(h.store().drains.empty());
}

TEST(Recovery, ADrainThatWasAcknowledgedOutlivesARestart) {
  Story s;
  s.Found(2);
  s.h.Drain(P(2));
  s.h.Boot();
  s.h.ForgetReceived();
  s.h.Reattach(P(1));
  s.h.Reattach(P(2));
  s.h.Run();
  EXPECT_EQ(s.h.Take(P(2)), std::vector<std::string>{"Drain"});
  EXPECT_TRUE(s.h.core().GetOverview().groups[0].ring[1].draining);
  s.Kill(2);
  s.h.Wait(6000);
  EXPECT_EQ(s.h.View().members.size(), 1u);
  EXPECT_TRUE(s.h.store().drains.empty());
}

TEST(Recovery, VotesThatTheStoreLostAreTakenAsTheyCome) {
  Harness h;
  h.AddLively(P(1));
  h.LivelyJoin(P(1), 1);
  h.Run();
  h.ForgetReceived();
  h.Lively(P(1)).members.at(MemberId(1)).votes = 6;
  h.LivelyVote(P(1), MemberId(1));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), std::vector<std::string>{"VoteResult m1 number=7 epoch=1"});
}

// ------------------------------------------------------------------------------ random histories

// Does one random thing that may happen to lively peers or to the coordinator.
void Happen(Story& s, Prng& random, uint64_t* requests) {
  std::vector<PeerId> alive(s.alive.begin(), s.alive.end());
  const PeerId peer = alive.empty() ? P(0) : alive[random.Below(alive.size())];
  switch (random.Below(12)) {
    case 0:
      if (alive.size() < 6) s.Add(100 + *requests);
      ++*requests;
      return;
    case 1:
    case 2:
      if (peer) s.h.LivelyJoin(peer, ++*requests);
      return;
    case 3:
      if (peer) s.Leave(peer.value());
      return;
    case 4:
      if (peer && random.Below(3) == 0) s.Kill(peer.value());
      return;
    case 5:
      if (peer) s.h.Close(peer);
      return;
    case 6:
      if (peer) s.h.Reattach(peer);
      return;
    case 7:
      if (peer && s.h.HasStream(peer)) {
        const GroupView view = s.h.View();
        s.h.Say(peer, control::LinkLost{G(), std::max(view.committed, view.preparing),
                                        alive[random.Below(alive.size())], "reset"});
      }
      return;
    case 8:
      if (peer) s.h.Lively(peer).mute = random.Below(2) == 0;
      return;
    case 9:
      if (peer) {
        s.h.Lively(peer).cannot_reach.clear();
        if (random.Below(2) == 0) {
          s.h.Lively(peer).cannot_reach = {alive[random.Below(alive.size())]};
        }
        s.h.Lively(peer).cannot_reach.erase(peer);
      }
      return;
    case 10:
      s.h.CrashAt(1 + static_cast<int>(random.Below(3)), random.Below(2) == 0);
      return;
    default:
      s.VoteAll();
  }
}

uint64_t RandomHistory(uint64_t seed) {
  Prng random(seed);
  Story s;
  uint64_t requests = 0;
  for (int i = 0; i < 60; ++i) {
    Happen(s, random, &requests);
    if (random.Below(2) == 0) s.h.Run();
    if (random.Below(3) == 0) s.h.Wait(static_cast<int64_t>(random.Below(1500)));
    if (s.h.crashed()) s.RecoverIfCrashed();
  }
  // The faults stop.
  s.h.CrashAt(0, false);
  s.RecoverIfCrashed();
  for (PeerId peer : s.alive) {
    s.h.Lively(peer).mute = false;
    s.h.Lively(peer).cannot_reach.clear();
    s.h.Reattach(peer);
  }
  // A coordinator that hears no peer may be cut off, and then removes no member for silence.
  if (s.alive.empty()) s.Add(99);
  s.Settle();
  Finish(s);
  CheckAtRest(s, "seed " + std::to_string(seed));
  return s.h.trace();
}

TEST(Recovery, RandomHistoriesComeToRestAndRepeat) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const uint64_t trace = RandomHistory(seed);
    if (testing::Test::HasFailure()) return;
    if (seed % 10 == 0) {
      EXPECT_EQ(trace, RandomHistory(seed)) << "seed " << seed;
    }
  }
}

// Returns a random message that no correct peer sends. None of them may break anything.
control::PeerMessage Nonsense(Prng& random) {
  const GroupKey group{random.Below(4) == 0 ? "other" : "run",
                       static_cast<uint32_t>(random.Below(2))};
  const Epoch epoch(random.Below(8) == 0 ? UINT64_MAX : random.Below(6));
  const MemberId member(random.Below(6));
  const PeerId peer(random.Below(5));
  control::OpReport op = Op(random.Below(4), random.Below(2) == 0);
  op.matches = {{peer, OpOrdinal(random.Below(4))}};
  switch (random.Below(9)) {
    case 0:
      return control::Join{random.Below(4), group, "x"};
    case 1:
      return control::Leave{group, member, random.Below(2) == 0, "x"};
    case 2:
      return control::Vote{group, member, random.Below(5) == 0 ? UINT64_MAX : random.Below(4)};
    case 3:
    case 4:
      return control::EpochReady{group, epoch, {op, op}};
    case 5:
      return control::EpochFailed{group, epoch, {{peer, "x"}, {peer, "y"}}};
    case 6:
      return control::LinkLost{group, epoch, peer, "x"};
    case 7:
      return control::Draining{};
    default:
      return control::Heartbeat{{control::GroupLoad{group, 1, 1, 1, 1}}};
  }
}

TEST(Recovery, NonsenseIsRefusedOrIgnored) {
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng random(seed);
    Harness h;
    for (int i = 0; i < 300; ++i) {
      const PeerId peer = P(1 + random.Below(4));
      if (!h.HasStream(peer) || random.Below(20) == 0) {
        h.Attach(peer, {{G(),
                         Epoch(random.Below(3) == 0 ? random.Next() : 0),
                         {MemberId(random.Below(5)), MemberId(random.Below(5))}},
                        {G(), Epoch(random.Below(4)), {MemberId(random.Below(5))}}});
      } else if (random.Below(10) == 0) {
        h.Evict(MemberId(random.Below(5)));
      } else {
        h.Say(peer, Nonsense(random));
      }
      if (random.Below(10) == 0) h.Wait(static_cast<int64_t>(random.Below(2500)));
      if (random.Below(60) == 0) h.Boot();
    }
  }
}

}  // namespace
}  // namespace longhaul::coordinator
