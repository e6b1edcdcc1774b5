// The terms on which an announced op runs: whether it fits its participants, whether the lengths
// and weights that their members give fit together, and whose part is which.
//
// Pure functions of the op. All participants know the same terms, so they come to the same answers.
#pragma once

#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/outcome.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/op_state.h"

namespace longhaul::peerd {

// Returns how the announced op must end because of the members that take part. nullopt: it can run.
// `history` knows the names of members.
std::optional<Outcome> UnfitnessOf(const OpState& op, const EpochHistory& history);

// All READYs of the op are here. Looks at the terms of all participants: sets `mismatch` if their
// lengths do not fit, and `unfit` if no weight is left.
void JudgeTerms(OpState* op, PeerId self);

// The parts of the announced op; empty: parts belong to nobody.
std::vector<CutOwner> CutsOf(const OpState& op);

}  // namespace longhaul::peerd
