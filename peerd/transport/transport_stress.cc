// Measures one-way throughput of segments over loopback, for 1, 2 and 4 data lanes. Each peer has a
// thread and a ring of its own, as in production. Prints MB/s, CPU seconds per GB (both sides) and
// the round trip of a PING.
#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "base/check.h"
#include "base/log.h"
#include "peerd/io/ring.h"
#include "peerd/transport/transport.h"

ABSL_FLAG(uint32_t, segment_kib, 512, "payload of one segment");
ABSL_FLAG(uint32_t, window, 64, "segments queued at once");
ABSL_FLAG(uint32_t, memory_mib, 64, "sent from and received into, over and over");
ABSL_FLAG(double, seconds, 2, "for each number of lanes");
ABSL_FLAG(bool, zero_copy, false, "send without copying");
ABSL_FLAG(bool, epoll, false, "epoll instead of io_uring");

namespace longhaul::peerd {
namespace {

const LinkKey kToReceiver{"stress", PeerId(2)};
const LinkKey kToSender{"stress", PeerId(1)};

class Side : public TransportListener {
 public:
  Side(PeerId self, uint32_t lanes) {
    auto ring = absl::GetFlag(FLAGS_epoll) ? MakeEpollRing() : MakeUringRing(256);
    LH_CHECK(ring.ok()) << ring.status().ToString();
    ring_ = *std::move(ring);
    TransportOptions options;
    options.self = self;
    options.listen = "127.0.0.1:0";
    options.lanes = lanes;
    options.zero_copy = absl::GetFlag(FLAGS_zero_copy) ? TransportOptions::ZeroCopy::kOn
                                                       : TransportOptions::ZeroCopy::kAuto;
    auto transport = MakeTransport(options, ring_.get(), this);
    LH_CHECK(transport.ok()) << transport.status().ToString();
    transport_ = *std::move(transport);
    memory_.resize(size_t{absl::GetFlag(FLAGS_memory_mib)} << 20, 'x');
    transport_->AddMemory(memory_.data(), memory_.size());
  }

  void OnLinkUp(const LinkKey&) override { up_ = true; }
  void OnLinkDown(const LinkKey&, const std::string& reason, uint32_t) override {
    if (!stop_) std::printf("link down: %s\n", reason.c_str());
    up_ = false;
    down_ = true;
  }
  absl::Status OnControlFrame(const LinkKey&, const FrameHeader&,
                              std::span<const uint8_t>) override {
    return absl::OkStatus();
  }
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey&, const FrameHeader& header) override {
    return memory_.data() + header.offset;
  }
  absl::Status OnDataReceived(const LinkKey&, const FrameHeader& header) override {
    received_ += header.payload_bytes;
    return absl::OkStatus();
  }
  void OnDataAbandoned(const LinkKey&, const FrameHeader&) override {}
  uint64_t OnSegmentRepeat(uint64_t) override { return 0; }
  void OnSegmentSent(uint64_t) override {
    --queued_;
    Fill();
  }
  void OnReceivesDetached(uint64_t) override {}

  void Fill() {
    const uint32_t bytes = absl::GetFlag(FLAGS_segment_kib) << 10;
    while (sending_ && queued_ < absl::GetFlag(FLAGS_window)) {
      if (offset_ + bytes > memory_.size()) offset_ = 0;
      FrameHeader header;
      header.type = FrameType::kData;
      header.payload_bytes = bytes;
      header.op = OpOrdinal(1);
      header.attempt = Epoch(1);
      header.offset = offset_;
      ++queued_;
      transport_->SendSegment(kToReceiver, header, memory_.data() + offset_, 1, 1);
      offset_ += bytes;
    }
  }

  void Run(std::atomic<bool>* stop) {
    while (!*stop) LH_CHECK(ring_->RunOnce(ring_->Now() + Millis(50)).ok());
    stop_ = true;
    sending_ = false;
    transport_->Close();
    const Tick deadline = ring_->Now() + Seconds(5);
    while (!transport_->closed() && ring_->Now() < deadline) {
      LH_CHECK(ring_->RunOnce(ring_->Now() + Millis(50)).ok());
    }
    LH_CHECK(transport_->closed() && queued_ == 0);
  }

  std::unique_ptr<Ring> ring_;
  std::vector<uint8_t> memory_;
  std::unique_ptr<Transport> transport_;
  std::atomic<bool> up_ = false;
  bool down_ = false;
  bool stop_ = false;
  bool sending_ = false;
  uint32_t queued_ = 0;
  uint64_t offset_ = 0;
  std::atomic<uint64_t> received_ = 0;
};

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

void Measure(uint32_t lanes) {
  Side sender(PeerId(1), lanes);
  Side receiver(PeerId(2), lanes);
  const std::string token = "token";
  const Tick deadline = sender.ring_->Now() + Seconds(5);
  receiver.transport_->OpenLinks(
      "stress", 0, Epoch(1), token,
      {{.peer = PeerId(1), .endpoints = {}, .dial = false, .data = true}}, deadline);
  sender.transport_->OpenLinks("stress", 0, Epoch(1), token,
                               {{.peer = PeerId(2),
                                 .endpoints = {receiver.transport_->listen_address()},
                                 .dial = true,
                                 .data = true}},
                               deadline);
  std::atomic<bool> stop = false;
  std::thread other([&] { receiver.Run(&stop); });
  while (!sender.up_ && !sender.down_) LH_CHECK(sender.ring_->RunOnce(deadline).ok());
  LH_CHECK(sender.up_.load());
  sender.sending_ = true;
  sender.Fill();
  const Tick start = sender.ring_->Now();
  const Tick end = start + static_cast<int64_t>(absl::GetFlag(FLAGS_seconds) * 1e6);
  const double cpu = CpuSeconds();
  const uint64_t before = receiver.received_;
  while (sender.ring_->Now() < end) {
    LH_CHECK(sender.ring_->RunOnce(sender.ring_->Now() + Millis(50)).ok());
  }
  const double bytes = static_cast<double>(receiver.received_ - before);
  const double seconds = static_cast<double>(sender.ring_->Now() - start) * 1e-6;
  const auto stats = sender.transport_->GetLinkStats();
  std::printf("lanes=%u segment_kib=%u MB/s=%.0f cpu_s_per_GB=%.2f ping_us=%lld copied=%llu\n",
              lanes, absl::GetFlag(FLAGS_segment_kib), bytes / seconds / 1e6,
              (CpuSeconds() - cpu) / (bytes / 1e9),
              stats.empty() ? 0LL : static_cast<long long>(stats[0].rtt_us),
              static_cast<unsigned long long>(sender.transport_->GetStats().zero_copy_copied));
  std::fflush(stdout);
  stop = true;
  sender.Run(&stop);
  other.join();
}

}  // namespace
}  // namespace longhaul::peerd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  longhaul::SetLogLevel(longhaul::LogLevel::kWarning);
  for (const uint32_t lanes : {1u, 2u, 4u}) longhaul::peerd::Measure(lanes);
  return 0;
}
