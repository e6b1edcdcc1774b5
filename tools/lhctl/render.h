// Makes the text that lhctl prints: tables for people, JSON for programs. Pure functions: no state,
// any thread, nothing can fail.
//
// Names and texts come from other hosts. A '?' replaces each control character, so that no host can
// steer the operator's terminal.
#pragma once

#include <string>
#include <vector>

#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

// A table; the first row is the header. Each column is as wide as its widest cell, and two blanks
// separate columns.
std::string RenderTable(const std::vector<std::vector<std::string>>& rows);

std::string RenderStatus(const v1::GetOverviewResponse& overview);
std::string RenderRuns(const v1::ListRunsResponse& runs);
std::string RenderMembers(const v1::GetOverviewResponse& overview);
std::string RenderRing(const v1::GetRingResponse& rings);
std::string RenderWhy(const v1::ExplainResponse& explanation);
// One line, with a newline at its end.
std::string RenderEvent(const v1::Event& event);

// JSON of any response, on one line or on several. Ends with a newline.
std::string RenderJson(const google::protobuf::Message& message, bool one_line);

// The text with a '?' in place of each character that may not be shown (base/text.h).
std::string Printable(const std::string& text);

// What a member is doing: "at boundary", for instance.
std::string MemberState(const v1::MemberStatus& member);
// Whether a peer is there: "attached", for instance.
std::string PeerState(const v1::PeerStatus& peer);
// Three cells about the link to the next peer: its bandwidth, its round-trip time, and the age of
// the measurement.
std::vector<std::string> LinkCells(const v1::PeerStatus& peer);

// "1.5 GiB", for instance.
std::string RenderBytes(uint64_t bytes);
// As a percentage of a tensor.
std::string RenderShare(double share);

}  // namespace longhaul
