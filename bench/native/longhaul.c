// Runs Longhaul's C library for bench/allreduce.py, which compiles this against liblonghaul.so.
//
//   longhaul SOCKET RANK SIZE PEERD_SOCKET RUN
#include "longhaul/longhaul.h"

#include <stdint.h>

#include "worker.h"

// A join or an op has failed if it takes longer.
static const int64_t kPatienceMs = 120000;

enum { kParts = 16 };

typedef struct System {
  lh_client* client;
  lh_comm* comm;
} System;

static void check(lh_status status, const char* what) {
  if (status == LH_OK) return;
  fprintf(stderr, "longhaul: %s: %s: %s\n", what, lh_strerror(status), lh_last_error());
  exit(1);
}

// ---------------------------------------------------------------------------- variants

static float* arena_allocate(void* system, size_t count) {
  void* data = NULL;
  check(lh_alloc(((System*)system)->client, count * sizeof(float), &data), "lh_alloc");
  return (float*)data;
}

static void arena_release(void* system, float* tensor) {
  check(lh_free(((System*)system)->client, tensor), "lh_free");
}

static lh_all_reduce_options sum_of(const float* source, float* target, size_t count,
                                    uint64_t tag) {
  lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
  options.source = source;
  options.target = target;
  options.count = count;
  options.tag = tag;
  return options;
}

static void reduce_by(lh_algorithm algorithm, void* system, const float* source, float* target,
                      size_t count) {
  lh_all_reduce_options options = sum_of(source, target, count, 0);
  options.algorithm = algorithm;
  lh_op* unfinished = NULL;
  check(lh_all_reduce(((System*)system)->comm, &options, kPatienceMs, NULL, &unfinished),
        "lh_all_reduce");
}

static void reduce(void* system, const float* source, float* target, size_t count) {
  reduce_by(LH_AUTO, system, source, target, count);
}

static void reduce_by_mesh(void* system, const float* source, float* target, size_t count) {
  reduce_by(LH_MESH, system, source, target, count);
}

static void reduce_by_ring(void* system, const float* source, float* target, size_t count) {
  reduce_by(LH_RING, system, source, target, count);
}

// Reduces the tensor in sixteen ops that are in flight together; in fewer if it has fewer elements.
static void reduce_in_parts(void* system, const float* source, float* target, size_t count) {
  lh_op* ops[kParts] = {NULL};
  for (size_t i = 0; i < kParts; ++i) {
    const size_t begin = count * i / kParts;
    const size_t end = count * (i + 1) / kParts;
    if (begin == end) continue;
    const lh_all_reduce_options options = sum_of(source + begin, target + begin, end - begin, i);
    check(lh_all_reduce_start(((System*)system)->comm, &options, &ops[i]), "lh_all_reduce_start");
  }
  for (size_t i = 0; i < kParts; ++i) {
    if (ops[i] == NULL) continue;
    check(lh_op_wait(ops[i], kPatienceMs), "lh_op_wait");
    lh_op_free(ops[i]);
  }
}

static const Variant kVariants[] = {
    {"arena", reduce, 0, arena_allocate, arena_release, NULL},
    {"out-of-place", reduce, 1, arena_allocate, arena_release, NULL},
    {"plain", reduce, 0, NULL, NULL, NULL},
    {"mesh", reduce_by_mesh, 0, arena_allocate, arena_release, NULL},
    {"ring", reduce_by_ring, 0, arena_allocate, arena_release, NULL},
    {"sixteen", reduce_in_parts, 0, arena_allocate, arena_release, NULL},
};

// ---------------------------------------------------------------------------- membership

// Joins together with all other members.
static void meet(System* system, const char* run, uint32_t size) {
  lh_join_options options = LH_JOIN_OPTIONS_INIT;
  options.run = run;
  options.timeout_ms = kPatienceMs;
  options.members = size;
  check(lh_join(system->client, &options, &system->comm), "lh_join");
}

int main(int argc, char** argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: longhaul SOCKET RANK SIZE PEERD_SOCKET RUN\n");
    return 2;
  }
  const int rank = atoi(argv[2]);
  const int size = atoi(argv[3]);
  System system = {NULL, NULL};
  lh_open_options options = LH_OPEN_OPTIONS_INIT;
  options.timeout_ms = 3000;  // peerd serves already, or never
  options.socket_path = argv[4];
  check(lh_open(&options, &system.client), "lh_open");
  meet(&system, argv[5], (uint32_t)size);
  worker_run(argv[1], rank, size, kVariants, sizeof(kVariants) / sizeof(kVariants[0]), &system);
  check(lh_leave(system.comm, kPatienceMs), "lh_leave");
  lh_comm_free(system.comm);
  lh_close(system.client);
  return 0;
}
