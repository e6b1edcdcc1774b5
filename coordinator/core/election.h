// Which state a group agrees on: the outcome of one sync, from what its members offer.
//
// Pure function of the offers and of the revision that is due; the order of the offers makes no
// difference. Rules, in this order:
//
//  1. Strategies. kPopular is used by all or by none. The side with fewer members is refused
//     (kPopular stays if they are as many).
//  2. Revisions. The first sync of a group takes the highest that is offered. Later ones expect the
//     one that is due: a higher one breaks the rule of increments and is refused; a lower one is
//     outdated, pulled forward, and can win only if nobody offers the one that is due, and only if
//     it is the committed one, below which the group never falls. What a peer kept of a former
//     member and is higher is of another history: pulled forward, it cannot win.
//  3. Manifests. Most votes win, ties go to the manifest with the lowest digest; the others are
//     refused, and learn by whose manifest.
//  4. Candidates: with kPopular everybody, otherwise those that send; but nobody whose offer is
//     incomplete. Among those with the highest legal revision the digest with most votes wins, ties
//     go to the lowest digest. Without a candidate nobody syncs: all are refused, or, if an offer
//     is incomplete and may be one the next time, all are to offer again. All alike: who is refused
//     goes on, and who offers again waits for the others.
//  5. Whoever has the elected state keeps it; the others fetch it, except a sender, which is
//     refused.
//
// Source of the rules: the shared-state semantics of PCCL (arXiv 2505.14065), made deterministic.
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

struct Candidate {
  MemberId member;
  control::SyncOffer offer;
  friend bool operator==(const Candidate&, const Candidate&) = default;
};

struct SyncVerdict {
  enum class Do : uint8_t {
    kKeep,   // its state is the elected one (it may be ahead of its revision)
    kFetch,  // from the holders
    kRefuse,
  };
  MemberId member;
  Do action = Do::kKeep;
  Outcome refusal;      // kRefuse
  MemberId compare_to;  // kRefuse for another manifest: who has the elected one; else none
  friend bool operator==(const SyncVerdict&, const SyncVerdict&) = default;
};

struct Election {
  // False: nobody was elected, every verdict refuses.
  bool elected = false;
  // Not empty: nobody was elected, but somebody may be when all have offered again; there are no
  // verdicts. For whose sake.
  std::string again;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  std::vector<MemberId> holders;      // who has it, by member number
  std::vector<SyncVerdict> verdicts;  // one an offer, by member number
};

// `due`: the revision that the next sync is to have, one more than the committed one; nullopt: the
// group has never synced. Each member offers once.
Election Elect(std::vector<Candidate> offers, std::optional<uint64_t> due);

}  // namespace longhaul::coordinator
