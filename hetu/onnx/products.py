"""Operators of ONNX that multiply matrices, also those of integers."""

from __future__ import annotations

import string

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import cast_to
from ..core.types import normalize_axis
from .elementwise import dequantize, quantize, shifted
from .known import bounded
from .meaning import KnownArray, meaning
from .shapes import places, whole


@meaning("MatMul")
def matmul(a: Node, b: Node) -> Node:
    """A vector is a row on the left and a column on the right, and its axis vanishes."""
    row, column = a.ndim == 1, b.ndim == 1
    y = ops.matmul(ops.expand_dims(a, axis=0) if row else a, ops.expand_dims(b, axis=1) if column else b)
    y = ops.squeeze(y, -1) if column else y
    return ops.squeeze(y, -1 if column else -2) if row else y


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


@meaning("MatMulInteger")
def matmul_integer(a: Node, b: Node, a_zero: Node | None = None, b_zero: Node | None = None) -> Node:
    return ops.matmul(shifted(a, a_zero, -2), shifted(b, b_zero, -1))


@meaning("QLinearMatMul")
def quantized_matmul(
    a: Node, a_scale: Node, a_zero: Node, b: Node, b_scale: Node, b_zero: Node, y_scale: Node, y_zero: Node
) -> Node:
    scale = cast_to(a_scale, np.dtype("float32")) * cast_to(b_scale, np.dtype("float32"))
    return quantize(dequantize(matmul_integer(a, b, a_zero, b_zero), scale), y_scale, y_zero)


@meaning("DFT")
def fourier(
    x: Node, dft_length: KnownArray = None, axis: KnownArray = None, *, inverse: int = 0, onesided: int = 0
) -> Node:
    """The sums themselves, as a product with a matrix. The parts of complex numbers lie along the last axis."""
    place, half = normalize_axis(-2 if axis is None else whole(axis)[0], x.ndim), inverse and onesided
    size, parts = int(x.shape[place]), int(x.shape[-1])
    n = whole(dft_length)[0] if dft_length is not None else 2 * (size - 1) if half else size
    there, many = min(size, n // 2 + 1 if half else n), n // 2 + 1 if onesided and not inverse else n
    bounded(there, many)
    turns = np.exp((2j if inverse else -2j) * np.pi / n * (np.outer(np.arange(there), np.arange(many)) % n))
    if inverse:
        turns = turns / n
    if half:  # the other half is that of real numbers
        turns[1 : (n + 1) // 2] *= 2
    complex_ = np.stack([turns, 1j * turns], axis=1)[:, :parts]  # what the real part becomes, and the imaginary one
    matrix = np.stack([complex_.real, complex_.imag], axis=-1)[..., : 1 if half else 2].astype(x.dtype)
    order = [*(i for i in range(x.ndim - 1) if i != place), place, x.ndim - 1]
    rows = ops.permute_dims(x, order)[..., :there, :]
    made = ops.matmul(ops.reshape(rows, (*rows.shape[:-2], there * parts)), matrix.reshape(there * parts, -1))
    made = ops.reshape(made, (*rows.shape[:-2], many, -1))
    return ops.permute_dims(made, np.argsort(order).tolist())
