// Fits a line to noisy points. Each member has points of its own, and all members keep one set of
// weights.
//
//   c++ -std=c++17 -I out/include -L out/lib -Wl,-rpath,$PWD/out/lib
//       client/examples/cpp/regression.cc -llonghaul -o regression
//   ./regression STEPS SEED MEMBERS
//
// It joins through the peerd on this host ($LONGHAUL_SOCKET names another socket). If this host is
// removed from the group, or its peerd is restarted, the program joins again and goes on.
#include <chrono>
#include <iostream>
#include <longhaul/longhaul.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

// Writes the gradient of the squared error over fresh points near y = 3 x - 1, and returns the
// error.
float GradientOf(const std::vector<float>& weights, std::vector<float>& gradient,
                 std::mt19937& random) {
  constexpr int kPoints = 64;
  std::uniform_real_distribution<float> uniform(-1, 1);
  float loss = 0;
  gradient.assign(2, 0);
  for (int i = 0; i < kPoints; ++i) {
    const float x = uniform(random);
    const float miss = weights[0] * x + weights[1] - (3 * x - 1 + 0.01f * uniform(random));
    gradient[0] += 2 * miss * x / kPoints;
    gradient[1] += 2 * miss / kPoints;
    loss += miss * miss / kPoints;
  }
  return loss;
}

// Trains as one member until `steps` steps are made. `revision` is the number of steps that are in
// `weights`.
void Train(const lh_join_options& join, std::vector<float>& weights, uint64_t& revision,
           uint64_t steps, std::mt19937& random) {
  longhaul::Client client;
  const uint64_t size = weights.size();
  longhaul::State state(client, {longhaul::Tensor("weights", weights.data(), size)});
  longhaul::Comm comm = client.Join(join);
  std::vector<float> gradient(weights.size());
  longhaul::OpInfo info{};
  float loss = 0;
  while (revision < steps) {
    lh_sync_options sync = LH_SYNC_OPTIONS_INIT;
    sync.state = state.get();
    sync.revision = revision;
    revision =
        comm.BeginStep(sync).revision;  // newcomers join here; all members hold the same weights
    loss = GradientOf(weights, gradient, random);
    info = comm.AllReduce(gradient.data(), gradient.size(), LH_AVG);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] -= 0.2f * gradient[i];
    ++revision;
  }
  std::cout << revision << " steps, " << info.world_size << " members in the last one, loss "
            << loss << ", weights " << std::hexfloat << weights[0] << " " << weights[1]
            << std::endl;
  comm.Leave();
}

bool JoinsAgain(const longhaul::Error& error) {
  return error.status() == LH_EVICTED || error.status() == LH_UNAVAILABLE;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? std::stoull(argv[1]) : 100;
  std::mt19937 random(argc > 2 ? std::stoul(argv[2]) : 1);
  lh_join_options join = LH_JOIN_OPTIONS_INIT;
  join.run = "regression";
  join.members = argc > 3 ? static_cast<uint32_t>(std::stoul(argv[3])) : 0;  // 0: begin alone
  std::vector<float> weights(2);
  uint64_t revision = 0;
  constexpr int kTries = 10;
  for (int tries = 1;; ++tries) {
    try {
      Train(join, weights, revision, steps, random);
      return 0;
    } catch (const longhaul::Error& error) {
      std::cerr << error.what() << std::endl;
      if (!JoinsAgain(error) || tries == kTries) return 1;
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
}
