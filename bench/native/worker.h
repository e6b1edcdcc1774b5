// The code that the programs of this directory share: they take orders from bench/allreduce.py.
//
// The benchmark listens on a Unix socket. Each process connects, sends its rank, and answers each
// line with one line of JSON. Between orders it waits in read(), so a system that is not at its
// turn uses no processor.
//
//   prepare VARIANT COUNT  makes tensors of COUNT floats and reduces once; true: the sum was right
//   round VARIANT WARM N   does WARM ops that do not count and N that do: [seconds, ...] of the N
//   release VARIANT        frees the tensors: true
//
// A variant keeps its tensors while others are prepared and have their turns. One thread does all.
// Any error ends the process with a message. This is plain C; each program, in C or C++, includes
// it once.
#ifndef LONGHAUL_BENCH_NATIVE_WORKER_H_
#define LONGHAUL_BENCH_NATIVE_WORKER_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

// One way in which a system reduces. `system` is the last argument of worker_run(). A function that
// fails prints why and ends the process.
typedef struct Variant {
  const char* name;
  // Sums `count` floats over all ranks, from `source` into `target`.
  void (*reduce)(void* system, const float* source, float* target, size_t count);
  // 1: the target is a tensor of its own. 0: it is the source.
  int out_of_place;
  // Take and free memory for a tensor. NULL: malloc() and free().
  float* (*allocate)(void* system, size_t count);
  void (*release)(void* system, float* tensor);
  // Called at every rank after its ops, before it sleeps; not timed. NULL: there is nothing to do.
  void (*settle)(void* system);
} Variant;

// The tensors of one variant.
typedef struct Tensors {
  const Variant* variant;
  float* source;  // NULL: the variant is not prepared
  float* target;
  size_t count;
} Tensors;

static double worker_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void worker_fail(const char* what) {
  perror(what);
  exit(1);
}

static int worker_connect(const char* path) {
  struct sockaddr_un address;
  memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  if (strlen(path) >= sizeof(address.sun_path)) {
    fprintf(stderr, "%s: too long for the path of a socket\n", path);
    exit(1);
  }
  strcpy(address.sun_path, path);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (const struct sockaddr*)&address, sizeof(address)) != 0) {
    worker_fail(path);
  }
  return fd;
}

static float* worker_allocate(const Variant* variant, void* system, size_t count) {
  if (variant->allocate != NULL) return variant->allocate(system, count);
  float* tensor = (float*)malloc(count * sizeof(float));
  if (tensor == NULL) worker_fail("allocating a tensor");
  return tensor;
}

static void worker_free(const Variant* variant, void* system, float* tensor) {
  if (variant->release != NULL) {
    variant->release(system, tensor);
  } else {
    free(tensor);
  }
}

static void worker_release(Tensors* tensors, void* system) {
  if (tensors->source == NULL) return;
  if (tensors->target != tensors->source) {
    worker_free(tensors->variant, system, tensors->target);
  }
  worker_free(tensors->variant, system, tensors->source);
  tensors->source = tensors->target = NULL;
}

static void worker_fill(float* tensor, size_t count, float value) {
  for (size_t i = 0; i < count; ++i) tensor[i] = value;
}

static void worker_reduce(const Tensors* tensors, void* system) {
  tensors->variant->reduce(system, tensors->source, tensors->target, tensors->count);
}

static void worker_settle(const Tensors* tensors, void* system) {
  if (tensors->variant->settle != NULL) tensors->variant->settle(system);
}

// Makes the tensors and reduces numbers that differ from rank to rank. Returns 1 if the sum is
// right.
static int worker_prepare(Tensors* tensors, void* system, size_t count, int rank, int size) {
  const Variant* variant = tensors->variant;
  worker_release(tensors, system);
  tensors->count = count;
  tensors->source = worker_allocate(variant, system, count);
  tensors->target =
      variant->out_of_place ? worker_allocate(variant, system, count) : tensors->source;
  worker_fill(tensors->target, count, -1);
  worker_fill(tensors->source, count, (float)(rank + 1));
  worker_reduce(tensors, system);
  worker_settle(tensors, system);
  const float right = (float)size * (float)(size + 1) / 2;
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += tensors->target[i] != right;
  // From now on the sums are of zeros, which stay ordinary numbers however often they are summed.
  worker_fill(tensors->source, count, 0);
  return wrong == 0;
}

static void worker_round(const Tensors* tensors, void* system, size_t warm, size_t iterations,
                         FILE* answers) {
  double* seconds = (double*)malloc(iterations * sizeof(double));
  if (seconds == NULL) worker_fail("allocating the times");
  for (size_t i = 0; i < warm; ++i) worker_reduce(tensors, system);
  for (size_t i = 0; i < iterations; ++i) {
    const double begin = worker_seconds();
    worker_reduce(tensors, system);
    seconds[i] = worker_seconds() - begin;
  }
  worker_settle(tensors, system);
  for (size_t i = 0; i < iterations; ++i) {
    fprintf(answers, "%s%.9f", i == 0 ? "[" : ", ", seconds[i]);
  }
  fprintf(answers, "]\n");
  free(seconds);
}

static Tensors* worker_find(Tensors* all, size_t count, const char* name) {
  for (size_t i = 0; i < count; ++i) {
    if (strcmp(all[i].variant->name, name) == 0) return &all[i];
  }
  fprintf(stderr, "no such variant: %s\n", name);
  exit(1);
}

// Carries out orders until the benchmark closes the connection.
static void worker_run(const char* path, int rank, int size, const Variant* variants,
                       size_t variants_count, void* system) {
  const int fd = worker_connect(path);
  FILE* orders = fdopen(fd, "r");
  FILE* answers = fdopen(dup(fd), "w");
  Tensors* all = (Tensors*)calloc(variants_count, sizeof(Tensors));
  if (orders == NULL || answers == NULL || all == NULL) worker_fail(path);
  for (size_t i = 0; i < variants_count; ++i) all[i].variant = &variants[i];
  fprintf(answers, "%d\n", rank);
  fflush(answers);
  char line[256];
  while (fgets(line, sizeof(line), orders) != NULL) {
    char what[16] = "";
    char name[32] = "";
    size_t first = 0;
    size_t second = 0;
    const int fields = sscanf(line, "%15s %31s %zu %zu", what, name, &first, &second);
    Tensors* tensors = worker_find(all, variants_count, name);
    if (strcmp(what, "prepare") == 0 && fields == 3 && first > 0) {
      const int right = worker_prepare(tensors, system, first, rank, size);
      fprintf(answers, "%s\n", right ? "true" : "false");
    } else if (strcmp(what, "round") == 0 && fields == 4 && second > 0 && tensors->source != NULL) {
      worker_round(tensors, system, first, second, answers);
    } else if (strcmp(what, "release") == 0) {
      worker_release(tensors, system);
      fprintf(answers, "true\n");
    } else {
      fprintf(stderr, "no such order: %s", line);
      exit(1);
    }
    fflush(answers);
  }
  for (size_t i = 0; i < variants_count; ++i) worker_release(&all[i], system);
  free(all);
  fclose(answers);
  fclose(orders);
}

#endif  // LONGHAUL_BENCH_NATIVE_WORKER_H_
