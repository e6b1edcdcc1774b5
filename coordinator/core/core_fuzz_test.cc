// Feeds the coordinator's core sequences of events. The events of peers may be anything that the
// border lets through (FaultIn). Those of the driver are legal: it opens each session once, answers
// each OrderRing once, lets no time go backwards, and gives a new core what Persist has stored.
//
// Each choice is one byte, then what the choice needs. Half of the choices answer what the core has
// sent, so that sequences come far. No check may fire, the invariants must hold after each step,
// and a peer must accept whatever the core sends.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/fields.h"
#include "base/fields_json.h"
#include "coordinator/core/coordinator_core.h"
#include "tests/support/fuzz_input.h"

namespace longhaul::coordinator {
namespace {

constexpr size_t kPeers = 5;
constexpr uint32_t kDetectMs = 1000;

class World {
 public:
  World(const uint8_t* data, size_t size) : in_(data, size) { Boot(); }

  void Run() {
    for (int i = 0; i < 400 && !in_.empty(); ++i) Choose();
  }

 private:
  // What a peer has heard, and can answer.
  struct Peer {
    SessionId session;  // 0: it has none
    uint64_t store = 0;
    uint64_t term = 0;
    std::string coordinator;
    std::map<GroupKey, control::PrepareEpoch> prepared;
    std::map<GroupKey, Epoch> committed;
    struct Member {
      GroupKey group;
      uint64_t votes = 0;
      uint64_t syncs = 0;
      std::optional<control::SyncResult> told;
    };
    std::map<MemberId, Member> members;
    std::optional<control::TryPeer> asked;
  };

  void Boot() {
    CoreConfig config;
    config.incarnation = "c" + std::to_string(++boots_);
    config.detect_ms = kDetectMs;
    config.ring_interval_ms = in_.Bool() ? 1000 : 300000;
    config.entropy = std::string(kSecretBytes, static_cast<char>('a' + boots_ % 26));
    for (Peer& peer : peers_) peer.session = SessionId();
    strangers_.clear();
    orders_.clear();
    // The records as a store keeps them.
    Records stored;
    const std::string text = ToJson(store_, {.secrets = true});
    const std::string fault = FromJson(text, &stored);
    LH_CHECK(fault.empty() && stored == store_) << fault << " " << text;
    core_ = std::make_unique<CoordinatorCore>(config, std::move(stored));
  }

  void Choose() {
    Peer& peer = peers_[in_.Below(kPeers)];
    switch (in_.Byte() % 24) {
      case 0:
        return Open(&peer);
      case 1:
        return Close(&peer);
      case 2: {  // a stream that says something before Hello
        const SessionId session(++last_session_);
        strangers_.push_back(session);
        Step(SessionOpened{session});
        return Say(session, in_.DrawKind<control::PeerMessage>());
      }
      case 3:
      case 4:
        return Say(peer.session, in_.DrawKind<control::PeerMessage>());
      case 5: {
        Hello(&peer, in_.Draw<control::Hello>());
        return;
      }
      case 6:
      case 7:
        return Join(peer);
      case 8:
      case 9:
        return Vote(&peer);
      case 10:
      case 11:
        return Ready(peer);
      case 12: {
        const control::PrepareEpoch* const prepare = Pick(peer.prepared);
        if (prepare == nullptr) return;
        auto failed = in_.Draw<control::EpochFailed>();
        failed.group = prepare->group;
        failed.epoch = prepare->epoch;
        failed.preparation = prepare->preparation;
        if (in_.Bool()) failed.unreachable = {{PeerOf(in_.Below(kPeers)), "gone"}};
        return Say(peer.session, failed);
      }
      case 13: {
        auto lost = in_.Draw<control::LinkLost>();
        if (const control::PrepareEpoch* const prepare = Pick(peer.prepared)) {
          lost.group = prepare->group;
          lost.epoch = prepare->epoch;
        }
        lost.peer = PeerOf(in_.Below(kPeers));
        return Say(peer.session, lost);
      }
      case 14: {
        auto leave = in_.Draw<control::Leave>();
        Name(peer, &leave.group, &leave.member);
        return Say(peer.session, leave);
      }
      case 15: {
        control::SyncVote vote{{}, MemberId(), Offer()};
        Peer::Member* const member = Name(peer, &vote.group, &vote.member);
        if (member != nullptr) vote.offer.number = member->syncs + in_.Below(3);
        return Say(peer.session, vote);
      }
      case 16: {
        auto done = in_.Draw<control::FetchDone>();
        Peer::Member* const member = Name(peer, &done.group, &done.member);
        if (member != nullptr && member->told) {
          done.number = member->told->number;
          done.state = member->told->state;
          if (in_.Bool()) done.outcome = {};
        }
        return Say(peer.session, done);
      }
      case 17: {
        auto tried = in_.Draw<control::PeerTried>();
        if (peer.asked) {
          tried.group = peer.asked->group;
          tried.trial = peer.asked->trial;
          tried.peer = peer.asked->peer.peer;
          if (in_.Bool()) tried.reason.clear();
        }
        return Say(peer.session, tried);
      }
      case 18: {
        auto report = in_.Draw<control::LinkReport>();
        for (control::LinkMeasure& link : report.links) {
          link.from = PeerOf(static_cast<size_t>(&peer - peers_));
          link.to = PeerOf(in_.Below(kPeers));
          if (in_.Bool()) std::swap(link.from, link.to);
        }
        return Say(peer.session, report);
      }
      case 19:
        return Order();
      case 20: {
        if (orders_.empty()) return Wait(kDetectMs / 3);
        const RingOrdered answer = Solve(orders_.back());
        orders_.pop_back();
        return Step(answer);
      }
      case 21: {  // all peers are heard
        for (Peer& one : peers_) Say(one.session, control::Heartbeat{});
        return Wait(kDetectMs / 3);
      }
      case 22:
        return Wait(static_cast<int64_t>(in_.Below(4)) * kDetectMs * 3 / 2);
      case 23:
        if (in_.Byte() < 32) return Boot();
        return Look();
    }
  }

  static PeerId PeerOf(size_t index) { return PeerId(index + 1); }
  template <class Map>
  const typename Map::mapped_type* Pick(const Map& map) {
    if (map.empty()) return nullptr;
    return &std::next(map.begin(), static_cast<ptrdiff_t>(in_.Below(map.size())))->second;
  }
  // Names one of the peer's members, if it has some and the input does not choose another one.
  Peer::Member* Name(Peer& peer, GroupKey* group, MemberId* member) {
    if (peer.members.empty() || in_.Below(8) == 7) {
      *member = MemberId(in_.Number());
      *group = in_.Draw<GroupKey>();
      return nullptr;
    }
    const auto it =
        std::next(peer.members.begin(), static_cast<ptrdiff_t>(in_.Below(peer.members.size())));
    *member = it->first;
    *group = it->second.group;
    return &it->second;
  }
  control::SyncOffer Offer() {
    auto offer = in_.Draw<control::SyncOffer>();
    offer.manifest = {1, in_.Below(8) == 7};
    offer.state = {2, in_.Below(3)};
    return offer;
  }

  void Open(Peer* peer) {
    if (peer->session) Close(peer);
    peer->session = SessionId(++last_session_);
    Step(SessionOpened{peer->session});
    auto hello = control::Hello();
    if (in_.Bool()) {
      for (const auto& [id, member] : peer->members) {
        control::GroupState* state = nullptr;
        for (control::GroupState& said : hello.groups) {
          if (said.group == member.group) state = &said;
        }
        if (state == nullptr) {
          state = &hello.groups.emplace_back();
          state->group = member.group;
          state->committed = peer->committed[member.group];
          if (const auto it = peer->prepared.find(member.group); it != peer->prepared.end()) {
            state->prepared = it->second.epoch;
            state->preparation = it->second.preparation;
            state->frozen = it->second.freeze;
          }
        }
        state->members.push_back(id);
      }
      hello.store = peer->store;
      hello.term = peer->term;
      hello.coordinator = peer->coordinator;
    } else if (in_.Bool()) {
      hello = in_.Draw<control::Hello>();
    }
    Hello(peer, std::move(hello));
  }
  // The stream's ends check that the peer has the key and that the id is that of the key.
  void Hello(Peer* peer, control::Hello hello) {
    const size_t index = static_cast<size_t>(peer - peers_);
    hello.peer = PeerOf(index);
    hello.key =
        std::string(LH_PUBLIC_KEY_BYTES, static_cast<char>(in_.Below(16) == 15 ? 0 : index));
    hello.endpoints = {"10.0.0." + std::to_string(index) + ":29700"};
    if (in_.Below(16) != 15) hello.protocol = control::kProtocolVersion;
    Say(peer->session, std::move(hello));
  }
  void Close(Peer* peer) {
    if (!peer->session) return;
    Step(SessionClosed{std::exchange(peer->session, SessionId()), in_.Below(2) == 1});
  }

  void Join(Peer& peer) {
    auto join = in_.Draw<control::Join>();
    if (in_.Below(8) != 7) {
      join.request = ++last_request_;
      join.wish.cohort_size = join.wish.cohort.empty() ? 0 : 2;
      join.wish.step_deadline_ms = 0;
      join.wish.members %= 4;
      join.group.run = "run";
    }
    Say(peer.session, join);
  }
  void Vote(Peer* peer) {
    auto vote = in_.Draw<control::Vote>();
    Peer::Member* const member = Name(*peer, &vote.group, &vote.member);
    if (member != nullptr) {
      vote.number = member->votes + 1;
      if (vote.sync) {
        vote.sync = Offer();
        vote.sync->number = member->syncs + 1;
      }
    }
    Say(peer->session, vote);
  }
  void Ready(Peer& peer) {
    const control::PrepareEpoch* const prepare = Pick(peer.prepared);
    if (prepare == nullptr) return;
    control::EpochReady ready{prepare->group, prepare->epoch, {}, prepare->preparation};
    if (in_.Bool()) ready.ops = in_.Draw<control::EpochReady>().ops;
    if (in_.Below(8) == 7) ready.preparation = in_.Number();
    Say(peer.session, ready);
  }
  void Order() {
    if (in_.Bool()) {
      Peer& peer = peers_[in_.Below(kPeers)];
      EvictMember evict{{}, MemberId(), "test"};
      Name(peer, &evict.group, &evict.member);
      Step(evict);
    } else {
      Step(DrainPeer{PeerOf(in_.Below(kPeers + 1)), "test"});
      Step(PeerKnocked{PeerOf(in_.Below(kPeers + 1))});
    }
  }
  void Wait(int64_t ms) {
    const Tick end = now_ + Millis(ms);
    // The loop may be late, or on time.
    if (in_.Bool()) {
      now_ = end;
      return Step(TimePassed{});
    }
    for (int i = 0; i < 50 && core_->NextDeadline() <= end; ++i) {
      now_ = std::max(now_, core_->NextDeadline());
      Step(TimePassed{});
    }
    now_ = std::max(now_, end);
    Step(TimePassed{});
  }
  // What the driver asks for metrics, pages and limits.
  void Look() {
    std::set<PeerId> peers;
    for (size_t i = 0; i < kPeers; ++i) peers.insert(PeerOf(i));
    core_->HoldingsOf(peers);
    for (const GroupView& view : core_->GetOverview().groups) {
      core_->LinksOf(view);
      core_->PaceOf(view.group);
    }
    LH_CHECK(core_->Clone().Digest() == core_->Digest());
  }

  void Say(SessionId session, control::PeerMessage message) {
    if (!session) return;
    const bool legal = std::visit([](const auto& m) { return FaultIn(m).empty(); }, message);
    if (legal) Step(FromPeer{session, std::move(message)});
  }

  void Step(const Event& event) {
    const std::vector<Action> actions = core_->Step(event, now_);
    core_->CheckInvariants();
    for (size_t i = 0; i < actions.size(); ++i) {
      if (const auto* persist = std::get_if<Persist>(&actions[i])) {
        LH_CHECK(i == 0 && !persist->mutations.empty()) << "something was sent before Persist";
        for (const Mutation& mutation : persist->mutations) Apply(mutation, &store_);
      } else if (const auto* send = std::get_if<ToPeer>(&actions[i])) {
        Receive(*send);
      } else if (const auto* close = std::get_if<CloseSession>(&actions[i])) {
        for (Peer& peer : peers_) {
          if (peer.session == close->session) peer.session = SessionId();
        }
        std::erase(strangers_, close->session);
      } else if (const auto* order = std::get_if<OrderRing>(&actions[i])) {
        LH_CHECK(orders_.empty()) << "two rings at a time";
        orders_.push_back(*order);
      }
    }
  }
  void Receive(const ToPeer& send) {
    std::visit(
        [](const auto& m) {
          const std::string fault = FaultIn(m);
          LH_CHECK(fault.empty()) << "sends a message that is refused: " << fault;
        },
        send.message);
    for (Peer& peer : peers_) {
      if (peer.session == send.session) {
        std::visit([&](const auto& m) { Take(&peer, m); }, send.message);
        return;
      }
    }
    for (const SessionId stranger : strangers_) {
      if (stranger == send.session) return;
    }
    LH_CHECK(false) << "sent to a closed session";
  }

  template <class Message>
  void Take(Peer*, const Message&) {}
  void Take(Peer* peer, const control::Welcome& m) {
    peer->store = m.store;
    peer->term = m.term;
    peer->coordinator = m.coordinator;
  }
  void Take(Peer* peer, const control::JoinPending& m) { peer->members[m.member].group = m.group; }
  void Take(Peer* peer, const control::PrepareEpoch& m) { peer->prepared[m.group] = m; }
  void Take(Peer* peer, const control::CommitEpoch& m) {
    peer->committed[m.group] = m.epoch;
    if (in_.Below(4) != 3) peer->prepared.erase(m.group);
  }
  void Take(Peer* peer, const control::VoteResult& m) { peer->members[m.member].votes = m.number; }
  void Take(Peer* peer, const control::SyncResult& m) {
    Peer::Member& member = peer->members[m.member];
    member.told = m;
    if (m.action == control::SyncAction::kEnd) member.syncs = m.number;
  }
  void Take(Peer* peer, const control::Removed& m) {
    if (in_.Below(4) != 3) peer->members.erase(m.member);
  }
  void Take(Peer* peer, const control::TryPeer& m) { peer->asked = m; }

  FuzzInput in_;
  int boots_ = 0;
  Tick now_{Seconds(100)};
  std::unique_ptr<CoordinatorCore> core_;
  Records store_;
  uint64_t last_session_ = 0;
  uint64_t last_request_ = 0;
  Peer peers_[kPeers];
  std::vector<SessionId> strangers_;  // open streams without a Hello of ours
  std::vector<OrderRing> orders_;
};

}  // namespace
}  // namespace longhaul::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::coordinator::World(data, size).Run();
  return 0;
}
