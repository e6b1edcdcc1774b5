#include "peerd/state/local_state.h"

#include <algorithm>

namespace longhaul::peerd {
namespace {

void Clear(std::vector<Hash128>* digests) {
  std::fill(digests->begin(), digests->end(), Hash128{});
}

}  // namespace

void LocalState::Bring(size_t tensor) {
  Clear(&digests[tensor]);
  if (inbox[tensor] == places[tensor]) Clear(&fetched[tensor]);
}

bool LocalState::Settle() {
  bool any = false;
  size_t at = 0;
  for (size_t tensor = 0; tensor < digests.size(); ++tensor) {
    for (uint64_t chunk = 0; chunk < digests[tensor].size(); ++chunk) {
      const bool came = InInbox(tensor, chunk);
      changed[at++] = came ? 1 : 0;
      any = any || came;
    }
    Clear(&fetched[tensor]);
  }
  return any;
}

void LocalState::Forget() {
  for (std::vector<Hash128>& tensor : digests) Clear(&tensor);
}

}  // namespace longhaul::peerd
