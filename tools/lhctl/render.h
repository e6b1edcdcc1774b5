// What lhctl prints: tables for people, JSON for programs. Pure.
//
// Names and texts come from other hosts: control characters are shown as '?', so that none can
// steer the operator's terminal.
#pragma once

#include <string>
#include <vector>

#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

// Columns as wide as their widest cell, two blanks between, the first row is the header.
std::string RenderTable(const std::vector<std::vector<std::string>>& rows);

std::string RenderStatus(const v1::GetOverviewResponse& overview);
std::string RenderRuns(const v1::ListRunsResponse& runs);
std::string RenderMembers(const v1::GetOverviewResponse& overview);
std::string RenderRing(const v1::GetRingResponse& rings);
std::string RenderWhy(const v1::ExplainResponse& explanation);
// One line.
std::string RenderEvent(const v1::Event& event);

// One line for an event, several for everything else; ends with a newline.
std::string RenderJson(const google::protobuf::Message& message, bool one_line);

// "1.5 GiB"
std::string RenderBytes(uint64_t bytes);

}  // namespace longhaul
