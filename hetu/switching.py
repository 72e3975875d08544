"""`Executor.switch`: a running job goes over to another strategy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.errors import public
from .core.executor import Executor

if TYPE_CHECKING:
    from .dist.layout.fused import Fused


@public
def switch(self: Executor, strategy: Any, *, keep: bool = True) -> Fused:
    """Go on under another strategy: variables, optimizer state and sums of gradients move from rank to rank in memory.

    A collective, between two steps: all ranks call it with one strategy, a name, a builder, a plan or None, as
    `Executor` takes them. What ranks need and do not have travels in one message from each to each, which in turn need
    as much memory. Training goes on as if nothing had been: random numbers, counts and the position in the data are
    the same. It returns what was moved; `print` it.

    keep: whether arrays and programs of the strategy that is left are kept, so that to come back compiles nothing. A
    rank then has memory for every part of a variable that it has had under any of these strategies, once; False gives
    up those of the one that is left. What `Kept(wire=...)` has lost waits with them for the gradients to come.

    ArgumentError for what servers keep under one of the strategies and not alike under the other, for ranks that know
    the servers only, under `PartialReduce`, and for variables that several executors share; GraphError after a step
    that failed halfway. Errors come on all ranks, which then are as they were.

    >>> import hetu as ht
    >>> def train(comm):
    ...     x, w = ht.placeholder("x", (None, 4)), ht.variable("w", ht.init.zeros, (4, 2))
    ...     ex = ht.Executor([ht.optim.Momentum(0.1).minimize(ht.sum(x @ w))], strategy="zero3", comm=comm)
    ...     ex.run({x: [[1, 2, 3, 4], [5, 6, 7, 8]]})
    ...     return ex.switch("dp")
    >>> print(ht.dist.run_ranks(2, train)[0])
    3 tensors: 2 messages, 64 bytes
    from  to 0  to 1
       0     0    32
       1    32     0
    """
    return importlib.import_module("hetu.dist.cut.switch").switched(self, strategy, keep)


Executor.switch = switch
