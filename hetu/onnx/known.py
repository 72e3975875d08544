"""What a node is, where that is known before anything is fed: from constants, initial values and sizes.

Sizes that are open are computed with as far as that goes: arrays of objects hold them beside numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.errors import DataError, HetuError
from ..core.graph import Node, topological
from ..core.op import LEAVES, Role
from ..core.types import Dim

LARGEST = 1 << 24  # numbers of an array that is computed while the graph is built
MOST = 1 << 12  # steps of a loop, or places of a window


class OfSizes:
    """The array module NumPy, in which an open size is a number, and an array that holds one keeps it."""

    object = object

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, value: Any, dtype: Any = None) -> np.ndarray:
        return np.array(value, object) if isinstance(value, Dim) else np.asarray(value, dtype)

    def equal(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray((np.frompyfunc(_same, 2, 1) if object in (a.dtype, b.dtype) else np.equal)(a, b), bool)

    def not_equal(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(np.logical_not(self.equal(a, b)))

    def abs(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x * self.sign(x))

    def sign(self, x: np.ndarray) -> np.ndarray:
        """Open sizes are taken to be positive."""
        signs = [np.sign(v.coef if isinstance(v, Dim) else v) for v in x.flat]
        return np.array(signs, x.dtype).reshape(x.shape)

    def astype(self, x: np.ndarray, dtype: Any, copy: bool = True) -> np.ndarray:
        return x if x.dtype == object else x.astype(dtype, copy=copy)


def _same(a: Any, b: Any) -> bool:
    """TypeError where one size may be the other or not, as no open one is less than none."""
    if a != b and (isinstance(a, Dim) or isinstance(b, Dim)) and not any(isinstance(v, int) and v < 0 for v in (a, b)):
        raise TypeError("of open sizes")
    return bool(a == b)


def bounded(*sizes: int) -> None:
    """DataError if an array of these sizes is too large to be made while a graph is built."""
    if math.prod(sizes) > LARGEST:
        said = f"an array of {' x '.join(map(str, sizes))} numbers, too many to compute while a graph is built"
        raise DataError(said, fix="export it in another way, or in smaller sizes")


def few(count: int, what: str) -> int:
    """So many, each of which becomes nodes of its own, or DataError."""
    if count > MOST:
        raise DataError(f"it has {count} {what}, at most {MOST} are built", fix="export a layer in its place")
    return count


def known(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a node, or None. `values` keeps those of all nodes below.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> known(ht.stack([ht.constant(value=3), ht.constant(value=1) + x.shape[0] * 2]), {})
    array([3, ?(2*?x.0+1)], dtype=object)
    """
    for part in topological([node]):
        if part not in values:
            values[part] = _computed(part, values)
    return values[node]


def _computed(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.role is Role.VARIABLE:
        return node.attrs["init"] if isinstance(node.attrs["init"], np.ndarray) else None
    arrays = [values[i] for i in node.inputs]
    if node.role is Role.PLACEHOLDER or any(a is None for a in arrays):
        return None
    if node.role not in LEAVES:
        for type_ in node.type if isinstance(node.type, tuple) else (node.type,):
            bounded(*(s for s in type_.shape if isinstance(s, int)))
    try:
        with np.errstate(all="ignore"):
            made = node.op.forward(OfSizes(), *arrays, **node.attrs)
    except (HetuError, TypeError, AttributeError):  # it asks for the number of an open size
        return None
    return made if isinstance(made, tuple) else np.asarray(made)
