"""What a server does with a pushed gradient: the update rules of `hetu/ops/update.py`, applied in place.

A rule that works on each element alone can run on any block of a parameter, wherever that block lives, and on any
set of rows. `add` is the rule without an optimizer: the workers send finished deltas. Ignored on purpose: rules that
need the norm of a whole parameter (LAMB), gradient clipping, and devices other than the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..errors import ArgumentError, UnknownNameError, did_you_mean
from ..graph import OPS
from ..kernels import kernels
from ..op import Instruction, Op
from ..ops.update import ROW_FORMS
from ..types import is_float

NAMES = ("add", *ROW_FORMS)


class Rule:
    """One update rule with its optimizer state for one table of values (rows, cols), updated in place.

    `options` are the rate and the hyperparameters by the names that `hetu.ops.update` gives them. Under lazy row
    updates the step of Adam's bias correction counts the updates of the table, not of the row.

    >>> table = np.zeros((3, 2), "float32")
    >>> rule = Rule("momentum", table, {"learning_rate": 0.5, "momentum": 0.9})
    >>> rule.apply_rows(np.array([1]), np.ones((1, 2), "float32"))
    >>> table.tolist()
    [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """

    def __init__(self, name: str, table: np.ndarray, options: dict[str, Any]) -> None:
        self.name, self.table = name, table
        self.op, rate, self.options = check_rule(name, options)
        if self.op is not None and not is_float(table.dtype):
            raise ArgumentError(f"{name} of {table.dtype}", fix='train floating tables, or use the rule "add"')
        self.rate, self.step = np.array(rate, table.dtype), np.array(0, "int64")
        states = 0 if self.op is None else self.op.inputs.index("g") - 1
        self.states = tuple(np.zeros_like(table) for _ in range(states))
        self.timed = self.op is not None and "step" in self.op.inputs
        self.gradient: np.ndarray | None = None  # of the whole table; made when first needed
        self.calls: list[Instruction] = []
        self.scale = np.zeros_like(self.rate)  # of a gradient that is added where it lies
        self.add = None if states else kernels("cpu").blas.adder(table, self.scale)

    def apply(self, accumulate: Callable[[np.ndarray], None]) -> None:
        """One update of the whole table by the gradient that `accumulate` writes into the buffer it is given."""
        if self.gradient is None:
            self.gradient = np.empty_like(self.table)
            self.calls = self._bound(self.gradient)
        accumulate(self.gradient)
        self._tick()
        for call in self.calls:
            call()

    def apply_at_once(self, gradient: np.ndarray) -> bool:
        """The same, bit for bit, by a gradient where it lies; False where there is no way to do that."""
        if self.add is None or not (gradient.flags.c_contiguous and gradient.flags.aligned):
            return False
        self.scale[...] = 1 if self.op is None else -self.rate
        self.add(gradient)
        return True

    def apply_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """One update of the distinct rows `ids` (k,) by their gradients (k, cols)."""
        self._tick()
        values = [np.take(t, ids, axis=0) for t in (self.table, *self.states)]
        if self.op is None:
            made = (values[0] + rows,)
        else:
            made = self.op.forward(np, *values, rows, *self._scalars(), **self.options)
            made = made if isinstance(made, tuple) else (made,)
        for table, new in zip((self.table, *self.states), made):
            table[ids] = new

    def _tick(self) -> None:
        if self.timed:
            self.step += 1

    def _bound(self, gradient: np.ndarray) -> list[Instruction]:
        if self.op is None:
            return [partial(np.add, self.table, gradient, self.table)]
        tables = (self.table, *self.states)
        out = tables if self.states else self.table
        return self.op.bound(np, out, (*tables, gradient, *self._scalars()), self.options)

    def _scalars(self) -> tuple[np.ndarray, ...]:
        return (self.rate, self.step) if self.timed else (self.rate,)


def check_rule(name: str, options: dict[str, Any]) -> tuple[Op | None, float, dict[str, Any]]:
    """The operator of a rule, its learning rate and all its attributes, or an error that says what is wrong."""
    if name not in NAMES:
        raise UnknownNameError(f"no update rule {name!r}", fix=did_you_mean(name, NAMES))
    known = {} if name == "add" else {**OPS[name].defaults, "learning_rate": 0.01}
    for option, value in options.items():
        if option not in known:
            raise UnknownNameError(f"the rule {name} has no {option!r}", fix=did_you_mean(option, known))
        if not isinstance(value, int | float) or not abs(value) < 1e30:
            raise ArgumentError(f"{option} is {value!r}", fix="the options of a rule are numbers")
    attributes = {**known, **options}
    return OPS.get(name) if name != "add" else None, float(attributes.pop("learning_rate", 1.0)), attributes
