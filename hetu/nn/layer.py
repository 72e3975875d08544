"""The base class of layers: a name, the variables below it, and a call that marks the nodes it makes.

A layer is built from explicit sizes, so its variables exist before its first call; calling it twice shares them. A
layer is only a convenient way to write a graph: it knows no values, devices or modes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self, TypeVar

from ..answers import AnswersCalls
from ..core.errors import ArgumentError, GraphError, ShapeError, public
from ..core.graph import OPS, Node, tagged
from ..core.leaf import scope, scope_now, unique_name
from ..core.op import Role, as_node
from ..core.types import compatible

Activation = Callable[[Node], Node]
R = TypeVar("R", covariant=True)  # what a layer makes: a node, or a tuple


class _Forward(Protocol[R]):
    """A layer as its call sees it, so that a checker takes what it returns from `forward`."""

    name: str
    _called: bool

    @property
    def forward(self) -> Callable[..., R]: ...


class Layer(AnswersCalls):
    """Base class. `name` is unique within its scope (`linear`, `linear_1`); variables are called `<name>/weight`.

    A subclass makes its variables inside `with self.naming():` and says in `forward` what it computes. Whatever
    layers and variables are its attributes, also in lists, belong to it.

    >>> import hetu as ht
    >>> class Scale(Layer):
    ...     def __init__(self, features: Size) -> None:
    ...         super().__init__()
    ...         with self.naming():
    ...             self.weight = ht.variable("weight", ht.init.ones, (features,))
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> with ht.scope("demo"):
    ...     layer = Scale(3)
    >>> layer(ht.placeholder("x", (None, 3))).tags["layer"], layer.variables[0].name
    ('demo/scale', 'demo/scale/weight')
    """

    def __init__(self, name: str | None = None) -> None:
        self._local = unique_name(name or snake_case(type(self).__name__))
        self.name = scope_now().path + self._local
        self._called = False

    @public
    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Names made inside begin with the layer's name. To be used in `__init__` only."""
        with scope(self._local):
            yield

    @public
    def __call__(self: _Forward[R], *inputs: Any, **options: Any) -> R:
        self._called = True
        with tagged(layer=self.name):
            return self.forward(*map(_as_input, inputs), **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise GraphError(
            f"{self!r} cannot be copied, as names of variables are unique",
            fix="build a second layer, in a ht.scope of its own; save and load of an Executor move values",
        )

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What the layer computes, in graph functions."""
        raise NotImplementedError

    @property
    def variables(self) -> list[Node]:
        """All variables of this layer and of those in it, in the order they were made; shared ones once."""
        found = dict.fromkeys(_variables_of(vars(self).values()))
        return sorted(found, key=lambda node: node.serial)

    @public
    def freeze(self) -> Self:
        """Keep the variables as they are loaded: no optimizer takes them. For fine-tuning; returns the layer.

        Batch norms in it compute by their statistics, which stay, too. GraphError once the layer has been called, for
        the graph then holds its variables as trained ones.

        >>> import hetu as ht
        >>> model = ht.nn.Sequential(ht.nn.Linear(3, 4).freeze(), ht.relu, ht.nn.Linear(4, 2))
        >>> [v.attrs["trainable"] for v in model.variables]
        [False, False, True, True]
        """
        _freeze(self, {})
        return self

    def describe(self) -> str:
        """The sizes that the printed form shows, such as `784 -> 256`."""
        return ""

    def __repr__(self) -> str:
        count = sum(math.prod(v.shape) for v in self.variables if v.attrs["trainable"] and "grows" not in v.tags)
        parts = [f"{type(self).__name__} {self.name!r}", self.describe(), f"{count:,} parameters" if count else ""]
        return f"<{', '.join(p for p in parts if p)}>"

    # -- what many layers need ---------------------------------------------------------------------------------

    def _check_axis(self, x: Node, axis: int, size: int, ndim: int | None = None) -> None:
        """ShapeError unless `x` has `ndim` axes (any number by default) and `size` entries along `axis`."""
        place = {-1: "last axis", 1: "axis 1 (channels)"}.get(axis, f"axis {axis}")
        enough = x.ndim >= (axis + 1 if axis >= 0 else -axis)
        if not enough or (ndim is not None and x.ndim != ndim) or not compatible(x.shape[axis], size):
            axes = f" and {ndim} axes" if ndim else ""
            if not enough or ndim not in (None, x.ndim):
                fix = "reshape the input"
            elif axis == 1 and x.ndim == 4 and x.shape[3] == size:
                fix = "put the channels first: ht.permute_dims(x, (0, 3, 1, 2))"
            else:
                flat = ", or flatten the input: ht.flatten(x, 1)" if axis == -1 and x.ndim > 2 else ""
                fix = f"build the layer for {x.shape[axis]}{flat}"
            raise ShapeError(
                f"{type(self).__name__} {self.name!r} was built for inputs with {size} entries in the {place}{axes}, "
                f"got {x.type}",
                fix=fix,
            )


def activate(activation: Activation | None, x: Node) -> Node:
    """`x` through an activation, which may be None."""
    return x if activation is None else activation(x)


def check_sizes(**sizes: Any) -> None:
    """ArgumentError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{name} is {size!r}, wanted a positive integer", fix=f"pass a size, such as {name}=64")


def width(x: Node, axis: int = 1) -> int:
    """How many entries `x` has along `axis`, from which variables are made; ArgumentError if that is open."""
    size = x.shape[axis]
    check_sizes(**{f"axis {axis} of {x.type}": size})
    return int(size)


def snake_case(name: str) -> str:
    """The lower-case form of a class name.

    >>> [snake_case(n) for n in ("Conv2d", "RMSNorm", "LSTM", "MultiHeadAttention")]
    ['conv2d', 'rms_norm', 'lstm', 'multi_head_attention']
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _as_input(value: Any) -> Any:
    """Arrays become nodes; states of recurrent layers are tuples of nodes, graphs may be what gathers, and None is a
    missing input."""
    return value if value is None or isinstance(value, tuple) or callable(value) else as_node(value)


def _freeze(held: Any, twins: dict[Node, Node]) -> Any:
    """What a layer holds, with its variables no longer trained; one that several hold stays one."""
    if isinstance(held, Layer):
        if held._called:
            said = f"{held.name!r} has been called, so a graph has its variables as trained ones"
            raise GraphError(said, fix="freeze it before, or name what is trained: minimize(loss, head.variables)")
        vars(held).update({name: _freeze(value, twins) for name, value in vars(held).items()})
    elif isinstance(held, Node) and held.role is Role.VARIABLE:
        if held not in twins:
            with tagged(**held.tags):
                twins[held] = OPS["variable"](**{**held.attrs, "trainable": False})
        return twins[held]
    elif isinstance(held, list | tuple):
        return type(held)(_freeze(value, twins) for value in held)
    elif isinstance(held, dict):
        return {key: _freeze(value, twins) for key, value in held.items()}
    return held


def _variables_of(values: Iterable[Any]) -> Iterator[Node]:
    for value in values:
        if isinstance(value, Layer):
            yield from value.variables
        elif isinstance(value, Node) and value.role is Role.VARIABLE:
            yield value
        elif isinstance(value, list | tuple):
            yield from _variables_of(value)
        elif isinstance(value, dict):
            yield from _variables_of(value.values())
