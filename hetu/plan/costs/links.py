"""What joins ranks, and how long it takes: measured tables of bytes -> seconds, and clusters of hosts.

A straight line through latency and bandwidth misses measured collectives by up to a factor of 2, so tables are
interpolated between the measured sizes. A cluster that you do not have is described by published figures; its links
are lines (`hetu.dist.Link`), which have the same methods. It is plain text: `cluster("dgx-h100:16")` reads
`hetu/plan/clusters/dgx-h100.toml`, or a file of your own, which says how many devices a host has, what each computes
with, and what joins them inside of a host and between hosts. Left out: contention between groups, topologies beyond
"same host or not", and files of hosts that are not alike, for which `Cluster` is written in Python.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import numpy as np

from ...core.errors import ArgumentError, HetuError, did_you_mean, public
from ...dist.comm.clock import Link
from ...plain_data import form, read, write_fields
from ...ranges import AtLeast0, AtLeast1, Count, Endless, Range


class Channel(Protocol):
    """What `Link` and `Measured` have in common: the seconds of a message, and of a collective of `nbytes` per rank."""

    def message(self, nbytes: int) -> float: ...

    def seconds(self, kind: str, ranks: int, nbytes: int) -> float: ...


def in_bucket(link: Channel, kind: str, ranks: int, nbytes: int) -> float:
    """Seconds of a collective that shares a bucket with others and so has no messages of its own."""
    return link.seconds(kind, ranks, nbytes) - link.seconds(kind, ranks, 0)


class Table:
    """Measured (amount, seconds) points; between them the time is a straight line, beyond them it goes on.

    >>> table = Table([(100, 1.0), (200, 1.5), (400, 4.5)])
    >>> table.seconds(50), table.seconds(150), table.seconds(300), table.seconds(600)
    (1.0, 1.25, 3.0, 6.75)
    """

    def __init__(self, points: Iterable[Sequence[float]]) -> None:
        self.points = sorted({float(amount): float(seconds) for amount, seconds in points}.items())
        if not self.points:
            raise ArgumentError("a table without points", fix="measure at least once")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.points == other.points

    def seconds(self, amount: AtLeast0) -> float:
        """Below the first point the cost is all latency, so it stays; beyond the last it grows in proportion."""
        points = self.points
        k = bisect.bisect_left(points, (amount,))
        if k == 0:
            return points[0][1]
        if k == len(points):
            return points[-1][1] * amount / points[-1][0]
        (a, low), (b, high) = points[k - 1 : k + 1]
        return low + (high - low) * (amount - a) / (b - a)


@dataclass(frozen=True)
class Measured:
    """A link as it was measured: kind -> ranks -> (bytes, seconds) points; messages are between 2 ranks.

    For another number of ranks the nearest measured one is scaled as the ring and tree algorithms scale.

    >>> link = Measured({"all_reduce": {2: Table([(1000, 1e-3)])}, "message": {2: Table([(0, 1e-5), (1000, 2e-5)])}})
    >>> link.message(1000), link.seconds("all_reduce", 2, 1000), link.seconds("all_reduce", 4, 1000)
    (2e-05, 0.001, 0.0015)
    """

    tables: Mapping[str, Mapping[int, Table]]

    def message(self, nbytes: Count) -> float:
        return self.tables["message"][2].seconds(nbytes)

    def seconds(self, kind: str, ranks: AtLeast1, nbytes: Count) -> float:
        if kind not in self.tables:
            raise ArgumentError(f"the link was not measured for {kind!r}", fix=did_you_mean(kind, self.tables))
        measured = self.tables[kind]
        near = min(measured, key=lambda n: abs(math.log(n / ranks)))
        wire = Link(latency=0.0, bandwidth=1.0)  # the algorithm alone
        scale = 1.0 if near == ranks else wire.seconds(kind, ranks, 1000) / (wire.seconds(kind, near, 1000) or 1.0)
        return measured[near].seconds(nbytes) * (scale or math.log2(ranks) / math.log2(near))


form(Table, lambda table: table.points, Table)
form(Channel, write_fields, partial(read, Link | Measured))


@dataclass(frozen=True)
class DeviceFigures:
    """What one rank computes with.

    flops: operations/s of large products. bandwidth: bytes/s of its memory. memory: its bytes. launch: seconds per
    call. host_bandwidth: bytes/s between its memory and that of the host, 0 where they are the same. flops32:
    operations/s where numbers have more than 16 bits, 0 where they are as many. peak: operations/s that its sheet
    promises, of which a utilization is told, 0 where `flops` are.

    >>> DeviceFigures(flops=989e12, bandwidth=3.35e12, memory=80e9).launch
    5e-06
    """

    flops: Endless
    bandwidth: Endless
    memory: Endless = math.inf
    launch: AtLeast0 = 5e-6
    host_bandwidth: Annotated[float, Range(0, endless=True)] = 0.0
    flops32: AtLeast0 = 0.0
    peak: AtLeast0 = 0.0

    def rate(self, dtype: np.dtype) -> float:
        """Operations/s on numbers of this type."""
        return self.flops32 if self.flops32 and dtype.itemsize > 2 else self.flops

    def promised(self, dtype: np.dtype) -> float:
        """Operations/s on numbers of this type by the sheet."""
        return self.peak if self.peak and self.rate(dtype) == self.flops else self.rate(dtype)


@dataclass(frozen=True)
class Cluster:
    """`hosts` is the number of ranks on each host, in the order of the ranks.

    `inner` joins ranks of one host, `outer` those of different hosts. `device` is None where it was measured. `price`:
    dollars per device and hour. `rails`: network cards of a host, each as fast as `outer`; ranks of one host that
    communicate in one group share the work among them. `ht.plan.cluster` reads one from text.

    >>> cluster = Cluster((2, 2), inner=Link(1e-6, 1e11), outer=Link(1e-5, 1e10))
    >>> cluster.link((0, 1)) is cluster.inner, cluster.link((1, 2)) is cluster.outer
    (True, True)
    """

    hosts: tuple[AtLeast1, ...] = (1 << 20,)
    inner: Channel = field(default_factory=Link)
    outer: Channel = field(default_factory=Link)
    device: DeviceFigures | None = None
    name: str = ""
    price: AtLeast0 | None = None
    rails: AtLeast1 = 1
    called: ClassVar = "a cluster", "measure again: hetu profile"

    @property
    def world_size(self) -> int:
        return sum(self.hosts)

    def host(self, rank: Count) -> int:
        """The host of a rank."""
        return bisect.bisect_right(self._ends, rank)

    @cached_property
    def _ends(self) -> list[int]:
        return [*itertools.accumulate(self.hosts)]

    def link(self, ranks: Sequence[Count]) -> Channel:
        """What a group of ranks communicates over: the slowest link among them."""
        hosts = [bisect.bisect_right(self._ends, rank) for rank in ranks]
        if min(hosts) == max(hosts):
            return self.inner
        rails = min(self.rails, *Counter(hosts).values()) if len(ranks) > 3 else 1
        if rails > 1 and isinstance(self.outer, Link) and isinstance(self.inner, Link):
            return Link(self.outer.latency, min(rails * self.outer.bandwidth, self.inner.bandwidth))
        return self.outer


KNOWN = Path(__file__).parent.parent / "clusters"
EXAMPLE = KNOWN / "dgx-h100.toml"
LIMIT = 1 << 16  # bytes of a file
MOST = 1 << 16  # hosts
T = TypeVar("T")


def cluster(described: str | os.PathLike[str]) -> Cluster:
    """The cluster that a text describes: a known name or the path of a `.toml` file, and behind a colon how many hosts.

    Known are those of `hetu/plan/clusters/`, by data sheets: each figure stands there with its source, and a file of
    your own may begin as a copy. Without a colon the file says how many `hosts` there are, one if it does not.
    Operations are those of dense products in 16 bits (`flops`, and `peak` by the sheet) and in float32 (`flops32`), and
    bytes over links those in one direction. ArgumentError says what is wrong with a file, and where.

    >>> dgx = cluster("dgx-h100:16")
    >>> dgx.name, dgx.world_size, dgx.device.memory
    ('16 x DGX H100', 128, 80000000000.0)
    """
    text = os.fspath(described)
    name, hosts = re.fullmatch(r"(.*?)(?::(\w*))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if not name.endswith(".toml") and name not in known():
        fix = f"{did_you_mean(name, known())} (or pass the path of a .toml file)"
        raise ArgumentError(f"there is no cluster {name!r:.80}", fix=fix)
    if hosts is not None and not (hosts.isdecimal() and 1 <= int(hosts) <= MOST):
        raise ArgumentError(f"{text!r:.80} has {hosts!r:.20} hosts", fix=f"write a number of hosts: {name}:16")
    path = Path(name) if name.endswith(".toml") else KNOWN / f"{name}.toml"
    tables = read_toml(path)
    parts: dict[str, Callable[..., Any]] = {"device": DeviceFigures, "inner": _link, "outer": _link}
    for key, make in parts.items():
        if key in tables:
            tables[key] = made(make, tables[key], f"{path}, [{key}]")
    if hosts is not None:
        tables["hosts"] = int(hosts)
    return made(_cluster, tables, f"{path}")


def known() -> list[str]:
    """The names of clusters that are shipped."""
    return sorted(path.stem for path in KNOWN.glob("*.toml"))


@public
def _cluster(
    *,
    name: str,
    devices: AtLeast1,
    device: DeviceFigures,
    inner: Link,
    outer: Link,
    hosts: Annotated[int, Range(1, MOST)] = 1,
    price: AtLeast0 | None = None,
    rails: AtLeast1 = 1,
) -> Cluster:
    return Cluster((devices,) * hosts, inner, outer, device, f"{hosts} x {name}", price, rails)


@public
def _link(*, latency: AtLeast0, bandwidth: Endless) -> Link:
    return Link(latency, bandwidth)


def read_toml(path: Path) -> dict[str, Any]:
    """What a file of TOML says; ArgumentError where there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}", fix="pass the path of a .toml file") from None
    if len(content) > LIMIT:
        raise ArgumentError(f"{path} has more than {LIMIT >> 10} KiB", fix="pass a file that describes one thing")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no TOML: {error!s:.200}", fix=f"write it as {EXAMPLE}") from None


def made(make: Callable[..., T], table: Any, where: str) -> T:
    """What a function makes of the keys of a table; ArgumentError says `where` one is wrong, missing or unknown."""
    if not isinstance(table, dict):
        raise ArgumentError(f"{where}: got {table!r:.80}", fix="write a table: keys with = below a line in brackets")
    try:
        return make(**table)
    except HetuError as error:
        _, _, message = error.message.partition(" ")  # without the name of the function
        raise ArgumentError(f"{where}: {message}", fix=error.fix.replace("=...", " = ...")) from None
