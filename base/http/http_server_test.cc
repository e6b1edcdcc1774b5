#include "base/http/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "base/daemon/host_port.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    auto server = HttpServer::Start("127.0.0.1:0", [](const std::string& path) {
      if (path == "/big") return HttpResponse{200, "text/plain", std::string(8 << 20, 'x')};
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
  const std::string head = Ask("HEAD /a HTTP/1.0\n\n");
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
  EXPECT_THAT(Ask("GET /" + std::string(2 * kHttpRequestBytesMax, 'a')),
              StartsWith("HTTP/1.1 431"));
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200"));
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
