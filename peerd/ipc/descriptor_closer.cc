#include "peerd/ipc/descriptor_closer.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace longhaul::peerd {
namespace {

constexpr std::chrono::milliseconds kEndWait(500);
constexpr blkcnt_t kSmallBlocks = (1 << 20) / 512;

bool IsMemfd(int fd) { return fcntl(fd, F_GET_SEALS) >= 0; }

// Returns whether close() of this descriptor returns at once, whoever else uses the file. Asks
// nobody but the kernel.
bool IsSmallMemfd(int fd) {
  struct stat status;
  return IsMemfd(fd) && fstat(fd, &status) == 0 && status.st_blocks <= kSmallBlocks;
}

}  // namespace

struct DescriptorCloser::Shared {
  struct Item {
    UniqueFd fd;
    Count unclosed;  // null: not counted
  };

  Mutex mutex;
  CondVar work;
  CondVar idle;
  std::deque<Item> items ABSL_GUARDED_BY(mutex);
  size_t threads ABSL_GUARDED_BY(mutex) = 0;
  size_t waiting ABSL_GUARDED_BY(mutex) = 0;  // threads that wait for work
  bool ending ABSL_GUARDED_BY(mutex) = false;

  void Run() {
    for (;;) {
      Item item;
      {
        MutexLock lock(&mutex);
        ++waiting;
        while (items.empty() && !ending) work.Wait(&mutex);
        --waiting;
        if (items.empty()) {
          --threads;
          idle.Signal();
          return;
        }
        item = std::move(items.front());
        items.pop_front();
      }
      item.fd = UniqueFd();
      if (item.unclosed != nullptr) item.unclosed->fetch_sub(1);
    }
  }
};

DescriptorCloser::DescriptorCloser() : shared_(std::make_shared<Shared>()) {}

DescriptorCloser::~DescriptorCloser() {
  MutexLock lock(&shared_->mutex);
  shared_->ending = true;
  shared_->work.SignalAll();
  const auto deadline = std::chrono::steady_clock::now() + kEndWait;
  while (shared_->threads > 0 && std::chrono::steady_clock::now() < deadline) {
    shared_->idle.WaitFor(&shared_->mutex, std::chrono::milliseconds(50));
  }
}

void DescriptorCloser::CloseForeign(UniqueFd fd, const Count& unclosed) {
  if (fd.get() < 0 || IsSmallMemfd(fd.get())) return;
  if (IsMemfd(fd.get())) return Queue(std::move(fd), nullptr);
  unclosed->fetch_add(1);
  Queue(std::move(fd), unclosed);
}

void DescriptorCloser::CloseSocket(UniqueFd fd) {
  // After this the other end can put nothing more into the queue.
  shutdown(fd.get(), SHUT_RDWR);
  int unread = 0;
  if (ioctl(fd.get(), SIOCINQ, &unread) == 0 && unread == 0) return;
  Queue(std::move(fd), nullptr);
}

void DescriptorCloser::Queue(UniqueFd fd, Count unclosed) {
  MutexLock lock(&shared_->mutex);
  shared_->items.push_back({std::move(fd), std::move(unclosed)});
  if (shared_->waiting >= shared_->items.size() || shared_->threads >= kThreadsMax) {
    shared_->work.Signal();
    return;
  }
  ++shared_->threads;
  std::thread([shared = shared_] { shared->Run(); }).detach();
}

}  // namespace longhaul::peerd
