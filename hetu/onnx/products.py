"""Operators of ONNX that multiply matrices, also those of integers."""

from __future__ import annotations

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import cast_to
from .elementwise import dequantize, quantize
from .meaning import meaning

INT32 = np.dtype("int32")


@meaning("MatMul")
def matmul(a: Node, b: Node) -> Node:
    return ops.matmul(a, b)


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
    return ops.einsum(equation.replace(" ", ""), *inputs)


def shifted(x: Node, zero: Node | None, axis: int) -> Node:
    """x - zero in 32 bits, where `zero` may have a number for each place of an axis."""
    wide = cast_to(x, INT32)
    if zero is None:
        return wide
    z = cast_to(zero, INT32)
    return wide - (ops.expand_dims(z, axis=axis) if z.ndim and z.shape != (1,) and z.ndim < x.ndim else z)


@meaning("MatMulInteger")
def matmul_integer(a: Node, b: Node, a_zero: Node | None = None, b_zero: Node | None = None) -> Node:
    return ops.matmul(shifted(a, a_zero, -1), shifted(b, b_zero, 0))


@meaning("QLinearMatMul")
def quantized_matmul(
    a: Node, a_scale: Node, a_zero: Node, b: Node, b_scale: Node, b_zero: Node, y_scale: Node, y_zero: Node
) -> Node:
    y = ops.matmul(shifted(a, a_zero, -1), shifted(b, b_zero, 0))
    scale = cast_to(a_scale, np.dtype("float32")) * cast_to(b_scale, np.dtype("float32"))
    return quantize(dequantize(y, scale), y_scale, y_zero)
