#include "peerd/transport/refused_callers.h"

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

constexpr std::array<const char*, kCallerRefusals> kNames = {
    "malformed", "version", "look", "epoch", "token", "key",
    "peer",      "sealing", "link", "busy",  "broken"};
static_assert(static_cast<size_t>(CallerRefusal::kBroken) + 1 == kCallerRefusals);

// Who has the token of no epoch, or not the right key, is no member, or a member that lies. The
// others may be members that are ahead of this peer, or behind it.
LogLevel LevelOf(CallerRefusal refusal) {
  switch (refusal) {
    case CallerRefusal::kToken:
    case CallerRefusal::kKey:
      return LogLevel::kWarning;
    case CallerRefusal::kMalformed:
    case CallerRefusal::kVersion:
    case CallerRefusal::kEpoch:
    case CallerRefusal::kPeer:
    case CallerRefusal::kSealing:
      return LogLevel::kInfo;
    case CallerRefusal::kLook:
    case CallerRefusal::kLink:
    case CallerRefusal::kBusy:
    case CallerRefusal::kBroken:
      return LogLevel::kDebug;
  }
  return LogLevel::kDebug;
}

}  // namespace

const char* Name(CallerRefusal refusal) { return kNames[static_cast<size_t>(refusal)]; }

CallerRefusal RefusalOf(LaneResult result) {
  switch (result) {
    case LaneResult::kWrongVersion:
      return CallerRefusal::kVersion;
    case LaneResult::kUnknownEpoch:
      return CallerRefusal::kEpoch;
    case LaneResult::kWrongPeer:
      return CallerRefusal::kPeer;
    case LaneResult::kUnknownLink:
      return CallerRefusal::kLink;
    case LaneResult::kWrongSealing:
      return CallerRefusal::kSealing;
    case LaneResult::kAccepted:
    case LaneResult::kBusy:
    case LaneResult::kNoWay:
      break;
  }
  return CallerRefusal::kBusy;
}

void RefusedCallers::Add(CallerRefusal refusal, PeerId peer, const std::string& from,
                         const std::string& why, Tick now) {
  ++counts_[static_cast<size_t>(refusal)];
  const auto held_back = log_.Take(refusal, now);
  if (!held_back) return;
  Log(LevelOf(refusal),
      absl::StrCat("caller at the data port refused reason=", Name(refusal),
                   " peer=", ToString(peer), " from=", from, " held_back=", *held_back) +
          LogField("why", why));
}

void AddTotals(const RefusedCallers::Counts& counts, std::vector<CounterTotal>* totals) {
  for (size_t i = 0; i < kCallerRefusals; ++i) {
    totals->push_back({"longhaul_peerd_handshakes_refused_total",
                       "Connections on the data port that failed the handshake, by reason",
                       counts[i], kNames[i]});
  }
}

}  // namespace longhaul::peerd
