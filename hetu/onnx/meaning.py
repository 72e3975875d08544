"""The table of meanings: what an operator of ONNX is made of ours, declared by the signature of a function.

Positional parameters are the operator's inputs (None where one is left out), keyword-only ones its attributes, which
come with ONNX's defaults; `**slide` are all that say how a window slides. A parameter is annotated where a node is not
what the function wants.

What is known before anything is fed follows from constants, initial values and sizes. Sizes that are open are computed
with as far as that goes: arrays of objects hold them beside numbers. Control flow is followed where it is known: a
branch is chosen, and loops become their steps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, TypeVar

import numpy as np

from .. import ops
from ..core.errors import DataError, HetuError
from ..core.graph import Node, topological
from ..core.op import LEAVES, Role
from ..core.types import Dim, normalize_axis

F = TypeVar("F", bound=Callable[..., Any])
KnownArray = Any  # an array, known when the graph is built: it decides shapes, or how something is computed
Exact = Any  # a node whose dtype is the one in the file: it says how something is rounded
Untrained = Any  # a node that no optimizer changes
OutputCount = Any  # instead of an attribute: how many outputs are asked for

SLIDES = set("auto_pad ceil_mode dilations group kernel_shape pads strides".split())
# Attributes that change nothing here: how to round to floats of 8 bits, in how many bits to compute, what to draw.
IGNORED = set("precision round_mode saturate seed sorted stash_type".split())
MEANINGS: dict[str, Meaning] = {}


class Meaning:
    """A function of nodes, and what its signature says; inputs from `known` on are known arrays without a word of it.

    >>> from hetu.onnx.meaning import MEANINGS
    >>> MEANINGS["Reshape"].inputs, MEANINGS["Reshape"].kind(1)
    (['data', 'shape'], 'KnownArray')
    """

    def __init__(self, function: Callable[..., Any], known: int | None = None) -> None:
        self.function, self.signature = function, inspect.signature(function)
        given = self.signature.parameters.values()
        words = {p.name: str(p.annotation) for p in given}  # also of what is left open: more inputs, or attributes
        self.inputs = [p.name for p in given if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        self.any_number = any(p.kind is p.VAR_POSITIONAL for p in given)
        self.kinds = [words[name] if known is None or i < known else "KnownArray" for i, name in enumerate(self.inputs)]
        self.count = next((name for name, word in words.items() if word == "OutputCount"), "")
        self.attributes = {p.name for p in given if p.kind is p.KEYWORD_ONLY and p.name != self.count}
        self.attributes |= SLIDES if any(p.kind is p.VAR_KEYWORD for p in given) else set()

    def kind(self, position: int) -> str:
        """The annotation of an input; behind the last stand more of its kind."""
        return self.kinds[min(position, len(self.kinds) - 1)]


def meaning(*names: str) -> Callable[[F], F]:
    """Enter a function as what operators of ONNX mean."""

    def enter(function: F) -> F:
        meanings(**dict.fromkeys(names, function))
        return function

    return enter


def meanings(known: Any = None, **table: Callable[..., Any]) -> None:
    """Enter operators that are one of ours, or a line of them; inputs from `known` on are known arrays."""
    MEANINGS.update({name: Meaning(made, known) for name, made in table.items()})


# -- what is known -----------------------------------------------------------------------------------------------------

LARGEST = 1 << 24  # numbers of an array that is computed while the graph is built
MOST = 1 << 12  # steps of a loop, or places of a window


class OfSizes:
    """The array module NumPy, in which an open size is a number, and an array that holds one keeps it."""

    object = object

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, value: Any, dtype: Any = None) -> np.ndarray:
        return np.array(value, object) if isinstance(value, Dim) else np.asarray(value, dtype)

    def equal(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray((np.frompyfunc(_same, 2, 1) if object in (a.dtype, b.dtype) else np.equal)(a, b), bool)

    def not_equal(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(np.logical_not(self.equal(a, b)))

    def abs(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x * self.sign(x))

    def sign(self, x: np.ndarray) -> np.ndarray:
        """Open sizes are taken to be positive."""
        signs = [np.sign(v.coef if isinstance(v, Dim) else v) for v in x.flat]
        return np.array(signs, x.dtype).reshape(x.shape)

    def astype(self, x: np.ndarray, dtype: Any, copy: bool = True) -> np.ndarray:
        return x if x.dtype == object else x.astype(dtype, copy=copy)


def _same(a: Any, b: Any) -> bool:
    """TypeError where one size may be the other or not, as no open one is less than none."""
    if a != b and (isinstance(a, Dim) or isinstance(b, Dim)) and not any(isinstance(v, int) and v < 0 for v in (a, b)):
        raise TypeError("of open sizes")
    return bool(a == b)


def bounded(*sizes: int) -> None:
    """DataError if an array of these sizes is too large to be made while a graph is built."""
    if math.prod(sizes) > LARGEST:
        said = f"an array of {' x '.join(map(str, sizes))} numbers, too many to compute while a graph is built"
        raise DataError(said, fix="export it in another way, or in smaller sizes")


def few(count: int, what: str) -> int:
    """So many, each of which becomes nodes of its own, or DataError."""
    if count > MOST:
        raise DataError(f"it has {count} {what}, at most {MOST} are built", fix="export a layer in its place")
    return count


def known(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a node, or None. `values` keeps those of all nodes below.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> known(ht.stack([ht.constant(value=3), ht.constant(value=1) + x.shape[0] * 2]), {})
    array([3, ?(2*?x.0+1)], dtype=object)
    """
    for part in topological([node]):
        if part not in values:
            values[part] = _computed(part, values)
    return values[node]


def _computed(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.role is Role.VARIABLE:
        return node.attrs["init"] if isinstance(node.attrs["init"], np.ndarray) else None
    arrays = [values[i] for i in node.inputs]
    if node.role is Role.PLACEHOLDER or any(a is None for a in arrays):
        return None
    if node.role not in LEAVES:
        for type_ in node.type if isinstance(node.type, tuple) else (node.type,):
            bounded(*(s for s in type_.shape if isinstance(s, int)))
    try:
        with np.errstate(all="ignore"):
            made = node.op.forward(OfSizes(), *arrays, **node.attrs)
    except (HetuError, TypeError, AttributeError):  # it asks for the number of an open size
        return None
    return made if isinstance(made, tuple) else np.asarray(made)


# -- control flow ----------------------------------------------------------------------------------------------------

Body = Callable[..., list[Node]]  # an attribute that is a graph, which also reads what stands around it
FOREVER = 1 << 63  # steps


@meaning("If")
def choose(condition: KnownArray, *, then_branch: Body, else_branch: Body) -> tuple[Node, ...]:
    return tuple((then_branch if np.any(condition) else else_branch)())


@meaning("Loop")
def loop(trips: KnownArray = None, condition: KnownArray = None, *states: Node, body: Body) -> tuple[Node, ...]:
    """The last states, and what each step gave beside them, stacked."""
    last, count = FOREVER if trips is None else int(np.ravel(trips)[0]), len(states)
    goes_on: Any = condition is None or bool(np.any(condition))
    values, given = dict[Node, Any](), list[list[Node]]()
    while goes_on and len(given) < last:
        few(len(given) + 1, "steps")
        after, *rest = body(ops.constant(value=np.int64(len(given))), ops.constant(value=np.bool_(True)), *states)
        states, goes_on = tuple(rest[:count]), known(after, values)
        if goes_on is None:
            raise DataError("whether it goes on depends on what is fed", fix="export a fixed number of steps")
        given.append(rest[count:])
    if not given:
        raise DataError("it has no steps, so that its results have no shape", fix="export the model without it")
    return (*states, *(ops.stack(parts, axis=0) for parts in zip(*given)))


@meaning("Scan")
def scan(
    *inputs: Node, body: Body, num_scan_inputs: int, scan_input_axes: Any = None, scan_input_directions: Any = None,
    scan_output_axes: Any = None, scan_output_directions: Any = None,
) -> tuple[Node, ...]:  # fmt: skip
    """As `loop`, over the places along an axis of each of the last inputs."""
    count = len(inputs) - num_scan_inputs
    states, rows, given = inputs[:count], inputs[count:], list[list[Node]]()
    axes = [normalize_axis(axis, x.ndim) for x, axis in zip(rows, scan_input_axes or repeat(0))]
    steps = few(int(rows[0].shape[axes[0]]), "steps")
    for t in range(steps):
        turns = (steps - 1 - t if backward else t for backward in scan_input_directions or repeat(0))
        made = body(*states, *(x[(*[slice(None)] * axis, turn)] for x, axis, turn in zip(rows, axes, turns)))
        states = tuple(made[:count])
        given.append(made[count:])
    how = zip(zip(*given), scan_output_axes or repeat(0), scan_output_directions or repeat(0))
    return (*states, *(ops.stack(parts[::-1] if backward else parts, axis=axis) for parts, axis, backward in how))
