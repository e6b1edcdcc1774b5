// Runs gloo without torch for bench/allreduce.py, which compiles this against Debian's libgloo-dev.
//
//   gloo SOCKET RANK SIZE INTERFACE DIRECTORY
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdlib>
#include <exception>
#include <memory>

#include "worker.h"

namespace {

// Reduces in place: the target is the source.
void Reduce(void* system, const float* /*source*/, float* tensor, size_t count) {
  gloo::AllreduceOptions options(*static_cast<std::shared_ptr<gloo::Context>*>(system));
  options.setOutput(tensor, count);
  options.setReduceFunction(
      static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
  gloo::allreduce(options);
}

constexpr Variant kVariant = {"in-place", &Reduce, 0, nullptr, nullptr, nullptr};

int Run(char** argv) {
  const int rank = std::atoi(argv[2]);
  const int size = std::atoi(argv[3]);
  gloo::transport::tcp::attr attributes;
  attributes.iface = argv[4];
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
  gloo::rendezvous::FileStore store(argv[5]);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  context->connectFullMesh(store, device);
  std::shared_ptr<gloo::Context> base = context;
  worker_run(argv[1], rank, size, &kVariant, 1, &base);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: gloo SOCKET RANK SIZE INTERFACE DIRECTORY\n");
    return 2;
  }
  try {
    return Run(argv);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "gloo: %s\n", problem.what());
    return 1;
  }
}
