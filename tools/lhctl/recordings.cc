#include "tools/lhctl/recordings.h"

#include <time.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/fields.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "proto/wire/op_desc.h"

namespace longhaul {
namespace {

template <size_t kSize>
std::string Text(const char (&field)[kSize]) {
  return TextOf(field, kSize);
}

// TextOf() has left printable ASCII only.
std::string Quote(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += c;
  }
  return json + '"';
}

std::string CodeName(const Record& record) {
  const Code code = static_cast<Code>(record.code);
  return code >= Code::kOk && code <= Code::kInternal ? NameOf(code) : "unknown";
}

std::string AlgorithmName(const Record& record) {
  return record.algorithm <= static_cast<uint8_t>(Algorithm::kLocal)
             ? Name(static_cast<Algorithm>(record.algorithm))
             : "unknown";
}

const char* KindName(const Record& record) { return Name(static_cast<RecordKind>(record.kind)); }
bool IsOpen(const Record& record) { return (record.flags & kRecordOpOpen) != 0; }
std::string GroupName(const Record& record) {
  return absl::StrCat(Text(record.run), "/", record.group);
}
std::string Peer(uint64_t peer) { return peer == 0 ? "" : ToString(PeerId(peer)); }

// As in the log: 2024-11-21T10:00:00.123456Z
std::string TimeText(int64_t wall_us) {
  const time_t seconds = static_cast<time_t>(wall_us / 1000000);
  struct tm utc {};
  if (wall_us < 0 || gmtime_r(&seconds, &utc) == nullptr) return absl::StrCat(wall_us, "us");
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%06dZ", utc.tm_year + 1900, utc.tm_mon + 1,
                         utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, wall_us % 1000000);
}

// How long the op has taken so far.
int64_t Lasted(const Recording& recording, const Record& op) {
  if (!IsOpen(op)) return op.total_us;
  return std::max<int64_t>(0, recording.monotonic_us - op.time_us);
}

std::string OpLine(const Recording& recording, const Record& op) {
  std::string line = absl::StrCat("op m", op.member, " group=", GroupName(op), " tag=", op.tag,
                                  " bytes=", op.bytes);
  if (IsOpen(op)) {
    return absl::StrCat(line, " OPEN for ", Lasted(recording, op), " us");
  }
  absl::StrAppend(&line, " epoch=", op.epoch, " algorithm=", AlgorithmName(op),
                  " world=", op.world_size, " total_us=", op.total_us, " wait_us=", op.wait_us,
                  " transfer_us=", op.transfer_us, " retries=", op.retries, " ", CodeName(op));
  if (op.peer != 0) absl::StrAppend(&line, " waited_for=", Peer(op.peer));
  const std::string text = Text(op.text);
  if (!text.empty()) absl::StrAppend(&line, ": ", text);
  return line;
}

std::string EventLine(const Record& event) {
  std::string line = absl::StrCat(KindName(event), " ", Text(event.text));
  if (event.run[0] != '\0') absl::StrAppend(&line, " group=", GroupName(event));
  if (event.member != 0) absl::StrAppend(&line, " member=m", event.member);
  if (event.peer != 0) absl::StrAppend(&line, " peer=", Peer(event.peer));
  return line;
}

// What `dump --json` and the trace say of an op.
std::string OpArgs(const Record& op) {
  return absl::StrCat("\"run\":", Quote(Text(op.run)), ",\"group\":", op.group, ",\"member\":\"m",
                      op.member, "\",\"tag\":\"", op.tag, "\",\"bytes\":", op.bytes,
                      ",\"epoch\":", op.epoch, ",\"algorithm\":\"", AlgorithmName(op),
                      "\",\"world_size\":", op.world_size, ",\"retries\":", op.retries,
                      ",\"outcome\":\"", IsOpen(op) ? "open" : CodeName(op), "\",\"waited_for\":\"",
                      Peer(op.peer), "\",\"text\":", Quote(Text(op.text)));
}

std::string EventArgs(const Record& event) {
  return absl::StrCat("\"kind\":\"", KindName(event), "\",\"code\":\"", CodeName(event),
                      "\",\"run\":", Quote(Text(event.run)), ",\"group\":", event.group,
                      ",\"epoch\":", event.epoch, ",\"member\":\"",
                      event.member == 0 ? "" : absl::StrCat("m", event.member), "\",\"peer\":\"",
                      Peer(event.peer), "\",\"text\":", Quote(Text(event.text)));
}

// ------------------------------------------------------------------------------ the trace

// One op on the common timeline.
struct Slice {
  const Record* op;
  size_t pid;
  size_t tid = 0;
  int64_t begin;
  int64_t end;
  int64_t all_ready;  // when the op's wait ended
};

class TraceWriter {
 public:
  TraceWriter(const std::vector<TracedRecording>& recordings, const TraceOptions& options)
      : recordings_(recordings), options_(options) {}

  std::string Write() {
    for (size_t i = 0; i < recordings_.size(); ++i) AddProcess(i);
    AddArrows();
    return absl::StrCat("{\"traceEvents\":[\n", events_, "\n],\n\"displayTimeUnit\":\"ms\",\n",
                        "\"metadata\":{", Metadata(), "}}\n");
  }

 private:
  static constexpr size_t kEventsTid = 1;

  bool Selects(const Record& record) const {
    if (!options_.run.empty() && Text(record.run) != options_.run) return false;
    return options_.group < 0 || record.group == options_.group;
  }
  // An event that is about no group is always of interest.
  bool SelectsEvent(const Record& event) const {
    return event.run[0] == '\0' || Selects(event) ||
           (event.kind == static_cast<uint8_t>(RecordKind::kLink) &&
            (options_.run.empty() || Text(event.run) == options_.run));
  }

  void Emit(const std::string& fields) {
    absl::StrAppend(&events_, events_.empty() ? "" : ",\n", "{", fields, "}");
  }
  void EmitName(const char* what, size_t pid, size_t tid, const std::string& name) {
    Emit(absl::StrCat("\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", pid, ",\"tid\":", tid,
                      ",\"args\":{\"name\":", Quote(name), "}"));
  }
  void EmitSlice(const char* category, const std::string& name, const Slice& slice, int64_t begin,
                 int64_t end, const std::string& args) {
    Emit(absl::StrCat("\"ph\":\"X\",\"cat\":\"", category, "\",\"name\":", Quote(name),
                      ",\"pid\":", slice.pid, ",\"tid\":", slice.tid, ",\"ts\":", begin,
                      ",\"dur\":", end - begin, ",\"args\":{", args, "}"));
  }

  void AddProcess(size_t index) {
    const TracedRecording& traced = recordings_[index];
    const Recording& recording = traced.recording;
    const size_t pid = index + 1;
    EmitName("process_name", pid, 0,
             absl::StrCat(NameOf(recording), recording.host.empty() ? "" : " on ", recording.host));
    EmitName("thread_name", pid, kEventsTid, "events");
    for (const Record& event : recording.events) {
      if (!SelectsEvent(event)) continue;
      const bool fault = event.kind == static_cast<uint8_t>(RecordKind::kFault);
      Emit(absl::StrCat("\"ph\":\"i\",\"s\":\"", fault ? "p" : "t", "\",\"cat\":\"",
                        KindName(event), "\",\"name\":", Quote(Text(event.text)), ",\"pid\":", pid,
                        ",\"tid\":", kEventsTid,
                        ",\"ts\":", recording.WallOf(event.time_us) - traced.offset_us,
                        ",\"args\":{", EventArgs(event), "}"));
    }
    std::vector<Slice> slices;
    for (const Record& op : recording.ops) {
      if (!Selects(op)) continue;
      const int64_t begin = recording.WallOf(op.time_us) - traced.offset_us;
      const int64_t lasted = Lasted(recording, op);
      const int64_t wait = IsOpen(op) ? lasted : std::min(op.wait_us, lasted);
      slices.push_back({&op, pid, 0, begin, begin + lasted, begin + wait});
    }
    PutOnThreads(&slices);
    for (const Slice& slice : slices) EmitOp(slice);
    slices_.insert(slices_.end(), slices.begin(), slices.end());
  }

  // Gives each slice the first thread of its member that is free.
  void PutOnThreads(std::vector<Slice>* slices) {
    std::stable_sort(slices->begin(), slices->end(),
                     [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
    struct Thread {
      size_t tid;
      int64_t free_at;
    };
    std::map<std::tuple<std::string, uint32_t, uint64_t>, std::vector<Thread>> threads;
    size_t next_tid = kEventsTid + 1;
    for (Slice& slice : *slices) {
      auto& own = threads[{Text(slice.op->run), slice.op->group, slice.op->member}];
      auto thread = std::find_if(own.begin(), own.end(),
                                 [&](const Thread& t) { return t.free_at <= slice.begin; });
      if (thread == own.end()) {
        const std::string more = own.empty() ? "" : absl::StrCat(" (", own.size() + 1, ")");
        EmitName("thread_name", slice.pid, next_tid,
                 absl::StrCat(GroupName(*slice.op), " m", slice.op->member, more));
        own.push_back({next_tid++, 0});
        thread = own.end() - 1;
      }
      slice.tid = thread->tid;
      // An op of no length still takes its place.
      thread->free_at = std::max(slice.end, slice.begin + 1);
    }
  }

  void EmitOp(const Slice& slice) {
    const Record& op = *slice.op;
    EmitSlice("op", absl::StrCat("tag ", op.tag, IsOpen(op) ? " (open)" : ""), slice, slice.begin,
              slice.end, OpArgs(op));
    if (IsOpen(op)) return;
    const int64_t sent = std::min(slice.end, slice.all_ready + op.transfer_us);
    EmitSlice("phase", op.peer == 0 ? "wait" : absl::StrCat("wait for ", Peer(op.peer)), slice,
              slice.begin, slice.all_ready, "");
    EmitSlice("phase", "transfer", slice, slice.all_ready, sent, "");
    EmitSlice("phase", "commit", slice, sent, slice.end, "");
  }

  // Finds the slices of each op: slices of one group and tag whose waits ended at about the same
  // time, at most one for each member.
  void AddArrows() {
    std::map<std::tuple<std::string, uint32_t, uint64_t>, std::vector<const Slice*>> by_tag;
    for (const Slice& slice : slices_) {
      if (IsOpen(*slice.op)) continue;
      by_tag[{Text(slice.op->run), slice.op->group, slice.op->tag}].push_back(&slice);
    }
    for (auto& [tag, slices] : by_tag) {
      std::stable_sort(slices.begin(), slices.end(),
                       [](const Slice* a, const Slice* b) { return a->all_ready < b->all_ready; });
      std::vector<const Slice*> op;
      std::set<uint64_t> members;
      for (const Slice* slice : slices) {
        if (!members.insert(slice->op->member).second) {
          AddArrowsOf(op);
          op.clear();
          members = {slice->op->member};
        }
        op.push_back(slice);
      }
      AddArrowsOf(op);
    }
  }

  void AddArrowsOf(const std::vector<const Slice*>& op) {
    if (op.size() < 2) return;
    const Slice* const last = *std::max_element(
        op.begin(), op.end(), [](const Slice* a, const Slice* b) { return a->begin < b->begin; });
    for (const Slice* slice : op) {
      if (slice == last || slice->pid == last->pid) continue;
      // An arrow must not go back in time, which it would where the clocks are not known well.
      const int64_t arrives = std::max(slice->all_ready, last->begin);
      if (arrives > slice->end) continue;
      ++arrows_;
      EmitArrow("s", *last, last->begin, "");
      EmitArrow("f", *slice, arrives, ",\"bp\":\"e\"");
    }
  }
  void EmitArrow(const char* phase, const Slice& slice, int64_t time, const char* more) {
    Emit(absl::StrCat("\"ph\":\"", phase,
                      "\",\"cat\":\"op\",\"name\":\"last to post\",\"id\":", arrows_,
                      ",\"pid\":", slice.pid, ",\"tid\":", slice.tid, ",\"ts\":", time, more));
  }

  std::string Metadata() const {
    std::string clocks;
    for (const TracedRecording& traced : recordings_) {
      absl::StrAppend(
          &clocks, clocks.empty() ? "" : ",", "{\"process\":\"", NameOf(traced.recording),
          "\",\"host\":", Quote(traced.recording.host), ",\"offset_us\":", traced.offset_us,
          ",\"error_us\":", traced.error_us < 0 ? "null" : absl::StrCat(traced.error_us), "}");
    }
    std::string silent;
    for (const std::string& each : options_.silent) {
      const std::string clean = TextOf(each.data(), each.size());
      absl::StrAppend(&silent, silent.empty() ? "" : ",", Quote(clean));
    }
    return absl::StrCat(
        "\"source\":\"lhctl trace\",\"clock\":\"microseconds since 1970 by the "
        "coordinator's clock\",\"clocks\":[",
        clocks, "],\"not_answered\":[", silent, "]");
  }

  const std::vector<TracedRecording>& recordings_;
  const TraceOptions& options_;
  std::vector<Slice> slices_;
  std::string events_;
  uint64_t arrows_ = 0;
};

}  // namespace

std::string NameOf(const Recording& recording) {
  return recording.peer == 0 ? "coordinator" : ToString(PeerId(recording.peer));
}

std::string RenderRecording(const Recording& recording) {
  std::string text = absl::StrCat(
      recording.program, " ", recording.version, " ", NameOf(recording), " host=", recording.host,
      " pid=", recording.pid, "\nrecorded ", TimeText(recording.wall_us), ": ", recording.cause,
      "\n", recording.ops.size(), " of ", recording.ops_total, " ops, ", recording.events.size(),
      " of ", recording.events_total, " events; times are of that host's clock\n\n");
  std::vector<std::pair<int64_t, std::string>> lines;
  for (const Record& op : recording.ops) lines.emplace_back(op.time_us, OpLine(recording, op));
  for (const Record& event : recording.events) lines.emplace_back(event.time_us, EventLine(event));
  std::stable_sort(lines.begin(), lines.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [time_us, line] : lines) {
    absl::StrAppend(&text, TimeText(recording.WallOf(time_us)), " ", line, "\n");
  }
  return text;
}

std::string RenderRecordingJson(const Recording& recording) {
  std::string json = absl::StrCat(
      "{\"process\":\"", NameOf(recording), "\",\"program\":", Quote(recording.program),
      ",\"version\":", Quote(recording.version), ",\"host\":", Quote(recording.host),
      ",\"pid\":", recording.pid, ",\"cause\":", Quote(recording.cause),
      ",\"time_us\":", recording.wall_us, ",\"ops_total\":", recording.ops_total,
      ",\"events_total\":", recording.events_total, ",\"ops\":[");
  const char* comma = "";
  for (const Record& op : recording.ops) {
    absl::StrAppend(&json, comma, "\n{\"time_us\":", recording.WallOf(op.time_us),
                    ",\"total_us\":", Lasted(recording, op), ",\"wait_us\":", op.wait_us,
                    ",\"transfer_us\":", op.transfer_us, ",", OpArgs(op), "}");
    comma = ",";
  }
  absl::StrAppend(&json, "],\"events\":[");
  comma = "";
  for (const Record& event : recording.events) {
    absl::StrAppend(&json, comma, "\n{\"time_us\":", recording.WallOf(event.time_us), ",",
                    EventArgs(event), "}");
    comma = ",";
  }
  return json + "]}\n";
}

std::string RenderTrace(const std::vector<TracedRecording>& recordings,
                        const TraceOptions& options) {
  return TraceWriter(recordings, options).Write();
}

}  // namespace longhaul
