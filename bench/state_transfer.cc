// Compares fetching a state over loopback with a plain TCP copy of as many bytes, in one run.
//
// Each peer has one thread with a ring, as in production, and one thread that hashes. For each
// number of sources the program prints MB/s, the share of the plain copy's speed, and the CPU
// seconds per GB of all sides together.
//
//   bazel run -c opt //bench:state_transfer -- --mib=1024 --sources=1,2
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "base/check.h"
#include "base/log.h"
#include "base/mailbox.h"
#include "base/mutex.h"
#include "base/prng.h"
#include "peerd/io/ring.h"
#include "peerd/state/hasher.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_exchange.h"
#include "peerd/transport/transport.h"

ABSL_FLAG(uint64_t, mib, 1024, "size of the state");
ABSL_FLAG(std::vector<std::string>, sources, std::vector<std::string>({"1", "2"}),
          "how many sources, one run each");
ABSL_FLAG(uint32_t, lanes, 0, "data lanes of each link; 0: automatic");
ABSL_FLAG(int, rounds, 3, "of each; the best counts");

namespace longhaul::peerd {
namespace {

const GroupKey kGroup{"bench", 0};
constexpr uint64_t kLocal = 1;

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

double Seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Hashes for one reactor, on a thread of its own.
class ThreadHasher final : public Hasher {
 public:
  explicit ThreadHasher(Ring* ring)
      : ring_(ring), done_(1 << 16, [this] { ring_->Wake(); }), thread_([this] { Run(); }) {}
  ~ThreadHasher() override {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
    }
    condition_.SignalAll();
    thread_.join();
  }
  void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) override {
    {
      MutexLock lock(&mutex_);
      work_.push_back({{reinterpret_cast<const uint8_t*>(data), bytes}, std::move(done), {}});
    }
    condition_.Signal();
  }
  // The benchmark fetches into memory that has its pages already, so nobody calls this.
  void Touch(std::span<uint8_t>, std::function<void()>) override { LH_CHECK(false); }
  // Gives the reactor the digests that are ready. Called on the reactor after each turn.
  void Deliver() {
    for (Work& work : done_.TakeAll()) work.done(work.digest);
  }

 private:
  struct Work {
    std::span<const uint8_t> bytes;
    std::function<void(Hash128)> done;
    Hash128 digest;
  };
  void Run() {
    while (true) {
      std::vector<Work> work;
      {
        MutexLock lock(&mutex_);
        while (work_.empty() && !stop_) condition_.Wait(&mutex_);
        if (stop_) return;
        work.swap(work_);
      }
      for (Work& w : work) {
        w.digest = HashChunk(w.bytes);
        LH_CHECK(done_.Post(std::move(w)));
      }
    }
  }

  Ring* const ring_;
  Mailbox<Work> done_;
  Mutex mutex_;
  CondVar condition_;
  std::vector<Work> work_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class Side final : public TransportListener {
 public:
  explicit Side(PeerId self) : self_(self) {
    auto ring = MakeUringRing(256);
    LH_CHECK(ring.ok()) << ring.status().ToString();
    ring_ = *std::move(ring);
    TransportOptions options;
    options.self = self;
    options.listen = "127.0.0.1:0";
    options.lanes = absl::GetFlag(FLAGS_lanes);
    auto transport = MakeTransport(options, ring_.get(), this);
    LH_CHECK(transport.ok()) << transport.status().ToString();
    transport_ = *std::move(transport);
    hasher_ = std::make_unique<ThreadHasher>(ring_.get());
    exchange_ = std::make_unique<StateExchange>(self, transport_.get(), hasher_.get(), 1500);
  }

  void OnLinkUp(const LinkKey& link) override {
    ++up_;
    exchange_->OnLinkUp(link, ring_->Now());
  }
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t) override {
    if (!closing_) std::printf("link down: %s\n", reason.c_str());
    exchange_->OnLinkDown(link, ring_->Now());
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override {
    return exchange_->OnControlFrame(link, header, payload, ring_->Now());
  }
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override {
    return exchange_->OnDataHeader(link, header);
  }
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override {
    return exchange_->OnDataReceived(link, header);
  }
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override {
    exchange_->OnDataAbandoned(link, header);
  }
  uint64_t OnSegmentRepeat(uint64_t owner) override { return exchange_->OnSegmentRepeat(owner); }
  void OnSegmentSent(uint64_t cookie) override { exchange_->OnSegmentSent(cookie); }
  void OnReceivesDetached(uint64_t cookie) override { exchange_->OnReceivesDetached(cookie); }

  void Turn() {
    const Tick until = std::min(exchange_->NextDeadline(), ring_->Now() + Millis(50));
    LH_CHECK(ring_->RunOnce(until).ok());
    hasher_->Deliver();
    exchange_->Work(ring_->Now());
  }
  void Run(const std::atomic<bool>* stop) {
    while (!*stop) Turn();
    closing_ = true;
    transport_->Close();
    const Tick deadline = ring_->Now() + longhaul::Seconds(5);
    while (!transport_->closed() && ring_->Now() < deadline) Turn();
    LH_CHECK(transport_->closed());
  }

  const PeerId self_;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ThreadHasher> hasher_;
  std::unique_ptr<StateExchange> exchange_;
  std::atomic<int> up_ = 0;
  bool closing_ = false;
};

std::shared_ptr<MemoryState> MakeState(std::vector<uint8_t>* bytes) {
  auto state = std::make_shared<MemoryState>();
  state->manifest = {{"weights", 9, {bytes->size()}, bytes->size(), false}};
  state->places = {bytes->data()};
  auto& digests = state->digests.emplace_back();
  for (uint64_t c = 0; c < CountChunks(bytes->size()); ++c) {
    digests.push_back(HashChunk({bytes->data() + ChunkOffset(c), ChunkBytes(bytes->size(), c)}));
  }
  state->FetchInto(state->places);
  return state;
}

// Measures a fetch, from the first byte to the last check.
struct Taken {
  double seconds = 1e9;
  double cpu_seconds = 1e9;
};

Taken Transfer(std::vector<uint8_t>* from, std::vector<uint8_t>* to, int sources) {
  const std::shared_ptr<MemoryState> held = MakeState(from);
  const std::shared_ptr<MemoryState> state = MakeState(to);
  const Hash128 root = RootOf(held->manifest, held->digests);
  Side receiver(PeerId(1));
  std::vector<std::unique_ptr<Side>> holders;
  std::vector<StateSource> named;
  const Tick deadline = receiver.ring_->Now() + longhaul::Seconds(5);
  for (int i = 0; i < sources; ++i) {
    auto holder = std::make_unique<Side>(PeerId(2 + i));
    const MemberId member(10 + i);
    holder->exchange_->server()->Register(kGroup, member, held);
    holder->exchange_->server()->Serve(kGroup, member, root);
    named.push_back({member, holder->self_});
    holder->transport_->OpenLinks(
        kGroup.run, 0, Epoch(1), "token",
        {{.peer = PeerId(1), .endpoints = {}, .dial = false, .data = true}}, deadline);
    holders.push_back(std::move(holder));
  }
  std::vector<LinkRequest> links;
  for (const auto& holder : holders) {
    links.push_back({.peer = holder->self_,
                     .endpoints = {holder->transport_->listen_address()},
                     .dial = true,
                     .data = true});
  }
  receiver.transport_->OpenLinks(kGroup.run, 0, Epoch(1), "token", links, deadline);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (const auto& holder : holders) threads.emplace_back([&, h = holder.get()] { h->Run(&stop); });
  while (receiver.up_ < sources) receiver.Turn();
  const double cpu = CpuSeconds();
  const double start = Seconds();
  receiver.exchange_->StartTransfer(
      {.local = kLocal, .group = kGroup, .root = root, .state = state, .sources = named},
      receiver.ring_->Now());
  std::vector<StateExchange::Ended> ended;
  while (ended.empty()) {
    receiver.Turn();
    ended = receiver.exchange_->PopEnded();
  }
  const Taken taken{Seconds() - start, CpuSeconds() - cpu};
  LH_CHECK(ended[0].result.error.empty()) << ended[0].result.error;
  LH_CHECK(*from == *to);
  stop = true;
  receiver.Run(&stop);
  for (std::thread& thread : threads) thread.join();
  return taken;
}

// Measures a copy of as many bytes over one connection, from memory to memory.
Taken PlainCopy(const std::vector<uint8_t>& from, std::vector<uint8_t>* to) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  LH_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0);
  LH_CHECK(listen(listener, 1) == 0);
  LH_CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  double start = 0;
  const double cpu = CpuSeconds();
  std::thread sender([&] {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    LH_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    start = Seconds();
    for (size_t sent = 0; sent < from.size();) {
      const ssize_t n =
          send(fd, from.data() + sent, std::min(from.size() - sent, size_t{1} << 20), 0);
      LH_CHECK(n > 0);
      sent += static_cast<size_t>(n);
    }
    close(fd);
  });
  const int fd = accept(listener, nullptr, nullptr);
  LH_CHECK(fd >= 0);
  for (size_t got = 0; got < to->size();) {
    const ssize_t n = recv(fd, to->data() + got, std::min(to->size() - got, size_t{1} << 20), 0);
    LH_CHECK(n > 0);
    got += static_cast<size_t>(n);
  }
  const double end = Seconds();
  close(fd);
  close(listener);
  sender.join();
  LH_CHECK(from == *to);
  return {end - start, CpuSeconds() - cpu};
}

void Run() {
  const size_t bytes = absl::GetFlag(FLAGS_mib) << 20;
  std::vector<uint8_t> from(bytes);
  std::vector<uint8_t> to(bytes);
  Prng random(1);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t value = random.Next();
    std::memcpy(from.data() + i, &value, 8);
  }
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  std::vector<int> sources;
  for (const std::string& text : absl::GetFlag(FLAGS_sources)) {
    sources.push_back(std::atoi(text.c_str()));
    LH_CHECK(sources.back() > 0) << "--sources: numbers from 1 on";
  }
  // All take turns, so that other work of the machine affects all alike. The best round of each
  // counts.
  Taken plain;
  std::vector<Taken> best(sources.size());
  const auto round = [&](Taken* kept, const Taken& taken) {
    kept->seconds = std::min(kept->seconds, taken.seconds);
    kept->cpu_seconds = std::min(kept->cpu_seconds, taken.cpu_seconds);
    std::memset(to.data(), 0, to.size());
  };
  for (int i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) {
    round(&plain, PlainCopy(from, &to));
    for (size_t k = 0; k < sources.size(); ++k) {
      round(&best[k], Transfer(&from, &to, sources[k]));
    }
  }
  std::printf("plain MB/s=%.0f cpu_s_per_GB=%.2f\n", gigabytes * 1e3 / plain.seconds,
              plain.cpu_seconds / gigabytes);
  for (size_t k = 0; k < sources.size(); ++k) {
    std::printf("sources=%d MB/s=%.0f cpu_s_per_GB=%.2f of_plain=%.2f\n", sources[k],
                gigabytes * 1e3 / best[k].seconds, best[k].cpu_seconds / gigabytes,
                plain.seconds / best[k].seconds);
  }
}

}  // namespace
}  // namespace longhaul::peerd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  longhaul::SetLogLevel(longhaul::LogLevel::kWarning);
  longhaul::peerd::Run();
  return 0;
}
