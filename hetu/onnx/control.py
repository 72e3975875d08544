"""Control flow of ONNX that is known when the graph is built: a branch is chosen, and loops become their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ops
from ..core.errors import DataError
from ..core.graph import Node
from ..core.types import normalize_axis
from .known import few, known
from .meaning import KnownArray, meaning

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
    *inputs: Node,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: Any = None,
    scan_input_directions: Any = None,
    scan_output_axes: Any = None,
    scan_output_directions: Any = None,
) -> tuple[Node, ...]:
    """As `loop`, over the places along an axis of each of the last inputs."""
    count = len(inputs) - num_scan_inputs
    states, given, rows = inputs[:count], list[list[Node]](), list[Node]()
    for k, x in enumerate(inputs[count:]):
        axis = normalize_axis(scan_input_axes[k] if scan_input_axes else 0, x.ndim)
        x = ops.permute_dims(x, (axis, *(i for i in range(x.ndim) if i != axis)))
        rows.append(ops.flip(x, 0) if scan_input_directions and scan_input_directions[k] else x)
    for t in range(few(int(rows[0].shape[0]), "steps")):
        made = body(*states, *(x[t] for x in rows))
        states = tuple(made[:count])
        given.append(made[count:])
    stacked = []
    for k, parts in enumerate(zip(*given)):
        backward = scan_output_directions and scan_output_directions[k]
        axis = scan_output_axes[k] if scan_output_axes else 0
        stacked.append(ops.stack(parts[::-1] if backward else parts, axis=axis))
    return (*states, *stacked)
