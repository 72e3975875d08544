"""The meaning of an operator as a graph of others: its forward function, given nodes for arrays and ours for NumPy's.

So an operator needs no row in the table of what can be written (`rows.py`), be it one that a user wrote: those that its
function calls have one. Writing into an array makes a new value; views that were cut from an array by indices write
into it. Left out: what depends on values, such as masks as indices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import add, cast_to
from ..core.types import Dim, Shape, Size, as_dtype, product, promote

# What others call functions of ours.
ALIASES = {"absolute": "abs", "cumulative_sum": "cumsum", "concatenate": "concat", "pow": "power", "power": "power"}
ALIASES |= {"transpose": "permute_dims", "invert": "bitwise_invert", "mod": "remainder", "true_divide": "divide"}
SETTINGS = {"copy", "stable", "kind", "device", "order"}  # which change no value here


class Traced:
    """A value of an array that is a node; assigning to its parts gives it another."""

    __array_ufunc__ = None  # an array of NumPy's on the left leaves the operation to this class

    def __init__(self, node: Node, source: tuple[Traced, Any] | None = None) -> None:
        self._node, self.source = node, source  # the array and key that it is a view of

    @property
    def node(self) -> Node:
        return self._node if self.source is None else self.source[0].node[self.source[1]]

    @property
    def shape(self) -> Shape:
        return self._node.shape

    @property
    def dtype(self) -> np.dtype:
        return self._node.dtype

    @property
    def ndim(self) -> int:
        return self._node.ndim

    @property
    def size(self) -> Size:
        return product(self.shape)

    def __len__(self) -> int:
        return operator.index(self.shape[0])

    @property
    def T(self) -> Traced:
        return Traced(OPS["permute_dims"](self.node, axes=tuple(reversed(range(self.ndim)))))

    @property
    def mT(self) -> Traced:
        return Traced(OPS["matrix_transpose"](self.node))

    def astype(self, dtype: Any, **_: Any) -> Traced:
        return Traced(cast_to(self.node, as_dtype(dtype)))

    def reshape(self, *shape: Any) -> Traced:
        return Traced(OPS["reshape"](self.node, shape=shape[0] if isinstance(shape[0], tuple) else shape))

    def copy(self) -> Traced:
        return Traced(self.node)

    def __neg__(self) -> Traced:
        return Traced(-self.node)

    def __abs__(self) -> Traced:
        return Traced(abs(self.node))

    def __invert__(self) -> Traced:
        return Traced(OPS["logical_not" if self.dtype.kind == "b" else "bitwise_invert"](self.node))

    def _no_value(self, *_: object) -> Any:
        raise TypeError("asks for the values of an array")

    __bool__ = __int__ = __float__ = __index__ = __iter__ = __array__ = _no_value

    def __getattr__(self, name: str) -> Any:
        """Methods are functions of the module."""
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(Functions(), name)
        return lambda *args, **kwargs: function(self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Traced:
        if isinstance(key, Traced):
            return Traced(ops.take(self.node, inside(key.node, self.shape[0]), axis=0))
        return Traced(self.node[key], (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Traced) and value.source and value.source[0] is self and value.source[1] == key:
            return  # `a[key] += b` has written already
        old = self.node
        new = ops.broadcast_to(cast_to(as_node(untraced(value), [old.dtype]), old.dtype), old[key].shape)
        here = OPS["slice_scatter"](ops.full_like(new, 1), old, key=key)
        self.become(ops.where(ops.equal(here, 1), OPS["slice_scatter"](new, old, key=key), old))

    def become(self, node: Node) -> None:
        """Take another value, in place of this one."""
        if self.source is not None:
            self.source[0][self.source[1]] = Traced(node)
        else:
            self._node = cast_to(node, self.dtype)


def _binary(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Traced, Any], Any]:
    def apply(self: Traced, other: Any) -> Any:
        if not isinstance(other, Traced | np.ndarray | np.generic | bool | int | float | Dim):
            return NotImplemented
        a, b = self.node, as_node(untraced(other), [self.dtype])
        return Traced(function(b, a) if swapped else function(a, b))

    return apply


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Traced, Any], Traced]:
    def apply(self: Traced, other: Any) -> Traced:
        self.become(_binary(function)(self, other).node)
        return self

    return apply


def _on_bits(logical: str, bits: str) -> Callable[[Node, Node], Node]:
    """Logic of booleans, of bits for integers."""
    return lambda a, b: OPS[logical if a.dtype.kind == "b" else bits](a, b)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
}
_BINARY |= {name: _on_bits(f"logical_{name}", f"bitwise_{name}") for name in ("and", "or", "xor")}
_BINARY |= {f"{side}shift": OPS[f"bitwise_{name}_shift"] for side, name in (("l", "left"), ("r", "right"))}
for _name, _function in _BINARY.items():
    setattr(Traced, f"__{_name}__", _binary(_function))
    setattr(Traced, f"__r{_name}__", _binary(_function, swapped=True))
    setattr(Traced, f"__i{_name}__", _in_place(_function))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _binary(getattr(operator, _name)))
for _name, _op in (("eq", "equal"), ("ne", "not_equal")):
    setattr(Traced, f"__{_name}__", _binary(OPS[_op]))


def inside(ids: Node, size: Size) -> Node:
    """Indices of an axis, of which negative ones count from its end."""
    if ids.dtype.kind == "b":
        raise TypeError("takes a mask for an index")
    return ids if ids.dtype.kind == "u" else ops.where(OPS["less"](ids, 0), ids + size, ids)


def untraced(value: Any) -> Any:
    """Nodes for traced arrays, within lists and tuples too."""
    if isinstance(value, list | tuple):
        return type(value)(map(untraced, value))
    return value.node if isinstance(value, Traced) else value


def traced(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(traced, value))
    return Traced(value) if isinstance(value, Node) else value


@dataclass(frozen=True)
class Ours:
    """One of our functions, called with traced arrays."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = {k: untraced(v) for k, v in kwargs.items() if k not in SETTINGS}
        dtype, given = options.pop("dtype", None), [*map(untraced, args)]
        if dtype is not None and given and isinstance(given[0], Node):
            given[0] = cast_to(given[0], as_dtype(dtype))
        made = self.function(*given, **options)
        return traced(made if dtype is None else cast_to(made, as_dtype(dtype)))

    def at(self, out: Traced, ids: Any, rows: Any) -> None:
        """`np.add.at` with ids of the first axis."""
        if self.function is not add:
            raise AttributeError("calls a method `at` that is not that of xp.add")
        old, ids = out.node, inside(untraced(ids), out.shape[0])
        rows = ops.broadcast_to(as_node(untraced(rows), [old.dtype]), (*ids.shape, *old.shape[1:]))
        out.become(ops.scatter_add(old, ids, rows))


class Functions:
    """In place of an array module: functions of ours, and what only has another form there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        ours = ALIASES.get(name, name)
        function = getattr(ops, ours, None) or OPS.get(ours)
        if function is not None:
            return Ours(function)
        constant = getattr(np, name, "")
        if isinstance(constant, float) or (isinstance(constant, type) and issubclass(constant, np.generic)):
            return constant
        raise AttributeError(f"calls xp.{name}, of which there is no counterpart")

    newaxis = None

    def asarray(self, value: Any, dtype: Any = None, copy: bool = False) -> Traced:
        if isinstance(value, Traced):
            return value if dtype is None or value.dtype == dtype else value.astype(dtype)
        return Traced(as_node(np.asarray(value, None if dtype is None else as_dtype(dtype))))

    array = asarray

    def astype(self, x: Traced, dtype: Any, **_: Any) -> Traced:
        return x.astype(dtype)

    def result_type(self, *values: Any) -> np.dtype:
        return promote(*(v.dtype if isinstance(v, Traced) else as_dtype(v) for v in values))

    def full(self, shape: Any, fill_value: Any, dtype: Any = None) -> Traced:
        return Traced(ops.full(shape=shape, fill_value=fill_value, dtype=dtype and as_dtype(dtype)))

    def zeros(self, shape: Any, dtype: Any = "float32") -> Traced:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = "float32") -> Traced:
        return self.full(shape, 1, dtype)

    empty = zeros

    def arange(self, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Traced:
        return Traced(ops.arange(start, stop, step, dtype=dtype and as_dtype(dtype)))

    def reshape(self, x: Traced, shape: Any, **_: Any) -> Traced:
        return x.reshape(shape if isinstance(shape, tuple) else (shape,))

    def take(self, x: Traced, indices: Traced, axis: int = 0) -> Traced:
        return Traced(ops.take(x.node, untraced(indices), axis=axis))

    def clip(self, x: Traced, low: Any = None, high: Any = None) -> Traced:
        return Traced(ops.clip(x.node, min=low, max=high))

    def swapaxes(self, x: Traced, a: int, b: int) -> Traced:
        order = list(range(x.ndim))
        order[a], order[b] = order[b], order[a]
        return Traced(OPS["permute_dims"](x.node, axes=tuple(order)))

    def searchsorted(self, x: Traced, values: Traced, side: str = "left") -> Traced:
        below = OPS["less" if side == "left" else "less_equal"](x.node, ops.expand_dims(values.node, axis=-1))
        return Traced(ops.sum(below, axis=-1))

    def copysign(self, a: Any, b: Any) -> Traced:
        size = ops.abs(untraced(a))
        return Traced(ops.where(OPS["less"](untraced(b), 0), -size, size))


def meaning(node: Node, inputs: Sequence[Node]) -> tuple[Node, ...]:
    """The outputs of a node as its forward function makes them of `inputs`."""
    made = node.op.forward(Functions(), *map(Traced, inputs), **node.attrs)
    types = node.type if isinstance(node.type, tuple) else (node.type,)
    found = [as_node(untraced(value)) for value in (made if isinstance(made, tuple | list) else (made,))]
    return tuple(cast_to(value, type_.dtype) for value, type_ in zip(found, types, strict=True))
