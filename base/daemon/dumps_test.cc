#include "base/daemon/dumps.h"

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;

class DumpsTest : public testing::Test {
 protected:
  DumpsTest() {
    char dir[] = "/tmp/dumps_test.XXXXXX";
    dir_ = mkdtemp(dir);
    Record record;
    record.kind = static_cast<uint8_t>(RecordKind::kOp);
    record.tag = 7;
    recorder_.ops().Add(&record);
  }
  ~DumpsTest() override { std::filesystem::remove_all(dir_); }

  Dumps::Options Fast() const {
    return {dir_, "longhaul-test", std::chrono::milliseconds(0), std::chrono::milliseconds(0)};
  }
  std::set<std::string> Files() const {
    std::set<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(dir_)) {
      names.insert(file.path().filename().string());
    }
    return names;
  }
  Recording Read(const std::string& name) const {
    std::ostringstream bytes;
    bytes << std::ifstream(dir_ + "/" + name, std::ios::binary).rdbuf();
    const auto recording = ParseRecording(bytes.str());
    EXPECT_TRUE(recording.ok()) << name << ": " << recording.status();
    return recording.ok() ? *recording : Recording();
  }
  std::string Name(const std::string& end) const {
    return absl::StrCat("longhaul-test.", getpid(), ".", end, ".lhrec");
  }

  std::string dir_;
  Recorder recorder_{"longhaul-test", "1", 4, 4};
};

TEST_F(DumpsTest, AFaultLeavesAFile) {
  { Dumps(Fast(), &recorder_).Fault("op aborted"); }
  EXPECT_EQ(Files(), std::set<std::string>{Name("fault-1")});
  const Recording recording = Read(Name("fault-1"));
  EXPECT_EQ(recording.cause, "op aborted");
  ASSERT_EQ(recording.ops.size(), 1u);
  EXPECT_EQ(recording.ops[0].tag, 7u);
}

TEST_F(DumpsTest, ManyFaultsAtOnceLeaveOneFile) {
  Dumps::Options slow = Fast();
  slow.delay = std::chrono::hours(1);  // the end of Dumps does not wait for it
  {
    Dumps dumps(slow, &recorder_);
    for (int i = 0; i < 100; ++i) dumps.Fault(absl::StrCat("fault ", i));
  }
  EXPECT_EQ(Files(), std::set<std::string>{Name("fault-1")});
  EXPECT_EQ(Read(Name("fault-1")).cause, "fault 0");
}

TEST_F(DumpsTest, TheNewestFilesStay) {
  std::ofstream(dir_ + "/notes.txt") << "not ours";
  for (size_t i = 0; i < kDumpFilesMax + 5; ++i) {
    const std::string path = absl::StrCat(dir_, "/longhaul-old.", i, ".crash.lhrec");
    std::ofstream(path) << "x";
    std::filesystem::last_write_time(
        path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(100 - i));
  }
  { Dumps(Fast(), &recorder_).Fault("a fault"); }
  const std::set<std::string> files = Files();
  EXPECT_EQ(files.size(), kDumpFilesMax + 1);
  EXPECT_TRUE(files.contains("notes.txt"));
  EXPECT_TRUE(files.contains(Name("fault-1")));
  EXPECT_FALSE(files.contains("longhaul-old.5.crash.lhrec"));
  EXPECT_TRUE(files.contains("longhaul-old.6.crash.lhrec"));
}

TEST_F(DumpsTest, WithoutADirectoryNothingIsWritten) {
  Dumps::Options none = Fast();
  none.dir = "";
  { Dumps(none, &recorder_).Fault("a fault"); }
  none.dir = dir_ + "/missing/parent";
  { Dumps(none, &recorder_).Fault("a fault"); }
  EXPECT_EQ(Files(), std::set<std::string>{});
}

TEST_F(DumpsTest, ACrashReportWritesAFile) {
  internal::OnCrashReport("nobody listens\n");
  internal::OnCrashReport(nullptr);
  EXPECT_EQ(Files(), std::set<std::string>{});
  const Dumps dumps(Fast(), &recorder_);
  internal::OnCrashReport("*** SIGABRT received ***\n");
  internal::OnCrashReport("PC: @ 0x1\n");
  internal::OnCrashReport(nullptr);
  EXPECT_EQ(Files(), std::set<std::string>{Name("crash")});
  EXPECT_THAT(Read(Name("crash")).cause, HasSubstr("SIGABRT"));
  EXPECT_EQ(Read(Name("crash")).ops.size(), 1u);
}

}  // namespace
}  // namespace longhaul
