// A post of a member: what it says of its op, whatever else is in flight.
//
// Pure functions of the post and the epochs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/op_state.h"

namespace longhaul::peerd {

// Which boundaries a member has passed; see NewPost.
struct Place {
  Epoch boundary;
  uint64_t step = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
  LH_FIELDS(Place, LH_FIELD(boundary), LH_FIELD(step));
};

struct NewPost {
  LocalPost local;
  MemberId member;
  Epoch boundary;     // EpochRecord::boundary at the member's last step boundary
  uint64_t step = 0;  // how many boundaries the member has passed since then
};

// The set of the op; see OpState::set. The partner of a send or a receive is 0 if its rank is not
// there.
std::vector<MemberId> SetMembersOf(const NewPost& post, const EpochHistory& history);

// Returns what is wrong with the post, or "".
std::string ObjectionTo(const NewPost& post, const EpochHistory& history, PeerId self);

// The post as an input of its op: a root that was named by its rank is named by its id. The root is
// 0 if its rank is not there, or if the caller has taken another member for it.
PostedInput InputFrom(const NewPost& post, const EpochHistory& history, Tick now);

}  // namespace longhaul::peerd
