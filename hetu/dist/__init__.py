"""One model on many ranks: communicators, layouts, and moving tensors between layouts.

>>> from hetu.dist import DUP, SUM, Layout, Shard, redistribute, run_ranks
>>> import numpy as np
>>> partial, split = Layout(Shard((0, 1), ((SUM, 2),))), Layout(Shard((0, 1), ((0, 2),)))
>>> run_ranks(2, lambda comm: redistribute(comm, np.arange(4.0), partial, split, (4,)))
[array([0., 2.]), array([4., 6.])]
"""

from ..answers import answer_calls as _answer_calls
from . import elastic as _elastic  # which has executors survive the loss of ranks
from .by_hand import GraphGrid, all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter, send_recv
from .comm.clock import Link, VirtualClock
from .comm.comm import Comm, CommError, DeadlineError, Handle, RankLostError, SerialComm
from .comm.mpi import MPIComm
from .comm.process import local_rank
from .comm.threads import ThreadComm, run_ranks
from .comm.world import world
from .cut.builders import MEGATRON, DataParallel, ExpertParallel, Parallel, RuleBook, TensorParallel, ZeRO
from .cut.heterogeneous import Heterogeneous, Pipelines
from .cut.kept import Home, Kept
from .cut.on_ranks import OnRanks
from .cut.pipeline_builder import Pipeline
from .cut.pipeline_schedule import Schedule
from .cut.pipeline_stages import stage
from .cut.pipeline_strategy import Staged
from .cut.place import place
from .cut.strategy import Builder, Strategy
from .layout.layout import DUP, MAX, MIN, SUM, Layout, Mesh, Shard
from .layout.redistribute import Redistribution, plan, redistribute
from .ops import shard
from .rehearsal import Rehearsal, rehearse

__all__ = [
    "Comm", "CommError", "DeadlineError", "RankLostError", "Handle", "SerialComm", "ThreadComm", "MPIComm", "run_ranks",
    "world", "local_rank",
    "Link", "VirtualClock",
    "Strategy", "Builder", "Home", "Kept", "Parallel", "DataParallel", "ZeRO", "TensorParallel", "ExpertParallel",
    "Heterogeneous",
    "GraphGrid", "RuleBook", "MEGATRON", "shard",
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv",
    "Pipeline", "Pipelines", "Staged", "Schedule", "stage", "place", "OnRanks", "Rehearsal", "rehearse",
    "DUP", "SUM", "MAX", "MIN", "Shard", "Layout", "Mesh", "Redistribution", "plan", "redistribute",
]  # fmt: skip

_answer_calls(__name__, workers=(Comm, Handle, Builder, OnRanks, Redistribution))
