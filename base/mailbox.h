// How other threads reach an object that one thread owns: a bounded queue and a wake-up call.
//
// Any thread posts; the owner takes everything at once. `wake` is called by a poster, without a
// lock held, when the mailbox was empty: once for any number of posts until the next TakeAll(). It
// must not block (write to an eventfd, say) and may come once more after the mail was taken. The
// mailbox outlives its posters' last Post().
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

  // False, with `mail` gone: the mailbox is full or closed. The poster decides what that means.
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

  // In the order of the posts.
  std::vector<T> TakeAll() {
    MutexLock lock(&mutex_);
    return std::exchange(mail_, {});
  }

  // Every later Post() returns false; what is in the box can still be taken.
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
