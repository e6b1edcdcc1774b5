// Flags of the programs of this project, from the command line, from LONGHAUL_* environment
// variables, and from a config file.
//
// A flag is an ordinary ABSL_FLAG of this source tree. The command line wins over the environment,
// and the environment wins over the config file. '-' and '_' in a name mean the same.
//
// Environment: for a program with the prefix LONGHAUL_PEERD_, the flag --ready-file is taken from
// LONGHAUL_PEERD_READY_FILE, else from LONGHAUL_READY_FILE. An empty variable counts as unset. A
// variable that names no flag is ignored, because Kubernetes sets variables such as
// LONGHAUL_COORDINATOR_PORT in every container beside a service of that name.
//
// Config file (--config=FILE or --flagfile=FILE): each line is `name=value` or `--name=value`.
// Empty lines and lines that begin with '#' are skipped.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace longhaul {

struct ProgramInfo {
  std::string name;        // "longhaul-peerd"
  std::string usage;       // what --help prints above the flags
  std::string env_prefix;  // "LONGHAUL_PEERD_"
};

struct ParsedFlags {
  std::vector<std::string> positional;
  bool help = false;
  bool version = false;
};

// Parses the arguments and sets the flags. `getenv` looks up an environment variable (nullptr: not
// set). InvalidArgument names the flag, where it was given, and what is wrong with its value. After
// an error some flags may be set.
absl::StatusOr<ParsedFlags> ParseFlags(const std::vector<std::string>& args,
                                       const ProgramInfo& info,
                                       const std::function<const char*(const char*)>& getenv);

// The text of --help.
std::string HelpText(const ProgramInfo& info);

// ParseFlags() with the arguments and the environment of the process. Returns the positional
// arguments. Prints and exits with 0 for --help and --version, and with 2 for wrong usage.
std::vector<std::string> ParseFlagsOrExit(int argc, char** argv, const ProgramInfo& info);

// Prints to stderr what is wrong with the usage, and exits with 2.
[[noreturn]] void ExitUsage(const ProgramInfo& info, const std::string& problem);

}  // namespace longhaul
