#include "coordinator/journal/journal_format.h"

#include <zlib.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/version.h"
#include "base/status_macros.h"
#include "coordinator/core/token.h"
#include "proto/control/convert.h"
#include "proto/longhaul/v1/coordinator.pb.h"

namespace longhaul::coordinator {
namespace {

void PutNumber(uint32_t number, std::string* out) {
  for (int i = 0; i < 4; ++i) out->push_back(static_cast<char>(number >> (8 * i)));
}

// A 32-byte secret has far more to guess than these 32 bits tell.
uint32_t SecretDigest(const std::string& secret) { return JournalChecksum(secret); }

void Fill(const MemberRecord& member, v1::JournalMember* proto) {
  proto->set_member(member.member.value());
  proto->set_peer(member.peer.value());
  proto->set_request(member.request);
  proto->set_name(member.name);
  proto->set_joined(member.joined.value());
  proto->set_votes(member.votes);
  proto->set_syncs(member.syncs);
  proto->set_counts(member.counts.value());
  proto->set_cohort(member.cohort);
  proto->set_cohort_size(member.cohort_size);
  proto->set_after(member.after);
  proto->set_step_deadline_ms(member.step_deadline_ms);
  if (!member.departs) return;
  proto->set_departs(static_cast<uint32_t>(member.departs->why));
  proto->set_reason(member.departs->reason);
}

absl::Status Take(const v1::JournalMember& proto, GroupRecord* group) {
  MemberRecord& member = group->members.emplace_back();
  member.member = MemberId(proto.member());
  member.peer = PeerId(proto.peer());
  member.request = proto.request();
  member.name = proto.name();
  member.joined = Epoch(proto.joined());
  member.votes = proto.votes();
  member.syncs = proto.syncs();
  member.counts = Epoch(proto.counts());
  member.cohort = proto.cohort();
  member.cohort_size = proto.cohort_size();
  member.after = proto.after();
  member.step_deadline_ms = proto.step_deadline_ms();
  if (proto.departs() == 0) return absl::OkStatus();
  if (!v1::Removal_IsValid(static_cast<int>(proto.departs()))) {
    return absl::DataLossError(absl::StrCat("a member departs by ", proto.departs()));
  }
  member.departs = Departure{static_cast<control::Removal>(proto.departs()), proto.reason()};
  return absl::OkStatus();
}

void Fill(const GroupRecord& group, v1::JournalGroup* proto) {
  proto->set_run(group.group.run);
  proto->set_group(group.group.group);
  proto->set_committed(group.committed.value());
  proto->set_highest(group.highest.value());
  proto->set_boundary(group.boundary.value());
  proto->set_attempt(group.attempt.value());
  proto->set_ballots(group.ballots);
  if (group.state) {
    proto->mutable_state()->set_revision(group.state->revision);
    proto->mutable_state()->set_high(group.state->state.high);
    proto->mutable_state()->set_low(group.state->state.low);
    proto->mutable_state()->set_manifest_high(group.state->manifest.high);
    proto->mutable_state()->set_manifest_low(group.state->manifest.low);
  }
  for (const MemberRecord& member : group.members) Fill(member, proto->add_members());
  for (const PeerRecord& peer : group.peers) {
    v1::JournalPeer* const p = proto->add_peers();
    p->set_peer(peer.peer.value());
    for (const std::string& endpoint : peer.endpoints) p->add_endpoints(endpoint);
    p->set_lanes(peer.lanes);
    p->set_host(peer.host);
  }
  for (const FatesRecord& fates : group.fates) {
    v1::JournalFates* const f = proto->add_fates();
    f->set_peer(fates.peer.value());
    for (const control::OpFate& fate : fates.fates) {
      f->add_ordinals(fate.ordinal.value());
      f->add_fates(static_cast<uint32_t>(fate.fate));
    }
    for (const control::MissedOp& op : fates.missed) {
      f->add_missed_boundaries(op.boundary.value());
      f->add_missed_tags(op.tag);
    }
  }
  for (const BlockedRecord& blocked : group.blocked) {
    v1::JournalBlocked* const b = proto->add_blocked();
    b->set_a(blocked.pair.a.value());
    b->set_b(blocked.pair.b.value());
    b->set_reason(blocked.reason);
  }
}

absl::Status Take(const v1::JournalFates& proto, GroupRecord* group) {
  FatesRecord& record = group->fates.emplace_back();
  record.peer = PeerId(proto.peer());
  if (proto.ordinals_size() != proto.fates_size()) return absl::DataLossError("fates of no op");
  for (int i = 0; i < proto.fates_size(); ++i) {
    const int fate = static_cast<int>(proto.fates(i));
    if (fate == 0 || !v1::Fate_IsValid(fate)) {
      return absl::DataLossError(absl::StrCat("a fate is ", fate));
    }
    record.fates.push_back({OpOrdinal(proto.ordinals(i)), static_cast<control::Fate>(fate)});
  }
  if (proto.missed_boundaries_size() != proto.missed_tags_size()) {
    return absl::DataLossError("a missed op has no tag");
  }
  for (int i = 0; i < proto.missed_tags_size(); ++i) {
    record.missed.push_back({Epoch(proto.missed_boundaries(i)), proto.missed_tags(i)});
  }
  return absl::OkStatus();
}

absl::StatusOr<GroupRecord> Take(const v1::JournalGroup& proto) {
  GroupRecord group;
  group.group = {proto.run(), proto.group()};
  group.committed = Epoch(proto.committed());
  group.highest = Epoch(proto.highest());
  group.boundary = Epoch(proto.boundary());
  group.attempt = Epoch(proto.attempt());
  group.ballots = proto.ballots();
  if (proto.has_state()) {
    const v1::JournalState& state = proto.state();
    group.state = StateRecord{state.revision(),
                              {state.high(), state.low()},
                              {state.manifest_high(), state.manifest_low()}};
  }
  for (const v1::JournalMember& member : proto.members()) LH_RETURN_IF_ERROR(Take(member, &group));
  for (const v1::JournalPeer& peer : proto.peers()) {
    group.peers.push_back({PeerId(peer.peer()),
                           {peer.endpoints().begin(), peer.endpoints().end()},
                           peer.lanes(),
                           peer.host()});
  }
  for (const v1::JournalFates& fates : proto.fates()) LH_RETURN_IF_ERROR(Take(fates, &group));
  for (const v1::JournalBlocked& blocked : proto.blocked()) {
    group.blocked.push_back({{PeerId(blocked.a()), PeerId(blocked.b())}, blocked.reason()});
  }
  return group;
}

void Fill(const RingScore& score, v1::JournalEvent::RingScore* proto) {
  proto->set_blocked(score.blocked);
  proto->set_unknown(score.unknown);
  proto->set_bottleneck(score.bottleneck);
  proto->set_latency_us(score.latency_us);
  proto->set_guessed(score.guessed);
}

RingScore ScoreOf(const v1::JournalEvent::RingScore& proto) {
  return {proto.blocked(), proto.unknown(), proto.bottleneck(), proto.latency_us(),
          proto.guessed()};
}

// The core decides by a peer's secret. A right one is recorded as the one that is right at a
// replay, any other as one that is always wrong.
control::PeerMessage WithoutSecrets(const control::PeerMessage& message,
                                    const std::string& entropy) {
  const auto* hello = std::get_if<control::Hello>(&message);
  if (hello == nullptr || hello->secret.empty()) return message;
  control::Hello recorded = *hello;
  const bool right = SameSecret(hello->secret, PeerSecret(entropy, hello->peer));
  recorded.secret = right ? PeerSecret(ReplayEntropy(), hello->peer) : "wrong";
  return recorded;
}

struct EventFiller {
  v1::JournalEvent* proto;
  const std::string& entropy;

  void operator()(const SessionOpened& e) const { proto->set_session_opened(e.session.value()); }
  void operator()(const SessionClosed& e) const { proto->set_session_closed(e.session.value()); }
  void operator()(const FromPeer& e) const {
    proto->mutable_from_peer()->set_session(e.session.value());
    proto->mutable_from_peer()->set_message(control::Serialize(WithoutSecrets(e.message, entropy)));
  }
  void operator()(const EvictMember& e) const {
    v1::JournalEvent::EvictMember* const evict = proto->mutable_evict();
    evict->set_run(e.group.run);
    evict->set_group(e.group.group);
    evict->set_member(e.member.value());
    evict->set_reason(e.reason);
  }
  void operator()(const DrainPeer& e) const {
    proto->mutable_drain()->set_peer(e.peer.value());
    proto->mutable_drain()->set_reason(e.reason);
  }
  void operator()(const RingOrdered& e) const {
    v1::JournalEvent::RingOrdered* const ring = proto->mutable_ring();
    ring->set_request(e.request);
    ring->set_run(e.group.run);
    ring->set_group(e.group.group);
    for (PeerId peer : e.ring) ring->add_peers(peer.value());
    Fill(e.score, ring->mutable_score());
    Fill(e.present, ring->mutable_present());
  }
  void operator()(const TimePassed&) const {}
};

}  // namespace

uint32_t JournalChecksum(const std::string& bytes) {
  return static_cast<uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size())));
}

std::string FrameOf(const v1::JournalRecord& record) {
  const std::string bytes = record.SerializeAsString();
  std::string frame;
  frame.reserve(kJournalHeadBytes + bytes.size());
  PutNumber(static_cast<uint32_t>(bytes.size()), &frame);
  PutNumber(JournalChecksum(bytes), &frame);
  return frame + bytes;
}

std::string ReplayEntropy() { return std::string(kSecretBytes, 'e'); }

v1::JournalStart StartOf(const CoreConfig& config, const Records& records) {
  v1::JournalStart start;
  start.set_format(kJournalFormat);
  start.set_version(kVersion);
  start.set_incarnation(config.incarnation);
  start.set_detect_ms(config.detect_ms);
  start.set_ring_interval_ms(config.ring_interval_ms);
  for (const auto& [name, run] : records.runs) {
    v1::JournalRun* const r = start.add_runs();
    r->set_run(name);
    r->set_next_member(run.next_member);
    r->set_secret_digest(SecretDigest(run.secret));
  }
  for (const auto& [key, group] : records.groups) Fill(group, start.add_groups());
  start.set_store(records.store.store);
  start.set_term(records.store.term);
  start.set_new_store(config.store);
  for (const auto& [peer, reason] : records.drains) {
    v1::JournalDrain* const drain = start.add_drains();
    drain->set_peer(peer.value());
    drain->set_reason(reason);
  }
  return start;
}

v1::JournalEvent EventOf(const Event& event, Tick now, const std::string& entropy) {
  v1::JournalEvent proto;
  proto.set_tick_us(now.us);
  std::visit(EventFiller{&proto, entropy}, event);
  return proto;
}

absl::StatusOr<Records> RecordsOf(const v1::JournalStart& start) {
  Records records;
  records.store = {start.store(), start.term()};
  for (const v1::JournalDrain& drain : start.drains()) {
    records.drains.emplace(PeerId(drain.peer()), drain.reason());
  }
  for (const v1::JournalRun& run : start.runs()) {
    // Tokens derive from it, and nothing is decided by a token.
    records.runs[run.run()] = {run.run(), run.next_member(), std::string(32, 's')};
  }
  for (const v1::JournalGroup& proto : start.groups()) {
    LH_ASSIGN_OR_RETURN(GroupRecord group, Take(proto));
    if (!records.runs.contains(group.group.run)) return absl::DataLossError("a group of no run");
    const GroupKey key = group.group;
    records.groups.emplace(key, std::move(group));
  }
  return records;
}

absl::StatusOr<Event> EventOf(const v1::JournalEvent& proto) {
  switch (proto.event_case()) {
    case v1::JournalEvent::kSessionOpened:
      return Event(SessionOpened{SessionId(proto.session_opened())});
    case v1::JournalEvent::kSessionClosed:
      return Event(SessionClosed{SessionId(proto.session_closed())});
    case v1::JournalEvent::kFromPeer: {
      LH_ASSIGN_OR_RETURN(control::PeerMessage message,
                          control::ParsePeerMessage(proto.from_peer().message()));
      return Event(FromPeer{SessionId(proto.from_peer().session()), std::move(message)});
    }
    case v1::JournalEvent::kEvict:
      return Event(EvictMember{{proto.evict().run(), proto.evict().group()},
                               MemberId(proto.evict().member()),
                               proto.evict().reason()});
    case v1::JournalEvent::kDrain:
      return Event(DrainPeer{PeerId(proto.drain().peer()), proto.drain().reason()});
    case v1::JournalEvent::kRing: {
      const v1::JournalEvent::RingOrdered& ring = proto.ring();
      RingOrdered event{ring.request(),
                        {ring.run(), ring.group()},
                        {},
                        ScoreOf(ring.score()),
                        ScoreOf(ring.present())};
      for (const uint64_t peer : ring.peers()) event.ring.emplace_back(peer);
      return Event(std::move(event));
    }
    case v1::JournalEvent::EVENT_NOT_SET:
      break;
  }
  return Event(TimePassed{});
}

}  // namespace longhaul::coordinator
