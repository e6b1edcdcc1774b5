#include "coordinator/web/status_feed.h"

#include <time.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fields.h"
#include "base/fields_json.h"
#include "coordinator/loop/explain.h"

namespace longhaul::coordinator {
namespace {

// ------------------------------------------------------------------------------ values

struct HeadValue {
  std::string incarnation;
  std::string version;
  std::string store;
  uint64_t detect_ms = 0;
  uint64_t streams = 0;
  std::string error;
  LH_FIELDS(HeadValue, LH_FIELD(incarnation), LH_FIELD(version), LH_FIELD(store),
            LH_FIELD(detect_ms), LH_FIELD(streams), LH_FIELD(error));
};

struct FaultValue {
  Epoch epoch;
  std::string cause;
  std::string detector;
  uint64_t detect_ms = 0;
  uint64_t agree_ms = 0;
  std::string subject;
  LH_FIELDS(FaultValue, LH_FIELD(epoch), LH_FIELD(cause), LH_FIELD(detector), LH_FIELD(detect_ms),
            LH_FIELD(agree_ms), LH_FIELD(subject));
};

struct BlockedValue {
  PeerId a;
  PeerId b;
  PeerId relay;
  std::string reason;
  LH_FIELDS(BlockedValue, LH_FIELD(a), LH_FIELD(b), LH_FIELD(relay), LH_FIELD(reason));
};

struct StateValue {
  uint64_t revision = 0;
  Hash128 digest;
  LH_FIELDS(StateValue, LH_FIELD(revision), LH_FIELD(digest));
};

struct GroupValue {
  std::string run;
  uint64_t group = 0;
  Epoch epoch;
  Epoch preparing;
  std::vector<MemberId> members;
  std::vector<PeerId> ring;
  std::vector<BlockedValue> blocked;
  std::optional<StateValue> state;
  std::optional<FaultValue> fault;
  Epoch ring_epoch;
  std::string ring_gain;
  LH_FIELDS(GroupValue, LH_FIELD(run), LH_FIELD(group), LH_FIELD(epoch), LH_FIELD(preparing),
            LH_FIELD(members), LH_FIELD(ring), LH_FIELD(blocked), LH_FIELD(state), LH_FIELD(fault),
            LH_FIELD(ring_epoch), LH_FIELD(ring_gain));
};

struct WaitValue {
  bool waiting = false;
  std::string verdict;
  std::vector<std::string> facts;
  LH_FIELDS(WaitValue, LH_FIELD(waiting), LH_FIELD(verdict), LH_FIELD(facts));
};

struct MemberValue {
  PeerId peer;
  std::string name;
  std::string cohort;
  Epoch joined;
  bool voting = false;
  bool background = false;
  std::optional<control::FetchProgress> fetch;
  LH_FIELDS(MemberValue, LH_FIELD(peer), LH_FIELD(name), LH_FIELD(cohort), LH_FIELD(joined),
            LH_FIELD(voting), LH_FIELD(background), LH_FIELD(fetch));
};

struct PeerValue {
  std::string host;
  std::string endpoint;
  bool attached = false;
  bool draining = false;
  LH_FIELDS(PeerValue, LH_FIELD(host), LH_FIELD(endpoint), LH_FIELD(attached), LH_FIELD(draining));
};

struct EventValue {
  uint64_t sequence = 0;
  uint64_t time_ms = 0;
  std::string kind;
  std::string group;  // "": none
  Epoch epoch;
  std::optional<MemberId> member;
  std::optional<PeerId> peer;
  std::string text;
  std::string cause;  // of a commit that froze ops
  std::string subject;
  LH_FIELDS(EventValue, LH_FIELD(sequence), LH_FIELD(time_ms), LH_FIELD(kind), LH_FIELD(group),
            LH_FIELD(epoch), LH_FIELD(member), LH_FIELD(peer), LH_FIELD(text), LH_FIELD(cause),
            LH_FIELD(subject));
};

// Names and reasons come from peers. JSON has to be valid UTF-8.
std::string Clean(const std::string& text) { return CleanText(text, LH_ERROR_TEXT_BYTES_MAX); }

GroupValue ToValue(const GroupView& view) {
  GroupValue value;
  value.run = Clean(view.group.run);
  value.group = view.group.group;
  value.epoch = view.committed;
  value.preparing = view.preparing;
  for (const MemberView& member : view.members) value.members.push_back(member.member);
  for (const PeerView& peer : view.ring) value.ring.push_back(peer.peer);
  for (const BlockedRecord& b : view.blocked) {
    value.blocked.push_back({b.pair.a, b.pair.b, b.pair.relay, Clean(b.reason)});
  }
  if (view.state) value.state = {view.state->revision, view.state->state};
  if (view.fault_epoch) {
    value.fault = {view.fault_epoch,     view.fault.cause,    view.fault.detector,
                   view.fault.detect_ms, view.fault.agree_ms, Clean(view.fault.subject)};
  }
  value.ring_epoch = view.ring_epoch;
  value.ring_gain = Clean(view.ring_gain);
  return value;
}

WaitValue ToWait(const GroupView& view, uint32_t detect_ms, uint32_t slow_write_ms) {
  const Explanation explanation = Explain(view, detect_ms, slow_write_ms);
  WaitValue value;
  value.waiting = !view.waiting_for.empty() || view.preparing;
  value.verdict = Clean(explanation.verdict);
  for (const std::string& fact : explanation.facts) value.facts.push_back(Clean(fact));
  return value;
}

std::string ToJsonText(const StampedEvent& stamped) {
  const EventRecord& event = stamped.event;
  EventValue value;
  value.sequence = stamped.sequence;
  value.time_ms = static_cast<uint64_t>(stamped.time_us / 1000);
  value.kind = event.kind;
  if (!event.group.run.empty()) value.group = Clean(ToString(event.group));
  value.epoch = event.epoch;
  if (event.member) value.member = event.member;
  if (event.peer) value.peer = event.peer;
  value.text = Clean(event.text);
  if (event.fault) {
    value.cause = event.fault->cause;
    value.subject = Clean(event.fault->subject);
  }
  return ToJson(value);
}

using ValueMap = std::map<std::string, std::string>;

void AddGroup(const GroupView& view, uint32_t detect_ms, uint32_t slow_write_ms, ValueMap* values) {
  const std::string name = Clean(ToString(view.group));
  values->emplace("g:" + name, ToJson(ToValue(view)));
  values->emplace("w:" + name, ToJson(ToWait(view, detect_ms, slow_write_ms)));
  for (const MemberView& m : view.members) {
    values->emplace(absl::StrCat("m:", name, "/", ToString(m.member)),
                    ToJson(MemberValue{m.peer, Clean(m.name), Clean(m.cohort), m.joined, m.voting,
                                       m.background, m.fetch}));
  }
  for (const PeerView& p : view.ring) {
    const std::string key = absl::StrCat(name, "/", ToString(p.peer));
    values->emplace("p:" + key,
                    ToJson(PeerValue{Clean(p.host), Clean(p.endpoint), p.attached, p.draining}));
    values->emplace("l:" + key, absl::StrCat("[", p.load.ops_open, ",", p.load.ops_settled, ",",
                                             p.load.bytes_sent, ",", p.load.bytes_received, "]"));
    if (p.next) {
      values->emplace("k:" + key, absl::StrCat("[", p.next->bytes_per_second, ",", p.next->rtt_us,
                                               ",", p.next->at_least ? 1 : 0, "]"));
    }
  }
}

std::string Quoted(const std::string& text) { return ToJson(text); }

using EventMap = std::map<uint64_t, std::string>;

// Events that come with each step.
bool IsRoutine(const std::string& kind) { return kind == "sync" || kind == "prepare"; }

// Keeps the newest `count`.
void Trim(EventMap* events, size_t count) {
  while (events->size() > count) events->erase(events->begin());
}

// Both kinds in order, with commas.
std::string Join(EventMap events, const EventMap& more) {
  events.insert(more.begin(), more.end());
  std::string joined;
  for (const auto& [sequence, text] : events) {
    absl::StrAppend(&joined, joined.empty() ? "" : ",", text);
  }
  return joined;
}

std::string FrameText(uint64_t version, uint64_t base, int64_t tick_ms, int64_t time_ms,
                      const std::string& set, const std::string& gone, const std::string& events) {
  return absl::StrCat("{\"version\":", version, ",\"base\":", base, ",\"tick_ms\":", tick_ms,
                      ",\"time_ms\":", time_ms, ",\"set\":{", set, "},\"gone\":[", gone,
                      "],\"events\":[", events, "]}");
}

int64_t Milliseconds(auto since_epoch) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(since_epoch).count();
}

// The processor time of this thread.
std::chrono::nanoseconds ThreadTime() {
  struct timespec time {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

// ------------------------------------------------------------------------------ the thread

struct StatusFeed::Reader {
  explicit Reader(StatusFeed* owner) : feed(owner) {
    MutexLock lock(&feed->mutex_);
    ++feed->readers_;
    feed->work_.Signal();
  }
  ~Reader() {
    MutexLock lock(&feed->mutex_);
    --feed->readers_;
  }
  StatusFeed* const feed;
  uint64_t version = 0;  // the version that was sent; 0: none
  uint64_t wanted = 0;   // the build to wait for before the first piece; 0: not chosen yet
  Clock::time_point sent_at = Clock::now();
};

StatusFeed::StatusFeed(Options options)
    : options_(std::move(options)), thread_([this] { Run(); }) {}

StatusFeed::~StatusFeed() {
  Stop();
  thread_.join();
}

void StatusFeed::Stop() {
  MutexLock lock(&mutex_);
  stopping_ = true;
  work_.SignalAll();
  news_.SignalAll();
}

void StatusFeed::Run() {
  while (WaitForWork()) {
    const std::chrono::nanoseconds before = ThreadTime();
    Build();
    const auto pause =
        std::min<std::chrono::nanoseconds>(kFeedPause * (ThreadTime() - before), kFeedIntervalMax);
    MutexLock lock(&mutex_);
    due_ = Clock::now() + std::max<std::chrono::nanoseconds>(pause, options_.interval);
    ++builds_;
    news_.SignalAll();
  }
}

bool StatusFeed::WaitForWork() {
  MutexLock lock(&mutex_);
  while (!stopping_) {
    const auto left = due_ - Clock::now();
    if (readers_ == 0 && asked_ <= builds_) {
      work_.Wait(&mutex_);
    } else if (left > Clock::duration::zero()) {
      work_.WaitFor(&mutex_, left);
    } else {
      return true;
    }
  }
  return false;
}

ValueMap StatusFeed::Values(const absl::StatusOr<Overview>& overview) const {
  HeadValue head;
  head.incarnation = options_.incarnation;
  head.version = options_.version;
  head.store = Clean(options_.store);
  head.detect_ms = options_.detect_ms;
  head.streams = options_.streams();
  ValueMap values;
  if (overview.ok()) {
    for (const GroupView& group : overview->groups) {
      AddGroup(group, options_.detect_ms, overview->slow_write_ms, &values);
    }
  } else {
    head.error = Clean(std::string(overview.status().message()));
  }
  values.emplace("head", ToJson(head));
  return values;
}

StatusFeed::News StatusFeed::ReadEvents() {
  constexpr size_t kBatch = 256;
  News news;
  while (true) {
    const std::vector<StampedEvent> events = options_.events->Read(events_read_, kBatch);
    if (events.empty()) return news;
    for (const StampedEvent& event : events) {
      const bool routine = IsRoutine(event.event.kind);
      EventMap* const list = routine ? &news.routine : &news.rare;
      list->emplace(event.sequence, ToJsonText(event));
      Trim(list, routine ? kFeedRoutineMax : kFeedEventsMax);
    }
    events_read_ = events.back().sequence;
  }
}

void StatusFeed::Build() {
  const absl::StatusOr<Overview> overview = options_.overview();
  ValueMap values = Values(overview);
  News news = ReadEvents();

  MutexLock lock(&mutex_);
  if (!overview.ok()) {
    // Keep what was known. The page says since when it is old.
    for (const auto& [key, value] : values_) values.emplace(key, value);
  }
  std::string set;
  std::string gone;
  for (const auto& [key, value] : values) {
    const auto it = values_.find(key);
    if (it != values_.end() && it->second == value) continue;
    absl::StrAppend(&set, set.empty() ? "" : ",", Quoted(key), ":", value);
  }
  for (const auto& [key, value] : values_) {
    if (!values.contains(key)) absl::StrAppend(&gone, gone.empty() ? "" : ",", Quoted(key));
  }
  tick_ms_ = Milliseconds(Clock::now().time_since_epoch());
  time_ms_ = Milliseconds(std::chrono::system_clock::now().time_since_epoch());
  if (set.empty() && gone.empty() && news.rare.empty() && news.routine.empty() && version_ > 0)
    return;
  values_ = std::move(values);
  ++version_;
  frames_.push_back({version_, std::make_shared<const std::string>(
                                   FrameText(version_, version_ - 1, tick_ms_, time_ms_, set, gone,
                                             Join(news.rare, news.routine)))});
  if (frames_.size() > kFeedFramesMax) frames_.pop_front();
  rare_.merge(news.rare);
  routine_.merge(news.routine);
  Trim(&rare_, kFeedEventsMax);
  Trim(&routine_, kFeedRoutineMax);
}

// ------------------------------------------------------------------------------ readers

StatusFeed::Text StatusFeed::SnapshotLocked() {
  if (snapshot_.version != version_) {
    std::string set;
    for (const auto& [key, value] : values_) {
      absl::StrAppend(&set, set.empty() ? "" : ",", Quoted(key), ":", value);
    }
    snapshot_ = {version_, std::make_shared<const std::string>(FrameText(
                               version_, 0, tick_ms_, time_ms_, set, "", Join(rare_, routine_)))};
  }
  return snapshot_.text;
}

uint64_t StatusFeed::WantedLocked() {
  // If nobody has looked for a while, the present version may be of any age.
  const uint64_t wanted = builds_ > 0 && Clock::now() < due_ ? builds_ : builds_ + 1;
  asked_ = std::max(asked_, wanted);
  work_.Signal();
  return wanted;
}

absl::StatusOr<StatusFeed::Text> StatusFeed::Snapshot() {
  MutexLock lock(&mutex_);
  const uint64_t wanted = WantedLocked();
  while (builds_ < wanted && !stopping_) news_.Wait(&mutex_);
  if (stopping_) return absl::UnavailableError("the coordinator is stopping");
  return SnapshotLocked();
}

HttpStream StatusFeed::Stream() {
  return [reader = std::make_shared<Reader>(this)](std::string* piece) {
    return reader->feed->Next(reader.get(), piece);
  };
}

bool StatusFeed::Next(Reader* reader, std::string* piece) {
  const Clock::time_point until = Clock::now() + kHttpStreamWait;
  MutexLock lock(&mutex_);
  if (reader->wanted == 0) reader->wanted = WantedLocked();
  while (!stopping_ && (builds_ < reader->wanted || reader->version == version_)) {
    const auto left = until - Clock::now();
    if (left <= Clock::duration::zero()) break;
    news_.WaitFor(&mutex_, left);
  }
  if (stopping_) return false;
  if (builds_ < reader->wanted || reader->version == version_) {
    if (Clock::now() - reader->sent_at < options_.alive) return true;
    *piece = "event: alive\ndata: 1\n\n";
  } else if (reader->version == 0 || frames_.front().version > reader->version + 1) {
    *piece = absl::StrCat("data: ", *SnapshotLocked(), "\n\n");
  } else {
    for (const Frame& frame : frames_) {
      if (frame.version > reader->version) absl::StrAppend(piece, "data: ", *frame.text, "\n\n");
    }
  }
  if (builds_ >= reader->wanted) reader->version = version_;
  reader->sent_at = Clock::now();
  return true;
}

}  // namespace longhaul::coordinator
