"""Builders that give variables to servers: embedding tables only, or everything.

In a hybrid the ranks all-reduce dense gradients and the servers keep tables (S. Kim et al., "Parallax", EuroSys 2019);
`servable.py` says which tables. With everything on servers the ranks need not know each other (M. Li et al., "Scaling
Distributed Machine Learning with the Parameter Server", 2014).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..codec import Compress
from ..core.errors import ArgumentError, UnknownNameError, did_you_mean
from ..core.graph import Node
from ..dist.cut.builders import DataParallel
from ..dist.cut.strategy import Builder
from ..ps.store.consistency import Consistency
from ..ps.store.placed import Placed
from ..ps.store.policies import Cache
from ..ranges import Count
from .servable import Servable, choices
from .served import OF_ROWS, Served
from .serving import SERVING, Serving

ALL = "*"
WISHES = "consistency", "compress", *OF_ROWS  # of each variable


class Hybrid(Builder):
    """Tables that are only looked up live on the servers; `parallel` spreads all other variables over the ranks.

    Args:
        parallel: the strategy for the variables on ranks, or its builder; by default `DataParallel()`. In pipelines, or
            where gradients accumulate, rows are pulled and pushed once a step, however many micro-batches it has.
        batch_size: of all ranks together. Servers get a table if a step then moves fewer bytes than among the ranks;
            `print(executor.placement)` shows the choice. With 0 they get none but those in `served`.
        served: patterns of the names of tables that the servers get in any case. With two or three ranks this seldom
            saves bytes, so name a table that is too large for a rank, or that you want cached. "*" gives them all
            variables that are trained; see `ParameterServer`.
        consistency: the mode of the servers, BSP(), SSP(3) or ASP(), the same on all ranks; by default the mode that
            they were started with. Of several the loosest says how far ranks may be apart.
        cache: the rows of the tables that each rank keeps, and how stale they may be; see `Cache`.
        compress: how rows, gradients and values travel in fewer bytes; see `Compress`.
        placed: which server owns each row of a table, instead of rows dealt in turn, and of which each rank keeps
            copies if `cache` has the policy "replicas": a `Placed`, as that of `hetu.ps.partition_bigraph`. Server k is
            on the host of rank k where each host has as many servers as ranks.
        pooled: patterns of the names of tables of which servers sum up bags, such as those of `ht.embedding_bag`: for
            a bag one row comes from each server that has some of it, not each distinct row. Gradients travel as before.

    `consistency`, `cache`, `compress` and `placed` are one for all variables that servers keep, or several by patterns
    of their names, of which the first that fits counts. The strategy says it of each variable; see `Served`.

    Under BSP without a cache training equals that of one process. `build` raises UnknownNameError for a pattern that
    fits no table. The executor raises ArgumentError without servers, or for a cache of tables that are not trained by
    plain gradient descent, and RefusedError if ranks ask for different modes.

    >>> import hetu as ht
    >>> ids = ht.placeholder("ids", (None, 4), "int64")
    >>> loss = ht.mean(ht.nn.Embedding(1000, 8, name="large")(ids) ** 2)
    >>> updates = ht.optim.SGD(0.1).minimize(loss)
    >>> print(Hybrid(served="*large*").build([loss, *updates.values()], world_size=2))
                  compute                store                  synchronized
    all else      [dup/2, dup/1] on 0-1  [dup/2, dup/1] on 0-1  buckets of 4,194,304 bytes
    large/weight  by rows                servers
    ids (fed)     [0/2, dup/1] on 0-1
    """

    def __init__(
        self,
        parallel: Builder | None = None,
        *,
        batch_size: Count = 256,
        served: str | Collection[str] = (),
        consistency: Consistency | Mapping[str, Consistency] | None = None,
        cache: Cache | Mapping[str, Cache] | None = None,
        compress: Compress | Mapping[str, Compress] | None = None,
        placed: Placed | Mapping[str, Placed] | None = None,
        pooled: str | Collection[str] = (),
    ) -> None:
        if not isinstance(parallel, Builder | None):
            raise ArgumentError(f"parallel={parallel!r:.80}", fix="pass one of hetu.dist, such as DataParallel()")
        modes = consistency.values() if isinstance(consistency, Mapping) else [consistency]
        if not all(isinstance(mode, Consistency | None) for mode in modes):
            raise ArgumentError(f"consistency={consistency!r}", fix="pass hetu.ps.BSP(), SSP(3) or ASP()")
        self.parallel, self.batch_size = parallel or DataParallel(), batch_size
        self.served, pooled = ((of,) if isinstance(of, str) else tuple(of) for of in (served, pooled))
        self.pooled = dict.fromkeys(pooled, True)
        self.consistency, self.cache, self.compress, self.placed = consistency, cache, compress, placed

    @property
    def apart(self) -> bool:
        """Whether ranks know the servers only."""
        return ALL in self.served

    def build(self, outputs: Sequence[Node], world_size: int) -> Serving:
        plain = self.parallel.build(outputs, 1 if self.apart else world_size)
        if (kind := SERVING.get(type(plain))) is None:  # what other kinds add would be lost
            fix = "use a builder of layouts or stages, such as DataParallel() or Pipeline(...)"
            raise ArgumentError(f"a hybrid of servers and a strategy of the kind {plain.kind!r}", fix=fix)
        servable = Servable(outputs)
        rated = choices(servable, self.batch_size, world_size, self.named(servable))
        given = [v for v, choice in rated.items() if choice.on_servers]
        variables = plain.variables | {v.name: Served() for v in servable.slots(given)}
        variables |= self._homes(given, servable)
        same = {f.name: getattr(plain, f.name) for f in fields(plain)} | {"variables": variables}
        return kind(**same, apart=self.apart, batch_size=self.batch_size)

    def _homes(self, given: Sequence[Node], servable: Servable) -> dict[str, Served]:
        """What each variable that servers get asks of them; UnknownNameError for a pattern that fits none."""
        tables = {v.name for v in given if v in servable.tables}
        asked: dict[str, dict[str, Any]] = {v.name: {"copied": v.name not in tables} for v in given}
        for wish in WISHES:
            said, what = getattr(self, wish), "table" if wish in OF_ROWS else "variable"
            able = [name for name in asked if name in tables or wish not in OF_ROWS]
            for pattern, each in (said if isinstance(said, Mapping) else {ALL: said}).items():
                fitting = [name for name in able if fnmatch.fnmatch(name, pattern)]
                if not fitting and pattern != ALL and servable.steps:
                    fix = did_you_mean(pattern, able) if able else "name tables in served="
                    raise UnknownNameError(f"{wish}={pattern!r} fits no {what} that servers keep", fix=fix)
                for name in fitting:
                    asked[name].setdefault(wish, each)
                lying = each.at_rest if wish == "compress" and each else ""
                if lying and servable.steps and not tables.intersection(fitting):
                    fix = "name tables in served=, or leave it out: other variables lie as they are"
                    raise ArgumentError(f"at_rest={lying!r}, but servers keep no table that it is for", fix=fix)
        for name, wishes in asked.items():
            if (compress := wishes.get("compress")) is not None:
                wishes["compress"] = compress.part(sparse=name in tables)
        return {name: Served(**wishes) for name, wishes in asked.items()}

    def named(self, servable: Servable) -> Collection[Node]:
        """The variables that servers get in any case."""
        return {v for pattern in self.served for v in self._named(pattern, servable)}

    def _named(self, pattern: str, servable: Servable) -> list[Node]:
        able = list(servable.steps) if self.apart else list(servable.tables)
        found = [v for v in able if fnmatch.fnmatch(v.name, pattern)]
        if not found and servable.steps and pattern != ALL:
            fix = did_you_mean(pattern, [v.name for v in able]) if able else "leave it out: there are none"
            if any(fnmatch.fnmatch(v.name, pattern) for v in servable.steps):
                fix = "leave it to the ranks: a step reads all of it, as averages and sums over several batches do"
            raise UnknownNameError(f"served={pattern!r} fits no table that is only looked up and trained", fix=fix)
        return found


def ParameterServer(
    *,
    consistency: Consistency | Mapping[str, Consistency] | None = None,
    cache: Cache | Mapping[str, Cache] | None = None,
    compress: Compress | Mapping[str, Compress] | None = None,
    placed: Placed | Mapping[str, Placed] | None = None,
    pooled: str | Collection[str] = (),
    local_feeds: bool = False,
) -> Hybrid:
    """All trained variables live on the servers: `strategy=ParameterServer()` under `heturun -w 2 -s 1`.

    The arguments are those of `Hybrid`. With `local_feeds` each worker feeds a batch of its own, of any size, as where
    it keeps a part of a graph or of the data; servers take the mean of the workers' gradients.

    Workers know the servers only, so under ASP no worker waits for another. Each runs the whole model on its part of
    the batch, which is split along the first axis and must divide by the workers. A fetched loss is that of this part;
    evaluation is not split. Under BSP without a cache the parameters equal those of one process that trains on whole
    batches, where the loss is a mean over rows and nothing clips gradients: a worker clips those of its part, and of
    sums servers take the mean. So there all workers must be fed the same: ends of clocks carry samples, and who differs
    is refused. Under SSP and ASP each may go through the data as it likes, and nothing is compared.

    What servers keep belongs to the state of an executor, as on one process: another executor of the script, or a cell
    that is run again, begins anew, and one with `state=first.state` goes on.

    >>> ParameterServer()
    Hybrid(parallel=DataParallel(), served='*')
    """
    asked: dict[str, Any] = {"consistency": consistency, "cache": cache, "compress": compress}
    return Hybrid(DataParallel(local_feeds=local_feeds), served=ALL, placed=placed, pooled=pooled, **asked)
