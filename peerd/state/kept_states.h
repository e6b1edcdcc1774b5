// What peerd keeps of the states that its members agreed on last (--keep-state), so that a trainer
// that crashed goes on from there on the same host, at the speed of memory
// (docs/adr/0014-shared-state.md).
//
// One state for each name of a member in a group, in memory of our own, brought up to date after
// each commit by the chunks that changed. It belongs to the member that committed it. When that one
// is gone it waits for the next member of the name:
//
//   none --Keep--> updating --(copied)--> whole --Keep--> updating
//   whole --(its member is gone)--> waiting --(Take by one of the name)--> whole
//   waiting --(the time is up | room is needed for a member that is here)--> none
//   any --(other tensors are committed | a copy is not what was agreed on)--> none
//   whole --Discard--> none
//   none --Prepare--> ahead --Keep--> updating;  ahead --(its member is gone)--> none
//
// Ahead is a copy of what a member fetches before it commits anything, which nobody else gets.
//
// Each copy is hashed: what is whole has the digests that were agreed on, whatever the trainer
// writes meanwhile. Those who read a kept state end before Keep() changes it; see Find().
//
// Memory: all kept states together have at most bytes_max. Their pages are those of a memfd, come
// as they are written, and are given back in the background once nobody holds the state.
//
// Threads: the reactor's; the pool copies. Callbacks come from within HashPool::Deliver().
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

struct KeptState : MemoryState {
  uint64_t revision = 0;
  Hash128 root;
};

class KeptStates {
 public:
  // What the driver calls a local member.
  using Local = uint64_t;
  struct Options {
    uint64_t bytes_max = 0;  // of all together; 0: nothing is kept
    int64_t keep_us = 0;     // after its member is gone
    // Zeros of so many bytes; nullptr: there are none, and errno says why. Without the function:
    // the pages of a memfd, which a thread gives back.
    std::function<std::shared_ptr<void>(uint64_t bytes)> memory = nullptr;
  };

  // The pool outlives it. `clock`: the reactor's.
  KeptStates(const Options& options, HashPool* pool, std::function<Tick()> clock);
  // Copies that are being made are waited for; their callbacks never run.
  ~KeptStates();
  KeptStates(const KeptStates&) = delete;
  KeptStates& operator=(const KeptStates&) = delete;

  bool enabled() const { return options_.bytes_max > 0; }

  // The member is here, and gone. Of several with one name the first that syncs is kept.
  void Add(Local local, const GroupKey& group, const std::string& name);
  void Remove(Local local);

  // What is kept under the member's name, if no other member has it and the manifest is the same;
  // nullptr: nothing. Valid and unchanged until Keep() for the member.
  std::shared_ptr<const KeptState> Find(Local local, const Manifest& manifest) const;
  // What the member has committed itself; nullptr: it is not kept, or being copied.
  std::shared_ptr<const KeptState> Committed(Local local) const;
  // Of what Find() gives or, once it is copied, will give. False: nothing.
  bool Revision(Local local, const Manifest& manifest, uint64_t* revision) const;
  // The same, and from now on it belongs to the member. The log tells if it does not fit.
  std::shared_ptr<const KeptState> Inherit(Local local, const Manifest& manifest);
  // What Inherit() gave, read back, is not what was agreed on: forgets it.
  void Discard(Local local);
  // The member has what one of its name left, and has committed nothing itself.
  bool Inherited(Local local) const;
  // A copy is being made of what one of the member's name committed last.
  bool Busy(Local local) const;
  // Runs `ready` once that is over: at once if nothing is being copied.
  void WhenIdle(Local local, std::function<void()> ready);

  // The member has committed `state`: its digests are those of what was agreed on. True: that is
  // kept, or will not be, and there is nothing to wait for. False: chunks are being copied; `done`
  // runs at the end. The trainer writes to them after that, to be kept.
  bool Keep(Local local, const std::shared_ptr<const MemoryState>& state, uint64_t revision,
            const Hash128& root, std::function<void()> done);

  // The member has fetched some of `state`, and committed nothing yet: what is known of it is
  // copied ahead, so that its first Keep() finds memory that was written to before, and little to
  // copy. True: there is nothing to copy, or no room. False: `done` runs at the end; nobody writes
  // to the chunks that are known until then.
  bool Prepare(Local local, const std::shared_ptr<const MemoryState>& state,
               std::function<void()> done);

  // Copies what is kept to the inbox of `state`, of the same manifest: chunks whose digest differs
  // there. `done` runs once: whether `state` is what is kept.
  HashPool::JobId CopyTo(const std::shared_ptr<const KeptState>& kept,
                         const std::shared_ptr<MemoryState>& state, std::function<void(bool)> done);

  // Gives up what has waited for too long.
  void OnTime();
  Tick NextDeadline() const;
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
    bool committed = false;  // it is no copy ahead
    Local owner = 0;         // 0: gone
    bool inherited = false;  // the owner has committed nothing yet
    Tick since;              // without owner
    HashPool::JobId job = 0;
    uint64_t next_revision = 0;  // of the job
    Hash128 next_root;
    std::vector<std::function<void()>> waiting;
  };
  using Entries = std::map<Name, Kept>;
  struct Member {
    Name name;
    bool told = false;  // that its state is not kept
  };

  const Kept* Accessible(Local local) const;
  // Of the chunks whose digests are known and not those of the copy. True: there are none.
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
