// Runs the attempts of one op at all its peers, in one thread, over a model network. For tests and
// the simulation.
//
// The order of events is drawn from a seed:
// - peers start, and credits arrive
// - the header of a segment arrives, its memory is read (as late as the contract of AttemptSink
//   allows), its payload arrives, and Sent() is called, early or late
// - segments overtake each other
// - some segments are lost when they are half received; they are read and sent again, also after
//   their Sent()
// - work is done in slices
//
// A breach of the contract aborts the process: memory changed while a segment referred to it, or an
// attempt was called after Stop().
//
// Plain objects: one thread, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/prng.h"
#include "peerd/collective/attempt.h"

namespace longhaul::peerd {

// Either MakeRingAttempt or MakeMeshAttempt.
using AttemptMaker = absl::StatusOr<std::unique_ptr<Attempt>> (*)(const AttemptSpec&, AttemptSink*,
                                                                  ScratchPool*);

// Lets the attempt do all work that is left, in slices of `bytes_max`.
void WorkOff(Attempt* attempt, uint64_t bytes_max = 1);
// Calls Commit() and does all work.
void CommitWhole(Attempt* attempt);

class ModelNetwork {
 public:
  // specs[i] is the spec of position i. `pool` must outlive the network.
  ModelNetwork(AttemptMaker make, const std::vector<AttemptSpec>& specs, ScratchPool* pool,
               uint64_t seed);
  ~ModelNetwork();
  ModelNetwork(const ModelNetwork&) = delete;
  ModelNetwork& operator=(const ModelNetwork&) = delete;

  // Lets one event happen. False: no event is possible any more.
  bool Step();
  // Runs until no event is possible. False: a peer that was not stopped is not complete.
  bool Run();

  // Does what a peer does that freezes: cuts off segments that are being received, then calls
  // Attempt::Stop().
  void Stop(int position);

  Attempt& attempt(int position) { return *peers_[position]->attempt; }
  bool complete(int position) const { return peers_[position]->complete; }
  bool stopped(int position) const { return peers_[position]->stopped; }
  // The segments on their way, as text for a failing test.
  std::string ToString() const;

 private:
  struct Peer final : AttemptSink {
    void SendSegment(int to, const Segment& segment, const uint8_t* data, uint64_t cookie) override;
    void Complete() override;

    ModelNetwork* network = nullptr;
    int position = 0;
    std::unique_ptr<Attempt> attempt;
    bool started = false;
    bool complete = false;
    bool stopped = false;
    bool in_start = false;
    std::set<int> credit_due;  // positions that do not know yet that this peer has started
  };
  struct Flight {
    int from = 0;
    int to = 0;
    Segment segment;
    const uint8_t* data = nullptr;
    uint64_t cookie = 0;
    std::string as_handed;
    bool read = false;
    uint8_t* place = nullptr;
    bool placed = false;     // by the receiver; or dropped by a stopped one
    bool delivered = false;  // completely; or dropped
    bool returned = false;   // Sent() was called
  };

  void StepPeer(Peer* peer);
  void StepFlight(uint64_t index);
  void ReadMemory(Flight* flight);
  void PlaceHeader(Flight* flight);
  void Deliver(Flight* flight);
  void Lose(Flight* flight);
  void Return(Flight* flight);

  Prng prng_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::unique_ptr<Flight>> flights_;
};

// The inputs, outputs and expected result of one op. The values are small whole numbers, so that
// every order of additions is exact in every dtype. Memory begins `misalign` bytes after a multiple
// of 64.
struct ModelOp {
  struct Options {
    OpDesc desc;
    int size = 1;                    // positions. desc.world and desc.root are not used
    std::vector<int> local_members;  // by position; empty: one at each
    int root = 0;  // broadcast: position of the root, which is the last member there
    // By position, then by local member: whether it is in place. Missing ones are out of place.
    std::vector<std::vector<bool>> in_place;
    // By position, then by local member: whether it contributes. Missing ones do. At least one
    // does.
    std::vector<std::vector<bool>> contributes;
    // Each position sends segments of another number of grains, up to `segment_grains`.
    uint32_t grain_bytes = 64;
    uint32_t segment_grains = 4;
    uint64_t window_bytes = 128;
    bool cached = false;    // whether tensor and scratch are taken to be in the caches
    uint64_t misalign = 0;  // bytes; a multiple of the element size
    uint64_t seed = 1;
  };
  explicit ModelOp(const Options& options);

  std::vector<AttemptSpec> specs;
  // Describes the first source or target that is not as it was posted; "" if all are.
  std::string InputsDiffer() const;
  // Uses fractions instead of whole numbers, so that results depend on the order of additions. Call
  // it before the first use of the specs.
  void FillWithFractions(uint64_t seed);
  // Describes the first target that does not hold the result; "" if all do. Not for fractions.
  std::string ResultsDiffer() const;

 private:
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<std::pair<uint8_t*, std::string>> inputs_;
  std::string expected_;
  std::vector<std::pair<int, int>> owners_;  // of the cuts: position and local member
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
