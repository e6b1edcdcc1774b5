// Flags of our programs: command line, LONGHAUL_* environment variables and a config file.
//
// Flags are ordinary ABSL_FLAGs of this source tree. What is given on the command line wins over
// the environment, which wins over the config file. '-' and '_' in names are the same.
//
// Environment: flag --ready-file of a program with prefix LONGHAUL_PEERD_ is taken from
// LONGHAUL_PEERD_READY_FILE, else LONGHAUL_READY_FILE. An empty variable counts as unset. Variables
// that name no flag are ignored: Kubernetes puts LONGHAUL_COORDINATOR_PORT and the like into every
// container beside a service of that name.
//
// Config file (--config=FILE or --flagfile=FILE): a line is `name=value` or `--name=value`; empty
// lines and lines that begin with '#' are skipped.
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

// `getenv` looks up the environment (nullptr: not set). InvalidArgument names the flag, where it
// was given, and what is wrong with it; some flags may have been set by then.
absl::StatusOr<ParsedFlags> ParseFlags(const std::vector<std::string>& args,
                                       const ProgramInfo& info,
                                       const std::function<const char*(const char*)>& getenv);

// The text of --help.
std::string HelpText(const ProgramInfo& info);

// ParseFlags of the process. Prints and exits with 0 for --help and --version, with 2 for bad
// usage.
std::vector<std::string> ParseFlagsOrExit(int argc, char** argv, const ProgramInfo& info);

// Says what is wrong with the usage on stderr and exits with 2.
[[noreturn]] void ExitUsage(const ProgramInfo& info, const std::string& problem);

}  // namespace longhaul
