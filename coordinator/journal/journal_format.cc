#include "coordinator/journal/journal_format.h"

#include <zlib.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/version.h"
#include "base/fields_json.h"
#include "base/status_macros.h"
#include "coordinator/core/token.h"
#include "proto/control/convert.h"

namespace longhaul::coordinator {
namespace {

void PutNumber(uint32_t number, std::string* out) {
  for (int i = 0; i < 4; ++i) out->push_back(static_cast<char>(number >> (8 * i)));
}

constexpr JsonParts kNoSecrets{.secrets = false};

}  // namespace

uint32_t JournalChecksum(const std::string& bytes) {
  return static_cast<uint32_t>(
      crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size())));
}

std::string FrameOf(const v1::JournalRecord& record) {
  const std::string bytes = record.SerializeAsString();
  std::string frame;
  frame.reserve(kJournalHeadBytes + bytes.size());
  PutNumber(static_cast<uint32_t>(bytes.size()), &frame);
  PutNumber(JournalChecksum(bytes), &frame);
  return frame + bytes;
}

std::string ReplayEntropy() { return std::string(kSecretBytes, 'e'); }

v1::JournalStart StartOf(const CoreConfig& config, const Records& records) {
  v1::JournalStart start;
  start.set_format(kJournalFormat);
  start.set_version(kVersion);
  start.set_config(ToJson(config, kNoSecrets));
  start.set_records(ToJson(records, kNoSecrets));
  return start;
}

v1::JournalEvent EventOf(const Event& event, Tick now) {
  v1::JournalEvent proto;
  proto.set_tick_us(now.us);
  if (const auto* from_peer = std::get_if<FromPeer>(&event)) {
    proto.mutable_from_peer()->set_session(from_peer->session.value());
    proto.mutable_from_peer()->set_message(control::Serialize(from_peer->message));
  } else {
    proto.set_other(ToJson(event, kNoSecrets));
  }
  return proto;
}

absl::StatusOr<CoreConfig> ConfigOf(const v1::JournalStart& start) {
  CoreConfig config;
  if (const std::string fault = FromJson(start.config(), &config); !fault.empty()) {
    return absl::DataLossError(absl::StrCat("the configuration has ", fault));
  }
  if (config.detect_ms == 0) return absl::DataLossError("detect_ms is 0");
  if (config.store == 0) return absl::DataLossError("the name of the store is 0");
  config.entropy = ReplayEntropy();
  return config;
}

absl::StatusOr<Records> RecordsOf(const v1::JournalStart& start) {
  Records records;
  if (const std::string fault = FromJson(start.records(), &records); !fault.empty()) {
    return absl::DataLossError(absl::StrCat("the records have ", fault));
  }
  // Only tokens derive from a run's secret, and the core decides nothing by a token.
  for (auto& [name, run] : records.runs) run.secret = std::string(32, 's');
  for (const auto& [key, group] : records.groups) {
    if (!records.runs.contains(key.run)) return absl::DataLossError("a group of no run");
  }
  return records;
}

absl::StatusOr<Event> EventOf(const v1::JournalEvent& proto) {
  if (proto.has_from_peer()) {
    LH_ASSIGN_OR_RETURN(control::PeerMessage message,
                        control::ParsePeerMessage(proto.from_peer().message()));
    return Event(FromPeer{SessionId(proto.from_peer().session()), std::move(message)});
  }
  Event event;
  if (const std::string fault = FromJson(proto.other(), &event); !fault.empty()) {
    return absl::DataLossError(absl::StrCat("an event has ", fault));
  }
  return event;
}

}  // namespace longhaul::coordinator
