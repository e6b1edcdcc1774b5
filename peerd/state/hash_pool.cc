#include "peerd/state/hash_pool.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/cpu_time.h"
#include "peerd/state/fresh_pages.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {
namespace {

// Room for all chunks in all windows of all transfers, and for a state of each member.
constexpr size_t kEndedMax = size_t{1} << 20;
// The least number of bytes that a thread takes at a time. So many small tensors together cost one
// lock of the mutex.
constexpr size_t kPieceBytes = kStateChunkBytes;

}  // namespace

uint32_t DefaultHashThreads() {
  return std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u);
}

struct HashPool::Job {
  JobId id = 0;  // 0: a single chunk
  std::vector<std::span<const uint8_t>> chunks;
  std::vector<uint8_t*> targets;   // for a copy: where each chunk goes; otherwise empty
  uint8_t* touch = nullptr;        // for Touch(): the memory; otherwise nullptr
  std::vector<Hash128> digests;    // of the chunks; one thread writes each
  std::vector<size_t> per_tensor;  // number of chunks of each tensor
  // Used by the reactor thread only:
  std::shared_ptr<const void> holder;
  std::function<void(Hash128)> chunk_done;
  std::function<void()> done;  // null: cancelled
  // Guarded by the mutex of the pool:
  size_t next = 0;
  size_t left = 0;  // chunks that are not done
  bool posted = false;

  void Work(size_t chunk) {
    std::span<const uint8_t> bytes = chunks[chunk];
    if (touch != nullptr) return TouchPages({touch, bytes.size()});
    if (!targets.empty()) {
      memcpy(targets[chunk], bytes.data(), bytes.size());
      bytes = {targets[chunk], bytes.size()};
    }
    digests[chunk] = HashChunk(bytes);
  }
  Digests Take() {
    Digests out;
    out.reserve(per_tensor.size());
    auto at = digests.begin();
    for (const size_t count : per_tensor) {
      out.emplace_back(at, at + static_cast<std::ptrdiff_t>(count));
      at += static_cast<std::ptrdiff_t>(count);
    }
    return out;
  }
};

HashPool::HashPool(uint32_t threads, std::function<void()> wake)
    : thread_count_(threads), ended_(kEndedMax, std::move(wake)) {}

HashPool::~HashPool() {
  {
    MutexLock lock(&mutex_);
    ending_ = true;
    chunks_.clear();
    states_.clear();
  }
  work_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void HashPool::Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) {
  StartAlone({reinterpret_cast<const uint8_t*>(data), bytes}, nullptr, std::move(done));
}

void HashPool::Touch(std::span<uint8_t> memory, std::function<void()> done) {
  StartAlone(memory, memory.data(), [done = std::move(done)](Hash128) { done(); });
}

void HashPool::StartAlone(std::span<const uint8_t> chunk, uint8_t* touch,
                          std::function<void(Hash128)> done) {
  LH_CHECK(chunk.size() <= kStateChunkBytes);
  auto job = std::make_shared<Job>();
  job->chunks.push_back(chunk);
  job->touch = touch;
  job->chunk_done = std::move(done);
  ++alone_;
  Start(std::move(job));
}

HashPool::JobId HashPool::HashTensors(const std::vector<std::span<const uint8_t>>& tensors,
                                      std::shared_ptr<const void> holder,
                                      std::function<void(Digests)> done) {
  auto job = std::make_shared<Job>();
  job->holder = std::move(holder);
  job->done = [job = job.get(), done = std::move(done)] { done(job->Take()); };
  for (const std::span<const uint8_t> tensor : tensors) {
    const size_t before = job->chunks.size();
    for (size_t at = 0; at < tensor.size(); at += kStateChunkBytes) {
      job->chunks.push_back(tensor.subspan(at, std::min(tensor.size() - at, kStateChunkBytes)));
    }
    job->per_tensor.push_back(job->chunks.size() - before);
  }
  return Open(std::move(job));
}

HashPool::JobId HashPool::CopyChunks(const std::vector<Copy>& chunks,
                                     std::shared_ptr<const void> holder,
                                     std::function<void(const std::vector<Hash128>&)> done) {
  auto job = std::make_shared<Job>();
  job->holder = std::move(holder);
  job->done = [job = job.get(), done = std::move(done)] { done(job->digests); };
  for (const Copy& chunk : chunks) {
    LH_CHECK(chunk.from.size() <= kStateChunkBytes);
    job->chunks.push_back(chunk.from);
    job->targets.push_back(chunk.to);
  }
  return Open(std::move(job));
}

HashPool::JobId HashPool::Open(std::shared_ptr<Job> job) {
  const JobId id = job->id = ++last_job_;
  open_[id] = job;
  Start(std::move(job));
  return id;
}

void HashPool::Start(std::shared_ptr<Job> job) {
  job->digests.resize(job->chunks.size());
  job->left = job->chunks.size();
  if (job->left == 0) {
    job->posted = true;
    LH_CHECK(ended_.Post(std::move(job)));
    return;
  }
  StartThreads();
  const bool alone = job->id == 0;
  {
    MutexLock lock(&mutex_);
    (alone ? chunks_ : states_).push_back(std::move(job));
  }
  alone ? work_.Signal() : work_.SignalAll();
}

void HashPool::StartThreads() {
  if (!threads_.empty()) return;
  for (uint32_t i = 0; i < thread_count_; ++i) {
    threads_.emplace_back([this] { Run(); });
  }
}

void HashPool::Cancel(JobId id) {
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  const std::shared_ptr<Job> job = std::move(it->second);
  open_.erase(it);
  job->done = nullptr;
  {
    MutexLock lock(&mutex_);
    std::erase(states_, job);
    job->left -= job->chunks.size() - job->next;
    job->next = job->chunks.size();
    while (!job->targets.empty() && job->left > 0) copied_.Wait(&mutex_);
    // The thread that works on the last piece will post the job.
    if (job->left > 0 || job->posted) return;
  }
  job->holder.reset();
}

void HashPool::Deliver() {
  for (const std::shared_ptr<Job>& job : ended_.TakeAll()) {
    // Release the holder here, on the reactor thread. A thread may drop the last reference to the
    // job.
    job->holder.reset();
    if (job->id == 0) {
      --alone_;
      std::exchange(job->chunk_done, nullptr)(job->digests.front());
    } else if (open_.erase(job->id) != 0) {
      std::exchange(job->done, nullptr)();
    }
  }
}

// ------------------------------------------------------------------------------ threads

HashPool::Piece HashPool::NextPiece(uint64_t limit) {
  std::deque<std::shared_ptr<Job>>& queue = chunks_.empty() ? states_ : chunks_;
  Piece piece{queue.front(), queue.front()->next, queue.front()->next};
  Job& job = *piece.job;
  size_t bytes = 0;
  while (piece.end < job.chunks.size() && bytes < limit) {
    bytes += job.chunks[piece.end++].size();
  }
  job.next = piece.end;
  if (job.next == job.chunks.size()) queue.pop_front();
  return piece;
}

void HashPool::Run() {
  const CpuTime cpu("hash");
  mutex_.Lock();
  while (true) {
    while (!ending_ && !HasWork()) work_.Wait(&mutex_);
    if (ending_) break;
    WorkOn(NextPiece(kPieceBytes));
  }
  mutex_.Unlock();
}

void HashPool::WorkOn(const Piece& piece) {
  mutex_.Unlock();
  Job& job = *piece.job;
  for (size_t i = piece.begin; i < piece.end; ++i) job.Work(i);
  mutex_.Lock();
  job.left -= piece.end - piece.begin;
  if (job.left > 0) return;
  job.posted = true;
  if (!job.targets.empty()) copied_.SignalAll();
  mutex_.Unlock();
  LH_CHECK(ended_.Post(piece.job));
  mutex_.Lock();
}

bool HashPool::WorkHere() {
  LH_CHECK(thread_count_ == 0);
  MutexLock lock(&mutex_);
  if (!HasWork()) return false;
  WorkOn(NextPiece(/*limit=*/1));
  return true;
}

}  // namespace longhaul::peerd
