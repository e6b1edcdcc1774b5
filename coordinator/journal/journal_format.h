// What writer and reader of a journal share. Of this package only.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/core/coordinator_core.h"
#include "proto/longhaul/v1/journal.pb.h"

namespace longhaul::coordinator {

inline constexpr uint32_t kJournalFormat = 4;
// Length and checksum.
inline constexpr size_t kJournalHeadBytes = 8;
// The start of a journal holds all records; no other record comes near.
inline constexpr uint32_t kJournalRecordBytesMax = 256u << 20;

uint32_t JournalChecksum(const std::string& bytes);
// With length and checksum in front.
std::string FrameOf(const v1::JournalRecord& record);

// Stands for the entropy of the recorded core.
std::string ReplayEntropy();

v1::JournalStart StartOf(const CoreConfig& config, const Records& records);
// `entropy` is that of the recorded core.
v1::JournalEvent EventOf(const Event& event, Tick now, const std::string& entropy);

// Secrets are replaced by others. DataLoss: what no coordinator writes.
absl::StatusOr<CoreConfig> ConfigOf(const v1::JournalStart& start);
absl::StatusOr<Records> RecordsOf(const v1::JournalStart& start);
absl::StatusOr<Event> EventOf(const v1::JournalEvent& proto);

}  // namespace longhaul::coordinator
