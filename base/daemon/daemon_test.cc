#include "base/daemon/daemon.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

const ProgramInfo kInfo{"prog", "Does it.", "LONGHAUL_PROG_"};

void Init(std::vector<std::string> args) {
  std::vector<char*> argv;
  args.insert(args.begin(), "prog");
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  InitDaemon(static_cast<int>(args.size()), argv.data(), kInfo);
}

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(DaemonDeathTest, UsageDecidesTheExitCode) {
  EXPECT_EXIT(Init({"--help"}), ExitedWithCode(0), "");
  EXPECT_EXIT(Init({"--version"}), ExitedWithCode(0), "");
  EXPECT_EXIT(Init({"--nosuchflag"}), ExitedWithCode(2), "unknown flag --nosuchflag");
  EXPECT_EXIT(Init({"stray"}), ExitedWithCode(2), "unexpected argument 'stray'");
  EXPECT_EXIT(Init({"--log-format=xml"}), ExitedWithCode(2), "write text or json");
  EXPECT_EXIT(Init({"--log-level=loud"}), ExitedWithCode(2), "write debug, info");
  EXPECT_EQ(FatalExit(absl::InvalidArgumentError("x")), 2);
  EXPECT_EQ(FatalExit(absl::UnavailableError("x")), 1);
}

TEST(DaemonDeathTest, SecondStopSignalEndsTheProcessAtOnce) {
  EXPECT_EXIT(
      {
        Init({});
        kill(getpid(), SIGTERM);
        if (WaitForStopSignal() == SIGTERM) kill(getpid(), SIGINT);
        pause();
      },
      ExitedWithCode(1), "");
}

TEST(DaemonDeathTest, WaitingForAStopSignalCallsBackEachPeriod) {
  EXPECT_EXIT(
      {
        Init({});
        int calls = 0;
        const int signal = WaitForStopSignal(std::chrono::milliseconds(1), [&calls] {
          if (++calls == 3) kill(getpid(), SIGINT);
        });
        exit(signal == SIGINT && calls == 3 ? 0 : 1);
      },
      ExitedWithCode(0), "");
}

TEST(ReadyFile, IsWholeJsonAndReplacesTheOldOne) {
  const std::string path = ::testing::TempDir() + "/ready.json";
  ASSERT_TRUE(WriteReadyFile(path, {{"grpc", "old"}}).ok());
  ASSERT_TRUE(WriteReadyFile(path, {{"grpc", "127.0.0.1:5"}, {"socket", "/a\"b\n"}}).ok());
  EXPECT_EQ(ReadFile(path), "{\"grpc\": \"127.0.0.1:5\", \"socket\": \"/a\\\"b\\u000a\"}\n");
}

TEST(ReadyFile, SaysWhyItCannotBeWritten) {
  EXPECT_THAT(std::string(WriteReadyFile("/nonexistent/dir/ready", {}).message()),
              HasSubstr("No such file or directory"));
}

TEST(ReadyFile, StaleOneIsRemovedAtTheStart) {
  const std::string path = ::testing::TempDir() + "/stale.json";
  ASSERT_TRUE(WriteReadyFile(path, {}).ok());
  EXPECT_EXIT(
      {
        Init({"--ready-file=" + path});
        exit(access(path.c_str(), F_OK) == 0 ? 1 : 0);
      },
      ExitedWithCode(0), "");
}

}  // namespace
}  // namespace longhaul
