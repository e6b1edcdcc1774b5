// What the coordinator remembers across a restart, and what it shows an operator. Plain values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

struct RunRecord {
  std::string run;
  uint64_t next_member = 1;
  std::string secret;  // 32 random bytes: epoch tokens derive from it
  friend bool operator==(const RunRecord&, const RunRecord&) = default;
};

// A member, pending or admitted.
struct MemberRecord {
  MemberId member;
  PeerId peer;
  uint64_t request = 0;  // of its Join
  std::string name;
  Epoch joined;        // 0: pending
  uint64_t votes = 0;  // boundaries passed (VoteResult sent)
  friend bool operator==(const MemberRecord&, const MemberRecord&) = default;
};

struct PeerRecord {
  PeerId peer;
  std::vector<std::string> endpoints;
  uint32_t lanes = 0;
  std::string host;
  friend bool operator==(const PeerRecord&, const PeerRecord&) = default;
};

// Fates of the last commit, by peer, until the next one: a peer that lost its stream between
// EpochReady and CommitEpoch asks again by attaching.
struct FatesRecord {
  PeerId peer;
  std::vector<control::OpFate> fates;
  friend bool operator==(const FatesRecord&, const FatesRecord&) = default;
};

struct GroupRecord {
  GroupKey group;
  Epoch committed;
  Epoch highest;  // highest number ever prepared
  Epoch boundary;
  Epoch attempt;
  std::vector<MemberRecord> members;  // rank order; pending ones behind
  std::vector<PeerRecord> peers;      // ring order
  std::vector<FatesRecord> fates;
  friend bool operator==(const GroupRecord&, const GroupRecord&) = default;
};

struct PutRun {
  RunRecord record;
};
struct DeleteRun {
  std::string run;
};
struct PutGroup {
  GroupRecord record;
};
struct DeleteGroup {
  GroupKey group;
};
using Mutation = std::variant<PutRun, DeleteRun, PutGroup, DeleteGroup>;

struct Records {
  std::map<std::string, RunRecord> runs;
  std::map<GroupKey, GroupRecord> groups;
  friend bool operator==(const Records&, const Records&) = default;
};

// Applies one mutation as a store would.
void Apply(const Mutation& mutation, Records* records);

// One line of `lhctl events`. `kind` is from a closed set: join, admit, leave, death, evict,
// refuse, prepare, commit, abort, link_lost, attach, detach, restart.
struct EventRecord {
  std::string kind;
  GroupKey group;    // run empty: concerns no group
  Epoch epoch;       // 0: none
  MemberId member;   // 0: none
  PeerId peer;       // 0: none
  std::string text;  // fixed words, then key=value
  friend bool operator==(const EventRecord&, const EventRecord&) = default;
};

struct MemberView {
  MemberId member;
  PeerId peer;
  std::string name;
  Epoch joined;  // 0: pending
  bool voting = false;
};
struct PeerView {
  PeerId peer;
  std::string host;
  std::string endpoint;
  bool attached = false;
  bool draining = false;
  control::GroupLoad load;
};
struct GroupView {
  GroupKey group;
  Epoch committed;
  Epoch preparing;  // 0: none
  std::string
      waiting_for;  // why the preparation or the ballot is not finished; "" if nothing waits
  std::vector<MemberView> members;  // rank order, pending ones behind
  std::vector<PeerView> ring;
};
struct Overview {
  std::string incarnation;
  std::vector<GroupView> groups;
};

}  // namespace longhaul::coordinator
