"""Where values enter a graph (placeholder, variable, constant, size), and the names that they have there.

Leaves have no inputs and are never computed: the executor binds them to arrays.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from .backend import array_from, fitting
from .errors import ArgumentError, DTypeError, GraphError, ShapeError, public
from .graph import Node
from .op import Role, op
from .types import Dim, Shape, TensorType, as_dtype, show_shape

__all__ = ["constant", "placeholder", "variable"]

Initializer = Callable[[tuple[int, ...], np.dtype, np.random.Generator], np.ndarray]


# -- names -----------------------------------------------------------------------------------------------------


@dataclass
class NameScope:
    path: str
    counts: dict[str, int] = field(default_factory=dict)
    makers: dict[str, Any] = field(default_factory=dict)  # by names in use: the cells of a notebook, if any
    cell: Any = None


SCOPE: ContextVar[NameScope | None] = ContextVar("scope", default=None)


def scope_now() -> NameScope:
    """The scope that is in force; each thread has an outermost of its own."""
    if (found := SCOPE.get()) is None:
        SCOPE.set(found := NameScope(""))
    return found


@contextlib.contextmanager
def scope(name: str) -> Iterator[str]:
    """Prefix the names made inside with `name/` and count them afresh, so that building twice gives the same names.

    >>> import hetu as ht
    >>> with ht.scope("encoder"):
    ...     w = ht.variable("w", ht.init.zeros, (2, 3))
    >>> w.name
    'encoder/w'
    """
    path = f"{scope_now().path}{name}/"
    token = SCOPE.set(NameScope(path))
    try:
        yield path.rstrip("/")
    finally:
        SCOPE.reset(token)


def unique_name(base: str) -> str:
    """`base`, `base_1`, ... within the current scope."""
    found = scope_now()
    n = found.counts.get(base, 0)
    while (name := f"{base}_{n}" if n else base) in found.makers:
        n += 1
    found.counts[base], found.makers[name] = n + 1, found.cell
    return name


# -- leaves ------------------------------------------------------------------------------------------------------


def _typed(*, shape: Shape, dtype: str, **_: Any) -> TensorType:
    return TensorType(shape, as_dtype(dtype))


@op(name="placeholder", role=Role.PLACEHOLDER, infer=_typed, differentiable=False)
def _placeholder(xp: ModuleType, *, name: str, shape: Shape, dtype: Any) -> Any:
    raise GraphError(f"placeholder {name!r} has no value", fix=f"feed it: {{{name!r}: array}}")


@op(name="variable", role=Role.VARIABLE, infer=_typed, differentiable=False)
def _variable(xp: ModuleType, *, name: str, shape: Shape, dtype: str, init: Any, trainable: bool) -> Any:
    raise GraphError(f"variable {name!r} has no value", fix="run it through an Executor")


@public
def placeholder(name: str, shape: tuple[int | None, ...], dtype: Any = "float32") -> Node:
    """A value fed at every run. `None` in `shape` is any size, which may differ from run to run.

    >>> placeholder("x", (None, 784)).shape[1]
    784
    """
    if not isinstance(shape, list | tuple):
        raise ArgumentError(f"{name!r}: the shape is {shape!r}, wanted a tuple", fix=f"pass shape=({shape},)")
    sizes = tuple(Dim.of(name, axis) if s is None else _checked_size(name, s) for axis, s in enumerate(shape))
    return _placeholder(name=name, shape=sizes, dtype=dtype)


def stand_in(name: str, type_: TensorType) -> Node:
    """A placeholder of a type whose sizes may be unknown, to be replaced by another node."""
    return _placeholder(name=name, shape=type_.shape, dtype=type_.dtype)


def seed_of(node: Node, seed: int) -> list[int]:
    """What the random numbers begin with of which a variable is made."""
    return [seed, zlib.crc32(node.name.encode())]


@public
def variable(
    name: str,
    init: Initializer | np.ndarray | float,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
    *,
    trainable: bool = True,
) -> Node:
    """A value that lives in the executor's state and that updates may change.

    `init` is an array, a number, or a function `(shape, dtype, rng) -> array`. `dtype` defaults to the array's own,
    else float32.

    >>> variable("counter", 0, (), "int64", trainable=False)  # doctest: +ELLIPSIS
    <variable 'counter' i64[] at ...>
    """
    if shape is None and callable(init):
        raise ArgumentError(f"variable {name!r} needs a shape", fix="pass shape=(rows, columns)")
    if not callable(init):
        if dtype is None:
            dtype = "float32" if isinstance(init, list | tuple | int | float | np.generic) else array_from(init).dtype
        array = fitting(init, as_dtype(dtype), lambda what, fix: DTypeError(f"variable {name!r} {what}", fix=fix))
        wanted = array.shape if shape is None else tuple(shape)
        if array.shape not in ((), wanted):
            said = f"variable {name!r}: init has shape {show_shape(array.shape)}, wanted {show_shape(wanted)}"
            raise ShapeError(said, fix="leave out shape=, or pass an array of that shape")
        init, shape = np.array(np.broadcast_to(array, wanted), as_dtype(dtype)), wanted
        init.setflags(write=False)
    sizes = tuple(_checked_size(name, s) for s in shape or ())
    return _variable(
        name=scope_now().path + name, shape=sizes, dtype=dtype or "float32", init=init, trainable=trainable
    )


def _checked_size(name: str, size: Any) -> int:
    if isinstance(size, Dim) or not isinstance(size, int | np.integer) or size < 0:
        raise ShapeError(f"{name!r}: a size must be a number >= 0, got {size!r}", fix="use a plain integer")
    return int(size)


@op(role=Role.CONSTANT, infer=lambda *, value: TensorType(value.shape, as_dtype(value.dtype)), differentiable=False)
def constant(xp: ModuleType, *, value: Any) -> Any:
    """A fixed array.

    >>> constant(value=[1.0, 2.0]).shape
    (2,)
    """
    return xp.asarray(value)


@constant.normalize
def constant_normalize(*, value: Any) -> dict[str, Any]:
    if type(value) is np.ndarray and not value.flags.writeable and value.dtype.isnative:
        many = value.size and value.strides == (0,) * value.ndim  # one element many times, which its owner may change
        if many or value.base is None:
            return {"value": np.broadcast_to(np.asarray(value.flat[0], value.dtype), value.shape) if many else value}
    array = fitting(value, np.dtype("float64"), lambda said, fix: ArgumentError(f"data {said}", fix=fix))
    narrow = array.dtype == np.float64 and isinstance(value, list | tuple | float) and not isinstance(value, np.generic)
    array = array.astype(np.float32 if narrow else array.dtype.newbyteorder("="))  # which kernels read
    array.setflags(write=False)
    return {"value": array}


def filled(like: Node, value: float) -> Node:
    """A constant of the type of `like`, of known sizes, which takes no memory."""
    return constant.make((), {"value": np.broadcast_to(np.asarray(value, like.dtype), tuple(map(int, like.shape)))})


def filling(node: Node) -> float | None:
    """The number that every element of a constant is, if there is one."""
    array = node.attrs["value"] if node.role is Role.CONSTANT else np.empty(0)
    return array.flat[0].item() if array.size == 1 or (array.size and array.strides == (0,) * array.ndim) else None


@op(infer=lambda *, value: TensorType((), np.dtype("int64")), differentiable=False)
def size(xp: ModuleType, *, value: int) -> Any:
    """A size used as a number. It becomes a constant once the fed shapes are known.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> ht.evaluate(ht.sum(x) / x.shape[0], {x: [[1.0, 2.0, 3.0]] * 4}).tolist()
    6.0
    """
    return xp.asarray(value, dtype=xp.int64)


@op(role=Role.ITEM, infer=lambda type_, *, index: type_[index])
def item(xp: ModuleType, values: tuple[Any, ...], *, index: int) -> Any:
    """One output of an operator that has several; autodiff and the planner treat it as a name, not as work.

    >>> import hetu as ht
    >>> values, places = ht.topk(ht.placeholder("x", (5,)), k=2)
    >>> values.op.name
    'item'
    """
    return values[index]


# (seed, step), which every random operator reads; the executor seeds it and raises the step.
random_state: Node = variable(
    "random_state", lambda shape, dtype, rng: np.zeros(shape, dtype), (2,), "uint64", trainable=False
)
