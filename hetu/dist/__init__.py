"""One model on many ranks: communicators, layouts, and moving tensors between layouts.

>>> from hetu.dist import DUP, SUM, Layout, Shard, redistribute, run_ranks
>>> import numpy as np
>>> partial, split = Layout(Shard((0, 1), ((SUM, 2),))), Layout(Shard((0, 1), ((0, 2),)))
>>> run_ranks(2, lambda comm: redistribute(comm, np.arange(4.0), partial, split, (4,)))
[array([0., 2.]), array([4., 6.])]
"""

from .builders import MEGATRON, DataParallel, ExpertParallel, Parallel, TensorParallel, ZeRO
from .by_hand import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter, send_recv
from .clock import Link, VirtualClock
from .comm import Comm, CommError, DeadlineError, Handle, SerialComm
from .heterogeneous import Heterogeneous
from .kept import Kept, Served
from .layout import DUP, MAX, MIN, SUM, Layout, Mesh, Shard
from .mpi import MPIComm, world
from .ops import shard
from .pipeline import Pipeline
from .place import place
from .placement import OnRanks
from .redistribute import Plan, plan, redistribute
from .schedule import Schedule
from .staged import Staged
from .stages import stage
from .strategy import Builder, Strategy
from .threads import ThreadComm, run_ranks

__all__ = [
    "Comm", "CommError", "DeadlineError", "Handle", "SerialComm", "ThreadComm", "MPIComm", "run_ranks", "world",
    "Link", "VirtualClock",
    "Strategy", "Builder", "Kept", "Served", "Parallel", "DataParallel", "ZeRO", "TensorParallel", "ExpertParallel", "Heterogeneous",
    "MEGATRON", "shard",
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv",
    "Pipeline", "Staged", "Schedule", "stage", "place", "OnRanks",
    "DUP", "SUM", "MAX", "MIN", "Shard", "Layout", "Mesh", "Plan", "plan", "redistribute",
]  # fmt: skip
