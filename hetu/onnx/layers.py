"""Layers of ONNX: products of matrices, also of integers, norms, and recurrence in one direction or both.

Recurrent layers, whose gates lie side by side, are ours where we have the same gates; others are made step by step,
each of which becomes nodes. Left out: gates that are clipped or joined, activations with parameters.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import ops
from ..core.errors import DataError
from ..core.graph import Node
from ..core.operators import cast_to
from ..core.types import normalize_axis, unify
from ..ops.batch_norm import lift
from ..ops.sequence import kept, steps_of
from .arithmetic import FLOAT, quantized, shifted
from .indexing import places, whole
from .meaning import KnownArray, OutputCount, Untrained, bounded, few, meaning, meanings

# -- products ----------------------------------------------------------------------------------------------------------


@meaning("Gemm")
def gemm(
    a: Node, b: Node, c: Node | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Node:
    a = ops.matrix_transpose(a) if transA else a
    b = ops.matrix_transpose(b) if transB else b
    if c is not None and c.ndim == 1 and c.shape == b.shape[1:] and alpha == beta == 1:
        return ops.linear(a, b, c)
    y = ops.matmul(a, b)
    y = y if alpha == 1 else y * alpha
    return y if c is None else y + (c if beta == 1 else c * beta)


@meaning("Einsum")
def einsum(*inputs: Node, equation: str) -> Node:
    """Letters take the place of an ellipsis, and of one that comes again, where all but the diagonal is 0."""
    free = iter(sorted({*string.ascii_letters} - {*equation}))
    left, arrow, right = equation.replace(" ", "").partition("->")
    lengths = [x.ndim - len(term) + 3 for term, x in zip(left.split(","), inputs) if "..." in term]
    rest = "".join(next(free) for _ in range(max(lengths, default=0)))
    if not arrow:
        right = "..." * ("..." in left) + "".join(sorted(c for c in {*left} - {*",."} if left.count(c) == 1))
    terms, operands = [], []
    for term, x in zip(left.split(","), inputs, strict=True):
        term = term.replace("...", rest[len(rest) - (x.ndim - len(term) + 3) :])
        for axis, letter in enumerate(term):
            if (first := term.index(letter)) < axis:
                along = (places(x.shape[axis], x.ndim, i) for i in (first, axis))
                x = ops.where(ops.equal(*along), x, 0)
                term = f"{term[:axis]}{next(free)}{term[axis + 1 :]}"
        terms.append(term)
        operands.append(x)
    return ops.einsum(f"{','.join(terms)}->{right.replace('...', rest)}", *operands)


def matmul_integer(a: Node, b: Node, a_zero: Node | None = None, b_zero: Node | None = None) -> Node:
    return ops.matmul(shifted(a, a_zero, -2), shifted(b, b_zero, -1))


meanings(MatMulInteger=matmul_integer, QLinearMatMul=quantized(matmul_integer, axis=-1))


@meaning("DFT")
def fourier(
    x: Node, dft_length: KnownArray = None, axis: KnownArray = None, *, inverse: int = 0, onesided: int = 0
) -> Node:
    """As a product with a matrix: what becomes of ones. The parts of complex numbers lie along the last axis."""
    place, half = normalize_axis(-2 if axis is None else whole(axis)[0], x.ndim), inverse and onesided
    size, parts = int(x.shape[place]), int(x.shape[-1])
    n = whole(dft_length)[0] if dft_length is not None else 2 * (size - 1) if half else size
    bounded(size, n)
    transform = np.fft.irfft if half else np.fft.ifft if inverse else np.fft.fft
    turns = np.stack([transform(np.eye(size) * part, n) for part in (1, 1j)[:parts]], axis=1)
    turns = turns[..., : n // 2 + 1 if onesided and not inverse else n].copy()
    order = [*(i for i in range(x.ndim - 1) if i != place), place, x.ndim - 1]
    rows = ops.permute_dims(x, order)
    rows = ops.reshape(rows, (*rows.shape[:-2], size * parts))
    made = ops.matmul(rows, turns.view(float).reshape(size * parts, -1).astype(x.dtype))
    made = ops.reshape(made, (*made.shape[:-1], turns.shape[-1], -1))
    return ops.permute_dims(made, np.argsort(order).tolist())


# -- norms -------------------------------------------------------------------------------------------------------------


@meaning("BatchNormalization")
def batch_norm(
    x: Node, scale: Node, bias: Node, mean: Untrained, var: Untrained, *, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 0,
) -> tuple[Node, ...]:  # fmt: skip
    """By the statistics given, or, in training, by those of the batch, beside which stand new running ones."""
    running = mean, var
    if training_mode:
        others = tuple(i for i in range(x.ndim) if i != 1)
        mean, var = ops.mean(x, axis=others), ops.var(x, axis=others)
    factor = cast_to(scale, var.dtype) * ops.rsqrt(var + epsilon)
    y = x * lift(factor, x, 1) + lift(cast_to(bias, var.dtype) - mean * factor, x, 1)
    return y, *(old * momentum + new * (1 - momentum) for old, new in zip(running, (mean, var)))


meanings(
    InstanceNormalization=lambda x, scale, bias, *, epsilon=1e-5: ops.group_norm(
        x, scale, bias, groups=int(unify(x.shape[1], scale.shape[0])), epsilon=epsilon
    )
)


@meaning("LayerNormalization")
def layer_norm(
    x: Node, scale: Node, bias: Node | None = None, *, axis: int = -1, epsilon: float = 1e-5, outputs: OutputCount = 1
) -> tuple[Node, ...]:
    """In float32 at least."""
    last = tuple(range(axis % x.ndim, x.ndim))
    if outputs == 1 and len(last) == 1 and bias is not None and scale.ndim == bias.ndim == 1:
        return (ops.layer_norm(x, scale, bias, epsilon=epsilon),)
    wide = cast_to(x, FLOAT) if x.dtype.itemsize == 2 else x
    mean = ops.mean(wide, axis=last, keepdims=True)
    inverse = ops.rsqrt(ops.var(wide, axis=last, keepdims=True) + epsilon)
    y = cast_to((wide - mean) * inverse, x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@meaning("LRN")
def local_response(x: Node, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Node:
    """Each channel by the squares of its neighbors."""
    before, channels = (few(size, "neighbors") - 1) // 2, x.shape[1]
    borders = tuple((before, size - 1 - before) if i == 1 else (0, 0) for i in range(x.ndim))
    squares = ops.pad(ops.square(x), pad_width=borders)
    total = sum((squares[:, k : k + channels] for k in range(1, size)), squares[:, :channels])
    return x / (bias + alpha / size * total) ** beta


# -- recurrence --------------------------------------------------------------------------------------------------------


States = tuple[Node, ...]
ACTIVATIONS: dict[str, Callable[[Node], Node]] = {"tanh": ops.tanh, "sigmoid": ops.sigmoid, "relu": ops.relu}
USUAL = {1: ["tanh"], 3: ["sigmoid", "tanh"], 4: ["sigmoid", "tanh", "tanh"]}  # by the number of gates


@meaning("RNN", "GRU", "LSTM")
def recurrent(
    x: Node, w: Node, r: Node, b: Any = None, lengths: Any = None, h: Any = None, c: Any = None, p: Any = None, *,
    activations: Any = None, direction: str = "forward", hidden_size: int = 0, input_forget: int = 0, layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Node, ...]:  # fmt: skip
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
