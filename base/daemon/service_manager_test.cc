#include "base/daemon/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <map>
#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;

// The receiving end: what systemd has.
class Listener {
 public:
  // `abstract`: a name outside the file system.
  explicit Listener(bool abstract) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string tail = "lh-notify-" + std::to_string(getpid());
    name_ = abstract ? "@" + tail : "/tmp/" + tail;
    name_.copy(address.sun_path, sizeof address.sun_path - 1);
    if (abstract) address.sun_path[0] = '\0';
    fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const size_t size = offsetof(sockaddr_un, sun_path) + name_.size();
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
  }
  ~Listener() {
    close(fd_);
    if (name_[0] == '/') unlink(name_.c_str());
  }
  const std::string& name() const { return name_; }
  // The oldest datagram that has not been read; "" if there is none.
  std::string Next() {
    char bytes[256];
    const ssize_t size = recv(fd_, bytes, sizeof bytes, 0);
    return size > 0 ? std::string(bytes, size) : "";
  }

 private:
  std::string name_;
  int fd_;
};

std::unique_ptr<ServiceManager> Manager(const std::map<std::string, std::string>& environment) {
  return std::make_unique<ServiceManager>([&](const char* name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  });
}

class ServiceManagerTest : public ::testing::TestWithParam<bool> {};

TEST_P(ServiceManagerTest, HearsWhatTheProcessDoes) {
  Listener listener(GetParam());
  const auto manager = Manager({{"NOTIFY_SOCKET", listener.name()}});
  ASSERT_TRUE(manager->Ready().ok());
  EXPECT_EQ(listener.Next(), "READY=1");
  manager->Stopping(std::chrono::seconds(32));
  EXPECT_EQ(listener.Next(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=32000000");
  manager->Alive();
  EXPECT_EQ(listener.Next(), "") << "nobody asked for a sign of life";
}

INSTANTIATE_TEST_SUITE_P(Sockets, ServiceManagerTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Abstract" : "Path"; });

TEST(ServiceManager, GetsSignsOfLifeNoMoreOftenThanItNeeds) {
  Listener listener(true);
  const auto manager = Manager({{"NOTIFY_SOCKET", listener.name()},
                                {"WATCHDOG_USEC", "3600000000"},
                                {"WATCHDOG_PID", std::to_string(getpid())}});
  EXPECT_EQ(manager->alive_period(), std::chrono::minutes(30));
  for (int i = 0; i < 100; ++i) manager->Alive();
  EXPECT_EQ(listener.Next(), "WATCHDOG=1");
  EXPECT_EQ(listener.Next(), "");
}

TEST(ServiceManager, WatchesOnlyTheProcessThatItNames) {
  Listener listener(true);
  for (const char* pid : {"1", "none", ""}) {
    const auto manager = Manager(
        {{"NOTIFY_SOCKET", listener.name()}, {"WATCHDOG_USEC", "1000000"}, {"WATCHDOG_PID", pid}});
    EXPECT_EQ(manager->alive_period().count(), 0) << pid;
    manager->Alive();
    EXPECT_EQ(listener.Next(), "");
  }
  for (const char* period : {"0", "-5", "soon"}) {
    const auto manager = Manager({{"NOTIFY_SOCKET", listener.name()}, {"WATCHDOG_USEC", period}});
    EXPECT_EQ(manager->alive_period().count(), 0) << period;
  }
}

TEST(ServiceManager, IsOptional) {
  for (const auto& environment :
       {std::map<std::string, std::string>{}, {{"NOTIFY_SOCKET", ""}, {"WATCHDOG_USEC", "1000"}}}) {
    const auto manager = Manager(environment);
    EXPECT_TRUE(manager->Ready().ok());
    manager->Stopping(std::chrono::seconds(1));
    manager->Alive();
    EXPECT_EQ(manager->alive_period().count(), 0);
  }
}

TEST(ServiceManager, ThatCannotBeReachedIsNamed) {
  for (const std::string& socket :
       {std::string("/nonexistent/notify"), std::string("relative"), "/" + std::string(200, 'x')}) {
    const auto manager = Manager({{"NOTIFY_SOCKET", socket}});
    const absl::Status ready = manager->Ready();
    EXPECT_EQ(ready.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(ready.message()), HasSubstr("READY=1 at NOTIFY_SOCKET=" + socket));
  }
}

}  // namespace
}  // namespace longhaul
