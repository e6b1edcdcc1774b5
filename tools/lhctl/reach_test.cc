#include "tools/lhctl/reach.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::chrono::milliseconds kPatience{60000};

// A port of the loopback interface. It accepts connections unless `listening` is false.
class Port {
 public:
  explicit Port(bool listening) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), bytes), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    EXPECT_TRUE(!listening || listen(fd_, 8) == 0);
    port_ = std::to_string(ntohs(address.sin_port));
  }
  ~Port() { close(fd_); }

  std::string On(const std::string& host) const { return host + ":" + port_; }
  // Reads some bytes of one caller, answers and hangs up.
  void Answer(const std::string& text) const {
    const int caller = accept(fd_, nullptr, nullptr);
    char request[4096];
    EXPECT_GT(recv(caller, request, sizeof request, 0), 0);
    EXPECT_EQ(send(caller, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    close(caller);
  }

 private:
  const int fd_;
  std::string port_;
};

TEST(Reach, OpenPortsAndClosedPortsAreToldApart) {
  const Port open(true);
  const Port closed(false);
  const auto reached = TryConnecting(
      {closed.On("127.0.0.1"), open.On("127.0.0.1"), "nonsense", "[::1]:1"}, kPatience);
  ASSERT_EQ(reached.size(), 4u);
  EXPECT_EQ(reached[0].address, closed.On("127.0.0.1"));
  EXPECT_THAT(reached[0].error, HasSubstr("refused"));
  EXPECT_THAT(reached[1].error, IsEmpty());
  EXPECT_GT(reached[1].mtu, 0u);
  EXPECT_GT(reached[1].path_mtu, 0u);
  EXPECT_EQ(reached[1].interface, "lo");
  EXPECT_THAT(reached[2].error, HasSubstr("no port"));
  EXPECT_NE(reached[3].error, "");
  EXPECT_THAT(TryConnecting({}, kPatience), IsEmpty());
}

TEST(Reach, AllAddressesOfANameAreTried) {
  // The name may stand for ::1, too, where nothing listens.
  const Port open(true);
  EXPECT_EQ(TryConnecting({open.On("localhost")}, kPatience)[0].error, "");
}

TEST(Reach, APageIsTheBodyOfTheAnswer) {
  const Port port(true);
  std::thread server([&] { port.Answer("HTTP/1.1 503 No\r\nA: b\r\n\r\nnot ready\n"); });
  EXPECT_EQ(GetPage(port.On("127.0.0.1"), "/readyz", kPatience), "not ready\n");
  server.join();
}

TEST(Reach, WhatIsNoHttpIsNoPage) {
  const Port port(true);
  std::thread server([&] { port.Answer("LHD1\r\n\r\nx"); });
  EXPECT_EQ(GetPage(port.On("127.0.0.1"), "/", kPatience), std::nullopt);
  server.join();
  EXPECT_EQ(GetPage(Port(false).On("127.0.0.1"), "/", kPatience), std::nullopt);
}

TEST(Reach, SilenceEndsWithTheTimeout) {
  // Listens, and nobody answers.
  const Port port(true);
  EXPECT_EQ(GetPage(port.On("127.0.0.1"), "/", std::chrono::milliseconds(20)), std::nullopt);
}

}  // namespace
}  // namespace longhaul
