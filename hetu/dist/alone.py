"""What other rooms do not know of a job of several ranks.

An executor that was told nothing of them would train the same model alone on each; a loader takes its rank's part. The
top of the package calls both, and loads this file only in a job.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

from ..core.graph import Node
from ..core.placement import Alone
from ..job import job_size
from .comm.guard import own_rank
from .comm.process import process
from .comm.world import world


def own_part() -> tuple[int, int]:
    """Which part of a data set is this rank's, and of how many."""
    return world().rank, world().world_size


def alone(strategy: None, outputs: Sequence[Node], comm: Any = None) -> Alone:
    """The placement without a strategy. Rank 0 says once if nothing has joined the ranks of its job so far.

    Ranks that have communicated may well have executors of their own, such as one that validates.
    """
    if comm is None and own_rank() == 0 and not process.count:
        _warn(job_size())
    return Alone(comm)


@functools.cache
def _warn(ranks: int) -> None:
    warnings.warn(
        f"this executor has neither a strategy nor a communicator: each of {ranks} ranks trains the whole model alone "
        "(fix: Executor(..., strategy=ht.dist.DataParallel()), comm=ht.dist.world(), or heturun -w 1)",
        RuntimeWarning,
        stacklevel=2,
    )
