// A pool of threads for shared state. It has three kinds of work:
// - single chunks: Hash() hashes a chunk that has come over the network; Touch() creates the pages
//   of memory that a chunk will be received into
// - states: HashTensors() hashes all tensors of a state before a sync
// - copies: CopyChunks() copies chunks and hashes the copies
//
// Order: single chunks come first. States and copies are begun in the order of the calls. All
// threads work on the first one until none of its chunks is left to begin. States and copies may
// end in any order. The digests do not depend on the number of threads.
//
// Memory: `holder` keeps the memory of a state or a copy mapped. The reactor thread releases the
// holder. For single chunks the caller keeps the memory mapped (hasher.h). Reading cannot raise
// SIGBUS: trainers share memfds that are sealed against shrinking (the IPC server refuses others).
//
// Threads: the reactor thread makes all calls. The pool calls `wake`, usually on one of its
// threads, when Deliver() has something to do. The threads start with the first job. A pool of 0
// threads works inside WorkHere(), so that a simulation decides when work is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/mailbox.h"
#include "base/mutex.h"
#include "peerd/state/hasher.h"

namespace longhaul::peerd {

// Half of the processors of this machine, but at least 1 and at most 8.
uint32_t DefaultHashThreads();

class HashPool final : public Hasher {
 public:
  // Names a state or a copy that has not ended. Never reused.
  using JobId = uint64_t;
  // For each tensor, the digests of its chunks.
  using Digests = std::vector<std::vector<Hash128>>;

  // threads: 0 means that all work is done inside WorkHere().
  HashPool(uint32_t threads, std::function<void()> wake);
  // Waits until no thread reads a chunk any more. Callbacks that Deliver() has not run never run.
  ~HashPool() override;
  HashPool(const HashPool&) = delete;
  HashPool& operator=(const HashPool&) = delete;

  void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) override;
  void Touch(std::span<uint8_t> memory, std::function<void()> done) override;

  // One chunk to copy. `to` has room for all bytes of `from`. The two do not overlap.
  struct Copy {
    std::span<const uint8_t> from;
    uint8_t* to = nullptr;
  };

  // Hashes all tensors; there may be none. `done` runs once, inside Deliver(), unless the job is
  // cancelled before.
  JobId HashTensors(const std::vector<std::span<const uint8_t>>& tensors,
                    std::shared_ptr<const void> holder, std::function<void(Digests)> done);
  // Copies the chunks, each of at most kStateChunkBytes, and passes the digest of each copy to
  // `done`. `holder` keeps both `from` and `to` mapped. `done` runs as for HashTensors().
  JobId CopyChunks(const std::vector<Copy>& chunks, std::shared_ptr<const void> holder,
                   std::function<void(const std::vector<Hash128>&)> done);
  // Cancels a job; does nothing if `done` has run. Otherwise `done` never runs, and is destroyed.
  // Chunks that no thread has begun to read are dropped. If chunks are being hashed, the holder is
  // kept until that ends and Deliver() has run. If chunks are being copied, this call waits until
  // that ends, so that nothing is written afterwards.
  void Cancel(JobId job);

  // Runs the callbacks of all work that has ended. They may start and cancel jobs.
  void Deliver();
  // For a pool of 0 threads: works on the next chunk. Returns false if there is none.
  bool WorkHere();
  // True if every callback has run or was cancelled.
  bool idle() const { return open_.empty() && alone_ == 0; }

 private:
  struct Job;
  // The chunks of a job that one thread works on.
  struct Piece {
    std::shared_ptr<Job> job;
    size_t begin = 0;
    size_t end = 0;
  };

  void StartAlone(std::span<const uint8_t> chunk, uint8_t* touch,
                  std::function<void(Hash128)> done);
  JobId Open(std::shared_ptr<Job> job);
  void Start(std::shared_ptr<Job> job);
  void StartThreads();
  void Run();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !chunks_.empty() || !states_.empty();
  }
  // Takes the next chunks of the first job: `limit` bytes or more, unless the job has fewer left.
  Piece NextPiece(uint64_t limit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Works on a piece, without holding the mutex meanwhile.
  void WorkOn(const Piece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint32_t thread_count_;
  Mailbox<std::shared_ptr<Job>> ended_;
  // Used by the reactor thread only:
  std::vector<std::thread> threads_;
  JobId last_job_ = 0;
  std::map<JobId, std::shared_ptr<Job>> open_;  // states and copies, not delivered, not cancelled
  size_t alone_ = 0;                            // single chunks that are not delivered

  Mutex mutex_;
  CondVar work_;
  CondVar copied_;  // signalled when the last piece of a copy is done
  std::deque<std::shared_ptr<Job>> chunks_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Job>> states_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace longhaul::peerd
