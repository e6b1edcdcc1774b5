#include "peerd/ipc/ipc_socket.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <string>

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
    rmdir(directory_.c_str());
  }
  bool Exists() const { return access(path_.c_str(), F_OK) == 0; }

  std::string directory_;
  std::string path_;
};

TEST(PermittedTest, RootOwnUserAndMembersOfTheGroup) {
  EXPECT_TRUE(Permitted({1, 0, {0}}, 1000, 50));
  EXPECT_TRUE(Permitted({1, 1000, {1000}}, 1000, 50));
  EXPECT_TRUE(Permitted({1, 1001, {1001, 7, 50}}, 1000, 50));
  EXPECT_FALSE(Permitted({1, 1001, {1001, 7}}, 1000, 50));
}

TEST_F(IpcSocketTest, ListensWithItsModeAndRemovesItsFile) {
  {
    const auto socket = ListenOnPath(path_, 0600, "");
    ASSERT_TRUE(socket.ok()) << socket.status();
    struct stat status;
    ASSERT_EQ(stat(path_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    EXPECT_EQ(socket->group(), getegid());
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
  rmdir(inner.c_str());
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
