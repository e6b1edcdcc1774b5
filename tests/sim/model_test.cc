// What the models promise, where a run would test it only by chance.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/sim/model_transport.h"
#include "tests/sim/world.h"

namespace longhaul::sim {
namespace {

TEST(WorldTest, WhatCameWhileANodeWasFrozenStaysBeforeWhatComesWhenItThaws) {
  World world(1, {});
  Node node;
  std::string order;
  const auto say = [&](const char* what) { return [&order, what] { order += what; }; };
  world.Freeze(&node);
  world.On(&node, Tick{10}, say("a"));
  world.On(&node, Tick{20}, say("b"));
  world.At(Tick{30}, [&] { world.Thaw(&node); });
  world.On(&node, Tick{30}, say("c"));  // in the same moment as the thaw
  world.On(&node, Tick{31}, say("d"));
  while (world.RunOne(Tick{100})) {
  }
  EXPECT_EQ(order, "abcd");
}

TEST(WorldTest, ANodeThatFreezesWhileItCatchesUpGoesOnWhereItWas) {
  World world(1, {});
  Node node;
  std::string order;
  world.Freeze(&node);
  world.On(&node, Tick{10}, [&] {
    order += "a";
    world.Freeze(&node);
  });
  world.On(&node, Tick{20}, [&] { order += "b"; });
  world.At(Tick{30}, [&] { world.Thaw(&node); });
  while (world.RunOne(Tick{40})) {
  }
  EXPECT_EQ(order, "a");
  world.Thaw(&node);
  while (world.RunOne(Tick{50})) {
  }
  EXPECT_EQ(order, "ab");
}

class Listener final : public peerd::TransportListener {
 public:
  void OnLinkUp(const peerd::LinkKey& link) override { heard += "up " + ToString(link.peer) + ";"; }
  void OnLinkDown(const peerd::LinkKey& link, const std::string& reason, uint32_t) override {
    heard += "down " + ToString(link.peer) + " " + reason + ";";
  }
  absl::Status OnControlFrame(const peerd::LinkKey&, const FrameHeader&,
                              std::span<const uint8_t>) override {
    return absl::OkStatus();
  }

  std::string heard;
};

class Pair final : public Switchboard {
 public:
  Pair() : world_(1, {100, 100}) {
    for (size_t i : {0, 1}) {
      nodes_[i].index = static_cast<int>(i) + 1;
      nodes_[i].name = "p" + std::to_string(i + 1);
      transports_[i] = std::make_unique<ModelTransport>(&world_, &nodes_[i], PeerId(i + 1),
                                                        TransportModel{}, this, &listeners_[i]);
    }
  }
  ModelTransport* Find(PeerId peer) override { return transports_[peer.value() - 1].get(); }
  void OnProtocolError(const std::string& text) override { ADD_FAILURE() << text; }
  void OnFrame(PeerId, PeerId, const FrameHeader&) override {}
  void OnTunnel(PeerId, PeerId, PeerId) override {}

  void Run(int64_t ms) {
    const Tick end = world_.now() + Millis(ms);
    while (world_.RunOne(end)) {
    }
    world_.Skip(end);
  }

  World world_;
  Node nodes_[2];
  Listener listeners_[2];
  std::unique_ptr<ModelTransport> transports_[2];
};

// The two peers are in two groups of one run. One peer is older in the first group, the other peer
// is older in the second. So both dial.
TEST(ModelTransportTest, PeersThatDialEachOtherAtOnceGetOneLinkThatStays) {
  Pair pair;
  for (const bool by_first : {true, false}) {
    const uint32_t group = by_first ? 0 : 1;
    for (const uint64_t self : {1, 2}) {
      pair.Find(PeerId(self))
          ->OpenLinks("run", group, Epoch(1), "token" + std::to_string(group),
                      {{.peer = PeerId(3 - self), .dial = (self == 1) == by_first, .data = true}},
                      pair.world_.now() + Millis(1000));
    }
  }
  pair.Run(2000);
  EXPECT_EQ(pair.listeners_[0].heard, "up p2;");
  EXPECT_EQ(pair.listeners_[1].heard, "up p1;");
}

}  // namespace
}  // namespace longhaul::sim
