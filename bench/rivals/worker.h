// What a rival's program does between its ops: it takes orders from bench/allreduce.py.
//
// The bench listens on a Unix socket; each process connects, says its rank, and answers each line
// with one line of JSON. It waits in read(): a system that is not at its turn uses no processor.
//
//   prepare VARIANT COUNT  true or false: a tensor of COUNT floats, of which one sum was right
//   round VARIANT WARM N   [seconds, ...]: WARM ops that do not count and N that do
//   release VARIANT        true: the tensor is given back
//
// A rival has one variant, in place. Plain C, included once by each program, also by C++.
#ifndef LONGHAUL_BENCH_RIVALS_WORKER_H_
#define LONGHAUL_BENCH_RIVALS_WORKER_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

// Sums `count` floats over all ranks, in place. Ends the process if it cannot.
typedef void (*AllReduce)(void* system, float* tensor, size_t count);

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

static const char* worker_prepare(float** tensor, size_t count, int rank, int size,
                                  AllReduce reduce, void* system) {
  free(*tensor);
  *tensor = (float*)malloc(count * sizeof(float));
  if (*tensor == NULL) worker_fail("allocating the tensor");
  for (size_t i = 0; i < count; ++i) (*tensor)[i] = (float)(rank + 1);
  reduce(system, *tensor, count);
  const float right = (float)size * (float)(size + 1) / 2;
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += (*tensor)[i] != right;
  // Sums of zeros stay ordinary numbers, however often.
  memset(*tensor, 0, count * sizeof(float));
  return wrong == 0 ? "true" : "false";
}

// Until the bench closes the connection.
static void worker_run(const char* path, int rank, int size, AllReduce reduce, void* system) {
  const int fd = worker_connect(path);
  FILE* orders = fdopen(fd, "r");
  FILE* answers = fdopen(dup(fd), "w");
  if (orders == NULL || answers == NULL) worker_fail(path);
  fprintf(answers, "%d\n", rank);
  fflush(answers);
  char line[256];
  float* tensor = NULL;
  size_t count = 0;
  while (fgets(line, sizeof(line), orders) != NULL) {
    size_t wanted = 0;
    int warm = 0;
    int iterations = 0;
    if (sscanf(line, "prepare %*s %zu", &wanted) == 1) {
      count = wanted;
      fprintf(answers, "%s\n", worker_prepare(&tensor, count, rank, size, reduce, system));
    } else if (sscanf(line, "round %*s %d %d", &warm, &iterations) == 2 && iterations > 0 &&
               tensor != NULL) {
      double* seconds = (double*)malloc((size_t)iterations * sizeof(double));
      if (seconds == NULL) worker_fail("allocating the times");
      for (int i = 0; i < warm; ++i) reduce(system, tensor, count);
      for (int i = 0; i < iterations; ++i) {
        const double begin = worker_seconds();
        reduce(system, tensor, count);
        seconds[i] = worker_seconds() - begin;
      }
      for (int i = 0; i < iterations; ++i)
        fprintf(answers, "%s%.9f", i == 0 ? "[" : ", ", seconds[i]);
      fprintf(answers, "]\n");
      free(seconds);
    } else if (strncmp(line, "release ", 8) == 0) {
      free(tensor);
      tensor = NULL;
      fprintf(answers, "true\n");
    } else {
      fprintf(stderr, "no such order: %s", line);
      exit(1);
    }
    fflush(answers);
  }
  free(tensor);
  fclose(answers);
  fclose(orders);
}

#endif  // LONGHAUL_BENCH_RIVALS_WORKER_H_
