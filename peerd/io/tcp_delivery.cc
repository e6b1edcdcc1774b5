// A file of its own, because <linux/tcp.h> and <netinet/tcp.h> do not compile together.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>

#include "peerd/io/sockets.h"

namespace longhaul::peerd {

std::optional<TcpDelivery> SystemTcpDelivery(int fd) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return std::nullopt;
  // Kernels before 4.9 fill in too few fields.
  if (bytes < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate) {
    return std::nullopt;
  }
  // All ones: the kernel has measured none.
  const uint32_t rtt_us = info.tcpi_min_rtt == UINT32_MAX ? 0 : info.tcpi_min_rtt;
  // Fields that a kernel before 4.19 does not fill in stay 0.
  return TcpDelivery{
      .bytes_per_second = info.tcpi_delivery_rate,
      .limited_by_sender = info.tcpi_delivery_rate_app_limited != 0,
      .rtt_us = rtt_us,
      .bytes_acked = info.tcpi_bytes_acked,
      .bytes_arrived = info.tcpi_bytes_acked + uint64_t{info.tcpi_sacked} * info.tcpi_snd_mss,
      .bytes_sent = info.tcpi_bytes_sent,
      .bytes_repeated = info.tcpi_bytes_retrans,
      .usual_rtt_us = info.tcpi_rtt,
      .bytes_waiting =
          uint64_t{info.tcpi_notsent_bytes} + uint64_t{info.tcpi_unacked} * info.tcpi_snd_mss,
      .unheard_us = int64_t{info.tcpi_last_ack_recv} * 1000};
}

}  // namespace longhaul::peerd
