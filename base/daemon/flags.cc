#include "base/daemon/flags.h"

#include <stdio.h>
#include <stdlib.h>

#include <fstream>
#include <map>
#include <optional>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/daemon/version.h"

namespace longhaul {
namespace {

constexpr size_t kConfigLinesMax = 10000;
constexpr size_t kConfigLineBytesMax = 65536;

// Whether the flag is defined in this source tree. Flags of libraries are not offered to users.
bool IsOurs(const absl::CommandLineFlag& flag) {
  const std::string file = flag.Filename();
  for (const char* directory : {"base/", "coordinator/", "peerd/", "tests/", "tools/"}) {
    if (absl::StartsWith(file, directory) ||
        absl::StrContains(file, absl::StrCat("/", directory))) {
      return true;
    }
  }
  return false;
}

// Our flags, by name with dashes.
std::map<std::string, absl::CommandLineFlag*> OurFlags() {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (IsOurs(*flag)) flags[absl::StrReplaceAll(name, {{"_", "-"}})] = flag;
  }
  return flags;
}

std::string Normalized(const std::string& name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

bool IsConfigFlag(const std::string& name) { return name == "config" || name == "flagfile"; }

class Parser {
 public:
  Parser(const ProgramInfo& info, const std::function<const char*(const char*)>& getenv)
      : info_(info), getenv_(getenv), flags_(OurFlags()) {}

  absl::StatusOr<ParsedFlags> Run(const std::vector<std::string>& args) {
    if (absl::Status read = ReadArgs(args); !read.ok()) return read;
    if (parsed_.help || parsed_.version) return parsed_;
    if (config_files_.empty()) {
      if (const char* path = FromEnvironment("config").second) config_files_.push_back(path);
    }
    for (const std::string& path : config_files_) {
      if (absl::Status applied = ApplyConfigFile(path); !applied.ok()) return applied;
    }
    for (const auto& [name, flag] : flags_) {
      const auto [variable, value] = FromEnvironment(name);
      if (value == nullptr) continue;
      if (absl::Status set = Set(name, value, absl::StrCat("environment variable ", variable));
          !set.ok()) {
        return set;
      }
    }
    for (const auto& [name, value] : given_) {
      if (absl::Status set = Set(name, value, "command line"); !set.ok()) return set;
    }
    return parsed_;
  }

 private:
  // Sorts the arguments into flags and positional arguments. Sets nothing yet.
  absl::Status ReadArgs(const std::vector<std::string>& args) {
    for (size_t i = 0; i < args.size(); ++i) {
      const std::string& arg = args[i];
      if (arg == "--") {
        parsed_.positional.insert(parsed_.positional.end(), args.begin() + i + 1, args.end());
        break;
      }
      if (arg.size() < 2 || arg[0] != '-') {
        parsed_.positional.push_back(arg);
        continue;
      }
      const std::string body = arg.substr(absl::StartsWith(arg, "--") ? 2 : 1);
      const size_t equals = body.find('=');
      const std::string name = Normalized(body.substr(0, equals));
      if (name == "help" || (name == "h" && arg == "-h")) {
        parsed_.help = true;
        continue;
      }
      if (name == "version") {
        parsed_.version = true;
        continue;
      }
      if (equals != std::string::npos) {
        if (absl::Status given = Give(name, body.substr(equals + 1), arg); !given.ok())
          return given;
        continue;
      }
      if (const auto boolean = AsBoolean(name); boolean.has_value()) {
        given_.push_back(*boolean);
        continue;
      }
      if (!IsConfigFlag(name) && flags_.count(name) == 0) return Unknown(arg);
      if (i + 1 == args.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("flag ", arg, " needs a value: ", arg, "=..."));
      }
      if (absl::Status given = Give(name, args[++i], arg); !given.ok()) return given;
    }
    return absl::OkStatus();
  }

  // Reads --flag and --noflag of a boolean. Returns name and value; nullopt: `name` is neither.
  std::optional<std::pair<std::string, std::string>> AsBoolean(const std::string& name) const {
    const auto is_bool = [this](const std::string& n) {
      const auto it = flags_.find(n);
      return it != flags_.end() && it->second->IsOfType<bool>();
    };
    if (is_bool(name)) return std::make_pair(name, std::string("true"));
    if (absl::StartsWith(name, "no") && is_bool(name.substr(2))) {
      return std::make_pair(name.substr(2), std::string("false"));
    }
    return std::nullopt;
  }

  absl::Status Give(const std::string& name, const std::string& value, const std::string& arg) {
    if (IsConfigFlag(name)) {
      config_files_.push_back(value);
      return absl::OkStatus();
    }
    if (flags_.count(name) == 0) return Unknown(arg);
    given_.emplace_back(name, value);
    return absl::OkStatus();
  }

  absl::Status Unknown(const std::string& arg) const {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown flag ", arg, "; see ", info_.name, " --help"));
  }

  std::pair<std::string, const char*> FromEnvironment(const std::string& name) const {
    const std::string upper = absl::AsciiStrToUpper(absl::StrReplaceAll(name, {{"-", "_"}}));
    for (const std::string& prefix : {info_.env_prefix, std::string("LONGHAUL_")}) {
      const std::string variable = absl::StrCat(prefix, upper);
      const char* value = getenv_(variable.c_str());
      if (value != nullptr && *value != '\0') return {variable, value};
    }
    return {"", nullptr};
  }

  absl::Status ApplyConfigFile(const std::string& path) {
    std::ifstream file(path);
    if (!file) {
      return absl::InvalidArgumentError(absl::StrCat("cannot read config file ", path));
    }
    std::string line;
    for (size_t number = 1; std::getline(file, line); ++number) {
      const std::string where = absl::StrCat(path, ":", number);
      if (number > kConfigLinesMax || line.size() > kConfigLineBytesMax) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": too large for a config file"));
      }
      std::string text(absl::StripAsciiWhitespace(line));
      if (text.empty() || text[0] == '#') continue;
      if (absl::StartsWith(text, "--")) text = text.substr(2);
      const size_t equals = text.find('=');
      if (equals == std::string::npos) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": '", text, "' is not name=value"));
      }
      const std::string name =
          Normalized(std::string(absl::StripAsciiWhitespace(text.substr(0, equals))));
      const std::string value(absl::StripAsciiWhitespace(text.substr(equals + 1)));
      if (flags_.count(name) == 0) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": unknown flag ", name));
      }
      if (absl::Status set = Set(name, value, where); !set.ok()) return set;
    }
    if (file.bad())
      return absl::InvalidArgumentError(absl::StrCat("cannot read config file ", path));
    return absl::OkStatus();
  }

  absl::Status Set(const std::string& name, const std::string& value, const std::string& where) {
    std::string error;
    if (flags_.at(name)->ParseFrom(value, &error)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("flag --", name, "=", value, " (", where, "): ", error));
  }

  const ProgramInfo& info_;
  const std::function<const char*(const char*)>& getenv_;
  const std::map<std::string, absl::CommandLineFlag*> flags_;
  ParsedFlags parsed_;
  std::vector<std::string> config_files_;
  std::vector<std::pair<std::string, std::string>> given_;
};

}  // namespace

absl::StatusOr<ParsedFlags> ParseFlags(const std::vector<std::string>& args,
                                       const ProgramInfo& info,
                                       const std::function<const char*(const char*)>& getenv) {
  return Parser(info, getenv).Run(args);
}

std::string HelpText(const ProgramInfo& info) {
  std::string text = absl::StrCat(info.usage, "\n\nFlags (also as ", info.env_prefix,
                                  "NAME or LONGHAUL_NAME in the environment):\n");
  for (const auto& [name, flag] : OurFlags()) {
    const std::string default_value = flag->DefaultValue();
    absl::StrAppend(&text, "  --", name);
    if (!default_value.empty()) absl::StrAppend(&text, "=", default_value);
    absl::StrAppend(&text, "\n      ", flag->Help(), "\n");
  }
  absl::StrAppend(&text, "  --config=FILE\n      file with a flag a line: name=value\n",
                  "  --version\n  --help\n");
  return text;
}

void ExitUsage(const ProgramInfo& info, const std::string& problem) {
  fprintf(stderr, "%s: %s\n", info.name.c_str(), problem.c_str());
  exit(2);
}

std::vector<std::string> ParseFlagsOrExit(int argc, char** argv, const ProgramInfo& info) {
  absl::StatusOr<ParsedFlags> parsed =
      ParseFlags(std::vector<std::string>(argv + 1, argv + argc), info,
                 [](const char* name) { return getenv(name); });
  if (!parsed.ok()) ExitUsage(info, std::string(parsed.status().message()));
  if (parsed->help) {
    fputs(HelpText(info).c_str(), stdout);
    exit(0);
  }
  if (parsed->version) {
    printf("%s %s\n", info.name.c_str(), kVersion);
    exit(0);
  }
  return parsed->positional;
}

}  // namespace longhaul
