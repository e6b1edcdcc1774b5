#include "base/daemon/flags.h"

#include <stdlib.h>

#include <fstream>
#include <map>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(std::string, flags_test_name, "nobody", "a name");
ABSL_FLAG(int32_t, flags_test_count, 1, "a count");
ABSL_FLAG(bool, flags_test_loud, false, "whether");

namespace longhaul {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FlagsTest : public ::testing::Test {
 protected:
  absl::StatusOr<ParsedFlags> Parse(const std::vector<std::string>& args) {
    return ParseFlags(args, info_, [this](const char* name) -> const char* {
      const auto it = environment_.find(name);
      return it == environment_.end() ? nullptr : it->second.c_str();
    });
  }
  std::string Error(const std::vector<std::string>& args) {
    return std::string(Parse(args).status().message());
  }
  std::string ConfigFile(const std::string& text) {
    const std::string path = ::testing::TempDir() + "/flags_test.conf";
    std::ofstream(path) << text;
    return path;
  }

  absl::FlagSaver saver_;
  ProgramInfo info_{"prog", "Does it.", "LONGHAUL_PROG_"};
  std::map<std::string, std::string> environment_;
};

TEST_F(FlagsTest, TakesEveryWayOfWritingAFlag) {
  auto parsed = Parse({"-flags-test-name=a", "one", "--flags_test_count", "7", "--flags-test-loud",
                       "two", "--", "--three"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(absl::GetFlag(FLAGS_flags_test_name), "a");
  EXPECT_EQ(absl::GetFlag(FLAGS_flags_test_count), 7);
  EXPECT_TRUE(absl::GetFlag(FLAGS_flags_test_loud));
  EXPECT_THAT(parsed->positional, ElementsAre("one", "two", "--three"));
  ASSERT_TRUE(Parse({"--noflags-test-loud"}).ok());
  EXPECT_FALSE(absl::GetFlag(FLAGS_flags_test_loud));
}

TEST_F(FlagsTest, CommandLineWinsOverEnvironmentOverConfigFile) {
  const std::string path = ConfigFile(
      "# comment\n\n flags-test-name = from file \n--flags_test_count=2\nflags-test-loud=true\n");
  environment_["LONGHAUL_PROG_FLAGS_TEST_COUNT"] = "3";
  environment_["LONGHAUL_FLAGS_TEST_COUNT"] = "30";
  environment_["LONGHAUL_FLAGS_TEST_LOUD"] = "false";
  ASSERT_TRUE(Parse({"--config=" + path}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_flags_test_name), "from file");
  EXPECT_EQ(absl::GetFlag(FLAGS_flags_test_count), 3);
  EXPECT_FALSE(absl::GetFlag(FLAGS_flags_test_loud));
  ASSERT_TRUE(Parse({"--flags-test-count=4", "--flagfile", path}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_flags_test_count), 4);
}

TEST_F(FlagsTest, EmptyAndForeignVariablesAreIgnored) {
  environment_["LONGHAUL_PROG_FLAGS_TEST_COUNT"] = "";
  environment_["LONGHAUL_PROG_PORT"] = "tcp://10.0.0.1:29600";
  ASSERT_TRUE(Parse({}).ok());
  EXPECT_EQ(absl::GetFlag(FLAGS_flags_test_count), 1);
}

TEST_F(FlagsTest, ErrorsNameTheFlagAndWhereItWasGiven) {
  EXPECT_THAT(Error({"--flags-test-nmae=x"}), HasSubstr("unknown flag --flags-test-nmae=x"));
  EXPECT_THAT(Error({"--flags-test-count"}), HasSubstr("needs a value"));
  EXPECT_THAT(Error({"--flags-test-count=many"}),
              HasSubstr("--flags-test-count=many (command line)"));
  EXPECT_THAT(Error({"--config=/nonexistent/x"}), HasSubstr("cannot read config file"));
  const std::string path = ConfigFile("flags-test-count=1\nnonsense\n");
  EXPECT_THAT(Error({"--config=" + path}), HasSubstr(path + ":2: 'nonsense' is not name=value"));
  EXPECT_THAT(Error({"--config=" + ConfigFile("wrong=1\n")}), HasSubstr(":1: unknown flag wrong"));
  environment_["LONGHAUL_FLAGS_TEST_COUNT"] = "x";
  EXPECT_THAT(Error({}), HasSubstr("environment variable LONGHAUL_FLAGS_TEST_COUNT"));
}

TEST_F(FlagsTest, HelpAndVersionNeedNothingElse) {
  environment_["LONGHAUL_FLAGS_TEST_COUNT"] = "x";
  EXPECT_TRUE(Parse({"--help"})->help);
  EXPECT_TRUE(Parse({"-h"})->help);
  EXPECT_TRUE(Parse({"--version"})->version);
  EXPECT_THAT(HelpText(info_), HasSubstr("  --flags-test-name=nobody\n      a name\n"));
  EXPECT_THAT(HelpText(info_), HasSubstr("Does it."));
}

}  // namespace
}  // namespace longhaul
