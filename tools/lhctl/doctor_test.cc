#include "tools/lhctl/doctor.h"

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

Reached At(const std::string& address, const std::string& error) {
  Reached reached;
  reached.address = address;
  reached.error = error;
  return reached;
}

// A host on which everything is as it should be, with a peerd in a group of three.
Symptoms Healthy() {
  Symptoms s;
  s.host.hostname = "h1";
  s.host.kernel = "6.1.0-13-amd64";
  s.host.memory_bytes = uint64_t{64} << 30;
  s.host.peerds = 1;
  s.host.peerd.pid = 17;
  s.host.peerd.source = "process 17";
  s.host.limits = {.of = "longhaul-peerd, process 17", .nofile_hard = 8192, .memlock = kUnlimited};
  s.host.uring_disabled = 0;
  s.host.tcp_rmem = "4096 131072 6291456";
  s.host.tcp_wmem = "4096 16384 4194304";
  s.host.rmem_max = s.host.wmem_max = "212992";
  s.host.congestion = "cubic";
  s.host.congestions = "reno cubic";
  s.host.slow_start_after_idle = "1";
  s.host.clock = ClockFacts{.synchronised = true, .error_us = 2500};
  const auto reached = [](const char* address, uint32_t us) {
    return Reached{address, "", us, "eth0", 1500, 1500};
  };
  s.data_port = reached("127.0.0.1:29700", 50);
  s.readyz = "ok\n";
  s.on_epoll = false;
  s.coordinators = {{reached("c:29600", 300), CoordinatorSeen::Answer::kPeers}};
  s.admin.emplace();
  s.admin->address = "127.0.0.1:29602";
  s.admin->clock_ahead_us = -1500;
  s.admin->clock_error_us = 400;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(R"(
    version: "1.2.3" detect_ms: 1500 streams: 3
    groups {
      run: "demo" epoch: 7
      ring { peer: "pa" host: "h1" endpoint: "10.0.0.1:29700" attached: true }
      ring { peer: "pb" host: "h2" endpoint: "10.0.0.2:29700" attached: true }
      ring { peer: "pc" host: "h3" endpoint: "10.0.0.3:29700" attached: true }
    })",
                                                            &s.admin->overview));
  s.members = {reached("10.0.0.2:29700", 400), reached("10.0.0.3:29700", 900)};
  return s;
}

Finding Find(const Symptoms& s, const std::string& check) {
  for (const Finding& f : Diagnose(s)) {
    if (f.check == check) return f;
  }
  ADD_FAILURE() << "no check " << check;
  return {};
}

TEST(Doctor, FindsNothingOnAHealthyHost) {
  const auto findings = Diagnose(Healthy());
  for (const Finding& f : findings) {
    EXPECT_EQ(f.verdict, Rating::kOk) << f.check << ": " << f.seen;
    EXPECT_NE(f.seen, "") << f.check;
    EXPECT_NE(f.why, "") << f.check;
    EXPECT_EQ(f.todo, "") << f.check;
  }
  EXPECT_EQ(ExitCodeOf(findings), 0);
  EXPECT_THAT(RenderFindings(findings), HasSubstr("\n0 wrong, 0 advice, 0 unknown, 16 ok\n"));
}

TEST(Doctor, SaysWhatToDoWhereverItAdvises) {
  // Nothing could be seen, and everything that was tried failed.
  Symptoms s;
  s.uring_error = "io_uring setup refused (EPERM): x";
  s.listen_error = "in use";
  s.admin_named = true;
  s.admin_error = "none";
  s.coordinators = {{At("c:1", "refused")}};
  const auto findings = Diagnose(s);
  for (const Finding& f : findings) {
    EXPECT_NE(f.verdict, Rating::kOk) << f.check << ": " << f.seen;
    EXPECT_NE(f.seen, "") << f.check;
    EXPECT_NE(f.why, "") << f.check;
    EXPECT_TRUE(f.verdict == Rating::kUnknown || !f.todo.empty()) << f.check;
  }
  EXPECT_EQ(ExitCodeOf(findings), 1);
}

TEST(Doctor, Kernel) {
  Symptoms s = Healthy();
  for (const auto& [release, verdict] : {std::pair{"5.18.19", Rating::kWrong},
                                         {"4.19.0-5", Rating::kWrong},
                                         {"5.19.0", Rating::kAdvice},
                                         {"6.0-rc1", Rating::kOk},
                                         {"10.2", Rating::kOk},
                                         {"weird", Rating::kUnknown}}) {
    s.host.kernel = release;
    EXPECT_EQ(Find(s, "kernel").verdict, verdict) << release;
  }
}

TEST(Doctor, NamesWhatRefusesIoUring) {
  Symptoms s = Healthy();
  s.uring_error = "io_uring setup refused (EPERM): somebody blocks it";
  s.host.limits.seccomp = true;
  Finding f = Find(s, "io_uring");
  EXPECT_EQ(f.verdict, Rating::kAdvice);
  EXPECT_THAT(f.seen, HasSubstr("a seccomp filter refuses io_uring"));
  EXPECT_THAT(f.todo, HasSubstr("deploy/docker/seccomp-peerd.json"));
  EXPECT_THAT(f.todo, Not(HasSubstr("sysctl")));

  s.host.uring_disabled = 2;
  f = Find(s, "io_uring");
  EXPECT_THAT(f.seen, HasSubstr("kernel.io_uring_disabled=2"));
  EXPECT_THAT(f.todo, HasSubstr("sysctl -w kernel.io_uring_disabled=0"));
  EXPECT_THAT(f.todo, Not(HasSubstr("seccomp")));

  // Either may be the reason.
  s.host.uring_disabled = 1;
  f = Find(s, "io_uring");
  EXPECT_THAT(f.todo, HasSubstr("sysctl"));
  EXPECT_THAT(f.todo, HasSubstr("seccomp-peerd.json"));

  s.host.uring_disabled = 0;
  s.host.limits.seccomp = false;
  EXPECT_THAT(Find(s, "io_uring").seen, HasSubstr("somebody blocks it"));

  // peerd does not start with --io=uring; with --io=epoll it misses nothing.
  s.host.peerd.io = "uring";
  EXPECT_EQ(Find(s, "io_uring").verdict, Rating::kWrong);
  s.host.peerd.io = "epoll";
  EXPECT_EQ(Find(s, "io_uring").verdict, Rating::kOk);
}

TEST(Doctor, PeerdOnEpollWhileLhctlHasIoUringIsAnotherFilter) {
  Symptoms s = Healthy();
  s.on_epoll = true;
  const Finding f = Find(s, "io_uring");
  EXPECT_EQ(f.verdict, Rating::kAdvice);
  EXPECT_THAT(f.seen, HasSubstr("process 17, runs on epoll"));
}

TEST(Doctor, Limits) {
  Symptoms s = Healthy();
  s.host.limits.memlock = 65536;
  Finding f = Find(s, "memlock");
  EXPECT_EQ(f.verdict, Rating::kAdvice);
  EXPECT_THAT(f.seen, HasSubstr("may lock 64.0 KiB of memory"));
  s.host.limits.ipc_lock = true;
  EXPECT_EQ(Find(s, "memlock").verdict, Rating::kOk);

  s.host.limits.nofile_hard = 8191;
  EXPECT_EQ(Find(s, "nofile").verdict, Rating::kAdvice);
  s.host.limits.nofile_hard = 1023;
  EXPECT_EQ(Find(s, "nofile").verdict, Rating::kWrong);
  s.host.limits.nofile_hard = kUnlimited;
  EXPECT_EQ(Find(s, "nofile").verdict, Rating::kOk);
}

TEST(Doctor, NamesPathsThatCarryLessThanTheInterface) {
  Symptoms s = Healthy();
  EXPECT_EQ(Find(s, "mtu").seen, "eth0 has 1500");
  s.members[1].path_mtu = 1400;
  const Finding f = Find(s, "mtu");
  EXPECT_EQ(f.verdict, Rating::kAdvice);
  EXPECT_THAT(f.seen, HasSubstr("10.0.0.3:29700 (1400)"));

  s.members[1].interface = "lo";
  s.members[1].mtu = 65536;
  s.members[1].path_mtu = 65535;  // the most that IPv4 carries
  EXPECT_EQ(Find(s, "mtu").verdict, Rating::kOk);
}

TEST(Doctor, SettingsForLongWaysMatterOnLongWaysOnly) {
  Symptoms s = Healthy();
  EXPECT_EQ(Find(s, "slow start").verdict, Rating::kOk);
  EXPECT_EQ(Find(s, "congestion").verdict, Rating::kOk);
  s.members[1].connect_us = 40000;
  EXPECT_EQ(Find(s, "slow start").verdict, Rating::kAdvice);
  EXPECT_THAT(Find(s, "congestion").todo, HasSubstr("modprobe tcp_bbr"));
  s.host.slow_start_after_idle = "0";
  s.host.congestions = "reno cubic bbr";
  EXPECT_EQ(Find(s, "slow start").verdict, Rating::kOk);
  EXPECT_EQ(Find(s, "congestion").verdict, Rating::kOk);

  s.host.peerd.congestion = "vegas";
  EXPECT_EQ(Find(s, "congestion").verdict, Rating::kWrong);
}

TEST(Doctor, BuffersBelowTheDefaults) {
  Symptoms s = Healthy();
  EXPECT_THAT(Find(s, "buffers").why, HasSubstr("40.0 MiB/s at 100 ms"));
  s.host.tcp_wmem = "4096 16384 212992";
  EXPECT_EQ(Find(s, "buffers").verdict, Rating::kAdvice);
}

TEST(Doctor, ClocksThatDiffer) {
  Symptoms s = Healthy();
  EXPECT_THAT(Find(s, "clock").seen, HasSubstr("1.5 ms behind the coordinator's"));
  s.admin->clock_ahead_us = 1300000;
  EXPECT_EQ(Find(s, "clock").verdict, Rating::kAdvice);
  // The answer may have taken as long as that.
  s.admin->clock_error_us = 400000;
  EXPECT_EQ(Find(s, "clock").verdict, Rating::kOk);
  s.host.clock->synchronised = false;
  EXPECT_EQ(Find(s, "clock").verdict, Rating::kAdvice);
}

TEST(Doctor, PeerdThatDoesNotAnswerOrHasNoCoordinator) {
  Symptoms s = Healthy();
  s.readyz = "no coordinator serves this peer\n";
  Finding f = Find(s, "peerd");
  EXPECT_EQ(f.verdict, Rating::kWrong);
  EXPECT_THAT(f.seen, HasSubstr("says: no coordinator serves this peer"));
  s.readyz.reset();
  EXPECT_THAT(Find(s, "peerd").seen, HasSubstr("does not answer"));
  s.data_port->error = "Connection refused";
  EXPECT_EQ(Find(s, "data port").verdict, Rating::kWrong);
}

TEST(Doctor, OneGoodCoordinatorOfSeveralIsEnough) {
  Symptoms s = Healthy();
  s.coordinators.push_back({At("d:29600", "Connection refused")});
  EXPECT_EQ(Find(s, "coordinator").verdict, Rating::kAdvice);
  s.coordinators.erase(s.coordinators.begin());
  EXPECT_EQ(Find(s, "coordinator").verdict, Rating::kWrong);
  s.coordinators = {{At("d:29602", ""), CoordinatorSeen::Answer::kAdmin}};
  Finding f = Find(s, "coordinator");
  EXPECT_EQ(f.verdict, Rating::kWrong);
  EXPECT_THAT(f.seen, HasSubstr("is the port for operators"));
  s.coordinators[0].answer = CoordinatorSeen::Answer::kOther;
  EXPECT_THAT(Find(s, "coordinator").seen, HasSubstr("no coordinator"));
}

TEST(Doctor, AnAdminPortThatNobodyNamedMayBeAway) {
  Symptoms s = Healthy();
  s.admin.reset();
  s.admin_error = "no answer";
  s.members.clear();
  for (const char* const check : {"admin", "members", "reached by", "timeouts"}) {
    EXPECT_EQ(Find(s, check).verdict, Rating::kUnknown) << check;
  }
  EXPECT_EQ(ExitCodeOf(Diagnose(s)), 0);
  s.admin_named = true;
  EXPECT_EQ(Find(s, "admin").verdict, Rating::kWrong);
}

TEST(Doctor, NamesMembersWhoseDataPortIsClosed) {
  Symptoms s = Healthy();
  s.members[0].error = "Connection refused";
  const Finding f = Find(s, "members");
  EXPECT_EQ(f.verdict, Rating::kWrong);
  EXPECT_THAT(f.seen, HasSubstr("1 of 2"));
  EXPECT_THAT(f.seen, HasSubstr("not: 10.0.0.2:29700: Connection refused"));
  EXPECT_THAT(f.todo, HasSubstr("open --listen (29700) of these hosts"));
  s.members[0].address = "127.0.0.1:29700";
  EXPECT_THAT(Find(s, "members").todo, HasSubstr("needs --listen=[::]:29700 or --advertise"));
}

TEST(Doctor, NamesBlockedPairsOfThisHost) {
  Symptoms s = Healthy();
  EXPECT_THAT(Find(s, "reached by").seen, HasSubstr("demo/0 with 2"));
  auto* blocked = s.admin->overview.mutable_groups(0)->add_blocked();
  blocked->set_a("pb");
  blocked->set_b("pc");
  EXPECT_EQ(Find(s, "reached by").verdict, Rating::kOk);
  blocked->set_b("pa");
  EXPECT_EQ(Find(s, "reached by").verdict, Rating::kWrong);
  s.host.peerd.advertise = "nat:1";  // no member is this host
  EXPECT_EQ(Find(s, "reached by").verdict, Rating::kUnknown);
}

TEST(Doctor, TimeoutsFollowFromDetectMs) {
  Symptoms s = Healthy();
  EXPECT_THAT(Find(s, "timeouts").seen, HasSubstr("1500 to 2250 ms"));
  s.members[0].connect_us = 1300000;
  const Finding f = Find(s, "timeouts");
  EXPECT_EQ(f.verdict, Rating::kAdvice);
  EXPECT_THAT(f.todo, HasSubstr("--detect-ms=2600"));
}

TEST(Doctor, JsonQuotesAndForeignTextCannotSteerTheTerminal) {
  const std::vector<Finding> findings = {
      {"a", Rating::kWrong, "say \"x\\\x1b\"", "because", "act"}};
  EXPECT_EQ(RenderFindingsJson(findings),
            "{\n \"wrong\": 1,\n \"advice\": 0,\n \"unknown\": 0,\n \"ok\": 0,\n \"checks\": [\n"
            "  {\"check\": \"a\", \"verdict\": \"wrong\", \"seen\": \"say \\\"x\\\\?\\\"\", "
            "\"why\": \"because\", \"do\": \"act\"}\n ]\n}\n");
  EXPECT_EQ(RenderFindings(findings),
            "wrong    a            say \"x\\?\". Why: because. Do: act.\n"
            "\n1 wrong, 0 advice, 0 unknown, 0 ok\n");
}

}  // namespace
}  // namespace longhaul
