#include "tools/lhctl/host_facts.h"

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A directory that looks like /proc.
class FakeProc : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/proc_" +
            ::testing::UnitTest::GetInstance()->current_test_info()->name();
    Make("");
    Make("/self");
    Write("/self/limits",
          "Limit                     Soft Limit           Hard Limit           Units\n"
          "Max open files            1024                 4096                 files\n"
          "Max locked memory         65536                65536                bytes\n");
    Write("/self/status", "Name:\tlhctl\nCapEff:\t0000000000000000\nSeccomp:\t2\n");
  }

  void Make(const std::string& directory) {
    ASSERT_TRUE(mkdir((root_ + directory).c_str(), 0755) == 0 || errno == EEXIST) << directory;
  }
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(root_ + path, std::ios::binary) << text;
  }
  void AddProcess(int pid, const std::string& comm, const std::string& command_line) {
    const std::string process = "/" + std::to_string(pid);
    Make(process);
    Write(process + "/comm", comm + "\n");
    Write(process + "/cmdline", command_line);
    Write(process + "/limits",
          "Max open files            20000                30000                files\n"
          "Max locked memory         unlimited            unlimited            bytes\n");
    Write(process + "/status", "CapEff:\t0000000000004000\nSeccomp:\t0\n");
  }
  HostFacts Facts(const PeerdChoice& choice = {}) {
    return ReadHost({.proc = root_, .peerd_conf = root_ + "/peerd.conf"}, choice);
  }

  std::string root_;
};

TEST_F(FakeProc, WithoutPeerdTheLimitsAreThoseOfLhctl) {
  const HostFacts facts = Facts();
  EXPECT_EQ(facts.peerds, 0u);
  EXPECT_EQ(facts.peerd.pid, 0);
  EXPECT_EQ(facts.peerd.source, "");
  EXPECT_THAT(facts.peerd.coordinators, IsEmpty());
  EXPECT_EQ(facts.peerd.listen, "[::]:29700");
  EXPECT_EQ(facts.limits.of, "lhctl");
  EXPECT_EQ(facts.limits.nofile_hard, 4096u);
  EXPECT_EQ(facts.limits.memlock, 65536u);
  EXPECT_TRUE(facts.limits.seccomp);
  EXPECT_FALSE(facts.limits.ipc_lock);
  EXPECT_NE(facts.kernel, "");
  EXPECT_GT(facts.memory_bytes, 0u);
}

TEST_F(FakeProc, WhatIsNotVisibleStaysUnset) {
  const HostFacts facts = Facts();
  EXPECT_FALSE(facts.uring_disabled);
  EXPECT_EQ(facts.tcp_rmem, "");
  EXPECT_EQ(facts.congestion, "");
  const HostFacts nowhere = ReadHost({.proc = root_ + "/none", .peerd_conf = ""}, {});
  EXPECT_FALSE(nowhere.limits.nofile_hard);
  EXPECT_FALSE(nowhere.limits.memlock);
}

TEST_F(FakeProc, SysctlsAreRead) {
  for (const char* const directory :
       {"/sys", "/sys/kernel", "/sys/net", "/sys/net/ipv4", "/sys/net/core"}) {
    Make(directory);
  }
  Write("/sys/kernel/io_uring_disabled", "2\n");
  Write("/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n");
  Write("/sys/net/ipv4/tcp_available_congestion_control", "reno cubic\n");
  const HostFacts facts = Facts();
  EXPECT_EQ(facts.uring_disabled, 2);
  EXPECT_EQ(facts.tcp_rmem, "4096 131072 6291456");
  EXPECT_EQ(facts.congestions, "reno cubic");
}

TEST_F(FakeProc, TheFirstPeerdIsLookedAtUnlessAnotherOneIsNamed) {
  AddProcess(170, "longhaul-peerd", std::string("longhaul-peerd\0--listen=10.0.0.2:7\0", 36));
  AddProcess(20, "longhaul-peerd", std::string("longhaul-peerd\0--listen=10.0.0.2:5\0", 36));
  AddProcess(3, "bash", "bash");
  const HostFacts facts = Facts();
  EXPECT_EQ(facts.peerds, 2u);
  EXPECT_EQ(facts.peerd.pid, 20);
  EXPECT_EQ(facts.peerd.source, "process 20");
  EXPECT_EQ(facts.peerd.listen, "10.0.0.2:5");
  EXPECT_EQ(facts.limits.of, "longhaul-peerd, process 20");
  EXPECT_EQ(facts.limits.nofile_hard, 30000u);
  EXPECT_EQ(facts.limits.memlock, kUnlimited);
  EXPECT_TRUE(facts.limits.ipc_lock);
  EXPECT_FALSE(facts.limits.seccomp);
  EXPECT_EQ(Facts({.pid = 170}).peerd.listen, "10.0.0.2:7");
  EXPECT_EQ(Facts({.pid = 0}).peerd.pid, 0);
}

TEST_F(FakeProc, ArgumentsWinOverEnvironmentAndFileAndTheReadyFileHasTheRealPorts) {
  Write("/conf", "# a comment\ncoordinator=c:1\n--io=epoll\nlisten=0.0.0.0:0\nhttp=127.0.0.1:0\n");
  Write("/ready.json", R"({"socket": "/s", "listen": "127.0.0.1:41", "http": "127.0.0.1:42"})");
  std::string command_line = "longhaul-peerd";
  for (const std::string& argument : {"--config=" + root_ + "/conf", std::string("--ready-file"),
                                      root_ + "/ready.json", std::string("-congestion=bbr")}) {
    command_line += '\0' + argument;
  }
  AddProcess(20, "longhaul-peerd", command_line + '\0');
  Write("/20/environ", std::string("LONGHAUL_PEERD_COORDINATOR=a:1,b:2\0LONGHAUL_COORDINATOR=x:1\0"
                                   "LONGHAUL_IO=\0HOME=/\0",
                                   79));
  const PeerdFacts peerd = Facts().peerd;
  EXPECT_THAT(peerd.coordinators, ElementsAre("a:1", "b:2"));
  EXPECT_EQ(peerd.io, "epoll");
  EXPECT_EQ(peerd.congestion, "bbr");
  EXPECT_EQ(peerd.listen, "127.0.0.1:41");
  EXPECT_EQ(peerd.http, "127.0.0.1:42");
}

TEST_F(FakeProc, WithoutAProcessTheConfigurationFileCounts) {
  Write("/peerd.conf", "coordinator=c1:29600,c2:29600\n");
  const PeerdFacts peerd = Facts().peerd;
  EXPECT_EQ(peerd.pid, 0);
  EXPECT_EQ(peerd.source, root_ + "/peerd.conf");
  EXPECT_THAT(peerd.coordinators, SizeIs(2));
}

TEST(PeerdFlags, AValueMayBeTheNextArgument) {
  PeerdFacts peerd;
  ApplyPeerdArguments({"longhaul-peerd", "--coordinator", "a:1", "--listen", "b:2", "--io"},
                      &peerd);
  EXPECT_THAT(peerd.coordinators, ElementsAre("a:1"));
  EXPECT_EQ(peerd.listen, "b:2");
  EXPECT_EQ(peerd.io, "auto");
}

}  // namespace
}  // namespace longhaul
