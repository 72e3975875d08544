"""One BLAS thread per test worker: several workers share the cores, and OpenBLAS's threads spin while they wait."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
