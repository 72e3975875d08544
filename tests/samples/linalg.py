"""Rows for products and transposes."""

from __future__ import annotations

import numpy as np

import hetu as ht

from . import Sample, ints, real


def equation(label: str, text: str, *shapes: tuple[int, ...], **options: bool) -> Sample:
    return Sample(
        "einsum",
        lambda *xs: ht.einsum(text, *xs),
        tuple(real(*s) for s in shapes),
        lambda *xs: np.einsum(text, *xs),
        label,
        **options,
    )


SAMPLES = [
    Sample("permute_dims", lambda x: ht.permute_dims(x, (2, 0, -2)), (real(2, 3, 4),), lambda x: x.transpose(2, 0, 1)),
    Sample("matrix_transpose", ht.matrix_transpose, (real(2, 3, 4),), lambda x: x.swapaxes(1, 2)),
    Sample("matmul", ht.matmul, (real(3, 4), real(4, 2)), lambda a, b: a @ b),
    Sample("matmul", ht.matmul, (real(2, 3, 4), real(4, 2)), lambda a, b: a @ b, "flat-right"),
    Sample("matmul", ht.matmul, (real(3, 4), real(2, 4, 2)), lambda a, b: a @ b, "flat-left"),
    Sample("matmul", ht.matmul, (real(2, 1, 3, 4), real(5, 4, 2)), lambda a, b: a @ b, "batches", fixed=True),
    Sample("matmul", ht.matmul, (real(4), real(4)), lambda a, b: a @ b, "vectors"),
    Sample("matmul", ht.matmul, (real(3, 4), real(4)), lambda a, b: a @ b, "column"),
    Sample("matmul", ht.matmul, (real(2, 3, 4), real(4)), lambda a, b: a @ b, "column-of-a-batch"),
    Sample("matmul", ht.matmul, (real(4), real(4, 3)), lambda a, b: a @ b, "row"),
    Sample("matmul", ht.matmul, (real(4), real(2, 4, 3)), lambda a, b: a @ b, "row-of-a-batch"),
    Sample("matmul", ht.matmul, (ints(2, 3), ints(3, 2)), lambda a, b: a @ b, "integers", order=0, fixed=True),
    Sample(
        "matmul",
        lambda a, b: ht.matrix_transpose(a) @ ht.matrix_transpose(b),
        (real(4, 3), real(2, 4)),
        lambda a, b: a.T @ b.T,
        "transposed",
        fixed=True,
    ),
    Sample("linear", ht.linear, (real(5, 3), real(3, 2), real(2)), lambda x, w, b: x @ w + b),
    Sample("linear", ht.linear, (real(2, 5, 3), real(3, 2), real(2)), lambda x, w, b: x @ w + b, "batches"),
    Sample("outer", ht.outer, (real(3), real(4)), np.outer),
    equation("summed", "ij->j", (3, 4)),
    equation("turned", "ijk->kij", (2, 3, 4)),
    equation("matmul", "ij,jk->ik", (3, 4), (4, 2)),
    equation("batch", "bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    equation("merged", "gtec,gtd->egcd", (2, 3, 2, 4), (2, 3, 5), fixed=True),
    equation("trace-like", "ij,ij->", (3, 4), (3, 4)),
    equation("summed-alone", "ij,kl->il", (3, 4), (2, 5)),
    equation("one", "ijk->ki", (2, 3, 4)),
    equation("three", "i,ij,j", (3,), (3, 4), (4,)),
    equation("implicit", "ba", (3, 4)),
]
