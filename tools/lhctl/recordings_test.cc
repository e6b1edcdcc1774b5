#include "tools/lhctl/recordings.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::google::protobuf::Struct;
using ::google::protobuf::Value;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr int64_t kWall = 1'700'000'000'000'000;

// An op that was posted at `begin`, on a clock of which the recording was made at 1000000.
Record Op(uint64_t member, uint64_t tag, int64_t begin, int64_t wait, int64_t transfer,
          int64_t total) {
  Record op;
  op.sequence = 1;
  op.kind = static_cast<uint8_t>(RecordKind::kOp);
  op.time_us = begin;
  op.member = member;
  op.tag = tag;
  op.wait_us = wait;
  op.transfer_us = transfer;
  op.total_us = total;
  SetText(op.run, "demo");
  return op;
}

Record Event(RecordKind kind, int64_t time, std::string_view text) {
  Record event;
  event.sequence = 1;
  event.kind = static_cast<uint8_t>(kind);
  event.time_us = time;
  SetText(event.run, "demo");
  SetText(event.text, text);
  return event;
}

Recording Of(uint64_t peer, std::vector<Record> ops, std::vector<Record> events = {}) {
  Recording recording;
  recording.peer = peer;
  recording.program = "longhaul-peerd";
  recording.host = "host\"1\"";
  recording.cause = "asked";
  recording.wall_us = kWall;
  recording.monotonic_us = 1'000'000;
  recording.ops = std::move(ops);
  recording.events = std::move(events);
  return recording;
}

Struct Parse(const std::string& json) {
  Struct parsed;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &parsed);
  EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << json;
  return parsed;
}

const Value& Get(const Struct& from, const std::string& key) {
  static const Value& none = *new Value;
  const auto it = from.fields().find(key);
  return it == from.fields().end() ? none : it->second;
}
std::string Str(const Struct& from, const std::string& key) {
  return Get(from, key).string_value();
}
double Num(const Struct& from, const std::string& key) { return Get(from, key).number_value(); }

std::vector<Struct> EventsOf(const Struct& trace, const std::string& phase) {
  std::vector<Struct> events;
  for (const Value& each : Get(trace, "traceEvents").list_value().values()) {
    if (Str(each.struct_value(), "ph") == phase) events.push_back(each.struct_value());
  }
  return events;
}

// The rules of the format that a viewer relies on.
void CheckFormat(const Struct& trace) {
  std::map<std::pair<double, double>, std::vector<std::pair<double, double>>> threads;
  std::map<double, std::vector<double>> arrows;
  for (const Value& each : Get(trace, "traceEvents").list_value().values()) {
    const Struct& event = each.struct_value();
    const std::string phase = Str(event, "ph");
    ASSERT_THAT(phase, testing::AnyOf("M", "X", "i", "s", "f"));
    EXPECT_FALSE(Str(event, "name").empty());
    EXPECT_GT(Num(event, "pid"), 0);
    EXPECT_EQ(Get(event, "tid").kind_case(), Value::kNumberValue);
    if (phase == "M") continue;
    EXPECT_EQ(Get(event, "ts").kind_case(), Value::kNumberValue);
    EXPECT_FALSE(Str(event, "cat").empty());
    if (phase == "i") {
      EXPECT_THAT(Str(event, "s"), testing::AnyOf("t", "p", "g"));
    }
    if (phase == "s" || phase == "f") arrows[Num(event, "id")].push_back(Num(event, "ts"));
    if (phase != "X") continue;
    EXPECT_GE(Num(event, "dur"), 0);
    threads[{Num(event, "pid"), Num(event, "tid")}].emplace_back(
        Num(event, "ts"), Num(event, "ts") + Num(event, "dur"));
  }
  for (const auto& [thread, slices] : threads) {
    for (const auto& a : slices) {
      for (const auto& b : slices) {
        const bool apart = a.second <= b.first || b.second <= a.first;
        const bool nested = (a.first <= b.first && b.second <= a.second) ||
                            (b.first <= a.first && a.second <= b.second);
        EXPECT_TRUE(apart || nested)
            << a.first << "-" << a.second << " " << b.first << "-" << b.second;
      }
    }
  }
  for (const auto& [id, times] : arrows) {
    ASSERT_EQ(times.size(), 2u) << id;
    EXPECT_LE(times[0], times[1]);
  }
}

TEST(RenderTrace, AnOpIsASliceWithItsPhases) {
  Record op = Op(3, 42, 100, 30, 50, 90);
  op.peer = 0xb;
  const Struct trace = Parse(RenderTrace({{Of(0xa, {op})}}, {}));
  CheckFormat(trace);
  std::map<std::string, std::pair<double, double>> slices;
  for (const Struct& each : EventsOf(trace, "X")) {
    slices[Str(each, "name")] = {Num(each, "ts"), Num(each, "dur")};
  }
  const double begin = kWall - 1'000'000 + 100;
  EXPECT_THAT(slices, UnorderedElementsAre(std::pair("tag 42", std::pair(begin, 90.0)),
                                           std::pair("wait for pb", std::pair(begin, 30.0)),
                                           std::pair("transfer", std::pair(begin + 30, 50.0)),
                                           std::pair("commit", std::pair(begin + 80, 10.0))));
}

TEST(RenderTrace, ClocksAreAligned) {
  const Struct trace = Parse(RenderTrace({{Of(0xa, {Op(1, 7, 100, 0, 0, 10)}), 5000, 20},
                                          {Of(0xb, {Op(2, 7, 100, 0, 0, 10)}), -5000, -1}},
                                         {}));
  CheckFormat(trace);
  std::vector<double> begins;
  for (const Struct& each : EventsOf(trace, "X")) {
    if (Str(each, "cat") == "op") begins.push_back(Num(each, "ts"));
  }
  ASSERT_EQ(begins.size(), 2u);
  EXPECT_EQ(begins[1] - begins[0], 10000);
  const auto& clocks = Get(Get(trace, "metadata").struct_value(), "clocks").list_value();
  ASSERT_EQ(clocks.values_size(), 2);
  EXPECT_EQ(Num(clocks.values(0).struct_value(), "error_us"), 20);
  EXPECT_EQ(Get(clocks.values(1).struct_value(), "error_us").kind_case(), Value::kNullValue);
}

TEST(RenderTrace, OverlappingOpsOfAMemberAreOnThreadsOfTheirOwn) {
  const Struct trace =
      Parse(RenderTrace({{Of(0xa, {Op(1, 1, 100, 10, 10, 50), Op(1, 2, 120, 10, 10, 100),
                                   Op(1, 3, 150, 10, 10, 20)})}},
                        {}));
  CheckFormat(trace);
  std::map<std::string, double> threads;
  for (const Struct& each : EventsOf(trace, "X")) {
    if (Str(each, "cat") == "op") threads[Str(each, "name")] = Num(each, "tid");
  }
  EXPECT_NE(threads["tag 1"], threads["tag 2"]);
  EXPECT_EQ(threads["tag 1"], threads["tag 3"]);
}

TEST(RenderTrace, AnOpenOpLastsUntilTheRecordingWasMade) {
  Record op = Op(1, 5, 400'000, 0, 0, 0);
  op.flags = kRecordOpOpen;
  const Struct trace = Parse(RenderTrace({{Of(0xa, {op})}}, {}));
  CheckFormat(trace);
  const auto slices = EventsOf(trace, "X");
  ASSERT_EQ(slices.size(), 1u);
  EXPECT_EQ(Num(slices[0], "dur"), 600'000);
  EXPECT_EQ(Str(slices[0], "name"), "tag 5 (open)");
}

TEST(RenderTrace, ArrowsLeadFromTheLastToPost) {
  // Two ops with the same tag, one after the other, at three members.
  std::vector<TracedRecording> recordings;
  for (const int64_t late : {0, 5, 20}) {
    recordings.push_back({Of(0xa + late, {Op(1 + late, 7, 100 + late, 20 - late, 5, 30 - late),
                                          Op(1 + late, 7, 200 + late, 20 - late, 5, 30 - late)})});
  }
  const Struct trace = Parse(RenderTrace(recordings, {}));
  CheckFormat(trace);
  const auto starts = EventsOf(trace, "s");
  ASSERT_EQ(starts.size(), 4u);
  for (const Struct& each : starts) EXPECT_EQ(Num(each, "pid"), 3);
  std::vector<double> pids;
  for (const Struct& each : EventsOf(trace, "f")) pids.push_back(Num(each, "pid"));
  EXPECT_THAT(pids, UnorderedElementsAre(1, 2, 1, 2));
}

TEST(RenderTrace, EventsAreInstantsAndFaultsSpanTheProcess) {
  const Struct trace =
      Parse(RenderTrace({{Of(0xa, {},
                             {Event(RecordKind::kEpoch, 10, "epoch 3 holds"),
                              Event(RecordKind::kFault, 20, "say \"why\" \\ how")})}},
                        {}));
  CheckFormat(trace);
  const auto instants = EventsOf(trace, "i");
  ASSERT_EQ(instants.size(), 2u);
  EXPECT_EQ(Str(instants[0], "s"), "t");
  EXPECT_EQ(Str(instants[1], "s"), "p");
  EXPECT_EQ(Str(instants[1], "name"), "say \"why\" \\ how");
}

TEST(RenderTrace, ShowsTheSelectionOnlyAndNamesWhoIsSilent) {
  Record other = Op(1, 2, 100, 1, 1, 3);
  other.group = 1;
  TraceOptions options{"demo", 0, {"pc: no answer\x1b"}};
  const Struct trace = Parse(RenderTrace({{Of(0xa, {Op(1, 1, 100, 1, 1, 3), other})}}, options));
  CheckFormat(trace);
  EXPECT_EQ(EventsOf(trace, "X").size(), 4u);
  const auto& silent = Get(Get(trace, "metadata").struct_value(), "not_answered").list_value();
  ASSERT_EQ(silent.values_size(), 1);
  EXPECT_EQ(silent.values(0).string_value(), "pc: no answer?");
  options.run = "other";
  EXPECT_TRUE(EventsOf(Parse(RenderTrace({{Of(0xa, {other})}}, options)), "X").empty());
}

TEST(RenderRecording, ShowsOpsAndEventsInTheOrderOfTheirTimes) {
  Record bad = Op(1, 9, 300, 10, 0, 20);
  bad.code = 4;
  SetText(bad.text, "m2 died");
  const Recording recording =
      Of(0xa, {Op(1, 8, 100, 10, 5, 20), bad}, {Event(RecordKind::kEpoch, 200, "epoch 3 holds")});
  const std::string text = RenderRecording(recording);
  EXPECT_THAT(text, HasSubstr("asked"));
  EXPECT_LT(text.find("tag=8"), text.find("epoch 3 holds"));
  EXPECT_LT(text.find("epoch 3 holds"), text.find("tag=9"));
  EXPECT_THAT(text, HasSubstr("aborted: m2 died"));
  const Struct json = Parse(RenderRecordingJson(recording));
  EXPECT_EQ(Get(json, "ops").list_value().values_size(), 2);
  EXPECT_EQ(Str(Get(json, "ops").list_value().values(1).struct_value(), "outcome"), "aborted");
  EXPECT_EQ(Get(json, "events").list_value().values_size(), 1);
}

TEST(RenderRecording, UnknownNumbersDoNoHarm) {
  Record op = Op(1, 8, 100, 10, 5, 20);
  op.code = 255;
  op.algorithm = 255;
  const Recording recording = Of(0xa, {op});
  EXPECT_THAT(RenderRecording(recording), HasSubstr("unknown"));
  CheckFormat(Parse(RenderTrace({{recording}}, {})));
}

}  // namespace
}  // namespace longhaul
