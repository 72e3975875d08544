"""Check gradient rules against finite differences along random directions, and what programs run of an operator.

Along one direction the derivative is a single number, so an error anywhere in the rule shows, at the cost of two
evaluations instead of two per element. All floats are computed in float64, as differences need it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from .answers import HELD
from .core.autodiff import gradients
from .core.errors import ArgumentError, GradientError, public
from .core.executor import Executor
from .core.graph import OPS, Node, topological
from .core.leaf import placeholder
from .core.simplify import interpret
from .core.types import is_float
from .ranges import Positive, Range, Seed

STEP = 1e-6  # central differences in float64: truncation h^2 and rounding eps/h meet here


@public
def check_gradients(
    function: Callable[..., Any],
    *inputs: tuple[int, ...] | np.ndarray,
    order: Annotated[int, Range(1, 4)] = 2,
    tolerance: Positive = 1e-5,
    seed: Seed = 0,
    **attrs: Any,
) -> None:
    """GradientError unless the gradient of `function` agrees with finite differences, up to the given order.

    `inputs` are arrays (floats become float64, integers stay as they are) or shapes, filled with normal numbers.
    ArgumentError for a function without floats. Operators of your own are also run as in a program, by their `code`,
    `into` or `bind`: GradientError unless that gives what their function does.

    >>> import hetu as ht
    >>> check_gradients(ht.exp, (3, 4))
    """
    rng = np.random.default_rng(seed)
    arrays = [_as_input(rng, value) for value in inputs]
    nodes = [placeholder(f"input{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    wrt = [n for n in nodes if is_float(n.dtype)]
    feed = dict(zip(nodes, arrays))
    loss = _weighted_sum(rng, function(*nodes, **attrs))
    _compare_programs(loss, feed, tolerance)
    for level in range(1, order + 1):
        slopes = gradients(loss, wrt, allow_unused=True)
        _compare(rng, loss, wrt, slopes, feed, tolerance, level)
        loss = _weighted_sum(rng, slopes)


def _as_input(rng: np.random.Generator, value: tuple[int, ...] | np.ndarray) -> np.ndarray:
    array = value if isinstance(value, np.ndarray) else rng.normal(size=value)
    return array.astype(np.float64) if is_float(array.dtype) else array


def _weighted_sum(rng: np.random.Generator, outputs: Node | Sequence[Node]) -> Node:
    """A scalar that depends on every element of every floating output."""
    floats = [out for out in ([outputs] if isinstance(outputs, Node) else outputs) if is_float(out.dtype)]
    if not floats:
        raise ArgumentError("there are no floats to differentiate", fix="check a function from floats to floats")
    sums = [OPS["sum"](out * OPS["constant"](value=rng.normal(size=out.shape))) for out in floats]
    return functools.reduce(operator.add, sums)


def _compare_programs(loss: Node, feed: dict[Any, Any], tolerance: float) -> None:
    """hetu's own operators are proved by its tests."""
    found = {n.op for n in topological([loss])} - HELD
    if own := [op.name for op in found if op.code or op.into_rule or op.bind_rule]:
        (meant,), (made,) = interpret([loss], feed), Executor([loss]).run(feed)
        if not abs(made - meant) <= tolerance * max(1.0, abs(meant)):
            raise GradientError(
                f"a program with {', '.join(own)} gives {made:.8g}, the function {meant:.8g}",
                fix="make code=, .into and .bind compute what the function does",
            )


def _compare(
    rng: np.random.Generator,
    loss: Node,
    wrt: list[Node],
    slopes: list[Node],
    feed: dict[Node, np.ndarray],
    tolerance: float,
    level: int,
) -> None:
    values = interpret(slopes, feed)
    for node, slope in zip(wrt, values):
        direction = rng.normal(size=node.shape)
        ends = [interpret([loss], feed | {node: feed[node] + s * STEP * direction})[0] for s in (1, -1)]
        numeric, exact = float(ends[0] - ends[1]) / (2 * STEP), float(np.sum(slope * direction))
        scale = max(1.0, abs(numeric), abs(exact), *(abs(float(e)) * 1e-3 for e in ends))
        if not abs(numeric - exact) <= tolerance * scale:
            raise GradientError(
                f"order {level} gradient with respect to {node.name}: the rule gives {exact:.8g}, "
                f"finite differences {numeric:.8g}",
                fix="check the gradient rule, and that no kink lies near the inputs",
            )
