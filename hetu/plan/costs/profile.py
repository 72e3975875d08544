"""How long things take: operators, links, and how fast each rank is, as measured or as described.

`profile.seconds(node)` looks for the very instruction (operator and types), else interpolates between the measured
sizes of the operator, else takes the rates of the machine. A size is weighed by its *ideal* time: the operations at the
machine's best rate or the bytes at its memory's, whichever takes longer. A time depends on types only, not on values or
the state of caches.

A planner asks `profile.seconds(node)` and `profile.cluster.link(ranks)`, which knows the seconds of collectives and
messages.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import statistics
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...core.errors import ArgumentError
from ...core.executor import Executor
from ...core.graph import Node
from ...core.kernels import kernels
from ...core.memory import types_of
from ...core.types import is_float, show_type
from ...dist.comm.seat import Seat
from ...dist.cut.on_ranks import spread
from ...files import write_text
from ...job import cores
from ...look.profiler import flops, profile_program, traffic
from ...plain_data import from_text, to_text
from ...ranges import AtLeast0, AtLeast1, Count, Positive
from .links import Cluster, DeviceFigures, Table

VERSION = 3
WORST = 8.0  # how many times the ideal a large operation may take
UNMEASURED = DeviceFigures(flops=20e9, bandwidth=10e9, launch=2e-6)


class Timing(NamedTuple):
    """One measured instruction: operator and dtype, floating-point operations, bytes, and seconds.

    `stem` is what instructions have in common that differ in the size of a batch only.
    """

    op: str
    flops: int
    nbytes: int
    seconds: AtLeast0
    stem: str


class Curve:
    """Ideal -> measured seconds of an operator: medians of what lies within a factor of 1.4, and lines between them.

    Beyond the largest size, an ideal second costs what it did at best, at most `WORST`: small ones may be all overhead.
    """

    def __init__(self, points: Sequence[tuple[float, float]], launch: float) -> None:
        near: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for ideal, seconds in points:
            near[round(2 * math.log2(ideal))].append((ideal, seconds))
        found = [tuple(map(statistics.median, zip(*rows))) for rows in near.values()]
        self.table = Table([(0.0, min(launch, min(found)[1])), *found])
        self.slope = min(WORST, *(seconds / ideal for ideal, seconds in found))

    def seconds(self, ideal: float) -> float:
        last, seconds = self.table.points[-1]
        return self.table.seconds(ideal) if ideal <= last else seconds + self.slope * (ideal - last)


@dataclass
class MachineProfile:
    """Times of one kind of machine, of the `cluster` that is made of it, and of its stragglers.

    `timings` maps an instruction to what was measured. `step` is the seconds of a step besides its instructions and the
    copying of what is fed. `speeds` are factors on the time that a rank computes (2.0: half as fast).

    >>> import hetu as ht
    >>> profile = MachineProfile(DeviceFigures(flops=1e9, bandwidth=1e9, launch=1e-6))
    >>> product = ht.placeholder("a", (100, 100)) @ ht.placeholder("b", (100, 100))
    >>> round(1e3 * profile.seconds(product), 3)  # ms for 2e6 operations: not measured, so computed
    2.001
    >>> profile.add(product, 0.003)
    >>> profile.seconds(product)
    0.003
    """

    device: DeviceFigures = UNMEASURED
    cluster: Cluster = field(default_factory=Cluster)
    timings: dict[str, Timing] = field(default_factory=dict)
    step: AtLeast0 = 0.0
    speeds: dict[int, Positive] = field(default_factory=dict)
    host: str = ""
    version: AtLeast1 = VERSION
    called: ClassVar = "a profile", "measure again: hetu profile; a plan that holds one is made anew"

    def __post_init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    @staticmethod
    def of(cluster: Cluster) -> MachineProfile:
        """The profile of a cluster by published figures: nothing is measured."""
        if cluster.device is None:
            fix = "give it one: Cluster(..., device=DeviceFigures(...))"
            raise ArgumentError(f"cluster {cluster.name!r} says nothing of its devices", fix=fix)
        return MachineProfile(cluster.device, cluster)

    # -- asking ------------------------------------------------------------------------------------------------------

    def seconds(self, node: Node) -> float:
        """The time of one instruction; of one that communicates, without what passes on the wire."""
        if (timing := self.timings.get(signature(node))) is not None:
            return timing.seconds
        if (node.op.on_host or node.op.reads_host) and self.device.host_bandwidth:
            return self.between(int(node.tensor.nbytes))
        ideal = self._ideal(flops(node), traffic(node))
        for name in (stem_of(node), family_of(node)):
            if (curve := self._curve(name)) is not None:
                return curve.seconds(ideal)
        rate = self.device.rate(_dtype_of(node))
        return self.device.launch + max(flops(node) / rate, traffic(node) / self.device.bandwidth)

    def between(self, nbytes: int) -> float:
        """The time of a copy to the memory of the host or back."""
        return self.device.launch + nbytes / self.device.host_bandwidth

    def overhead(self, nbytes: int) -> float:
        """The cost of a step besides its instructions when `nbytes` are fed."""
        return self.step + nbytes / self.device.bandwidth

    def _ideal(self, operations: int, nbytes: int) -> float:
        return max(operations / self.device.flops, nbytes / self.device.bandwidth)

    def _curve(self, op: str) -> Curve | None:
        if not self._curves:
            points: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for t in self.timings.values():
                for name in (t.op, t.stem):
                    points[name].append((max(self._ideal(t.flops, t.nbytes), 1e-12), t.seconds))
            self._curves = {
                name: Curve(found, self.device.launch)
                for name, found in points.items()
                if len(found) > 1 or "(" not in name  # one batch size tells nothing of another
            }
        return self._curves.get(op)

    # -- learning ----------------------------------------------------------------------------------------------------

    def add(self, node: Node, seconds: AtLeast0) -> None:
        """Remember a measured instruction; one that was measured before gets the mean."""
        key = signature(node)
        if key in self.timings:
            seconds = (seconds + self.timings[key].seconds) / 2
        self.timings[key] = Timing(family_of(node), flops(node), traffic(node), seconds, stem_of(node))
        self._curves.clear()

    def learn(
        self,
        entries: Sequence[Any],
        feed: Mapping[Any, Any],
        strategy: Any = None,
        *,
        rank: Count | None = None,
        world_size: AtLeast1 = 1,
        repeat: AtLeast1 = 5,
    ) -> None:
        """Time the instructions of one step by the CPU time of this thread; with a strategy, those of `rank`, by
        default of the first rank of each stage.

        The ranks need not exist: one after the other is played here, on as many threads as `heturun` gives each of
        them on one host. The variables are made, and the model trains on `feed` for a few steps.
        """
        # Copied, as what a rank is fed: one process may read the arrays of a dict where they lie.
        feed = MappingProxyType(dict(feed))
        with kernels("cpu").at_most(max(1, cores() // world_size)):
            seat = Seat(rank or 0, world_size)
            executor = Executor(entries, strategy=strategy, comm=None if strategy is None else seat)
            self._time(executor, seat, feed, repeat)
            stages = spread(executor.placement).strategy.grids() if rank is None and strategy is not None else ()
            for layout in stages:
                if 0 not in layout.ranks:
                    self.learn(entries, feed, strategy, rank=layout.ranks[0], world_size=world_size, repeat=repeat)

    def _time(self, executor: Executor, seat: Seat, feed: Mapping[Any, Any], repeat: int) -> None:
        """Add the instructions of a step of `executor`, and what a step takes besides."""
        executor.run(feed)
        steps = []
        for _ in range(repeat):
            began = seat.timer()
            executor.run(feed)
            steps.append(1e-9 * (seat.timer() - began))
        program = executor.program(feed)
        measured = profile_program(program, repeat, timer=seat.timer)
        together: dict[str, list[tuple[Node, float]]] = defaultdict(list)
        for node, row in measured.instructions:
            together[signature(node)].append((node, row.seconds))
        for rows in together.values():
            self.add(rows[0][0], statistics.median(seconds for _, seconds in rows))
        fed = sum(buffer.nbytes for buffer in program.feeds.values())
        rest = max(0.0, statistics.median(steps) - measured.seconds - fed / self.device.bandwidth)
        if rest:
            self.step = min(self.step or rest, rest)

    # -- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """What `from_json` reads."""
        return to_text(self)

    @staticmethod
    def from_json(text: str) -> MachineProfile:
        """The profile that `to_json` wrote. ArgumentError for anything else.

        >>> MachineProfile.from_json(MachineProfile(step=1e-4).to_json()) == MachineProfile(step=1e-4)
        True
        """
        return from_text(MachineProfile, text)

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the profile, by default to this host's place in the cache; returns where."""
        path = cache_path() if path is None else Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.to_json())
        return path

    @staticmethod
    def load(path: str | os.PathLike[str] | None = None) -> MachineProfile:
        """Read a profile, by default that of this host. ArgumentError if there is none."""
        path = cache_path() if path is None else Path(path)
        try:
            return MachineProfile.from_json(path.read_text("utf-8"))
        except OSError as error:
            raise ArgumentError(f"no profile at {path}: {error.strerror}", fix="measure: hetu profile") from None

    def on(self, cluster: Cluster) -> MachineProfile:
        """The same machine in another cluster."""
        return replace(self, cluster=cluster)


def signature(node: Node) -> str:
    """What an instruction is measured as: its operator and types, and the operators of operands that are views."""
    operands = [f"{i.op.name} {show_type(i.type)}" if i.op.view_rule else show_type(i.type) for i in node.inputs]
    return f"{node.op.name}({', '.join(operands)}) {show_type(node.type)}"


def family_of(node: Node) -> str:
    """The operator with the dtype in which it computes."""
    return f"{node.op.name} {_dtype_of(node).name}"


def _dtype_of(node: Node) -> np.dtype:
    dtypes = [t.dtype for n in (node, *node.inputs) for t in types_of(n)]
    return next(filter(is_float, dtypes), dtypes[0])


def stem_of(node: Node) -> str:
    """The operator and its types without their first axes, among which is the batch."""
    types = [t for n in (node, *node.inputs) for t in types_of(n)]
    return f"{node.op.name}({', '.join(str(t.shape[1:]) for t in types)})"


def fingerprint() -> str:
    """What the times of a host depend on: processor, cores, threads of BLAS, NumPy."""
    model = platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    threads = [os.environ.get(f"{name}_NUM_THREADS", "") for name in ("OMP", "OPENBLAS", "MKL")]
    parts = [platform.machine(), model, os.cpu_count(), *threads, np.__version__]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cache_path() -> Path:
    """Where this host's profile is kept: `$XDG_CACHE_HOME/hetu/`, else `~/.cache/hetu/`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hetu" / f"profile-{fingerprint()}.json"


def known_profile() -> MachineProfile:
    """The profile of this host if it was measured, else typical figures; RuntimeWarning if it cannot be read."""
    if not (path := cache_path()).exists():
        return MachineProfile()
    try:
        return MachineProfile.load()
    except ArgumentError as error:
        said = f"plans are made for a typical machine, as {path} is {error.message}; {error.fix}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return MachineProfile()
