"""The job that this process belongs to, as its launcher tells it: known before anything of MPI is loaded."""

from __future__ import annotations

import os

# The last one is srun's; SLURM_NTASKS is also set for the one script of sbatch.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")


def job_size() -> int:
    """The number of ranks as the launcher told it; 1 without a launcher."""
    return int(next((os.environ[name] for name in SIZE_VARIABLES if name in os.environ), 1))
