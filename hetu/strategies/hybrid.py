"""Builders that give variables to servers: embedding tables only, or everything.

In a hybrid the ranks all-reduce what is dense and the servers keep tables (S. Kim et al., "Parallax", EuroSys 2019):
`choice.py` says which. With everything on servers the ranks need not know each other (M. Li et al., "Scaling
Distributed Machine Learning with the Parameter Server", 2014). Left out: pipelines.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import fields

from ..core.errors import ArgumentError
from ..core.graph import Node
from ..dist.cut.builders import DataParallel
from ..dist.cut.kept import Served
from ..dist.cut.pipeline_strategy import Staged
from ..dist.cut.strategy import Builder, Strategy
from ..ps.store.cache import Cache
from ..ps.store.consistency import Consistency
from .choice import choices
from .servable import Servable
from .serving import Serving

ALL = "*"


class Hybrid(Builder):
    """Tables that are only looked up live on the servers, the rest is as `parallel` says.

    Args:
        parallel: the strategy of what ranks keep, or its builder; by default `DataParallel()`.
        batch_size: of all ranks together. A table is given to the servers where a step then moves fewer bytes than
            among the ranks; `print(executor.placement)` shows the choice.
        served: patterns of the names of tables that go to the servers in any case. With two or three ranks it seldom
            saves bytes, so name what is too large for a rank, or is to be cached. "*" gives them all that is trained;
            see `ParameterServer`.
        consistency: what the servers are to run under, BSP(), SSP(3) or ASP(), alike on all ranks; by default what they
            were started with.
        cache: how much of the tables each rank keeps, and how stale; see `Cache`.

    Under BSP without a cache training equals that of one process. The executor raises ArgumentError where there are no
    servers and for a cache of tables that are not trained by plain gradient descent, RefusedError where ranks ask for
    different modes.

    >>> import hetu as ht
    >>> ids = ht.placeholder("ids", (None, 4), "int64")
    >>> loss = ht.mean(ht.nn.Embedding(1000, 8, name="large")(ids) ** 2)
    >>> updates = ht.optim.SGD(0.1).minimize(loss)
    >>> print(Hybrid(served="*large*").build([loss, *updates.values()], world_size=2))
    all else: [dup/2, dup/1] on 0-1
    large/weight: by rows, kept on servers
    ids (fed): [0/2, dup/1] on 0-1
    """

    def __init__(
        self,
        parallel: Builder | None = None,
        *,
        batch_size: int = 256,
        served: str | Sequence[str] = (),
        consistency: Consistency | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.parallel, self.batch_size = parallel or DataParallel(), batch_size
        self.served = (served,) if isinstance(served, str) else tuple(served)
        self.consistency, self.cache = consistency, cache

    @property
    def apart(self) -> bool:
        """Whether ranks know the servers only."""
        return ALL in self.served

    def build(self, outputs: Sequence[Node], world_size: int) -> Serving:
        """The strategy for a graph on `world_size` ranks."""
        plain = self.parallel.build(outputs, 1 if self.apart else world_size)
        if isinstance(plain, Staged):
            raise ArgumentError("a hybrid of servers and a pipeline", fix="use DataParallel() or Parallel(...)")
        servable = Servable(outputs)
        rated = choices(servable, self.batch_size, world_size, lambda v: self._is_named(v, servable))
        given = [v for v, choice in rated.items() if choice.on_servers]
        variables = plain.variables | {v.name: Served(copied=v not in servable.tables) for v in given}
        variables |= {v.name: Served() for v in servable.slots(given)}
        same = {f.name: getattr(plain, f.name) for f in fields(Strategy)} | {"variables": variables}
        return Serving(
            **same, consistency=self.consistency, cache=self.cache, apart=self.apart, batch_size=self.batch_size
        )

    def _is_named(self, variable: Node, servable: Servable) -> bool:
        able = self.apart or variable in servable.tables
        return able and any(fnmatch.fnmatch(variable.name, pattern) for pattern in self.served)

    def __repr__(self) -> str:
        return f"Hybrid({self.parallel}, served={self.served})"


def ParameterServer(*, consistency: Consistency | None = None, cache: Cache | None = None) -> Hybrid:
    """Everything that is trained lives on the servers: `strategy=ParameterServer()` under `heturun -w 2 -s 1`.

    The arguments are those of `Hybrid`.

    Workers know the servers only, so that under SSP or ASP none waits for another. Each runs the whole model on its
    part of the batch, which is split along the first axis and must divide by the workers; a fetched loss is that of
    this part, and evaluation is not split. Under BSP without a cache the parameters equal those of one process that
    trains on whole batches.

    >>> ParameterServer()
    Hybrid(DataParallel(data=None, tensor=1, zero=0), served=('*',))
    """
    return Hybrid(served=ALL, consistency=consistency, cache=cache)
