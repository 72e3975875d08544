"""Sums of products named by letters: `einsum("bqd,bkd->bqk", q, k)`.

The equation is the meaning, the sharding rule and the source of the gradient at once. Left out: the ellipsis, a letter
twice in one operand (a diagonal), and broadcasting of size 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError, public
from ..core.graph import Node
from ..core.kernels import Call
from ..core.op import as_nodes, op
from ..core.operators import broadcast_like
from ..core.types import Size, TensorType, compatible, unify
from .linalg import product_dtype
from .shape import expand_dims

__all__ = ["einsum"]


def _einsum_attrs(*types: TensorType, equation: str) -> dict[str, Any]:
    """The equation without spaces and with an explicit right side."""
    text = equation.replace(" ", "")
    if "..." in text:
        raise ArgumentError(f"{equation!r} has an ellipsis", fix="give every axis a letter, or use ht.matmul")
    left, arrow, right = text.partition("->")
    if not arrow:
        counts = Counter(left.replace(",", ""))
        right = "".join(sorted(letter for letter, n in counts.items() if n == 1))
    terms = left.split(",")
    if not all(t.isascii() and (t.isalpha() or not t) for t in (*terms, right)):
        raise ArgumentError(f"{equation!r} is not an equation", fix="write letters, commas and '->': 'ij,jk->ik'")
    if len(terms) != len(types):
        raise ArgumentError(f"{equation!r} names {len(terms)} operands, got {len(types)}", fix="one term an operand")
    for term in (*terms, right):
        if len(set(term)) != len(term):
            raise ArgumentError(f"{equation!r} has a letter twice in {term!r}", fix="multiply by an identity matrix")
    if not set(right) <= set(left):
        raise ArgumentError(f"{equation!r} makes a letter that no operand has", fix="use ht.broadcast_to")
    return {"equation": f"{left}->{right}"}


def _einsum_type(*types: TensorType, equation: str) -> TensorType:
    terms, right = terms_of(equation)
    sizes: dict[str, Size] = {}
    for term, type_ in zip(terms, types):
        if len(term) != type_.ndim:
            raise ShapeError(f"{term!r} names {len(term)} axes of {type_}", fix="give every axis one letter")
        for letter, size in zip(term, type_.shape):
            known = sizes.setdefault(letter, size)
            if not compatible(known, size):
                raise ShapeError(f"{letter!r} is {known} and {size}", fix="axes of one letter must have one size")
            sizes[letter] = unify(known, size)
    return TensorType(tuple(sizes[letter] for letter in right), product_dtype(*types))


def terms_of(equation: str) -> tuple[list[str], str]:
    left, _, right = equation.partition("->")
    return left.split(","), right


@op(precision="low", name="einsum", infer=_einsum_type, dims=lambda *_, equation: equation, linear=tuple(range(8)))
def _einsum(xp: ModuleType, *operands: Any, equation: str) -> Any:
    """The sum of products that `equation` names.

    >>> import hetu as ht
    >>> ht.evaluate(einsum("i,i->", [1.0, 2.0], [3.0, 4.0])).tolist()
    11.0
    """
    return xp.asarray(xp.einsum(equation, *operands, optimize=True))


_einsum.normalize(_einsum_attrs)


@_einsum.grad
def einsum_grad(g: Node, y: Node, *operands: Node, equation: str) -> tuple[Node, ...]:
    """By exchange: the gradient takes the place of the operand, and the operand's letters become the result's."""
    terms, right = terms_of(equation)
    made = []
    for i, (term, operand) in enumerate(zip(terms, operands)):
        others = [*terms[:i], *terms[i + 1 :]]
        lost = tuple(axis for axis, letter in enumerate(term) if letter not in right + "".join(others))
        kept = "".join(letter for axis, letter in enumerate(term) if axis not in lost)
        part = _einsum(g, *operands[:i], *operands[i + 1 :], equation=f"{','.join([right, *others])}->{kept}")
        # a letter that only this operand has was summed away, so the gradient is the same all along it
        made.append(broadcast_like(expand_dims(part, axis=lost), operand) if lost else part)
    return tuple(made)


@_einsum.bind
def einsum_bind(xp: ModuleType, out: Any, *operands: Any, equation: str) -> list[Call] | None:
    """Two operands become one (batched) matrix product, more of them several."""
    terms, right = terms_of(equation)
    if len(operands) > 2:
        return _two_at_a_time(xp, out, operands, terms, right)
    found = as_product(xp, out, operands, terms, right)
    if found is None:
        return None
    before, factors, after = found
    return [*before, partial(xp.matmul, *factors[:2], out=factors[2]), *after]


def as_product(
    xp: ModuleType, out: Any, operands: Sequence[Any], terms: Sequence[str], right: str
) -> tuple[list[Call], list[Any], list[Call]] | None:
    """Two operands and the result as views for one (batched) matrix product; where axes cannot be merged in place, it
    comes with the copies before and after it. None where a letter of one operand is missing on the right."""
    if len(operands) != 2 or out.size == 0 or any(c not in right for c in set(terms[0]) ^ set(terms[1])):
        return None
    first, second = terms
    batch = "".join(c for c in right if c in first and c in second)
    rows = "".join(c for c in right if c not in second)
    columns = "".join(c for c in right if c not in first)
    inner = "".join(c for c in first if c in second and c not in right)
    a, a_copy, a_original = _grouped(xp, operands[0], first, batch, rows, inner)
    b, b_copy, b_original = _grouped(xp, operands[1], second, batch, inner, columns)
    y, y_copy, y_original = _grouped(xp, out, right, batch, rows, columns)
    pairs = ((a_copy, a_original), (b_copy, b_original))
    before: list[Call] = [partial(xp.copyto, copy, x) for copy, x in pairs if copy is not x]
    return before, [a, b, y], [] if y_copy is y_original else [partial(xp.copyto, y_original, y_copy)]


def _two_at_a_time(
    xp: ModuleType, out: Any, operands: Sequence[Any], terms: Sequence[str], right: str
) -> list[Call] | None:
    """The product of the first two, then that with the others: CuPy's own products cannot be captured on a GPU."""
    first, second, *others = terms
    term = "".join(c for c in dict.fromkeys(first + second) if c in right + "".join(others))
    sizes = dict(zip(first + second, operands[0].shape + operands[1].shape))
    part = xp.empty([sizes[c] for c in term], out.dtype)
    steps = einsum_bind(xp, part, *operands[:2], equation=f"{first},{second}->{term}")
    more = einsum_bind(xp, out, part, *operands[2:], equation=f"{','.join([term, *others])}->{right}")
    return None if steps is None or more is None else [*steps, *more]


def _grouped(xp: ModuleType, x: Any, term: str, *groups: str) -> tuple[Any, Any, Any]:
    """`x` with a leading axis for each batch letter and one axis for each other group, and what it is a view of.

    Where strides do not allow the merge it is a view of a buffer of its own, to be copied to or from `x`.
    """
    order = "".join(groups)
    original = x.transpose([term.index(c) for c in order])
    sizes = dict(zip(order, original.shape))
    shape = [*(sizes[c] for c in groups[0]), *(int(np.prod([sizes[c] for c in group])) for group in groups[1:])]
    try:
        return original.reshape(shape, copy=False), original, original
    except ValueError:
        buffer = xp.empty(original.shape, x.dtype)
        return buffer.reshape(shape), buffer, original


@public
def einsum(equation: str, *operands: Any) -> Node:
    """The sum of products that the equation names: letters that are missing on the right are summed over.

    ArgumentError for an ellipsis, a repeated letter in one operand or a wrong count; ShapeError for unequal sizes.

    >>> import hetu as ht
    >>> q, k = ht.placeholder("q", (None, 5, 8)), ht.placeholder("k", (None, 7, 8))
    >>> ht.einsum("bqd,bkd->bqk", q, k).shape[1:]
    (5, 7)
    """
    if not isinstance(equation, str):
        raise ArgumentError(
            f"einsum got {equation!r} first", fix="pass the equation first: ht.einsum('ij,jk->ik', a, b)"
        )
    return _einsum(*as_nodes(operands), equation=equation)
