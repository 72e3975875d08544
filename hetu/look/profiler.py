"""Where the time of a step goes: seconds, bytes and floating-point operations of every instruction.

Instructions are timed one by one, so what runs is exactly the program of `Executor.run`. Left out: time outside of the
program (feeding, fetching).
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, did_you_mean, public
from ..core.executor import Executor
from ..core.graph import Node
from ..core.memory import types_of
from ..core.op import LEAVES, Role
from ..core.program import Program
from ..core.types import TensorType, show_type
from ..ranges import AtLeast1
from .columns import in_columns
from .html_table import bar_html, table_html
from .picture import family
from .timeline import write_trace


@dataclass(frozen=True)
class ProfileRow:
    """`calls` instructions under one label: median seconds of a step, bytes read and written, operations."""

    label: str
    family: str
    calls: int
    seconds: float
    nbytes: int
    flops: int

    @property
    def gflops_per_second(self) -> float:
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gbytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


_LABELS: dict[str, Callable[[Node], str]] = {
    "op": lambda node: node.op.name,
    "layer": lambda node: _layer(node),
    "line": lambda node: _line(node),
    "node": lambda node: f"{node.op.name} {_few_types(node)} at {node.site}",
}
MOST_OF_TYPES, MOST_OF_LABEL = 24, 70  # characters


def _few_types(node: Node) -> str:
    """The type; of many results those of the first, and how many more there are."""
    texts = [str(t) for t in types_of(node)]
    ends = accumulate(len(t) + 2 for t in texts)
    first = max(sum(end <= MOST_OF_TYPES for end in ends), 1)
    rest = len(texts) - first
    return f"({', '.join(texts[:first])}, ... {rest} more)" if rest else show_type(node.type)


def _line(node: Node) -> str:
    """Where a node was written, and what stands there: cells of a notebook have lines of the same number."""
    text = node.site.excerpt().split("\n")[0] if node.site else ""
    return f"{node.site}  {text.strip()}".rstrip()


def _layer(node: Node) -> str:
    """The layer, with gradients apart; updates and what stands in no layer are named by their family."""
    kind = family(node)
    layer = node.tags.get("layer")
    if layer is None or kind in ("update", "communication"):
        return f"({kind})"
    return f"{layer} backward" if kind == "gradient" else layer


@dataclass(frozen=True)
class Profile:
    """Times of one program. `print(profile)` sums them by operator; see `table` for other views.

    >>> import hetu as ht
    >>> measured = profile(ht.Executor([ht.exp(ht.constant(1.0)) + 1.0]), repeat=1)
    >>> measured.seconds == sum(row.seconds for row in measured.rows(by="line"))
    True
    """

    instructions: tuple[tuple[Node, ProfileRow], ...]

    @property
    def seconds(self) -> float:
        """Time of one step in all instructions."""
        return sum(row.seconds for _, row in self.instructions)

    def rows(self, by: str = "op") -> list[ProfileRow]:
        """Sums by "op", "layer", "line" (of the user) or "node" (every instruction), the slowest first.

        What a line has written includes its gradient.
        """
        if by not in _LABELS:
            raise ArgumentError(f"cannot sum a profile by {by!r}", fix=did_you_mean(by, _LABELS))
        parts: dict[tuple[str, int], list[ProfileRow]] = {}
        for index, (node, row) in enumerate(self.instructions):
            parts.setdefault((_LABELS[by](node), index if by == "node" else 0), []).append(row)
        return sorted((_total(label, rows) for (label, _), rows in parts.items()), key=lambda row: -row.seconds)

    def table(self, by: str = "op", limit: int = 30) -> str:
        """The rows as text; those beyond `limit` are left out, and counted."""
        rows = self.rows(by)
        cells = [self._cells(row) for row in [*rows[:limit], _total("step", rows)]]
        heads = (by, "calls", "ms", "share", "MB", "MFLOP", "GB/s", "GFLOP/s")
        texts = in_columns([heads, *cells], right=range(1, len(heads)))
        rule = "-" * len(texts[0])
        rest = [f"... and {len(rows) - limit} more"] if len(rows) > limit else []
        return "\n".join([texts[0], rule, *texts[1:-1], *rest, rule, texts[-1]])

    def _cells(self, row: ProfileRow) -> tuple[str, ...]:
        return (
            _cut(row.label),
            f"{row.calls}",
            f"{row.seconds * 1e3:.3f}",
            f"{100 * row.seconds / (self.seconds or 1):.1f}%",
            f"{row.nbytes / 1e6:.3f}",
            f"{row.flops / 1e6:.2f}",
            f"{row.gbytes_per_second:.2f}",
            f"{row.gflops_per_second:.2f}",
        )

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Profile of {len(self.instructions)} instructions, {self.seconds * 1e3:.3f} ms per step>"

    def _repr_html_(self) -> str:
        """Bars by operator."""
        rows = self.rows()
        longest = max((row.seconds for row in rows), default=0.0) or 1.0
        lines: list[Sequence[str]] = [("op", "", "ms", "share", "calls", "GB/s", "GFLOP/s")]
        for row in rows:
            label, calls, ms, share, _, _, *rates = map(escape, self._cells(row))
            lines.append((label, bar_html(200 * row.seconds / longest, row.family), ms, share, calls, *rates))
        return f"{table_html(lines, right=range(2, 7))}<p>{escape(repr(self)[1:-1])}</p>"

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step as JSON for chrome://tracing or Perfetto: the median times, laid end to end."""
        events, start = [], 0.0
        for node, row in self.instructions:
            details = {"type": show_type(node.type), "line": str(node.site), "bytes": row.nbytes, "flop": row.flops}
            times = {"ts": start * 1e6, "dur": row.seconds * 1e6}  # microseconds
            events.append(
                {"name": node.op.name, "cat": row.family, "ph": "X", "pid": 0, "tid": 0, **times, "args": details}
            )
            start += row.seconds
        write_trace(path, events)


def _total(label: str, rows: list[ProfileRow]) -> ProfileRow:
    return ProfileRow(
        label,
        rows[0].family if rows else "compute",
        sum(row.calls for row in rows),
        sum(row.seconds for row in rows),
        sum(row.nbytes for row in rows),
        sum(row.flops for row in rows),
    )


def _cut(label: str) -> str:
    """A label without its middle if it is too long: it begins with what it is and ends with where."""
    if len(label) <= MOST_OF_LABEL:
        return label
    end = MOST_OF_LABEL // 3
    return f"{label[: MOST_OF_LABEL - end - 1]}…{label[-end:]}"


# -- measuring -----------------------------------------------------------------------------------------------------


@public
def profile(
    executor: Executor,
    name: str | Mapping[Any, Any] | None = None,
    feed: Mapping[Any, Any] | None = None,
    *,
    repeat: AtLeast1 = 5,
) -> Profile:
    """Time one step of a sub-graph, `repeat` times after a warm-up; variables have their old values afterward.

    The arguments are those of `Executor.run`.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 8))
    >>> measured = profile(ht.Executor([ht.exp(x @ np.ones((8, 4), np.float32))]), {x: np.ones((2, 8))})
    >>> sorted(row.label for row in measured.rows()), sum(row.flops for row in measured.rows())
    (['exp', 'matmul'], 136)
    """
    if not isinstance(name, str):
        name, feed = None, name if feed is None else feed
    program = executor.program(name, feed)
    for key, value in (feed or {}).items():
        buffer = program.feeds.get(key.name if isinstance(key, Node) else key)
        if buffer is not None:
            buffer[...] = program.xp.asarray(value, dtype=buffer.dtype)
    return profile_program(program, repeat)


def profile_program(program: Program, repeat: int = 5, timer: Callable[[], int] = time.perf_counter_ns) -> Profile:
    """Time the instructions of `program` on what lies in its feed buffers; `timer` gives nanoseconds."""
    before = {variable: program.state.arrays[variable.name].copy() for variable in program.updates}
    times: list[list[float]] = [[] for _ in program.steps]
    try:
        with np.errstate(all="ignore"):
            np.setbufsize(2048)  # as in `Executor.run`; ends with the block
            for _ in range(repeat + 1):
                for step, seen in zip(program.steps, times):
                    seen.append(_seconds(step.calls, program.state.device.kind, program.xp, timer))
                for variable, value in before.items():
                    program.state.arrays[variable.name][...] = value
    finally:
        for variable, value in before.items():
            program.state.arrays[variable.name][...] = value
    rows = []
    for step, (_, *seen) in zip(program.steps, times):  # the first run warms up
        node = step.node
        seconds = statistics.median(seen)
        rows.append((node, ProfileRow(node.op.name, family(node), 1, seconds, traffic(node), flops(node))))
    return Profile(tuple(rows))


def _seconds(calls: Sequence[Callable[[], Any]], kind: str, xp: Any, timer: Callable[[], int]) -> float:
    """Time of the calls of one instruction."""
    if kind == "gpu":
        return seconds_on_device(calls, xp)
    start = timer()
    for call in calls:
        call()
    return (timer() - start) * 1e-9


def seconds_on_device(calls: Sequence[Callable[[], Any]], xp: Any) -> float:
    """Time of calls on a GPU between two events of the stream: of short ones, how fast the host launches them."""
    begin, end = xp.cuda.Event(), xp.cuda.Event()
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(xp.cuda.get_elapsed_time(begin, end)) * 1e-3


# -- counting ------------------------------------------------------------------------------------------------------


def traffic(node: Node) -> int:
    """Bytes of the operands that are read and of the results; caches are not considered."""
    return sum(int(t.nbytes) for t in (*_operands(node), *types_of(node)))


def _operands(node: Node) -> list[TensorType]:
    """Types of the inputs whose values are used."""
    return [t for k, i in enumerate(node.inputs) if k not in node.op.like for t in types_of(i)]


_STILL = LEAVES | {Role.ITEM, Role.LOOKUP, Role.SCATTER, Role.MOVE, Role.HINT}  # roles in which nothing is computed


def flops(node: Node) -> int:
    """Floating-point operations of a node, as its sharding rule `dims` tells.

    A contraction multiplies and adds once for every combination of its factors, unless its operator counts otherwise;
    other work is one operation per element of the largest operand or result, and moving elements none.

    >>> import hetu as ht
    >>> flops(ht.placeholder("a", (2, 3)) @ ht.placeholder("b", (3, 5)))
    60
    """
    if node.role in _STILL:
        return 0
    if node.op.flops_rule is not None:
        return node.op.flops_rule(node.type, *(i.type for i in node.inputs), **node.attrs)
    sizes, shared, kept = _factors(node)
    joined = {factor for factor, inputs in shared.items() if len(inputs) > 1}
    if joined - kept:  # what one input alone has is summed, or looked up, before the product
        return 2 * math.prod(size for factor, size in sizes.items() if factor in joined | kept)
    return max((int(t.size) for t in (*_operands(node), *types_of(node))), default=0)


def _factors(node: Node) -> tuple[dict[Any, int], dict[Any, set[int]], set[Any]]:
    """Size of each factor of the rule, the inputs that have it, and the factors of the results."""
    dims = node.op.dims(*(i.type for i in node.inputs), **node.attrs) if callable(node.op.dims) else node.op.dims
    sizes: dict[Any, int] = {}
    shared: dict[Any, set[int]] = {}
    kept: set[Any] = set()
    if not isinstance(dims, str):
        return sizes, shared, kept
    left, right = (side.split(",") for side in dims.split("->"))
    for position, (term, read) in enumerate(zip(left, node.inputs)):
        for factor, size in _named_axes(term, read.shape).items():
            sizes[factor] = max(sizes.get(factor, 1), size)
            shared.setdefault(factor, set()).add(position)
    for term, type_ in zip(right, types_of(node)):
        kept.update(_named_axes(term, type_.shape))
    return sizes, shared, kept


def _named_axes(term: str, shape: tuple[Any, ...]) -> dict[Any, int]:
    """The size of every factor of one term; axes under `...` are named by their distance from its end."""
    tokens = re.findall(r"\.\.\.|\(\w+\)|\w", term)
    if "..." not in tokens:
        return {t: int(s) for t, s in zip(tokens, shape) if t != "1"}
    before = tokens.index("...")
    after = len(tokens) - before - 1
    inner = shape[before : len(shape) - after]
    named: dict[Any, int] = {(len(inner) - k): int(s) for k, s in enumerate(inner)}
    named.update(zip(tokens[:before], map(int, shape)))
    named.update(zip(tokens[before + 1 :], map(int, shape[len(shape) - after :])))
    return named
