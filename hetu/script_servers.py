"""What training scripts share whose tables may live on servers: options, strategy, optimizers, and what it took.

A script names its tables. Left out: servers themselves, which `heturun -s` starts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from . import optim
from .codec import Compress
from .core.executor import Executor
from .core.graph import Graph, Node
from .core.subgraph import Feed
from .data.loader import DataLoader
from .dist.cut.strategy import Builder
from .look.history import History
from .plan.simulation.instructions import bytes_between_ranks
from .ps.store.consistency import consistency
from .ps.store.policies import POLICIES, Cache
from .script import Script, number, positive, told
from .strategies.hybrid import Hybrid, ParameterServer

SERVED = ("ps", "hybrid")
_OFFERED = [name for name, policy in POLICIES.items() if not policy.placed]  # which scripts know no placed rows for


class ServerOptions:
    """The options of servers, added to those of `script`, and what is made of them.

    `tables` maps patterns of the names of tables to a factor of their rate: one whose rows are in every batch takes
    smaller steps. They learn by plain descent at `rate`, whose finished steps a cache can add up before it sends them;
    without a rate only if there is a cache, at `cached_rate`, and else by Adam as all others. `cache` and `rows` are
    the defaults of these options.

    >>> script = Script("Fit a table.", epochs=1, batch_size=8, learning_rate=0.1)
    >>> servers = ServerOptions(script, {"*embedding*": 1.0}, rate=0.3)
    >>> script.parse(["--cache", "lru"]).cache, servers.strategy() is None
    ('lru', True)
    """

    def __init__(
        self,
        script: Script,
        tables: Mapping[str, float],
        *,
        rate: float | None = None,
        cached_rate: float = 0.1,
        cache: str = "off",
        rows: float = 0.1,
    ) -> None:
        self.script, self.tables, self.cached_rate = script, tables, cached_rate
        shown = "%(default)s" if rate else f"{cached_rate} with a cache; without one they learn by Adam"
        script.add("--table-rate", type=number, default=rate, metavar="RATE", help=f"of descent on tables ({shown})")
        add = script.parser.add_argument_group("servers, under heturun -s").add_argument
        mode: dict[str, Any] = {"type": told(consistency), "metavar": "MODE"}
        add("--consistency", help="of the servers: bsp, asp, or ssp:3 (by default theirs)", **mode)
        help = "which rows workers keep; auto: none while that saves less than 10%% of the bytes (%(default)s)"
        add(
            "--cache",
            choices=[*_OFFERED, "off"],
            default=cache,
            help=help,
        )
        add("--cache-rows", type=number, default=rows, metavar="SHARE", help="of each table (%(default)s)")
        add(
            "--bound",
            type=partial(positive, least=0),
            default=10,
            metavar="N",
            help="updates that a cached row may lag behind (%(default)s)",
        )
        help = "batches by which dynamic and constant choose (16; constant: an epoch)"
        add("--ahead", type=positive, metavar="N", help=help)
        for option, help in {
            "rows": "rows to and from servers as float16 or int8",
            "gradients": "others as float16, int8, topk:0.01 or 1bit",
            "values": "their new values as float16 or int8",
            "at_rest": "rows lie on servers as float16 or int8",
        }.items():
            add(f"--{option.replace('_', '-')}", default="", type=_way(option), metavar="HOW", help=help)

    @property
    def take_part(self) -> bool:
        """Whether the strategy that is asked for has servers."""
        return self.script.options.strategy in SERVED

    def cache(self, rows: float | Mapping[str, int | float] | None = None, epoch: int = 16) -> Cache | None:
        """The cache that is asked for; `rows` come before the share of each table, and an epoch has so many batches."""
        asked = self.script.options
        if asked.cache == "off":
            return None
        ahead = asked.ahead or (epoch if POLICIES[asked.cache].once else 16)
        return Cache(asked.cache, rows or asked.cache_rows, asked.bound, asked.bound, ahead)

    def strategy(self, cache: Cache | None = None) -> Builder | None:
        """The strategy where servers take part in it, by default with the cache that is asked for."""
        if not self.take_part:
            return None
        asked = self.script.options
        compress = Compress(asked.rows, asked.gradients, asked.values, at_rest=asked.at_rest)
        wishes: dict[str, Any] = {
            "consistency": asked.consistency,
            "cache": cache or self.cache(),
            "compress": compress,
        }
        if asked.strategy == "ps":
            return ParameterServer(**wishes)
        served = self.tables if self.script.options.accumulate == 1 else ()  # a step that adds up reads whole tables
        return Hybrid(served=[*served], **wishes)  # two workers would gather small tables with fewer bytes

    def updates(self, loss: Node, batches: DataLoader) -> optim.Updates:
        """Adam, and for the tables plain gradient descent where that is asked for."""
        adam, trained = optim.Adam(self.script.rate(batches)), self._trained(loss)
        rate = self.script.options.table_rate
        if rate is None and not (self.take_part and self.script.options.cache != "off"):
            return adam.minimize(loss)
        groups = {pattern: [v for v in trained if fnmatch.fnmatch(v.name, pattern)] for pattern in self.tables}
        updates = optim.Updates({}, {})
        for pattern, variables in groups.items():
            descent = optim.SGD(self.script.rate(batches, (rate or self.cached_rate) * self.tables[pattern]))
            updates |= descent.minimize(loss, variables)
        others = [v for v in trained if v not in updates]
        return adam.minimize(loss, others) | updates if others else updates

    @staticmethod
    def _trained(loss: Node) -> list[Node]:
        return [v for v in Graph((loss,)).leaves("variable") if v.attrs["trainable"]]

    def report(self, executor: Executor, history: History, steps: int, feed: Feed) -> str:
        """What the training took, as a table; bytes are those of all workers. All ranks call it: where none has made a
        step, as in a run taken up after its last epoch, they compile the program here, together."""
        comm, options = executor.placement.comm, self.script.options
        rows = [("strategy", options.strategy), ("seconds", f"{sum(history['seconds']):.1f}")]
        if options.strategy != "ps":
            sent = bytes_between_ranks(executor.program("train", feed), comm.world_size)
            rows.append(("between workers", f"{steps * comm.world_size * sent / 1e6:,.1f} MB"))
        if self.take_part:
            rows += _served(comm.client.status())
        if self.take_part and comm.rows.cached:
            cache, seen = next(iter(comm.rows.cached.values())).cache, comm.rows.counters
            saved = f"{seen.saved:.1%} of the bytes of rows; off for {seen.passed:,} of {seen.unique:,}"
            hits = f"{seen.hit_rate:.1%} of the distinct rows of a batch, {seen.fetched:,} of {seen.unique:,} pulled"
            rows += [("cache of a worker", _shown(cache)), ("cache hits", hits), ("cache saves", saved)]
        return "\n".join(f"{name:<19}  {value}" for name, value in rows)


def _way(field: str) -> Callable[[str], str]:
    """The type of an option that is this field of `Compress`."""
    return told(lambda text: getattr(Compress(**{field: text}), field))


def _served(states: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What servers tell of themselves."""
    moved = sum(server["received"] + server["sent"] for server in states)
    tables = sum(table["bytes"] for server in states for table in server["largest"] if table["rows"] > 1)
    return [
        ("to and from servers", f"{moved / 1e6:,.1f} MB under {states[0]['consistency']}"),
        ("tables on servers", f"{tables / 1e3:,.1f} kB"),
    ]


def _shown(cache: Cache) -> str:
    """A cache as a row of the table."""
    rows = cache.rows if isinstance(cache.rows, Mapping) else {"each table": cache.rows}
    sizes = (f"{n:.0%} of {table}" if isinstance(n, float) else f"{n} rows of {table}" for table, n in rows.items())
    return f"{cache.policy}, {', '.join(sizes)}, bound {cache.pull_bound}"
