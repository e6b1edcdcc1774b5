#include "peerd/engine/state_runner.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

constexpr int64_t kProgressUs = Millis(100);

std::vector<StateSource> SourcesOf(const std::vector<control::SyncSource>& sources) {
  std::vector<StateSource> out;
  out.reserve(sources.size());
  for (const control::SyncSource& source : sources) out.push_back({source.member, source.peer});
  return out;
}

void LogCorrupt(const StateExchange::Ended& ended) {
  if (ended.result.corrupt.empty()) return;
  std::string members;
  for (const MemberId member : ended.result.corrupt) {
    absl::StrAppend(&members, members.empty() ? "" : ",", ToString(member));
  }
  Log(LogLevel::kWarning, absl::StrCat("state chunks corrupt local=", ended.local, " from=",
                                       members, " repeated=", ended.result.bytes_repeated));
}

}  // namespace

StateRunner::StateRunner(const Options& options, Transport* transport, std::function<void()> wake,
                         std::function<Tick()> clock)
    : clock_(std::move(clock)),
      pool_(options.hash_threads, std::move(wake)),
      kept_(options.kept, &pool_, clock_),
      syncs_(&pool_, &kept_, clock_),
      exchange_(options.self, transport, &pool_, options.detect_ms) {
  exchange_.server()->SetRate(options.state_rate);
}

void StateRunner::Begin(LocalId local, const GroupKey& group, const StateSync& sync,
                        bool with_step) {
  members_[local].group = group;
  // Sharing ends: it checks served chunks against the state's digests, which are now computed anew.
  EndShare(local);
  syncs_.Begin(local, sync, with_step);
}

void StateRunner::Gone(LocalId local) {
  kept_.Remove(local.value());
  // The next member of this name may take over the kept copy and change it.
  const auto it = members_.find(local);
  if (it == members_.end() || !it->second.served) return;
  exchange_.server()->EndServeKept(it->second.group, it->second.served);
}

void StateRunner::Forget(LocalId local) {
  kept_.Remove(local.value());
  syncs_.Gone(local);
  const auto it = members_.find(local);
  if (it == members_.end()) return;
  if (it->second.served) exchange_.server()->Unregister(it->second.group, it->second.served);
  members_.erase(it);
}

// ------------------------------------------------------------------------------ actions

void StateRunner::Carry(const ServeState& action) {
  const std::shared_ptr<LocalState> state = syncs_.StateOf(action.local);
  if (state == nullptr) return;
  members_[action.local] = {action.group, action.member, action.may_change, state->declared};
  exchange_.server()->Register(action.group, action.member, state);
  exchange_.server()->Serve(action.group, action.member, action.state, action.may_change);
}

void StateRunner::EndShare(LocalId local) {
  const auto it = members_.find(local);
  if (it != members_.end() && it->second.shared) StopServing(&it->second);
}

void StateRunner::StopServing(Member* member) {
  member->shared = false;
  exchange_.server()->EndServe(member->group, member->served);
  exchange_.server()->Register(member->group, member->served, member->declared);
}

void StateRunner::Carry(const EndServe& action) {
  const auto it = members_.find(action.local);
  if (it == members_.end() || !it->second.served) return;
  StopServing(&it->second);
  const std::shared_ptr<LocalState> state = syncs_.StateOf(action.local);
  if (state != nullptr && exchange_.server()->Reading(state.get())) {
    reads_[action.local].states.push_back(state);
  }
}

void StateRunner::Carry(const StartTransfer& action) {
  WhenUnread(action.local, [this, action] { Start(action); });
}

void StateRunner::Start(const StartTransfer& action) {
  std::shared_ptr<LocalState> state = syncs_.StateOf(action.local);
  if (state == nullptr) {
    events_.push_back(TransferEnded{action.local,
                                    {Code::kAborted, "the trainer is gone"},
                                    /*bytes=*/0,
                                    /*sources=*/{},
                                    /*corrupt=*/{}});
    return;
  }
  StateExchange::Start start;
  start.local = action.local.value();
  start.group = action.group;
  start.root = action.state;
  start.state = std::move(state);
  start.sources = SourcesOf(action.sources);
  start.unequal_too = action.unequal_too;
  start.background = action.background;
  uint64_t bytes = 0;
  for (const StateTensor& tensor : start.state->manifest) bytes += tensor.bytes;
  exchange_.StartTransfer(std::move(start), Now());
  fetches_[action.local] = {Now(), 0, 0, bytes, action.background, action.background};
}

void StateRunner::Carry(const ChangeSources& action) {
  WhenUnread(action.local, [this, action] {
    exchange_.ChangeSources(action.local.value(), SourcesOf(action.sources), Now());
  });
}

void StateRunner::Carry(const StopTransfer& action) {
  WhenUnread(action.local, [this, local = action.local.value()] { exchange_.StopTransfer(local); });
}

void StateRunner::Carry(const CompareManifest& action) {
  const std::shared_ptr<LocalState> state = syncs_.StateOf(action.local);
  const auto it = members_.find(action.local);
  if (state == nullptr || it == members_.end()) {
    events_.push_back(ManifestCompared{action.local, ""});
    return;
  }
  exchange_.CompareManifest(action.local.value(), it->second.group,
                            std::shared_ptr<const Manifest>(state, &state->manifest),
                            {action.other.member, action.other.peer}, Now());
}

StateSyncInfo StateRunner::Carry(const SyncDone& action) {
  const auto it = members_.find(action.local);
  // Nobody may read the kept copy while it is updated.
  if (it != members_.end() && it->second.served && action.outcome.ok()) {
    exchange_.server()->EndServeKept(it->second.group, it->second.served);
  }
  const StateSyncInfo info = syncs_.End(action);
  if (syncs_.Keeping(action.local)) {
    reads_[action.local].keeping = true;
  } else {
    ServeKept(action.local);
  }
  return info;
}

void StateRunner::ServeKept(LocalId local) {
  const auto it = members_.find(local);
  const std::shared_ptr<const KeptState> kept = kept_.Committed(local.value());
  if (kept == nullptr || it == members_.end() || !it->second.served) return;
  exchange_.server()->ServeKept(it->second.group, it->second.served, kept, kept->root);
}

// ------------------------------------------------------------------------------ work

void StateRunner::WhenUnread(LocalId local, std::function<void()> act) {
  const auto it = reads_.find(local);
  if (it == reads_.end()) return act();
  it->second.then.push_back(std::move(act));
}

void StateRunner::EndReads() {
  const StateServer& server = *exchange_.server();
  for (auto it = reads_.begin(); it != reads_.end();) {
    std::erase_if(it->second.states,
                  [&](const auto& state) { return !server.Reading(state.get()); });
    if (!it->second.states.empty() || syncs_.Keeping(it->first)) {
      ++it;
      continue;
    }
    if (it->second.keeping) ServeKept(it->first);
    const std::vector<std::function<void()>> then = std::move(it->second.then);
    it = reads_.erase(it);
    for (const auto& act : then) act();
  }
}

void StateRunner::Work() {
  pool_.Deliver();
  EndReads();
  if (kept_.NextDeadline() <= Now()) kept_.OnTime();
  exchange_.Work(Now());
  for (auto& [local, fetch] : fetches_) {
    if (!fetch.measure) continue;
    const StateTransfer::Progress progress = exchange_.ProgressOf(local.value());
    if (!progress.measured) continue;
    fetch.measure = false;
    events_.push_back(TransferMeasured{local, progress.bytes_total, fetch.state_bytes});
  }
  for (StateExchange::Ended& ended : exchange_.PopEnded()) {
    LogCorrupt(ended);
    Over(std::move(ended));
  }
  for (StateExchange::Compared& compared : exchange_.PopCompared()) {
    events_.push_back(ManifestCompared{LocalId(compared.local), std::move(compared.difference)});
  }
}

void StateRunner::Over(StateExchange::Ended ended) {
  const LocalId local(ended.local);
  TransferResult& result = ended.result;
  TransferEnded over{local, {}, result.bytes, std::move(result.sources), std::move(result.corrupt)};
  if (!result.error.empty()) over.outcome = {Code::kAborted, std::move(result.error)};
  const auto tell = [this, over] {
    fetches_.erase(over.local);
    events_.push_back(over);
  };
  // What was fetched in the background is copied for KeptStates now: no other member waits here,
  // but all would wait at the commit.
  const std::shared_ptr<LocalState> state =
      fetches_.at(local).background ? syncs_.StateOf(local) : nullptr;
  if (state == nullptr || kept_.Prepare(local.value(), state, tell)) tell();
}

Tick StateRunner::NextDeadline() const {
  Tick due = std::min(exchange_.NextDeadline(), kept_.NextDeadline());
  for (const auto& [local, fetch] : fetches_) due = std::min(due, fetch.looked + kProgressUs);
  return due;
}

std::vector<Event> StateRunner::PopEvents() {
  std::vector<Event> events = std::exchange(events_, {});
  for (Event& event : syncs_.PopEvents()) events.push_back(std::move(event));
  return events;
}

std::vector<std::pair<LocalId, control::FetchProgress>> StateRunner::PopProgress() {
  std::vector<std::pair<LocalId, control::FetchProgress>> out;
  const Tick now = Now();
  for (auto& [local, fetch] : fetches_) {
    const int64_t passed = now - fetch.looked;
    if (passed < kProgressUs) continue;
    const StateTransfer::Progress progress = exchange_.ProgressOf(local.value());
    const uint64_t came = progress.bytes_received - std::min(fetch.bytes, progress.bytes_received);
    // A moving average over about one second.
    const double fresh = std::min(1.0, static_cast<double>(passed) * 1e-6);
    const double rate = static_cast<double>(came) * 1e6 / static_cast<double>(passed);
    fetch.bytes_per_second =
        fetch.bytes_per_second == 0
            ? static_cast<uint64_t>(rate)
            : static_cast<uint64_t>(fresh * rate +
                                    (1 - fresh) * static_cast<double>(fetch.bytes_per_second));
    fetch.bytes = progress.bytes_received;
    fetch.looked = now;
    if (progress.bytes_total == 0) continue;
    out.emplace_back(local, control::FetchProgress{progress.bytes_done, progress.bytes_total,
                                                   fetch.bytes_per_second, progress.sources});
  }
  return out;
}

}  // namespace longhaul::peerd
