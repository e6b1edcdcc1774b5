#include "coordinator/core/trials.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::coordinator {

uint64_t Trials::Begin(PeerId newcomer, const std::set<PeerId>& asked, Tick due) {
  LH_CHECK(!asked.empty());
  Trial& trial = running_[newcomer];
  trial = Trial{++last_, due, {}};
  for (const PeerId peer : asked) trial.answers[peer];
  reached_.erase(newcomer);
  return trial.number;
}

void Trials::Answer(PeerId from, uint64_t trial, PeerId newcomer, const std::string& error) {
  const auto running = running_.find(newcomer);
  if (running == running_.end() || running->second.number != trial) return;
  const auto answer = running->second.answers.find(from);
  if (answer != running->second.answers.end()) answer->second = error;
}

std::optional<bool> Trials::Trial::Reached(Tick now) const {
  size_t failed = 0;
  size_t missing = 0;
  for (const auto& [peer, answer] : answers) {
    if (!answer) {
      ++missing;
    } else if (!answer->empty()) {
      ++failed;
    }
  }
  size_t asked = answers.size();
  if (due <= now) asked -= std::exchange(missing, 0);
  if (TooFewReach(failed, asked)) return false;
  if (missing > 0) return std::nullopt;
  return true;
}

std::vector<Trials::Ended> Trials::End(Tick now) {
  std::vector<Ended> ended;
  for (auto it = running_.begin(); it != running_.end();) {
    const auto& [newcomer, trial] = *it;
    const std::optional<bool> reached = trial.Reached(now);
    if (!reached) {
      ++it;
      continue;
    }
    if (*reached) reached_.insert(newcomer);
    Ended& end = ended.emplace_back(Ended{newcomer, *reached, {}, trial.answers.size()});
    for (const auto& [peer, answer] : trial.answers) {
      if (answer && !answer->empty()) end.errors[peer] = *answer;
    }
    it = running_.erase(it);
  }
  return ended;
}

void Trials::Forget(PeerId newcomer) {
  running_.erase(newcomer);
  reached_.erase(newcomer);
}

void Trials::ForgetIf(const std::function<bool(PeerId)>& stranger) {
  std::erase_if(running_, [&](const auto& entry) { return stranger(entry.first); });
  std::erase_if(reached_, stranger);
}

Tick Trials::NextDeadline() const {
  Tick next = kNever;
  for (const auto& [newcomer, trial] : running_) next = std::min(next, trial.due);
  return next;
}

}  // namespace longhaul::coordinator
