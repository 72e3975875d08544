"""Sums of products named by letters: `einsum("bqd,bkd->bqk", q, k)`.

The equation is the meaning, the sharding rule and the source of the gradient at once. Left out: the ellipsis, a letter
twice in one operand (a diagonal), and broadcasting of size 1.
"""

from __future__ import annotations

import math
from collections import Counter
from types import ModuleType
from typing import Any

from ..core.backend import common
from ..core.errors import ArgumentError, ShapeError, public
from ..core.graph import Node
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
        raise ArgumentError(f"{equation!r} names {len(terms)} operands, got {len(types)}", fix="write one term each")
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
    (term, *terms), right = terms_of(equation)
    x, *others = common(xp, *operands)
    while others:
        x, term = _product(xp, x, term, others.pop(0), terms.pop(0), right + "".join(terms))
    x, term = _summed(xp, x, term, right)
    return xp.permute_dims(x, tuple(map(term.index, right)))


def _summed(xp: ModuleType, x: Any, term: str, needed: str) -> tuple[Any, str]:
    """`x` summed over the letters that nobody needs, and the letters that are left."""
    lost = tuple(axis for axis, letter in enumerate(term) if letter not in needed)
    kept = "".join(letter for letter in term if letter in needed)
    return (xp.sum(x, axis=lost, dtype=x.dtype), kept) if lost else (x, term)


def _product(xp: ModuleType, a: Any, first: str, b: Any, second: str, needed: str) -> tuple[Any, str]:
    """Two operands as one (batched) matrix product, and the letters of the result."""
    (a, first), (b, second) = _summed(xp, a, first, second + needed), _summed(xp, b, second, first + needed)
    sizes = dict(zip(first + second, a.shape + b.shape))
    both = [c for c in first if c in second]
    batch, inner = [c for c in both if c in needed], [c for c in both if c not in needed]
    rows, columns = [c for c in first if c not in both], [c for c in second if c not in both]

    def grouped(x: Any, term: str, *groups: list[str]) -> Any:
        x = xp.permute_dims(x, tuple(term.index(c) for group in (batch, *groups) for c in group))
        merged = (math.prod(sizes[c] for c in group) for group in groups)
        return xp.reshape(x, (*(sizes[c] for c in batch), *merged))

    y = xp.matmul(grouped(a, first, rows, inner), grouped(b, second, inner, columns))
    term = "".join([*batch, *rows, *columns])
    return xp.reshape(y, tuple(sizes[c] for c in term)), term


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
