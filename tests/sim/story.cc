#include "tests/sim/story.h"

#include <cstdio>

#include "proto/control/convert.h"

namespace longhaul::sim {
namespace {

template <class List, class Text>
std::string Join(const List& list, const Text& text) {
  std::string out;
  for (const auto& item : list) {
    if (!out.empty()) out += ",";
    out += text(item);
  }
  return out.empty() ? "-" : out;
}

std::string Number(uint64_t value) { return std::to_string(value); }

const char* FateName(control::Fate fate) {
  switch (fate) {
    case control::Fate::kCommit:
      return "commit";
    case control::Fate::kRedo:
      return "redo";
    case control::Fate::kAbort:
      return "abort";
  }
  return "?";
}

const char* RemovalName(control::Removal why) {
  switch (why) {
    case control::Removal::kLeft:
      return "left";
    case control::Removal::kDied:
      return "died";
    case control::Removal::kEvicted:
      return "evicted";
    case control::Removal::kUnreachable:
      return "unreachable";
    case control::Removal::kUnknown:
      return "unknown";
  }
  return "?";
}

const char* CodeName(Code code) {
  static constexpr const char* kNames[] = {"ok",
                                           "invalid argument",
                                           "failed precondition",
                                           "unavailable",
                                           "aborted",
                                           "deadline exceeded",
                                           "too few members",
                                           "evicted",
                                           "state mismatch",
                                           "internal"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "?";
}

struct Details {
  std::string operator()(const control::Hello& m) const {
    return " groups=" + Join(m.groups, [](const control::GroupState& g) {
             return ToString(g.group) + "@" + ToString(g.committed) + "[" +
                    Join(g.members, [](MemberId id) { return ToString(id); }) + "]";
           });
  }
  std::string operator()(const control::Join& m) const { return Group(m.group); }
  std::string operator()(const control::Leave& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + (m.died ? " died" : "");
  }
  std::string operator()(const control::Vote& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " number=" + Number(m.number);
  }
  std::string operator()(const control::EpochReady& m) const {
    return Group(m.group) + " epoch=" + ToString(m.epoch) +
           " ops=" + Join(m.ops, [](const control::OpReport& op) {
             return ToString(op.ordinal) + (op.done ? "(done)" : "(not done)");
           });
  }
  std::string operator()(const control::EpochFailed& m) const {
    return Group(m.group) + " epoch=" + ToString(m.epoch) + " unreachable=" +
           Join(m.unreachable, [](const control::Unreachable& u) { return ToString(u.peer); });
  }
  std::string operator()(const control::LinkLost& m) const {
    return Group(m.group) + " epoch=" + ToString(m.epoch) + " peer=" + ToString(m.peer) +
           " reason=\"" + m.reason + "\"";
  }
  std::string operator()(const control::Heartbeat&) const { return ""; }
  std::string operator()(const control::Draining&) const { return ""; }
  std::string operator()(const control::Welcome&) const { return ""; }
  std::string operator()(const control::JoinPending& m) const {
    return Group(m.group) + " member=" + ToString(m.member);
  }
  std::string operator()(const control::JoinRefused& m) const {
    return Group(m.group) + " " + Describe(m.outcome);
  }
  std::string operator()(const control::VoteResult& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " number=" + Number(m.number) +
           " epoch=" + ToString(m.epoch);
  }
  std::string operator()(const control::PrepareEpoch& m) const {
    return Group(m.group) + " epoch=" + ToString(m.epoch) + " base=" + ToString(m.base) +
           " boundary=" + ToString(m.boundary) + " last_freeze=" + ToString(m.last_freeze) +
           (m.freeze ? " freeze" : "") + " members=" +
           Join(m.members, [](const control::MemberInfo& i) { return ToString(i.member); }) +
           " ring=" + Join(m.peers, [](const control::PeerInfo& i) { return ToString(i.peer); }) +
           " cause=\"" + m.cause + "\"";
  }
  std::string operator()(const control::CommitEpoch& m) const {
    return Group(m.group) + " epoch=" + ToString(m.epoch) + " fates=" +
           Join(m.fates,
                [](const control::OpFate& f) {
                  return ToString(f.ordinal) + ":" + FateName(f.fate);
                }) +
           (m.missed.empty() ? "" : " missed=" + Join(m.missed, [](const control::MissedOp& op) {
                                      return ToString(op.boundary) + "/" + std::to_string(op.tag);
                                    }));
  }
  std::string operator()(const control::AbortEpoch& m) const {
    return Group(m.group) + " epoch=" + ToString(m.epoch);
  }
  std::string operator()(const control::Removed& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " why=" + RemovalName(m.why) +
           " reason=\"" + m.reason + "\"";
  }
  std::string operator()(const control::PendingCount& m) const {
    return Group(m.group) + " count=" + Number(m.count);
  }
  std::string operator()(const control::Drain&) const { return ""; }
  std::string operator()(const control::SyncVote& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " number=" + Number(m.offer.number) +
           " revision=" + Number(m.offer.revision) + " state=" + ToString(m.offer.state);
  }
  std::string operator()(const control::FetchDone& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " number=" + Number(m.number) + " " +
           Describe(m.outcome);
  }
  std::string operator()(const control::LinkReport& m) const {
    return " links=" +
           Join(m.links,
                [](const control::LinkMeasure& l) {
                  return ToString(l.from) + ">" + ToString(l.to) + ":" +
                         Number(l.bytes_per_second) + (l.held ? " held" : "");
                }) +
           " up=" + Number(m.up_bytes_per_second) + " down=" + Number(m.down_bytes_per_second);
  }
  std::string operator()(const control::PeerTried& m) const {
    return Group(m.group) + " trial=" + Number(m.trial) + " peer=" + ToString(m.peer) +
           " reason=\"" + m.reason + "\"";
  }
  std::string operator()(const control::CancelOp& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " after=" + ToString(m.after) + " " +
           m.what;
  }
  std::string operator()(const control::Dispute& m) const {
    return Group(m.group) + " peer=" + ToString(m.peer) + " attempt=" + ToString(m.attempt) +
           " statements=" + Number(m.statements.size()) + " " + m.what;
  }
  std::string operator()(const control::TryPeer& m) const {
    return Group(m.group) + " trial=" + Number(m.trial) + " peer=" + ToString(m.peer.peer);
  }
  std::string operator()(const control::StateAgreed& m) const {
    return "StateAgreed revision=" + std::to_string(m.revision) + " state=" + ToString(m.state);
  }
  std::string operator()(const control::SyncResult& m) const {
    return Group(m.group) + " member=" + ToString(m.member) + " number=" + Number(m.number) +
           " action=" + Number(static_cast<uint64_t>(m.action)) + " " + Describe(m.outcome) +
           " sources=" +
           Join(m.sources, [](const control::SyncSource& s) { return ToString(s.member); });
  }

  static std::string Group(const GroupKey& group) { return " group=" + ToString(group); }
};

}  // namespace

void Story::Write(Tick now, const std::string& text) {
  char time[32];
  std::snprintf(time, sizeof time, "%9.2f ms  ", static_cast<double>(now.us) / 1000);
  lines_.push_back(time + text);
  if (mode_ == Mode::kPrint) std::printf("%s\n", lines_.back().c_str());
}

std::string Describe(const control::PeerMessage& message) {
  return control::Name(message) + std::visit(Details(), message);
}
std::string Describe(const control::CoordinatorMessage& message) {
  return control::Name(message) + std::visit(Details(), message);
}

std::string Describe(const FrameHeader& header) {
  switch (header.type) {
    case FrameType::kReady:
      return "READY ordinal=" + ToString(header.op) + " attempt=" + ToString(header.attempt);
    case FrameType::kDone:
      return "DONE to=" + ToString(header.op) + " attempt=" + ToString(header.attempt) +
             ((header.flags & kFlagRefused) != 0 ? " refused" : "");
    case FrameType::kData:
      return std::string("DATA to=") + ToString(header.op) +
             " attempt=" + ToString(header.attempt) +
             (header.phase == Phase::kReduce ? " reduce" : " gather") +
             " offset=" + Number(header.offset) + " bytes=" + Number(header.payload_bytes);
    case FrameType::kChunkRequest:
    case FrameType::kChunkRefused:
    case FrameType::kChunkCancel:
      return std::string(header.type == FrameType::kChunkRequest   ? "CHUNK_REQUEST"
                         : header.type == FrameType::kChunkRefused ? "CHUNK_REFUSED"
                                                                   : "CHUNK_CANCEL") +
             " transfer=" + ToString(header.op) + " ask=" + ToString(header.attempt);
    default:
      return "frame";
  }
}

std::string Describe(const Outcome& outcome) {
  return std::string(CodeName(outcome.code)) +
         (outcome.text.empty() ? "" : " \"" + outcome.text + "\"");
}

}  // namespace longhaul::sim
