// Looks at this host, at its longhaul-peerd, at the coordinator and at the ways to them, for
// `lhctl doctor`. Blocks for up to some seconds: ways on which nothing answers take 3 s each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/tls/tls_files.h"
#include "tools/lhctl/doctor.h"

namespace longhaul {

struct ExamineOptions {
  HostPlaces places;
  PeerdChoice choice;
  // Addresses from the operator: ports for operators, or ports for peers. Each one is asked which
  // it is.
  std::vector<std::string> coordinators;
  // The operator gave these addresses; they are no defaults.
  bool coordinators_named = false;
  // TLS for these addresses and for those of peerd. Null: in clear, but peerd's with its --tls-ca.
  std::shared_ptr<tls::Files> tls;
  std::string token_file;  // of the operator; empty: none
};

Symptoms Examine(const ExamineOptions& options);

}  // namespace longhaul
