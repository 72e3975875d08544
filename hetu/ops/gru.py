"""The gated recurrent unit over all its time steps as one operator.

The batch comes first, then time; the gates lie in the order r, z, n. Left out: several layers or directions
(compose them).
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

__all__ = ["gru"]

WANTED = "wanted x (n, time, f), weights (f, 3 k) and (k, 3 k), biases (3 k,) and a state of (n, k)"


def _gru_type(
    x: TensorType, w: TensorType, u: TensorType, b: TensorType, d: TensorType, h: TensorType, *lengths: TensorType
) -> tuple[TensorType, ...]:
    require_float(x, w, u, b, d, h)
    shown = f"got x {x}, weights {w} and {u}, biases {b} and {d}, state {h}"
    if (x.ndim, w.ndim, u.ndim, b.ndim, d.ndim, h.ndim) != (3, 2, 2, 1, 1, 2):
        raise ShapeError(shown, fix=WANTED)
    sequence.require_lengths(x.shape, lengths)
    n, steps, inputs = x.shape
    k = u.shape[0]
    wanted = (inputs, 3 * k, 3 * k, 3 * k, 3 * k, n, k)
    if not all(map(compatible, wanted, (*w.shape, u.shape[1], *b.shape, *d.shape, *h.shape))):
        raise ShapeError(shown, fix=WANTED)
    dtype = promote(*(t.dtype for t in (x, w, u, b, d, h)))
    return TensorType((n, steps, k), dtype), TensorType((n, k), dtype), TensorType((n, steps, 4 * k), dtype)


@op(
    name="gru",
    infer=_gru_type,
    dims=sequence.dims_with_lengths("nt!f!,f!k!,h!k!,k!,k!,nh!", "nt!h!,nh!,nt!g!"),
    scratch=True,
)
def _gru(xp: ModuleType, x: Any, w: Any, u: Any, b: Any, d: Any, h: Any, *lengths: Any) -> tuple[Any, ...]:
    """(h of all steps, last h) of `gru`, and for the gradient r, z, n and what r scales, side by side.

    >>> import numpy as np
    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (2, 5, 3)), ("w", (3, 12)), ("u", (4, 12))))
    >>> [output.shape for output in _gru(x, w, u, np.zeros(12), np.zeros(12), np.zeros((2, 4)))]
    [(2, 5, 4), (2, 4), (2, 5, 16)]
    """
    k, from_x = u.shape[0], xp.matmul(x, w) + b
    steps: list[tuple[Any, ...]] = []
    for t in range(x.shape[1]):
        from_h = xp.matmul(h, u) + d
        both = 1 / (1 + xp.exp(-(from_x[:, t, : 2 * k] + from_h[:, : 2 * k])))
        r, z, scaled = both[:, :k], both[:, k:], from_h[:, 2 * k :]
        n = xp.tanh(from_x[:, t, 2 * k :] + r * scaled)
        made = (n + z * (h - n), xp.concat([both, n, scaled], axis=1))
        steps.append(tuple(sequence.kept(xp.where, lengths, t, part, xp.zeros_like(part)) for part in made))
        h = sequence.kept(xp.where, lengths, t, made[0], h)
    hs, gates = sequence.along_time(xp, steps, h, k, 4 * k)
    return hs, h, gates


in_range(_gru, lambda x, w, u, b, d, h, *lengths: sequence.length_ranges(x.shape[1], lengths))


_gru.flops(lambda out, x, w, u, *_, **__: sequence.products_of_steps(x, w, u))


@_gru.grad
def gru_grad(g: list[Node | None], out: tuple[Node, ...], *inputs: Node) -> tuple[Node | None, ...]:
    # only the first two outputs leave this file, so only they can have a gradient
    w, lengths = inputs[1], inputs[6:]
    seeds = [OPS["zeros_like"](o) if s is None else s for s, o in zip(g, out[:2])]
    dz, *others = gru_dx(*seeds, *inputs[:6], out[0], out[2], *lengths)
    return OPS["matmul"](dz[:, :, : w.shape[1]], OPS["matrix_transpose"](w)), *others, *(None for _ in lengths)


def _dx_type(*types: TensorType) -> tuple[TensorType, ...]:
    return types[9], *types[3:8]


@op(
    infer=_dx_type,
    inplace={0: (9,)},
    dims=sequence.dims_with_lengths("nt!h!,nh!,nt!f!,f!k!,h!k!,k!,k!,nh!,nt!h!,nt!g!", "nt!g!,f!k!,h!k!,k!,k!,nh!"),
    scratch=True,
)
def gru_dx(
    xp: ModuleType,
    gh: Any,
    dh: Any,
    x: Any,
    w: Any,
    u: Any,
    b: Any,
    d: Any,
    h: Any,
    hs: Any,
    gates: Any,
    *lengths: Any,
) -> tuple[Any, ...]:
    """The gradients of `gru` with respect to (r, z, n before their functions and what r scales, w, u, b, d, h).

    `gh` (n, time, k) and `dh` (n, k) are those of its outputs; then follow its inputs and what it computed.

    >>> import numpy as np
    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (2, 5, 3)), ("w", (3, 12)), ("u", (4, 12))))
    >>> [g.shape for g in ht.gradients(ht.sum(ht.gru(x, w, u, np.zeros(12), np.zeros(12))[0]), [x, w, u])]
    [(2, 5, 3), (3, 12), (4, 12)]
    """
    k, (rows, time, _) = u.shape[0], x.shape
    steps: list[Any] = []
    for t in reversed(range(time)):
        blocks = [gates[:, t, j * k : (j + 1) * k] for j in range(4)]
        blocks.append(hs[:, t - 1, :] if t else h)
        slopes, slope = _slopes(dh + gh[:, t, :], *blocks)
        slope = slope + xp.matmul(xp.concat([*slopes[:2], slopes[3]], axis=1), xp.matrix_transpose(u))
        dz, dh = xp.concat(slopes, axis=1), sequence.kept(xp.where, lengths, t, slope, dh)
        steps.append((sequence.kept(xp.where, lengths, t, dz, xp.zeros_like(dz)),))
    (dz,) = sequence.along_time(xp, steps[::-1], h, 4 * k)
    of_x = xp.reshape(dz[:, :, : 3 * k], (rows * time, 3 * k))
    of_h = xp.reshape(xp.concat([dz[:, :, : 2 * k], dz[:, :, 3 * k :]], axis=2), (rows * time, 3 * k))
    before = xp.concat([xp.expand_dims(h, axis=1), hs], axis=1)[:, :time, :]
    dw, du = (
        xp.matmul(xp.matrix_transpose(xp.reshape(a, (rows * time, a.shape[2]))), of)
        for a, of in ((x, of_x), (before, of_h))
    )
    return dz, dw, du, xp.sum(of_x, axis=0), xp.sum(of_h, axis=0), dh


def _slopes(dh: Any, r: Any, z: Any, n: Any, scaled: Any, before: Any) -> tuple[list[Any], Any]:
    """The gradients of r, z, n before their functions and of `scaled`, and what of dh passes by; arrays or nodes."""
    dn = dh * (1 - z) * (1 - n * n)
    return [dn * scaled * r * (1 - r), dh * (before - n) * z * (1 - z), dn, dn * r], dh * z


gru_dx.flops(lambda out, gh, dh, x, w, u, *_, **__: sequence.products_of_steps(x, w, u, u))


@gru_dx.decompose
def gru_dx_parts(
    gh: Node, dh: Node, x: Node, w: Node, u: Node, b: Node, d: Node, h: Node, *others: Node
) -> tuple[Node, ...]:
    matmul, transpose, concat, where = OPS["matmul"], OPS["matrix_transpose"], OPS["concat"], OPS["where"]
    k, steps, lengths = u.shape[0], [], others[2:]
    for t in sequence.steps_of(x):
        from_x, from_h = matmul(x[:, t], w) + b, matmul(h, u) + d
        r, z = (OPS["sigmoid"](from_x[:, j * k : (j + 1) * k] + from_h[:, j * k : (j + 1) * k]) for j in (0, 1))
        scaled = from_h[:, 2 * k :]
        n = OPS["tanh"](from_x[:, 2 * k :] + r * scaled)
        steps.append((x[:, t], h, (r, z, n, scaled, h)))
        h = sequence.kept(where, lengths, t, n + z * (h - n), h)
    made, dw, du, dd = [], [], [], []
    for t, (x_t, before, gates) in reversed(list(enumerate(steps))):
        dz, slope = _slopes(dh + gh[:, t], *gates)
        dz = [sequence.kept(where, lengths, t, part, OPS["zeros_like"](part)) for part in dz]
        of_x, of_h = concat(*dz[:3], axis=1), concat(dz[0], dz[1], dz[3], axis=1)
        dh = sequence.kept(where, lengths, t, slope + matmul(of_h, transpose(u)), dh)
        made.append(OPS["expand_dims"](concat(*dz, axis=1), axis=1))
        dw.append(matmul(transpose(x_t), of_x))
        du.append(matmul(transpose(before), of_h))
        dd.append(OPS["sum"](of_h, axis=0))
    all_steps = concat(*reversed(made), axis=1)
    db = OPS["sum"](all_steps[:, :, : 3 * k], axis=(0, 1))
    return all_steps, reduce(add, dw), reduce(add, du), db, reduce(add, dd), dh


@public
def gru(
    x: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any, state: Any = None, *, lengths: Any = None
) -> tuple[Node, Node]:
    """Gated recurrent unit over x (n, time, f): all outputs (n, time, k) and the last state h (n, k).

    x_t weight_ih + bias_ih and h weight_hh + bias_hh hold what r, z and n get from x and from h, side by side:
    r = sigmoid(x_r + h_r), z = sigmoid(x_z + h_z), n = tanh(x_n + r h_n), h' = (1 - z) n + z h. `weight_ih` (f, 3 k),
    `weight_hh` (k, 3 k), biases (3 k,). `state` is the first h, zeros unless given. Beyond its `lengths` (n,), a
    sequence has outputs of zero and keeps its state. K. Cho et al., EMNLP 2014.

    >>> import numpy as np
    >>> import hetu as ht
    >>> x, w, u = (ht.placeholder(n, s) for n, s in (("x", (None, 5, 3)), ("w", (3, 12)), ("u", (4, 12))))
    >>> outputs, h = gru(x, w, u, np.zeros(12), np.zeros(12))
    >>> outputs.shape[1:], h.shape[1:]
    ((5, 4), (4,))
    """
    x, w, u, b, d = as_nodes((x, weight_ih, weight_hh, bias_ih, bias_hh))
    if state is None:
        state = OPS["full"](shape=(x.shape[0], u.shape[0]), fill_value=0.0, dtype=x.dtype)
    hs, last = _gru(x, w, u, b, d, state, *([] if lengths is None else [as_node(lengths)]))[:2]
    return hs, last
