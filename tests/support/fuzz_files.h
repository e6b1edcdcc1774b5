// For fuzz targets of code that reads files: a directory of this process, and a file in it.
#pragma once

#include <stdlib.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "base/check.h"

namespace longhaul {

// A new directory. Its name stays the same while the process runs.
inline const std::string& FuzzDirectory() {
  static const auto& path = *new std::string([] {
    const char* const base = getenv("TEST_TMPDIR");
    std::string name = std::string(base != nullptr ? base : "/tmp") + "/lh_fuzz_XXXXXX";
    // The path of a Unix socket in the directory has to be short.
    if (name.size() > 80) name = "/tmp/lh_fuzz_XXXXXX";
    LH_CHECK(mkdtemp(name.data()) != nullptr);
    return name;
  }());
  return path;
}

// The path of a file with these contents, which only its owner may read. It is always the same
// file.
inline const std::string& FuzzFile(const std::string& bytes) {
  static const auto& path = *new std::string(FuzzDirectory() + "/file");
  {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    LH_CHECK(file.is_open() && chmod(path.c_str(), 0600) == 0);
    file << bytes;
  }
  return path;
}

}  // namespace longhaul
