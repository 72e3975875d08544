"""Recurrent layers of ONNX, in one direction or both, whose gates lie side by side, and other operators along time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import ops
from ..core.errors import DataError
from ..core.graph import Node
from ..core.op import as_node
from ..ops.sequence import kept, steps_of
from .meaning import meaning

States = tuple[Node, ...]
Recurrence = Callable[
    [Node, States, Node, Node], States
]  # from what x gives, states, weights and bias to the next states
OneWay = Callable[
    ..., tuple[Node, States]
]  # (x, w, r, bias of x, bias of r, states, lengths) -> (outputs, last states)


def stepwise(step: Recurrence) -> OneWay:
    """A layer whose steps are nodes of their own, so that their number must be known."""

    def cell(
        x: Node, w: Node, r: Node, from_x: Node, from_h: Node, states: States, lengths: Node | None
    ) -> tuple[Node, States]:
        given, outputs, ends = ops.matmul(x, w) + from_x, [], [] if lengths is None else [lengths]
        for t in steps_of(x):
            after = step(given[:, t], states, r, from_h)
            outputs.append(kept(ops.where, ends, t, after[0], ops.zeros_like(after[0])))
            states = tuple(kept(ops.where, ends, t, new, old) for new, old in zip(after, states))
        return ops.stack(outputs, axis=1), states

    return cell


def along(
    cell: OneWay,
    gates: int,
    x: Node,
    w: Node,
    r: Node,
    b: Node | None,
    lengths: Node | None,
    first: Sequence[Node | None],
    direction: str,
    layout: int,
) -> tuple[Node, ...]:
    """All outputs (time, directions, n, k) and the last states (directions, n, k), or, with `layout`, n first."""
    k = r.shape[-1]
    x = x if layout else ops.permute_dims(x, (1, 0, 2))
    zero = ops.full(shape=(x.shape[0], k), fill_value=0.0, dtype=x.dtype)
    outputs, lasts = [], []
    for d in range(2 if direction == "bidirectional" else 1):
        backward = d == 1 or direction == "reverse"
        bias = ops.full(shape=(2 * gates * k,), fill_value=0.0, dtype=x.dtype) if b is None else b[d]
        states = tuple(zero if s is None else s[:, d] if layout else s[d] for s in first)
        weights = ops.matrix_transpose(w[d]), ops.matrix_transpose(r[d]), bias[: gates * k], bias[gates * k :]
        read = ops.flip(x, 1, lengths=lengths) if backward else x
        made, last = cell(read, *weights, states, lengths)
        outputs.append(ops.flip(made, 1, lengths=lengths) if backward else made)
        lasts.append(last)
    y = ops.stack(outputs, axis=2)
    return (
        y if layout else ops.permute_dims(y, (1, 2, 0, 3)),
        *(ops.stack(parts, axis=1 if layout else 0) for parts in zip(*lasts)),
    )


def usual(activations: Any, wanted: tuple[str, ...]) -> None:
    if activations is not None and any(a.lower() != wanted[i % len(wanted)] for i, a in enumerate(activations)):
        raise DataError(f"has the activations {activations}", fix=f"export with {', '.join(wanted)}")


@meaning("RNN")
def rnn(
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    h: Node | None = None,
    *,
    activations: Any = None,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
) -> tuple[Node, ...]:
    usual(activations, ("tanh",))

    def step(given: Node, states: States, r: Node, bias: Node) -> States:
        return (ops.tanh(given + ops.matmul(states[0], r) + bias),)

    return along(stepwise(step), 1, x, w, r, b, lengths, [h], direction, layout)


@meaning("GRU")
def gru(
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    h: Node | None = None,
    *,
    activations: Any = None,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Node, ...]:
    """With `linear_before_reset` our own; otherwise what resets is multiplied after it is reset."""
    usual(activations, ("sigmoid", "tanh"))
    k = int(r.shape[-1])

    def step(given: Node, states: States, r: Node, bias: Node) -> States:
        both = ops.sigmoid(given[:, : 2 * k] + ops.matmul(states[0], r[:, : 2 * k]) + bias[: 2 * k])
        z, reset = both[:, :k], both[:, k:]
        new = ops.tanh(given[:, 2 * k :] + ops.matmul(reset * states[0], r[:, 2 * k :]) + bias[2 * k :])
        return (new + z * (states[0] - new),)

    def own(x: Node, w: Node, r: Node, bias: Node, other: Node, states: States, lengths: Any) -> tuple[Node, States]:
        w, r, bias, other = (reordered(v, (1, 0, 2)) for v in (w, r, bias, other))
        outputs, last = ops.gru(x, w, r, bias, other, states[0], lengths=lengths)
        return outputs, (last,)

    return along(own if linear_before_reset else stepwise(step), 3, x, w, r, b, lengths, [h], direction, layout)


def reordered(vectors: Node, order: tuple[int, ...]) -> Node:
    """Gates that lie side by side along the last axis, in another order."""
    parts = ops.split(vectors, len(order), axis=-1)
    return ops.concat([parts[i] for i in order], axis=-1)


@meaning("LSTM")
def lstm(
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    h: Node | None = None,
    c: Node | None = None,
    p: Node | None = None,
    *,
    activations: Any = None,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Node, ...]:
    """Our own, whose gates lie in the order i, f, g, o; with peepholes `p` (i, o, f) in steps."""
    usual(activations, ("sigmoid", "tanh", "tanh"))
    if input_forget or (p is not None and direction == "bidirectional"):
        raise DataError("has joined gates, or peepholes in two directions", fix="export without them")

    def step(given: Node, states: States, r: Node, bias: Node) -> States:
        i, o, f, g = ops.split(given + ops.matmul(states[0], r) + bias, 4, axis=-1)
        peeps = ops.split(as_node(p)[0], 3)
        kept_part = ops.sigmoid(f + peeps[2] * states[1]) * states[1]
        after = kept_part + ops.sigmoid(i + peeps[0] * states[1]) * ops.tanh(g)
        return ops.sigmoid(o + peeps[1] * after) * ops.tanh(after), after

    def own(x: Node, w: Node, r: Node, bias: Node, other: Node, states: States, lengths: Any) -> tuple[Node, States]:
        w, r, bias = (reordered(v, (0, 2, 3, 1)) for v in (w, r, bias + other))
        return ops.lstm(x, w, r, bias, states, lengths=lengths)

    return along(own if p is None else stepwise(step), 4, x, w, r, b, lengths, [h, c], direction, layout)


@meaning("ReverseSequence")
def reverse_sequence(x: Node, lengths: Node, *, batch_axis: int = 1, time_axis: int = 0) -> Node:
    if batch_axis == 0:
        return ops.flip(x, time_axis, lengths=lengths)
    order = (1, 0, *range(2, x.ndim))
    return ops.permute_dims(ops.flip(ops.permute_dims(x, order), 1, lengths=lengths), order)
