#include "peerd/transport/resolver.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"

namespace longhaul::peerd {

// Outlives the resolver while a look-up runs.
struct Resolver::Shared {
  Shared() : event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Shared() {
    if (event >= 0) close(event);
  }

  const int event;
  Mutex mutex;
  std::deque<std::pair<uint64_t, HostPort>> queue ABSL_GUARDED_BY(mutex);
  std::vector<std::pair<uint64_t, Addresses>> answers ABSL_GUARDED_BY(mutex);
  int workers ABSL_GUARDED_BY(mutex) = 0;
};

Resolver::~Resolver() = default;

void Resolver::Worker(const std::shared_ptr<Shared>& shared) {
  while (true) {
    std::pair<uint64_t, HostPort> request;
    {
      MutexLock lock(&shared->mutex);
      if (shared->queue.empty()) {
        --shared->workers;
        return;
      }
      request = std::move(shared->queue.front());
      shared->queue.pop_front();
    }
    Addresses addresses = ResolveBlocking(request.second);
    MutexLock lock(&shared->mutex);
    shared->answers.emplace_back(request.first, std::move(addresses));
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(shared->event, &one, sizeof(one));
  }
}

absl::Status Resolver::Start() {
  shared_ = std::make_shared<Shared>();
  if (shared_->event >= 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("eventfd: ", std::strerror(errno)));
}

void Resolver::Resolve(const HostPort& host_port, Done done) {
  const uint64_t id = next_++;
  waiting_[id] = std::move(done);
  bool start = false;
  {
    MutexLock lock(&shared_->mutex);
    shared_->queue.emplace_back(id, host_port);
    start = shared_->workers < kWorkersMax;
    if (start) ++shared_->workers;
  }
  if (start) {
    try {
      std::thread(Worker, shared_).detach();
    } catch (const std::system_error&) {
      // No thread can be started now. The look-up waits in the queue for the next thread.
      MutexLock lock(&shared_->mutex);
      --shared_->workers;
    }
  }
  if (poll_ == 0) Poll();
}

void Resolver::Poll() {
  poll_ = ring_->PollIn(shared_->event, [this](IoResult) {
    poll_ = 0;
    OnReadable();
  });
}

void Resolver::OnReadable() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = read(shared_->event, &count, sizeof(count));
  std::vector<std::pair<uint64_t, Addresses>> answers;
  {
    MutexLock lock(&shared_->mutex);
    answers.swap(shared_->answers);
  }
  for (auto& [id, addresses] : answers) {
    const auto it = waiting_.find(id);
    if (it == waiting_.end()) continue;
    Done done = std::move(it->second);
    waiting_.erase(it);
    done(std::move(addresses));
  }
  if (!waiting_.empty() && poll_ == 0) Poll();
}

void Resolver::Close() {
  waiting_.clear();
  {
    MutexLock lock(&shared_->mutex);
    shared_->queue.clear();
  }
  if (poll_ != 0) ring_->Cancel(poll_);
}

}  // namespace longhaul::peerd
