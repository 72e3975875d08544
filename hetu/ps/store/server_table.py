"""One table on a server: values (rows, cols) with a version for every row, their rule, and pushes held back.

A dense parameter arrives cut into blocks, each a table of one row; an embedding table arrives as ranges of rows. A
version counts the updates a row has had, which is what a cache compares. It knows no workers and clocks (`store.py`
does): every push that arrives here has been allowed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, ShapeError, ValueRangeError
from ...core.types import as_dtype, is_float
from .messages import DTYPES, FRAME_LIMIT, Kind, Message
from .rules import RuleSpec, ServerRule, check_rule

LARGE = 1 << 16  # bytes of a gradient that take longer to copy than to find
REDUCTIONS = ("mean", "sum")
_ONE = np.array(1, "<i8")


@dataclass(frozen=True)
class TableSpec:
    """What a server is told of a table: its name, its first row in the whole, its size, and how pushes change it.

    `reduce` is "mean" (a push weighs 1 / workers, as in large-batch training) or "sum" (as it is). A higher
    `generation` of a table that is there means that all its rows are to be given values anew.

    >>> TableSpec.parse({"name": "w", "start": 0, "rows": 2, "cols": 3}).footprint
    66
    """

    name: str
    start: int
    rows: int
    cols: int
    dtype: str = "float32"
    rule: RuleSpec = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    reduce: str = "mean"
    generation: int = 0

    @classmethod
    def parse(cls, meta: dict[str, Any]) -> TableSpec:
        """From the JSON of a CREATE message; ArgumentError unless every field is there and in its range."""
        wanted = {"name": (str,), "start": (int,), "rows": (int,), "cols": (int,), "dtype": (str,),
                  "rule": (str, dict), "options": (dict,), "reduce": (str,), "generation": (int,)}  # fmt: skip
        for name, value in meta.items():
            if type(value) not in wanted.get(name, ()):
                raise ArgumentError(f"{name}={value!r} in the description of a table")
        missing = {"name", "start", "rows", "cols"} - set(meta)
        if missing:
            raise ArgumentError(f"the description of a table misses {', '.join(sorted(missing))}")
        spec = cls(**meta)
        if min(spec.start, spec.rows, spec.cols, spec.generation) < 0 or spec.reduce not in REDUCTIONS:
            raise ArgumentError(f"a table {spec}", fix="sizes are >= 0 and reduce is mean or sum")
        if spec.dtype not in [dtype.name for dtype in DTYPES]:
            raise ArgumentError(f"a table of {spec.dtype}", fix="use float32, float64, float16, int32, int64 or uint8")
        if spec.reduce == "mean" and not is_float(as_dtype(spec.dtype)):
            raise ArgumentError(f"the mean of pushes of {spec.dtype}", fix='use reduce="sum" for integers')
        check_rule(spec.rule, spec.options)
        return spec

    def meta(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def footprint(self) -> int:
        """Bytes a server needs for it: values, optimizer state, a gradient, versions."""
        arrays = 2 + check_rule(self.rule, self.options).states
        return self.rows * (self.cols * np.dtype(self.dtype).itemsize * arrays + 9)


class ServerTable:
    """The values of one block, their versions, and the pushes that wait for their clock to close."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.values = np.zeros((spec.rows, spec.cols), as_dtype(spec.dtype).newbyteorder("<"))
        self.versions = np.zeros(spec.rows, "<i8")
        self.filled = np.zeros(spec.rows, bool)
        self.rule = ServerRule(spec.rule, self.values, spec.options)
        self.pending: list[Message] = []

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The values and the state that the rule keeps for them."""
        return self.values, *self.rule.states

    def check(self, message: Message) -> None:
        """Refuse what does not fit, before anything is changed."""
        ids, values, counts = message.ids, message.values, message.counts
        rows = self.spec.rows if ids is None else len(ids)
        if ids is not None and rows:
            if ids[0] < 0 or ids[-1] >= self.spec.rows:
                raise ValueRangeError(f"row ids {ids[0]}..{ids[-1]}, {self.spec.name} has {self.spec.rows} rows here")
            if rows > 1 and not (ids[1:] > ids[:-1]).all():
                raise ValueRangeError("row ids are not strictly increasing", fix="send every row once, in order")
        cols = self.spec.cols * (len(self.arrays) if message.kind is Kind.RESTORE else 1)
        if values is not None and (values.shape != (rows, cols) or values.dtype != self.values.dtype):
            raise ShapeError(
                f"got {values.dtype}{list(values.shape)} for {self.spec.name}, "
                f"wanted {self.values.dtype}[{rows}, {cols}]"
            )
        if message.kind is Kind.RESTORE and type(message.meta.get("step")) is not int:
            raise ArgumentError(f"optimizer state of {self.spec.name} with the step {message.meta.get('step')!r}")
        if counts is not None and values is not None and (counts < 1).any():
            raise ValueRangeError("a pushed row counts less than one update")

    def check_readable(self, message: Message) -> None:
        """Refuse an answer that no message could carry."""
        rows = self.spec.rows if message.ids is None else len(message.ids)
        arrays = len(self.arrays) if message.kind is Kind.STATE else 1
        if rows * self.spec.cols * arrays * self.values.itemsize > FRAME_LIMIT:
            raise ValueRangeError(f"{rows} rows of {self.spec.name} do not fit a message", fix="ask for fewer at once")

    # -- writing ---------------------------------------------------------------------------------------------

    def assign(self, message: Message) -> None:
        """First values: rows that have some already keep them, so that every worker may send the same ones.

        Those of a later generation wait for `restore`: a worker that starts late sends what is no longer wanted.
        """
        if self.spec.generation:
            return
        ids = np.arange(self.spec.rows) if message.ids is None else message.ids
        new = ~self.filled[ids]
        self.values[ids[new]] = message.values[new]
        self.filled[ids] = True

    def refill(self, spec: TableSpec) -> None:
        """A new generation: every row waits for what it is to be from now on."""
        self.spec, self.filled[:] = spec, False

    def restore(self, message: Message) -> None:
        """Values and optimizer state, side by side, of the rows of this generation that have none yet."""
        ids = np.arange(self.spec.rows) if message.ids is None else message.ids
        new = ~self.filled[ids]
        for array, part in zip(self.arrays, np.split(message.values, len(self.arrays), axis=1)):
            array[ids[new]] = part[new]
        self.filled[ids], self.rule.step[...] = True, message.meta["step"]

    def apply(self, pushes: list[Message], weight: float) -> None:
        """One update of the rule by the weighted sum of these pushes, added in the order given."""
        if any(push.ids is None for push in pushes):
            alone = len(pushes) == 1 and weight == 1 and pushes[0].values.nbytes >= LARGE
            if not (alone and self.rule.apply_at_once(pushes[0].values)):
                self.rule.apply(lambda out: self._accumulate(out, pushes, weight))
        else:
            ids, rows = _sum_rows(pushes)
            self.rule.apply_rows(ids, rows if weight == 1 else rows * rows.dtype.type(weight))
        for push in pushes:
            if push.ids is None:
                np.add(self.versions, _ONE, self.versions)
            else:
                self.versions[push.ids] += 1 if push.counts is None else push.counts

    def _accumulate(self, out: np.ndarray, pushes: list[Message], weight: float) -> None:
        first, rest = pushes[0], pushes
        if first.ids is None and len(pushes) == 1 and weight != 1:
            np.multiply(first.values, out.dtype.type(weight), out)
            return
        if first.ids is None:
            np.copyto(out, first.values)
            rest = pushes[1:]
        else:
            out.fill(0)
        for push in rest:
            out[slice(None) if push.ids is None else push.ids] += push.values
        if weight != 1:
            np.multiply(out, out.dtype.type(weight), out)

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, message: Message) -> np.ndarray:
        """The rows that a message asks for, where it has room for them. Without room, all rows are the table itself,
        so that the sending is their only copy."""
        ids, room = message.ids, message.room
        if ids is None and room is None:
            return self.values
        out = message.place(self.spec.rows if ids is None else len(ids), self.spec.cols, self.values.dtype)
        if ids is None:
            np.copyto(out, self.values)
        else:
            np.take(self.values, ids, axis=0, out=out, mode="clip")  # which does not buffer; ids have been checked
        return out

    def state(self, ids: np.ndarray | None) -> np.ndarray:
        """Values and optimizer state of rows, side by side."""
        return np.concatenate([a if ids is None else np.take(a, ids, axis=0) for a in self.arrays], axis=1)

    def newer(self, ids: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the rows `ids` those whose version is above their limit: (ids, versions, rows)."""
        versions = self.versions[ids]
        newer = versions > limits
        ids = ids[newer]
        return ids, versions[newer], np.take(self.values, ids, axis=0)


def _sum_rows(pushes: list[Message]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids of several pushes and the sum of their rows, added in the order of the pushes."""
    if len(pushes) == 1:
        return pushes[0].ids, pushes[0].values
    ids = np.unique(np.concatenate([push.ids for push in pushes]))
    rows = np.zeros((len(ids), pushes[0].values.shape[1]), pushes[0].values.dtype)
    for push in pushes:
        rows[np.searchsorted(ids, push.ids)] += push.values
    return ids, rows
