#include "tools/lhctl/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

// The members exchange their times through all-reduces of this tag. The measured ops have tag 0.
constexpr uint64_t kTagOfTalk = uint64_t{1} << 40;
constexpr uint32_t kOpsMin = 5;
constexpr uint32_t kOpsMax = 10000;
constexpr uint32_t kTrials = 3;
// How long a call waits before it looks whether to stop.
constexpr int64_t kSliceMs = 100;
constexpr int64_t kLeaveMs = 5000;
constexpr std::chrono::milliseconds kGatherPause{10};

constexpr std::pair<lh_algorithm, const char*> kAlgorithmNames[] = {{LH_AUTO, "auto"},
                                                                    {LH_ONESHOT, "oneshot"},
                                                                    {LH_MESH, "mesh"},
                                                                    {LH_RING, "ring"},
                                                                    {LH_LOCAL, "local"}};

const char* NameOf(lh_algorithm algorithm) {
  for (const auto& [value, name] : kAlgorithmNames) {
    if (value == algorithm) return name;
  }
  return "unknown";
}

std::string SizeText(uint64_t bytes) {
  if (bytes >= 1 << 20 && bytes % (1 << 20) == 0) return absl::StrCat(bytes >> 20, " MiB");
  if (bytes >= 1 << 10 && bytes % (1 << 10) == 0) return absl::StrCat(bytes >> 10, " KiB");
  return absl::StrCat(bytes, " B");
}

absl::StatusOr<uint64_t> ParseSize(absl::string_view text) {
  const absl::string_view all = text;
  int shift = 0;
  if (!text.empty()) {
    const size_t unit = std::string("KMG").find(static_cast<char>(std::toupper(text.back())));
    if (unit != std::string::npos) {
      shift = 10 * (static_cast<int>(unit) + 1);
      text.remove_suffix(1);
    }
  }
  uint64_t number = 0;
  if (!absl::SimpleAtoi(text, &number) || number > (uint64_t{1} << 50) >> shift) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", all, "' is not a size; give for instance 256, 4K or 64M"));
  }
  number <<= shift;
  if (number == 0 || number % sizeof(float) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", all, "': the elements are float32, so give a multiple of 4 bytes, at least 4"));
  }
  return number;
}

// What a call of the client library returned.
absl::Status Told(lh_status status) {
  if (status == LH_OK) return absl::OkStatus();
  const std::string text = absl::StrCat(lh_strerror(status), ": ", lh_last_error());
  if (status == LH_DEADLINE_EXCEEDED) return absl::DeadlineExceededError(text);
  return absl::UnavailableError(text);
}

struct CloseClient {
  void operator()(lh_client* client) const { lh_close(client); }
};
struct FreeOp {
  void operator()(lh_op* op) const { lh_op_free(op); }
};
using OwnedOp = std::unique_ptr<lh_op, FreeOp>;

class Member {
 public:
  Member(const BenchOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop) {}

  absl::Status Measure(const std::function<void(const BenchRow&)>& each) {
    LH_RETURN_IF_ERROR(Join());
    absl::Status status = Gather();
    for (size_t i = 0; status.ok() && i < options_.sizes.size(); ++i) {
      absl::StatusOr<BenchRow> row = MeasureSize(options_.sizes[i]);
      status = row.status();
      if (row.ok()) each(*row);
    }
    // Also after an error, so that the others go on without this member at once.
    const absl::Status left = Told(lh_leave(comm_, kLeaveMs));
    return status.ok() ? left : status;
  }

 private:
  absl::Status Join() {
    lh_open_options open = LH_OPEN_OPTIONS_INIT;
    if (!options_.peerd.empty()) open.socket_path = options_.peerd.c_str();
    open.timeout_ms = std::min(open.timeout_ms, options_.timeout_ms);
    lh_client* client = nullptr;
    LH_RETURN_IF_ERROR(Told(lh_open(&open, &client)));
    client_.reset(client);
    lh_join_options join = LH_JOIN_OPTIONS_INIT;
    join.run = options_.run.c_str();
    lh_op* op = nullptr;
    LH_RETURN_IF_ERROR(Told(lh_join_start(client, &join, &comm_, &op)));
    const OwnedOp owned(op);
    return Wait(op, "to be admitted");
  }

  // Waits in slices, so that a signal is noticed.
  absl::Status Wait(lh_op* op, const char* what) {
    const Clock::time_point deadline =
        Clock::now() + std::chrono::milliseconds(options_.timeout_ms);
    while (true) {
      const lh_status status = lh_op_wait(op, kSliceMs);
      if (status != LH_DEADLINE_EXCEEDED) return Told(status);
      if (stop_) return absl::CancelledError("interrupted");
      if (Clock::now() < deadline) continue;
      return absl::DeadlineExceededError(
          absl::StrCat("waited ", options_.timeout_ms, " ms ", what,
                       "; `lhctl why` at the coordinator says what is missing"));
    }
  }

  absl::StatusOr<lh_world_info> World() {
    lh_world_info world = LH_WORLD_INFO_INIT;
    LH_RETURN_IF_ERROR(Told(lh_world(comm_, &world)));
    return world;
  }

  // Passes step boundaries until all members are there.
  absl::Status Gather() {
    const Clock::time_point deadline =
        Clock::now() + std::chrono::milliseconds(options_.timeout_ms);
    while (true) {
      LH_ASSIGN_OR_RETURN(const lh_world_info world, World());
      if (world.size == options_.world_size) {
        rank_ = world.rank;
        return absl::OkStatus();
      }
      if (world.size > options_.world_size) {
        return absl::FailedPreconditionError(absl::StrCat("run ", options_.run, " has ", world.size,
                                                          " members, not ", options_.world_size,
                                                          "; give another --run or --world-size"));
      }
      if (Clock::now() > deadline) {
        return absl::DeadlineExceededError(absl::StrCat(
            "only ", world.size, " of ", options_.world_size, " members joined run ", options_.run,
            " in ", options_.timeout_ms, " ms; start `lhctl bench` on the other hosts"));
      }
      lh_op* op = nullptr;
      LH_RETURN_IF_ERROR(Told(lh_begin_step_start(comm_, &op)));
      const OwnedOp owned(op);
      LH_RETURN_IF_ERROR(Wait(op, "for the other members at a step boundary"));
      std::this_thread::sleep_for(kGatherPause);
    }
  }

  absl::StatusOr<lh_op_info_t> Reduce(void* data, uint64_t count, lh_dtype dtype, lh_reduce_op how,
                                      uint64_t tag, lh_algorithm algorithm) {
    if (stop_) return absl::CancelledError("interrupted");
    lh_all_reduce_options reduce = LH_ALL_REDUCE_OPTIONS_INIT;
    reduce.source = reduce.target = data;
    reduce.count = count;
    reduce.dtype = dtype;
    reduce.op = how;
    reduce.tag = tag;
    reduce.algorithm = algorithm;
    lh_op_info_t info = LH_OP_INFO_INIT;
    lh_op* late = nullptr;
    const lh_status status = lh_all_reduce(comm_, &reduce, kSliceMs, &info, &late);
    const OwnedOp owned(late);
    if (late == nullptr) {
      LH_RETURN_IF_ERROR(Told(status));
    } else {
      LH_RETURN_IF_ERROR(Wait(late, "for the other members in an all-reduce"));
      LH_RETURN_IF_ERROR(Told(lh_op_info(late, &info)));
    }
    if (info.world_size != options_.world_size) {
      return absl::AbortedError(absl::StrCat("the group has ", info.world_size,
                                             " members now, not ", options_.world_size,
                                             "; run the bench again"));
    }
    return info;
  }

  // For each value, the largest that any member has.
  absl::Status Agree(std::vector<double>* values) {
    return Reduce(values->data(), values->size(), LH_FLOAT64, LH_MAX, kTagOfTalk, LH_AUTO).status();
  }

  absl::StatusOr<BenchRow> MeasureSize(uint64_t bytes) {
    void* memory = nullptr;
    LH_RETURN_IF_ERROR(Told(lh_alloc(client_.get(), bytes, &memory)));
    const uint64_t count = bytes / sizeof(float);
    absl::StatusOr<BenchRow> row = MeasureTensor(static_cast<float*>(memory), count);
    // An op that is still in flight keeps the memory; lh_close() frees it then.
    (void)lh_free(client_.get(), memory);
    return row;
  }

  absl::StatusOr<BenchRow> MeasureTensor(float* tensor, uint64_t count) {
    const auto reduce = [&] {
      return Reduce(tensor, count, LH_FLOAT32, LH_SUM, 0, options_.algorithm);
    };
    const auto times = [&](uint32_t ops) -> absl::StatusOr<std::vector<double>> {
      std::vector<double> taken;
      taken.reserve(ops);
      for (uint32_t i = 0; i < ops; ++i) {
        const Clock::time_point begin = Clock::now();
        LH_RETURN_IF_ERROR(reduce().status());
        taken.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      }
      return taken;
    };
    BenchRow row;
    row.world_size = options_.world_size;
    row.bytes = count * sizeof(float);
    std::fill_n(tensor, count, static_cast<float>(rank_ + 1));
    LH_ASSIGN_OR_RETURN(const lh_op_info_t first, reduce());
    row.algorithm = first.algorithm;
    const float right =
        static_cast<float>(row.world_size) * static_cast<float>(row.world_size + 1) / 2;
    for (uint64_t i = 0; i < count; ++i) {
      if (tensor[i] == right) continue;
      return absl::InternalError(absl::StrCat("wrong sum of ", SizeText(row.bytes), ": ", tensor[i],
                                              " instead of ", right, "; report this bug"));
    }
    std::fill_n(tensor, count, 0.0F);  // sums of other numbers would grow to infinity
    LH_ASSIGN_OR_RETURN(const std::vector<double> tried, times(kTrials));
    std::vector<double> trial = {Median(tried)};
    LH_RETURN_IF_ERROR(Agree(&trial));
    row.ops = static_cast<uint32_t>(std::clamp<double>(
        std::nearbyint(options_.seconds / std::max(trial[0], 1e-6)), kOpsMin, kOpsMax));
    LH_ASSIGN_OR_RETURN(const std::vector<double> taken, times(row.ops));
    std::vector<double> figures = {Median(taken), Quantile(taken, 0.1), Quantile(taken, 0.9)};
    LH_RETURN_IF_ERROR(Agree(&figures));
    row.median_s = figures[0];
    row.p10_s = figures[1];
    row.p90_s = figures[2];
    return row;
  }

  const BenchOptions& options_;
  const std::atomic<bool>& stop_;
  std::unique_ptr<lh_client, CloseClient> client_;
  lh_comm* comm_ = nullptr;  // freed with the client
  uint32_t rank_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<uint64_t>> ParseSizes(const std::string& text) {
  std::vector<uint64_t> sizes;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    LH_ASSIGN_OR_RETURN(const uint64_t size, ParseSize(part));
    sizes.push_back(size);
  }
  return sizes;
}

absl::StatusOr<lh_algorithm> ParseAlgorithm(const std::string& text) {
  for (const auto& [value, name] : kAlgorithmNames) {
    if (value != LH_LOCAL && text == name) return value;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is no algorithm; give auto, oneshot, mesh or ring"));
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  if (values.size() % 2 == 1) return values[middle];
  return (values[middle - 1] + values[middle]) / 2;
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const auto place = static_cast<size_t>(std::ceil(q * static_cast<double>(values.size())));
  return values[place == 0 ? 0 : place - 1];
}

std::string BenchHead(uint32_t world_size) {
  return absl::StrFormat(
      "%d members, float32 sums in place, times of whole calls at the slowest member\n"
      "%9s  %-7s %6s %10s %9s %9s %11s %11s\n",
      world_size, "tensor", "way", "ops", "median ms", "p10", "p90", "algbw GB/s", "busbw GB/s");
}

std::string BenchLine(const BenchRow& row) {
  return absl::StrFormat("%9s  %-7s %6d %10.3f %9.3f %9.3f %11.3f %11.3f\n", SizeText(row.bytes),
                         NameOf(row.algorithm), row.ops, 1e3 * row.median_s, 1e3 * row.p10_s,
                         1e3 * row.p90_s, row.algbw() / 1e9, row.busbw() / 1e9);
}

std::string BenchJson(const std::vector<BenchRow>& rows) {
  std::string text = "{\"rows\": [";
  for (size_t i = 0; i < rows.size(); ++i) {
    const BenchRow& row = rows[i];
    absl::StrAppend(
        &text, i == 0 ? "\n" : ",\n",
        absl::StrFormat("  {\"world_size\": %d, \"bytes\": %d, \"memory\": \"arena\", "
                        "\"algorithm\": \"%s\", \"ops\": %d, \"median_s\": %.9f, \"p10_s\": %.9f, "
                        "\"p90_s\": %.9f, \"algbw\": %.0f, \"busbw\": %.0f}",
                        row.world_size, row.bytes, NameOf(row.algorithm), row.ops, row.median_s,
                        row.p10_s, row.p90_s, row.algbw(), row.busbw()));
  }
  return absl::StrCat(text, "\n]}\n");
}

absl::Status RunBench(const BenchOptions& options, const std::atomic<bool>& stop,
                      const std::function<void(const BenchRow&)>& each) {
  return Member(options, stop).Measure(each);
}

}  // namespace longhaul
