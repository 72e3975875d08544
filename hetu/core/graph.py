"""Nodes and graphs: a user writes them before anything runs, and passes rewrite them.

A `Node` is an operator applied to nodes; it is frozen and equal only to itself. A `Graph` is a tuple of output nodes.
Values, devices and memory belong to the program of an executor.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ELSEWHERE, GraphError, NodeUseError, Site, UnknownNameError, did_you_mean, user_site
from .types import NodeType, Shape, TensorType, show_type

if TYPE_CHECKING:
    from .op import Op, Role

OPS: dict[str, Op[..., Node]] = {}  # every operator by name; filled by `op.py`
FUNCTIONS: set[str] = set()  # what users call of them, as `ht.matmul`; entered by `hetu.ops`
_serial = itertools.count()
_EMPTY: Mapping[str, Any] = MappingProxyType({})


# -- where a new node comes from -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """What a new node inherits: the user's line and the tags in force (layer, stage, recompute region)."""

    site: Site | None
    tags: Mapping[str, Any]


_tags: ContextVar[Mapping[str, Any]] = ContextVar("tags", default=_EMPTY)
_origin: ContextVar[Origin | Node | None] = ContextVar("origin", default=None)


@contextlib.contextmanager
def tagged(**tags: Any) -> Iterator[None]:
    """Mark every node made inside, such as `tagged(stage=1)`. Passes and gradients inherit the marks.

    >>> import hetu as ht
    >>> with ht.tagged(layer="scale"):
    ...     y = ht.placeholder("x", (2,)) * 2.0
    >>> dict(y.tags)
    {'layer': 'scale'}
    """
    token = _tags.set(MappingProxyType({**_tags.get(), **tags}))
    try:
        yield
    finally:
        _tags.reset(token)


class origin_of:  # as a generator it would take three times as long
    """Nodes made inside count as written where `node` was, so that errors point at the user's line.

    They carry its tags and `tags` on top.
    """

    def __init__(self, node: Node, **tags: Any) -> None:
        self.origin = Origin(node.site, MappingProxyType({**node.tags, **tags})) if tags else node

    def __enter__(self) -> None:
        self.token = _origin.set(self.origin)

    def __exit__(self, *_: object) -> None:
        _origin.reset(self.token)


def current_site() -> Site | None:
    """The user's line that a node made now, or an error raised now, belongs to."""
    return user_site() if (origin := _origin.get()) is None else origin.site


# -- nodes -----------------------------------------------------------------------------------------------------


def _both_ways(name: str) -> tuple[Callable[[Node, Any], Node], Callable[[Node, Any], Node]]:
    """Python's operator between a node and another value, and between another value and a node."""
    return lambda self, other: OPS[name](self, other), lambda self, other: OPS[name](other, self)


def _of_one(name: str) -> Callable[[Node], Node]:
    return lambda self: OPS[name](self)


class Node:
    """An operator applied to nodes: `op`, `inputs`, `attrs`, the static `type`, the user's `site` and `tags`.

    Calling an operator makes one; nothing is computed. Python's arithmetic (`+ - * / // % ** @`), order (`< <= > >=`),
    logic of booleans (`& | ^ ~`), `abs` and indexing work on nodes, numbers and arrays, with NumPy's broadcasting;
    `==` compares nothing and is the identity of nodes, see `ht.equal`.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> y = abs(x - 1.0) @ np.ones((3, 2), np.float32)
    >>> y.op.name, y.shape, str(y.dtype), (x > 0).dtype.name, x[0].shape
    ('matmul', (?x.0, 2), 'float32', 'bool', (3,))
    """

    __slots__ = ("__weakref__", "attrs", "inputs", "op", "role", "serial", "site", "tags", "type")

    op: Op[..., Any]
    inputs: tuple[Node, ...]
    attrs: Mapping[str, Any]
    type: NodeType
    site: Site | None
    tags: Mapping[str, Any]
    serial: int
    role: Role  # what the operator is to those who handle graphs

    def __init__(self, op: Op[..., Any], inputs: tuple[Node, ...], attrs: Mapping[str, Any], type_: NodeType) -> None:
        origin = _origin.get()
        put = object.__setattr__
        put(self, "op", op)
        put(self, "inputs", inputs)
        put(self, "attrs", attrs)
        put(self, "type", type_)
        put(self, "site", origin.site if origin is not None else user_site())
        put(self, "tags", origin.tags if origin is not None else _tags.get())
        put(self, "serial", next(_serial))
        put(self, "role", op.role(**attrs) if callable(op.role) else op.role)

    def __setattr__(self, name: str, *value: object) -> None:
        raise GraphError(f"{self!r} is frozen, {name!r} cannot be changed", fix="make a new node instead")

    __delattr__ = __setattr__

    def __deepcopy__(self, memo: Any) -> Any:
        raise GraphError(f"{self!r} cannot be copied: it is one value", fix="build it again, or use it twice")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ["op", "inputs", "attrs", "type", "shape", "dtype", "ndim", "name", *FUNCTIONS]
        ours = _OURS.get(name, name)
        theirs = next(filter(None, (of_it(name)[1] for of_it in ELSEWHERE)), "") or did_you_mean(name, known)
        fix = _written(ours) if ours in FUNCTIONS or ours in _FROM_NUMPY else theirs
        raise UnknownNameError(f"a node has no attribute {name!r}", fix=fix)

    @property
    def tensor(self) -> TensorType:
        """The type of a node with one output; GraphError for several."""
        if isinstance(self.type, tuple):
            raise GraphError(f"{self!r} has {len(self.type)} outputs", fix="index the tuple that the call returned")
        return self.type

    @property
    def shape(self) -> Shape:
        """Sizes, known numbers or symbolic `Dim`s."""
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.tensor.shape)

    @property
    def name(self) -> str:
        """The given name of a placeholder or variable, else the operator's."""
        return str(self.attrs.get("name", self.op.name))

    def __repr__(self) -> str:
        name = f" '{self.attrs['name']}'" if "name" in self.attrs else ""
        return f"<{self.op.name}{name} {show_type(self.type)} at {self.site}>"

    # A node stands for a value that does not exist yet, so an operation that needs the value now must fail and say why.
    def _no_value(self, *_: object, **__: object) -> Any:
        said = f"{self!r} has no value yet: it cannot be a condition, a number, a sequence or a NumPy array"
        fix = "choose with ht.where, compute with ht.exp and the like; Executor.run and ht.evaluate give the value"
        raise NodeUseError(said, fix=fix)

    __bool__ = __float__ = __int__ = __index__ = __iter__ = __len__ = __contains__ = __array__ = _no_value

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Node:
        name = _OURS.get(ufunc.__name__, ufunc.__name__)
        if method == "__call__" and not kwargs and name in _FROM_NUMPY:
            return OPS[name](*inputs)  # the array's operator met a node on its right: `array + node`
        name = name if method == "__call__" else _REDUCTIONS.get(name, name)
        fix = _written(name) if name in OPS else "use hetu's own functions, or evaluate the node first"
        raise NodeUseError(f"{self!r} was fed to numpy.{ufunc.__name__}, which needs a value", fix=fix)

    __add__, __radd__ = _both_ways("add")
    __sub__, __rsub__ = _both_ways("subtract")
    __mul__, __rmul__ = _both_ways("multiply")
    __truediv__, __rtruediv__ = _both_ways("divide")
    __floordiv__, __rfloordiv__ = _both_ways("floor_divide")
    __mod__, __rmod__ = _both_ways("remainder")
    __pow__, __rpow__ = _both_ways("power")
    __matmul__, __rmatmul__ = _both_ways("matmul")
    __and__, __rand__ = _both_ways("logical_and")
    __or__, __ror__ = _both_ways("logical_or")
    __xor__, __rxor__ = _both_ways("logical_xor")

    __neg__, __abs__, __invert__ = map(_of_one, ("negative", "abs", "logical_not"))

    def __eq__(self, other: object) -> bool:
        """Whether both are the same node; asked about a number it would always be False, so that is refused."""
        if isinstance(other, int | float | np.generic):
            said = f"{self!r} == {other!r} compares the node, not its value"
            raise NodeUseError(said, fix="compare values with ht.equal(a, b)")
        return self is other

    __hash__ = object.__hash__

    __lt__, __le__ = _both_ways("less")[0], _both_ways("less_equal")[0]
    __gt__, __ge__ = _both_ways("greater")[0], _both_ways("greater_equal")[0]

    def __format__(self, spec: str) -> str:
        return self._no_value() if spec else str(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise NodeUseError(f"{self!r} is frozen, an entry cannot be set", fix="choose with ht.where(mask, new, x)")

    def __getitem__(self, key: Any) -> Node:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, Node) for k in keys):
            raise NodeUseError(f"{self!r} cannot be indexed by a node", fix="gather with ht.take(x, ids, axis=0)")
        return OPS["getitem"](self, key=keys)


_FROM_NUMPY = frozenset(
    "add subtract multiply divide floor_divide remainder power negative matmul less less_equal greater greater_equal"
    " logical_and logical_or logical_xor".split()
)
_OURS = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor", "absolute": "abs"}
_OURS |= {"T": "matrix_transpose", "mT": "matrix_transpose", "transpose": "permute_dims", "view": "reshape"}
_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}  # ufunc.reduce -> ours


def _written(name: str) -> str:
    """How a user writes an operator."""
    return "write it with Python's operator" if name in _FROM_NUMPY else f"call ht.{name}(node)"


def _shown_attrs(node: Node) -> list[str]:
    """The attributes worth a place in a printed row: no defaults, nothing the type says, no big constants."""
    if "name" in node.attrs:
        return [repr(node.name)]
    shown = []
    for name, value in node.attrs.items():
        if isinstance(value, np.ndarray):
            shown += [repr(value.item())] if value.size == 1 else []
        elif value is not None and value != node.op.defaults.get(name, None):
            shown.append(f"{name}={value!r}")
    return shown


# -- graphs ----------------------------------------------------------------------------------------------------


class Made(tuple[Node, ...]):
    """The outputs of a graph that was rewritten, whose nodes are put in order once."""

    order: Sequence[Node] = ()


def topological(outputs: Iterable[Node]) -> list[Node]:
    """Every node the outputs need, inputs first, in depth-first order. Iterative: 20,000 deep is fine."""
    if isinstance(outputs, Made) and outputs.order:
        return [*outputs.order]
    order: dict[Node, None] = {}
    opened: set[Node] = set()
    stack = list(outputs)[::-1]
    while stack:
        node = stack.pop()
        if node in opened:  # its inputs are in order by now, as no node is among its own
            order[node] = None
        else:
            opened.add(node)
            stack.append(node)
            stack += node.inputs[::-1]
    if isinstance(outputs, Made):
        outputs.order = tuple(order)
    return list(order)


Readers = Mapping[Node, Sequence[Node | None]]


def readers_of(nodes: Iterable[Node], outputs: Iterable[Node] = ()) -> dict[Node, list[Node | None]]:
    """For each of the `nodes` of a graph, inputs first, those that read it, once for every time they do.

    A node that takes the `outputs` follows them as None.
    """
    found: dict[Node, list[Node | None]] = {}
    for node in nodes:
        found[node] = []
        for i in node.inputs:
            found[i].append(node)
    for node in outputs:
        found[node].append(None)
    return found


RewriteRule = Callable[[Node, tuple[Node, ...]], "Node | None"]


def rewrite(outputs: Sequence[Node], rule: RewriteRule) -> tuple[Node, ...]:
    """Rebuild a graph bottom-up. `rule(node, new_inputs)` returns a replacement, or None to keep the operator.

    Replacements count as written where the old node was. A node whose inputs did not change stays the same object.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (2,))
    >>> (y,) = rewrite([ht.exp(x) + 1.0], lambda node, inputs: ht.sin(*inputs) if node.op.name == "exp" else None)
    >>> y.inputs[0].op.name
    'sin'
    """
    new: dict[Node, Node] = {}
    before = _origin.set(None)
    try:
        for node in topological(outputs):
            _origin.set(node)  # `with origin_of(node)` around each would take longer than most rules
            inputs = tuple([new[i] for i in node.inputs])
            made = rule(node, inputs)
            new[node] = remade(node, inputs) if made is None else made
    finally:
        _origin.reset(before)
    return Made(new[o] for o in outputs)


def remade(node: Node, inputs: tuple[Node, ...]) -> Node:
    """`node` with these inputs; its type is inferred anew only where theirs differ."""
    if inputs == node.inputs:
        return node
    if all([n.type is o.type or n.type == o.type for n, o in zip(inputs, node.inputs, strict=True)]):
        return Node(node.op, inputs, node.attrs, node.type)
    return node.op.make(inputs, node.attrs)


def replace(outputs: Sequence[Node], mapping: Mapping[Node, Node]) -> tuple[Node, ...]:
    """The graph with the nodes of `mapping` replaced, without regard to their inputs."""
    return rewrite(outputs, lambda node, _: mapping.get(node))


@dataclass(frozen=True)
class Graph:
    """A tuple of output nodes. `print(graph)` shows one typed row per node with the user's line.

    >>> import hetu as ht
    >>> graph = Graph((ht.exp(ht.placeholder("x", (2,))),))
    >>> [node.op.name for node in graph.nodes], [leaf.name for leaf in graph.leaves("placeholder")]
    (['placeholder', 'exp'], ['x'])
    """

    outputs: tuple[Node, ...]

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes, inputs first."""
        return topological(self.outputs)

    def leaves(self, kind: str) -> list[Node]:
        """The nodes of the role "placeholder", "variable" or "constant", in graph order."""
        if kind not in ("placeholder", "variable", "constant"):
            raise UnknownNameError(f"{kind!r} is no kind of leaf", fix='pass "placeholder", "variable" or "constant"')
        return [n for n in self.nodes if n.role.value == kind]

    def verify(self) -> None:
        """GraphError unless every node's type follows from its inputs and each name belongs to one node."""
        owners: dict[tuple[str, str], Node] = {}
        for node in self.nodes:
            if node.inputs and node.op.infer(*(i.type for i in node.inputs), **node.attrs) != node.type:
                said, fix = f"{node!r} has a type that does not follow from its inputs", "call operators, or op.make"
                raise GraphError(said, fix=fix, site=node.site)
            if "name" in node.attrs and owners.setdefault((node.op.name, node.name), node) is not node:
                first = owners[node.op.name, node.name]
                said = f"two {node.op.name}s are called {node.name!r}: {first!r} and {node!r}"
                fix = "give one another name or ht.scope(...); let no two optimizers of a class train a variable"
                raise GraphError(said, fix=fix, site=node.site)

    def __str__(self) -> str:
        names = {node: f"%{i}" for i, node in enumerate(self.nodes)}
        rows = []
        for node in self.nodes:
            shown = [*(names[i] for i in node.inputs), *_shown_attrs(node)]
            rows.append((f"{names[node]}: {show_type(node.type)} = {node.op.name}({', '.join(shown)})", str(node.site)))
        width = min(100, max((len(r[0]) for r in rows), default=0))
        lines = [f"{text:<{width}}  # {site}" for text, site in rows]
        return "\n".join([*lines, f"return {', '.join(names[o] for o in self.outputs)}"])
