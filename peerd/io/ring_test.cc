// Tests the contract of Ring on all implementations, and the promises of each one.
#include "peerd/io/ring.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "peerd/io/fake_ring.h"
#include "peerd/io/open_ring.h"
#include "peerd/io/sockets.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;

// Records the callbacks of an operation.
struct Seen {
  int calls = 0;
  int ends = 0;
  IoResult last;
  int first_value = 0;
  bool ended() const { return ends > 0; }
};

IoCallback Into(Seen* seen) {
  return [seen](IoResult result) {
    if (seen->calls++ == 0) seen->first_value = result.value;
    seen->last = result;
    if (!result.more) ++seen->ends;
  };
}

enum class Kind { kUring, kEpoll, kFake };

struct Param {
  std::string name;
  Kind kind;
  uint32_t poll_us = 0;
  uint64_t seed = 0;  // kFake
};

std::ostream& operator<<(std::ostream& out, const Param& param) { return out << param.name; }

class RingTest : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (GetParam().kind == Kind::kFake) {
      FakeRingOptions options;
      options.seed = GetParam().seed;
      ring_ = std::make_unique<FakeRing>(options);
      return;
    }
    auto ring = GetParam().kind == Kind::kUring ? MakeUringRing(64) : MakeEpollRing();
    ASSERT_TRUE(ring.ok()) << ring.status();
    ring_ = *std::move(ring);
    ring_->SetPoll(GetParam().poll_us);
  }

  template <class Condition>
  bool Until(Condition condition, int64_t ms = 20000) {
    const Tick deadline = ring_->Now() + Millis(ms);
    while (!condition()) {
      if (ring_->Now() >= deadline) return false;
      EXPECT_TRUE(ring_->RunOnce(std::min(deadline, ring_->Now() + Millis(50))).ok());
    }
    return true;
  }

  Sockets& sockets() { return ring_->sockets(); }

  SocketAddress Listen() {
    auto fd = sockets().Listen(*NumericAddress({.host = "127.0.0.1", .port = 0}));
    EXPECT_TRUE(fd.ok()) << fd.status();
    listener_ = *fd;
    return *sockets().LocalAddress(listener_);
  }

  // Two connected sockets, made by Accept and Connect.
  std::pair<int, int> Connected() {
    const SocketAddress address = Listen();
    Seen accept, connect;
    ring_->Accept(listener_, Into(&accept));
    const int fd = *sockets().Open(AF_INET);
    ring_->Connect(fd, address.get(), address.length, Into(&connect));
    EXPECT_TRUE(Until([&] { return accept.ended() && connect.ended(); }));
    EXPECT_EQ(connect.last.value, 0);
    EXPECT_GE(accept.last.value, 0);
    EXPECT_TRUE(sockets().Tune(fd, {.user_timeout_ms = 1000, .congestion = ""}).ok());
    sockets().Close(listener_);
    return {fd, accept.last.value};
  }

  std::string Pattern(size_t bytes) {
    std::string text(bytes, '\0');
    for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 31 + i / 251);
    return text;
  }

  std::unique_ptr<Ring> ring_;
  int listener_ = -1;
};

INSTANTIATE_TEST_SUITE_P(
    Rings, RingTest,
    ::testing::Values(Param{"Uring", Kind::kUring}, Param{"UringThatPolls", Kind::kUring, 200},
                      Param{"Epoll", Kind::kEpoll}, Param{"EpollThatPolls", Kind::kEpoll, 200},
                      Param{"Fake1", Kind::kFake, 0, 1}, Param{"Fake2", Kind::kFake, 0, 2},
                      Param{"Fake3", Kind::kFake, 0, 3}, Param{"Fake4", Kind::kFake, 0, 4},
                      Param{"Fake5", Kind::kFake, 0, 5}),
    [](const auto& info) { return info.param.name; });

TEST_P(RingTest, MovesBytesInOrderAndEndsWithZero) {
  const auto [a, b] = Connected();
  const std::string sent = Pattern(3 << 20);
  Seen send;
  ring_->Send(a, sent.data(), sent.size(), true, Into(&send));
  std::string got;
  std::vector<char> buffer(100000);
  bool ended = false;
  std::function<void()> receive = [&] {
    ring_->Recv(b, buffer.data(), buffer.size(), false, [&](IoResult result) {
      ASSERT_GE(result.value, 0);
      EXPECT_FALSE(result.more);
      if (result.value == 0) {
        ended = true;
        return;
      }
      got.append(buffer.data(), result.value);
      receive();
    });
  };
  receive();
  EXPECT_TRUE(Until([&] { return send.ended() && got.size() == sent.size(); }));
  EXPECT_EQ(send.last.value, static_cast<int>(sent.size()));
  EXPECT_EQ(got, sent);
  sockets().ShutdownSend(a);
  EXPECT_TRUE(Until([&] { return ended; }));
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, WaitAllReceivesEverything) {
  const auto [a, b] = Connected();
  const std::string sent = Pattern(200000);
  std::string got(sent.size(), '\0');
  Seen recv, first, second;
  ring_->Recv(b, got.data(), got.size(), true, Into(&recv));
  ring_->Send(a, sent.data(), 70000, true, Into(&first));
  EXPECT_TRUE(Until([&] { return first.ended(); }));
  EXPECT_FALSE(recv.ended());
  ring_->Send(a, sent.data() + 70000, 130000, true, Into(&second));
  EXPECT_TRUE(Until([&] { return recv.ended(); }));
  EXPECT_EQ(recv.last.value, 200000);
  EXPECT_EQ(got, sent);
  EXPECT_TRUE(Until([&] { return second.ended(); }));
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, MessagesScatterAndGather) {
  const auto [a, b] = Connected();
  std::string head = "head", body = Pattern(5000);
  iovec out[2] = {{head.data(), head.size()}, {body.data(), body.size()}};
  msghdr message{};
  message.msg_iov = out;
  message.msg_iovlen = 2;
  Seen send;
  ring_->SendMsg(a, &message, true, Into(&send));
  std::string got(head.size() + body.size(), '\0');
  size_t have = 0;
  while (have < got.size()) {
    // Receive the missing bytes into two parts: the first has at most 3 bytes.
    const size_t split = std::min<size_t>(3, got.size() - have);
    iovec in[2] = {{got.data() + have, split},
                   {got.data() + have + split, got.size() - have - split}};
    msghdr into{};
    into.msg_iov = in;
    into.msg_iovlen = 2;
    Seen recv;
    ring_->RecvMsg(b, &into, Into(&recv));
    ASSERT_TRUE(Until([&] { return recv.ended(); }));
    ASSERT_GT(recv.last.value, 0);
    have += recv.last.value;
  }
  EXPECT_TRUE(Until([&] { return send.ended(); }));
  EXPECT_EQ(send.last.value, 5004);
  EXPECT_EQ(got, head + body);
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, MessagesLargerThanTheConnectionHoldsAreSentWhole) {
  const auto [a, b] = Connected();
  const std::string sent = Pattern(20 << 20);
  // Pieces of many sizes, so that the connection fills up within them and at their ends.
  std::vector<iovec> parts;
  for (size_t at = 0; at < sent.size();) {
    const size_t bytes = std::min(sent.size() - at, parts.size() % 3 * 70001 + 1);
    parts.push_back({const_cast<char*>(sent.data()) + at, bytes});
    at += bytes;
  }
  const std::vector<iovec> before = parts;
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ASSERT_LE(parts.size(), size_t{IOV_MAX});
  std::string got(sent.size(), '\0');
  Seen send, recv;
  ring_->SendMsg(a, &message, true, Into(&send));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  EXPECT_FALSE(send.ended());
  ring_->Recv(b, got.data(), got.size(), true, Into(&recv));
  EXPECT_TRUE(Until([&] { return send.ended() && recv.ended(); }));
  EXPECT_EQ(send.last.value, static_cast<int>(sent.size()));
  EXPECT_EQ(recv.last.value, static_cast<int>(sent.size()));
  EXPECT_TRUE(got == sent);
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].iov_base, before[i].iov_base);
    EXPECT_EQ(parts[i].iov_len, before[i].iov_len);
  }
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, ACancelledTransferSaysWhatItHasMoved) {
  const auto [a, b] = Connected();
  const std::string sent = Pattern(40);
  std::string got(1000, '\0');
  Seen send, cancelled;
  const IoId id = ring_->Recv(b, got.data(), got.size(), true, Into(&cancelled));
  ring_->Send(a, sent.data(), sent.size(), true, Into(&send));
  EXPECT_TRUE(Until([&] { return send.ended(); }));
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(ring_->RunOnce(ring_->Now() + 100).ok());
  ring_->Cancel(id);
  EXPECT_TRUE(Until([&] { return cancelled.ended(); }));
  EXPECT_TRUE(cancelled.last.value > 0 || cancelled.last.value == -ECANCELED)
      << cancelled.last.value;
  size_t have = std::max(cancelled.last.value, 0);
  while (have < sent.size()) {
    Seen recv;
    ring_->Recv(b, got.data() + have, got.size() - have, false, Into(&recv));
    ASSERT_TRUE(Until([&] { return recv.ended(); }));
    ASSERT_GT(recv.last.value, 0);
    have += recv.last.value;
  }
  EXPECT_EQ(got.substr(0, have), sent);
  sockets().Close(a);
  sockets().Close(b);
}

// The system gives the number of a closed socket to the next socket.
TEST_P(RingTest, ASocketWithTheNumberOfAClosedOneIsServed) {
  for (int round = 0; round < 50; ++round) {
    const auto [a, b] = Connected();
    char byte = 0, more = 0;
    Seen send;
    bool served = false;
    const auto serve = [&, b = b](IoResult result) {
      EXPECT_EQ(result.value, round % 2 == 0 ? 1 : -ECANCELED);
      sockets().Close(b);
      served = true;
    };
    const IoId id = ring_->Recv(b, &byte, 1, false, serve);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
    if (round % 2 == 0) {
      ring_->Send(a, "x", 1, true, Into(&send));
    } else {
      ring_->Cancel(id);
    }
    ASSERT_TRUE(Until([&] { return served && (round % 2 != 0 || send.ended()); }));
    sockets().Close(a);
    const std::pair<int, int> next = Connected();
    if (GetParam().kind != Kind::kFake) {
      EXPECT_EQ(std::min(next.first, next.second), std::min(a, b)) << "the numbers are new";
    }
    Seen recv, again;
    ring_->Recv(next.second, &more, 1, false, Into(&recv));
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
    ring_->Send(next.first, "y", 1, true, Into(&again));
    ASSERT_TRUE(Until([&] { return recv.ended() && again.ended(); })) << "round " << round;
    EXPECT_EQ(more, 'y');
    sockets().Close(next.first);
    sockets().Close(next.second);
  }
}

TEST_P(RingTest, OperationsThatEndAtOnceKeepNoOthersWaiting) {
  const auto [a, b] = Connected();
  const auto [c, d] = Connected();
  Seen first;
  ring_->Send(a, "x", 1, true, Into(&first));
  EXPECT_TRUE(Until([&] { return first.ended(); }));
  bool over = false;
  int polls = 0;
  std::function<void()> poll = [&, b = b] {
    ring_->PollIn(b, [&](IoResult result) {
      EXPECT_GT(result.value, 0);
      ++polls;
      if (!over) poll();
    });
  };
  poll();
  char byte = 0;
  Seen recv, send, timeout;
  ring_->Recv(d, &byte, 1, false, Into(&recv));
  EXPECT_TRUE(Until([&] { return polls > 100; }));
  EXPECT_FALSE(recv.ended());
  ring_->Send(c, "y", 1, true, Into(&send));
  ring_->Timeout(ring_->Now() + 1000, Into(&timeout));
  EXPECT_TRUE(Until([&] { return recv.ended() && send.ended() && timeout.ended(); }));
  over = true;
  const int last = polls;
  EXPECT_TRUE(Until([&] { return polls > last; }));
  for (const int fd : {a, b, c, d}) sockets().Close(fd);
}

TEST_P(RingTest, AWaitWithoutEndEndsWithAnOperationThatNeedNotWait) {
  const auto [a, b] = Connected();
  Seen send, poll, more;
  ring_->Send(a, "x", 1, true, Into(&send));
  while (!send.ended()) EXPECT_TRUE(ring_->RunOnce(kNever).ok());
  // A callback starts the next operation.
  ring_->PollIn(b, [&, b = b](IoResult result) {
    Into (&poll)(result);
    ring_->PollIn(b, Into(&more));
  });
  while (!more.ended()) EXPECT_TRUE(ring_->RunOnce(kNever).ok());
  EXPECT_GT(poll.last.value, 0);
  EXPECT_GT(more.last.value, 0);
  sockets().Close(a);
  sockets().Close(b);
}

// A reader and a writer of one socket wait at the same time, and end each by its own event.
TEST_P(RingTest, BothDirectionsOfASocketWaitApart) {
  const auto [a, b] = Connected();
  const std::string large = Pattern(20 << 20);
  std::string got(large.size(), '\0');
  char byte = 0;
  Seen send, recv, small, drain, end;
  ring_->Send(a, large.data(), large.size(), true, Into(&send));
  ring_->Recv(a, &byte, 1, false, Into(&recv));
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(ring_->RunOnce(ring_->Now() + 100).ok());
  EXPECT_FALSE(send.ended());
  EXPECT_FALSE(recv.ended());
  ring_->Send(b, "x", 1, true, Into(&small));
  EXPECT_TRUE(Until([&] { return small.ended() && recv.ended(); }));
  EXPECT_FALSE(send.ended());
  ring_->Recv(a, &byte, 1, false, Into(&end));
  ring_->Recv(b, got.data(), got.size(), true, Into(&drain));
  EXPECT_TRUE(Until([&] { return drain.ended() && send.ended(); }));
  EXPECT_TRUE(got == large);
  EXPECT_FALSE(end.ended());
  sockets().ShutdownSend(b);
  EXPECT_TRUE(Until([&] { return end.ended(); }));
  EXPECT_EQ(end.last.value, 0);
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, ZeroCopySendsReportBytesAndThenTheNotice) {
  if (!ring_->features().send_zero_copy) GTEST_SKIP() << ring_->features().description;
  const auto [a, b] = Connected();
  std::string sent = Pattern(50000);
  const auto buffer = ring_->RegisterBuffer(sent.data(), sent.size());
  std::string got(sent.size(), '\0');
  Seen recv, send;
  ring_->Recv(b, got.data(), got.size(), true, Into(&recv));
  ring_->SendZeroCopy(a, sent.data(), sent.size(), buffer.ok() ? *buffer : -1, Into(&send));
  EXPECT_TRUE(Until([&] { return send.ended() && recv.ended(); }));
  EXPECT_EQ(send.calls, 2);
  EXPECT_EQ(send.first_value, 50000);
  EXPECT_EQ(send.last.value, 0);
  EXPECT_FALSE(send.last.more);
  EXPECT_EQ(got, sent);
  if (buffer.ok()) ring_->UnregisterBuffer(*buffer);
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, RefusedConnectionSaysSo) {
  const SocketAddress address = Listen();
  sockets().Close(listener_);
  const int fd = *sockets().Open(AF_INET);
  Seen connect;
  ring_->Connect(fd, address.get(), address.length, Into(&connect));
  EXPECT_TRUE(Until([&] { return connect.ended(); }));
  EXPECT_EQ(connect.last.value, -ECONNREFUSED);
  sockets().Close(fd);
}

TEST_P(RingTest, TimeoutsFireAtTheirTickOrLaterAndInOrder) {
  const Tick start = ring_->Now();
  std::vector<int> order;
  std::vector<int64_t> late;
  for (const int ms : {30, 10, 20}) {
    ring_->Timeout(start + Millis(ms), [&, ms](IoResult result) {
      EXPECT_EQ(result.value, 0);
      order.push_back(ms);
      late.push_back(ring_->Now() - start - Millis(ms));
    });
  }
  EXPECT_TRUE(Until([&] { return order.size() == 3; }));
  EXPECT_EQ(order, (std::vector<int>{10, 20, 30}));
  for (const int64_t us : late) EXPECT_GE(us, 0);
}

TEST_P(RingTest, WhatRunsBeforeTheNextSubmissionRunsOnceAndNotFromWithinTheCall) {
  int runs = 0;
  ring_->BeforeSubmit([&] {
    ++runs;
    ring_->BeforeSubmit([&] { runs += 10; });
  });
  EXPECT_EQ(runs, 0);
  EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  EXPECT_EQ(runs, 1) << "what is added from within waits for the next time";
  EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  EXPECT_EQ(runs, 11);
  EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  EXPECT_EQ(runs, 11);
}

TEST_P(RingTest, CancelledOperationsEndOnceAndUnknownIdsAreIgnored) {
  const auto [a, b] = Connected();
  const SocketAddress address = Listen();
  (void)address;
  char byte = 0;
  Seen recv, timeout, accept, poll;
  const IoId ids[] = {ring_->Recv(b, &byte, 1, false, Into(&recv)),
                      ring_->Timeout(ring_->Now() + Seconds(3600), Into(&timeout)),
                      ring_->Accept(listener_, Into(&accept)), ring_->PollIn(a, Into(&poll))};
  for (const IoId id : ids) {
    ring_->Cancel(id);
    ring_->Cancel(id);
  }
  EXPECT_EQ(recv.calls + timeout.calls + accept.calls + poll.calls, 0) << "called from Cancel()";
  const auto all = [&] {
    return recv.ended() && timeout.ended() && accept.ended() && poll.ended();
  };
  EXPECT_TRUE(Until(all));
  for (const IoId id : ids) ring_->Cancel(id);
  ring_->Cancel(0);
  ring_->Cancel(~IoId{0});
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  for (const Seen* seen : {&recv, &timeout, &accept, &poll}) {
    EXPECT_EQ(seen->calls, 1);
    EXPECT_EQ(seen->last.value, -ECANCELED);
  }
  sockets().Close(listener_);
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, PollInTellsOfDataAndOfConnections) {
  const auto [a, b] = Connected();
  Seen poll, send;
  ring_->PollIn(b, Into(&poll));
  EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  EXPECT_FALSE(poll.ended());
  ring_->Send(a, "x", 1, true, Into(&send));
  EXPECT_TRUE(Until([&] { return poll.ended() && send.ended(); }));
  EXPECT_GT(poll.last.value, 0);
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, AbortReachesTheOtherSideAsReset) {
  const auto [a, b] = Connected();
  char byte = 0;
  Seen recv;
  ring_->Recv(b, &byte, 1, false, Into(&recv));
  EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  sockets().Abort(a);
  EXPECT_TRUE(Until([&] { return recv.ended(); }));
  EXPECT_EQ(recv.last.value, -ECONNRESET);
  sockets().Close(b);
}

// The other end does not read, so only the abortive close brings the notice.
TEST_P(RingTest, ZeroCopyNoticeComesAfterAnAbortiveClose) {
  if (!ring_->features().send_zero_copy) GTEST_SKIP() << ring_->features().description;
  const auto [a, b] = Connected();
  const std::string sent = Pattern(7 << 20);
  Seen send;
  const IoId id = ring_->SendZeroCopy(a, sent.data(), sent.size(), -1, Into(&send));
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(ring_->RunOnce(ring_->Now() + 100).ok());
  if (send.calls > 0 && send.first_value < 0) GTEST_SKIP() << strerror(-send.first_value);
  EXPECT_EQ(send.calls, 0);
  ring_->Cancel(id);
  EXPECT_TRUE(Until([&] { return send.calls > 0; }));
  sockets().Abort(a);
  EXPECT_TRUE(Until([&] { return send.ended(); }));
  EXPECT_EQ(send.ends, 1);
  sockets().Close(b);
}

TEST_P(RingTest, CallbacksMayStartAndCancelOperations) {
  int left = 1000;
  std::function<void(IoResult)> again = [&](IoResult) {
    if (--left <= 0) return;
    const IoId victim = ring_->Timeout(kNever, [](IoResult r) { EXPECT_EQ(r.value, -ECANCELED); });
    ring_->Cancel(victim);
    ring_->Timeout(Tick{}, [&](IoResult r) { again(r); });
  };
  ring_->Timeout(Tick{}, [&](IoResult r) { again(r); });
  EXPECT_TRUE(Until([&] { return left <= 0; }));
}

// The submission queue has 64 entries; the test starts far more operations.
TEST_P(RingTest, AnyNumberOfOperationsMayBeStartedAtOnce) {
  const auto [a, b] = Connected();
  constexpr int kOps = 2000;
  int ended = 0;
  std::vector<IoId> ids;
  std::vector<char> bytes(kOps);
  for (int i = 0; i < kOps; ++i) {
    ids.push_back(ring_->PollIn(b, [&](IoResult) { ++ended; }));
  }
  for (int i = 0; i < kOps; i += 2) ring_->Cancel(ids[i]);
  EXPECT_EQ(ended, 0);
  EXPECT_TRUE(Until([&] { return ended == kOps / 2; }));
  Seen send;
  ring_->Send(a, "x", 1, true, Into(&send));
  EXPECT_TRUE(Until([&] { return ended == kOps && send.ended(); }));
  sockets().Close(a);
  sockets().Close(b);
}

TEST_P(RingTest, WakeEndsAWaitFromAnotherThread) {
  for (int i = 0; i < 10; ++i) {
    std::thread other([&] { ring_->Wake(); });
    EXPECT_TRUE(ring_->RunOnce(kNever).ok());
    other.join();
  }
}

TEST_P(RingTest, MayBeDestroyedWithOperationsInFlight) {
  const auto [a, b] = Connected();
  auto byte = std::make_unique<char>();
  int calls = 0;
  for (int i = 0; i < 100; ++i) ring_->PollIn(b, [&](IoResult) { ++calls; });
  ring_->Recv(b, byte.get(), 1, false, [&](IoResult) { ++calls; });
  ring_->Timeout(kNever, [&](IoResult) { ++calls; });
  EXPECT_TRUE(ring_->RunOnce(Tick{}).ok());
  if (GetParam().kind != Kind::kFake) {
    sockets().Close(a);
    sockets().Close(b);
  }
  const int before = calls;
  ring_.reset();
  EXPECT_EQ(calls, before);
}

// ------------------------------------------------------------------------------ FakeRing alone

TEST(FakeRingTest, CutsConnectionsAtTheByteAskedFor) {
  FakeRing ring({.seed = 7});
  ring.CutConnection(0, true, 10);
  const auto [a, b] = ring.Pair();
  std::string sent(100, 'x');
  char got[100];
  Seen send, recv;
  ring.Send(a, sent.data(), sent.size(), true, Into(&send));
  ring.Recv(b, got, sizeof(got), true, Into(&recv));
  while (!send.ended() || !recv.ended()) ASSERT_TRUE(ring.RunOnce(ring.Now() + 1000).ok());
  EXPECT_EQ(send.last.value, 10);
  EXPECT_EQ(recv.last.value, 10);
  Seen again;
  ring.Recv(b, got, sizeof(got), true, Into(&again));
  while (!again.ended()) ASSERT_TRUE(ring.RunOnce(ring.Now() + 1000).ok());
  EXPECT_EQ(again.last.value, -ECONNRESET);
}

void ChangeMemoryInFlight() {
  FakeRing ring({.seed = 1});
  const auto [a, b] = ring.Pair();
  std::string sent(100, 'x');
  ring.SendZeroCopy(a, sent.data(), sent.size(), -1, [](IoResult) {});
  sent[99] = 'y';
  for (int i = 0; i < 100; ++i) (void)ring.RunOnce(ring.Now() + 1000);
}

TEST(FakeRingDeathTest, CatchesMemoryThatIsWrittenWhileOwned) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(ChangeMemoryInFlight(), "memory was changed while a send owned it");
}

// ------------------------------------------------------------------------------ refusals

// Runs `run` in a child; gives the text that it returns.
template <class Run>
std::string TextFromChild(Run run) {
  int fds[2];
  EXPECT_EQ(pipe(fds), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = run();
    [[maybe_unused]] const ssize_t n = write(fds[1], text.data(), text.size());
    _exit(0);
  }
  close(fds[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(fds[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  close(fds[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return text;
}

// From now on this system call fails in this process.
void Refuse(long call, int error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = sizeof(code) / sizeof(code[0]), .filter = code};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

void AnswerSetupWith(int error) { Refuse(SYS_io_uring_setup, error); }

// Runs `refuse` and then MakeUringRing() in a child; gives its error text.
template <class Refusal>
std::string TextWhenRefused(Refusal refuse) {
  return TextFromChild([&] {
    refuse();
    const auto ring = MakeUringRing(8);
    return ring.ok() ? std::string("not refused") : ring.status().ToString();
  });
}

TEST(UringRefusalTest, NamesTheSeccompProfileOnEperm) {
  EXPECT_THAT(TextWhenRefused([] { AnswerSetupWith(EPERM); }),
              HasSubstr("FAILED_PRECONDITION: io_uring setup refused (EPERM): seccomp or "
                        "kernel.io_uring_disabled blocks it; run the container with the seccomp "
                        "profile deploy/docker/seccomp-peerd.json, and set the sysctl to 0"));
}

TEST(UringRefusalTest, NamesSeccompAndKernelOnEnosys) {
  EXPECT_THAT(
      TextWhenRefused([] { AnswerSetupWith(ENOSYS); }),
      HasSubstr("FAILED_PRECONDITION: io_uring setup refused (ENOSYS): seccomp hides it, or "
                "this kernel has no io_uring; run the container with the seccomp profile "
                "deploy/docker/seccomp-peerd.json, or use Linux 6.1 or later"));
}

TEST(UringRefusalTest, NamesTheLockedMemoryLimitOnEnomem) {
  EXPECT_THAT(TextWhenRefused([] { AnswerSetupWith(ENOMEM); }),
              HasSubstr("FAILED_PRECONDITION: io_uring setup refused (ENOMEM)"));
}

TEST(UringRefusalTest, NamesTheFileLimitOnEmfile) {
  EXPECT_THAT(TextWhenRefused([] { AnswerSetupWith(EMFILE); }),
              HasSubstr("FAILED_PRECONDITION: io_uring setup refused (EMFILE)"));
}

// Linux before 5.11 has no epoll_pwait2. Old seccomp profiles answer EPERM.
TEST(EpollRingTest, WaitsInMillisecondsWhereTheKernelHasNoFinerWait) {
  for (const int error : {ENOSYS, EPERM}) {
    const std::string text = TextFromChild([&]() -> std::string {
      Refuse(SYS_epoll_pwait2, error);
      const auto ring = MakeEpollRing();
      if (!ring.ok()) return ring.status().ToString();
      const Tick start = (*ring)->Now();
      int fired = 0;
      int64_t early = 0;
      for (const int64_t us : {200, 1500, 4001}) {
        (*ring)->Timeout(start + us, [&, us](IoResult) {
          ++fired;
          early = std::max(early, us - ((*ring)->Now() - start));
        });
      }
      int turns = 0;
      while (fired < 3 && (*ring)->Now() < start + Seconds(20)) {
        if (!(*ring)->RunOnce(kNever).ok()) return "RunOnce failed";
        ++turns;
      }
      return absl::StrCat((*ring)->features().description, "; fired=", fired, " early=", early,
                          turns <= 10 ? "" : " too many turns");
    });
    EXPECT_THAT(text, HasSubstr("without epoll_pwait2"));
    EXPECT_THAT(text, HasSubstr("; fired=3 early=0"));
    EXPECT_THAT(text, ::testing::Not(HasSubstr("too many turns")));
  }
}

TEST(EpollRingTest, AsksForNoMoreEventsThanItUses) {
  auto ring = MakeEpollRing();
  ASSERT_TRUE(ring.ok()) << ring.status();
  EXPECT_FALSE((*ring)->features().send_zero_copy);
  EXPECT_FALSE((*ring)->features().registered_buffers);
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  char byte = 0;
  Seen recv;
  const IoId id = (*ring)->Recv(ends[0], &byte, 1, false, Into(&recv));
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  (*ring)->Cancel(id);
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  EXPECT_EQ(recv.last.value, -ECANCELED);
  // Bytes that nobody wants to receive: the ring hears of them once at most, and then sleeps.
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  int turns = 0;
  for (const Tick end = (*ring)->Now() + Millis(20); (*ring)->Now() < end; ++turns) {
    EXPECT_TRUE((*ring)->RunOnce(end).ok());
  }
  EXPECT_LE(turns, 5);
  close(ends[0]);
  close(ends[1]);
}

TEST(EpollRingTest, ServesASocketThatTakesAnotherOnesNumberWithinACallback) {
  auto ring = MakeEpollRing();
  ASSERT_TRUE(ring.ok()) << ring.status();
  int ends[2], next[2] = {-1, -1};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  char byte = 0, more = 0;
  Seen second;
  (*ring)->Recv(ends[0], &byte, 1, false, [&](IoResult result) {
    EXPECT_EQ(result.value, 1);
    close(ends[0]);
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, next), 0);
    ASSERT_EQ(next[0], ends[0]) << "the number is new";
    (*ring)->Recv(next[0], &more, 1, false, Into(&second));
  });
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  EXPECT_TRUE((*ring)->RunOnce((*ring)->Now() + Seconds(20)).ok());
  ASSERT_GE(next[0], 0);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  EXPECT_FALSE(second.ended());
  ASSERT_EQ(write(next[1], "y", 1), 1);
  EXPECT_TRUE((*ring)->RunOnce((*ring)->Now() + Seconds(20)).ok());
  EXPECT_TRUE(second.ended());
  EXPECT_EQ(more, 'y');
  for (const int fd : {ends[1], next[0], next[1]}) close(fd);
}

TEST(EpollRingTest, TransfersOfOneDirectionDoNotOvertakeEachOther) {
  auto ring = MakeEpollRing();
  ASSERT_TRUE(ring.ok()) << ring.status();
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  const std::string sent = std::string(4 << 20, 'a') + std::string(4 << 20, 'b');
  const size_t half = sent.size() / 2;
  std::string got(sent.size(), '\0');
  Seen sends[2], receives[2];
  (*ring)->Send(ends[0], sent.data(), half, true, Into(&sends[0]));
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  EXPECT_FALSE(sends[0].ended());
  // Now there is room, and the ring has not heard of that: the second send could begin at once.
  ssize_t have = 0;
  for (ssize_t n; (n = read(ends[1], got.data() + have, got.size() - have)) > 0;) have += n;
  ASSERT_GT(have, 0);
  (*ring)->Send(ends[0], sent.data() + half, half, true, Into(&sends[1]));
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  const size_t middle = have + (sent.size() - have) / 2;
  (*ring)->Recv(ends[1], got.data() + have, middle - have, true, Into(&receives[0]));
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  (*ring)->Recv(ends[1], got.data() + middle, got.size() - middle, true, Into(&receives[1]));
  const Tick deadline = (*ring)->Now() + Seconds(20);
  while (!receives[1].ended() && (*ring)->Now() < deadline) {
    EXPECT_TRUE((*ring)->RunOnce(deadline).ok());
  }
  EXPECT_TRUE(sends[0].ended() && sends[1].ended() && receives[0].ended());
  EXPECT_TRUE(got == sent);
  close(ends[0]);
  close(ends[1]);
}

TEST(EpollRingTest, SendsWithoutZeroCopyCallOnce) {
  auto ring = MakeEpollRing();
  ASSERT_TRUE(ring.ok()) << ring.status();
  EXPECT_EQ((*ring)->RegisterBuffer("x", 1).status().code(), absl::StatusCode::kUnimplemented);
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  Seen send;
  (*ring)->SendZeroCopy(ends[0], "x", 1, -1, Into(&send));
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  EXPECT_EQ(send.calls, 1);
  EXPECT_EQ(send.last.value, 1);
  EXPECT_FALSE(send.last.more);
  close(ends[0]);
  close(ends[1]);
}

TEST(EpollRingTest, DescriptorsThatAreNotOpenEndTheirOperations) {
  auto ring = MakeEpollRing();
  ASSERT_TRUE(ring.ok()) << ring.status();
  char byte = 0;
  for (const int fd : {-1, 1 << 20}) {
    Seen accept, recv, send, poll;
    (*ring)->Accept(fd, Into(&accept));
    (*ring)->Recv(fd, &byte, 1, false, Into(&recv));
    (*ring)->Send(fd, &byte, 1, false, Into(&send));
    (*ring)->PollIn(fd, Into(&poll));
    EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
    for (const Seen* seen : {&accept, &recv, &send, &poll}) {
      EXPECT_EQ(seen->calls, 1);
      EXPECT_EQ(seen->last.value, -EBADF);
    }
  }
  // epoll refuses a regular file.
  const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(file, 0);
  Seen recv;
  (*ring)->Recv(file, &byte, 1, false, Into(&recv));
  EXPECT_TRUE((*ring)->RunOnce(Tick{}).ok());
  EXPECT_EQ(recv.last.value, -ENOTSOCK);
  close(file);
}

TEST(UringBufferTest, MemoryBeyondTheLockLimitIsResourceExhausted) {
  if (geteuid() == 0) {
    // A process with IPC_LOCK has no limit. Without IPC_LOCK the limit holds for root too.
    rlimit limit;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur == RLIM_INFINITY) GTEST_SKIP() << "no limit here";
  }
  auto ring = MakeUringRing(8);
  ASSERT_TRUE(ring.ok()) << ring.status();
  if (!(*ring)->features().registered_buffers) GTEST_SKIP();
  std::vector<char> memory(1 << 20, 'x');
  const auto small = (*ring)->RegisterBuffer(memory.data(), memory.size());
  if (small.ok()) {
    (*ring)->UnregisterBuffer(*small);
    return;  // the memory is within the limit, or the process has no limit
  }
  EXPECT_EQ(small.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(UringBufferTest, MemoryThatIsNotAllTouchedIsNotFaultedIn) {
  auto ring = MakeUringRing(8);
  ASSERT_TRUE(ring.ok()) << ring.status();
  if (!(*ring)->features().registered_buffers) GTEST_SKIP();
  constexpr size_t kPage = 4096;
  constexpr size_t kPages = 1500;
  const int fd = memfd_create("arena", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, kPages * kPage), 0);
  const auto map = [&] {
    return static_cast<uint8_t*>(
        mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  };
  uint8_t* const mine = map();
  uint8_t* const trainers = map();
  const auto touch = [&](size_t page) { trainers[page * kPage] = 1; };
  for (const size_t hole : {size_t{0}, kPages / 2, kPages - 1}) {
    ASSERT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPages * kPage), 0);
    for (size_t page = 0; page < kPages; ++page) {
      if (page != hole) touch(page);
    }
    const auto refused = (*ring)->RegisterBuffer(mine, kPages * kPage);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable) << hole;
    struct stat status;
    ASSERT_EQ(fstat(fd, &status), 0);
    EXPECT_EQ(static_cast<size_t>(status.st_blocks) * 512, (kPages - 1) * kPage) << "faulted in";
    touch(hole);
    const auto buffer = (*ring)->RegisterBuffer(mine, kPages * kPage);
    if (!buffer.ok()) {  // the limit of locked memory
      EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
      continue;
    }
    (*ring)->UnregisterBuffer(*buffer);
  }
  munmap(mine, kPages * kPage);
  munmap(trainers, kPages * kPage);
  close(fd);
}

// ------------------------------------------------------------------------------ the choice

// What OpenRing() gives where io_uring is refused.
std::string TextOfOpenRing(IoChoice choice) {
  return TextFromChild([&] {
    AnswerSetupWith(EPERM);
    const auto opened = OpenRing(choice, 8);
    if (!opened.ok()) return opened.status().ToString();
    return absl::StrCat(opened->ring->features().description, "; ", opened->why_epoll);
  });
}

TEST(OpenRingTest, TakesEpollWhereIoUringIsRefusedAndSaysWhy) {
  EXPECT_THAT(TextOfOpenRing(IoChoice::kAuto),
              ::testing::AllOf(::testing::StartsWith("epoll of Linux "),
                               HasSubstr("; io_uring setup refused (EPERM): ")));
  EXPECT_THAT(TextOfOpenRing(IoChoice::kEpoll), ::testing::EndsWith("; --io=epoll"));
  EXPECT_THAT(TextOfOpenRing(IoChoice::kUring),
              ::testing::StartsWith("FAILED_PRECONDITION: io_uring setup refused (EPERM): "));
}

TEST(OpenRingTest, TakesIoUringWhereTheSystemAllowsIt) {
  for (const IoChoice choice : {IoChoice::kAuto, IoChoice::kUring}) {
    const auto opened = OpenRing(choice, 8);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_THAT(opened->ring->features().description, ::testing::StartsWith("io_uring of Linux "));
    EXPECT_EQ(opened->why_epoll, "");
  }
}

// ------------------------------------------------------------------------------ shared memory

// Work in memory, as if a trainer had put it there.
struct MemoryWork : SharedWork {
  bool Look() override {
    calls += 'l';
    return ready;
  }
  bool StopLooking() override {
    calls += 's';
    if (sleeper != nullptr) sleeper->Wake();
    return ready;
  }
  void Run() override {
    calls += 'r';
    ready = false;
  }
  bool ready = false;
  Ring* sleeper = nullptr;  // is woken up when it is about to sleep
  std::string calls;
};

TEST_P(RingTest, SharedWorkThatIsThereIsDoneWithoutSleep) {
  if (GetParam().kind == Kind::kFake) GTEST_SKIP() << "never polls";
  MemoryWork work;
  ring_->SetSharedWork(&work);
  work.ready = true;
  const Tick begin = ring_->Now();
  ASSERT_TRUE(ring_->RunOnce(begin + Seconds(3600)).ok());
  // A ring that does not poll looks only before it sleeps.
  EXPECT_EQ(work.calls, GetParam().poll_us > 0 ? "lr" : "sr");
  ring_->SetSharedWork(nullptr);
  ASSERT_TRUE(ring_->RunOnce(ring_->Now()).ok());
  EXPECT_EQ(work.calls.size(), 2u);
}

TEST_P(RingTest, BeforeItSleepsARingStopsLookingForSharedWork) {
  if (GetParam().kind == Kind::kFake) GTEST_SKIP() << "never polls";
  MemoryWork work;
  ring_->SetSharedWork(&work);
  work.sleeper = ring_.get();
  ASSERT_TRUE(ring_->RunOnce(ring_->Now() + Seconds(3600)).ok());
  const size_t stop = work.calls.find('s');
  ASSERT_NE(stop, std::string::npos) << work.calls;
  EXPECT_EQ(work.calls.substr(stop), "sr");
  EXPECT_EQ(stop > 0, GetParam().poll_us > 0) << work.calls;
  // A turn that cannot sleep need not stop.
  work.calls.clear();
  ASSERT_TRUE(ring_->RunOnce(ring_->Now()).ok());
  EXPECT_EQ(work.calls, "r");
}

TEST(OpenRingTest, KnowsTheWordsOfTheFlag) {
  EXPECT_EQ(ParseIoChoice("auto"), IoChoice::kAuto);
  EXPECT_EQ(ParseIoChoice("uring"), IoChoice::kUring);
  EXPECT_EQ(ParseIoChoice("epoll"), IoChoice::kEpoll);
  for (const char* bad : {"", "Auto", "io_uring", "epoll "})
    EXPECT_FALSE(ParseIoChoice(bad)) << bad;
}

// ------------------------------------------------------------------------------ addresses

TEST(SocketAddressTest, KnowsLoopbackAndPrintsBothFamilies) {
  const auto v4 = NumericAddress({.host = "127.1.2.3", .port = 5});
  const auto v6 = NumericAddress({.host = "::1", .port = 6});
  const auto mapped = NumericAddress({.host = "::ffff:127.0.0.1", .port = 7});
  const auto far = NumericAddress({.host = "10.0.0.1", .port = 8});
  ASSERT_TRUE(v4 && v6 && mapped && far);
  EXPECT_TRUE(v4->loopback() && v6->loopback() && mapped->loopback());
  EXPECT_FALSE(far->loopback());
  EXPECT_EQ(ToString(*v4), "127.1.2.3:5");
  EXPECT_EQ(ToString(*v6), "[::1]:6");
  EXPECT_FALSE(NumericAddress({.host = "localhost", .port = 1}).has_value());
}

TEST(SocketAddressTest, KnowsHowFarItReaches) {
  using Scope = SocketAddress::Scope;
  const std::vector<std::pair<std::string, Scope>> cases = {
      {"127.1.2.3", Scope::kMachine},
      {"0.0.0.0", Scope::kMachine},
      {"::1", Scope::kMachine},
      {"::", Scope::kMachine},
      {"::ffff:127.0.0.1", Scope::kMachine},
      {"::ffff:0.0.0.0", Scope::kMachine},
      {"169.254.169.254", Scope::kWire},
      {"::ffff:169.254.169.254", Scope::kWire},
      {"fe80::1", Scope::kWire},
      {"10.0.0.1", Scope::kWide},
      {"2001:db8::1", Scope::kWide},
      {"::ffff:10.0.0.1", Scope::kWide}};
  for (const auto& [host, scope] : cases) {
    const auto address = NumericAddress({.host = host, .port = 5});
    ASSERT_TRUE(address.has_value()) << host;
    EXPECT_EQ(address->scope(), scope) << host;
  }
}

}  // namespace
}  // namespace longhaul::peerd
