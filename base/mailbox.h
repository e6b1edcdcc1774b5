// A bounded queue, through which other threads reach an object that one thread owns.
//
// Threads: any thread may Post() and Close(). The owner calls TakeAll().
//
// If the mailbox was empty, Post() calls `wake` on the posting thread, without holding a lock. So
// `wake` is called once for all posts until the next TakeAll(). The call may still run after that
// TakeAll(). `wake` must not block; for instance, it writes to an eventfd. The mailbox must exist
// until the last Post() has returned.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace longhaul {

template <class T>
class Mailbox {
 public:
  Mailbox(size_t capacity, std::function<void()> wake)
      : capacity_(capacity), wake_(std::move(wake)) {}
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Returns false if the mailbox is full or closed; `mail` is dropped then. The caller decides what
  // to do.
  [[nodiscard]] bool Post(T mail) {
    bool first = false;
    {
      MutexLock lock(&mutex_);
      if (closed_ || mail_.size() >= capacity_) return false;
      first = mail_.empty();
      mail_.push_back(std::move(mail));
    }
    if (first && wake_) wake_();
    return true;
  }

  // Removes and returns everything, in the order of the posts.
  std::vector<T> TakeAll() {
    MutexLock lock(&mutex_);
    return std::exchange(mail_, {});
  }

  // Makes every later Post() return false. What is in the mailbox can still be taken.
  void Close() {
    MutexLock lock(&mutex_);
    closed_ = true;
  }

  size_t size() const {
    MutexLock lock(&mutex_);
    return mail_.size();
  }

 private:
  const size_t capacity_;
  const std::function<void()> wake_;
  mutable Mutex mutex_;
  std::vector<T> mail_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace longhaul
