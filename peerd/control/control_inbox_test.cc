#include "peerd/control/control_inbox.h"

#include <gtest/gtest.h>

namespace longhaul::peerd {
namespace {

control::CoordinatorMessage Message() { return control::PendingCount{}; }

// One letter for each mail: b for StreamBegan, e for StreamEnded, m for a message.
std::string Take(ControlInbox* inbox) {
  std::string all;
  for (const ControlInbox::Mail& mail : inbox->TakeAll()) all += "bem"[mail.index()];
  return all;
}

TEST(ControlInbox, WhatDoesNotFitEndsItsStreamAndTheEndIsHeard) {
  ControlInbox inbox(3, nullptr);
  EXPECT_TRUE(inbox.Begin());
  EXPECT_TRUE(inbox.Add(Message()));
  EXPECT_TRUE(inbox.Add(Message()));
  EXPECT_FALSE(inbox.Add(Message()));
  inbox.End("full");
  EXPECT_EQ(Take(&inbox), "bmme");
  EXPECT_TRUE(inbox.Begin());
  EXPECT_EQ(Take(&inbox), "b");
}

TEST(ControlInbox, StreamsThatDoNotFitAreNotHeardOf) {
  ControlInbox inbox(2, nullptr);
  EXPECT_TRUE(inbox.Begin());
  EXPECT_TRUE(inbox.Add(Message()));
  EXPECT_FALSE(inbox.Add(Message()));
  inbox.End("full");
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(inbox.Begin());
    inbox.End("full");
  }
  EXPECT_EQ(Take(&inbox), "bme");
}

// If the end of a stream could get lost, the reactor would believe that the stream still stands.
TEST(ControlInbox, EveryBeginningHasItsEnd) {
  for (size_t room = 0; room <= 4; ++room) {
    ControlInbox inbox(4, nullptr);
    for (size_t i = room; i < 4; ++i) inbox.End("an older one");
    bool began = inbox.Begin();
    while (began && inbox.Add(Message())) {
    }
    inbox.End("full");
    const std::string all = Take(&inbox);
    EXPECT_EQ(all.back(), 'e') << all;
    EXPECT_EQ(all.find('b') != std::string::npos, began) << all;
  }
}

}  // namespace
}  // namespace longhaul::peerd
