// Elects the state of a group: decides from the offers of its members which state a sync makes
// equal at all of them, who must fetch it, and who is refused.
//
// Pure function of the offers and of the committed revision. The order of the offers makes no
// difference. `due` is the highest revision that a member may have by now: the committed one plus
// the number of step boundaries since, at least 1. Members that sync at some boundaries only bring
// more than one new revision. The first sync of a group has neither.
//
// An offer stands for the group if its member took part in the last commit (Candidate.holds), or if
// it offers the very state of that commit. All others are of newcomers. While an offer stands for
// the group, newcomers have no vote, so that they cannot take the group over, however many come.
//
// The rules, in this order. An offer that a rule refuses takes no part in the rules below it.
//
//  1. Strategies. Either all members use kPopular, or none. If some do, the side with fewer votes
//  is
//     refused. If both sides are equally large, the members with kPopular stay.
//  2. Revisions. The first sync accepts any revision. Later, an offer above `due` is refused,
//     because a revision rises by at most one in a step. Exception: if its peer had kept the state
//     of a former member (SyncOffer.kept), the state may be of another history of the group. Then
//     the offer stays, but can only receive. An offer below `due` stays, too: its member is
//     outdated.
//  3. Manifests. The manifest with the most votes wins; with equal votes the one agreed on, then
//  the
//     lowest digest. All other offers are refused. SyncVerdict.compare_to names a member with the
//     winning manifest.
//  4. Winner. An offer is complete if its member holds all bytes of the state, and incomplete while
//     the member fetches them. A candidate is a complete offer that does not use kReceive. If a
//     candidate stands for the group and is not below the committed revision, a newcomer is a
//     candidate only with what its peer had kept. Among the candidates with the highest revision,
//     the state with the most votes wins; with equal votes the lowest digest. If there is no
//     candidate, or the highest revision is below the committed one, nobody is elected:
//     - if an incomplete offer does not use kReceive, it may be a candidate later: all members
//       offer again (Election.again)
//     - otherwise all offers are refused
//     All members get the same answer, because a refused member goes on, while a member that offers
//     again waits for the others.
//  5. Verdicts. A member with the elected state keeps it. The others fetch it. A member with kSend
//     never fetches, so it is refused.
//
// The rules are those of shared state in PCCL (arXiv 2505.14065), made deterministic. PCCL does not
// tell newcomers from members (docs/adr/0060-newcomers-have-no-vote.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

using control::SyncStrategy;

// The offer of one member.
struct Candidate {
  MemberId member;
  control::SyncOffer offer;
  bool holds = false;  // it took part in the commit that `agreed` tells of
  friend bool operator==(const Candidate&, const Candidate&) = default;
};

// What the election decided for one member.
struct SyncVerdict {
  enum class Do : uint8_t {
    kKeep,    // it has the elected state; the revision that it offered may be lower
    kFetch,   // it must fetch the state from the holders
    kRefuse,  // it gets the error `refusal`
  };
  MemberId member;
  Do action = Do::kKeep;
  Outcome refusal;      // set for kRefuse
  MemberId compare_to;  // set if refused for its manifest: a member with the elected manifest
  friend bool operator==(const SyncVerdict&, const SyncVerdict&) = default;
};

struct Election {
  // If false, no state was elected: either every verdict is kRefuse, or `again` is set.
  bool elected = false;
  // Not empty: no state was elected, but a later election may find one. There are no verdicts, and
  // all members must offer again. The text says why.
  std::string again;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  std::vector<MemberId> holders;      // members that have the elected state, by member number
  std::vector<SyncVerdict> verdicts;  // one for each offer, by member number
};

// What the group has agreed on, and how far its members may have come since.
struct Agreed {
  uint64_t revision = 0;  // committed
  uint64_t due = 1;       // the highest revision that may be offered; above `revision`
  Hash128 state = {};
  Hash128 manifest = {};
};

// Holds one election. Each member may occur in `offers` only once. `agreed`: nullopt: the group has
// never synced.
Election Elect(std::vector<Candidate> offers, std::optional<Agreed> agreed);

}  // namespace longhaul::coordinator
