// What the status page shows, as frames of JSON: a snapshot of everything, then what has changed.
//
// A page is a map from keys to values. A frame sets some of them and removes others:
//
//   {"version":7,"base":6,"tick_ms":81234,"time_ms":1700000000000,
//    "set":{"l:demo/0/p1f":[1,2,3,4],...},"gone":["m:demo/0/m3"],"events":[...]}
//
// base 0 means that the frame is a snapshot. Otherwise the frame belongs on top of version `base`.
//
//   head          the coordinator; `error` is set while its loop does not answer
//   g:GROUP       a group: epoch, its members in rank order, its peers in ring order, ...
//   w:GROUP       what the group waits for
//   m:GROUP/m3    a member
//   p:GROUP/p1f   a peer of the ring
//   k:GROUP/p1f   the link from this peer to the next one: bytes a second, round trip in
//                 microseconds, whether the rate is a lower bound
//   l:GROUP/p1f   load: ops open, ops settled, bytes sent, bytes received
//
// One thread asks the loop and makes the frames, for all pages together. It makes at most one frame
// each kFeedIntervalMin, none if nothing has changed, and does nothing while nobody looks. With a
// very large cluster it takes longer pauses, so that it uses at most 2.5 % of one processor. The
// loop's copy of its state costs less than that.
//
// Any thread may call the methods.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/http/http_server.h"
#include "base/mutex.h"
#include "coordinator/core/records.h"
#include "coordinator/loop/event_log.h"

namespace longhaul::coordinator {

inline constexpr std::chrono::milliseconds kFeedIntervalMin{250};
inline constexpr std::chrono::milliseconds kFeedIntervalMax{10000};
// A pause is at least this many times the processor time of the frame before.
inline constexpr int kFeedPause = 40;
// How many events a snapshot has, at most. Routine events, which come with each step, have fewer
// places of their own: they never displace what happens rarely.
inline constexpr size_t kFeedEventsMax = 200;
inline constexpr size_t kFeedRoutineMax = 40;
// A page that has missed more frames than this gets a snapshot.
inline constexpr size_t kFeedFramesMax = 32;
// A stream without news says this often that it is alive: pages notice when a connection is dead,
// and proxies do not close it.
inline constexpr std::chrono::milliseconds kFeedAlive{10000};

class StatusFeed {
 public:
  struct Options {
    // Asks the loop. Called on the feed's thread; may wait, but not without a limit.
    std::function<absl::StatusOr<Overview>()> overview;
    // Peers whose control streams stand.
    std::function<uint64_t()> streams;
    const EventLog* events = nullptr;  // must outlive the feed
    std::string incarnation;
    std::string version;
    std::string store;
    uint32_t detect_ms = 0;
    // Least time between two frames.
    std::chrono::milliseconds interval = kFeedIntervalMin;
    std::chrono::milliseconds alive = kFeedAlive;
  };

  explicit StatusFeed(Options options);
  // Calls Stop().
  ~StatusFeed();
  StatusFeed(const StatusFeed&) = delete;
  StatusFeed& operator=(const StatusFeed&) = delete;

  // A snapshot that is not older than the pause between two frames. Unavailable: the feed stops.
  absl::StatusOr<std::shared_ptr<const std::string>> Snapshot();
  // A stream of server-sent events: a snapshot, then each frame; and events `alive`, while there is
  // no news. The feed must outlive it.
  HttpStream Stream();
  // All streams end, and Snapshot() fails. The thread may still be asking the loop.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;
  using Text = std::shared_ptr<const std::string>;
  struct Frame {
    uint64_t version = 0;
    Text text;
  };
  // What one stream has sent.
  struct Reader;

  void Run();
  // Waits until somebody looks and the next frame is due. False: the feed stops.
  bool WaitForWork();
  void Build();
  struct News {
    std::map<uint64_t, std::string> rare;
    std::map<uint64_t, std::string> routine;
  };
  News ReadEvents();
  std::map<std::string, std::string> Values(const absl::StatusOr<Overview>& overview) const;
  Text SnapshotLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The build whose version a new reader may have.
  uint64_t WantedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Next(Reader* reader, std::string* piece);

  const Options options_;

  Mutex mutex_;
  CondVar work_;  // for the feed's thread
  CondVar news_;  // for readers
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  size_t readers_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t builds_ ABSL_GUARDED_BY(mutex_) = 0;  // that have ended
  uint64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;   // the highest build that somebody waits for
  // The present version is as new as it gets until then.
  Clock::time_point due_ ABSL_GUARDED_BY(mutex_);
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t time_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t tick_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  // The newest events by sequence number, as JSON.
  std::map<uint64_t, std::string> rare_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> routine_ ABSL_GUARDED_BY(mutex_);
  std::deque<Frame> frames_ ABSL_GUARDED_BY(mutex_);  // oldest first
  Frame snapshot_ ABSL_GUARDED_BY(mutex_);            // of the version that it names

  uint64_t events_read_ = 0;  // the newest event that was read; only the feed's thread uses it

  std::thread thread_;  // last: it uses everything above
};

}  // namespace longhaul::coordinator
