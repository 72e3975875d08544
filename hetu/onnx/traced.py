"""The meaning of an operator as a graph of others: its forward function, given nodes for arrays and ours for NumPy's.

So an operator needs no row in the table of what can be written (`rows.py`), be it one that a user wrote: those that its
function calls have one. Writing into an array makes a new value; views that were cut from an array by indices write
into it, and what may be another view of it is not read after. NumPy's own functions are ours too. Left out: what
depends on values, such as parts chosen by masks, and NumPy's dtypes within: integers beside floats become such floats.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import add, cast_to
from ..core.types import Dim, Shape, Size, as_dtype, product, promote
from .indexing import placed

# What others call functions of ours.
ALIASES = {"absolute": "abs", "cumulative_sum": "cumsum", "concatenate": "concat", "pow": "power"}
ALIASES |= {"mod": "remainder", "true_divide": "divide"}
ALIASES |= {name: f"bitwise_{name}" for name in ("invert", "left_shift", "right_shift")}
SETTINGS = {"copy", "stable", "kind", "device", "order"}  # which change no value here


class Open(Dim):
    """An open size in a forward function, which may compute with it, but not ask which number it is; it is not 0."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int) and other != 0:
            self._refuse()
        return isinstance(other, Dim) and (self.coef, self.atoms) == (other.coef, other.atoms)

    __hash__ = Dim.__hash__


def opened(size: Any) -> Any:
    return Open(size.coef, size.atoms) if isinstance(size, Dim) else size


def _on_sizes(name: str) -> Callable[[Open, Any], Any]:
    own = getattr(Dim, name)
    return lambda a, b: opened(own(untraced(a), untraced(b)))


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Open, f"__{_side}{_name}__", _on_sizes(f"__{_side}{_name}__"))


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """A value of an array that is a node; assigning to its parts gives it another."""

    def __init__(self, node: Node, source: tuple[Traced, Any] | None = None, kin: list[int] | None = None) -> None:
        self._node, self.source = node, source  # the array and key that it is a view of
        self.kin: list[int] = source[0].kin if source else kin or [0]  # assignments to all that may be views of one
        self.seen = self.kin[0]

    @property
    def node(self) -> Node:
        if self.source is not None:
            return self.source[0].node[self.source[1]]
        if self.seen != self.kin[0]:
            raise TypeError("reads an array after assigning to what may be a view of it, which needs a copy")
        return self._node

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """What all operators of Python come to, those that write into an array too."""
        ours = getattr(Functions(), function.__name__)
        given = (np.asarray(a) if isinstance(a, list) else a for a in args)
        return (ours if method == "__call__" else getattr(ours, method))(*given, **kwargs)

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        name: str = function.__name__
        if getattr(np, name, None) is not function:
            raise AttributeError(f"calls {function.__module__}.{name}, of which there is no counterpart")
        return getattr(Functions(), name)(*args, **kwargs)

    @property
    def shape(self) -> Shape:
        return tuple(map(opened, self._node.shape))

    @property
    def size(self) -> Size:
        return product(self.shape)

    def __len__(self) -> int:
        return operator.index(self.shape[0])

    T = property(lambda self: Functions().transpose(self))
    mT = property(lambda self: Functions().matrix_transpose(self))

    def sort(self, axis: int = -1) -> None:
        self.become(OPS["sort"](self.node, axis=axis))

    def __iter__(self) -> Iterator[Traced]:
        return (self[i] for i in range(len(self)))

    def _no_value(self, *_: object, **__: object) -> Any:
        raise TypeError("asks for the values of an array")

    __bool__ = __int__ = __float__ = __index__ = __array__ = item = tolist = _no_value

    def __getattr__(self, name: str) -> Any:
        """Methods are functions of the module."""
        if name in ("dtype", "ndim"):
            return getattr(self._node, name)
        function = getattr(Functions(), name)
        return lambda *args, **kwargs: function(self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Traced:
        entries = key if isinstance(key, tuple) else (key,)
        if not any(map(_is_array, entries)):
            key = untraced(key)
            return Traced(self.node[key], (self, key))
        places = [i for i, entry in enumerate(entries) if _is_array(entry)]
        cut = tuple(slice(None) if i in places else entry for i, entry in enumerate(entries))
        first, end = places[0], places[-1] + 1
        if not all(isinstance(entry, slice) for entry in cut) or len(places) < end - first:
            raise TypeError(f"takes the index {key!r:.60}: arrays may only stand side by side, with slices around them")
        x, place = self.node[untraced(cut)], as_node(0)
        for entry, size in zip(entries[first:end], x.shape[first:end], strict=True):
            place = place * size + inside(entry, size)
        joined = ops.reshape(x, (*x.shape[:first], product(x.shape[first:end]), *x.shape[end:]))
        return Traced(ops.take(joined, place, axis=first))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Traced) and value.source and value.source[0] is self and value.source[1] == untraced(key):
            return  # `a[key] += b` has written already
        old, key = self.node, untraced(key)
        new = cast_to(as_node(untraced(value), [old.dtype]), old.dtype)
        if isinstance(key, Node) and key.dtype.kind == "b" and new.ndim == 0:
            self.become(ops.where(ops.reshape(key, (*key.shape, *[1] * (old.ndim - key.ndim))), new, old))
            return
        if any(map(_is_array, key if isinstance(key, tuple) else (key,))):
            raise TypeError("assigns to what an array of indices or a mask chooses")
        new = ops.broadcast_to(new, old[key].shape)
        here = OPS["slice_scatter"](ops.full_like(new, 1), old, key=key)
        self.become(ops.where(ops.equal(here, 1), OPS["slice_scatter"](new, old, key=key), old))

    def become(self, node: Node) -> Traced:
        """Take another value, in place of this one."""
        if self.source is not None:
            self.source[0][self.source[1]] = Traced(node)
        else:
            old = self.node
            self._node = cast_to(node if node.shape == old.shape else ops.broadcast_to(node, old.shape), old.dtype)
            self.kin[0] = self.seen = self.kin[0] + 1
        return self


def _is_array(entry: Any) -> bool:
    return isinstance(entry, Traced | Node | np.ndarray | list)


def _on_bits(name: str) -> Callable[..., Node]:
    """Logic of booleans, of bits for integers."""
    logic, bits = OPS["logical_not" if name == "invert" else f"logical_{name}"], OPS[f"bitwise_{name}"]
    return lambda x, *other: (logic if x.dtype.kind == "b" else bits)(x, *other)


BITS = {f"bitwise_{name}": _on_bits(name) for name in ("and", "or", "xor", "invert")}


def inside(ids: Any, size: Size) -> Node:
    """Indices of an axis, of which negative ones count from its end."""
    ids = as_node(untraced(ids) if isinstance(ids, Traced) else np.asarray(ids))
    if ids.dtype.kind == "b":
        raise TypeError("takes a mask for an index")
    return placed(ids, size)


def untraced(value: Any) -> Any:
    """Nodes for traced arrays and plain sizes for open ones, within lists, tuples and slices too."""
    if isinstance(value, list | tuple):
        return type(value)(map(untraced, value))
    if isinstance(value, slice):
        return slice(*map(untraced, (value.start, value.stop, value.step)))
    if isinstance(value, Open):
        return Dim(value.coef, value.atoms)
    return value.node if isinstance(value, Traced) else value


def traced(value: Any, given: Mapping[Node, list[int]]) -> Any:
    """Arrays for nodes; those that may be views of what was given share its numbers."""
    if isinstance(value, list | tuple):
        return type(value)(traced(v, given) for v in value)
    if not isinstance(value, Node):
        return value
    base = value
    while base not in given and base.op.view_rule:
        base = base.inputs[0]
    return Traced(value, kin=given.get(base))


@dataclass(frozen=True)
class Ours:
    """One of our functions, called with traced arrays."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        options = {k: untraced(v) for k, v in kwargs.items() if k not in SETTINGS}
        dtype, given = options.pop("dtype", None), [*map(untraced, args)]
        kin = {node: array.kin for array, node in zip(args, given) if isinstance(array, Traced)}
        if dtype is not None and given and isinstance(given[0], Node):
            given[0] = cast_to(given[0], as_dtype(dtype))
        made = self.function(*given, **options)
        made = made if dtype is None else cast_to(made, as_dtype(dtype))
        if out is None:
            return traced(made, kin)
        target = out[0] if isinstance(out, tuple) else out
        if not isinstance(target, Traced):
            raise TypeError("writes into an array that xp has not made")
        return target.become(made)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"calls the method {name!r} of a function, of which there is no counterpart")

    def at(self, out: Traced, ids: Any, rows: Any) -> None:
        """`np.add.at` with ids of the first axis."""
        if self.function is not add or isinstance(ids, tuple):
            raise AttributeError("calls a method `at` that is not that of xp.add with ids of the first axis")
        old = out.node
        ids = inside(ids, old.shape[0])
        rows = ops.broadcast_to(as_node(untraced(rows), [old.dtype]), (*ids.shape, *old.shape[1:]))
        out.become(ops.scatter_add(old, ids, rows))


class Functions:
    """In place of an array module: functions of ours, and what only has another form there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        ours = ALIASES.get(name, name)
        function = BITS.get(ours) or getattr(ops, ours, None) or OPS.get(ours)
        if callable(function):
            return Ours(function)
        constant = getattr(np, name, "")
        if isinstance(constant, float) or (isinstance(constant, type) and issubclass(constant, np.generic)):
            return constant
        raise AttributeError(f"calls xp.{name}, of which there is no counterpart")

    newaxis = None

    def asarray(self, value: Any, dtype: Any = None, copy: bool = False) -> Traced:
        if isinstance(value, Traced):
            return value if dtype is None or value.dtype == dtype else value.astype(dtype)
        return Traced(as_node(np.asarray(untraced(value), None if dtype is None else as_dtype(dtype))))

    array = asarray

    def astype(self, x: Traced, dtype: Any, copy: bool = True, **_: Any) -> Traced:
        return Traced(cast_to(x.node, as_dtype(dtype))) if copy or x.dtype != as_dtype(dtype) else x

    def result_type(self, *values: Any) -> np.dtype:
        return promote(*(v.dtype if isinstance(v, Traced) else as_dtype(v) for v in values))

    def full(self, shape: Any, fill_value: Any, dtype: Any = None) -> Traced:
        return Traced(ops.full(shape=untraced(shape), fill_value=fill_value, dtype=dtype and as_dtype(dtype)))

    def zeros(self, shape: Any, dtype: Any = "float32") -> Traced:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = "float32") -> Traced:
        return self.full(shape, 1, dtype)

    empty = zeros

    def arange(self, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Traced:
        start, stop, step = map(untraced, (start, stop, step))
        return Traced(ops.arange(start, stop, step, dtype=dtype and as_dtype(dtype)))

    def copy(self, x: Traced) -> Traced:
        return Traced(x.node)

    positive = copy

    def reshape(self, x: Traced, *shape: Any, **_: Any) -> Any:
        return Ours(OPS["reshape"])(x, shape=tuple(shape[0]) if isinstance(shape[0], list | tuple) else shape)

    def take(self, x: Traced, indices: Any, axis: int | None = None) -> Traced:
        x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
        return x[(*[slice(None)] * (axis % x.ndim), self.asarray(indices))]

    def clip(self, x: Traced, min: Any = None, max: Any = None, out: Traced | None = None) -> Traced:
        made: Traced = x if min is None else self.maximum(x, min)
        made = made if max is None else self.minimum(made, max)
        return made.copy() if out is None else out.become(made.node)

    def transpose(self, x: Traced, *order: Any, axes: Any = None) -> Any:
        axes = axes or (order[0] if order and not isinstance(order[0], int) else order) or reversed(range(x.ndim))
        return Ours(OPS["permute_dims"])(x, axes=tuple(axes))

    def swapaxes(self, x: Traced, a: int, b: int) -> Any:
        order = list(range(x.ndim))
        order[a], order[b] = order[b], order[a]
        return self.transpose(x, order)

    def searchsorted(self, x: Any, values: Any, side: str = "left") -> Traced:
        values = ops.expand_dims(untraced(values), axis=-1)
        below = OPS["less" if side == "left" else "less_equal"](untraced(x), values)
        return Traced(ops.sum(below, axis=-1))

    def copysign(self, a: Any, b: Any) -> Traced:
        size, b = ops.abs(untraced(a)), as_node(untraced(b))
        signed = ops.where(ops.equal(b, 0), 1 / b, b)  # 1 / -0.0 is -inf
        return Traced(ops.where(OPS["less"](signed, 0), -size, size))


def meaning(node: Node, inputs: Sequence[Node]) -> Any:
    """What the forward function of a node makes of `inputs`: nodes, and numbers that it knows."""
    return untraced(node.op.forward(Functions(), *map(Traced, inputs), **node.attrs))
