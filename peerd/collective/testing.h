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

// Shares for so many positions: of some positions large, small, or nothing. Sometimes empty.
Shares RandomShares(Prng* prng, size_t positions);

// The inputs, outputs and expected result of one op. Results are computed member by member from
// what docs/concepts.md promises, without layout.h and without the kernels. The values are such
// that every order of additions is exact, and that halves would differ if they were rounded more
// than once. Memory begins `misalign` bytes after a multiple of 64, and is watched on both sides.
struct ModelOp {
  struct Options {
    OpDesc desc;                     // world, root and the list are not used
    int size = 1;                    // positions
    std::vector<int> local_members;  // by position; empty: one at each
    // Position of the root or the sender, which is the last member there. A receiver is the first
    // member of the position after that.
    int root = 0;
    std::vector<Piece> pieces;  // empty: one, of desc.dtype and desc.count
    // By position, then by local member: whether it is in place, if the kind allows that. Missing
    // ones are out of place.
    std::vector<std::vector<bool>> in_place;
    // By position, then by local member: whether it contributes. Missing ones do. At least one
    // does.
    std::vector<std::vector<bool>> contributes;
    // Each position sends segments of another number of grains, up to `segment_grains`.
    uint32_t grain_bytes = 64;
    uint32_t segment_grains = 4;
    uint64_t window_bytes = 128;
    Shares shares;          // of an op without cuts
    bool cached = false;    // whether tensor and scratch are taken to be in the caches
    uint64_t misalign = 0;  // bytes; a multiple of the element size
    // The lengths of unequal parts, up to desc.count, and the weights are drawn from it, too.
    uint64_t seed = 1;
  };
  explicit ModelOp(const Options& options);

  std::vector<AttemptSpec> specs;
  // Describes the first input that is not as it was posted, or memory beside a tensor that was
  // written to; "" if there is none.
  std::string InputsDiffer() const;
  // Describes the first target that was written to though the op has not ended well; "" if there is
  // none. Only a reduce-scatter promises that.
  std::string TargetsTouched() const;
  // Uses fractions in the float inputs of a reduction, so that results depend on the order of
  // additions. Call it before the first use of the specs.
  void FillWithFractions(uint64_t seed);
  // Describes the first target that does not hold the result; "" if all do. Not for fractions.
  std::string ResultsDiffer() const;
  // The bytes of all targets of a local member, piece after piece.
  std::string TargetsOf(int position, int member) const;

 private:
  struct Member {
    int position = 0;
    int local = 0;
    bool contributes = true;
    double weight = 1;
  };
  struct Tensor {
    uint8_t* data = nullptr;
    uint64_t bytes = 0;
    std::string expected;  // bytes
    DType dtype = DType::kFloat32;
    std::string where;
  };
  using Values = std::vector<std::string>;  // by piece: the bytes of a tensor

  uint8_t* NewMemory(uint64_t bytes, uint64_t misalign);
  // Parts of the whole that a member has in its source or target, in elements of piece k.
  uint64_t PartCount(const Options& options, size_t from, size_t to, size_t k) const;
  Values Sums(const Options& options, const std::vector<Values>& inputs,
              const std::vector<uint64_t>& counts) const;

  OpDesc desc_;
  std::vector<Piece> pieces_;
  std::vector<Member> members_;                 // in rank order
  std::vector<std::vector<uint64_t>> lengths_;  // of unequal parts, by sender, then by receiver
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<std::pair<const uint8_t*, uint64_t>>
      tensors_;  // all of them, to watch what is beside
  std::vector<Tensor> inputs_;
  std::vector<Tensor> targets_;
};

}  // namespace longhaul::peerd
