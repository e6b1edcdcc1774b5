// Bugs that the harness can plant, to show that its checkers find them.
//
// They are made by the harness, outside the production code: it changes, drops or forges what
// passes through its hands, so that the run looks as if a core, the engine or the transport had the
// bug.
#pragma once

#include <string_view>

namespace longhaul::sim {

enum class Planted {
  kNone,
  kDoneWhileFrozen,    // a peer that froze an op still says DONE for it
  kStaleFrames,        // frames of an older attempt pass for new ones
  kNoRestore,          // a stopped attempt does not put the originals back
  kNoDetach,           // a stopped attempt's receives are not diverted
  kSentTooEarly,       // memory is released while the network still reads it
  kFateFlipped,        // one peer is told another fate than the others
  kEpochReused,        // a restarted coordinator forgets the numbers it has used
  kSentBeforeDurable,  // messages overtake the store
  kCommitLost,         // a commit is dropped without its stream breaking
  kRingDiffers,        // one peer gets the members in another order
  kMinWorldIgnored,    // an op goes on with fewer members than it asked for
  kFreezeForNothing,   // a lost stream freezes a group that has nothing to do with it
  kAnswerTwice,        // a trainer's request is answered twice
  kLaneForgets,        // what a lost lane carried is not sent again
  kTermsIgnored,       // a member joins without the cohort and with a deadline it did not ask for
  kChunksUnchecked,    // what comes of a state is taken for what was asked for
  kResultForgotten,    // a small op that is announced again comes with zeros, not its result
  kWrittenEarly,       // what is fetched is written to the tensors before the sync has ended
  kPreparedUntold,     // a peer does not say what it has prepared, nor which preparation it answers
  kTermUntold,         // a peer does not say which term of the store it knows
  kDrainForgotten,     // a coordinator that restarts forgets whom an operator drains
  // Of the engine:
  kFinishLate,        // trainers are told of an op before its result is in place
  kGoneFirst,         // that a member is out is told before its requests are answered
  kLinkDownLost,      // a link that is lost while the coordinator is away is forgotten
  kReadersForgotten,  // a sync is told to be over while the network still reads the tensors
};

struct PlantedName {
  Planted planted;
  const char* name;
  bool explored = true;  // shows in small runs without bytes too (explore.h)
};
inline constexpr PlantedName kPlanted[] = {
    {Planted::kDoneWhileFrozen, "done_while_frozen"},
    {Planted::kStaleFrames, "stale_frames"},
    {Planted::kNoRestore, "no_restore"},
    {Planted::kNoDetach, "no_detach"},
    {Planted::kSentTooEarly, "sent_too_early", false},
    {Planted::kFateFlipped, "fate_flipped"},
    {Planted::kEpochReused, "epoch_reused"},
    {Planted::kSentBeforeDurable, "sent_before_durable"},
    {Planted::kCommitLost, "commit_lost"},
    {Planted::kRingDiffers, "ring_differs"},
    {Planted::kMinWorldIgnored, "min_world_ignored", false},
    {Planted::kFreezeForNothing, "freeze_for_nothing", false},
    {Planted::kAnswerTwice, "answer_twice"},
    {Planted::kLaneForgets, "lane_forgets", false},
    {Planted::kTermsIgnored, "terms_ignored", false},
    {Planted::kChunksUnchecked, "chunks_unchecked", false},
    {Planted::kResultForgotten, "result_forgotten"},
    {Planted::kWrittenEarly, "written_early", false},
    {Planted::kPreparedUntold, "prepared_untold"},
    {Planted::kTermUntold, "term_untold", false},
    {Planted::kDrainForgotten, "drain_forgotten", false},
    {Planted::kFinishLate, "finish_late", false},
    {Planted::kGoneFirst, "gone_first", false},
    {Planted::kLinkDownLost, "link_down_lost", false},
    {Planted::kReadersForgotten, "readers_forgotten", false},
};

}  // namespace longhaul::sim
