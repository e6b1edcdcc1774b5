#include "proto/control/convert.h"

#include <algorithm>
#include <set>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "proto/longhaul/v1/coordinator.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::control {
namespace {

constexpr size_t kTextMax = LH_ERROR_TEXT_BYTES_MAX;
constexpr size_t kLabelMax = 128;  // versions, names of hosts and of coordinators
constexpr size_t kMissedMax = 262144;
constexpr size_t kOpsMax = size_t{LH_LOCAL_MEMBERS_MAX} * LH_OPS_OPEN_MAX;

std::string Text(const std::string& text) { return CleanText(text, kTextMax); }
std::string Label(const std::string& text) { return CleanText(text, kLabelMax); }

// ------------------------------------------------------------------------------ checks

absl::Status Refuse(const char* field, const std::string& seen, const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", CleanText(seen, 80), ", not ", wanted));
}

absl::Status CheckId(const char* field, uint64_t value) {
  if (value == 0) return Refuse(field, "0", "an id");
  return absl::OkStatus();
}

absl::Status CheckCount(const char* field, int count, size_t min, size_t max) {
  const size_t n = static_cast<size_t>(count);
  if (n < min || n > max) {
    return Refuse(field, absl::StrCat(n, " long"), absl::StrCat(min, " to ", max));
  }
  return absl::OkStatus();
}

absl::Status CheckName(const char* field, const std::string& name, size_t min, size_t max) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  bool good = name.size() >= min && name.size() <= max;
  for (size_t i = 0; good && i < name.size(); ++i) good = allowed(name[i]);
  if (good) return absl::OkStatus();
  return Refuse(field, absl::StrCat("\"", name, "\""),
                absl::StrCat(min, " to ", max, " bytes of [A-Za-z0-9._-]"));
}

absl::Status CheckEndpoint(const std::string& endpoint) {
  absl::Status refusal =
      Refuse("endpoint", absl::StrCat("\"", endpoint, "\""), "host:port of at most 256 bytes");
  if (endpoint.size() > LH_ENDPOINT_BYTES_MAX) return refusal;
  for (const char c : endpoint) {
    if (c <= ' ' || c > '~') return refusal;
  }
  const size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos || colon == 0) return refusal;
  const std::string port = endpoint.substr(colon + 1);
  if (port.empty() || port.size() > 5) return refusal;
  uint32_t number = 0;
  for (const char c : port) {
    if (c < '0' || c > '9') return refusal;
    number = number * 10 + static_cast<uint32_t>(c - '0');
  }
  return number >= 1 && number <= 65535 ? absl::OkStatus() : refusal;
}

// Values of one list, each at most once.
template <class T>
class Unique {
 public:
  explicit Unique(const char* field) : field_(field) {}
  absl::Status Add(T id) {
    LH_RETURN_IF_ERROR(CheckId(field_, id.value()));
    if (!seen_.insert(id).second) {
      return absl::InvalidArgumentError(absl::StrCat(field_, " ", ToString(id), " comes twice"));
    }
    return absl::OkStatus();
  }
  bool Contains(T id) const { return seen_.contains(id); }
  size_t size() const { return seen_.size(); }

 private:
  const char* const field_;
  std::set<T> seen_;
};

// ------------------------------------------------------------------------------ shared parts

void Put(const GroupKey& group, v1::GroupKey* out) {
  out->set_run(group.run);
  out->set_group(group.group);
}

absl::Status Get(const v1::GroupKey& in, GroupKey* out) {
  LH_RETURN_IF_ERROR(CheckName("run", in.run(), 1, LH_RUN_NAME_BYTES_MAX));
  out->run = in.run();
  out->group = in.group();
  return absl::OkStatus();
}

// An id of type T that the message needs.
template <class T>
absl::Status Get(const char* field, uint64_t in, T* out) {
  LH_RETURN_IF_ERROR(CheckId(field, in));
  *out = T(in);
  return absl::OkStatus();
}

template <class Repeated>
absl::Status GetEndpoints(const Repeated& in, std::vector<std::string>* out) {
  LH_RETURN_IF_ERROR(CheckCount("endpoints", in.size(), 1, LH_ENDPOINTS_MAX));
  for (const std::string& endpoint : in) {
    LH_RETURN_IF_ERROR(CheckEndpoint(endpoint));
    out->push_back(endpoint);
  }
  return absl::OkStatus();
}

absl::Status GetSecret(const std::string& in, std::string* out) {
  if (in.size() > LH_PEER_SECRET_BYTES_MAX) {
    return Refuse("secret", absl::StrCat(in.size(), " bytes long"),
                  absl::StrCat("at most ", LH_PEER_SECRET_BYTES_MAX));
  }
  *out = in;
  return absl::OkStatus();
}

absl::Status GetLanes(uint32_t in, uint32_t* out) {
  if (in > LH_LANES_MAX) return Refuse("lanes", absl::StrCat(in), "at most 256");
  *out = in;
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------ peer to
// coordinator

void Put(const Hello& in, v1::Hello* out) {
  out->set_peer(in.peer.value());
  for (const std::string& endpoint : in.endpoints) out->add_endpoints(endpoint);
  out->set_protocol(in.protocol);
  out->set_lanes(in.lanes);
  out->set_version(Label(in.version));
  out->set_host(Label(in.host));
  out->set_secret(in.secret);
  for (const GroupState& group : in.groups) {
    v1::GroupState* const state = out->add_groups();
    Put(group.group, state->mutable_group());
    state->set_committed(group.committed.value());
    for (const MemberId member : group.members) state->add_members(member.value());
    state->set_prepared(group.prepared.value());
    state->set_preparation(group.preparation);
    state->set_frozen(group.frozen);
  }
  out->set_store(in.store);
  out->set_term(in.term);
  out->set_coordinator(Label(in.coordinator));
}

absl::Status GetPrepared(const v1::GroupState& in, GroupState* out) {
  out->prepared = Epoch(in.prepared());
  out->preparation = in.preparation();
  out->frozen = in.frozen();
  const bool there = out->prepared.value() != 0;
  if (there != (out->preparation != 0) || (out->frozen && !there)) {
    return Refuse("prepared", absl::StrCat(in.prepared(), " with preparation ", in.preparation()),
                  "both or none");
  }
  return absl::OkStatus();
}

absl::Status Get(const v1::Hello& in, Hello* out) {
  LH_RETURN_IF_ERROR(Get("peer", in.peer(), &out->peer));
  LH_RETURN_IF_ERROR(GetEndpoints(in.endpoints(), &out->endpoints));
  out->protocol = in.protocol();
  LH_RETURN_IF_ERROR(GetLanes(in.lanes(), &out->lanes));
  out->version = Label(in.version());
  out->host = Label(in.host());
  LH_RETURN_IF_ERROR(GetSecret(in.secret(), &out->secret));
  LH_RETURN_IF_ERROR(CheckCount("groups", in.groups_size(), 0, LH_GROUPS_MAX));
  std::set<GroupKey> seen;
  for (const v1::GroupState& group : in.groups()) {
    GroupState& state = out->groups.emplace_back();
    LH_RETURN_IF_ERROR(Get(group.group(), &state.group));
    if (!seen.insert(state.group).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("group ", ToString(state.group), " comes twice"));
    }
    state.committed = Epoch(group.committed());
    LH_RETURN_IF_ERROR(CheckCount("members", group.members_size(), 0, LH_LOCAL_MEMBERS_MAX));
    Unique<MemberId> members("member");
    for (const uint64_t member : group.members()) {
      LH_RETURN_IF_ERROR(members.Add(MemberId(member)));
      state.members.push_back(MemberId(member));
    }
    LH_RETURN_IF_ERROR(GetPrepared(group, &state));
  }
  out->store = in.store();
  out->term = in.term();
  out->coordinator = Label(in.coordinator());
  return absl::OkStatus();
}

void Put(const Join& in, v1::Join* out) {
  out->set_request(in.request);
  Put(in.group, out->mutable_group());
  out->set_name(in.name);
  out->set_cohort(in.cohort);
  out->set_cohort_size(in.cohort_size);
  out->set_step_deadline_ms(in.step_deadline_ms);
  out->set_background(in.background);
}

absl::Status Get(const v1::Join& in, Join* out) {
  LH_RETURN_IF_ERROR(Get("request", in.request(), &out->request));
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(CheckName("name", in.name(), 0, LH_MEMBER_NAME_BYTES_MAX));
  out->name = in.name();
  LH_RETURN_IF_ERROR(CheckName("cohort", in.cohort(), 0, LH_COHORT_NAME_BYTES_MAX));
  out->cohort = in.cohort();
  if (in.cohort_size() > LH_COHORT_MEMBERS_MAX || in.cohort().empty() != (in.cohort_size() == 0)) {
    return Refuse("cohort_size", absl::StrCat(in.cohort_size()),
                  in.cohort().empty() ? "0, as there is no cohort" : "1 to 256");
  }
  out->cohort_size = in.cohort_size();
  if (in.step_deadline_ms() > LH_STEP_DEADLINE_MS_MAX) {
    return Refuse("step_deadline_ms", absl::StrCat(in.step_deadline_ms()), "at most 86400000");
  }
  out->step_deadline_ms = in.step_deadline_ms();
  out->background = in.background();
  return absl::OkStatus();
}

void Put(const Leave& in, v1::Leave* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  out->set_died(in.died);
  out->set_reason(Text(in.reason));
}

absl::Status Get(const v1::Leave& in, Leave* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  out->died = in.died();
  out->reason = Text(in.reason());
  return absl::OkStatus();
}

void Put(const Hash128& in, v1::Hash128* out) {
  out->set_high(in.high);
  out->set_low(in.low);
}

Hash128 Get(const v1::Hash128& in) { return {in.high(), in.low()}; }

void Put(const SyncOffer& in, v1::SyncOffer* out) {
  out->set_number(in.number);
  out->set_strategy(static_cast<v1::SyncStrategy>(in.strategy));
  out->set_revision(in.revision);
  Put(in.manifest, out->mutable_manifest());
  Put(in.state, out->mutable_state());
  out->set_incomplete(!in.complete);
  out->set_kept(in.kept);
  out->set_unsettled(in.unsettled);
}

absl::Status Get(const v1::SyncOffer& in, SyncOffer* out) {
  LH_RETURN_IF_ERROR(Get("number of the offer", in.number(), &out->number));
  if (in.strategy() == v1::SYNC_STRATEGY_UNSPECIFIED || !v1::SyncStrategy_IsValid(in.strategy())) {
    return Refuse("strategy", absl::StrCat(in.strategy()), "1 to 3");
  }
  out->strategy = static_cast<SyncStrategy>(in.strategy());
  // The next revision has to be a number, too.
  if (in.revision() > LH_REVISION_MAX) {
    return Refuse("revision", absl::StrCat(in.revision()), "at most 2^63");
  }
  out->revision = in.revision();
  out->manifest = Get(in.manifest());
  out->state = Get(in.state());
  out->complete = !in.incomplete();
  out->kept = in.kept();
  out->unsettled = in.unsettled();
  if (out->unsettled && out->complete) {
    return Refuse("offer", "complete and unsettled", "one of the two");
  }
  if (!out->complete && out->strategy == SyncStrategy::kSend) {
    return Refuse("offer", "incomplete", "one of a member that sends");
  }
  return absl::OkStatus();
}

void Put(const SyncVote& in, v1::SyncVote* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  Put(in.offer, out->mutable_offer());
}

absl::Status Get(const v1::SyncVote& in, SyncVote* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  return Get(in.offer(), &out->offer);
}

template <class Message, class Proto>
absl::Status GetOutcome(const Proto& in, Message* out) {
  if (!v1::Code_IsValid(in.code())) return Refuse("code", absl::StrCat(in.code()), "0 to 9");
  out->outcome = {static_cast<Code>(in.code()), Text(in.text())};
  return absl::OkStatus();
}

template <class Repeated>
absl::Status GetMembers(const char* field, const Repeated& in, std::vector<MemberId>* out) {
  LH_RETURN_IF_ERROR(CheckCount(field, in.size(), 0, LH_SYNC_SOURCES_MAX));
  Unique<MemberId> members(field);
  for (const uint64_t member : in) {
    LH_RETURN_IF_ERROR(members.Add(MemberId(member)));
    out->push_back(MemberId(member));
  }
  return absl::OkStatus();
}

void Put(const SyncDone& in, v1::SyncDone* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  out->set_number(in.number);
  out->set_code(static_cast<v1::Code>(in.outcome.code));
  out->set_text(Text(in.outcome.text));
  Put(in.state, out->mutable_state());
  out->set_bytes(in.bytes);
  for (const MemberId member : in.sources) out->add_sources(member.value());
  for (const MemberId member : in.corrupt) out->add_corrupt(member.value());
}

absl::Status Get(const v1::SyncDone& in, SyncDone* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  LH_RETURN_IF_ERROR(Get("number", in.number(), &out->number));
  LH_RETURN_IF_ERROR(GetOutcome(in, out));
  out->state = Get(in.state());
  out->bytes = in.bytes();
  LH_RETURN_IF_ERROR(GetMembers("sources", in.sources(), &out->sources));
  return GetMembers("corrupt", in.corrupt(), &out->corrupt);
}

void Put(const Vote& in, v1::Vote* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  out->set_number(in.number);
  if (in.sync) Put(*in.sync, out->mutable_sync());
  out->set_ready(in.ready);
}

absl::Status Get(const v1::Vote& in, Vote* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  LH_RETURN_IF_ERROR(Get("number", in.number(), &out->number));
  out->ready = in.ready();
  if (!in.has_sync()) return absl::OkStatus();
  return Get(in.sync(), &out->sync.emplace());
}

void Put(const OpReport& in, v1::OpReport* out) {
  out->set_ordinal(in.ordinal.value());
  out->set_boundary(in.boundary.value());
  out->set_tag(in.tag);
  out->set_done(in.done);
  out->set_abort_on_fault(in.abort_on_fault);
  for (const OpMatch& match : in.matches) {
    v1::OpMatch* const m = out->add_matches();
    m->set_peer(match.peer.value());
    m->set_ordinal(match.ordinal.value());
  }
}

absl::Status Get(const v1::OpReport& in, OpReport* out) {
  LH_RETURN_IF_ERROR(Get("ordinal", in.ordinal(), &out->ordinal));
  LH_RETURN_IF_ERROR(Get("boundary", in.boundary(), &out->boundary));
  out->tag = in.tag();
  out->done = in.done();
  out->abort_on_fault = in.abort_on_fault();
  LH_RETURN_IF_ERROR(CheckCount("matches", in.matches_size(), 0, LH_MEMBERS_MAX));
  Unique<PeerId> peers("peer of matches");
  for (const v1::OpMatch& match : in.matches()) {
    LH_RETURN_IF_ERROR(peers.Add(PeerId(match.peer())));
    OpMatch& m = out->matches.emplace_back();
    m.peer = PeerId(match.peer());
    LH_RETURN_IF_ERROR(Get("ordinal of matches", match.ordinal(), &m.ordinal));
  }
  return absl::OkStatus();
}

void Put(const EpochReady& in, v1::EpochReady* out) {
  Put(in.group, out->mutable_group());
  out->set_epoch(in.epoch.value());
  for (const OpReport& op : in.ops) Put(op, out->add_ops());
  out->set_preparation(in.preparation);
}

absl::Status Get(const v1::EpochReady& in, EpochReady* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("epoch", in.epoch(), &out->epoch));
  LH_RETURN_IF_ERROR(CheckCount("ops", in.ops_size(), 0, kOpsMax));
  Unique<OpOrdinal> ordinals("ordinal");
  for (const v1::OpReport& op : in.ops()) {
    LH_RETURN_IF_ERROR(Get(op, &out->ops.emplace_back()));
    LH_RETURN_IF_ERROR(ordinals.Add(out->ops.back().ordinal));
  }
  return Get("preparation", in.preparation(), &out->preparation);
}

void Put(const EpochFailed& in, v1::EpochFailed* out) {
  Put(in.group, out->mutable_group());
  out->set_epoch(in.epoch.value());
  for (const Unreachable& unreachable : in.unreachable) {
    v1::Unreachable* const u = out->add_unreachable();
    u->set_peer(unreachable.peer.value());
    u->set_reason(Text(unreachable.reason));
  }
  out->set_preparation(in.preparation);
}

absl::Status Get(const v1::EpochFailed& in, EpochFailed* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("epoch", in.epoch(), &out->epoch));
  LH_RETURN_IF_ERROR(CheckCount("unreachable", in.unreachable_size(), 1, LH_MEMBERS_MAX));
  Unique<PeerId> peers("peer of unreachable");
  for (const v1::Unreachable& unreachable : in.unreachable()) {
    LH_RETURN_IF_ERROR(peers.Add(PeerId(unreachable.peer())));
    out->unreachable.push_back({PeerId(unreachable.peer()), Text(unreachable.reason())});
  }
  return Get("preparation", in.preparation(), &out->preparation);
}

void Put(const LinkLost& in, v1::LinkLost* out) {
  Put(in.group, out->mutable_group());
  out->set_epoch(in.epoch.value());
  out->set_peer(in.peer.value());
  out->set_reason(Text(in.reason));
  out->set_silent_ms(in.silent_ms);
}

absl::Status Get(const v1::LinkLost& in, LinkLost* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("epoch", in.epoch(), &out->epoch));
  LH_RETURN_IF_ERROR(Get("peer", in.peer(), &out->peer));
  out->reason = Text(in.reason());
  // It is for people and histograms: what cannot be is cut, not refused.
  out->silent_ms = std::min(in.silent_ms(), LH_DETECT_MS_MAX);
  return absl::OkStatus();
}

void Put(const Heartbeat& in, v1::Heartbeat* out) {
  for (const GroupLoad& load : in.loads) {
    v1::GroupLoad* const l = out->add_loads();
    Put(load.group, l->mutable_group());
    l->set_ops_open(load.ops_open);
    l->set_ops_settled(load.ops_settled);
    l->set_bytes_sent(load.bytes_sent);
    l->set_bytes_received(load.bytes_received);
  }
  for (const FetchLoad& fetch : in.fetches) {
    v1::FetchLoad* const f = out->add_fetches();
    Put(fetch.group, f->mutable_group());
    f->set_member(fetch.member.value());
    f->set_bytes_done(fetch.progress.bytes_done);
    f->set_bytes_total(fetch.progress.bytes_total);
    f->set_bytes_per_second(fetch.progress.bytes_per_second);
    f->set_sources(fetch.progress.sources);
  }
}

absl::Status Get(const v1::Heartbeat& in, Heartbeat* out) {
  LH_RETURN_IF_ERROR(CheckCount("loads", in.loads_size(), 0, LH_GROUPS_MAX));
  for (const v1::GroupLoad& load : in.loads()) {
    GroupLoad& l = out->loads.emplace_back();
    LH_RETURN_IF_ERROR(Get(load.group(), &l.group));
    l.ops_open = load.ops_open();
    l.ops_settled = load.ops_settled();
    l.bytes_sent = load.bytes_sent();
    l.bytes_received = load.bytes_received();
  }
  LH_RETURN_IF_ERROR(CheckCount("fetches", in.fetches_size(), 0, LH_LOCAL_MEMBERS_MAX));
  for (const v1::FetchLoad& fetch : in.fetches()) {
    FetchLoad& f = out->fetches.emplace_back();
    LH_RETURN_IF_ERROR(Get(fetch.group(), &f.group));
    LH_RETURN_IF_ERROR(Get("member", fetch.member(), &f.member));
    f.progress.bytes_done = fetch.bytes_done();
    f.progress.bytes_total = fetch.bytes_total();
    f.progress.bytes_per_second = fetch.bytes_per_second();
    f.progress.sources = fetch.sources();
  }
  return absl::OkStatus();
}

void Put(const Draining&, v1::Draining*) {}
absl::Status Get(const v1::Draining&, Draining*) { return absl::OkStatus(); }

void Put(const LinkReport& in, v1::LinkReport* out) {
  for (const LinkMeasure& link : in.links) {
    v1::LinkMeasure* const l = out->add_links();
    l->set_from(link.from.value());
    l->set_to(link.to.value());
    l->set_bytes_per_second(link.bytes_per_second);
    l->set_rtt_us(link.rtt_us);
    l->set_age_ms(link.age_ms);
    l->set_at_least(link.at_least);
  }
}

absl::Status Get(const v1::LinkReport& in, LinkReport* out) {
  LH_RETURN_IF_ERROR(CheckCount("links", in.links_size(), 0, kLinkMeasuresMax));
  std::set<std::pair<PeerId, PeerId>> seen;
  for (const v1::LinkMeasure& link : in.links()) {
    LinkMeasure& l = out->links.emplace_back();
    LH_RETURN_IF_ERROR(Get("from", link.from(), &l.from));
    LH_RETURN_IF_ERROR(Get("to", link.to(), &l.to));
    if (l.from == l.to) return Refuse("to", ToString(l.to), "another peer than from");
    if (!seen.emplace(l.from, l.to).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("link from ", ToString(l.from), " to ", ToString(l.to), " comes twice"));
    }
    l.bytes_per_second = link.bytes_per_second();
    l.rtt_us = link.rtt_us();
    if (l.bytes_per_second == 0 && l.rtt_us == 0) {
      return Refuse("bytes_per_second", "0, and so is rtt_us", "a measurement");
    }
    l.age_ms = link.age_ms();
    l.at_least = link.at_least();
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------ coordinator to
// peer

void Put(const Welcome& in, v1::Welcome* out) {
  out->set_coordinator(Label(in.coordinator));
  out->set_detect_ms(in.detect_ms);
  out->set_secret(in.secret);
  out->set_store(in.store);
  out->set_term(in.term);
}

absl::Status Get(const v1::Welcome& in, Welcome* out) {
  out->coordinator = Label(in.coordinator());
  if (in.detect_ms() == 0 || in.detect_ms() > LH_DETECT_MS_MAX) {
    return Refuse("detect_ms", absl::StrCat(in.detect_ms()), "1 to 3600000");
  }
  out->detect_ms = in.detect_ms();
  LH_RETURN_IF_ERROR(GetSecret(in.secret(), &out->secret));
  LH_RETURN_IF_ERROR(Get("store", in.store(), &out->store));
  return Get("term", in.term(), &out->term);
}

void Put(const JoinPending& in, v1::JoinPending* out) {
  out->set_request(in.request);
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
}

absl::Status Get(const v1::JoinPending& in, JoinPending* out) {
  LH_RETURN_IF_ERROR(Get("request", in.request(), &out->request));
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  return Get("member", in.member(), &out->member);
}

void Put(const JoinRefused& in, v1::JoinRefused* out) {
  out->set_request(in.request);
  Put(in.group, out->mutable_group());
  out->set_code(static_cast<v1::Code>(in.outcome.code));
  out->set_text(Text(in.outcome.text));
}

absl::Status Get(const v1::JoinRefused& in, JoinRefused* out) {
  LH_RETURN_IF_ERROR(Get("request", in.request(), &out->request));
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  if (in.code() == v1::CODE_OK || !v1::Code_IsValid(in.code())) {
    return Refuse("code", absl::StrCat(in.code()), "one of an error");
  }
  out->outcome = {static_cast<Code>(in.code()), Text(in.text())};
  return absl::OkStatus();
}

void Put(const VoteResult& in, v1::VoteResult* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  out->set_number(in.number);
  out->set_epoch(in.epoch.value());
}

absl::Status Get(const v1::VoteResult& in, VoteResult* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  LH_RETURN_IF_ERROR(Get("number", in.number(), &out->number));
  return Get("epoch", in.epoch(), &out->epoch);
}

void Put(const PrepareEpoch& in, v1::PrepareEpoch* out) {
  Put(in.group, out->mutable_group());
  out->set_epoch(in.epoch.value());
  out->set_base(in.base.value());
  out->set_boundary(in.boundary.value());
  out->set_attempt(in.attempt.value());
  out->set_freeze(in.freeze);
  for (const MemberInfo& member : in.members) {
    v1::MemberInfo* const m = out->add_members();
    m->set_member(member.member.value());
    m->set_peer(member.peer.value());
    m->set_joined(member.joined.value());
    m->set_name(member.name);
    m->set_counts(member.counts.value());
  }
  for (const PeerInfo& peer : in.peers) {
    v1::PeerInfo* const p = out->add_peers();
    p->set_peer(peer.peer.value());
    for (const std::string& endpoint : peer.endpoints) p->add_endpoints(endpoint);
    p->set_lanes(peer.lanes);
  }
  for (const BlockedPair& pair : in.blocked) {
    v1::BlockedPair* const b = out->add_blocked();
    b->set_a(pair.a.value());
    b->set_b(pair.b.value());
  }
  out->set_token(in.token);
  out->set_cause(Text(in.cause));
  out->set_preparation(in.preparation);
  if (in.cost == LinkCost{}) return;
  out->mutable_cost()->set_latency_us(in.cost.latency_us);
  out->mutable_cost()->set_bytes_per_second(in.cost.bytes_per_second);
  out->mutable_cost()->set_ring_bytes_per_second(in.cost.ring_bytes_per_second);
}

absl::Status GetPeers(const v1::PrepareEpoch& in, PrepareEpoch* out, Unique<PeerId>* peers) {
  LH_RETURN_IF_ERROR(CheckCount("peers", in.peers_size(), 1, LH_MEMBERS_MAX));
  for (const v1::PeerInfo& peer : in.peers()) {
    PeerInfo& p = out->peers.emplace_back();
    p.peer = PeerId(peer.peer());
    LH_RETURN_IF_ERROR(peers->Add(p.peer));
    LH_RETURN_IF_ERROR(GetEndpoints(peer.endpoints(), &p.endpoints));
    LH_RETURN_IF_ERROR(GetLanes(peer.lanes(), &p.lanes));
  }
  return absl::OkStatus();
}

absl::Status GetMembers(const v1::PrepareEpoch& in, PrepareEpoch* out,
                        const Unique<PeerId>& peers) {
  LH_RETURN_IF_ERROR(CheckCount("members", in.members_size(), 1, LH_MEMBERS_MAX));
  Unique<MemberId> members("member");
  std::set<PeerId> used;
  for (const v1::MemberInfo& member : in.members()) {
    MemberInfo& m = out->members.emplace_back();
    m.member = MemberId(member.member());
    LH_RETURN_IF_ERROR(members.Add(m.member));
    m.peer = PeerId(member.peer());
    if (!peers.Contains(m.peer)) {
      return Refuse("peer of a member", ToString(m.peer), "one of peers");
    }
    used.insert(m.peer);
    if (member.joined() == 0 || member.joined() > in.epoch()) {
      return Refuse("joined", absl::StrCat(member.joined()), "an epoch up to this one");
    }
    m.joined = Epoch(member.joined());
    LH_RETURN_IF_ERROR(CheckName("name", member.name(), 0, LH_MEMBER_NAME_BYTES_MAX));
    m.name = member.name();
    m.counts = Epoch(member.counts());
    if (m.counts > Epoch(in.epoch()) && m.counts != kCountsNotYet) {
      return Refuse("counts", absl::StrCat(member.counts()),
                    "an epoch up to this one, or 2^64 - 1");
    }
  }
  if (used.size() != peers.size()) {
    return Refuse("peers", absl::StrCat(peers.size(), " long"),
                  absl::StrCat("the ", used.size(), " that have members"));
  }
  return absl::OkStatus();
}

absl::Status GetBlocked(const v1::PrepareEpoch& in, PrepareEpoch* out) {
  LH_RETURN_IF_ERROR(CheckCount("blocked", in.blocked_size(), 0, LH_BLOCKED_PAIRS_MAX));
  if (in.blocked_size() == 0) return absl::OkStatus();
  for (const v1::BlockedPair& pair : in.blocked()) {
    out->blocked.push_back({PeerId(pair.a()), PeerId(pair.b())});
  }
  std::vector<PeerId> ring;
  for (const PeerInfo& peer : out->peers) ring.push_back(peer.peer);
  const std::string fault = RingFault(ring, out->blocked);
  return fault.empty() ? absl::OkStatus() : absl::InvalidArgumentError(fault);
}

absl::Status Get(const v1::PrepareEpoch& in, PrepareEpoch* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("epoch", in.epoch(), &out->epoch));
  LH_RETURN_IF_ERROR(Get("boundary", in.boundary(), &out->boundary));
  out->base = Epoch(in.base());
  out->attempt = Epoch(in.attempt());
  out->freeze = in.freeze();
  if (out->base >= out->epoch || out->boundary > out->epoch || out->attempt > out->epoch ||
      out->freeze != (out->attempt == out->epoch)) {
    return Refuse("epoch",
                  absl::StrCat(in.epoch(), " after ", in.base(), " with boundary ", in.boundary(),
                               ", attempt ", in.attempt(), ", freeze ", in.freeze() ? 1 : 0),
                  "above its base and consistent");
  }
  Unique<PeerId> peers("peer");
  LH_RETURN_IF_ERROR(GetPeers(in, out, &peers));
  LH_RETURN_IF_ERROR(GetMembers(in, out, peers));
  LH_RETURN_IF_ERROR(GetBlocked(in, out));
  if (in.token().empty() || in.token().size() > LH_TOKEN_BYTES_MAX) {
    return Refuse("token", absl::StrCat(in.token().size(), " bytes"), "1 to 256");
  }
  out->token = in.token();
  out->cause = Text(in.cause());
  out->cost = {in.cost().latency_us(), in.cost().bytes_per_second(),
               in.cost().ring_bytes_per_second()};
  return Get("preparation", in.preparation(), &out->preparation);
}

void Put(const CommitEpoch& in, v1::CommitEpoch* out) {
  Put(in.group, out->mutable_group());
  out->set_epoch(in.epoch.value());
  for (const OpFate& fate : in.fates) {
    v1::OpFate* const f = out->add_fates();
    f->set_ordinal(fate.ordinal.value());
    f->set_fate(static_cast<v1::Fate>(fate.fate));
  }
  for (const MissedOp& missed : in.missed) {
    v1::MissedOp* const m = out->add_missed();
    m->set_boundary(missed.boundary.value());
    m->set_tag(missed.tag);
  }
}

absl::Status Get(const v1::CommitEpoch& in, CommitEpoch* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("epoch", in.epoch(), &out->epoch));
  LH_RETURN_IF_ERROR(CheckCount("fates", in.fates_size(), 0, kOpsMax));
  Unique<OpOrdinal> ordinals("ordinal");
  for (const v1::OpFate& fate : in.fates()) {
    LH_RETURN_IF_ERROR(ordinals.Add(OpOrdinal(fate.ordinal())));
    if (fate.fate() == v1::FATE_UNSPECIFIED || !v1::Fate_IsValid(fate.fate())) {
      return Refuse("fate", absl::StrCat(fate.fate()), "1 to 3");
    }
    out->fates.push_back({OpOrdinal(fate.ordinal()), static_cast<Fate>(fate.fate())});
  }
  LH_RETURN_IF_ERROR(CheckCount("missed", in.missed_size(), 0, kMissedMax));
  for (const v1::MissedOp& missed : in.missed()) {
    MissedOp op;
    LH_RETURN_IF_ERROR(Get("boundary", missed.boundary(), &op.boundary));
    op.tag = missed.tag();
    if (!out->missed.empty() && !(out->missed.back() < op)) {
      return Refuse("missed", absl::StrCat("boundary ", missed.boundary(), " tag ", op.tag),
                    "what is above the one before it");
    }
    out->missed.push_back(op);
  }
  return absl::OkStatus();
}

void Put(const AbortEpoch& in, v1::AbortEpoch* out) {
  Put(in.group, out->mutable_group());
  out->set_epoch(in.epoch.value());
  out->set_reason(Text(in.reason));
}

absl::Status Get(const v1::AbortEpoch& in, AbortEpoch* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("epoch", in.epoch(), &out->epoch));
  out->reason = Text(in.reason());
  return absl::OkStatus();
}

void Put(const Removed& in, v1::Removed* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  out->set_why(static_cast<v1::Removal>(in.why));
  out->set_reason(Text(in.reason));
}

absl::Status Get(const v1::Removed& in, Removed* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  if (in.why() == v1::REMOVAL_UNSPECIFIED || !v1::Removal_IsValid(in.why())) {
    return Refuse("why", absl::StrCat(in.why()), "1 to 5");
  }
  out->why = static_cast<Removal>(in.why());
  out->reason = Text(in.reason());
  return absl::OkStatus();
}

void Put(const PendingCount& in, v1::PendingCount* out) {
  Put(in.group, out->mutable_group());
  out->set_count(in.count);
}

absl::Status Get(const v1::PendingCount& in, PendingCount* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  if (in.count() > LH_MEMBERS_MAX) {
    return Refuse("count", absl::StrCat(in.count()), "at most 1024");
  }
  out->count = in.count();
  return absl::OkStatus();
}

void Put(const Drain& in, v1::Drain* out) { out->set_reason(Text(in.reason)); }

absl::Status Get(const v1::Drain& in, Drain* out) {
  out->reason = Text(in.reason());
  return absl::OkStatus();
}

void Put(const SyncResult& in, v1::SyncResult* out) {
  Put(in.group, out->mutable_group());
  out->set_member(in.member.value());
  out->set_number(in.number);
  out->set_action(static_cast<v1::SyncAction>(in.action));
  out->set_code(static_cast<v1::Code>(in.outcome.code));
  out->set_text(Text(in.outcome.text));
  out->set_revision(in.revision);
  Put(in.manifest, out->mutable_manifest());
  Put(in.state, out->mutable_state());
  for (const SyncSource& source : in.sources) {
    v1::SyncSource* const s = out->add_sources();
    s->set_member(source.member.value());
    s->set_peer(source.peer.value());
  }
}

absl::Status Get(const v1::SyncResult& in, SyncResult* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  LH_RETURN_IF_ERROR(Get("member", in.member(), &out->member));
  LH_RETURN_IF_ERROR(Get("number", in.number(), &out->number));
  if (in.action() == v1::SYNC_ACTION_UNSPECIFIED || !v1::SyncAction_IsValid(in.action())) {
    return Refuse("action", absl::StrCat(in.action()), "1 to 3");
  }
  out->action = static_cast<SyncAction>(in.action());
  LH_RETURN_IF_ERROR(GetOutcome(in, out));
  if (out->action != SyncAction::kEnd && !out->outcome.ok()) {
    return Refuse("code", absl::StrCat(in.code()), "0, as the sync goes on");
  }
  out->revision = in.revision();
  out->manifest = Get(in.manifest());
  out->state = Get(in.state());
  const bool fetch = out->action == SyncAction::kFetch;
  LH_RETURN_IF_ERROR(
      CheckCount("sources", in.sources_size(), fetch ? 1 : 0, fetch ? LH_SYNC_SOURCES_MAX : 1));
  Unique<MemberId> members("member of sources");
  for (const v1::SyncSource& source : in.sources()) {
    SyncSource& s = out->sources.emplace_back();
    LH_RETURN_IF_ERROR(members.Add(MemberId(source.member())));
    s.member = MemberId(source.member());
    LH_RETURN_IF_ERROR(Get("peer of sources", source.peer(), &s.peer));
  }
  return absl::OkStatus();
}

void Put(const StateAgreed& in, v1::StateAgreed* out) {
  Put(in.group, out->mutable_group());
  out->set_revision(in.revision);
  Put(in.manifest, out->mutable_manifest());
  Put(in.state, out->mutable_state());
}

absl::Status Get(const v1::StateAgreed& in, StateAgreed* out) {
  LH_RETURN_IF_ERROR(Get(in.group(), &out->group));
  if (in.revision() > LH_REVISION_MAX) {
    return Refuse("revision", absl::StrCat(in.revision()), "at most 2^63");
  }
  out->revision = in.revision();
  out->manifest = Get(in.manifest());
  out->state = Get(in.state());
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------ envelopes

// Parses one case of the oneof into a Result.
template <class Message, class Result, class Proto>
absl::StatusOr<Result> Take(const Proto& proto) {
  Message message;
  if (absl::Status status = Get(proto, &message); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(Result(Message())), ": ", status.message()));
  }
  return Result(std::move(message));
}

absl::Status NoMessage() {
  return absl::InvalidArgumentError(
      "message is of no kind that this release knows; run the same release at both ends");
}

template <class Result, class Proto>
absl::StatusOr<Result> Parse(const std::string& bytes) {
  if (bytes.size() > LH_CONTROL_MESSAGE_BYTES_MAX) {
    return Refuse("message", absl::StrCat(bytes.size(), " bytes"), "at most 8388608");
  }
  Proto proto;
  if (!proto.ParseFromString(bytes)) {
    return absl::InvalidArgumentError("message is not a valid protobuf");
  }
  return FromProto(proto);
}

// Length of the UTF-8 character at `at`; 0: none is there.
size_t CharacterBytes(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(at);
  size_t length = 0;
  uint32_t code = 0;
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) {
    length = 2;
    code = first & 0x1f;
  } else if (first >= 0xe0 && first < 0xf0) {
    length = 3;
    code = first & 0x0f;
  } else if (first >= 0xf0 && first < 0xf5) {
    length = 4;
    code = first & 0x07;
  } else {
    return 0;
  }
  if (at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(at + i) & 0x3f);
  }
  // Overlong forms, surrogates, and what is beyond Unicode.
  if (length == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) return 0;
  if (length == 4 && (code < 0x10000 || code > 0x10ffff)) return 0;
  return length;
}

}  // namespace

std::string CleanText(const std::string& text, size_t bytes_max) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = CharacterBytes(text, at);
    if (out.size() + (bytes == 0 ? 1 : bytes) > bytes_max) break;
    if (bytes == 0) {
      out += '?';
      ++at;
      continue;
    }
    out.append(text, at, bytes);
    at += bytes;
  }
  return out;
}

v1::PeerMessage ToProto(const PeerMessage& message) {
  v1::PeerMessage proto;
  std::visit(
      [&](const auto& m) {
        using M = std::decay_t<decltype(m)>;
        if constexpr (std::is_same_v<M, Hello>) Put(m, proto.mutable_hello());
        if constexpr (std::is_same_v<M, Join>) Put(m, proto.mutable_join());
        if constexpr (std::is_same_v<M, Leave>) Put(m, proto.mutable_leave());
        if constexpr (std::is_same_v<M, Vote>) Put(m, proto.mutable_vote());
        if constexpr (std::is_same_v<M, EpochReady>) Put(m, proto.mutable_epoch_ready());
        if constexpr (std::is_same_v<M, EpochFailed>) Put(m, proto.mutable_epoch_failed());
        if constexpr (std::is_same_v<M, LinkLost>) Put(m, proto.mutable_link_lost());
        if constexpr (std::is_same_v<M, Heartbeat>) Put(m, proto.mutable_heartbeat());
        if constexpr (std::is_same_v<M, Draining>) Put(m, proto.mutable_draining());
        if constexpr (std::is_same_v<M, SyncVote>) Put(m, proto.mutable_sync_vote());
        if constexpr (std::is_same_v<M, SyncDone>) Put(m, proto.mutable_sync_done());
        if constexpr (std::is_same_v<M, LinkReport>) Put(m, proto.mutable_link_report());
      },
      message);
  LH_CHECK(proto.message_case() != v1::PeerMessage::MESSAGE_NOT_SET);
  return proto;
}

v1::CoordinatorMessage ToProto(const CoordinatorMessage& message) {
  v1::CoordinatorMessage proto;
  std::visit(
      [&](const auto& m) {
        using M = std::decay_t<decltype(m)>;
        if constexpr (std::is_same_v<M, Welcome>) Put(m, proto.mutable_welcome());
        if constexpr (std::is_same_v<M, JoinPending>) Put(m, proto.mutable_join_pending());
        if constexpr (std::is_same_v<M, JoinRefused>) Put(m, proto.mutable_join_refused());
        if constexpr (std::is_same_v<M, VoteResult>) Put(m, proto.mutable_vote_result());
        if constexpr (std::is_same_v<M, PrepareEpoch>) Put(m, proto.mutable_prepare_epoch());
        if constexpr (std::is_same_v<M, CommitEpoch>) Put(m, proto.mutable_commit_epoch());
        if constexpr (std::is_same_v<M, AbortEpoch>) Put(m, proto.mutable_abort_epoch());
        if constexpr (std::is_same_v<M, Removed>) Put(m, proto.mutable_removed());
        if constexpr (std::is_same_v<M, PendingCount>) Put(m, proto.mutable_pending_count());
        if constexpr (std::is_same_v<M, Drain>) Put(m, proto.mutable_drain());
        if constexpr (std::is_same_v<M, SyncResult>) Put(m, proto.mutable_sync_result());
        if constexpr (std::is_same_v<M, StateAgreed>) Put(m, proto.mutable_state_agreed());
      },
      message);
  LH_CHECK(proto.message_case() != v1::CoordinatorMessage::MESSAGE_NOT_SET);
  return proto;
}

absl::StatusOr<PeerMessage> FromProto(const v1::PeerMessage& proto) {
  switch (proto.message_case()) {
    case v1::PeerMessage::kHello:
      return Take<Hello, PeerMessage>(proto.hello());
    case v1::PeerMessage::kJoin:
      return Take<Join, PeerMessage>(proto.join());
    case v1::PeerMessage::kLeave:
      return Take<Leave, PeerMessage>(proto.leave());
    case v1::PeerMessage::kVote:
      return Take<Vote, PeerMessage>(proto.vote());
    case v1::PeerMessage::kEpochReady:
      return Take<EpochReady, PeerMessage>(proto.epoch_ready());
    case v1::PeerMessage::kEpochFailed:
      return Take<EpochFailed, PeerMessage>(proto.epoch_failed());
    case v1::PeerMessage::kLinkLost:
      return Take<LinkLost, PeerMessage>(proto.link_lost());
    case v1::PeerMessage::kHeartbeat:
      return Take<Heartbeat, PeerMessage>(proto.heartbeat());
    case v1::PeerMessage::kDraining:
      return Take<Draining, PeerMessage>(proto.draining());
    case v1::PeerMessage::kSyncVote:
      return Take<SyncVote, PeerMessage>(proto.sync_vote());
    case v1::PeerMessage::kSyncDone:
      return Take<SyncDone, PeerMessage>(proto.sync_done());
    case v1::PeerMessage::kLinkReport:
      return Take<LinkReport, PeerMessage>(proto.link_report());
    case v1::PeerMessage::MESSAGE_NOT_SET:
      break;
  }
  return NoMessage();
}

absl::StatusOr<CoordinatorMessage> FromProto(const v1::CoordinatorMessage& proto) {
  switch (proto.message_case()) {
    case v1::CoordinatorMessage::kWelcome:
      return Take<Welcome, CoordinatorMessage>(proto.welcome());
    case v1::CoordinatorMessage::kJoinPending:
      return Take<JoinPending, CoordinatorMessage>(proto.join_pending());
    case v1::CoordinatorMessage::kJoinRefused:
      return Take<JoinRefused, CoordinatorMessage>(proto.join_refused());
    case v1::CoordinatorMessage::kVoteResult:
      return Take<VoteResult, CoordinatorMessage>(proto.vote_result());
    case v1::CoordinatorMessage::kPrepareEpoch:
      return Take<PrepareEpoch, CoordinatorMessage>(proto.prepare_epoch());
    case v1::CoordinatorMessage::kCommitEpoch:
      return Take<CommitEpoch, CoordinatorMessage>(proto.commit_epoch());
    case v1::CoordinatorMessage::kAbortEpoch:
      return Take<AbortEpoch, CoordinatorMessage>(proto.abort_epoch());
    case v1::CoordinatorMessage::kRemoved:
      return Take<Removed, CoordinatorMessage>(proto.removed());
    case v1::CoordinatorMessage::kPendingCount:
      return Take<PendingCount, CoordinatorMessage>(proto.pending_count());
    case v1::CoordinatorMessage::kDrain:
      return Take<Drain, CoordinatorMessage>(proto.drain());
    case v1::CoordinatorMessage::kSyncResult:
      return Take<SyncResult, CoordinatorMessage>(proto.sync_result());
    case v1::CoordinatorMessage::kStateAgreed:
      return Take<StateAgreed, CoordinatorMessage>(proto.state_agreed());
    case v1::CoordinatorMessage::MESSAGE_NOT_SET:
      break;
  }
  return NoMessage();
}

std::string Serialize(const PeerMessage& message) { return ToProto(message).SerializeAsString(); }
std::string Serialize(const CoordinatorMessage& message) {
  return ToProto(message).SerializeAsString();
}

absl::StatusOr<PeerMessage> ParsePeerMessage(const std::string& bytes) {
  return Parse<PeerMessage, v1::PeerMessage>(bytes);
}
absl::StatusOr<CoordinatorMessage> ParseCoordinatorMessage(const std::string& bytes) {
  return Parse<CoordinatorMessage, v1::CoordinatorMessage>(bytes);
}

const char* Name(const PeerMessage& message) {
  static constexpr const char* kNames[] = {"Hello",      "Join",        "Leave",    "Vote",
                                           "EpochReady", "EpochFailed", "LinkLost", "Heartbeat",
                                           "Draining",   "SyncVote",    "SyncDone", "LinkReport"};
  static_assert(std::size(kNames) == std::variant_size_v<PeerMessage>);
  return kNames[message.index()];
}

const char* Name(const CoordinatorMessage& message) {
  static constexpr const char* kNames[] = {
      "Welcome",    "JoinPending", "JoinRefused",  "VoteResult", "PrepareEpoch", "CommitEpoch",
      "AbortEpoch", "Removed",     "PendingCount", "Drain",      "SyncResult",   "StateAgreed"};
  static_assert(std::size(kNames) == std::variant_size_v<CoordinatorMessage>);
  return kNames[message.index()];
}

}  // namespace longhaul::control
