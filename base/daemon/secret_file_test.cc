#include "base/daemon/secret_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class SecretFile : public ::testing::Test {
 protected:
  ~SecretFile() override { unlink(path_.c_str()); }
  absl::StatusOr<std::string> Read(const std::string& contents, mode_t mode = 0600) {
    std::ofstream(path_) << contents;
    EXPECT_EQ(chmod(path_.c_str(), mode), 0);
    return ReadSecretFile("--token-file", path_);
  }
  const std::string path_ = ::testing::TempDir() + "/secret_" + std::to_string(getpid());
};

TEST_F(SecretFile, GivesItsContentsWithoutTheNewline) {
  EXPECT_EQ(*Read("lht_secret\n"), "lht_secret");
  EXPECT_EQ(*Read("  lht_secret", 0400), "lht_secret");
}

TEST_F(SecretFile, IsRefusedIfOthersMayReadOrChangeIt) {
  for (const mode_t mode : {0644, 0604, 0660, 0622, 0601}) {
    const auto read = Read("lht_secret\n", mode);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kFailedPrecondition) << mode;
    EXPECT_THAT(std::string(read.status().message()),
                AllOf(HasSubstr("--token-file=" + path_), HasSubstr("chmod 600"),
                      Not(HasSubstr("lht_secret"))));
  }
}

TEST_F(SecretFile, ItsGroupMayReadItIfRootOwnsIt) {
  EXPECT_EQ(Read("lht_secret", 0640).ok(), getuid() == 0);
}

TEST_F(SecretFile, OtherContentsAreRefusedWithoutRepeatingThem) {
  for (const std::string& contents :
       {std::string(" \n"), std::string("two words"), std::string("a\nb"), std::string(5000, 'x'),
        std::string("nul\0inside", 10), std::string("\xc3\xa4")}) {
    const auto read = Read(contents);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
    if (contents.size() > 2) {
      EXPECT_THAT(std::string(read.status().message()), Not(HasSubstr(contents)));
    }
  }
}

TEST_F(SecretFile, AFileThatCannotBeReadIsNamed) {
  const auto missing = ReadSecretFile("--token-file", path_ + "-missing");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("No such file"));
  EXPECT_EQ(ReadSecretFile("--token-file", "/tmp").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace longhaul
