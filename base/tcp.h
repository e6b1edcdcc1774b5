// What is said of one TCP connection by the code that asks the kernel to the code that decides how
// fast to send. Plain values.
#pragma once

#include <cstdint>

namespace longhaul {

// The kernel holds at most about so many bytes of a connection on a long way that it has not sent.
// A connection of 25 Mbit/s sends them in 10 ms.
inline constexpr int kUnsentBytes = 32 << 10;

// What TCP has measured of one connection, in the sending direction.
struct TcpDelivery {
  uint64_t bytes_per_second = 0;   // the rate at which data was acknowledged lately; 0: unknown
  bool limited_by_sender = false;  // the rate is low only because the sender had too little to send
  uint32_t rtt_us = 0;             // the shortest round trip; 0: unknown
  uint64_t bytes_acked = 0;        // arrived, up to the first gap
  uint64_t bytes_arrived = 0;      // arrived, also behind gaps; exact to a packet
  uint64_t bytes_sent = 0;         // sent; a byte that was sent again counts again
  uint64_t bytes_repeated = 0;     // sent again
  uint32_t usual_rtt_us = 0;       // the mean of late round trips, as TCP smooths it
  uint64_t bytes_waiting = 0;      // not sent, or not acknowledged
  int64_t unheard_us = 0;          // since the last acknowledgement
};

}  // namespace longhaul
