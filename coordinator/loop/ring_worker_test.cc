#include "coordinator/loop/ring_worker.h"

#include <chrono>
#include <deque>
#include <future>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

constexpr std::chrono::seconds kDeadline{60};

// An order for four nodes, which are in the order of their numbers. The link from the first to the
// second is slow.
OrderRing Order(uint64_t request) {
  OrderRing order{request, {"run", 3}, {}, {}};
  order.problem.links = LinkMatrix(4);
  for (uint32_t from = 0; from < 4; ++from) {
    order.peers.emplace_back(10 + from);
    order.problem.present.push_back(from);
    for (uint32_t to = 0; to < 4; ++to) {
      if (from == to) continue;
      order.problem.links.At(from, to).bytes_per_second = from == 0 && to == 1 ? 1000 : 90000;
    }
  }
  return order;
}

// Collects the answers, from any thread.
class Answers {
 public:
  void Add(RingOrdered answer) {
    const std::thread::id thread = std::this_thread::get_id();
    MutexLock lock(&mutex_);
    answers_.emplace_back(std::move(answer), thread);
    changed_.Signal();
  }
  // Waits for the next answer, and gives it with the thread that it came on.
  std::optional<std::pair<RingOrdered, std::thread::id>> Take() {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    MutexLock lock(&mutex_);
    while (answers_.empty()) {
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left <= left.zero()) return std::nullopt;
      changed_.WaitFor(&mutex_, left);
    }
    auto answer = std::move(answers_.front());
    answers_.pop_front();
    return answer;
  }
  size_t size() {
    MutexLock lock(&mutex_);
    return answers_.size();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::pair<RingOrdered, std::thread::id>> answers_ ABSL_GUARDED_BY(mutex_);
};

TEST(RingWorker, AnswersEachOrderOnAThreadOfItsOwn) {
  Answers answers;
  RingWorker worker([&answers](RingOrdered answer) { answers.Add(std::move(answer)); });
  for (uint64_t request = 1; request <= 3; ++request) {
    worker.Submit(Order(request));
    const auto answer = answers.Take();
    ASSERT_TRUE(answer);
    EXPECT_NE(answer->second, std::this_thread::get_id());
    const RingOrdered& ring = answer->first;
    EXPECT_EQ(ring.request, request);
    EXPECT_EQ(ring.group, (GroupKey{"run", 3}));
    ASSERT_EQ(ring.ring.size(), 4u);
    EXPECT_EQ(ring.ring[0], PeerId(10)) << "a ring begins as the present one does";
    EXPECT_NE(ring.ring[1], PeerId(11)) << "the slow link is avoided";
    EXPECT_EQ(ring.present.bottleneck, 1000u);
    EXPECT_EQ(ring.score.bottleneck, 90000u);
  }
  EXPECT_EQ(answers.size(), 0u);
}

TEST(RingWorker, EndsWithoutAnOrderAndWithOneUnderWay) {
  {
    RingWorker idle([](const RingOrdered&) { ADD_FAILURE() << "nothing was asked for"; });
  }
  Answers answers;
  std::promise<void> begun, go_on;
  {
    RingWorker busy([&](RingOrdered answer) {
      begun.set_value();
      go_on.get_future().wait_for(kDeadline);
      answers.Add(std::move(answer));
    });
    busy.Submit(Order(1));
    ASSERT_EQ(begun.get_future().wait_for(kDeadline), std::future_status::ready);
    go_on.set_value();
  }
  EXPECT_EQ(answers.size(), 1u) << "its end waits for what is under way";
}

}  // namespace
}  // namespace longhaul::coordinator
