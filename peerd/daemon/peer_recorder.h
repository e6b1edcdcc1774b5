// Turns what passes through peerd's engine into records of the flight recorder (base/recorder.h).
//
// An op of a local member gets its record when it is posted, and the same record is completed when
// it ends. So a recording also shows ops that never end. Ops are recorded without a lock and
// without memory from the heap. Syncs are recorded only if bytes move or if they fail: otherwise a
// sync at each step would push everything else out.
//
// Thread: the reactor only.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/recorder.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"

namespace longhaul::peerd {

class PeerRecorder {
 public:
  // `fault` is called, with the reason, when something happened that deserves a file: an op was
  // aborted, a local member was removed, or a fault was repaired. `recorder` must outlive this
  // object.
  PeerRecorder(Recorder* recorder, std::function<void(std::string_view)> fault);

  // Call these for everything that the engine's observer sees, in order.
  void OnEvent(const Event& event, Tick now);
  void OnAction(const Action& action, Tick now);
  // `total`: lanes lost since the start of peerd.
  void OnLanesLost(uint64_t total, Tick now);

 private:
  struct Member {
    GroupKey group;
    MemberId member;  // 0: not admitted yet
  };
  // What is known of an open op. An entry is overwritten by an op that is posted much later.
  struct OpenOp {
    PostRef post;
    Record record;  // sequence 0: none
  };
  // When READYs came last for an op of this group and tag.
  struct Readies {
    struct Ready {
      PeerId peer;
      Tick time;
    };
    uint64_t key = 0;
    uint32_t next = 0;
    std::array<Ready, 16> last;
  };

  OpenOp& OpenAt(const PostRef& post);
  Readies& ReadiesAt(uint64_t key) { return readies_[key % readies_.size()]; }
  // The peer whose READY ended the wait of this op; 0: no READY came after the post.
  PeerId LastReady(uint64_t key, Tick posted, Tick ended) const;
  void OnPost(const LocalPost& post, Tick now);
  void OnReady(const PeerReady& ready, Tick now);
  void OnDone(const PostDone& done, Tick now);
  void OnMessage(const control::CoordinatorMessage& message, Tick now);
  void OnJoin(const JoinDone& join, Tick now);

  // Adds an event.
  void Tell(RecordKind kind, Tick now, std::string_view text, const GroupKey* group = nullptr,
            Epoch epoch = {}, MemberId member = {}, PeerId peer = {}, Code code = Code::kOk);
  // As Tell(), about a local member.
  void TellOf(LocalId local, RecordKind kind, Tick now, std::string_view text,
              Code code = Code::kOk);

  Recorder* const recorder_;
  const std::function<void(std::string_view)> fault_;
  std::map<LocalId, Member> members_;
  std::vector<OpenOp> open_;
  std::vector<Readies> readies_;
  uint64_t lanes_lost_ = 0;
};

}  // namespace longhaul::peerd
