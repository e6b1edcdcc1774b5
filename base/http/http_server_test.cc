#include "base/http/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/daemon/host_port.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// A stream of `count` pieces; -1: of large pieces without end.
HttpResponse Ticks(int count) {
  HttpResponse response{200, "text/event-stream", "", {{"Cache-Control", "no-store"}}};
  response.stream = [count](std::string* piece) mutable {
    if (count == 0) return false;
    *piece = count < 0 ? std::string(1 << 20, 'x') : absl::StrCat("tick ", count--, "\n");
    return true;
  };
  return response;
}

// A stream without news.
HttpResponse Silent() {
  HttpResponse response{200, "text/event-stream", ""};
  response.stream = [](std::string*) {
    std::this_thread::sleep_for(kHttpStreamWait);  // as a stream does that waits for news
    return true;
  };
  return response;
}

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    auto server = HttpServer::Start("127.0.0.1:0", [](const std::string& path) {
      if (path == "/big") return HttpResponse{200, "text/plain", std::string(8 << 20, 'x')};
      if (path == "/ticks") return Ticks(3);
      if (path == "/endless") return Ticks(-1);
      if (path == "/silent") return Silent();
      if (path != "/a") return HttpResponse{404, "text/plain", "no\n"};
      return HttpResponse{200, "text/plain", "yes\n"};
    });
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  int Connect() {
    struct sockaddr_in address {};
    address.sin_family = AF_INET;
    address.sin_port = htons(ParseHostPort(server_->address())->port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  static void Send(int fd, const std::string& bytes) {
    EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  static std::string ReadAll(int fd) {
    std::string text;
    char buffer[65536];
    for (ssize_t got; (got = recv(fd, buffer, sizeof buffer, 0)) > 0;) text.append(buffer, got);
    close(fd);
    return text;
  }
  std::string Ask(const std::string& request) {
    const int fd = Connect();
    Send(fd, request);
    return ReadAll(fd);
  }

  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersGetAndHead) {
  const std::string get = Ask("GET /a?x=1 HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_THAT(get, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(get, HasSubstr("Content-Length: 4\r\n"));
  EXPECT_THAT(get, ::testing::EndsWith("\r\n\r\nyes\n"));
  const std::string head = Ask("HEAD /a HTTP/1.0\r\n\r\n");
  EXPECT_THAT(head, HasSubstr("Content-Length: 4\r\n"));
  EXPECT_THAT(head, ::testing::EndsWith("\r\n\r\n"));
  EXPECT_THAT(Ask("GET /b HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 Not Found"));
}

TEST_F(HttpServerTest, SendsALargeBodyWhole) {
  const std::string big = Ask("GET /big HTTP/1.1\r\n\r\n");
  EXPECT_EQ(big.size() - big.find("\r\n\r\n") - 4, size_t{8} << 20);
}

TEST_F(HttpServerTest, RefusesWhatIsNoRequestAndLivesOn) {
  EXPECT_THAT(Ask("POST /a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Ask(std::string("\x16\x03\x01\0\xff\r\n\r\n", 9)), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET /a\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET /a HTTP/1.1\n\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET /" + std::string(2 * kHttpRequestBytesMax, 'a')),
              StartsWith("HTTP/1.1 431"));
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, HeadersThatCostTheLibraryMostAreHarmless) {
  // The library would read the first header with a regular expression, and overflow the stack.
  for (const char* name :
       {"Range", "rANGE", "Accept-Encoding", "Connection", "Content-Type", "Cookie", "Host"}) {
    std::string ranges = absl::StrCat("GET /a HTTP/1.1\r\n", name, ": bytes=-");
    while (ranges.size() < kHttpRequestBytesMax - 100) ranges += ",-";
    EXPECT_THAT(Ask(ranges + "\r\n\r\n"), StartsWith("HTTP/1.1 200"));
  }
  std::string many = "GET /a HTTP/1.1\r\n";
  while (many.size() < kHttpRequestBytesMax - 100) many += "a:\r\n";
  EXPECT_THAT(Ask(many + "\r\n"), StartsWith("HTTP/1.1 "));
  // A body is neither waited for nor read.
  EXPECT_THAT(Ask("POST /a HTTP/1.1\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"),
              HasSubstr("HTTP/1.1 405"));
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, AnswersAreNeitherCutNorCompressed) {
  const std::string answer =
      Ask("GET /big HTTP/1.1\r\nAccept-Encoding: gzip, br\r\nRange: bytes=0-9\r\n\r\n");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 8388608\r\n"));
  EXPECT_THAT(answer, HasSubstr("X-Content-Type-Options: nosniff\r\n"));
}

TEST_F(HttpServerTest, StreamsUntilTheSourceEnds) {
  const std::string answer = Ask("GET /ticks HTTP/1.1\r\n\r\n");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/event-stream\r\n"));
  EXPECT_THAT(answer, HasSubstr("Cache-Control: no-store\r\n"));
  EXPECT_THAT(answer, ::testing::EndsWith("\r\n\r\ntick 3\ntick 2\ntick 1\n"));
  EXPECT_THAT(Ask("HEAD /endless HTTP/1.1\r\n\r\n"), ::testing::EndsWith("\r\n\r\n"));
}

TEST_F(HttpServerTest, OneStreamTooManyIsRefusedAndAClosedOneMakesRoom) {
  std::vector<int> streams;
  for (int i = 0; i < kHttpStreamsMax; ++i) {
    streams.push_back(Connect());
    Send(streams.back(), "GET /silent HTTP/1.1\r\n\r\n");
    char byte;
    ASSERT_EQ(recv(streams.back(), &byte, 1, 0), 1);  // the response has begun
  }
  EXPECT_THAT(Ask("GET /silent HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200"));
  close(streams[0]);
  std::string answer;
  do {  // until the server has noticed
    answer = Ask("GET /ticks HTTP/1.1\r\n\r\n");
  } while (answer.starts_with("HTTP/1.1 503"));
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  for (size_t i = 1; i < streams.size(); ++i) close(streams[i]);
}

TEST_F(HttpServerTest, StopsAtOnceWhileClientsReadNothing) {
  std::vector<int> clients;
  for (const char* path : {"/endless", "/silent", "/big", "/unfinished"}) {
    clients.push_back(Connect());
    const bool whole = std::string(path) != "/unfinished";
    Send(clients.back(), absl::StrCat("GET ", path, " HTTP/1.1\r\n", whole ? "\r\n" : ""));
    char byte;
    if (whole) {
      ASSERT_EQ(recv(clients.back(), &byte, 1, 0), 1);
    }
  }
  const auto begun = std::chrono::steady_clock::now();
  server_.reset();
  // Far less than kHttpSeconds, which the server would wait for a client.
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(kHttpSeconds / 2));
  for (const int fd : clients) close(fd);
}

TEST_F(HttpServerTest, SilentConnectionsDoNotHoldUpOthers) {
  std::vector<int> silent;
  for (int i = 0; i < kHttpConnectionsMax - 1; ++i) silent.push_back(Connect());
  Send(silent[0], "GET /a HT");
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200"));
  Send(silent[0], "TP/1.1\r\n\r\n");
  EXPECT_THAT(ReadAll(silent[0]), StartsWith("HTTP/1.1 200"));
  for (size_t i = 1; i < silent.size(); ++i) close(silent[i]);
}

TEST_F(HttpServerTest, SilentConnectionsBeyondTheLimitAreTurnedAwayAndAnswersAreNot) {
  const int streaming = Connect();
  Send(streaming, "GET /silent HTTP/1.1\r\n\r\n");
  std::vector<int> answered;
  std::vector<int> silent;
  for (int i = 0; i < kHttpConnectionsMax; ++i) {
    answered.push_back(Connect());
    Send(answered.back(), "GET /a HTTP/1.1\r\n\r\n");  // and does not close
    silent.push_back(Connect());
    if (i % 2 == 0) Send(silent.back(), "GET /a HT");
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\nConnection: close\r\n\r\n"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(kHttpSeconds / 2));
  struct pollfd quiet {
    streaming, POLLRDHUP, 0
  };
  EXPECT_EQ(poll(&quiet, 1, 0), 0) << "the stream was turned away";
  for (const int fd : answered) close(fd);
  for (const int fd : silent) close(fd);
  close(streaming);
}

TEST_F(HttpServerTest, SecondServerOnThePortIsRefusedWithTheReason) {
  const auto second = HttpServer::Start(server_->address(), nullptr);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another process has the port"));
}

TEST(HttpServer, StopsWithConnectionsOpen) {
  auto server = HttpServer::Start("[::1]:0", nullptr);
  if (!server.ok()) GTEST_SKIP() << "no IPv6 here: " << server.status();
  EXPECT_THAT((*server)->address(), StartsWith("[::1]:"));
}

}  // namespace
}  // namespace longhaul
