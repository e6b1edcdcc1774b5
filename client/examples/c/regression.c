/* Fits a line to noisy points. Each member has points of its own, and all members keep one set of
 * weights.
 *
 *   cc -std=c99 -I out/include -L out/lib -Wl,-rpath,$PWD/out/lib \
 *      client/examples/c/regression.c -llonghaul -o regression
 *   ./regression STEPS SEED MEMBERS
 *
 * It joins through the peerd on this host ($LONGHAUL_SOCKET names another socket). Start it on as
 * many hosts as you like, at any time: a newcomer gets the weights of the others at its first step,
 * and if one dies, the others go on. */
#include <inttypes.h>
#include <longhaul/longhaul.h>
#include <stdio.h>
#include <stdlib.h>

enum { kWeights = 2, kPoints = 64 };

static void check(lh_status status, const char* what) {
  if (status == LH_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, lh_strerror(status), lh_last_error());
  exit(1);
}

/* A number from -1 to 1. */
static float noise(uint64_t* seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(*seed >> 40) / (float)(1 << 23) - 1.0f;
}

/* Writes the gradient of the squared error over fresh points near y = 3 x - 1, and returns the
 * error. */
static float gradient_of(const float* weights, float* gradient, uint64_t* seed) {
  float loss = 0;
  gradient[0] = gradient[1] = 0;
  for (int i = 0; i < kPoints; ++i) {
    const float x = noise(seed);
    const float miss = weights[0] * x + weights[1] - (3 * x - 1 + 0.01f * noise(seed));
    gradient[0] += 2 * miss * x / kPoints;
    gradient[1] += 2 * miss / kPoints;
    loss += miss * miss / kPoints;
  }
  return loss;
}

int main(int argc, char** argv) {
  const uint64_t steps = argc > 1 ? strtoull(argv[1], NULL, 10) : 100;
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  const uint64_t shape = kWeights;
  lh_open_options open = LH_OPEN_OPTIONS_INIT;
  lh_join_options join = LH_JOIN_OPTIONS_INIT;
  lh_tensor tensor = LH_TENSOR_INIT;
  lh_sync_options sync = LH_SYNC_OPTIONS_INIT;
  lh_all_reduce_options average = LH_ALL_REDUCE_OPTIONS_INIT;
  lh_op_info_t info = LH_OP_INFO_INIT;
  lh_client* client = NULL;
  lh_comm* comm = NULL;
  lh_op* op = NULL;
  void* weights_memory = NULL;
  void* gradient_memory = NULL;
  float* weights;
  float* gradient;
  float loss = 0;

  check(lh_open(&open, &client), "lh_open");
  /* Memory shared with peerd: nothing is copied. */
  check(lh_alloc(client, kWeights * sizeof(float), &weights_memory), "lh_alloc");
  check(lh_alloc(client, kWeights * sizeof(float), &gradient_memory), "lh_alloc");
  weights = weights_memory;
  gradient = gradient_memory;
  weights[0] = weights[1] = 0;

  tensor.name = "weights";
  tensor.data = weights;
  tensor.shape = &shape;
  tensor.dims = 1;
  check(lh_state_new(client, &tensor, 1, &sync.state), "lh_state_new");

  join.run = "regression";
  join.members = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0; /* 0: begin alone */
  check(lh_join(client, &join, &comm), "lh_join");
  average.dtype = LH_FLOAT32;
  average.source = gradient;
  average.target = gradient;
  average.count = kWeights;
  average.op = LH_AVG;
  while (sync.revision < steps) {
    lh_sync_info_t state = LH_SYNC_INFO_INIT;
    /* Newcomers join here. From here on all members hold the same weights. */
    check(lh_begin_step_sync(comm, &sync, LH_FOREVER, &state), "lh_begin_step_sync");
    loss = gradient_of(weights, gradient, &seed);
    check(lh_all_reduce(comm, &average, LH_FOREVER, &info, &op), "lh_all_reduce");
    for (int i = 0; i < kWeights; ++i) weights[i] -= 0.2f * gradient[i];
    sync.revision = state.revision + 1;
  }
  printf("%" PRIu64 " steps, %u members in the last one, loss %.6f, weights %a %a\n", sync.revision,
         info.world_size, (double)loss, (double)weights[0], (double)weights[1]);

  check(lh_leave(comm, LH_FOREVER), "lh_leave");
  lh_comm_free(comm);
  check(lh_state_free(sync.state), "lh_state_free");
  check(lh_free(client, weights_memory), "lh_free");
  check(lh_free(client, gradient_memory), "lh_free");
  lh_close(client);
  return 0;
}
