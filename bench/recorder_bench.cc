// Measures what the flight recorder costs (base/recorder.h, peerd/daemon/peer_recorder.h).
//
//   bazel run --config=opt //bench:recorder_bench
//
// "record": one record of 256 bytes goes into the ring. "op": all that peerd does for one op of a
// group of three peers: its post, two READYs, its end. Each figure is the best of several rounds,
// in nanoseconds; the clock that peerd reads for each event is not counted.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "base/recorder.h"
#include "peerd/daemon/peer_recorder.h"

namespace longhaul::peerd {
namespace {

constexpr int kRounds = 9;
constexpr int kTimes = 200'000;

template <class Run>
double BestNanoseconds(Run run) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimes; ++i) run(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count() / kTimes);
  }
  return best;
}

int Main() {
  Recorder recorder("recorder_bench", "1");
  Record record;
  record.kind = static_cast<uint8_t>(RecordKind::kOp);
  printf("record  %6.1f ns\n", BestNanoseconds([&](int i) {
           record.tag = static_cast<uint64_t>(i);
           recorder.ops().Add(&record);
         }));

  PeerRecorder peer(&recorder, [](std::string_view) {});
  const GroupKey group{"demo", 0};
  LocalJoin join;
  join.local = LocalId(1);
  join.group = group;
  peer.OnEvent(join, Tick{0});
  LocalPost post;
  post.desc.count = 64;
  PeerReady ready;
  ready.group = group;
  Event post_event = post;
  Event ready_event = ready;
  Action done_action = PostDone{};
  auto& posted = std::get<LocalPost>(post_event);
  auto& from = std::get<PeerReady>(ready_event);
  auto& done = std::get<PostDone>(done_action);
  uint64_t call = 0;
  int64_t now = 0;
  printf("op      %6.1f ns\n", BestNanoseconds([&](int) {
           posted.post = {LocalId(1), ++call};
           peer.OnEvent(post_event, Tick{++now});
           from.peer = PeerId(2);
           peer.OnEvent(ready_event, Tick{++now});
           from.peer = PeerId(3);
           peer.OnEvent(ready_event, Tick{++now});
           done.post = posted.post;
           done.info.wait_us = 2;
           peer.OnAction(done_action, Tick{++now});
         }));
  return 0;
}

}  // namespace
}  // namespace longhaul::peerd

int main() { return longhaul::peerd::Main(); }
