// What `lhctl doctor` says of a host: from what was seen to findings, and from findings to text.
// Pure functions: no state, any thread, nothing can fail.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/longhaul/v1/admin.pb.h"
#include "tools/lhctl/host_facts.h"
#include "tools/lhctl/reach.h"

namespace longhaul {

// kOk: good. kUnknown: could not be seen from here. kAdvice: works, but costs time, or only works
// today. kWrong: Longhaul does not work with this.
enum class Rating { kOk, kUnknown, kAdvice, kWrong };

struct Finding {
  std::string check;  // "io_uring"
  Rating verdict = Rating::kOk;
  std::string seen;  // a sentence, as the next two
  std::string why;   // why it matters
  std::string todo;  // what to do; never empty if the verdict is kAdvice or kWrong
};

// What a coordinator's port for operators answered.
struct AdminSeen {
  std::string address;
  v1::GetOverviewResponse overview;
  // The clock of this host minus the coordinator's, and by how much that may be wrong. Unset: this
  // coordinator does not tell its time.
  std::optional<int64_t> clock_ahead_us;
  int64_t clock_error_us = 0;
};

// A coordinator's address for peers.
struct CoordinatorSeen {
  Reached reached;
  // What answers there, if a connection could be opened: kPeers is right; kAdmin: the coordinator's
  // port for operators; kOther: no coordinator.
  enum class Answer { kPeers, kAdmin, kOther } answer = Answer::kOther;
};

// All that doctor has seen.
struct Symptoms {
  HostFacts host;
  std::string uring_error;  // why io_uring cannot be used here; empty: it can
  // Of the process in host.peerd, if there is one.
  std::optional<Reached> data_port;   // a connection to it
  std::optional<std::string> readyz;  // what its /readyz says
  std::optional<bool> on_epoll;       // from its metrics
  // If there is no such process: why the next one could not listen at its data port; empty: it can.
  std::string listen_error;
  std::vector<CoordinatorSeen> coordinators;
  // The operator named the address; so it is wrong if nothing answers.
  bool admin_named = false;
  std::string admin_error;  // why `admin` is unset
  std::optional<AdminSeen> admin;
  std::vector<Reached> members;  // data ports of other peers
};

std::vector<Finding> Diagnose(const Symptoms& symptoms);

// Whether a peer in the overview is the longhaul-peerd of this host.
bool IsThisHost(const HostFacts& host, const v1::PeerStatus& peer);

// One line for each finding, and a summary.
std::string RenderFindings(const std::vector<Finding>& findings);
std::string RenderFindingsJson(const std::vector<Finding>& findings);

// 1 if anything is wrong, else 0.
int ExitCodeOf(const std::vector<Finding>& findings);

}  // namespace longhaul
