// The copies of states that peerd keeps (--keep-state). If a trainer crashes, the next one on this
// host gets its state from such a copy, at the speed of memory (docs/life_of_a_sync.md).
//
// There is one copy for each name of a member in a group, in memory of peerd. After each commit,
// the chunks that changed are copied again. The copy belongs to the member that committed the state
// (its owner). When the owner is gone, the copy waits for the next member of the same name.
//
//   none --Keep()--> updating --(all chunks are copied)--> whole --Keep()--> updating
//   whole --(its owner is gone)--> waiting --(Inherit() by a member of the name)--> whole
//   waiting --(keep_us is over, or room is needed for another member)--> none
//   any --(other tensors are committed, or the copy is not the committed state)--> none
//   whole --Discard()--> none
//   none --Prepare()--> ahead --Keep()--> updating
//   ahead --(its owner is gone)--> none
//
// "Ahead" is a copy of the chunks that a member has fetched before its first commit. No other
// member can get it.
//
// Every copied chunk is hashed. If a digest is wrong after Keep(), the copy is dropped. So a whole
// copy has the digests that the members agreed on, even if the trainer writes to its tensors early.
// Nobody may read a kept state while Keep() changes it; see Find().
//
// Memory: all copies together have at most bytes_max. The memory of a copy is a memfd, so a page
// exists only after a write to it. When nobody holds a copy any more, another thread frees its
// pages.
//
// Threads: the reactor thread; the pool copies. Callbacks run inside HashPool::Deliver().
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/io/unmapper.h"
#include "peerd/state/hash_pool.h"
#include "peerd/state/memory_state.h"

namespace longhaul::peerd {

// A copy of a state.
struct KeptState : MemoryState {
  uint64_t revision = 0;
  Hash128 root;
};

class KeptStates {
 public:
  // The number of a local member. Not 0.
  using Local = uint64_t;
  struct Options {
    uint64_t bytes_max = 0;  // of all copies together; 0: nothing is kept
    int64_t keep_us = 0;     // how long a copy waits for the next member of its name
    // Allocates memory for a copy, filled with zeros. Returns nullptr and sets errno if it fails.
    // If this function is not set, each copy gets a memfd.
    std::function<std::shared_ptr<void>(uint64_t bytes)> memory = nullptr;
  };

  // `pool` must outlive this object. `clock` gives the time of the reactor.
  KeptStates(const Options& options, HashPool* pool, std::function<Tick()> clock);
  // Waits for chunks that are being copied. Their callbacks never run.
  ~KeptStates();
  KeptStates(const KeptStates&) = delete;
  KeptStates& operator=(const KeptStates&) = delete;

  bool enabled() const { return options_.bytes_max > 0; }

  // Add() is called when a member has come, and Remove() when it is gone. If several members have
  // the same name, only the state of the one that commits first is kept.
  void Add(Local local, const GroupKey& group, const std::string& name);
  void Remove(Local local);

  // Returns the copy under the member's name. nullptr: there is none, another member owns it, it is
  // being updated, or its manifest differs. The copy does not change until Keep() for this member.
  std::shared_ptr<const KeptState> Find(Local local, const Manifest& manifest) const;
  // Returns the copy of the state that this member itself has committed. nullptr: that state is not
  // kept, or is being copied.
  std::shared_ptr<const KeptState> Committed(Local local) const;
  // Sets the revision of the copy that Find() returns, or will return once the copy is updated.
  // Returns false if there is no such copy.
  bool Revision(Local local, const Manifest& manifest, uint64_t* revision) const;
  // Does the same as Find(). If the copy has no owner, the member owns it from now on. If the
  // manifest differs, logs the difference.
  std::shared_ptr<const KeptState> Inherit(Local local, const Manifest& manifest);
  // Drops the copy that Inherit() returned, because reading it back has shown that it is damaged.
  void Discard(Local local);
  // True if the member owns its copy by Inherit() and has committed nothing itself.
  bool Inherited(Local local) const;
  // True if the copy under the member's name is being updated.
  bool Busy(Local local) const;
  // Runs `ready` when Busy() is false: at once, or when the copy is updated.
  void WhenIdle(Local local, std::function<void()> ready);

  // Keeps `state`, which the member has committed: its digests are those that the members agreed
  // on. Returns true if there is nothing to wait for: nothing has to be copied, or the state is not
  // kept (the log says why). Returns false if chunks are being copied; `done` runs at the end. If
  // the trainer writes to a chunk before it is copied, the whole copy is dropped.
  bool Keep(Local local, const std::shared_ptr<const MemoryState>& state, uint64_t revision,
            const Hash128& root, std::function<void()> done);

  // For a member that has fetched some chunks of `state` and committed nothing yet: copies the
  // chunks whose digests are known. So its first Keep() has little to copy, to pages that exist.
  // Returns true if nothing is copied (all is copied already, there is no room, or another copy has
  // the name). Returns false if `done` runs at the end; nobody may write to these chunks before.
  bool Prepare(Local local, const std::shared_ptr<const MemoryState>& state,
               std::function<void()> done);

  // Makes `state`, which has the same manifest, equal to a kept state: copies the chunks whose
  // digests differ to its inbox. `done` runs once. Its argument is true if the two are equal then.
  HashPool::JobId CopyTo(const std::shared_ptr<const KeptState>& kept,
                         const std::shared_ptr<MemoryState>& state, std::function<void(bool)> done);

  // Drops copies that have waited for too long. Call it at NextDeadline().
  void OnTime();
  Tick NextDeadline() const;
  // The bytes of all copies together.
  uint64_t bytes() const { return bytes_; }

 private:
  struct Name {
    GroupKey group;
    std::string member;
    friend auto operator<=>(const Name&, const Name&) = default;
  };
  struct Kept {
    std::shared_ptr<KeptState> state;
    uint64_t bytes = 0;
    bool committed = false;      // false: the copy is ahead
    Local owner = 0;             // 0: the owner is gone
    bool inherited = false;      // the owner took it over and has committed nothing yet
    Tick since;                  // when the owner went
    HashPool::JobId job = 0;     // updates the copy; 0: none
    uint64_t next_revision = 0;  // when the job is done
    Hash128 next_root;
    std::vector<std::function<void()>> waiting;
  };
  using Entries = std::map<Name, Kept>;
  struct Member {
    Name name;
    bool told = false;  // it was logged that the member's state is not kept
  };

  const Kept* Accessible(Local local) const;
  // Copies the chunks of `state` whose digests are known and differ. Returns true if there are
  // none.
  bool Copy(const Name& name, const std::shared_ptr<const MemoryState>& state,
            std::function<void(bool right)> done);
  bool MakeRoom(uint64_t bytes);
  std::shared_ptr<void> NewMemory(uint64_t bytes) const;
  Kept* Create(Local local, Member* member, const MemoryState& state);
  void Refuse(Local local, Member* member, uint64_t bytes, const std::string& why);
  void Copied(const Name& name, bool right);
  void Drop(Entries::iterator it, const std::string& reason);
  void DropUseless(Entries::iterator it);

  const Options options_;
  HashPool* const pool_;
  const std::function<Tick()> clock_;
  const std::shared_ptr<Unmapper> unmapper_;
  std::map<Local, Member> members_;
  Entries entries_;
  uint64_t bytes_ = 0;  // of entries_
};

}  // namespace longhaul::peerd
