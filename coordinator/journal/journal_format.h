// The format of a journal, which its writer and its reader share. Private to this directory.
//
// Pure functions without state. Reading returns DataLoss for what no coordinator writes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/core/coordinator_core.h"
#include "proto/longhaul/v1/journal.pb.h"

namespace longhaul::coordinator {

inline constexpr uint32_t kJournalFormat = 5;
// In front of each record stand its length and its checksum, 4 bytes each, lowest byte first.
inline constexpr size_t kJournalHeadBytes = 8;
// The first record of a journal holds all records of the store. All others are far smaller.
inline constexpr uint32_t kJournalRecordBytesMax = 256u << 20;

uint32_t JournalChecksum(const std::string& bytes);
// The record's bytes, with length and checksum in front.
std::string FrameOf(const v1::JournalRecord& record);

// A fixed value. A replayed core gets it instead of the entropy of the recorded core.
std::string ReplayEntropy();

v1::JournalStart StartOf(const CoreConfig& config, const Records& records);
v1::JournalEvent EventOf(const Event& event, Tick now);

// These read what StartOf() and EventOf() recorded, with fixed values in place of the secrets.
// DataLoss: no coordinator writes such a record.
absl::StatusOr<CoreConfig> ConfigOf(const v1::JournalStart& start);
absl::StatusOr<Records> RecordsOf(const v1::JournalStart& start);
absl::StatusOr<Event> EventOf(const v1::JournalEvent& proto);

}  // namespace longhaul::coordinator
