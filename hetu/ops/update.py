"""What makes an operator of an optimizer's rule: written once, in graph functions, its other forms are derived.

A rule takes a parameter, its states, the gradient, the rate and perhaps the step, and returns the new parameter and the
new states. Traced, it is a composition of operators, see `composition.py`. Where all of them act on single elements,
the rule can change some rows of a table, run on a server on any block, and be cut along any axis. A rule that needs
a norm of the whole parameter can do none of that; ranks that keep parts run its operators, and add up the norm. The
executor lets a rule write in place where the old values die.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from types import ModuleType
from typing import Any, TypeVar, overload

import numpy as np

from ..core.errors import ArgumentError, DTypeError, ShapeError, public
from ..core.graph import Node, origin_of
from ..core.op import Op, P, R, Role, op, unpacked
from ..core.types import Shape, TensorType, compatible, is_float
from .composition import Composition, traced
from .elementwise import where
from .index import RowWindow, in_range, own_rows, scatter_rows, whole_size
from .shape import expand_dims

__all__ = ["update_rule"]

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class UpdateRule:
    """What an update operator is known by: nobody who handles updates asks for its name.

    `states` are the names of the state variables, behind that of the parameter; `timed` says whether the step is an
    input, behind the rate. `dense` is the operator that applies the rule to whole parameters, `rows` to some rows of a
    table, and `touched` to those of a whole table that were looked up. `base` is the rule that a `guarded` one applies.
    """

    name: str
    function: Callable[..., Any]
    states: tuple[str, ...]
    timed: bool
    base: UpdateRule | None = None
    dense: Op[..., Any] = field(init=False)
    rows: Op[..., Any] = field(init=False)
    touched: Op[..., Any] = field(init=False)

    def __repr__(self) -> str:
        return self.name

    @property
    def tables(self) -> int:
        """How many arrays of the parameter's type the rule changes: the parameter and its states."""
        return 1 + len(self.states)

    @property
    def scalars(self) -> int:
        """How many scalars it takes: the rate, perhaps the step, perhaps a condition."""
        return 1 + self.timed + (self.base is not None)

    @cached_property
    def guarded(self) -> UpdateRule:
        """This rule with a condition as the last scalar: where that is 0, all stays as it was."""

        def function(*inputs: Node, **attrs: Any) -> Node | tuple[Node, ...]:
            *given, condition = inputs
            made = self.function(*given, **attrs)
            new = made if self.states else (made,)
            return _result(self, [where(condition > 0, n, old) for n, old in zip(new, given)])

        guarded = UpdateRule(f"{self.name}_guarded", function, self.states, self.timed, self)
        parameters = list(inspect.signature(self.function).parameters.values())
        condition = inspect.Parameter("condition", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters.insert(self.tables + 1 + self.scalars, condition)
        return _with_operators(guarded, parameters)

    def composition(self, shape: Shape, attrs: Mapping[str, Any]) -> Composition:
        """The rule for a parameter of this shape, as operators."""
        return _traced(self, shape, tuple(attrs.items()))

    def of(self, node: Node) -> Composition:
        """The rule as operators for the parameter of a node of it."""
        return self.composition(node.inputs[0].shape, node.attrs)

    def descends(self, node: Node) -> bool:
        """Whether a node of the rule is plain gradient descent: p - lr g."""
        found = self.of(node)
        return not self.timed and found.descent is found.inputs[-1]

    def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """(parameter and states, gradient, scalars) of the inputs of the dense form."""
        return inputs[: self.tables], inputs[self.tables], inputs[self.tables + 1 :]

    def on_sums(self, node: Node, inputs: Sequence[Node]) -> tuple[Node, ...]:
        """What a node of the row form makes of `inputs`, by two sums that ranks can complete and batches add to: of the
        rows of each id, and of how often it was looked up.
        """
        tables, (ids, rows, *scalars) = inputs[: self.tables], inputs[self.tables :]
        with origin_of(node, gradient=True, update=False):
            total = scatter_rows(tables[0], ids, rows)
        made = self.on_counts(node, tables, total, ids, scalars)
        return unpacked(made) if self.states else (made,)

    def on_counts(self, node: Node, tables: Sequence[Node], total: Node, ids: Node, scalars: Sequence[Node]) -> Node:
        """What a node of the rule makes of whole tables and the gradient `total`, where `ids` have been looked up."""
        zeros, ones = (
            np.broadcast_to(np.asarray(number, total.dtype), tuple(map(int, shape)))
            for number, shape in ((0, tables[0].shape[:1]), (1, ids.shape))
        )
        with origin_of(node, gradient=True, update=False):
            counts = scatter_rows(zeros, ids, ones)
        attrs = {name: value for name, value in node.attrs.items() if name != "window"}
        with origin_of(node):
            return self.touched.make((*tables, total, counts, *scalars), attrs)


@lru_cache(1024)
def _traced(rule: UpdateRule, shape: Shape, attrs: tuple[tuple[str, Any], ...]) -> Composition:
    found = traced(rule.function, rule.tables + 1, rule.scalars, shape, dict(attrs))
    if len(found.outputs) != rule.tables:
        raise ArgumentError(
            f"{rule.name} returns {len(found.outputs)} values for {rule.tables} arrays",
            fix="return the new parameter and then every new state, in the order in which it takes them",
        )
    return found if found.whole else found.interned()


@overload
def update_rule(function: Callable[P, R], /) -> Op[P, R]: ...
@overload
def update_rule(*, states: Sequence[str] = ()) -> Callable[[Callable[P, R]], Op[P, R]]: ...


@public
def update_rule(function: Callable[..., Any] | None = None, /, *, states: Sequence[str] = ()) -> Any:
    """Make an update operator of a rule `f(p, *states, g, lr[, step], *, hyperparameters)` in graph functions.

    The rule returns the new parameter and the new states. The rate `lr` and `step`, which counts from 1, are float64
    scalars; what follows from them alone stays in float64, all else is in the dtype of the parameter. `states` are the
    names of the state variables, `<rule>_<argument>` unless given. ArgumentError for another signature.

    >>> import hetu as ht
    >>> @update_rule
    ... def signs(p, m, g, lr, *, beta=0.5):
    ...     m = beta * m + (1 - beta) * g
    ...     return p - lr * ht.sign(m), m
    >>> new, m = signs([1.0, 2.0], [0.0, 0.0], [4.0, -4.0], 0.25)
    >>> ht.evaluate(new).tolist(), signs.update.states
    ([0.75, 2.25], ('signs_m',))
    """
    if function is None:
        return partial(update_rule, states=states)
    parameters = list(inspect.signature(function).parameters.values())
    names, name = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY], function.__name__.rstrip("_")
    tables = names.index("g") if "g" in names else 0
    if not tables or names[tables:] not in (["g", "lr"], ["g", "lr", "step"]):
        raise ArgumentError(
            f"the rule {name}({', '.join(names)})", fix="let it take p, its states, g, lr and maybe step"
        )
    states = tuple(states) or tuple(f"{name}_{state}" for state in names[1:tables])
    if len(states) != tables - 1:
        raise ArgumentError(f"{len(states)} names for {tables - 1} states of {name}", fix="name each state, or none")
    rule = UpdateRule(name, function, states, names[-1] == "step")
    return _with_operators(rule, parameters).dense


def _with_operators(rule: UpdateRule, parameters: Sequence[inspect.Parameter]) -> UpdateRule:
    """The rule, whose operators take these parameters."""
    rule.rows, rule.touched = _rows_operator(rule, parameters), _touched_operator(rule, parameters)
    rule.dense = _operator(
        rule, _on_arrays(rule), parameters, rule.function.__doc__,
        name=rule.name, infer=partial(_type, rule), dims=partial(_dims, rule), scratch=True,
    )  # fmt: skip
    rule.dense.update = rule
    return rule


def _operator(
    rule: UpdateRule,
    forward: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    doc: str | None,
    **rules: Any,
) -> Op[..., Any]:
    """An operator that changes the tables of a rule in place. Those of a guarded rule are in no table of operators."""
    xp = inspect.Parameter("xp", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([xp, *parameters])  # type: ignore[attr-defined]  # a function takes it
    forward.__doc__, forward.__module__ = doc, rule.function.__module__
    inplace = {k: (k,) for k in range(rule.tables)}
    make: Callable[..., Op[..., Any]] = op if rule.base is None else Op
    return make(forward, role=Role.UPDATE, inplace=inplace, differentiable=False, **rules)


def _result(rule: UpdateRule, made: Sequence[T]) -> T | tuple[T, ...]:
    return tuple(made) if rule.states else made[0]


# -- on whole parameters ---------------------------------------------------------------------------------------


def _on_arrays(rule: UpdateRule) -> Callable[..., Any]:
    def forward(xp: ModuleType, *arrays: Any, **attrs: Any) -> Any:
        return _result(rule, rule.composition(arrays[0].shape, attrs).run(xp, arrays))

    return forward


def _type(rule: UpdateRule, *types: TensorType, **attrs: Any) -> TensorType | tuple[TensorType, ...]:
    """Parameter, states and gradient agree; the rest are scalars."""
    tables, gradient, scalars = rule.split(types)
    _check_tables(tables)
    _check_alike(types[0], gradient, "the gradient")
    _check_scalars(scalars)
    rule.composition(types[0].shape, attrs)  # what is wrong with the rule is said where it is used
    return _result(rule, tables)


def _dims(rule: UpdateRule, x: TensorType, *types: TensorType, **attrs: Any) -> str:
    """Sharding rule: any axis may be split, or none where the rule needs the whole parameter."""
    term = "..."
    if rule.composition(x.shape, attrs).whole:
        term = "".join(f"{chr(ord('a') + i)}!" for i in range(x.ndim))
    return f"{','.join([term] * (rule.tables + 1))}{',' * rule.scalars}->{','.join([term] * rule.tables)}"


def _check_tables(types: Sequence[TensorType]) -> None:
    if not is_float(types[0].dtype):
        raise DTypeError(f"the parameter is {types[0]}", fix="only floating variables can be trained")
    for state in types[1:]:
        _check_alike(types[0], state, "the optimizer state")


def _check_alike(wanted: TensorType, got: TensorType, what: str) -> None:
    fits = wanted.ndim == got.ndim and all(map(compatible, wanted.shape, got.shape))
    if not fits or wanted.dtype != got.dtype:
        raise ShapeError(f"{what} is {got}, wanted {wanted}", fix="give it the shape and dtype of the parameter")


def _check_scalars(types: Sequence[TensorType]) -> None:
    for type_ in types:
        if type_.shape != ():
            raise ShapeError(f"the learning rate and the step are scalars, got {type_}", fix="pass one number")


# -- on the rows of a table that a batch looked up -------------------------------------------------------------
# "Lazy": where a row was not touched, momentum does not decay and Adam does not move. Gradients of an id that occurs
# several times are summed first, so plain gradient descent and AdaGrad give exactly what their dense forms give.


def _on_rows(rule: UpdateRule) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The forward function, and the one that writes into arrays that are the tables, or lie elsewhere."""

    def into(xp: ModuleType, out: Any, *arrays: Any, window: RowWindow = None, **attrs: Any) -> None:
        tables, (ids, rows, *scalars) = out if isinstance(out, tuple) else (out,), arrays[rule.tables :]
        for table, old in zip(tables, arrays):
            if not xp.may_share_memory(table, old):
                table[...] = old
        ids, rows = own_rows(ids, rows, window)
        touched, places = xp.unique(xp.reshape(ids, (-1,)), return_inverse=True)
        sums = xp.zeros((touched.size, *tables[0].shape[1:]), dtype=rows.dtype)
        xp.add.at(sums, places, xp.reshape(rows, (ids.size, *tables[0].shape[1:])))
        old = [xp.take(t, touched, axis=0) for t in tables]
        for table, new in zip(tables, rule.composition(tables[0].shape, attrs).run(xp, [*old, sums, *scalars])):
            table[touched] = new

    def forward(xp: ModuleType, *arrays: Any, window: RowWindow = None, **attrs: Any) -> Any:
        made = _result(rule, [xp.array(a) for a in arrays[: rule.tables]])
        into(xp, made, *(made if rule.states else (made,)), *arrays[rule.tables :], window=window, **attrs)
        return made

    return forward, into


def _rows_operator(rule: UpdateRule, parameters: Sequence[inspect.Parameter]) -> Op[..., Any]:
    """The operator that applies a rule to some rows: the gradient `g` gives way to `ids` and `rows`."""
    kinds = inspect.Parameter
    inputs = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("ids", "rows")]
    window = kinds("window", kinds.KEYWORD_ONLY, default=None)
    doc = f"""`{rule.name}` on the rows `ids` of a table (n, ...), `rows` being their gradients: ids.shape + (...).

    Duplicate ids are summed first; only touched rows of the table and of its optimizer state change. ValueRangeError
    for ids outside [0, n), ArgumentError where the rule needs whole parameters.
    """
    forward, into = _on_rows(rule)
    made = _operator(
        rule, forward, [*parameters[: rule.tables], *inputs, *parameters[rule.tables + 1 :], window], doc,
        name=f"{rule.name}_rows", infer=partial(_rows_type, rule), dims=partial(_rows_dims, rule), scratch=True,
    )  # fmt: skip
    made.row_update = rule
    made.into(into)
    made.flops(lambda out, *types, **_: int(types[rule.tables + 1].size))
    in_range(made, partial(_row_ids, rule.tables))
    return made


def _row_ids(tables: int, *arrays: Any, window: RowWindow = None, **_: Any) -> list[tuple[Any, int, str]]:
    return [(arrays[tables], whole_size(arrays[0].shape[0], window), "row id")]


def _rows_type(
    rule: UpdateRule, *types: TensorType, window: RowWindow, **attrs: Any
) -> TensorType | tuple[TensorType, ...]:
    """As `_type`, with ids of any shape and one row of gradient for each."""
    tables, (p, ids, rows, *scalars) = types[: rule.tables], (types[0], *types[rule.tables :])
    _check_tables(tables)
    if p.ndim == 0 or ids.dtype.kind not in "iu":
        raise DTypeError(f"got a table {p} and ids {ids}", fix="pass a table with rows and integer ids")
    _check_alike(TensorType((*ids.shape, *p.shape[1:]), p.dtype), rows, "the gradient of the rows")
    _check_scalars(scalars)
    _check_divisible(rule, p, attrs)
    return _result(rule, tables)


def _check_divisible(rule: UpdateRule, p: TensorType, attrs: Mapping[str, Any]) -> None:
    if whole := rule.composition(p.shape, attrs).whole:
        raise ArgumentError(f"no rows alone can be updated: {whole}", fix=f"use {rule.name} on the whole parameter")


def _rows_dims(rule: UpdateRule, *types: TensorType, **_: Any) -> str:
    """Sharding rule: rows and columns of the table may be split, ids not."""
    columns = "".join(chr(ord("a") + i) for i in range(types[0].ndim - 1))
    ids = "".join(f"{chr(ord('A') + i)}!" for i in range(types[rule.tables].ndim))
    left = ",".join([f"n@{columns}"] * rule.tables)
    return f"{left},{ids},{ids}{columns}{',' * rule.scalars}->{left}"


# -- on whole tables, of which some rows were looked up --------------------------------------------------------
# The same new values from sums over all ids, which are fewer numbers than the rows where a table is small.


def _touched_operator(rule: UpdateRule, parameters: Sequence[inspect.Parameter]) -> Op[..., Any]:
    """The operator that applies a rule to the rows that were looked up: `counts` stand behind the gradient `g`."""
    counts = inspect.Parameter("counts", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    doc = f"""`{rule.name}` on the rows of a table (n, ...) whose `counts` (n) are above 0; others keep value and state.

    ArgumentError where the rule needs whole parameters.
    """

    def forward(xp: ModuleType, *arrays: Any, **attrs: Any) -> Any:
        (*tables, g, counts), scalars = arrays[: rule.tables + 2], arrays[rule.tables + 2 :]
        changes = xp.reshape(counts > 0, (-1, *(1,) * (g.ndim - 1)))
        made = rule.composition(g.shape, attrs).run(xp, [*tables, g, *scalars])
        return _result(rule, [xp.where(changes, new, old) for new, old in zip(made, tables)])

    made = _operator(
        rule, forward, [*parameters[: rule.tables + 1], counts, *parameters[rule.tables + 1 :]], doc,
        name=f"{rule.name}_touched", infer=partial(_touched_type, rule), dims=partial(_touched_dims, rule),
    )  # fmt: skip

    @made.decompose
    def decomposed(*inputs: Node, **attrs: Any) -> Node | tuple[Node, ...]:
        (*tables, g, counts), scalars = inputs[: rule.tables + 2], inputs[rule.tables + 2 :]
        changes = expand_dims(counts > 0, axis=tuple(range(1, g.ndim)))
        new = rule.composition(g.shape, attrs).on([*tables, g, *scalars], {})
        return _result(rule, [where(changes, n, old) for n, old in zip(new, tables)])

    return made


def _touched_type(rule: UpdateRule, *types: TensorType, **attrs: Any) -> TensorType | tuple[TensorType, ...]:
    """As `_type`, with a number for each row."""
    (*tables, g, counts), scalars = types[: rule.tables + 2], types[rule.tables + 2 :]
    _check_tables(tables)
    _check_alike(types[0], g, "the gradient")
    _check_alike(TensorType(g.shape[:1], counts.dtype), counts, "what counts the lookups")
    _check_scalars(scalars)
    _check_divisible(rule, types[0], attrs)
    return _result(rule, tables)


def _touched_dims(rule: UpdateRule, x: TensorType, *_: TensorType, **__: Any) -> str:
    """Sharding rule: any axis may be split."""
    term = "".join(chr(ord("a") + i) for i in range(x.ndim))
    left = ",".join([term] * (rule.tables + 1))
    return f"{left},a{',' * rule.scalars}->{','.join([term] * rule.tables)}"
