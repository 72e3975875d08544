"""Moving arrays between ranks: threads, MPI, NCCL, shared memory, and what explains a deadlock."""
