"""Recurrent layers of ONNX, in one direction or both, whose gates lie side by side, and what turns time around.

Our own layers where they have the same gates; others step by step, each of which becomes nodes. Left out: gates that
are clipped or joined, activations with parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import ops
from ..core.errors import DataError
from ..core.graph import Node
from ..ops.sequence import kept, steps_of
from .known import few
from .meaning import meaning

States = tuple[Node, ...]
ACTIVATIONS: dict[str, Callable[[Node], Node]] = {"tanh": ops.tanh, "sigmoid": ops.sigmoid, "relu": ops.relu}
USUAL = {1: ["tanh"], 3: ["sigmoid", "tanh"], 4: ["sigmoid", "tanh", "tanh"]}  # by the number of gates


@meaning("RNN", "GRU", "LSTM")
def recurrent(
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    h: Node | None = None,
    c: Node | None = None,
    p: Node | None = None,
    *,
    activations: Sequence[str] | None = None,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Node, ...]:
    """All outputs (time, directions, n, k) and the last states (directions, n, k), or, with `layout`, n first.

    The weights say how many gates there are, and so which layer it is.
    """
    k = int(r.shape[-1])
    gates, ways = int(w.shape[1]) // k, 2 if direction == "bidirectional" else 1
    named = [name.lower() for name in activations or USUAL[gates] * ways]
    if input_forget or not {*named} <= {*ACTIVATIONS}:
        said = f"has joined gates, or the activations {', '.join(named)}"
        raise DataError(said, fix=f"export without them, with {', '.join(ACTIVATIONS)}")
    x = x if layout else ops.permute_dims(x, (1, 0, 2))
    zero = ops.full(shape=(x.shape[0], k), fill_value=0.0, dtype=x.dtype)
    outputs, lasts = [], []
    for d in range(ways):
        backward = d == 1 or direction == "reverse"
        read = ops.flip(x, 1, lengths=lengths) if backward else x
        bias = ops.full(shape=(2 * gates * k,), fill_value=0.0, dtype=x.dtype) if b is None else b[d]
        states = tuple(zero if s is None else s[:, d] if layout else s[d] for s in ([h, c] if gates == 4 else [h]))
        weights = ops.matrix_transpose(w[d]), ops.matrix_transpose(r[d]), bias[: gates * k], bias[gates * k :]
        names = named[d * len(USUAL[gates]) :][: len(USUAL[gates])]
        if names == USUAL[gates] and p is None and (gates == 4 or (gates == 3 and linear_before_reset)):
            made, last = ours(gates, read, *weights, states, lengths)
        else:
            acts, peeps = [ACTIVATIONS[name] for name in names], (0.0,) * 3 if p is None else ops.split(p[d], 3)
            after: Any = partial(STEPS[gates], acts, linear_before_reset if gates == 3 else peeps)
            made, last = stepwise(after, read, *weights, states, lengths)
        outputs.append(ops.flip(made, 1, lengths=lengths) if backward else made)
        lasts.append(last)
    y = ops.stack(outputs, axis=2)
    ends = (ops.stack(parts, axis=1 if layout else 0) for parts in zip(*lasts))
    return (y if layout else ops.permute_dims(y, (1, 2, 0, 3)), *ends)


def reordered(vectors: Node, order: Sequence[int]) -> Node:
    """Gates that lie side by side along the last axis, in another order."""
    parts = ops.split(vectors, len(order), axis=-1)
    return ops.concat([parts[i] for i in order], axis=-1)


def ours(
    gates: int, x: Node, w: Node, r: Node, b: Node, other: Node, states: States, lengths: Any
) -> tuple[Node, States]:
    if gates == 4:
        w, r, b = (reordered(v, (0, 2, 3, 1)) for v in (w, r, b + other))
        return ops.lstm(x, w, r, b, states, lengths=lengths)
    w, r, b, other = (reordered(v, (1, 0, 2)) for v in (w, r, b, other))
    outputs, last = ops.gru(x, w, r, b, other, states[0], lengths=lengths)
    return outputs, (last,)


def stepwise(
    after: Any, x: Node, w: Node, r: Node, b: Node, other: Node, states: States, lengths: Any
) -> tuple[Node, States]:
    given, outputs, ends = ops.matmul(x, w) + b, list[Node](), [] if lengths is None else [lengths]
    for t in range(few(len(steps_of(x)), "steps")):
        news = after(given[:, t], states, r, other)
        outputs.append(kept(ops.where, ends, t, news[0], ops.zeros_like(news[0])))
        states = tuple(kept(ops.where, ends, t, new, old) for new, old in zip(news, states))
    return ops.stack(outputs, axis=1), states


def after_rnn(acts: Any, _: Any, given: Node, states: States, r: Node, b: Node) -> States:
    return (acts[0](given + ops.matmul(states[0], r) + b),)


def after_gru(acts: Any, linear: int, given: Node, states: States, r: Node, b: Node) -> States:
    (h,), k = states, int(states[0].shape[-1])
    both = acts[0](given[:, : 2 * k] + ops.matmul(h, r[:, : 2 * k]) + b[: 2 * k])
    z, reset, r, b = both[:, :k], both[:, k:], r[:, 2 * k :], b[2 * k :]
    from_h = reset * (ops.matmul(h, r) + b) if linear else ops.matmul(reset * h, r) + b
    made = acts[1](given[:, 2 * k :] + from_h)
    return (made + z * (h - made),)


def after_lstm(acts: Any, peeps: Any, given: Node, states: States, r: Node, b: Node) -> States:
    """Peepholes lie in the order i, o, f."""
    h, c = states
    i, o, f, g = ops.split(given + ops.matmul(h, r) + b, 4, axis=-1)
    new = acts[0](f + peeps[2] * c) * c + acts[0](i + peeps[0] * c) * acts[1](g)
    return acts[0](o + peeps[1] * new) * acts[2](new), new


STEPS: dict[int, Callable[..., States]] = {1: after_rnn, 3: after_gru, 4: after_lstm}


@meaning("ReverseSequence")
def reverse_sequence(x: Node, lengths: Node, *, batch_axis: int = 1, time_axis: int = 0) -> Node:
    if batch_axis == 0:
        return ops.flip(x, time_axis, lengths=lengths)
    order = (1, 0, *range(2, x.ndim))
    return ops.permute_dims(ops.flip(ops.permute_dims(x, order), 1, lengths=lengths), order)
