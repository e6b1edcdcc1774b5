#include "base/daemon/daemon.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
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

TEST(DaemonDeathTest, AWriteBeyondALimitFailsInsteadOfEndingTheProcess) {
  const std::string path = ::testing::TempDir() + "/limited.json";
  EXPECT_EXIT(
      {
        Init({});
        struct rlimit limit {};
        getrlimit(RLIMIT_FSIZE, &limit);
        limit.rlim_cur = 3;  // the first write is a short one
        setrlimit(RLIMIT_FSIZE, &limit);
        const absl::Status written = WriteReadyFile(path, {{"grpc", "127.0.0.1:5"}});
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_FSIZE, &limit);
        exit(FatalExit(written));
      },
      ExitedWithCode(1), "cannot write ready file .*: File too large");
}

// By default each of these ends a process without a line in the log.
TEST(DaemonDeathTest, NoSignalEndsTheProcessSilently) {
  for (const int stray : {SIGPIPE, SIGXFSZ, SIGUSR1, SIGUSR2}) {
    EXPECT_EXIT(
        {
          Init({});
          raise(stray);
          exit(0);
        },
        ExitedWithCode(0), "")
        << stray;
  }
  for (const int stop : {SIGTERM, SIGINT, SIGHUP, SIGXCPU}) {
    EXPECT_EXIT(
        {
          Init({});
          raise(stop);
          exit(WaitForStopSignal() == stop ? 0 : 1);
        },
        ExitedWithCode(0), "")
        << stop;
  }
  EXPECT_EXIT(
      {
        signal(SIGHUP, SIG_IGN);  // as nohup does
        Init({});
        raise(SIGHUP);
        raise(SIGTERM);
        exit(WaitForStopSignal() == SIGTERM ? 0 : 1);
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
