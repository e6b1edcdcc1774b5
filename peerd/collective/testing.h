// Attempts of one op at all its peers, in one thread, over a model network.
//
// Whatever can happen next, happens in an order drawn from a seed: peers start, credits arrive, a
// segment's header arrives, its memory is read (as late as the contract of AttemptSink allows), its
// payload arrives, Sent() comes back early or late; segments overtake each other, and some are lost
// half received and read and sent again, be it after their Sent(); work is done in slices. Breaches
// of contract abort the process: memory that changed while a segment referred to it, calls after
// Stop().
//
// Plain objects: one thread, no clock. For tests and the simulation.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/prng.h"
#include "peerd/collective/attempt.h"

namespace longhaul::peerd {

// MakeRingAttempt or MakeMeshAttempt.
using AttemptMaker = absl::StatusOr<std::unique_ptr<Attempt>> (*)(const AttemptSpec&, AttemptSink*,
                                                                  ScratchPool*);

// All the work that is left, in slices of that size.
void WorkOff(Attempt* attempt, uint64_t bytes_max = 1);
// Commit(), to the end.
void CommitWhole(Attempt* attempt);

class ModelNetwork {
 public:
  // specs[i] is that of position i; `pool` outlives the network.
  ModelNetwork(AttemptMaker make, const std::vector<AttemptSpec>& specs, ScratchPool* pool,
               uint64_t seed);
  ~ModelNetwork();
  ModelNetwork(const ModelNetwork&) = delete;
  ModelNetwork& operator=(const ModelNetwork&) = delete;

  // Lets one thing happen; false if nothing can any more.
  bool Step();
  // Until nothing can happen. False: some peer that was not stopped is not complete.
  bool Run();

  // As a peer that freezes: receives under way are cut off in the middle, then Attempt::Stop().
  void Stop(int position);

  Attempt& attempt(int position) { return *peers_[position]->attempt; }
  bool complete(int position) const { return peers_[position]->complete; }
  bool stopped(int position) const { return peers_[position]->stopped; }
  // Segments that are on their way: to show what a failing test saw.
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
    std::set<int> credit_due;  // this peer has started and these do not know yet
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
    bool placed = false;     // or thrown away by a stopped peer
    bool delivered = false;  // or thrown away
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

// Inputs, outputs and the expected result of one op over small whole numbers, so that every order
// of additions is exact in every dtype. Memory is 64-byte aligned plus `misalign` bytes.
struct ModelOp {
  struct Options {
    OpDesc desc;
    int size = 1;
    std::vector<int> local_members;  // by position; empty: one each
    // By position, then local member; missing ones are out of place.
    std::vector<std::vector<bool>> in_place;
    // The same; missing ones count. At least one does.
    std::vector<std::vector<bool>> contributes;
    // Segments have up to `segment_grains` of them, each position's another number.
    uint32_t grain_bytes = 64;
    uint32_t segment_grains = 4;
    uint64_t window_bytes = 128;
    bool cached = false;    // tensors and scratch are taken to be in cache
    uint64_t misalign = 0;  // whole elements
    uint64_t seed = 1;
  };
  explicit ModelOp(const Options& options);

  std::vector<AttemptSpec> specs;
  // Of the first source or target that is not as it was posted; "" if all inputs are.
  std::string InputsDiffer() const;
  // In place of the whole numbers: results depend on the order of additions. Before the first use
  // of the specs.
  void FillWithFractions(uint64_t seed);
  // Of the first target that does not hold the result; "" if all do. Not of fractions.
  std::string ResultsDiffer() const;

 private:
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<std::pair<uint8_t*, std::string>> inputs_;
  std::string expected_;
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
