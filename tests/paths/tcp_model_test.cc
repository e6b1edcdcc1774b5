#include "tests/paths/tcp_model.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul::paths_model {
namespace {

constexpr Nanos kMs = 1000000;
constexpr Nanos kSecond = 1000 * kMs;

// Connections that always have something to send.
class TcpModelTest : public ::testing::Test, public TcpModel::User {
 protected:
  void Start(const Between& between, int hosts, double mbit) {
    tcp_ = std::make_unique<TcpModel>(1, between, 50 * kMs, this);
    for (int i = 0; i < hosts; ++i) tcp_->AddHost({mbit, mbit});
  }
  int Open(int from, int to, const std::string& congestion = "cubic") {
    const int connection = tcp_->Open(from, to, congestion);
    received_.resize(connection + 1);
    OnWritable(connection);
    return connection;
  }
  void Pass(double seconds) {
    bool over = false;
    tcp_->At(tcp_->now() + static_cast<Nanos>(seconds * 1e9), [&over] { over = true; });
    tcp_->Run(tcp_->now() + 100 * kSecond, [&over] { return over; });
  }
  // Mbit/s that came in these seconds.
  double RateIn(double seconds) {
    uint64_t before = 0;
    uint64_t after = 0;
    for (const uint64_t bytes : received_) before += bytes;
    Pass(seconds);
    for (const uint64_t bytes : received_) after += bytes;
    return static_cast<double>(after - before) * 8e-6 / seconds;
  }
  void OnWritable(int connection) override {
    if (fed_) tcp_->Write(connection, 64 << 10);
  }
  void OnReceived(int connection, uint64_t bytes) override {
    EXPECT_GE(bytes, received_[connection]);
    received_[connection] = bytes;
  }

  std::unique_ptr<TcpModel> tcp_;
  std::vector<uint64_t> received_;
  bool fed_ = true;
};

TEST_F(TcpModelTest, AConnectionFillsItsPathAndItsQueue) {
  Start({.one_way = 20 * kMs}, 2, 100);
  const int connection = Open(0, 1);
  Pass(10);
  EXPECT_GT(RateIn(10), 90);
  const TcpDelivery seen = tcp_->Delivery(connection);
  EXPECT_NEAR(seen.rtt_us, 40000, 1000);
  EXPECT_GT(seen.usual_rtt_us, 50000u) << "packets wait";
  EXPECT_LT(seen.usual_rtt_us, 95000u) << "the queue holds 50 ms";
  EXPECT_LT(tcp_->repeated(0), tcp_->sent(0) / 100);
}

TEST_F(TcpModelTest, ConnectionsShareAnAccessLink) {
  Start({.one_way = 10 * kMs}, 3, 100);
  Open(0, 2);
  Open(1, 2);
  Pass(20);
  const uint64_t first = received_[0];
  const uint64_t second = received_[1];
  const double rate = RateIn(20);
  EXPECT_GT(rate, 90);
  EXPECT_LT(rate, 100);
  EXPECT_GT(received_[0] - first, (received_[1] - second) / 3);
  EXPECT_GT(received_[1] - second, (received_[0] - first) / 3);
}

TEST_F(TcpModelTest, RandomLossesLimitCubicAsItsModelSaysAndBbrLess) {
  for (const std::string congestion : {"cubic", "bbr"}) {
    received_.clear();
    Start({.one_way = 20 * kMs, .loss = 0.01}, 2, 100);
    Open(0, 1, congestion);
    Pass(10);
    const double rate = RateIn(40);
    // sqrt(1.5 / loss) packets in a round trip (Mathis et al., 1997).
    const double model = std::sqrt(1.5 / 0.01) * 1448 * 8e-6 / 0.04;
    if (congestion == "cubic") {
      EXPECT_GT(rate, model / 2);
      EXPECT_LT(rate, model * 2);
    } else {
      EXPECT_GT(rate, 60);
    }
  }
}

TEST_F(TcpModelTest, BbrOverrunsAQueueThatIsShortForItsWay) {
  Start({.one_way = 80 * kMs}, 3, 100);
  for (int i = 0; i < 3; ++i) Open(0, 1 + i % 2, "bbr");
  Pass(10);
  const uint64_t sent = tcp_->sent(0);
  const uint64_t repeated = tcp_->repeated(0);
  Pass(20);
  EXPECT_GT(tcp_->repeated(0) - repeated, (tcp_->sent(0) - sent) / 20);
}

TEST_F(TcpModelTest, APaceKeepsTheQueueEmpty) {
  Start({.one_way = 20 * kMs}, 2, 100);
  const int connection = Open(0, 1);
  tcp_->SetPace(connection, 90 * 125000);
  Pass(10);
  EXPECT_NEAR(RateIn(10), 90, 2);
  EXPECT_LT(tcp_->Delivery(connection).usual_rtt_us, 42000u);
}

TEST_F(TcpModelTest, EveryByteComesAndIsToldThoughPacketsAreLost) {
  Start({.one_way = 20 * kMs, .loss = 0.02}, 2, 100);
  fed_ = false;
  const int connection = Open(0, 1);
  for (int i = 0; i < 50; ++i) {
    tcp_->Write(connection, 100000);
    Pass(2);
    EXPECT_EQ(received_[connection], 100000u * (i + 1));
    const TcpDelivery seen = tcp_->Delivery(connection);
    EXPECT_EQ(seen.bytes_acked, received_[connection]);
    EXPECT_EQ(seen.bytes_waiting, 0u);
    EXPECT_EQ(seen.bytes_sent, seen.bytes_acked + seen.bytes_repeated);
  }
  EXPECT_GT(tcp_->Delivery(connection).bytes_repeated, 0u);
}

TEST_F(TcpModelTest, ANetworkThatLimitsEachConnectionDoesSo) {
  Start({.one_way = 20 * kMs, .connection_mbit = 10}, 2, 100);
  Open(0, 1);
  Open(0, 1);
  Pass(10);
  EXPECT_NEAR(RateIn(10), 19, 1.5) << "less headers";
}

}  // namespace
}  // namespace longhaul::paths_model
