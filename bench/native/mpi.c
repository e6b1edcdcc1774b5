// Runs Open MPI, or any other MPI, for bench/allreduce.py, which compiles this with mpicc.
//
//   mpirun ... mpi SOCKET
#include <mpi.h>

#include "worker.h"

static void all_reduce(void* system, const float* source, float* tensor, size_t count) {
  (void)system;
  (void)source;  // the same as the target
  // By MPI's default an error ends the program.
  MPI_Allreduce(MPI_IN_PLACE, tensor, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

// A rank whose call has returned may have more to send. It sends only within its next calls, so if
// it slept now, others would lack their data. No rank leaves the barrier before all have their
// data.
static void settle(void* system) {
  (void)system;
  MPI_Barrier(MPI_COMM_WORLD);
}

static const Variant kVariant = {"in-place", all_reduce, 0, NULL, NULL, settle};

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: mpi SOCKET\n");
    return 2;
  }
  int rank = 0;
  int size = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  worker_run(argv[1], rank, size, &kVariant, 1, NULL);
  MPI_Finalize();
  return 0;
}
