"""Where values enter a graph (placeholder, variable, constant, size) and the marks that passes read.

Leaves have no inputs and are never computed: the executor binds them to arrays. The marks (`stop_gradient`,
`if_training`, `with_updates`, `barrier`) compute nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from .errors import ArgumentError, GraphError, ShapeError, public
from .graph import OPS, Node, scoped_name
from .op import Role, op, same_type
from .types import Dim, Shape, TensorType, as_dtype, same, show_shape

__all__ = ["constant", "if_training", "placeholder", "stop_gradient", "variable", "with_updates"]

Initializer = Callable[[tuple[int, ...], np.dtype, np.random.Generator], np.ndarray]


def _typed(*, shape: Shape, dtype: str, **_: Any) -> TensorType:
    return TensorType(shape, as_dtype(dtype))


@op(name="placeholder", role=Role.PLACEHOLDER, infer=_typed, differentiable=False)
def _placeholder(xp: ModuleType, *, name: str, shape: Shape, dtype: str) -> Any:
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
        array = np.asarray(init)
        if dtype is None:
            dtype = array.dtype if isinstance(init, np.ndarray) else "float32"
        wanted = array.shape if shape is None else tuple(shape)
        if array.shape not in ((), wanted):
            raise ShapeError(
                f"variable {name!r}: init has shape {show_shape(array.shape)}, wanted {show_shape(wanted)}",
                fix="leave out shape=, or pass an array of that shape",
            )
        init = np.array(np.broadcast_to(array, wanted), as_dtype(dtype))
        init.setflags(write=False)
        shape = wanted
    sizes = tuple(_checked_size(name, s) for s in shape or ())
    return _variable(name=scoped_name(name), shape=sizes, dtype=dtype or "float32", init=init, trainable=trainable)


def _checked_size(name: str, size: Any) -> int:
    if isinstance(size, Dim) or not isinstance(size, int | np.integer) or size < 0:
        raise ShapeError(f"{name!r}: a size must be a number >= 0, got {size!r}", fix="use a plain integer")
    return int(size)


@op(role=Role.CONSTANT, infer=lambda *, value: TensorType(value.shape, as_dtype(value.dtype)), differentiable=False)
def constant(xp: ModuleType, *, value: np.ndarray) -> Any:
    """A fixed array.

    >>> constant(value=[1.0, 2.0]).shape
    (2,)
    """
    return xp.asarray(value)


@constant.normalize
def constant_normalize(*, value: Any) -> dict[str, Any]:
    frozen = isinstance(value, np.ndarray) and not value.flags.writeable
    if frozen and (value.base is None or value.strides == (0,) * value.ndim):  # own memory, or one element many times
        return {"value": value}
    array = np.array(value)
    if array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
        array = array.astype(np.float32)
    array.setflags(write=False)
    return {"value": array}


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


@op(role=Role.MOVE, infer=same_type, dims="...->...")
def stop_gradient(xp: ModuleType, x: Any) -> Any:
    """`x`, with a zero gradient.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", ())
    >>> ht.gradients(x * ht.stop_gradient(x), [x])[0].shape
    ()
    """
    return x


@stop_gradient.grad
def stop_gradient_grad(g: Node, out: Node, x: Node) -> None:
    return None


@stop_gradient.view
def stop_gradient_view(xp: ModuleType, x: Any) -> Any:
    return x


def _same_types(a: TensorType, b: TensorType) -> TensorType:
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        raise ShapeError(f"the two sides differ: {a} and {b}", fix="give both sides one type")
    return a


@op(role=Role.MOVE, infer=_same_types, dims="...,...->...")
def if_training(xp: ModuleType, training: Any, evaluation: Any) -> Any:
    """The first where a sub-graph trains (it commits updates), the second elsewhere; chosen once, not at run time.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (3,))
    >>> ht.evaluate(ht.if_training(x * 2, x), {x: [1, 2, 3]}).tolist()
    [1.0, 2.0, 3.0]
    """
    return evaluation


@if_training.grad
def if_training_grad(g: Node, out: Node, training: Node, evaluation: Node) -> tuple[Node, Node]:
    zeros = OPS["zeros_like"](g)
    return if_training(g, zeros), if_training(zeros, g)


@op(role=Role.MOVE, name="with_updates", infer=same_type)
def _with_updates(xp: ModuleType, y: Any, *variables_and_values: Any) -> Any:
    return y


@_with_updates.grad
def with_updates_grad(g: Node, out: Node, y: Node, *pairs: Node) -> tuple[Node | None, ...]:
    return (g, *(None for _ in pairs))


@_with_updates.view
def with_updates_view(xp: ModuleType, y: Any, *pairs: Any) -> Any:
    return y


def with_updates(y: Node, updates: Mapping[Node, Node]) -> Node:
    """`y`, carrying new values of variables that are committed wherever `y` is trained (batch-norm statistics).

    >>> x, seen = placeholder("x", (3,)), variable("seen", 0.0, ())
    >>> with_updates(x, {seen: seen + 1}).shape
    (3,)
    """
    for target, value in updates.items():
        if target.role is not Role.VARIABLE or target.type != value.type:
            raise GraphError(f"{value!r} cannot be the new value of {target!r}", fix="update a variable of equal type")
    return _with_updates(y, *(n for pair in updates.items() for n in pair))


def _barrier_dims(x: TensorType, after: TensorType) -> str:
    """Axes of equal size are one factor, so that a split batch stays split; the others of `after` stay whole."""
    letters = [chr(ord("a") + i) for i in range(x.ndim + after.ndim)]
    shared = [i < x.ndim and same(size, x.shape[i]) for i, size in enumerate(after.shape)]
    behind = "".join(letters[i] if common else f"{letters[x.ndim + i]}!" for i, common in enumerate(shared))
    return f"{''.join(letters[: x.ndim])},{behind}->{''.join(letters[: x.ndim])}"


@op(role=Role.MOVE, infer=same_type, dims=_barrier_dims, awaited=(1,))
def barrier(xp: ModuleType, x: Any, after: Any) -> Any:
    """`x`, but not before `after` exists. Keeps recomputed values from being merged with the first ones.

    >>> x = placeholder("x", (3,))
    >>> barrier(x, x).shape
    (3,)
    """
    return x


@barrier.grad
def barrier_grad(g: Node, out: Node, x: Node, after: Node) -> tuple[Node, None]:
    return g, None


@barrier.view
def barrier_view(xp: ModuleType, x: Any, after: Any) -> Any:
    return x


# (seed, step), which every random operator reads; the executor seeds it and raises the step.
random_state: Node = variable(
    "random_state", lambda shape, dtype, rng: np.zeros(shape, dtype), (2,), "uint64", trainable=False
)
