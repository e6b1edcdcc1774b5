#include "peerd/ipc/ipc_socket.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <tuple>

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

class IpcSocketTest : public testing::Test {
 protected:
  IpcSocketTest() {
    char directory[] = "/tmp/lh_socket_XXXXXX";
    directory_ = mkdtemp(directory);
    path_ = directory_ + "/peerd.sock";
  }
  ~IpcSocketTest() override {
    unlink(path_.c_str());
    unlink((path_ + ".lock").c_str());
    rmdir(directory_.c_str());
  }
  bool Exists() const { return access(path_.c_str(), F_OK) == 0; }

  std::string directory_;
  std::string path_;
};

std::string Refused(const SocketAccessOptions& options) {
  const auto access = ResolveSocketAccess(options);
  return access.ok() ? "" : std::string(access.status().message());
}

TEST(SocketAccessTest, WithoutListsTheModeOfTheSocketDecides) {
  const PeerCredentials root{1, 0, {0}};
  const PeerCredentials self{1, geteuid(), {7}};
  const PeerCredentials in_group{1, 4001, {4001, 7, 50}};
  const PeerCredentials stranger{1, 4002, {4002, 7}};
  SocketAccessOptions options;
  options.group = "50";
  for (const auto& [mode, group, others] :
       {std::tuple{0600u, false, false}, {0660u, true, false}, {0666u, true, true}}) {
    options.mode = mode;
    const auto access = ResolveSocketAccess(options);
    ASSERT_TRUE(access.ok()) << access.status();
    EXPECT_TRUE(Permitted(root, *access));
    EXPECT_TRUE(Permitted(self, *access));
    EXPECT_EQ(Permitted(in_group, *access), group) << mode;
    EXPECT_EQ(Permitted(stranger, *access), others) << mode;
  }
}

TEST(SocketAccessTest, AListAdmitsWhomItNamesAndNobodyElse) {
  SocketAccessOptions options;
  options.mode = 0666;
  options.group = "50";
  options.allow_users = {"4001", "daemon"};
  options.allow_groups = {"60", "root"};
  const auto access = ResolveSocketAccess(options);
  ASSERT_TRUE(access.ok()) << access.status();
  EXPECT_TRUE(Permitted({1, 0, {5}}, *access));
  EXPECT_TRUE(Permitted({1, geteuid(), {5}}, *access));
  EXPECT_TRUE(Permitted({1, 4001, {5}}, *access));
  EXPECT_TRUE(Permitted({1, 1, {5}}, *access)) << "daemon";
  EXPECT_TRUE(Permitted({1, 4002, {5, 60}}, *access));
  EXPECT_TRUE(Permitted({1, 4002, {0}}, *access)) << "the group root";
  EXPECT_FALSE(Permitted({1, 4002, {50}}, *access)) << "the group of the socket";
  EXPECT_FALSE(Permitted({1, 4002, {5}}, *access));
  EXPECT_NE(ToString(*access).find("1,4001, members of groups 0,60"), std::string::npos)
      << ToString(*access);
}

TEST(SocketAccessTest, RefusesWhatCannotBeMeant) {
  SocketAccessOptions options;
  options.allow_users = {"no-such-user"};
  EXPECT_NE(Refused(options).find("no user \"no-such-user\""), std::string::npos);
  options.allow_users = {"4001"};
  options.allow_groups = {"no-such-group"};
  EXPECT_NE(Refused(options).find("--allow-groups"), std::string::npos);
  options.allow_groups = {};
  EXPECT_EQ(Refused(options), "");
  options.mode = 0600;
  EXPECT_NE(Refused(options).find("--socket-mode"), std::string::npos);
  options.mode = 0660;
  // Users from outside of a user namespace look like this one.
  options.allow_users = {"65534"};
  EXPECT_NE(Refused(options).find("--allow-users=65534"), std::string::npos) << Refused(options);
  options.allow_users = {};
  options.allow_groups = {"nogroup"};
  EXPECT_NE(Refused(options).find("--allow-groups=nogroup"), std::string::npos);
}

TEST(SocketAccessTest, ReadsTheModesThatMakeSense) {
  EXPECT_EQ(*ParseSocketMode("0600"), 0600u);
  EXPECT_EQ(*ParseSocketMode("660"), 0660u);
  EXPECT_EQ(*ParseSocketMode("0666"), 0666u);
  for (const char* wrong : {"", "0", "0777", "0644", "432", "00660", "0660 ", "-660", "0x1b0"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseSocketMode(wrong).status())) << wrong;
  }
}

TEST_F(IpcSocketTest, ListensWithItsModeAndRemovesItsFile) {
  {
    const auto socket = ListenOnPath(path_, 0600, "");
    ASSERT_TRUE(socket.ok()) << socket.status();
    struct stat status;
    ASSERT_EQ(stat(path_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    EXPECT_EQ(status.st_gid, getegid());
  }
  EXPECT_FALSE(Exists());
}

TEST_F(IpcSocketTest, RefusesWhereAnotherAnswers) {
  const auto first = ListenOnPath(path_, 0660, "");
  ASSERT_TRUE(first.ok());
  const auto second = ListenOnPath(path_, 0660, "");
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().ToString().find(path_), std::string::npos);
  EXPECT_TRUE(Exists());
}

TEST_F(IpcSocketTest, ReplacesAFileThatNobodyAnswersOn) {
  {
    UniqueFd dead(socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ASSERT_TRUE(Exists());
  const auto socket = ListenOnPath(path_, 0660, "");
  EXPECT_TRUE(socket.ok()) << socket.status();
}

// Any user may open, and so lock, a directory that others may read.
TEST_F(IpcSocketTest, ALockedDirectoryStopsNobody) {
  ASSERT_EQ(chmod(directory_.c_str(), 0755), 0);
  const UniqueFd directory(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(flock(directory.get(), LOCK_EX), 0);
  EXPECT_TRUE(ListenOnPath(path_, 0600, "").ok());
  struct stat status;
  ASSERT_EQ(stat((path_ + ".lock").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(IpcSocketTest, SaysWhoHoldsTheLock) {
  const std::string name = path_ + ".lock";
  const UniqueFd lock(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(write(lock.get(), "4711", 4), 4);
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  const auto refused = ListenOnPath(path_, 0600, "", 100);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(refused.status().message().find("process 4711 has held " + name), std::string::npos)
      << refused.status();
  ASSERT_EQ(flock(lock.get(), LOCK_UN), 0);
  EXPECT_TRUE(ListenOnPath(path_, 0600, "").ok());
}

TEST_F(IpcSocketTest, ReplacesALockThatOthersMayHold) {
  const std::string name = path_ + ".lock";
  const UniqueFd lock(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(fchmod(lock.get(), 0666), 0);
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  EXPECT_TRUE(ListenOnPath(path_, 0600, "").ok());
  ASSERT_EQ(unlink(name.c_str()), 0);
  ASSERT_EQ(symlink("/dev/null", name.c_str()), 0);
  EXPECT_TRUE(ListenOnPath(path_, 0600, "").ok());
  ASSERT_EQ(unlink(name.c_str()), 0);
  ASSERT_EQ(mkdir(name.c_str(), 0700), 0);
  EXPECT_EQ(ListenOnPath(path_, 0600, "").status().code(), absl::StatusCode::kUnavailable);
  ASSERT_EQ(rmdir(name.c_str()), 0);
}

TEST_F(IpcSocketTest, NeverRemovesAFileThatIsNoSocket) {
  const UniqueFd file(open(path_.c_str(), O_CREAT | O_WRONLY, 0600));
  EXPECT_TRUE(absl::IsInvalidArgument(ListenOnPath(path_, 0660, "").status()));
  EXPECT_TRUE(Exists());
}

TEST_F(IpcSocketTest, LeavesAFileThatIsNoLongerItsOwn) {
  auto first = ListenOnPath(path_, 0660, "");
  ASSERT_TRUE(first.ok());
  unlink(path_.c_str());
  const auto second = ListenOnPath(path_, 0660, "");
  ASSERT_TRUE(second.ok());
  first->Remove();
  EXPECT_TRUE(Exists());
}

TEST_F(IpcSocketTest, RefusesPathsOfWrongLength) {
  for (const size_t length : {size_t{0}, size_t{108}, size_t{5000}}) {
    const auto socket = ListenOnPath(std::string(length, 'a'), 0660, "");
    EXPECT_TRUE(absl::IsInvalidArgument(socket.status())) << socket.status();
  }
}

TEST_F(IpcSocketTest, RefusesAnUnknownGroup) {
  EXPECT_TRUE(absl::IsInvalidArgument(ListenOnPath(path_, 0660, "no-such-group").status()));
}

TEST_F(IpcSocketTest, MakesTheDirectoryButNotItsParents) {
  const std::string inner = directory_ + "/inner";
  {
    const auto socket = ListenOnPath(inner + "/peerd.sock", 0660, "");
    EXPECT_TRUE(socket.ok()) << socket.status();
  }
  std::filesystem::remove_all(inner);
  const auto socket = ListenOnPath(inner + "/deeper/peerd.sock", 0660, "");
  EXPECT_TRUE(absl::IsUnavailable(socket.status())) << socket.status();
}

TEST_F(IpcSocketTest, TellsWhoConnected) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const UniqueFd first(pair[0]);
  const UniqueFd second(pair[1]);
  const auto credentials = CredentialsOf(first.get());
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  EXPECT_EQ(credentials->pid, getpid());
  EXPECT_EQ(credentials->uid, geteuid());
  EXPECT_EQ(credentials->groups.front(), getegid());
}

}  // namespace
}  // namespace longhaul::peerd
