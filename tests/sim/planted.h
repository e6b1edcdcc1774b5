// Bugs that the harness can plant, to show that its checkers find them.
//
// The harness makes the bugs, outside the production code. It changes, drops or forges what passes
// through its hands, so that the run looks as if a core, the engine or the transport had the bug.
#pragma once

#include <string_view>

namespace longhaul::sim {

enum class Planted {
  kNone,
  kDoneWhileFrozen,    // a peer that froze an op still says DONE for it
  kStaleFrames,        // frames of an older attempt pass for frames of the new one
  kNoRestore,          // a stopped attempt does not restore the originals
  kNoDetach,           // a stopped attempt still receives into its memory
  kSentTooEarly,       // memory is released while the network still reads it
  kFateFlipped,        // some peers are told another fate than the others
  kEpochReused,        // a restarted coordinator forgets the numbers that it has used
  kSentBeforeDurable,  // messages leave before the store holds the decision
  kCommitLost,         // a commit is dropped, and its stream does not break
  kRingDiffers,        // some peers get the members in another order
  kMinWorldIgnored,    // an op goes on with fewer members than it asked for
  kFreezeForNothing,   // a peer reports a link as lost that is up
  kAnswerTwice,        // a trainer's request is answered twice
  kLaneForgets,        // what a lost lane carried is not sent again
  kTermsIgnored,       // a member joins without its cohort, and with another deadline
  kChunksUnchecked,    // a flipped bit in a fetched state is not noticed
  kResultForgotten,    // a small op that is redone brings zeros instead of its result
  kWrittenEarly,       // fetched chunks go to the tensors before the sync has ended
  kPreparedUntold,     // a peer does not say which preparation it knows, or answers
  kTermUntold,         // a peer does not say which term of the store it knows
  kDrainForgotten,     // a restarted coordinator forgets which peers drain
  kCancelForgotten,    // a cancelled op is aborted only where it was cancelled
  kSeedOfAttempt,      // an op that is redone rounds with other random numbers
  kErrorsEarly,        // an attempt that is stopped has changed errors
  kIndexForgotten,     // a peer signs each READY as the first of its name
  kWorldOfNow,         // a boundary is answered with the world of the answer
  kRefusalUntold,      // nobody hears of a call that was refused
  kAgeIsDeath,         // the end of a stream that reached its age passes for a broken one
  // Bugs of the engine:
  kFinishLate,        // trainers are told of an op before its result is in place
  kGoneFirst,         // a member is told that it is out before its requests are answered
  kLinkDownLost,      // a link that is lost while the coordinator is away is forgotten
  kReadersForgotten,  // a sync is said to be over while the network still reads the tensors
};

struct PlantedName {
  Planted planted;
  const char* name;
  bool explored = true;  // explore_test finds it too: small runs without tensor bytes show it
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
    {Planted::kCancelForgotten, "cancel_forgotten"},
    {Planted::kSeedOfAttempt, "seed_of_attempt", false},
    {Planted::kErrorsEarly, "errors_early", false},
    {Planted::kIndexForgotten, "index_forgotten"},
    {Planted::kWorldOfNow, "world_of_now", false},
    {Planted::kRefusalUntold, "refusal_untold"},
    {Planted::kAgeIsDeath, "age_is_death", false},
    {Planted::kFinishLate, "finish_late", false},
    {Planted::kGoneFirst, "gone_first", false},
    {Planted::kLinkDownLost, "link_down_lost", false},
    {Planted::kReadersForgotten, "readers_forgotten", false},
};

}  // namespace longhaul::sim
