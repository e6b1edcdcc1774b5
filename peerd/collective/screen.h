// The screen of contributions (--screen-contributions of peerd): looks for inputs of a reduction
// that spoil its result, and says which position or local member they came from. Pure.
//
// An admitted member may contribute any numbers. No key and no digest shows that they are wrong.
// But two kinds can be seen from outside: values that are not finite, and values that are far
// larger than those of all others.
//
// What a peer sees by itself:
// - the inputs of its own members, each of them alone, whatever the algorithm
// - mesh: the inputs of all positions to the chunks that it owns
// - one-shot: the inputs of all positions
// - ring: sums only, so nothing of other positions
// The input of a position is the sum of the inputs of its members, as it is sent: with weights, and
// rounded if the op encodes.
//
// An attempt only looks. The result is the same with and without the screen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// What was seen of one contribution.
struct Tally {
  uint64_t nan = 0;
  uint64_t inf = 0;
  uint64_t finite = 0;
  double squares = 0;  // the sum of the squares of the finite values; infinity if it overflows

  // The root mean square of the finite values; 0 if there are none.
  double Rms() const;
};

// Adds `count` elements to the tally. Elements that are no float16, bfloat16, float32 or float64
// are left out.
void Look(const uint8_t* data, uint64_t count, DType dtype, Tally* tally);

// What one attempt has seen.
struct Seen {
  Seen(size_t positions, size_t locals) : positions(positions), locals(locals) {}
  std::vector<Tally> positions;  // the input of each position to all that this peer adds up alone
  std::vector<Tally> locals;     // the whole input of each local member that contributes
};

// Whether inputs of such an op are looked at: it sums, averages or multiplies. In a minimum or a
// maximum an infinity may be meant.
bool MayScreen(const OpDesc& desc);

// A position whose input looks wrong.
struct Suspicion {
  int position = 0;
  std::vector<int> locals;  // own position only: the local members with values that are not finite
  uint64_t nan = 0;
  uint64_t inf = 0;
  // Set if the root mean square of the finite values is more than `factor` times the median.
  double rms = 0;
  double median = 0;
  uint32_t hosts = 0;  // that the median is of
};

// Returns the positions that look wrong, in order. `self`: the own position. Norms are compared if
// at least 3 positions contribute finite values, and their median is not 0. Of an even number of
// norms, the median is the lower one of the two in the middle.
std::vector<Suspicion> Judge(const Seen& seen, int self, double factor);

// The norms of a suspicion for people; "": they are not suspect.
std::string NormText(const Suspicion& suspicion);

}  // namespace longhaul::peerd
