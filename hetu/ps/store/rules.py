"""What a server does with a pushed gradient: an optimizer's rule, applied in place.

A rule that works on each element alone can run on any block of a parameter and on any set of rows. It arrives as plain
data, the operators that it is made of (see `ops/composition.py`), so that a server trains by rules that it has never
heard of; rules of its own process also have names. `add` is the rule without an optimizer: the workers send finished
deltas. Rules run on the CPU; gradients are not clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import ArgumentError, UnknownNameError, ValueRangeError, did_you_mean
from ...core.graph import OPS, Node
from ...core.leaf import placeholder, variable
from ...core.operators import cast_to
from ...core.passes import applied, chosen_passes
from ...core.program import Arena, Program
from ...core.state import State
from ...core.types import is_float
from ...init import zeros
from ...ops.composition import WIDE, Composition, parsed
from ...ops.update import UpdateRule

ADD = "add"
SCALARS = {"rate": "float64", "step": "int64"}
MOST_STATES = 16  # of a rule that another process sent

Gradients = dict[tuple[tuple[int, ...], np.dtype], np.ndarray]
RuleSpec = str | dict[str, Any]  # a name, or what `described` returns


class ServerRule:
    """One update rule with its optimizer state for one table of values (rows, cols), updated in place.

    `rule` is the name of a rule of this process, with its rate and hyperparameters as `options`, or a description, with
    the rate as its only option. When single rows are updated, the step of Adam's bias correction counts the updates of
    the table, not of the row. In `gradients`, which the tables of one server share as they are updated in turn, several
    gradients are summed. A table that is no array (`packing.py`, `tiers.py`) is updated by rows only; `zeros` makes
    the arrays of its state.

    >>> table = np.zeros((3, 2), "float32")
    >>> rule = ServerRule("momentum", table, {"learning_rate": 0.5, "momentum": 0.9})
    >>> rule.apply_rows(np.array([1]), np.ones((1, 2), "float32"))
    >>> table.tolist()
    [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """

    def __init__(
        self,
        rule: RuleSpec,
        table: Any,
        options: dict[str, Any],
        gradients: Gradients | None = None,
        zeros: Callable[[tuple[int, int], np.dtype], Any] = np.zeros,
    ) -> None:
        checked = check_rule(rule, options)
        self.composition, states = checked.composition, checked.states
        if self.composition is not None and not is_float(table.dtype):
            raise ArgumentError(f"{name_of(rule)} of {table.dtype}", fix='train floating tables, or use the rule "add"')
        check_rate(checked.rate, table.dtype)
        self.rate, self.step, self.timed = np.array(checked.rate), np.array(0, "int64"), checked.timed
        self.table, self.states = table, tuple(zeros(table.shape, table.dtype) for _ in range(states))
        self.gradients: Gradients = {} if gradients is None else gradients
        self.program: Program | None = None  # that updates the whole table; made when first needed
        self.own = Context()  # no caller's scope changes names there, and NumPy is as quiet as in an executor
        self.own.run(np.seterr, all="ignore")

    @property
    def scalars(self) -> tuple[np.ndarray, ...]:
        return (self.rate, self.step) if self.timed else (self.rate,)

    def apply(self, gradient: np.ndarray, weight: float = 1.0) -> None:
        """One update of the whole table by `weight` times a gradient of its shape, which is read where it lies."""
        if self.program is None:
            self.program = self.own.run(self._whole)
        self.program.takes["gradient"](gradient)
        self.program.state.arrays["weight"].fill(weight)
        self.step += self.timed
        self.own.run(self.program.run)

    def summed(self) -> np.ndarray:
        """Where gradients of the whole table are summed."""
        kind = self.table.shape, self.table.dtype
        if kind not in self.gradients:
            self.gradients[kind] = np.empty(self.table.shape, self.table.dtype)
        return self.gradients[kind]

    def _whole(self) -> Program:
        """The update of the whole table, of which the variables are the arrays of this rule."""
        updates, state = _updates(self.composition, self.table.shape, self.table.dtype, len(self.scalars)), State()
        state.arrays |= dict(zip((v.name for v in updates), (self.table, *self.states)))
        state.arrays |= {"weight": np.array(1, self.table.dtype), **dict(zip(SCALARS, self.scalars))}
        return Program((), updates, state, Arena(state.device))

    def apply_rows(self, ids: np.ndarray, rows: np.ndarray, *, begins: bool = True) -> None:
        """One update of the distinct rows `ids` (k,) by their gradients (k, cols), or more of one that has begun."""
        self.step += self.timed and begins
        self.own.run(self._change, ids, [np.take(t, ids, axis=0) for t in (self.table, *self.states)], rows)

    def _change(self, where: Any, values: Sequence[np.ndarray], gradient: np.ndarray) -> None:
        """Apply the rule to these values and write the results to their places in the table and its states."""
        if self.composition is None:
            made = [values[0] + gradient]
        else:
            made = self.composition.run(np, [*values, gradient, *self.scalars])
        for table, new in zip((self.table, *self.states), made):
            table[where] = new


@lru_cache(1024)
def _updates(composition: Composition | None, shape: tuple[int, ...], dtype: Any, scalars: int) -> dict[Node, Node]:
    """What becomes of a table and its states, which are variables: the graph of their update after all passes."""
    count = 1 if composition is None else composition.arrays - 1
    tables = [variable(f"table{k}", zeros, shape, dtype) for k in range(count)]
    gradient = placeholder("gradient", shape, dtype) * variable("weight", 1, (), dtype)
    given = [cast_to(variable(name, 0, (), kind), WIDE) for name, kind in SCALARS.items()][:scalars]
    made = (tables[0] + gradient,) if composition is None else composition.on((*tables, gradient, *given), {})
    return dict(zip(tables, applied(chosen_passes(None), made)))


class Checked(NamedTuple):
    """A rule that may run; the rule `add` has no composition."""

    composition: Composition | None
    rate: float
    states: int
    timed: bool


def described(composition: Composition, name: str) -> dict[str, Any]:
    """The description of a rule and all its hyperparameters for `ServerRule`, as plain data.

    ArgumentError unless the rule works on each element alone.
    """
    if composition.whole:
        raise ArgumentError(
            f"servers cannot apply {name}: {composition.whole}",
            fix="keep the parameter on ranks: a strategy without servers, or hetu.strategies.Hybrid",
        )
    return {"name": name, **composition.data()}


def name_of(rule: RuleSpec) -> str:
    """The name of a rule in messages."""
    return rule if isinstance(rule, str) else str(rule.get("name"))[:40]


def check_rule(rule: RuleSpec, options: Mapping[str, Any]) -> Checked:
    """A rule and its learning rate; UnknownNameError or ArgumentError if it cannot run."""
    known = {} if rule == ADD else {"learning_rate": 0.01}
    update = None
    if isinstance(rule, str) and rule != ADD:
        update = _named(rule)
        known |= OPS[rule].defaults
    for option, value in options.items():
        if option not in known:
            raise UnknownNameError(f"the rule {name_of(rule)} has no {option!r}", fix=did_you_mean(option, known))
        if not isinstance(value, int | float) or not abs(value) < 1e30:
            raise ArgumentError(f"{option} is {value!r}", fix="the options of a rule are numbers")
    attributes = {**known, **options}
    rate = float(attributes.pop("learning_rate", 1.0))
    if rule == ADD:
        return Checked(None, rate, 0, False)
    composition = parsed(rule) if update is None else update.composition((1, 1), attributes)
    described(composition, name_of(rule))
    states, scalars = composition.arrays - 2, len(composition.inputs) - composition.arrays
    if not 0 <= states <= MOST_STATES or scalars not in (1, 2) or len(composition.outputs) != states + 1:
        raise ArgumentError(f"the rule {name_of(rule)} of {composition.arrays} arrays and {scalars} scalars")
    return Checked(composition, rate, states, scalars == 2)


def check_rate(rate: float, dtype: np.dtype) -> None:
    """Refuse a learning rate that is infinite in the dtype of a table; integers are only added to."""
    if is_float(dtype) and not abs(rate) <= np.finfo(dtype).max:
        raise ValueRangeError(f"a learning rate {rate!r} for {dtype}", fix=f"use at most {np.finfo(dtype).max}")


def _named(name: str) -> UpdateRule:
    """A rule of this process."""
    rules = {n: op.update for n, op in OPS.items() if op.update is not None}
    if name not in rules:
        raise UnknownNameError(f"no update rule {name!r}", fix=did_you_mean(name, [ADD, *rules]))
    rule: UpdateRule = rules[name]
    return rule
