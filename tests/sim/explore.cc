#include "tests/sim/explore.h"

#include <cstdio>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "base/check.h"
#include "base/digest.h"
#include "base/log.h"

namespace longhaul::sim {
namespace {

// A path with more moves than this counts as endless.
constexpr size_t kDepthMax = 3000;

class Search {
 public:
  Search(const ExploreScenario& scenario, const ExploreOptions& options)
      : scenario_(scenario), options_(options) {}

  ExploreResult Run();

 private:
  struct Frame {
    ExploreState state;
    int faults_left = 0;
    std::vector<Move> moves;
    size_t next = 0;
  };

  // Enters the state unless it was entered before.
  void Enter(ExploreState state, int faults_left);
  void Try(Frame* frame, const Move& move);
  bool Chosen(uint64_t digest, const Move& move) const;
  static void TellPath();

  static Search* running_;

  const ExploreScenario& scenario_;
  const ExploreOptions options_;
  absl::flat_hash_set<uint64_t> seen_;
  std::vector<std::unique_ptr<Frame>> stack_;
  std::vector<Move> path_;
  ExploreResult result_;
};

Search* Search::running_ = nullptr;

// Repeats the run with a story, up to the move that failed.
void Search::TellPath() {
  Search* const search = std::exchange(running_, nullptr);
  if (search == nullptr) return;
  std::printf("%s: the run that failed:\n", search->scenario_.name.c_str());
  ExploreState state(&search->scenario_, search->options_.planted);
  state.Setup();
  state.SetTrace(true);
  for (const Move& move : search->path_) {
    std::printf("%s\n", state.Text(move).c_str());
    std::fflush(stdout);
    state.Apply(move);  // the last one fails again
  }
}

bool Search::Chosen(uint64_t digest, const Move& move) const {
  if (options_.sample <= 1) return true;
  const uint64_t draw = Digester()
                            .Add(digest)
                            .Add(options_.seed)
                            .Add(uint64_t{static_cast<uint8_t>(move.kind)})
                            .Add(uint64_t{move.a} << 8 | move.b)
                            .value();
  return (draw >> 7) % options_.sample == 0;
}

void Search::Enter(ExploreState state, int faults_left) {
  const uint64_t digest =
      Digester().Add(state.Digest(faults_left > 0)).Add(static_cast<uint64_t>(faults_left)).value();
  if (!seen_.insert(digest).second) return;
  if (++result_.states >= options_.states_max) result_.complete = false;
  LH_CHECK(stack_.size() < kDepthMax) << "a run does not come to its end";
  auto frame = std::make_unique<Frame>(Frame{std::move(state), faults_left, {}, 0});
  frame->moves = frame->state.Moves(/*faults=*/faults_left > 0);
  if (frame->moves.empty()) ++result_.terminal;
  if (faults_left == 1) {
    std::erase_if(frame->moves,
                  [&](const Move& move) { return move.fault() && !Chosen(digest, move); });
  }
  stack_.push_back(std::move(frame));
  result_.depth_max = std::max<uint64_t>(result_.depth_max, stack_.size());
}

void Search::Try(Frame* frame, const Move& move) {
  const bool last = frame->next == frame->moves.size() && move.crash_after == 0;
  Move tried = move;
  for (;;) {
    ExploreState state = last ? std::move(frame->state) : frame->state;
    path_.resize(stack_.size() - 1);
    path_.push_back(tried);
    ++result_.moves;
    const bool made = state.Apply(tried);
    if (!made) return;  // the receiver has fewer actions
    if (tried.fault()) {
      ++(tried.crash_after == 0 ? result_.faults[static_cast<size_t>(tried.kind)]
                                : result_.faults_within);
    }
    Enter(std::move(state), frame->faults_left - (tried.fault() ? 1 : 0));
    if (tried.crash_after == 0) return;
    ++tried.crash_after;
  }
}

ExploreResult Search::Run() {
  SetLogLevel(LogLevel::kError);  // the stories tell what engines do
  running_ = this;
  SetCheckHook(&Search::TellPath);
  ExploreState start(&scenario_, options_.planted);
  start.Setup();
  Enter(std::move(start), options_.faults);
  while (!stack_.empty()) {
    Frame& frame = *stack_.back();
    if (frame.next == frame.moves.size() || !result_.complete) {
      stack_.pop_back();
      continue;
    }
    const size_t depth = stack_.size();
    const Move move = frame.moves[frame.next];
    ++frame.next;
    Try(&frame, move);
    LH_CHECK(stack_.size() >= depth);
  }
  running_ = nullptr;
  return result_;
}

Act Post(uint64_t tag) { return {Act::Kind::kPost, tag}; }
Act PostRing(uint64_t tag) { return {Act::Kind::kPost, tag, Algorithm::kRing}; }
Act PostMesh(uint64_t tag) { return {Act::Kind::kPost, tag, Algorithm::kMesh}; }
Act PostOrAbort(uint64_t tag) { return {Act::Kind::kPost, tag, Algorithm::kOneShot, true}; }
Act PostOrGiveUp(uint64_t tag) { return {Act::Kind::kPost, tag, Algorithm::kOneShot, true, true}; }
Act Step() { return {Act::Kind::kStep}; }
Act Bring(Act::Kind kind, uint64_t state) {
  Act act{kind};
  act.state = state;
  return act;
}
Act StepWith(uint64_t state) { return Bring(Act::Kind::kStep, state); }
Act Sync(uint64_t state) { return Bring(Act::Kind::kSync, state); }
Act Leave() { return {Act::Kind::kLeave}; }
Act Cancel(uint64_t tag) { return {Act::Kind::kCancel, tag}; }
Act Wait() { return {Act::Kind::kWait}; }
Act Refuse(uint64_t tag) { return {Act::Kind::kRefuse, tag}; }
Act Of(OpKind kind, Act act, int root = -1) {
  act.op = kind;
  act.root = root;
  return act;
}
// Only the members `set` take part.
Act Among(std::vector<int> set, Act act) {
  act.set = std::move(set);
  return act;
}
Act Weighted(uint64_t weight, Act act) {
  act.weight = weight;
  return act;
}
Act Unequal(Act act) {
  act.unequal = true;
  return act;
}
Act GivesUp(Act act) {
  act.gives_up = true;
  return act;
}
Act Beside(Act act) {
  act.beside = true;
  return act;
}
Act Transfer(int sender, int receiver, Act act) {
  act.op = OpKind::kSendRecv;
  act.root = sender;
  act.receiver = receiver;
  return act;
}

// A member from the beginning of the search on. Outside() is a member that joins during the search.
ScriptedMember Inside(int peer, std::vector<Act> acts) {
  acts.insert(acts.begin(), {Act::Kind::kJoin});
  return {peer, std::move(acts), 1};
}
ScriptedMember Outside(int peer, std::vector<Act> acts) {
  acts.insert(acts.begin(), {Act::Kind::kJoin});
  return {peer, std::move(acts), 0};
}

ExploreScenario Make(std::string name, int peers, std::vector<ScriptedMember> members,
                     int evicted = -1) {
  // The first member is admitted alone, the other ones at its first boundary.
  if (members.size() > 1 && members[1].setup > 0) {
    ScriptedMember& first = members.front();
    first.acts.insert(first.acts.begin() + 1, Step());
    first.setup = 2;
  }
  return {std::move(name), peers, std::move(members), evicted};
}

// Each of the peers has one member, and all have the same script.
ExploreScenario Alike(std::string name, int peers, const std::vector<Act>& acts) {
  std::vector<ScriptedMember> members;
  for (int i = 0; i < peers; ++i) members.push_back(Inside(i, acts));
  return Make(std::move(name), peers, std::move(members));
}

ExploreScenario Measured(ExploreScenario scenario) {
  scenario.measured = true;
  return scenario;
}

ExploreScenario GoesBack(ExploreScenario scenario) {
  scenario.store_goes_back = true;
  return scenario;
}

ExploreScenario Cuts(ExploreScenario scenario) {
  scenario.cuts = true;
  return scenario;
}

ExploreScenario Silences(ExploreScenario scenario) {
  scenario.silences = true;
  return scenario;
}

ExploreScenario Signs(ExploreScenario scenario) {
  scenario.signs = true;
  return scenario;
}

ExploreScenario Closed(int attempts, bool drops, ExploreScenario scenario) {
  scenario.closed_attempts = attempts;
  scenario.drops = drops;
  return scenario;
}

}  // namespace

const std::vector<ExploreScenario>& ExploreScenarios() {
  static const std::vector<ExploreScenario> scenarios = {
      GoesBack(Make("one_op", 2, {Inside(0, {Post(1)}), Inside(1, {Post(1)})})),
      Make("one_ring_op", 2, {Inside(0, {PostRing(1)}), Inside(1, {PostRing(1)})}),
      Make("one_mesh_op", 2, {Inside(0, {PostMesh(1)}), Inside(1, {PostMesh(1)})}),
      Make("abort_on_fault", 2, {Inside(0, {PostOrAbort(1)}), Inside(1, {PostOrAbort(1)})}),
      Make("given_up", 3,
           {Inside(0, {PostOrGiveUp(1)}), Inside(1, {PostOrGiveUp(1)}),
            Inside(2, {PostOrGiveUp(1)})}),
      GoesBack(Make("two_tags", 2, {Inside(0, {Post(1), Post(2)}), Inside(1, {Post(2), Post(1)})})),
      Make("tag_again", 2, {Inside(0, {Post(1), Post(1)}), Inside(1, {Post(1), Post(1)})}),
      // The second READY of a name is signed with another index than the first.
      Signs(Make("signed", 2,
                 {Inside(0, {PostRing(1), Post(1)}), Inside(1, {PostRing(1), Post(1)})})),
      Make("tag_again_or_abort", 3,
           {Inside(0, {Post(1), PostOrAbort(1)}), Inside(1, {Post(1), PostOrAbort(1)}),
            Inside(2, {Post(1), PostOrAbort(1)})}),
      Make("two_members_of_one_peer", 2,
           {Inside(0, {Post(1)}), Inside(0, {Post(1)}), Inside(1, {Post(1)})}),
      Make("three_peers", 3, {Inside(0, {Post(1)}), Inside(1, {Post(1)}), Inside(2, {Post(1)})}),
      Cuts(Make("no_path", 3,
                {Inside(0, {PostRing(1)}), Inside(1, {PostRing(1)}), Inside(2, {PostRing(1)})})),
      GoesBack(
          Make("join", 2,
               {Inside(0, {Post(1), Step(), Post(2), Leave()}), Outside(1, {Post(2), Leave()})})),
      Make("join_during_an_op", 3,
           {Inside(0, {Post(1), Step(), Post(2), Leave()}),
            Inside(1, {Post(1), Step(), Post(2), Leave()}), Outside(2, {Post(2), Leave()})}),
      // The first newcomer of the peer is refused. The second one finds the port open.
      Closed(1, /*drops=*/false,
             Make("join_refused", 2,
                  {Inside(0, {Post(1), Step(), Post(2), Leave()}), Outside(1, {Leave()}),
                   Outside(1, {Post(2), Leave()})})),
      Closed(1, /*drops=*/true,
             Make("join_unanswered", 2,
                  {Inside(0, {Post(1), Step(), Post(2), Leave()}), Outside(1, {Leave()})})),
      Silences(Make("silence", 2, {Inside(0, {Post(1), Step()}), Inside(1, {Post(1), Step()})})),
      GoesBack(
          Make("leave", 2, {Inside(0, {Post(1), Leave()}), Inside(1, {Post(1), Step(), Post(2)})})),
      GoesBack(Make("evict", 2, {Inside(0, {Post(1), Step()}), Inside(1, {Post(1), Step()})}, 1)),
      // This freezes an op although all its links are up.
      Make("evict_one_of_two", 2,
           {Inside(0, {PostRing(1)}), Inside(0, {PostRing(1)}), Inside(1, {PostRing(1)})}, 1),
      Measured(Make("ring", 3, {Inside(0, {Step()}), Inside(1, {Step()}), Inside(2, {Step()})})),
      Measured(Make("ring_during_an_op", 3,
                    {Inside(0, {PostRing(1), Step(), PostRing(2)}),
                     Inside(1, {PostRing(1), Step(), PostRing(2)}),
                     Inside(2, {PostRing(1), Step(), PostRing(2)})})),
      GoesBack(Make("sync", 2, {Inside(0, {Sync(5), Post(1)}), Inside(1, {Sync(6), Post(1)})})),
      Make("sync_at_a_boundary", 2,
           {Inside(0, {StepWith(5), StepWith(7)}), Inside(1, {StepWith(6), StepWith(8)})}),
      Make("sync_of_three", 3, {Inside(0, {Sync(6)}), Inside(1, {Sync(5)}), Inside(2, {Sync(6)})}),
      GoesBack(Make("sync_of_a_joiner", 2,
                    {Inside(0, {StepWith(5), Leave()}), Outside(1, {Sync(6), Leave()})})),

      // The other collectives. A reduce-scatter is started anew for the members that are left.
      Alike("reduce_scatter", 2, {Of(OpKind::kReduceScatter, PostRing(1))}),
      Alike("small_reduce_scatter", 2, {Of(OpKind::kReduceScatter, Post(1))}),
      Alike("reduce_scatter_of_three", 3, {Of(OpKind::kReduceScatter, PostRing(1))}),
      Alike("all_gather", 2, {Of(OpKind::kAllGather, PostRing(1))}),
      Alike("all_gather_of_three", 3, {Of(OpKind::kAllGather, Post(1))}),
      Alike("unequal_all_gather", 2, {Of(OpKind::kAllGather, Unequal(PostRing(1)))}),
      Alike("broadcast", 2, {Of(OpKind::kBroadcast, PostMesh(1), 0)}),
      // A survivor may have the result of a root that is gone.
      Alike("broadcast_to_two", 3, {Of(OpKind::kBroadcast, Post(1), 0)}),
      Alike("reduce_and_gather", 2,
            {Of(OpKind::kReduce, PostRing(1), 0), Of(OpKind::kGather, PostMesh(2), 1)}),
      Alike("all_to_all_of_three", 3, {Of(OpKind::kAllToAll, PostMesh(1))}),
      Alike("scatter", 2, {Of(OpKind::kScatter, Post(1), 1)}),
      Alike("barrier", 2, {Of(OpKind::kBarrier, Post(1))}),
      // Both send to each other.
      Make("send_recv", 2,
           {Inside(0, {Transfer(0, 1, PostMesh(1)), Transfer(1, 0, PostMesh(2))}),
            Inside(1, {Transfer(0, 1, PostMesh(1)), Transfer(1, 0, PostMesh(2))})}),
      Make("send_beside_a_third", 3,
           {Inside(0, {Transfer(0, 1, Post(1))}), Inside(1, {Transfer(0, 1, Post(1))}),
            Inside(2, {})}),
      Make("two_of_three", 3,
           {Inside(0, {Among({0, 1}, PostRing(1))}), Inside(1, {Among({0, 1}, PostRing(1))}),
            Inside(2, {})}),
      Make("two_sets", 3,
           {Inside(0, {Among({0, 1}, Post(1)), Post(2)}),
            Inside(1, {Among({0, 1}, Post(1)), Post(2)}), Inside(2, {Post(2)})}),
      Make("weights", 2,
           {Inside(0, {Weighted(2, PostRing(1))}), Inside(1, {Weighted(3, PostRing(1))})}),
      Make("weights_of_three", 3,
           {Inside(0, {Weighted(2, PostMesh(1))}), Inside(1, {Weighted(3, PostMesh(1))}),
            Inside(2, {Weighted(1, PostMesh(1))})}),

      // Cancelled ops. Those that do not give up start the op again.
      Make("cancel", 2,
           {Inside(0, {GivesUp(PostRing(1)), Cancel(1)}), Inside(1, {GivesUp(PostRing(1))})}),
      Make("cancel_small", 2, {Inside(0, {Post(1), Cancel(1)}), Inside(1, {Post(1)})}),
      Make("cancel_of_three", 3,
           {Inside(0, {GivesUp(PostRing(1)), Cancel(1)}), Inside(1, {GivesUp(PostRing(1))}),
            Inside(2, {GivesUp(PostRing(1))})}),
      Make("cancel_before", 2,
           {Inside(0, {PostRing(1), Cancel(1)}), Inside(0, {PostRing(1)}),
            Inside(1, {PostRing(1)})}),
      Make("two_cancel", 2,
           {Inside(0, {GivesUp(PostRing(1)), Cancel(1)}),
            Inside(1, {GivesUp(PostRing(1)), Cancel(1)})}),
      // Cancels that cross. All start the op again, and it ends well at all.
      Make("cancels_cross", 2,
           {Inside(0, {PostRing(1), Cancel(1)}), Inside(1, {PostRing(1), Cancel(1)})}),
      Make("cancels_cross_at_a_host", 2,
           {Inside(0, {PostRing(1), Cancel(1)}), Inside(0, {PostRing(1), Cancel(1)}),
            Inside(1, {PostRing(1)})}),
      // One member ends what is left of a round at all members.
      Make("cancel_the_rest_at_a_host", 1,
           {Inside(0, {GivesUp(PostRing(1)), Cancel(1), GivesUp(PostRing(2)), Cancel(2), Post(3)}),
            Inside(0, {GivesUp(PostRing(1)), GivesUp(PostRing(2)), Post(3)})}),
      // A member never starts the op that was cancelled, but another one under its tag.
      Make("cancel_and_a_boundary", 2,
           {Inside(0, {GivesUp(PostRing(1)), Cancel(1), Step(), PostRing(1)}),
            Inside(1, {Step(), PostRing(1)})}),
      Make("cancel_and_another_kind", 2,
           {Inside(0, {GivesUp(PostRing(1)), Cancel(1), Wait(), Post(2),
                       Of(OpKind::kAllGather, PostRing(1))}),
            Inside(1, {Post(2), Wait(), Of(OpKind::kAllGather, PostRing(1))})}),
      // One member starts the op before a boundary, and the other one after it.
      Make("beside_a_boundary", 2,
           {Inside(0, {Beside(PostRing(1)), Step(), Leave()}),
            Inside(1, {Step(), Beside(PostRing(1)), Leave()}),
            Outside(1, {Beside(PostRing(1)), Leave()})}),
      Make("cancel_one_of_two_tags", 2,
           {Inside(0, {GivesUp(PostRing(1)), Post(2), Cancel(1)}),
            Inside(1, {Post(2), GivesUp(PostRing(1))})}),
      Make("cancel_and_tag_again", 2,
           {Inside(0, {Post(1), Post(1), Cancel(1)}), Inside(1, {Post(1), Post(1)})}),
      Make("cancel_of_a_set", 3,
           {Inside(0, {GivesUp(Among({0, 1}, PostRing(1))), Cancel(1)}),
            Inside(1, {GivesUp(Among({0, 1}, PostRing(1)))}), Inside(2, {})}),

      // Calls that are refused to their trainers.
      Make("refused", 2,
           {Inside(0, {Refuse(1), PostRing(1)}), Inside(1, {PostRing(1), PostRing(1)})}),
      Make("refused_small_and_leaves", 2,
           {Inside(0, {Refuse(1), Leave()}), Inside(1, {Post(1)}), Inside(1, {Post(1)})}),
      Make("refused_at_a_host", 2,
           {Inside(0, {Refuse(1), PostRing(1)}), Inside(0, {PostRing(1), PostRing(1)}),
            Inside(1, {PostRing(1), PostRing(1)})}),
      Make("refused_to_two", 3,
           {Inside(0, {Refuse(1)}), Inside(1, {Refuse(1)}), Inside(2, {PostRing(1)})}),
      Make("refused_and_left_out", 2,
           {Inside(0, {Refuse(1), Step(), PostRing(1)}), Inside(1, {Step(), PostRing(1)})}),
      Make("refused_in_two_steps", 2,
           {Inside(0, {Refuse(1), Step(), PostRing(1)}), Inside(1, {Step(), Refuse(1)})}),
      Make("refused_and_cancelled", 2,
           {Inside(0, {Refuse(1), Step(), PostRing(1)}),
            Inside(1, {GivesUp(PostRing(1)), Cancel(1), Step(), PostRing(1)})}),
      Make("refused_and_cancelled_at_a_host", 2,
           {Inside(0, {Refuse(1)}), Inside(0, {GivesUp(PostRing(1)), Cancel(1)}),
            Inside(1, {GivesUp(PostRing(1))})}),
  };
  return scenarios;
}

ExploreResult Explore(const ExploreScenario& scenario, const ExploreOptions& options) {
  return Search(scenario, options).Run();
}

}  // namespace longhaul::sim
