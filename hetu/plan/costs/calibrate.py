"""Measure this machine for the planner: operators, memory, and under `heturun` the links between ranks.

Operators are timed inside the training steps of small models, where their operands lie as they do in real ones. Links
are measured between the ranks of the job: `heturun -w 4 python -m hetu profile`. `MachineProfile.learn` adds what a
model uses besides.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ... import nn, optim
from ...core.leaf import scope
from ...dist.comm.clock import Link
from ...dist.comm.comm import Comm
from ...dist.comm.world import world
from ...look.columns import in_columns
from ...ops import flatten, mean, placeholder, relu, softmax_cross_entropy
from ...system import memory
from .links import Cluster, DeviceFigures, Measured, Table
from .profile import MachineProfile, cache_path, fingerprint

BYTES = tuple(1 << exponent for exponent in range(8, 24, 2))
WIDTHS, BATCHES = (64, 256, 1024), (8, 64)
Model = tuple[list[Any], dict[str, np.ndarray]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here, not to this host's cache")
    parser.add_argument("--quick", action="store_true", help="small models and messages only")


def main(args: argparse.Namespace) -> int:
    comm = world()
    profile = measure(comm, quick=args.quick)
    if comm.rank == 0:
        path = profile.save(args.output or cache_path())
        print(table(profile))
        print(f"written to {path}")
    return 0


def measure(comm: Comm, *, quick: bool = False) -> MachineProfile:
    """The profile of this host. Ranks measure their links together, and rank 0 the operators while the others wait."""
    links = _link(comm, BYTES[:4] if quick else BYTES) if comm.world_size > 1 else Link()
    hosts = (comm.world_size,) if comm.world_size > 1 else Cluster().hosts
    profile = MachineProfile(measured_device(), Cluster(hosts, links, links), host=fingerprint())
    if comm.rank == 0:
        models = [*_models(WIDTHS[:1] if quick else WIDTHS, BATCHES[:1] if quick else BATCHES)]
        for build in tqdm(models, desc="operators", leave=False):
            profile.learn(*build())
    comm.barrier()
    return profile


def table(profile: MachineProfile) -> str:
    """What was measured, in words: rates, the operators that took longest, links."""
    d = profile.device
    lines = [f"{d.flops / 1e9:.1f} GFLOP/s, {d.bandwidth / 1e9:.1f} GB/s copied, {1e6 * d.launch:.1f} us per call"]
    lines.append(f"{1e6 * profile.step:.0f} us per step besides its instructions")
    ops: dict[str, list[float]] = {}
    for timing in profile.timings.values():
        ops.setdefault(timing.op, []).append(timing.seconds)
    lines.append(f"{len(profile.timings)} instructions of {len(ops)} operators; the slowest:")
    rows: list[tuple[str, ...]] = [("", "sizes", "least us", "most us")]
    for name in sorted(ops, key=lambda name: -max(ops[name]))[:12]:
        rows.append((name, f"{len(ops[name])}", *(f"{1e6 * f(ops[name]):.1f}" for f in (min, max))))
    lines += [f"  {line}" for line in in_columns(rows, right={1, 2, 3})]
    if isinstance(profile.cluster.inner, Measured):
        for kind, by_ranks in profile.cluster.inner.tables.items():
            for ranks, points in by_ranks.items():
                texts = [f"{1e6 * s:.0f}" for _, s in points.points]
                sizes = ", ".join(f"{nbytes:,.0f}" for nbytes, _ in points.points)
                lines.append(f"{kind} of {ranks} ranks, {sizes} bytes: {', '.join(texts)} us")
    return "\n".join(lines)


# -- the machine -------------------------------------------------------------------------------------------------


def measured_device() -> DeviceFigures:
    """The rates of a product of matrices and of a copy that no cache holds, and the time of the smallest call."""
    a = np.ones((512, 512), np.float32)
    large, small = np.ones(1 << 24, np.float32), np.ones(1, np.float32)
    other, least = np.empty_like(large), np.empty_like(small)
    product = _seconds(lambda: a @ a)
    copy = _seconds(lambda: np.copyto(other, large))
    launch = _seconds(lambda: [np.add(small, small, out=least) for _ in range(1000)]) / 1000
    return DeviceFigures(2 * 512**3 / product, 2 * large.nbytes / copy, memory(), launch)


def _seconds(call: Callable[[], object], repeat: int = 7) -> float:
    """The median CPU time of this thread in a call, after one to warm up."""
    times = []
    for _ in range(repeat + 1):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return statistics.median(times[1:])


# -- links -------------------------------------------------------------------------------------------------------


def _link(comm: Comm, sizes: tuple[int, ...]) -> Measured:
    """Collectives of all ranks and messages between the first two; seconds are the slowest rank's medians."""
    n = comm.world_size
    found: dict[str, list[tuple[int, float]]] = {}
    for nbytes in tqdm(sizes, desc="links", leave=False, disable=comm.rank > 0):
        for kind, call in _calls(comm, nbytes).items():
            seconds = _together(comm, call) / (2 if kind == "message" else 1)  # there and back
            found.setdefault(kind, []).append((nbytes, seconds))
    found["barrier"] = [(0, _together(comm, comm.barrier))]
    return Measured({kind: {2 if kind == "message" else n: Table(rows)} for kind, rows in found.items()})


def _calls(comm: Comm, nbytes: int) -> dict[str, Callable[[], object]]:
    """Each kind of communication in which a rank gives `nbytes`."""
    n = comm.world_size
    x, out = np.zeros(-(-nbytes // n) * n, np.uint8), np.empty(-(-nbytes // n) * n, np.uint8)
    every, part = np.empty(x.size * n, np.uint8), np.empty(x.size // n, np.uint8)

    def there_and_back() -> None:
        for sender in (0, 1):
            if comm.rank == sender:
                comm.send(x, 1 - sender)
            elif comm.rank < 2:
                comm.recv(out, sender)

    return {
        "all_reduce": lambda: comm.all_reduce(x, out),
        "reduce_scatter": lambda: comm.reduce_scatter(x, part),
        "all_gather": lambda: comm.all_gather(x, every),
        "all_to_all": lambda: comm.all_to_all(x, out),
        "broadcast": lambda: comm.broadcast(x),
        "message": there_and_back,
    }


def _together(comm: Comm, call: Callable[[], object], repeat: int = 7) -> float:
    """The median wall time of a call, of the slowest rank."""
    times = []
    for _ in range(repeat + 1):
        comm.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    slowest = np.array([statistics.median(times[1:])])
    comm.all_reduce(slowest, slowest, "max")
    return float(slowest[0])


# -- models ------------------------------------------------------------------------------------------------------


def _models(widths: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[Callable[[], Model]]:
    for batch in batches:
        for width in widths:
            for build in (_mlp, _cnn, _transformer):
                yield functools.partial(build, width, batch)


def _trained(y: Any, t: Any, optimizer: Any) -> list[Any]:
    loss = mean(softmax_cross_entropy(y, t))
    return [loss, optimizer.minimize(loss)]


def _values(*shape: int) -> np.ndarray:
    """Ordinary numbers: arithmetic on numbers that underflow takes many times as long."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _mlp(width: int, batch: int) -> Model:
    x, t = placeholder("x", (None, width)), placeholder("t", (None,), "int64")
    with scope("profile"):
        y = nn.Linear(width, 10)(nn.Linear(width, width, activation=relu)(x))
        entries = _trained(y, t, optim.SGD(0.01))
    return entries, {"x": _values(batch, width), "t": np.zeros(batch, np.int64)}


def _cnn(width: int, batch: int) -> Model:
    channels = width // 16
    x, t = placeholder("x", (None, channels, 16, 16)), placeholder("t", (None,), "int64")
    with scope("profile"):
        h = relu(nn.BatchNorm(channels)(nn.Conv2d(channels, channels, 3, padding=1)(x)))
        y = nn.Linear(channels * 256, 10)(flatten(h, 1))
        entries = _trained(y, t, optim.Momentum(0.01))
    return entries, {"x": _values(batch, channels, 16, 16), "t": np.zeros(batch, np.int64)}


def _transformer(width: int, batch: int, length: int = 16) -> Model:
    x, t = placeholder("x", (None, length), "int64"), placeholder("t", (None, length), "int64")
    with scope("profile"):
        h = nn.TransformerBlock(width, 4, causal=True, dropout=0.1)(nn.Embedding(1000, width)(x))
        entries = _trained(nn.Linear(width, 1000)(h), t, optim.Adam(1e-3))
    ids = np.arange(batch * length).reshape(batch, length) % 1000
    return entries, {"x": ids, "t": ids}
