"""The long short-term memory over all its time steps as one operator.

The batch comes first, then time; the gates lie in the order i, f, g, o, their gradients where they did. Left out:
several layers or directions (compose them), projections.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from types import ModuleType
from typing import Any

from ..core.errors import ShapeError, public
from ..core.graph import OPS, Node
from ..core.op import as_node, as_nodes, op
from ..core.types import TensorType, compatible, promote, require_float
from . import sequence
from .index import in_range

__all__ = ["lstm"]

WANTED = "wanted x (n, time, f), weights (f, 4 k) and (k, 4 k), bias (4 k,) and states of (n, k)"


def _lstm_type(
    x: TensorType, w: TensorType, u: TensorType, b: TensorType, h: TensorType, c: TensorType, *lengths: TensorType
) -> tuple[TensorType, ...]:
    require_float(x, w, u, b, h, c)
    shown = f"got x {x}, weights {w} and {u}, bias {b}, states {h} and {c}"
    if (x.ndim, w.ndim, u.ndim, b.ndim, h.ndim, c.ndim) != (3, 2, 2, 1, 2, 2):
        raise ShapeError(shown, fix=WANTED)
    sequence.require_lengths(x.shape, lengths)
    n, steps, inputs = x.shape
    k = u.shape[0]
    wanted = (inputs, 4 * k, 4 * k, 4 * k, n, k, n, k)
    if not all(map(compatible, wanted, (*w.shape, u.shape[1], *b.shape, *h.shape, *c.shape))):
        raise ShapeError(shown, fix=WANTED)
    dtype = promote(*(t.dtype for t in (x, w, u, b, h, c)))
    states, last = TensorType((n, steps, k), dtype), TensorType((n, k), dtype)
    return states, last, last, states, states, TensorType((n, steps, 4 * k), dtype)


@op(
    name="lstm",
    infer=_lstm_type,
    dims=sequence.dims_with_lengths("nt!f!,f!k!,h!k!,k!,nh!,nh!", "nt!h!,nh!,nh!,nt!h!,nt!h!,nt!k!"),
    scratch=True,
)
def _lstm(xp: ModuleType, x: Any, w: Any, u: Any, b: Any, h: Any, c: Any, *lengths: Any) -> tuple[Any, ...]:
    """(h of all steps, last h, last c) of `lstm`, and for the gradient (c, tanh(c), gates) of all steps.

    States are (n, time, k), gates (n, time, 4 k); the first and last ones (n, k).

    >>> import numpy as np
    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (2, 5, 3)), ("w", (3, 16)), ("u", (4, 16))))
    >>> [output.shape for output in _lstm(x, w, u, np.zeros(16), np.zeros((2, 4)), np.zeros((2, 4)))]
    [(2, 5, 4), (2, 4), (2, 4), (2, 5, 4), (2, 5, 4), (2, 5, 16)]
    """
    k, from_x = u.shape[0], xp.matmul(x, w) + b
    steps: list[tuple[Any, ...]] = []
    for t in range(x.shape[1]):
        z = from_x[:, t, :] + xp.matmul(h, u)
        i, f, o = (1 / (1 + xp.exp(-z[:, j * k : (j + 1) * k])) for j in (0, 1, 3))
        g = xp.tanh(z[:, 2 * k : 3 * k])
        after = f * c + i * g
        top = xp.tanh(after)
        made = (o * top, after, top, xp.concat([i, f, g, o], axis=1))
        steps.append(tuple(sequence.kept(xp.where, lengths, t, part, xp.zeros_like(part)) for part in made))
        h, c = (sequence.kept(xp.where, lengths, t, new, old) for new, old in zip(made, (h, c)))
    hs, cs, tops, gates = sequence.along_time(xp, steps, h, k, k, k, 4 * k)
    return hs, h, c, cs, tops, gates


in_range(_lstm, lambda x, w, u, b, h, c, *lengths: sequence.length_ranges(x.shape[1], lengths))


_lstm.flops(lambda out, x, w, u, *_, **__: sequence.products_of_steps(x, w, u))


@_lstm.grad
def lstm_grad(g: list[Node | None], out: tuple[Node, ...], *inputs: Node) -> tuple[Node | None, ...]:
    # only the first three outputs leave this file, so only they can have a gradient
    w, lengths = inputs[1], inputs[6:]
    seeds = [OPS["zeros_like"](o) if s is None else s for s, o in zip(g, out[:3])]
    dz, *others = lstm_dx(*seeds, *inputs[:6], out[0], *out[3:], *lengths)
    return OPS["matmul"](dz, OPS["matrix_transpose"](w)), *others, *(None for _ in lengths)


def _dx_type(*types: TensorType) -> tuple[TensorType, ...]:
    return types[12], *types[4:9]


@op(
    infer=_dx_type,
    inplace={0: (12,)},
    dims=sequence.dims_with_lengths(
        "nt!h!,nh!,nh!,nt!f!,f!k!,h!k!,k!,nh!,nh!,nt!h!,nt!h!,nt!h!,nt!k!", "nt!k!,f!k!,h!k!,k!,nh!,nh!"
    ),
    scratch=True,
)
def lstm_dx(
    xp: ModuleType,
    gh: Any,
    dh: Any,
    dc: Any,
    x: Any,
    w: Any,
    u: Any,
    b: Any,
    h: Any,
    c: Any,
    hs: Any,
    cs: Any,
    tops: Any,
    gates: Any,
    *lengths: Any,
) -> tuple[Any, ...]:
    """The gradients of `lstm` with respect to (gates before their functions (n, time, 4 k), w, u, b, h, c).

    `gh` (n, time, k), `dh` and `dc` (n, k) are those of its outputs; then follow its inputs and what it computed.

    >>> import numpy as np
    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (2, 5, 3)), ("w", (3, 16)), ("u", (4, 16))))
    >>> [g.shape for g in ht.gradients(ht.sum(ht.lstm(x, w, u, np.zeros(16))[0]), [x, w, u])]
    [(2, 5, 3), (3, 16), (4, 16)]
    """
    k, (n, time, _) = u.shape[0], x.shape
    steps: list[Any] = []
    for t in reversed(range(time)):
        blocks = [gates[:, t, j * k : (j + 1) * k] for j in range(4)]
        blocks += [cs[:, t - 1, :] if t else c, tops[:, t, :]]
        slopes, before = _slopes(dh + gh[:, t, :], dc, *blocks)
        dz = xp.concat(slopes, axis=1)
        steps.append((sequence.kept(xp.where, lengths, t, dz, xp.zeros_like(dz)),))
        dc = sequence.kept(xp.where, lengths, t, before, dc)
        dh = sequence.kept(xp.where, lengths, t, xp.matmul(dz, xp.matrix_transpose(u)), dh)
    (dz,) = sequence.along_time(xp, steps[::-1], h, 4 * k)
    before = xp.concat([xp.expand_dims(h, axis=1), hs], axis=1)[:, :time, :]
    rows = xp.reshape(dz, (n * time, 4 * k))
    dw, du = (xp.matmul(xp.matrix_transpose(xp.reshape(a, (n * time, a.shape[2]))), rows) for a in (x, before))
    return dz, dw, du, xp.sum(rows, axis=0), dh, dc


def _slopes(dh: Any, dc: Any, i: Any, f: Any, g: Any, o: Any, before: Any, top: Any) -> tuple[list[Any], Any]:
    """The gradients of the four gates before their functions, and of c before the step; for arrays and for nodes."""
    dc = dc + dh * o * (1 - top * top)
    gates = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * top * o * (1 - o)]
    return gates, dc * f


lstm_dx.flops(lambda out, gh, dh, dc, x, w, u, *_, **__: sequence.products_of_steps(x, w, u, u))


@lstm_dx.decompose
def lstm_dx_parts(
    gh: Node, dh: Node, dc: Node, x: Node, w: Node, u: Node, b: Node, h: Node, c: Node, *others: Node
) -> tuple[Node, ...]:
    matmul, transpose, concat, where = OPS["matmul"], OPS["matrix_transpose"], OPS["concat"], OPS["where"]
    k, steps, lengths = u.shape[0], [], others[4:]
    for t in sequence.steps_of(x):
        z = matmul(x[:, t], w) + b + matmul(h, u)
        i, f, o = (OPS["sigmoid"](z[:, j * k : (j + 1) * k]) for j in (0, 1, 3))
        g = OPS["tanh"](z[:, 2 * k : 3 * k])
        steps.append((x[:, t], h, (i, f, g, o, c)))
        after = f * c + i * g
        h = sequence.kept(where, lengths, t, o * OPS["tanh"](after), h)
        c = sequence.kept(where, lengths, t, after, c)
    made, dw, du = [], [], []
    for t, (x_t, before, gates) in reversed(list(enumerate(steps))):
        top = OPS["tanh"](gates[1] * gates[4] + gates[0] * gates[2])
        blocks, slope = _slopes(dh + gh[:, t], dc, *gates, top)
        dz = concat(*blocks, axis=1)
        dz, dc = (
            sequence.kept(where, lengths, t, dz, OPS["zeros_like"](dz)),
            sequence.kept(where, lengths, t, slope, dc),
        )
        dh = sequence.kept(where, lengths, t, matmul(dz, transpose(u)), dh)
        made.append(OPS["expand_dims"](dz, axis=1))
        dw.append(matmul(transpose(x_t), dz))
        du.append(matmul(transpose(before), dz))
    all_steps = concat(*reversed(made), axis=1)
    return all_steps, reduce(add, dw), reduce(add, du), OPS["sum"](all_steps, axis=(0, 1)), dh, dc


@public
def lstm(
    x: Any, weight_ih: Any, weight_hh: Any, bias: Any, state: Any = None, *, lengths: Any = None
) -> tuple[Node, tuple[Node, Node]]:
    """Long short-term memory over x (n, time, f): all outputs (n, time, k) and the last state (h, c), each (n, k).

    z = x_t weight_ih + h weight_hh + bias holds i, f, g, o side by side; c' = sigmoid(f) c + sigmoid(i) tanh(g) and
    h' = sigmoid(o) tanh(c'). `weight_ih` (f, 4 k), `weight_hh` (k, 4 k), `bias` (4 k,). `state` is the first (h, c),
    zeros unless given. Beyond its `lengths` (n,), a sequence has outputs of zero and keeps its state. F. Gers et al.,
    "Learning to Forget", Neural Computation 12, 2000.

    >>> import numpy as np
    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (None, 5, 3)), ("w", (3, 16)), ("u", (4, 16))))
    >>> outputs, (h, c) = lstm(x, w, u, np.zeros(16))
    >>> outputs.shape[1:], h.shape[1:]
    ((5, 4), (4,))
    """
    x, w, u, b = as_nodes((x, weight_ih, weight_hh, bias))
    if state is None:
        state = (OPS["full"](shape=(x.shape[0], u.shape[0]), fill_value=0.0, dtype=x.dtype),) * 2
    hs, *last = _lstm(x, w, u, b, *as_nodes(state), *([] if lengths is None else [as_node(lengths)]))[:3]
    return hs, (last[0], last[1])
