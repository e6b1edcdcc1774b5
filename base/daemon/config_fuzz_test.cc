// Feeds any text to the parsers of what an operator writes: arguments, environment and config file
// of a program, addresses, files with a secret. The first byte chooses.
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/daemon/flags.h"
#include "base/daemon/host_port.h"
#include "base/daemon/secret_file.h"
#include "tests/support/fuzz_files.h"

// A flag of each type that the programs have.
ABSL_FLAG(std::string, fuzz_text, "", "text");
ABSL_FLAG(bool, fuzz_bool, false, "bool");
ABSL_FLAG(uint32_t, fuzz_u32, 0, "number");
ABSL_FLAG(uint64_t, fuzz_u64, 0, "number");
ABSL_FLAG(int32_t, fuzz_i32, 0, "number");
ABSL_FLAG(absl::Duration, fuzz_duration, absl::ZeroDuration(), "duration");
ABSL_FLAG(std::vector<std::string>, fuzz_list, {}, "list");

namespace longhaul {
namespace {

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines(1);
  for (const char c : text) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  return lines;
}

void Parse(const std::vector<std::string>& args, const std::map<std::string, std::string>& env) {
  const ProgramInfo info{"fuzz", "usage", "LONGHAUL_FUZZ_"};
  const auto parsed = ParseFlags(args, info, [&](const char* name) -> const char* {
    const auto it = env.find(name);
    return it == env.end() ? nullptr : it->second.c_str();
  });
  if (!parsed.ok()) LH_CHECK(!parsed.status().message().empty());
}

void One(uint8_t which, const std::string& text) {
  switch (which % 6) {
    case 0: {
      std::vector<std::string> args = Lines(text);
      // A name of a file would lead out of the input.
      for (const std::string& arg : args) {
        if (arg.find("config") != std::string::npos || arg.find("flagfile") != std::string::npos) {
          return;
        }
      }
      return Parse(args, {});
    }
    case 1: {
      std::map<std::string, std::string> env;
      for (const std::string& line : Lines(text)) {
        const size_t equals = line.find('=');
        const std::string name = line.substr(0, equals);
        if (name.find("CONFIG") != std::string::npos || equals == std::string::npos) continue;
        env[name] = line.substr(equals + 1);
      }
      return Parse({}, env);
    }
    case 2:
      return Parse({"--config=" + FuzzFile(text)}, {});
    case 3:
      if (const auto address = ParseHostPort(text); address.ok()) {
        LH_CHECK(!address->host.empty());
        LH_CHECK(*ParseHostPort(ToString(*address)) == *address);
        IsLoopback(*address);
      }
      return;
    case 4:
      if (const auto list = ParseAddressList(text); list.ok()) {
        LH_CHECK(!list->empty());
        for (const std::string& address : *list) LH_CHECK(ParseHostPort(address)->port != 0);
      }
      return;
    case 5: {
      if (const auto secret = ReadSecretFile("--token-file", FuzzFile(text)); secret.ok()) {
        LH_CHECK(!secret->empty() && secret->find('\n') == std::string::npos);
      }
      const auto marked = ReadSecretFile("--token-file", FuzzFile(text + "MaRkEr"));
      if (marked.ok()) return;
      LH_CHECK(marked.status().message().find("MaRkEr") == std::string_view::npos)
          << "an error shows the secret";
      return;
    }
  }
}

}  // namespace
}  // namespace longhaul

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  longhaul::One(data[0], std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
