"""The long short-term memory over all its time steps as one operator.

Inside, features come first and the batch last: the four gates of a step are then blocks of rows, which elementwise
functions pass through at full speed. [x, 1, h] of all steps lie in one buffer, so that the bias and both products are
one call a step, and the gradient of all weights is one product over all steps. Gates lie in the order i, f, g, o.
Ignored on purpose: several layers or directions, projections, sequences of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from types import ModuleType
from typing import Any

import numpy as np

from .. import blas
from ..errors import ShapeError, public
from ..graph import OPS, Node
from ..op import as_nodes, op, require_float
from ..types import Dim, TensorType, compatible, promote

__all__ = ["lstm", "lstm_dx"]

Call = Callable[[], Any]
WANTED = "wanted x (n, time, f), weights (f, 4 k) and (k, 4 k), bias (4 k,) and states of (n, k)"


def _lstm_type(
    x: TensorType, w: TensorType, u: TensorType, b: TensorType, h: TensorType, c: TensorType
) -> tuple[TensorType, ...]:
    require_float(x, w, u, b, h, c)
    shown = f"got x {x}, weights {w} and {u}, bias {b}, states {h} and {c}"
    if (x.ndim, w.ndim, u.ndim, b.ndim, h.ndim, c.ndim) != (3, 2, 2, 1, 2, 2):
        raise ShapeError(shown, fix=WANTED)
    if isinstance(x.shape[1], Dim):
        raise ShapeError("the number of time steps is unknown", fix="give the time axis of x a fixed size")
    n, steps, inputs = x.shape
    k = u.shape[0]
    wanted = (inputs, 4 * k, 4 * k, 4 * k, k, n, k, n)
    if not all(map(compatible, wanted, (*w.shape, u.shape[1], *b.shape, *h.shape, *c.shape))):
        raise ShapeError(shown, fix=WANTED)
    dtype = promote(*(t.dtype for t in (x, w, u, b, h, c)))
    state = TensorType((steps, k, n), dtype)
    return state, state, state, TensorType((inputs + 1 + k, steps, n), dtype), TensorType((steps, 4 * k, n), dtype)


@op(
    name="lstm",
    infer=_lstm_type,
    dims="nt!f!,f!k!,h!k!,k!,h!n,h!n->t!h!n,t!h!n,t!h!n,j!t!n,t!k!n",
)
def _lstm(xp: ModuleType, x: Any, w: Any, u: Any, b: Any, h: Any, c: Any) -> tuple[Any, ...]:
    """(h, c, tanh(c), [x, 1, h before], gates) of `lstm` for all steps; the last three are for the gradient.

    States are (time, k, n), gates (time, 4 k, n); the first states `h` and `c` are (k, n).

    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (2, 5, 3)), ("w", (3, 16)), ("u", (4, 16))))
    >>> [output.shape for output in _lstm(x, w, u, np.zeros(16), np.zeros((4, 2)), np.zeros((4, 2)))]
    [(5, 4, 2), (5, 4, 2), (5, 4, 2), (8, 5, 2), (5, 16, 2)]
    """
    k = u.shape[0]
    weights = xp.matrix_transpose(xp.concat([w, xp.reshape(b, (1, -1)), u], axis=0))
    ones = xp.ones((1, x.shape[0]), dtype=x.dtype)
    steps: list[tuple[Any, ...]] = []
    for t in range(x.shape[1]):
        joined = xp.concat([xp.matrix_transpose(x[:, t, :]), ones, h], axis=0)
        z = xp.matmul(weights, joined)
        i, f, o = (1 / (1 + xp.exp(-z[j * k : (j + 1) * k, :])) for j in (0, 1, 3))
        g = xp.tanh(z[2 * k : 3 * k, :])
        c = f * c + i * g
        top = xp.tanh(c)
        h = o * top
        steps.append((h, c, top, joined, xp.concat([i, f, g, o], axis=0)))
    hs, cs, tops, joined, gates = zip(*steps)
    stacked = (xp.stack(parts, axis=0) for parts in (hs, cs, tops))
    return (*stacked, xp.stack(joined, axis=1), xp.stack(gates, axis=0))


@_lstm.grad
def lstm_grad(g: list[Node | None], out: tuple[Node, ...], *inputs: Node) -> tuple[Node, ...]:
    # only the first two outputs leave this file, so only they can have a gradient
    x, w = inputs[:2]
    seeds = [OPS["zeros_like"](o) if s is None else s for s, o in zip(g, out[:2])]
    dz, *others = lstm_dx(*seeds, *inputs, *out[1:])
    dx = OPS["matmul"](w, OPS["reshape"](dz, shape=(dz.shape[0], -1)))
    dx = OPS["reshape"](dx, shape=(x.shape[2], x.shape[1], x.shape[0]))
    return OPS["permute_dims"](dx, axes=(2, 1, 0)), *others


def _fast(xp: ModuleType, *arrays: np.ndarray) -> bool:
    dtype = arrays[0].dtype
    return xp is np and dtype.char in "fd" and all(a.dtype == dtype and a.size for a in arrays)


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Call:
    return blas.gemm(a, b, out) or partial(np.matmul, a, b, out)


def _gates(array: np.ndarray) -> list[np.ndarray]:
    """The blocks i, f, g, o of (4 k, n)."""
    k = len(array) // 4
    return [array[j * k : (j + 1) * k] for j in range(4)]


@_lstm.bind
def lstm_bind(xp: ModuleType, out: Any, x: Any, w: Any, u: Any, b: Any, h: Any, c: Any) -> list[Call] | None:
    """Logistic functions are 1 / (1 + exp(-z)) and tanh(z) is 2 / (1 + exp(-2 z)) - 1: one exp for all gates."""
    if not _fast(xp, *out, x, w, u, b, h, c):
        return None
    hs, cs, tops, joined, gates = out
    f, k, one, two = w.shape[0], u.shape[0], x.dtype.type(1), x.dtype.type(2)
    weights, part = np.empty((4 * k, f + 1 + k), x.dtype), np.empty(c.shape, x.dtype)
    scale = np.repeat(np.array([-1, -1, -2, -1], x.dtype), k)
    calls: list[Call] = [
        partial(np.multiply, w.T, scale[:, None], weights[:, :f]),
        partial(np.multiply, b, scale, weights[:, f]),
        partial(np.multiply, u.T, scale[:, None], weights[:, f + 1 :]),
        partial(np.copyto, joined[:f], x.transpose(2, 1, 0)),
        partial(joined[f].fill, 1),
        partial(np.copyto, joined[f + 1 :, 0], h),
    ]
    for t in range(len(hs)):
        z, before = gates[t], cs[t - 1] if t else c
        i, forget, g, o = _gates(z)
        calls += [
            _product(weights, joined[:, t], z),
            partial(np.exp, z, z),
            partial(np.add, z, one, z),
            partial(np.reciprocal, z, z),
            partial(np.multiply, g, two, g),
            partial(np.subtract, g, one, g),
            partial(np.multiply, i, g, cs[t]),
            partial(np.multiply, forget, before, part),
            partial(np.add, cs[t], part, cs[t]),
            partial(np.tanh, cs[t], tops[t]),
            partial(np.multiply, o, tops[t], hs[t]),
        ]
        if t + 1 < len(hs):
            calls.append(partial(np.copyto, joined[f + 1 :, t + 1], hs[t]))
    return calls


def _dx_type(*types: TensorType) -> tuple[TensorType, ...]:
    _, _, x, w, u, b, h, c, *_ = types
    return TensorType((u.shape[1], x.shape[1], x.shape[0]), x.dtype), w, u, b, h, c


@op(
    infer=_dx_type,
    dims="t!h!n,t!h!n,nt!f!,f!k!,h!k!,k!,h!n,h!n,t!h!n,t!h!n,j!t!n,t!k!n->k!t!n,f!k!,h!k!,k!,h!n,h!n",
)
def lstm_dx(
    xp: ModuleType,
    gh: Any,
    gc: Any,
    x: Any,
    w: Any,
    u: Any,
    b: Any,
    h: Any,
    c: Any,
    cs: Any,
    tops: Any,
    joined: Any,
    gates: Any,
) -> tuple[Any, ...]:
    """The gradients of `lstm` with respect to (gates before their functions (4 k, time, n), w, u, b, h, c).

    `gh` and `gc` (time, k, n) are the gradients of its states; then follow its inputs and what it computed.

    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (2, 5, 3)), ("w", (3, 16)), ("u", (4, 16))))
    >>> [g.shape for g in ht.gradients(ht.sum(ht.lstm(x, w, u, np.zeros(16))[0]), [x, w, u])]
    [(2, 5, 3), (3, 16), (4, 16)]
    """
    k, f = u.shape[0], w.shape[0]
    dh, dc = xp.zeros_like(h), xp.zeros_like(c)
    steps: list[Any] = []
    for t in reversed(range(gh.shape[0])):
        blocks = [gates[t, j * k : (j + 1) * k, :] for j in range(4)]
        dz, dc = _slopes(dh + gh[t, ...], dc + gc[t, ...], *blocks, cs[t - 1, ...] if t else c, tops[t, ...])
        steps.append(xp.concat(dz, axis=0))
        dh = xp.matmul(u, steps[-1])
    dz = xp.stack(steps[::-1], axis=1)
    rows = xp.reshape(dz, (4 * k, -1))
    product = xp.matmul(xp.reshape(joined, (joined.shape[0], -1)), xp.matrix_transpose(rows))
    return dz, product[:f, :], product[f + 1 :, :], product[f, :], dh, dc


def _slopes(dh: Any, dc: Any, i: Any, f: Any, g: Any, o: Any, before: Any, top: Any) -> tuple[list[Any], Any]:
    """The gradients of the four gates before their functions, and of c before the step; for arrays and for nodes."""
    dc = dc + dh * o * (1 - top * top)
    gates = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * top * o * (1 - o)]
    return gates, dc * f


@lstm_dx.decompose
def lstm_dx_parts(
    gh: Node, gc: Node, x: Node, w: Node, u: Node, b: Node, h: Node, c: Node, *_: Node
) -> tuple[Node, ...]:
    matmul, transpose, concat = OPS["matmul"], OPS["matrix_transpose"], OPS["concat"]
    k, dh, dc, steps = u.shape[0], OPS["zeros_like"](h), OPS["zeros_like"](c), []
    bias = OPS["reshape"](b, shape=(-1, 1))
    for t in range(x.shape[1]):
        z = matmul(transpose(w), transpose(x[:, t])) + bias + matmul(transpose(u), h)
        i, f, o = (OPS["sigmoid"](z[j * k : (j + 1) * k]) for j in (0, 1, 3))
        g = OPS["tanh"](z[2 * k : 3 * k])
        steps.append((x[:, t], h, (i, f, g, o, c)))
        c = f * c + i * g
        h = o * OPS["tanh"](c)
    made, dw, du = [], [], []
    for t, (x_t, before, gates) in reversed(list(enumerate(steps))):
        top = OPS["tanh"](gates[1] * gates[4] + gates[0] * gates[2])
        blocks, dc = _slopes(dh + gh[t], dc + gc[t], *gates, top)
        dz = concat(*blocks, axis=0)
        dh = matmul(u, dz)
        made.append(OPS["expand_dims"](dz, axis=1))
        dw.append(matmul(transpose(x_t), transpose(dz)))
        du.append(matmul(before, transpose(dz)))
    all_steps = concat(*reversed(made), axis=1)
    return all_steps, reduce(add, dw), reduce(add, du), OPS["sum"](all_steps, axis=(1, 2)), dh, dc


@lstm_dx.bind
def lstm_dx_bind(
    xp: ModuleType,
    out: Any,
    gh: Any,
    gc: Any,
    x: Any,
    w: Any,
    u: Any,
    b: Any,
    h: Any,
    c: Any,
    cs: Any,
    tops: Any,
    joined: Any,
    gates: Any,
) -> list[Call] | None:
    if not _fast(xp, *out, gh, gc, w, u, c, cs, tops, joined, gates):
        return None
    dz, dw, du, db, dh, dc = out
    f, slopes = w.shape[0], np.empty(gates.shape[1:], u.dtype)
    product = np.empty((dz.shape[0], joined.shape[0]), u.dtype)
    calls: list[Call] = [partial(dh.fill, 0), partial(dc.fill, 0)]
    for t in reversed(range(len(gh))):
        calls += [*_added(dh, gh[t]), *_added(dc, gc[t])]
        calls += _step_back(dz[:, t], dh, dc, slopes, cs[t - 1] if t else c, tops[t], gates[t])
        calls.append(_product(u, dz[:, t], dh))
    return [
        *calls,
        _product(dz.reshape(len(dz), -1), joined.reshape(len(joined), -1).T, product),
        partial(np.copyto, dw, product[:, :f].T),
        partial(np.copyto, db, product[:, f]),
        partial(np.copyto, du, product[:, f + 1 :].T),
    ]


def _step_back(dz: Any, dh: Any, dc: Any, slopes: Any, before: Any, top: Any, gates: Any) -> list[Call]:
    """One time step: dz from dh and dc, which then are those of the step before, dh without its product.

    The last pass over each block writes into `dz`, whose rows lie apart: that takes twice the time.
    """
    one = dz.dtype.type(1)
    i, f, g, o = _gates(gates)
    si, sf, sg, so = _gates(slopes)
    di, df, dg, do = _gates(dz)
    return [
        partial(np.multiply, gates, gates, slopes),
        partial(np.subtract, one, sg, sg),
        partial(np.subtract, gates[: 2 * len(dh)], slopes[: 2 * len(dh)], slopes[: 2 * len(dh)]),
        partial(np.subtract, o, so, so),
        partial(np.multiply, so, top, so),
        partial(np.multiply, so, dh, do),
        partial(np.multiply, dh, o, dh),
        partial(np.multiply, top, top, so),
        partial(np.multiply, so, dh, so),
        partial(np.subtract, dh, so, dh),
        partial(np.add, dc, dh, dc),
        partial(np.multiply, si, g, si),
        partial(np.multiply, si, dc, di),
        partial(np.multiply, sf, before, sf),
        partial(np.multiply, sf, dc, df),
        partial(np.multiply, sg, i, sg),
        partial(np.multiply, sg, dc, dg),
        partial(np.multiply, dc, f, dc),
    ]


def _added(total: np.ndarray, term: np.ndarray) -> list[Call]:
    """total += term, for nothing where the term is a constant zero (one element spread over the whole)."""
    zero = not any(term.strides) and not term.flags.writeable and not term.flat[0]
    return [] if zero else [partial(np.add, total, term, total)]


@public
def lstm(x: Node, weight_ih: Node, weight_hh: Node, bias: Node, state: Any = None) -> tuple[Node, tuple[Node, Node]]:
    """Long short-term memory over x (n, time, f): all outputs (n, time, k) and the last state (h, c), each (n, k).

    z = x_t weight_ih + h weight_hh + bias holds i, f, g, o side by side; c' = sigmoid(f) c + sigmoid(i) tanh(g) and
    h' = sigmoid(o) tanh(c'). `weight_ih` (f, 4 k), `weight_hh` (k, 4 k), `bias` (4 k,). `state` is the first (h, c),
    zeros unless given. F. Gers et al., "Learning to Forget", Neural Computation 12, 2000.

    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (None, 5, 3)), ("w", (3, 16)), ("u", (4, 16))))
    >>> outputs, (h, c) = lstm(x, w, u, np.zeros(16))
    >>> outputs.shape[1:], h.shape[1:]
    ((5, 4), (4,))
    """
    x, w, u, b = as_nodes((x, weight_ih, weight_hh, bias))
    if state is None:
        first = [OPS["full"](shape=(u.shape[0], x.shape[0]), fill_value=0.0, dtype=x.dtype)] * 2
    else:
        first = [OPS["matrix_transpose"](s) for s in as_nodes(state)]
    hs, cs, *_ = _lstm(x, w, u, b, *first)
    last = tuple(OPS["matrix_transpose"](s[-1]) for s in (hs, cs))
    return OPS["permute_dims"](hs, axes=(2, 0, 1)), last
