// lhctl bench: measures all-reduce between members of a run, each of which is an `lhctl bench` or a
// `python -m longhaul.bench`. All of them make the same ops in the same order, so both kinds may
// take part in one measurement.
//
// Every op is a float32 sum in place, in memory shared with peerd. A time is that of a whole call,
// as a trainer sees it.
#pragma once

#include <longhaul/longhaul.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul {

struct BenchOptions {
  std::string run;
  uint32_t world_size = 0;      // members to wait for; at least 2
  std::vector<uint64_t> sizes;  // of the tensor, in bytes
  lh_algorithm algorithm = LH_AUTO;
  double seconds = 1;           // about how long to measure each size
  int64_t timeout_ms = 120000;  // for members to come, and for each op
  std::string peerd;            // path of the socket of peerd; "": as lh_open()
};

// The figures of one size. Each time is the largest that any member has.
struct BenchRow {
  uint32_t world_size = 0;
  uint64_t bytes = 0;
  lh_algorithm algorithm = LH_AUTO;  // that was used
  uint32_t ops = 0;                  // timed calls of each member
  double median_s = 0;
  double p10_s = 0;
  double p90_s = 0;

  // Bytes per second as nccl-tests defines them: algbw = bytes / time, and busbw = the rate at
  // which each member sends, and receives.
  double algbw() const { return static_cast<double>(bytes) / median_s; }
  double busbw() const { return algbw() * 2 * (world_size - 1) / world_size; }
};

// Parses sizes such as "256,4K,64M". InvalidArgument: the text says what is wrong.
absl::StatusOr<std::vector<uint64_t>> ParseSizes(const std::string& text);
// Parses "auto", "oneshot", "mesh" or "ring".
absl::StatusOr<lh_algorithm> ParseAlgorithm(const std::string& text);

// The median, or the smallest value such that a share of q of all is not larger. `values` must not
// be empty.
double Median(std::vector<double> values);
double Quantile(std::vector<double> values, double q);

// Lines of a table, each with its newline.
std::string BenchHead(uint32_t world_size);
std::string BenchLine(const BenchRow& row);
std::string BenchJson(const std::vector<BenchRow>& rows);

// Joins the run, measures together with the other members, and leaves. `each` gets every row as it
// is ready. Once `*stop` is true, leaves after the op in flight and returns Cancelled. Blocks.
absl::Status RunBench(const BenchOptions& options, const std::atomic<bool>& stop,
                      const std::function<void(const BenchRow&)>& each);

}  // namespace longhaul
