// Threads that hash: single chunks that have come over the network, whole states before a sync, and
// chunks that they copy. They also touch the memory that chunks will come to.
//
// Single chunks (Hash, Touch) go before states; states are begun in the order they came, and all
// threads work on one before they begin the next; copies are states in this. Ends come in any
// order, of states as of chunks. The digests are the same for any number of threads.
//
// Memory: `holder` keeps what a state consists of readable, and is released on the reactor thread.
// Chunks have no holder, see Hasher. Nothing here can be hit by SIGBUS: what trainers share are
// files sealed against shrinking (ipc_server.cc insists), and their pages are not file-backed.
//
// Threads: the reactor's, which `wake` wakes when there is something to deliver; `wake` is called
// by the pool's own threads. Those start with the first job. A pool of 0 threads works when its
// owner calls WorkHere(), so that a simulation decides when.
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

// Half of this machine's processors, 1 to 8.
uint32_t DefaultHashThreads();

class HashPool final : public Hasher {
 public:
  // Names a HashTensors() that has not ended; never reused.
  using JobId = uint64_t;
  // For each tensor the digests of its chunks.
  using Digests = std::vector<std::vector<Hash128>>;

  // 0 threads: only WorkHere() works.
  HashPool(uint32_t threads, std::function<void()> wake);
  // What has not been delivered never is. Waits for the chunks that are being read.
  ~HashPool() override;
  HashPool(const HashPool&) = delete;
  HashPool& operator=(const HashPool&) = delete;

  void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) override;
  void Touch(std::span<uint8_t> memory, std::function<void()> done) override;

  // One chunk to be copied, to memory of as many bytes that does not overlap it.
  struct Copy {
    std::span<const uint8_t> from;
    uint8_t* to = nullptr;
  };

  // `done` runs within Deliver(), once, unless the job is cancelled before. Also for no tensors.
  JobId HashTensors(const std::vector<std::span<const uint8_t>>& tensors,
                    std::shared_ptr<const void> holder, std::function<void(Digests)> done);
  // Copies the chunks, each of at most kStateChunkBytes, and gives the digest of each copy. The
  // holder keeps both sides. `done` as above, also for no chunks.
  JobId CopyChunks(std::vector<Copy> chunks, std::shared_ptr<const void> holder,
                   std::function<void(const std::vector<Hash128>&)> done);
  // `done` never runs, and is destroyed; chunks that nobody has begun to read are dropped. Those
  // that are being read keep the holder for as long; those that are being copied are waited for, so
  // that nothing is written from then on. Jobs that have ended are ignored.
  void Cancel(JobId job);

  // Runs the callbacks of what has ended; they may start and cancel jobs.
  void Deliver();
  // Of a pool without threads: works on the chunk that is next. False: there is none.
  bool WorkHere();
  // Nothing is under way that Deliver() would bring.
  bool idle() const { return open_.empty() && alone_ == 0; }

 private:
  struct Job;
  // A piece of a job that one thread works on.
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
  // Of `limit` bytes or more, unless the job ends before that.
  Piece NextPiece(uint64_t limit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Without the mutex as long as it works.
  void WorkOn(const Piece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint32_t thread_count_;
  Mailbox<std::shared_ptr<Job>> ended_;
  std::vector<std::thread> threads_;            // the reactor's
  JobId last_job_ = 0;                          // the reactor's
  std::map<JobId, std::shared_ptr<Job>> open_;  // the reactor's: neither delivered nor cancelled
  size_t alone_ = 0;                            // the reactor's: single chunks, not delivered

  Mutex mutex_;
  CondVar work_;
  CondVar copied_;  // a copy job has no piece left
  std::deque<std::shared_ptr<Job>> chunks_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Job>> states_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace longhaul::peerd
