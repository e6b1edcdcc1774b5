#include "coordinator/event_recorder.h"

#include <string_view>

#include "base/outcome.h"

namespace longhaul::coordinator {
namespace {

struct KindName {
  std::string_view event;
  RecordKind kind;
};

// All other events are notes.
constexpr KindName kKinds[] = {
    {"prepare", RecordKind::kEpoch},     {"commit", RecordKind::kEpoch},
    {"abort", RecordKind::kEpoch},       {"join", RecordKind::kMember},
    {"admit", RecordKind::kMember},      {"ready", RecordKind::kMember},
    {"leave", RecordKind::kMember},      {"refuse", RecordKind::kMember},
    {"death", RecordKind::kFault},       {"evict", RecordKind::kFault},
    {"link_lost", RecordKind::kLink},    {"block", RecordKind::kLink},
    {"isolated", RecordKind::kLink},     {"large_packets_vanish", RecordKind::kLink},
    {"fetch", RecordKind::kSync},        {"sync", RecordKind::kSync},
    {"sync_refused", RecordKind::kSync}, {"sync_failed", RecordKind::kSync},
    {"state_corrupt", RecordKind::kSync}};

RecordKind KindOf(const EventRecord& event) {
  if (event.fault && event.fault->cause != "leave") return RecordKind::kFault;
  for (const KindName& each : kKinds) {
    if (each.event == event.kind) return each.kind;
  }
  return RecordKind::kNote;
}

}  // namespace

void RecordEvent(const EventRecord& event, Tick now, RecordRing* ring) {
  Record record;
  record.time_us = now.us;
  const RecordKind kind = KindOf(event);
  record.kind = static_cast<uint8_t>(kind);
  record.code = static_cast<uint8_t>(kind == RecordKind::kFault ? Code::kUnavailable : Code::kOk);
  record.group = event.group.group;
  record.epoch = event.epoch.value();
  record.member = event.member.value();
  record.peer = event.peer.value();
  SetText(record.run, event.group.run);
  SetText(record.text, event.text);
  ring->Add(&record);
}

bool IsFault(const EventRecord& event) { return KindOf(event) == RecordKind::kFault; }

}  // namespace longhaul::coordinator
