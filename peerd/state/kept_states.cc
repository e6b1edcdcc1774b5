#include "peerd/state/kept_states.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

// Each tensor begins at a cache line.
constexpr uint64_t kAlign = 64;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t BytesToKeep(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const StateTensor& tensor : manifest) bytes += RoundUp(tensor.bytes, kAlign);
  return RoundUp(bytes, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
}

// Maps a memfd of this size. nullptr: it failed, and errno says why.
std::shared_ptr<void> MapMemory(uint64_t bytes, const std::shared_ptr<Unmapper>& unmapper) {
  const int fd = memfd_create("longhaul-kept", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  void* data = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  const int problem = errno;
  close(fd);
  errno = problem;
  if (data == MAP_FAILED) return nullptr;
  return {data, [unmapper, bytes](void* mapped) { unmapper->Unmap(mapped, bytes); }};
}

std::string Field(const GroupKey& group, const std::string& member) {
  return absl::StrCat(" group=", ToString(group), " name=", member);
}

std::shared_ptr<const void> Both(std::shared_ptr<const void> a, std::shared_ptr<const void> b) {
  return std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
      std::move(a), std::move(b));
}

struct ChunkId {
  size_t tensor = 0;
  size_t chunk = 0;
};

// Returns the chunks whose digests are known in `from` and differ in `to`.
std::vector<ChunkId> Differences(const MemoryState& from, const MemoryState& to) {
  std::vector<ChunkId> ids;
  for (size_t t = 0; t < from.manifest.size(); ++t) {
    for (size_t c = 0; c < from.digests[t].size(); ++c) {
      const Hash128& digest = from.digests[t][c];
      if (digest != Hash128{} && digest != to.digests[t][c]) ids.push_back({t, c});
    }
  }
  return ids;
}

HashPool::Copy CopyOf(const MemoryState& from, const ChunkId& id, uint8_t* to) {
  return {{from.Chunk(id.tensor, id.chunk), ChunkBytes(from.manifest[id.tensor].bytes, id.chunk)},
          to};
}

}  // namespace

KeptStates::KeptStates(const Options& options, HashPool* pool, std::function<Tick()> clock)
    : options_(options),
      pool_(pool),
      clock_(std::move(clock)),
      unmapper_(std::make_shared<Unmapper>()) {}

KeptStates::~KeptStates() {
  for (const auto& [name, kept] : entries_) pool_->Cancel(kept.job);
}

// ------------------------------------------------------------------------------ members

void KeptStates::Add(Local local, const GroupKey& group, const std::string& name) {
  LH_CHECK(local != 0);
  if (enabled()) members_[local] = {{group, name}, false};
}

void KeptStates::Remove(Local local) {
  const auto it = members_.find(local);
  if (it == members_.end()) return;
  const auto entry = entries_.find(it->second.name);
  members_.erase(it);
  if (entry == entries_.end() || entry->second.owner != local) return;
  entry->second.owner = 0;
  entry->second.since = clock_();
  DropUseless(entry);
}

// Drops a copy that is ahead, if its owner is gone.
void KeptStates::DropUseless(Entries::iterator it) {
  const Kept& kept = it->second;
  if (kept.committed || kept.owner != 0 || kept.job != 0) return;
  Drop(it, "its member is gone and had committed nothing");
}

// Returns the committed copy under the member's name. nullptr: there is none, or another member
// owns it.
const KeptStates::Kept* KeptStates::Accessible(Local local) const {
  const auto member = members_.find(local);
  if (member == members_.end()) return nullptr;
  const auto it = entries_.find(member->second.name);
  if (it == entries_.end() || !it->second.committed) return nullptr;
  if (it->second.owner != 0 && it->second.owner != local) return nullptr;
  return &it->second;
}

std::shared_ptr<const KeptState> KeptStates::Find(Local local, const Manifest& manifest) const {
  const Kept* const kept = Accessible(local);
  if (kept == nullptr || kept->job != 0 || kept->state->manifest != manifest) return nullptr;
  return kept->state;
}

std::shared_ptr<const KeptState> KeptStates::Committed(Local local) const {
  const Kept* const kept = Accessible(local);
  if (kept == nullptr || kept->owner != local || kept->inherited || kept->job != 0) return nullptr;
  return kept->state;
}

bool KeptStates::Revision(Local local, const Manifest& manifest, uint64_t* revision) const {
  const Kept* const kept = Accessible(local);
  if (kept == nullptr || kept->state->manifest != manifest) return false;
  *revision = kept->job != 0 ? kept->next_revision : kept->state->revision;
  return true;
}

std::shared_ptr<const KeptState> KeptStates::Inherit(Local local, const Manifest& manifest) {
  const Kept* const found = Accessible(local);
  if (found == nullptr || found->job != 0) return nullptr;
  const Name& name = members_.at(local).name;
  Kept& kept = entries_.at(name);
  if (kept.state->manifest != manifest) {
    Log(LogLevel::kWarning,
        absl::StrCat("kept state of no use", Field(name.group, name.member),
                     " revision=", kept.state->revision) +
            LogField("difference", FirstDifference(manifest, kept.state->manifest)));
    return nullptr;
  }
  if (kept.owner == 0) {
    kept.owner = local;
    kept.inherited = true;
  }
  return kept.state;
}

void KeptStates::Discard(Local local) {
  const auto member = members_.find(local);
  if (member == members_.end()) return;
  const auto it = entries_.find(member->second.name);
  if (it == entries_.end() || it->second.owner != local || it->second.job != 0) return;
  Drop(it, "read back, it was not what had been agreed on: its memory is damaged");
}

bool KeptStates::Inherited(Local local) const {
  const Kept* const kept = Accessible(local);
  return kept != nullptr && kept->owner == local && kept->inherited;
}

bool KeptStates::Busy(Local local) const {
  const Kept* const kept = Accessible(local);
  return kept != nullptr && kept->job != 0;
}

void KeptStates::WhenIdle(Local local, std::function<void()> ready) {
  if (!Busy(local)) return ready();
  entries_.at(members_.at(local).name).waiting.push_back(std::move(ready));
}

// ------------------------------------------------------------------------------ commits

bool KeptStates::Keep(Local local, const std::shared_ptr<const MemoryState>& state,
                      uint64_t revision, const Hash128& root, std::function<void()> done) {
  const auto found = members_.find(local);
  if (found == members_.end()) return true;
  Member& member = found->second;
  const auto it = entries_.find(member.name);
  Kept* kept = nullptr;
  if (it != entries_.end()) {
    const bool others = it->second.owner != 0 && it->second.owner != local;
    if (others || it->second.job != 0) {
      Refuse(local, &member, BytesToKeep(state->manifest), "another member of this name is here");
      return true;
    }
    if (it->second.state->manifest == state->manifest) {
      kept = &it->second;
    } else {
      Drop(it, "other tensors were committed");
    }
  }
  if (kept == nullptr) kept = Create(local, &member, *state);
  if (kept == nullptr) return true;
  kept->committed = true;
  kept->owner = local;
  kept->inherited = false;
  kept->next_revision = revision;
  kept->next_root = root;
  const bool same =
      Copy(member.name, state, [this, name = member.name, done = std::move(done)](bool right) {
        Copied(name, right);
        done();
      });
  if (same) {
    kept->state->revision = revision;
    kept->state->root = root;
  }
  return same;
}

bool KeptStates::Prepare(Local local, const std::shared_ptr<const MemoryState>& state,
                         std::function<void()> done) {
  const auto found = members_.find(local);
  if (found == members_.end()) return true;
  Member& member = found->second;
  const auto it = entries_.find(member.name);
  if (it == entries_.end()) {
    Kept* const kept = Create(local, &member, *state);
    if (kept == nullptr) return true;
    kept->owner = local;
  } else if (it->second.committed || it->second.owner != local || it->second.job != 0 ||
             it->second.state->manifest != state->manifest) {
    return true;
  }
  // A copied chunk may have a wrong digest. Then Keep() copies the chunk again.
  return Copy(member.name, state, [this, name = member.name, done = std::move(done)](bool) {
    DropUseless(entries_.find(name));
    done();
  });
}

bool KeptStates::Copy(const Name& name, const std::shared_ptr<const MemoryState>& state,
                      std::function<void(bool right)> done) {
  Kept& kept = entries_.at(name);
  std::vector<ChunkId> ids = Differences(*state, *kept.state);
  if (ids.empty()) return true;
  std::vector<HashPool::Copy> copies;
  std::vector<Hash128> wanted;
  for (const ChunkId& id : ids) {
    copies.push_back(CopyOf(*state, id, kept.state->places[id.tensor] + ChunkOffset(id.chunk)));
    wanted.push_back(state->digests[id.tensor][id.chunk]);
    // The digest is unknown while the chunk is written.
    kept.state->digests[id.tensor][id.chunk] = {};
  }
  kept.job = pool_->CopyChunks(copies, Both(state, kept.state),
                               [this, name, ids = std::move(ids), wanted = std::move(wanted),
                                done = std::move(done)](const std::vector<Hash128>& digests) {
                                 Kept& copied = entries_.at(name);
                                 copied.job = 0;
                                 for (size_t i = 0; i < ids.size(); ++i) {
                                   copied.state->digests[ids[i].tensor][ids[i].chunk] = digests[i];
                                 }
                                 done(digests == wanted);
                               });
  return false;
}

void KeptStates::Copied(const Name& name, bool right) {
  const auto it = entries_.find(name);
  Kept& kept = it->second;
  kept.state->revision = kept.next_revision;
  kept.state->root = kept.next_root;
  const std::vector<std::function<void()>> waiting = std::exchange(kept.waiting, {});
  if (!right) Drop(it, "its tensors were written to before the sync had ended");
  for (const auto& ready : waiting) ready();
}

std::shared_ptr<void> KeptStates::NewMemory(uint64_t bytes) const {
  return options_.memory ? options_.memory(bytes) : MapMemory(bytes, unmapper_);
}

KeptStates::Kept* KeptStates::Create(Local local, Member* member, const MemoryState& state) {
  const uint64_t bytes = BytesToKeep(state.manifest);
  if (!MakeRoom(bytes)) {
    Refuse(local, member, bytes, "there is no room; raise --keep-state");
    return nullptr;
  }
  std::shared_ptr<void> memory;
  if (bytes > 0) {
    memory = NewMemory(bytes);
    if (memory == nullptr) {
      Refuse(local, member, bytes,
             absl::StrCat("its memory cannot be had (", strerror(errno), ")"));
      return nullptr;
    }
  }
  Kept& kept = entries_[member->name];
  kept.state = std::make_shared<KeptState>();
  kept.bytes = bytes;
  bytes_ += bytes;
  kept.state->manifest = state.manifest;
  uint8_t* place = static_cast<uint8_t*>(memory.get());
  for (const StateTensor& tensor : state.manifest) {
    kept.state->places.push_back(tensor.bytes == 0 ? nullptr : place);
    kept.state->digests.emplace_back(CountChunks(tensor.bytes));
    if (tensor.bytes > 0) place += RoundUp(tensor.bytes, kAlign);
  }
  kept.state->memory = std::move(memory);
  member->told = false;
  return &kept;
}

// Makes room for `bytes` by dropping copies that wait. The copy that has waited longest goes first.
// Returns false, and drops nothing, if there would not be enough room.
bool KeptStates::MakeRoom(uint64_t bytes) {
  uint64_t lasting = 0;
  std::vector<Entries::iterator> waiting;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->second.owner == 0 && it->second.job == 0) {
      waiting.push_back(it);
    } else {
      lasting += it->second.bytes;
    }
  }
  if (lasting > options_.bytes_max || bytes > options_.bytes_max - lasting) return false;
  std::sort(waiting.begin(), waiting.end(),
            [](const auto& a, const auto& b) { return a->second.since < b->second.since; });
  for (const Entries::iterator it : waiting) {
    if (bytes <= options_.bytes_max - bytes_) break;
    Drop(it, "room was needed");
  }
  return true;
}

void KeptStates::Refuse(Local local, Member* member, uint64_t bytes, const std::string& why) {
  // Log it once, because it would happen at each step.
  if (std::exchange(member->told, true)) return;
  Log(LogLevel::kWarning,
      absl::StrCat("state not kept local=", local, Field(member->name.group, member->name.member),
                   " bytes=", bytes, " kept_bytes=", bytes_, " keep_state=", options_.bytes_max) +
          LogField("reason", why));
}

void KeptStates::Drop(Entries::iterator it, const std::string& reason) {
  Log(LogLevel::kInfo,
      absl::StrCat("kept state dropped", Field(it->first.group, it->first.member),
                   " revision=", it->second.state->revision, " bytes=", it->second.bytes) +
          LogField("reason", reason));
  bytes_ -= it->second.bytes;
  entries_.erase(it);
}

// ------------------------------------------------------------------------------ back to a trainer

HashPool::JobId KeptStates::CopyTo(const std::shared_ptr<const KeptState>& kept,
                                   const std::shared_ptr<MemoryState>& state,
                                   std::function<void(bool)> done) {
  LH_CHECK(kept->manifest == state->manifest);
  std::vector<ChunkId> ids = Differences(*kept, *state);
  std::vector<HashPool::Copy> copies;
  copies.reserve(ids.size());
  for (const ChunkId& id : ids) {
    copies.push_back(CopyOf(*kept, id, state->BeginFetch(id.tensor, id.chunk)));
  }
  return pool_->CopyChunks(copies, Both(kept, state),
                           [kept, state, ids = std::move(ids),
                            done = std::move(done)](const std::vector<Hash128>& digests) {
                             for (size_t i = 0; i < ids.size(); ++i) {
                               state->Fetched(ids[i].tensor, ids[i].chunk, digests[i]);
                             }
                             done(state->digests == kept->digests);
                           });
}

// ------------------------------------------------------------------------------ time

void KeptStates::OnTime() {
  const Tick now = clock_();
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    const Kept& kept = it->second;
    if (kept.owner == 0 && kept.job == 0 && kept.since + options_.keep_us <= now) {
      Drop(it, "nobody of its name came in time");
    }
    it = next;
  }
}

Tick KeptStates::NextDeadline() const {
  Tick due = kNever;
  for (const auto& [name, kept] : entries_) {
    if (kept.owner == 0 && kept.job == 0) due = std::min(due, kept.since + options_.keep_us);
  }
  return due;
}

}  // namespace longhaul::peerd
