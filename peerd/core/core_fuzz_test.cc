// Feeds the core of peerd sequences of events.
//
// What comes from other processes may be anything that the border lets through: messages of the
// coordinator (FaultIn), frames of peers (engine/control_frames.h), ops of trainers (ParseIpcOp).
// What the engine and its runners say follows from what the core asked for: an attempt completes
// only after it was started, a transfer ends once, a link goes down only if it was wanted.
//
// Each choice is one byte, then what the choice needs. About half of the choices go on with what
// the core has sent, so that sequences come far. No check may fire, the invariants must hold after
// each step, each request must get one answer, and the coordinator and the peers must accept what
// the core sends to them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/fields.h"
#include "peerd/core/peer_core.h"
#include "peerd/engine/control_frames.h"
#include "proto/wire/frame.h"
#include "proto/wire/ipc_op.h"
#include "tests/support/fuzz_input.h"

namespace longhaul::peerd {
namespace {

constexpr uint32_t kDetectMs = 1000;
const PeerId kSelf{1};

class Host {
 public:
  Host(const uint8_t* data, size_t size) : in_(data, size), core_(Config()) {}

  void Run() {
    for (int i = 0; i < 300 && !in_.empty(); ++i) {
      Choose();
      while (!due_.empty()) {
        const Event event = std::move(due_.front());
        due_.erase(due_.begin());
        Step(event);
      }
    }
  }

 private:
  // A member of a local trainer, as the IPC server knows it.
  struct Trainer {
    GroupKey group;
    MemberId member;  // the number that the coordinator gave it; 0: none yet
    uint64_t votes = 0;
    std::optional<control::SyncOffer> offer;
    bool joining = true;
    bool admitted = false;
    bool over = false;  // JoinDone was not OK, or MemberGone came, or it died
    bool stepping = false;
    bool syncing = false;
    bool taking = false;
    bool leaving = false;
    std::map<uint64_t, LocalPost> posts;  // that are not answered
  };
  struct Attempt {
    Epoch epoch;
    OpDesc desc;
    std::optional<std::string> result;
    bool complete = false;
    bool stopping = false;
    bool finishing = false;
  };
  using OpKey = std::pair<GroupKey, OpOrdinal>;
  struct Group {
    Epoch highest;
    Epoch committed;
    std::optional<control::PrepareEpoch> prepared;
    std::vector<control::OpReport> reported;
    std::optional<control::EpochReady> ready;
    uint64_t next_member = 100;
  };

  static CoreConfig Config() {
    CoreConfig config;
    config.peer = kSelf;
    config.endpoints = {"h:1"};
    config.version = "1";
    config.host = "host";
    config.detect_ms = kDetectMs;
    return config;
  }

  void Choose() {
    switch (in_.Byte() % 32) {
      case 0:
        if (!up_) {
          up_ = true;
          Step(CoordinatorUp{});
          Say(control::Welcome{"c", kDetectMs, 1, 1});
        } else if (in_.Below(4) == 3) {
          up_ = false;
          Step(CoordinatorDown{});
        }
        return;
      case 1:
      case 2:
        return Say(in_.DrawKind<control::CoordinatorMessage>());
      case 3:
      case 4:
        return Join();
      case 5:
        return Pend();
      case 6:
      case 7:
        return Prepare();
      case 8:
      case 9:
        return Commit();
      case 10: {
        Trainer* const trainer = Pick();
        if (trainer == nullptr) return;
        const Epoch epoch = groups_[trainer->group].committed;
        return Say(control::VoteResult{trainer->group, trainer->member, trainer->votes, epoch});
      }
      case 11:
        return Answer();
      case 12: {
        Trainer* const trainer = Pick();
        if (trainer == nullptr) return;
        auto removed = in_.Draw<control::Removed>();
        removed.group = trainer->group;
        removed.member = trainer->member;
        return Say(removed);
      }
      case 13: {
        auto agreed = in_.Draw<control::StateAgreed>();
        agreed.manifest = {1, 0};
        agreed.state = {2, in_.Below(3)};
        return Say(agreed);
      }
      case 14:
      case 15:
        return Ask();
      case 16:
      case 17:
      case 18:
        return Post();
      case 19: {
        const auto it = PickIn(&trainers_);
        if (it == trainers_.end() || it->second.posts.empty()) return;
        return Step(LocalCancel{{it->first, it->second.posts.begin()->first}});
      }
      case 20:
      case 21:
        return Link();
      case 22:
      case 23:
        return Echo();
      case 24:
        return Frame();
      case 25:
        return Done();
      case 26:
      case 27:
        return Attempted();
      case 28:
        return Transferred();
      case 29:
        if (in_.Below(16) == 15) return Step(DrainRequested{now_ + Millis(kDetectMs)});
        return Wait(static_cast<int64_t>(in_.Below(4)) * kDetectMs / 3);
      case 30:
        return Wait(static_cast<int64_t>(in_.Below(4)) * kDetectMs);
      case 31:
        return Look();
    }
  }

  template <class Map>
  typename Map::iterator PickIn(Map* map) {
    if (map->empty()) return map->end();
    return std::next(map->begin(), static_cast<ptrdiff_t>(in_.Below(map->size())));
  }
  Trainer* Pick() {
    const auto it = PickIn(&trainers_);
    return it == trainers_.end() ? nullptr : &it->second;
  }
  PeerId OtherPeer() { return PeerId(2 + in_.Below(3)); }
  static control::PeerInfo InfoOf(PeerId peer) {
    return {peer, {"h" + std::to_string(peer.value()) + ":1"}, 0, "host", ""};
  }

  // ---------------------------------------------------------------------------- the coordinator

  void Say(control::CoordinatorMessage message) {
    if (!up_) return;
    const bool legal = std::visit([](const auto& m) { return FaultIn(m).empty(); }, message);
    if (legal) Step(FromCoordinator{std::move(message)});
  }

  void Pend() {
    const auto it = PickIn(&trainers_);
    if (it == trainers_.end()) return;
    Trainer& trainer = it->second;
    if (in_.Below(16) == 15) {
      auto refused = in_.Draw<control::JoinRefused>();
      refused.request = it->first.value();
      refused.group = trainer.group;
      return Say(refused);
    }
    if (!trainer.member) trainer.member = MemberId(++groups_[trainer.group].next_member);
    Say(control::JoinPending{it->first.value(), trainer.group, trainer.member, ""});
  }

  void Prepare() {
    const GroupKey key{"run", static_cast<uint32_t>(in_.Below(2))};
    Group& group = groups_[key];
    control::PrepareEpoch prepare;
    prepare.group = key;
    group.highest = Epoch(group.highest.value() + 1);
    prepare.epoch = group.highest;
    prepare.base = group.committed;
    prepare.freeze = in_.Bool();
    prepare.last_freeze = prepare.freeze ? prepare.epoch : Epoch(in_.Below(2));
    prepare.boundary = in_.Bool() ? prepare.epoch : Epoch(1);
    for (const auto& [local, trainer] : trainers_) {
      if (trainer.group != key || !trainer.member || in_.Below(8) == 7) continue;
      prepare.members.push_back({trainer.member, kSelf, Joined(prepare, trainer.member), "n",
                                 in_.Below(8) == 7 ? control::kInBackground : Epoch(), ""});
    }
    const uint8_t others = in_.Byte();
    for (uint64_t i = 0; i < 3; ++i) {
      if ((others >> i & 1) == 0) continue;
      const MemberId member(2 + i);
      prepare.members.push_back({member, PeerId(2 + i), Joined(prepare, member), "n",
                                 (others & 64) != 0 ? control::kInBackground : Epoch(), ""});
    }
    for (const control::MemberInfo& member : prepare.members) {
      bool known = false;
      for (const control::PeerInfo& peer : prepare.peers) known |= peer.peer == member.peer;
      if (!known) prepare.peers.push_back(InfoOf(member.peer));
    }
    if ((others & 128) != 0 && prepare.peers.size() >= 3) {
      prepare.blocked = {{prepare.peers[1].peer, prepare.peers[2].peer, prepare.peers[0].peer}};
      if (prepare.blocked[0].b < prepare.blocked[0].a) {
        std::swap(prepare.blocked[0].a, prepare.blocked[0].b);
      }
    }
    if (in_.Below(8) == 7) prepare.cost = in_.Draw<control::LinkCost>();
    prepare.token = "token";
    prepare.cause = "test";
    prepare.preparation = 1000 + in_.Below(4);
    if (FaultIn(prepare).empty() && up_) {
      group.prepared = prepare;
      group.ready.reset();
    }
    Say(prepare);
  }
  Epoch Joined(const control::PrepareEpoch& prepare, MemberId member) {
    const auto [it, fresh] = joined_.emplace(std::pair(prepare.group, member), prepare.epoch);
    return it->second;
  }

  void Commit() {
    const auto it = PickIn(&groups_);
    if (it == groups_.end()) return;
    Group& group = it->second;
    if (!group.prepared) return;
    if (in_.Below(8) == 7) {
      Say(control::AbortEpoch{it->first, group.prepared->epoch, "test"});
      return;
    }
    control::CommitEpoch commit{it->first, group.prepared->epoch, {}, {}};
    if (group.ready) {
      for (const control::OpReport& report : group.ready->ops) {
        commit.fates.push_back({report.ordinal, static_cast<control::Fate>(1 + in_.Below(3))});
      }
    }
    if (in_.Below(8) == 7) commit = in_.Draw<control::CommitEpoch>();
    commit.group = it->first;
    commit.epoch = group.prepared->epoch;
    if (FaultIn(commit).empty() && up_) {
      group.committed = commit.epoch;
      group.prepared.reset();
    }
    Say(commit);
  }

  // Answers an offer of a member.
  void Answer() {
    Trainer* const trainer = Pick();
    if (trainer == nullptr) return;
    auto result = in_.Draw<control::SyncResult>();
    result.group = trainer->group;
    result.member = trainer->member;
    if (trainer->offer) {
      result.number = trainer->offer->number;
      result.manifest = trainer->offer->manifest;
      if (in_.Bool()) result.state = trainer->offer->state;
    }
    if (in_.Bool()) result.outcome = {};
    if (result.sources.empty()) result.sources = {{MemberId(2), PeerId(2)}};
    Say(result);
  }

  // ------------------------------------------------------------------------------ trainers

  void Join() {
    if (trainers_.size() >= 6) return;
    LocalJoin join;
    join.local = LocalId(++last_local_);
    join.group = {"run", static_cast<uint32_t>(in_.Below(2))};
    join.name = "n";
    join.wish.background = in_.Below(4) == 3;
    trainers_[join.local].group = join.group;
    Step(join);
  }

  SyncRequest State() {
    SyncRequest request;
    request.strategy = static_cast<control::SyncStrategy>(1 + in_.Below(3));
    request.revision = in_.Below(4);
    request.manifest = {1, in_.Below(8) == 7};
    request.state = {2, in_.Below(3)};
    const uint8_t flags = in_.Byte();
    request.kept = (flags & 7) == 7;
    request.unequal = (flags & 8) != 0;
    request.whole = (flags & 48) != 48;
    return request;
  }

  // A request as the IPC server lets it through (Server::Step() and others).
  void Ask() {
    const auto it = PickIn(&trainers_);
    if (it == trainers_.end()) return;
    const LocalId local = it->first;
    Trainer& trainer = it->second;
    const size_t what = in_.Below(8);
    if (what == 7) {
      if (trainer.over) return;
      trainer.over = true;
      return Step(LocalDied{local, "died"});
    }
    if (what == 6) {
      if (trainer.leaving || trainer.over) return;
      trainer.leaving = true;
      return Step(LocalLeave{local});
    }
    // A request may cross the end of its member.
    const bool may = trainer.admitted && !trainer.leaving && !trainer.stepping &&
                     !trainer.syncing && !trainer.taking;
    if (!may) return;
    if (what < 3) {
      trainer.stepping = true;
      LocalStep step{local};
      if (in_.Bool()) {
        step.sync = State();
        trainer.syncing = true;
      }
      return Step(step);
    }
    if (what < 5) {
      trainer.syncing = true;
      return Step(LocalSync{local, State()});
    }
    trainer.taking = true;
    Step(LocalTake{local, now_ + Millis(kDetectMs)});
  }

  void Post() {
    const auto it = PickIn(&trainers_);
    if (it == trainers_.end() || !it->second.admitted || it->second.leaving) return;
    lh_ipc_op op{};
    op.tag = in_.Below(3);
    static constexpr uint64_t kCounts[] = {1, 4, 1024, 1 << 16, 0, 3, uint64_t{32} << 20, 8};
    op.count = kCounts[in_.Below(8)];
    const uint8_t shape = in_.Byte();
    op.kind = static_cast<uint8_t>((shape & 15) >= 11 ? 1 : (shape & 15));
    op.dtype = (shape & 16) != 0 ? uint8_t{LH_WIRE_BFLOAT16} : uint8_t{LH_WIRE_FLOAT32};
    op.on_fault = (shape & 32) != 0;
    const uint8_t options = in_.Byte();
    if ((options & 1) != 0) op.reduce = static_cast<uint8_t>(in_.Below(5));
    if ((options & 2) != 0) op.min_world = static_cast<uint32_t>(in_.Below(5));
    if ((options & 4) != 0) op.algorithm = static_cast<uint8_t>(in_.Below(4));
    if ((options & 8) != 0) op.order = 1;
    if ((options & 16) != 0) {
      op.weighted = 1;
      op.weight = static_cast<double>(in_.Below(3));
    }
    if ((options & 32) != 0) {
      op.quantization = static_cast<uint8_t>(in_.Below(11));
      op.block = 32;
    }
    if (IsInParts(static_cast<OpKind>(op.kind))) op.world = static_cast<uint16_t>(in_.Below(5));
    std::vector<uint8_t> table;
    const auto add = [&](uint64_t number) {
      for (int i = 0; i < 8; ++i) table.push_back(static_cast<uint8_t>(number >> (8 * i)));
    };
    if ((options & 64) != 0 && op.kind != LH_WIRE_SEND_RECV) {
      uint64_t member = 0;
      for (size_t n = in_.Below(4); n > 0; --n) {
        member += 1 + (in_.Bool() ? 97 : in_.Below(3));
        add(member);
        ++op.participants;
      }
    }
    if ((options & 128) != 0) {
      op.unequal = 1;
      op.count = 0;
      op.gives = static_cast<uint32_t>(in_.Below(5));
      for (uint32_t i = 0; i < op.gives; ++i) add(in_.Below(64));
      op.gets = static_cast<uint32_t>(in_.Below(5));
      for (uint32_t i = 0; i < op.gets; ++i) add(in_.Below(64));
    }
    if (HasRoot(static_cast<OpKind>(op.kind)) || op.kind == LH_WIRE_SEND_RECV) {
      op.flags = static_cast<uint8_t>(in_.Below(4));
      op.root = in_.Bool() ? it->second.member.value() : in_.Below(6);
    }
    // The memory is not looked at here, so the first try has both tensors, others one or none.
    std::optional<IpcOp> parsed;
    for (int tries = 0; tries < 4 && !parsed; ++tries) {
      op.source = {(tries & 1) != 0 ? 0u : 1u, 0};
      op.target = {(tries & 2) != 0 ? 0u : 2u, 0};
      auto one = ParseIpcOp(op, table, [](uint64_t) { return std::optional(uint64_t{1} << 50); });
      if (one.ok()) parsed = *std::move(one);
    }
    if (!parsed) return;
    LocalPost post{{it->first, ++last_call_}, op.tag, parsed->desc};
    post.root_rank = parsed->root_rank;
    post.is_root = parsed->is_root;
    post.partner = parsed->partner;
    post.participants = parsed->participants;
    post.terms = parsed->terms;
    it->second.posts[last_call_] = post;
    core_.ViewPost(post);
    Step(post);
  }

  // ------------------------------------------------------------------------------ links, frames

  bool Wanted(const std::string& run, PeerId peer) const {
    for (const auto& [group, peers] : wanted_) {
      if (group.run == run && peers.contains(peer)) return true;
    }
    return false;
  }
  void Link() {
    const PeerId peer = OtherPeer();
    if (!Wanted("run", peer)) return;
    if (in_.Below(4) != 3) {
      up_links_.insert(peer);
      return Step(LinkUp{"run", peer, peer.value() % 2 == 0 ? 100'000U : 0U});
    }
    LoseLink(peer);
  }
  void LoseLink(PeerId peer) {
    up_links_.erase(peer);
    for (auto& [group, peers] : wanted_) peers.erase(peer);
    due_.push_back(LinkDown{"run", peer, "lost", static_cast<uint32_t>(in_.Below(2)) * kDetectMs});
  }

  // What comes off a link: a frame that the parsers of frames accept.
  void Receive(PeerId from, const FrameHeader& header, const std::string& payload) {
    const auto bytes = Encode(header);
    const auto parsed = ParseFrameHeader(bytes, LaneKind::kControl);
    if (!parsed.ok()) return;
    const auto taken = TakeFrame(
        {"run", from}, *parsed, {reinterpret_cast<const uint8_t*>(payload.data()), payload.size()});
    if (!taken.ok()) return;
    std::visit([&](const auto& event) { Step(event); }, *taken);
  }

  // A peer announces the op that this peer has announced, or one that differs.
  void Echo() {
    if (sent_.empty()) return;
    SendReady ready = sent_[in_.Below(sent_.size())];
    const PeerId from = in_.Below(4) == 3 ? OtherPeer() : ready.to;
    if (!up_links_.contains(from)) return;
    const uint8_t twist = in_.Byte();
    ready.ordinal = OpOrdinal(ordinals_[from] + 1);
    if ((twist & 15) != 15) ++ordinals_[from];
    if ((twist & 0x30) == 0x30) ready.attempt = Epoch(in_.Number());
    if (twist == 0xc0) ready.boundary = Epoch(in_.Number());
    if (twist == 0xc1) ready.desc = in_.Draw<OpDesc>();
    if (twist == 0xc2) ready.desc.count = in_.Number();
    if (twist == 0xc3) ready.desc.world = static_cast<uint16_t>(in_.Number());
    if (twist == 0xc4) ready.desc.root = MemberId(in_.Number());
    if (twist == 0xc5) ready.set = in_.Number();
    if (twist == 0xc6) ready.tag = in_.Number();
    if (twist >= 0xc8 && twist < 0xd0) ready.terms = DrawTerms(ready.desc);
    if (twist == 0xd0) ready.other_offer = OtherOffer{MemberId(in_.Number()), ready.desc};
    if (twist == 0xd1) ready.other_offer.reset();
    if (twist == 0xd2) ready.result.reset();
    if (twist >= 0xd4 && twist < 0xe0) {
      ready.result =
          OneShotResult{Epoch(in_.Below(8)), {}, std::string(ready.desc.bytes() % 8192, 'r')};
      for (size_t n = in_.Below(5); n > 0; --n) ready.result->members.emplace_back(in_.Number());
      ready.terms.clear();
    }
    if (twist >= 0xe4 && twist < 0xe8) ready.input = static_cast<ReadyInput>(twist - 0xe4);
    const bool one_shot = (IsOneShot(ready.desc) && !ready.other_offer && !ready.result) ||
                          (ready.input == ReadyInput::kCarried && MayCarryInput(ready.desc));
    std::string input(one_shot ? OneShotPayloadBytes(ready.desc) : 0, 'x');
    if (twist == 0xe0) input += 'x';
    const ControlFrame frame = FrameOf(ready, input);
    Receive(from, frame.header, frame.payload);
  }
  std::vector<OpTerms> DrawTerms(const OpDesc& desc) {
    std::vector<OpTerms> terms(in_.Below(4));
    for (OpTerms& one : terms) {
      if (desc.weighted) one.weight = static_cast<double>(in_.Number());
      for (size_t n = in_.Below(5); n > 0; --n) one.gives.push_back(in_.Number());
      for (size_t n = in_.Below(5); n > 0; --n) one.gets.push_back(in_.Number());
    }
    return terms;
  }

  // Any READY.
  void Frame() {
    const PeerId from = OtherPeer();
    if (!up_links_.contains(from)) return;
    SendReady ready;
    ready.group = {"run", static_cast<uint32_t>(in_.Below(2))};
    ready.to = kSelf;
    ready.ordinal = OpOrdinal(in_.Number());
    ready.attempt = Epoch(in_.Number());
    ready.boundary = Epoch(in_.Number());
    ready.tag = in_.Below(3);
    ready.set = in_.Below(8) == 7 ? in_.Number() : 0;
    if (in_.Bool()) ready.desc.count = in_.Number();
    if (in_.Bool()) ready.desc = in_.Draw<OpDesc>();
    if (ready.desc.NeedsTerms()) ready.terms = DrawTerms(ready.desc);
    if (in_.Below(8) == 7) ready.other_offer = OtherOffer{MemberId(2), in_.Draw<OpDesc>()};
    if (!FaultIn(ready.desc).empty()) return;
    const bool one_shot = IsOneShot(ready.desc) && !ready.other_offer;
    const ControlFrame frame =
        FrameOf(ready, std::string(one_shot ? OneShotPayloadBytes(ready.desc) : 0, 'x'));
    Receive(from, frame.header, frame.payload);
  }
  void Done() {
    const PeerId from = OtherPeer();
    if (!up_links_.contains(from)) return;
    FrameHeader header;
    header.type = FrameType::kDone;
    const size_t flags = in_.Below(8);
    header.flags = static_cast<uint8_t>(flags < 3 ? flags : 0);
    if (!sent_.empty() && in_.Below(8) != 7) {
      const SendReady& ready = sent_[in_.Below(sent_.size())];
      header.group = ready.group.group;
      header.op = ready.ordinal;
      header.attempt = ready.attempt;
    } else {
      header.op = OpOrdinal(in_.Number());
      header.attempt = Epoch(in_.Number());
    }
    Receive(from, header, "");
  }

  // ------------------------------------------------------------------------------ the runners

  void Attempted() {
    const auto it = PickIn(&attempts_);
    if (it == attempts_.end()) return;
    const auto [group, ordinal] = it->first;
    Attempt& attempt = it->second;
    if (attempt.finishing) {
      attempts_.erase(it);
      return Step(AttemptFinished{group, ordinal});
    }
    // An attempt may complete before it hears of the stop.
    if (!attempt.complete && (!attempt.stopping || in_.Bool())) {
      attempt.complete = true;
      AttemptComplete complete{group, ordinal, attempt.epoch};
      if (attempt.result) complete.result = *attempt.result;
      return Step(complete);
    }
    if (!attempt.stopping) return;
    const Epoch epoch = attempt.epoch;
    attempts_.erase(it);
    Step(AttemptStopped{group, ordinal, epoch});
  }

  void Transferred() {
    if (in_.Below(4) == 3 && !comparing_.empty()) {
      const LocalId local = *comparing_.begin();
      comparing_.erase(comparing_.begin());
      return Step(ManifestCompared{local, in_.Bool() ? "shapes differ" : ""});
    }
    if (in_.Below(4) == 3 && !trying_.empty()) {
      const TryAddress asked = trying_.back();
      trying_.pop_back();
      return Step(PeerTried{asked.group, asked.trial, asked.peer.peer, in_.Bool() ? "gone" : ""});
    }
    const auto it = PickIn(&transfers_);
    if (it == transfers_.end()) return;
    const LocalId local = it->first;
    if (it->second && in_.Bool()) {
      return Step(TransferMeasured{local, in_.Number(), in_.Number()});
    }
    if (in_.Below(8) == 7) core_.SetProgress(local, in_.Draw<control::FetchProgress>());
    transfers_.erase(it);
    TransferEnded ended{local};
    if (in_.Bool()) ended.outcome = {Code::kUnavailable, "test"};
    ended.bytes = in_.Below(100);
    for (size_t n = in_.Below(3); n > 0; --n) ended.sources.emplace_back(2 + n);
    if (in_.Below(4) == 3) ended.corrupt.emplace_back(2);
    Step(ended);
  }

  void Wait(int64_t ms) {
    const Tick end = now_ + Millis(ms);
    for (int i = 0; i < 20 && core_.NextDeadline() <= end; ++i) {
      now_ = std::max(now_, core_.NextDeadline());
      Step(TimePassed{});
    }
    now_ = std::max(now_, end);
    Step(TimePassed{});
  }

  void Look() {
    core_.SetBytes({"run", 0}, 1, 2);
    core_.SetWorstLanes({{"run", control::WorstLane{PeerId(2)}}});
    core_.GetStats();
    for (const auto& [local, trainer] : trainers_) {
      for (const MemberId member : core_.GetMembers(local).members) {
        LH_CHECK(core_.GetMember(local, member).has_value());
      }
      core_.GetMember(local, MemberId(in_.Number()));
    }
    LH_CHECK(core_.Clone().Digest() == core_.Digest());
  }

  // ------------------------------------------------------------------------------ actions

  void Step(const Event& event) {
    const std::vector<Action> actions = core_.Step(event, now_);
    core_.CheckInvariants();
    for (const Action& action : actions) {
      std::visit([this](const auto& a) { Take(a); }, action);
    }
  }

  template <class Action>
  void Take(const Action&) {}
  void Take(const ToCoordinator& a) {
    LH_CHECK(up_) << "a message without a stream";
    std::visit(
        [this](const auto& m) {
          const std::string fault = FaultIn(m);
          LH_CHECK(fault.empty()) << "the coordinator refuses a message: " << fault;
          Heard(m);
        },
        a.message);
  }
  template <class Message>
  void Heard(const Message&) {}
  void Heard(const control::Vote& m) {
    if (Trainer* const trainer = Find(m.group, m.member)) {
      trainer->votes = m.number;
      if (m.sync) trainer->offer = m.sync;
    }
  }
  void Heard(const control::SyncVote& m) {
    if (Trainer* const trainer = Find(m.group, m.member)) trainer->offer = m.offer;
  }
  void Heard(const control::EpochReady& m) { groups_[m.group].ready = m; }
  Trainer* Find(const GroupKey& group, MemberId member) {
    for (auto& [local, trainer] : trainers_) {
      if (trainer.group == group && trainer.member == member) return &trainer;
    }
    return nullptr;
  }

  // Each request gets one answer.
  static void End(bool* open, const char* what) {
    LH_CHECK(*open) << what << " answers nothing";
    *open = false;
  }
  void Take(const JoinDone& a) {
    Trainer& trainer = trainers_.at(a.local);
    End(&trainer.joining, "JoinDone");
    trainer.admitted = a.outcome.ok();
    trainer.over = trainer.over || !a.outcome.ok();
  }
  void Take(const StepDone& a) {
    Trainer& trainer = trainers_.at(a.local);
    LH_CHECK(!trainer.syncing) << "a step ends before its sync";
    End(&trainer.stepping, "StepDone");
  }
  void Take(const SyncDone& a) { End(&trainers_.at(a.local).syncing, "SyncDone"); }
  void Take(const TakeDone& a) { End(&trainers_.at(a.local).taking, "TakeDone"); }
  void Take(const LeaveDone& a) { End(&trainers_.at(a.local).leaving, "LeaveDone"); }
  void Take(const PostDone& a) {
    LH_CHECK(trainers_.at(a.post.local).posts.erase(a.post.call) == 1) << "PostDone twice";
  }
  void Take(const MemberGone& a) {
    Trainer& trainer = trainers_.at(a.local);
    LH_CHECK(trainer.admitted && trainer.posts.empty() && !trainer.stepping && !trainer.syncing &&
             !trainer.taking)
        << "a member is gone and has open requests";
    trainer.over = true;
  }

  void Take(const OpenLinks& a) {
    for (const LinkWanted& link : a.links) wanted_[a.group].insert(link.peer.peer);
  }
  void Take(const KeepLinks& a) {
    wanted_[a.group] = {a.peers.begin(), a.peers.end()};
    std::erase_if(up_links_, [&](PeerId peer) { return !Wanted("run", peer); });
  }
  void Take(const TryAddress& a) { trying_.push_back(a); }
  void Take(const BreakLink& a) {
    if (Wanted("run", a.peer)) LoseLink(a.peer);
  }
  void Take(const RefuseCoordinator&) {
    up_ = false;
    due_.push_back(CoordinatorDown{});
  }

  // A peer must accept what this peer sends.
  void Accept(const ControlFrame& frame) {
    const auto header = ParseFrameHeader(Encode(frame.header), LaneKind::kControl);
    LH_CHECK(header.ok()) << header.status().ToString();
    const auto taken = TakeFrame({"run", kSelf}, *header, frame.bytes());
    LH_CHECK(taken.ok()) << taken.status().ToString();
  }
  void Take(const SendReady& a) {
    Accept(FrameOf(a, std::string(a.one_shot ? OneShotPayloadBytes(a.desc) : 0, 'x')));
    for (const PostRef& post : a.posts) {
      if (a.one_shot) PostOf(post);
    }
    if (sent_.size() >= 16) sent_.erase(sent_.begin());
    sent_.push_back(a);
  }
  void Take(const SendDone& a) { Accept(FrameOf(a)); }
  void Take(const StartAttempt& a) {
    const auto [it, fresh] = attempts_.emplace(OpKey{a.group, a.ordinal}, Attempt());
    LH_CHECK(fresh) << "two attempts at " << ToString(a.ordinal);
    it->second.epoch = a.attempt;
    it->second.desc = a.desc;
    if (a.algorithm == Algorithm::kOneShot || a.result) {
      it->second.result = a.result ? *a.result : std::string(a.desc.bytes(), 'r');
    }
    CheckFits(a);
  }
  // What the op runner takes for granted, whatever other peers have announced.
  void CheckFits(const StartAttempt& a) {
    LH_CHECK(a.contributes.size() == a.posts.size());
    LH_CHECK(a.ring_contributes.size() == a.ring.size());
    LH_CHECK(std::count(a.ring.begin(), a.ring.end(), kSelf) == 1);
    LH_CHECK(a.shares.empty() || a.shares.size() == a.ring.size());
    LH_CHECK(a.order.empty() || a.order.size() == a.ring.size());
    for (const PostRef& post : a.posts) PostOf(post);
    if (a.algorithm == Algorithm::kOneShot && a.result) {
      LH_CHECK(a.result->size() == a.desc.bytes()) << "a result of another length";
    } else if (a.algorithm == Algorithm::kOneShot) {
      for (size_t i = 0; i < a.ring.size(); ++i) {
        LH_CHECK(a.ring[i] == kSelf || a.payloads.at(i).size() == OneShotPayloadBytes(a.desc))
            << "an input of another length";
      }
    }
    if (!a.desc.unequal) return;
    // The cuts lie in the tensors that the trainers here have brought. These may be laid out for
    // more members than take part.
    uint64_t whole = 0;
    std::map<int, uint64_t> owned, to;
    for (const CutOwner& cut : a.cuts) {
      LH_CHECK(cut.post < static_cast<int>(a.posts.size()));
      LH_CHECK(cut.position >= 0 && cut.position < static_cast<int>(a.ring.size()));
      whole += cut.count;
      owned[cut.post] += cut.count;
      to[cut.to_post] += cut.count;
    }
    const auto sum = [](const std::vector<uint64_t>& lengths) {
      return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
    };
    for (int i = 0; i < static_cast<int>(a.posts.size()); ++i) {
      const LocalPost& post = PostOf(a.posts[i]);
      const uint64_t gives = sum(post.terms.gives);
      const uint64_t gets = sum(post.terms.gets);
      switch (a.desc.kind) {
        case OpKind::kReduceScatter:
          LH_CHECK(gives >= whole && gets == owned[i]) << gives << " " << whole << " " << gets;
          break;
        case OpKind::kAllGather:
          // A member in the background takes part, and its part is left out.
          LH_CHECK(gets >= whole && owned[i] == (a.contributes[i] ? gives : 0))
              << gives << " " << whole << " " << gets;
          break;
        case OpKind::kAllToAll:
          LH_CHECK(gives >= owned[i] && gets >= to[i]) << gives << " " << gets;
          break;
        case OpKind::kGather:
          LH_CHECK(gives >= owned[i] && gets >= to[i]) << gives << " " << gets;
          break;
        case OpKind::kScatter:
          LH_CHECK(gives >= owned[i] && gets >= to[i]) << gives << " " << gets;
          break;
        default:
          break;
      }
    }
  }
  const LocalPost& PostOf(const PostRef& post) {
    const auto& posts = trainers_.at(post.local).posts;
    const auto it = posts.find(post.call);
    LH_CHECK(it != posts.end()) << "an op of a post that was answered";
    return it->second;
  }
  void Take(const CreditAttempt& a) {
    LH_CHECK(attempts_.contains({a.group, a.ordinal})) << "credit for nothing";
  }
  void Take(const StopAttempt& a) {
    const auto it = attempts_.find({a.group, a.ordinal});
    LH_CHECK(it != attempts_.end() && it->second.epoch == a.attempt) << "stops nothing";
    LH_CHECK(!it->second.stopping && !it->second.finishing);
    it->second.stopping = true;
  }
  void Take(const FinishAttempt& a) {
    const auto it = attempts_.find({a.group, a.ordinal});
    LH_CHECK((it != attempts_.end()) == a.commit) << "commits nothing, or drops an attempt";
    if (it == attempts_.end()) return;
    LH_CHECK(it->second.complete && !it->second.stopping && !it->second.finishing);
    it->second.finishing = true;
  }

  void Take(const StartTransfer& a) {
    LH_CHECK(transfers_.emplace(a.local, a.background).second) << "two transfers of a member";
  }
  void Take(const ChangeSources& a) {
    LH_CHECK(transfers_.contains(a.local)) << "sources for nothing";
  }
  void Take(const CompareManifest& a) { comparing_.insert(a.local); }

  FuzzInput in_;
  PeerCore core_;
  Tick now_{Seconds(100)};
  bool up_ = false;  // the control stream
  std::map<GroupKey, Group> groups_;
  std::map<std::pair<GroupKey, MemberId>, Epoch> joined_;
  uint64_t last_local_ = 0;
  uint64_t last_call_ = 0;
  std::map<LocalId, Trainer> trainers_;
  std::map<GroupKey, std::set<PeerId>> wanted_;
  std::set<PeerId> up_links_;
  std::vector<SendReady> sent_;
  std::map<PeerId, uint64_t> ordinals_;
  std::map<OpKey, Attempt> attempts_;
  std::map<LocalId, bool> transfers_;  // whether in the background
  std::multiset<LocalId> comparing_;
  std::vector<TryAddress> trying_;
  std::vector<Event> due_;  // what must follow at once
};

}  // namespace
}  // namespace longhaul::peerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::peerd::Host(data, size).Run();
  return 0;
}
