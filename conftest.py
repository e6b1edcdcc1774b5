"""What holds for the tests of all directories."""

import os

# PyTorch and NumPy would use all processors in each of many processes, whose threads then spin for each other's turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
