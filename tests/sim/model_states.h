// Shared states of simulated trainers, and a model of the transfers between peers.
//
// A state is a handful of chunks, each a number that stands for its bytes. Production code plans a
// transfer (TransferPlan); the model carries its asks and answers over the simulated network, where
// they wait for blocked paths, die with a process, and may come with a bit flipped. A chunk is
// written to an inbox and then checked, as by the daemon; a trainer's tensors are written when a
// sync has ended well.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/state/transfer_plan.h"
#include "tests/sim/planted.h"
#include "tests/sim/story.h"
#include "tests/sim/world.h"

namespace longhaul::sim {

inline constexpr size_t kStateChunks = 5;

// The tensors of a trainer: its own memory, which the peer maps.
struct ModelState {
  std::vector<uint64_t> chunks;
};
Hash128 RootOf(const ModelState& state);
// All trainers declare the same tensors.
inline constexpr Hash128 kModelManifest{7, 7};

class ModelTransfers {
 public:
  struct Options {
    World* world = nullptr;
    Node* node = nullptr;
    Story* story = nullptr;
    uint32_t detect_ms = 1500;
    Planted planted = Planted::kNone;
    double flips = 0;                             // share of chunks that come with a bit flipped
    int64_t chunk_us = 0;                         // the longest that a source takes for one
    std::function<ModelTransfers*(PeerId)> find;  // nullptr: no such peer, or it is dead
    std::function<void(peerd::Event)> tell;
    std::function<void()> chunk_arrived;
  };
  explicit ModelTransfers(PeerId self, Options options);

  // From a trainer's call until its answer.
  struct Held {
    std::shared_ptr<ModelState> state;
    control::SyncStrategy strategy = control::SyncStrategy::kPopular;
    Hash128 begun;                        // what it was then
    std::shared_ptr<ModelState> fetched;  // over that; nullptr: nothing is

    const std::shared_ptr<ModelState>& now() const { return fetched != nullptr ? fetched : state; }
  };
  void Hold(peerd::LocalId local, std::shared_ptr<ModelState> state,
            control::SyncStrategy strategy);
  // `good`: the trainer has what was fetched from now on.
  Held Release(peerd::LocalId local, bool good);
  // The member is out.
  void Forget(peerd::LocalId local);

  // ---- actions of the core
  void Serve(const peerd::ServeState& action);
  void EndServe(const peerd::EndServe& action);
  void Start(const peerd::StartTransfer& action);
  void Change(const peerd::ChangeSources& action);
  void Stop(const peerd::StopTransfer& action);
  void Compare(const peerd::CompareManifest& action);

  // Runs `act` once no chunk of the member's state is being read: at once, or later, in order.
  void WhenUnread(peerd::LocalId local, std::function<void()> act);
  bool reading() const;

  // What is asked of the peer is asked again.
  void OnLinkDown(PeerId peer);
  void Die();

 private:
  struct Serving {
    GroupKey group;
    MemberId member;
    Hash128 root;
    control::SyncStrategy strategy = control::SyncStrategy::kPopular;
    std::shared_ptr<ModelState> state;
    std::vector<uint64_t> digests;
    bool may_change = false;
    peerd::LocalId local;
  };
  // The network reads a chunk some time after it was asked for, also of a state that is not served
  // any more by then.
  struct Reads {
    int count = 0;
    std::deque<std::function<void()>> then;
  };
  struct Transfer {
    uint64_t id = 0;  // never reused in a run
    peerd::LocalId local;
    GroupKey group;
    Hash128 root;
    std::map<MemberId, PeerId> sources;
    Tick begun;
    // Until the digests of the chunks are here.
    MemberId asked;
    uint64_t digest_ask = 0;
    bool waits = false;        // nobody is left to ask
    std::set<MemberId> unfit;  // refused, or sent digests that do not add up
    std::set<MemberId> corrupt;
    bool background = false;
    // From then on.
    std::optional<peerd::TransferPlan> plan;
    std::vector<uint64_t> digests;
    std::map<peerd::AskId, size_t> asks;  // for this chunk
    Tick armed = kNever;
    bool stopping = false;
  };
  using Answer = std::function<void(ModelTransfers*)>;

  void Send(PeerId to, Answer what);
  Transfer* Find(peerd::LocalId local, uint64_t id);
  const Serving* FindServing(const GroupKey& group, MemberId member, const Hash128& root) const;

  struct Chunk {
    std::optional<uint64_t> value;
    bool changed = false;  // no value: the source has another one now
  };

  // ---- at the receiver
  void AskDigests(Transfer& transfer);
  void OnDigests(peerd::LocalId local, uint64_t id, uint64_t ask,
                 std::optional<std::vector<uint64_t>> digests);
  void Pump(peerd::LocalId local, uint64_t id);
  void Carry(Transfer& transfer, const peerd::TransferAction& action);
  void Write(const Transfer& transfer, size_t chunk, uint64_t value);
  void OnChunk(peerd::LocalId local, uint64_t id, peerd::AskId ask, Chunk chunk);
  void Arm(Transfer& transfer);
  void End(Transfer& transfer, Outcome outcome);

  // ---- at the source
  Chunk Read(const Serving& serving, size_t chunk, uint64_t digest);
  void EndRead(peerd::LocalId local);
  void Give(PeerId to, const GroupKey& group, MemberId member, const Hash128& root, size_t chunk,
            uint64_t digest, std::function<void(ModelTransfers*, Chunk)> answer);

  const PeerId self_;
  const Options options_;
  std::map<peerd::LocalId, Held> held_;
  std::map<peerd::LocalId, Serving> serving_;
  std::map<peerd::LocalId, Transfer> transfers_;
  std::map<peerd::LocalId, Reads> reads_;
};

}  // namespace longhaul::sim
