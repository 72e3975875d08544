"""Operators: one decorated function `f(xp, *arrays, **attrs)` with rules hung on it, and what a call makes of values.

An operator never sees its graph, the device or the ranks; passes and the executor handle those. A composition of
operators needs no operator: write a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from .backend import Scratch, array_from
from .errors import ArgumentError, HetuError, ShapeError, did_you_mean, public
from .graph import OPS, Node, current_site
from .kernels import Call, kernels_of
from .types import DEFAULT_FLOAT, Dim, NodeType, TensorType, as_dtype, is_float, promote, require_sizes, show_type

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")  # of a forward function, the module apart: inputs, then attributes
R = TypeVar("R", covariant=True)  # what a call makes: Node, or a tuple of nodes
Infer = Callable[..., NodeType]
TAKEN: set[str] = set()  # names that stay with hetu's own operators: those that are there once the package is complete


class Role(Enum):
    """What an operator is to those who handle graphs. It is declared with the operator; no pass asks for a name.

    >>> import hetu as ht
    >>> ht.placeholder("x", (2,)).op.role
    <Role.PLACEHOLDER: 'placeholder'>
    """

    COMPUTE = "compute"
    PLACEHOLDER = "placeholder"
    VARIABLE = "variable"
    CONSTANT = "constant"
    ITEM = "item"  # one output of an operator that has several: a name, not work
    LOOKUP = "lookup"  # rows of a table, the first input, by ids, the second
    SCATTER = "scatter"  # the gradient of a lookup: the table, ids, and the rows that are added at the ids
    UPDATE = "update"  # new values of a parameter, the first input, and of its optimizer's state, from a gradient `g`
    COMMUNICATION = "communication"  # gets the program's communicator as `comm=`; `order` is its place in line
    MOVE = "move"  # moves, copies, converts or fills in numbers and computes none
    HINT = "hint"  # says how its input is to lie
    __hash__ = object.__hash__  # asked for many times, and that of an Enum is not written in C


LEAVES = frozenset({Role.PLACEHOLDER, Role.VARIABLE, Role.CONSTANT})  # what a program is given and never computes


def _hung(rule: str, meaning: str) -> Callable[[Op[..., Any], F], F]:
    """The method that hangs a rule on an operator and returns it unchanged."""

    def hang(self: Op[..., Any], function: F) -> F:
        setattr(self, f"{rule}_rule", function)
        return function

    hang.__doc__ = meaning
    return hang


class Op(Generic[P, R]):
    """An operator and its table of rules (see `hetu/README.md`, "the operator in one place").

    `op(x, ..., attribute=...)` makes a node; an operator of several outputs returns a tuple of nodes.

    `precision` is how it computes where products take 16-bit floats: "low" (in 16 bits, as products do), "follow" (in
    those of its computed operands, if none is float32), "wide" (in float32), or the positions of the inputs that are as
    the last of them is, beside others in float32. Elementwise operators with a `code` expression and those that move
    numbers follow unless they say otherwise; all else is wide.
    """

    grad_rule: Callable[..., Any] | None = None
    normalize_rule: Callable[..., dict[str, Any]] | None = None
    into_rule: Callable[..., None] | None = None
    bind_rule: Callable[..., Call | Sequence[Call] | None] | None = None
    view_rule: Callable[..., Any] | None = None
    check_rule: Callable[..., None] | None = None
    ranges_rule: Callable[..., Iterable[Any]] | None = None
    decompose_rule: Callable[..., Any] | None = None
    update: Any = None  # the `UpdateRule` of an optimizer that it applies to a whole parameter
    row_update: Any = None  # or to some rows of a table
    flops_rule: Callable[..., int] | None = None
    simplify_rule: Callable[..., Node | None] | None = None

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        name: str = "",
        role: Role | Callable[..., Role] = Role.COMPUTE,
        infer: Infer | None = None,
        dims: str | Callable[..., str] | None = None,
        reduce: str = "sum",
        linear: tuple[int, ...] | str = (),
        like: tuple[int, ...] = (),
        inplace: Mapping[int, tuple[int, ...]] | None = None,
        ufunc: str | None = None,
        code: str | None = None,
        differentiable: bool = True,
        precision: str | tuple[int, ...] | None = None,
        lazy: bool = False,
        scratch: bool = False,
        on_host: bool = False,
        reads_host: bool = False,
        awaited: tuple[int, ...] = (),
        collective: str = "",
    ) -> None:
        self.forward, self.name = forward, name or forward.__name__.rstrip("_")
        self.role = role  # or a function of the attributes, where they decide
        self.dims, self.reduce, self.linear, self.like = dims, reduce, linear, like
        self.inplace = {} if inplace is None else dict(inplace)
        self.ufunc, self.code, self.differentiable = ufunc, code, differentiable
        self.precision = precision or ("follow" if code or role in (Role.MOVE, Role.HINT) else "wide")
        self.lazy = lazy  # runs as late as its readers allow, so that what it waits for has time
        self.scratch = scratch  # its `bind` takes working memory of `scratch=`, which the plan shares out
        self.on_host = on_host  # its result lies in the memory of the host, outside the arena
        self.reads_host = reads_host  # its first input may lie there; no other operator can read it
        self.awaited = awaited  # inputs that are only waited for; the first input passes as it lies
        self.collective = collective  # the kind of collective that it is, by which planners know what it sends
        self.infer_rule = infer
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # the first is xp
        self.inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.__doc__, self.__module__, self.__name__ = forward.__doc__, forward.__module__ or "", self.name
        self.__wrapped__ = forward  # lets doctest and help() find the function
        self.__signature__ = inspect.Signature(parameters)
        if ufunc and getattr(getattr(np, ufunc, None), "nin", None) != len(self.inputs):
            raise ArgumentError(f"{self.name}: {ufunc=} for {len(self.inputs)} inputs", fix="name one of as many")
        words = {"precision": ["low", "follow", "wide"], "reduce": ["sum", "max", "min"], "linear": ["joint"]}
        for slot, known in (words | {"dims": [str(dims) if "->" in str(dims) else "inputs->result, by axes"]}).items():
            if isinstance(word := getattr(self, slot), str) and word not in known:
                raise ArgumentError(f"{self.name}: {slot}={word!r}", fix=f"write {' or '.join(known)}")

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # -- hanging rules on it: each is used as a decorator ----------------------------------------------------------

    # An operator without `grad`, or where it returns NotImplemented, is differentiated through `decompose`.
    grad = _hung("grad", "`(g, out, *inputs, **attrs)` -> a node or None per input, in graph functions.")
    normalize = _hung("normalize", "`(*types, **attrs)` -> attributes in canonical form, before `infer`.")
    infers = _hung("infer", "`(*types, **attrs)` -> the type of the result, or a tuple of types.")
    simplify = _hung("simplify", "`(node, *inputs)` -> a simpler node of the same value and type, or None.")
    into = _hung("into", "`(xp, out, *arrays, **attrs)` writes the result into `out` (a tuple for several outputs).")
    bind = _hung("bind", "`(xp, out, *arrays, **attrs)` -> calls bound to these very arrays, or None to decline.")
    view = _hung("view", "`(xp, *arrays, **attrs)` -> a view of the first array, or None when it must be computed.")
    check = _hung("check", "`(xp, *arrays, **attrs)` raises when values are out of range; before each run on a CPU.")
    ranges = _hung("ranges", "`(*arrays, **attrs)` -> (ids, size, what) in turn: no check if ids fit; or None.")
    decompose = _hung("decompose", "`(*inputs, **attrs)` -> the same in graph functions, where a `!` factor is split.")
    flops = _hung("flops", "`(out, *types, **attrs)` -> operations of a product whose number `dims` does not tell.")

    @overload
    def __call__(self, *args: P.args, **attrs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any) -> R: ...  # attributes by position: then all of them

    @public
    def __call__(self, *args: Any, **attrs: Any) -> Any:
        return unpacked(self.make(*self._arguments(args, attrs)))

    def _arguments(self, args: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[tuple[Node, ...], dict[str, Any]]:
        """Split call arguments into input nodes and attributes; positions after the inputs fill attributes in order."""
        count = len(args) if self.variadic else len(self.inputs)
        for name, value in zip(self.defaults, args[count:]):
            if name in attrs:
                raise self._misused(f"got {name!r} twice", "pass it once")
            attrs[name] = value
        if len(args) > count + len(self.defaults):
            raise self._misused(f"got {len(args)} arguments, takes {count + len(self.defaults)}")
        given = list(args[:count])
        for name in self.inputs[len(given) :]:
            if name not in attrs:
                raise self._misused(f"misses its input {name!r}")
            given.append(attrs.pop(name))
        for name in attrs:
            if name not in self.defaults:
                raise self._misused(f"has no attribute {name!r}", did_you_mean(name, self.__signature__.parameters))
        for name, default in self.defaults.items():
            if attrs.setdefault(name, default) is inspect.Parameter.empty:
                raise self._misused(f"misses its attribute {name!r}")
        return as_nodes(given), attrs

    def _misused(self, said: str, fix: str = "") -> ArgumentError:
        fix = fix or f"call {self.name}({', '.join(self.__signature__.parameters)})"
        return ArgumentError(f"{self.name}() {said}", fix=fix)

    def make(self, inputs: tuple[Node, ...], attrs: Mapping[str, Any]) -> Node:
        """The node for canonical inputs; one node even for several outputs. Passes use this."""
        types = [node.type for node in inputs]
        try:
            if type(attrs) is not MappingProxyType:  # those of a node are canonical
                attrs = MappingProxyType({name: _canonical(name, value) for name, value in attrs.items()})
            if self.normalize_rule:
                attrs = MappingProxyType(self.normalize_rule(*types, **attrs))
            type_ = self.infer(*types, **attrs)
            require_sizes(type_)
        except HetuError as error:
            if not error.message.startswith(self.name):
                error.message = f"{self.name}({', '.join(map(show_type, types))}): {error.message}"
            error.site = current_site()
            raise
        return Node(self, inputs, attrs, type_)

    def infer(self, *types: NodeType, **attrs: Any) -> NodeType:
        """The type of the result; without a rule the forward function runs once on small arrays."""
        if self.infer_rule is not None:
            return self.infer_rule(*types, **attrs)
        return infer_by_running(self.forward, types, attrs)

    # -- running -----------------------------------------------------------------------------------------------

    def bound(
        self, xp: ModuleType, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Scratch | None = None
    ) -> list[Call]:
        """Zero-argument callables that compute the result into `out`, each bound to its arrays once."""
        made: Any = kernels_of(xp).bound(self, xp, out, arrays, attrs, scratch)
        if made is None and self.bind_rule:
            more = {"scratch": scratch or Scratch()} if self.scratch else {}
            made = self.bind_rule(xp, out, *arrays, **attrs, **more)
        if made is not None:
            return [made] if callable(made) else list(made)
        if self.ufunc and len({a.dtype for a in arrays} - {np.dtype(bool)}) < 2:  # else NumPy chooses another dtype
            by_name = {"out": out} if self.ufunc in ("maximum", "minimum") else {}  # as NumPy wants it
            return [partial(getattr(xp, self.ufunc), *arrays, *(() if by_name else (out,)), **by_name)]
        lent = [np.broadcast_to(a, a.shape) if isinstance(a, np.ndarray) else a for a in arrays]  # may be variables'
        if self.into_rule:
            return [partial(self.into_rule, xp, out, *lent, **attrs)]
        shapes = tuple(o.shape for o in (out if isinstance(out, tuple) else (out,)))

        def compute() -> Any:
            return of_shapes(shapes, self.forward(xp, *lent, **attrs))

        if isinstance(out, tuple):
            apart = xp.copy if self.inplace else xp.asarray  # one may be a view of what another overwrites
            return [lambda: [xp.copyto(o, value) for o, value in zip(out, [*map(apart, compute())], strict=True)]]
        return [lambda: xp.copyto(out, compute())]


def of_shapes(shapes: Sequence[Any], made: Any) -> Any:
    """What a forward function gave; ShapeError unless of the shapes that `infer` says, to which it would broadcast."""
    several = isinstance(made, tuple) or (len(shapes) > 1 and isinstance(made, list))
    found = tuple(m.shape if hasattr(m, "shape") else np.shape(m) for m in (made if several else (made,)))
    if found != shapes:
        raise ShapeError(f"its function gave shapes {found}, `infer` says {shapes}", fix="correct one of the two")
    return made


class Decorator(Protocol[R]):
    """Makes an operator of a forward function."""

    def __call__(self, forward: Callable[Concatenate[ModuleType, P], Any], /) -> Op[P, R]: ...


# An editor takes the attributes from the forward function, and from `infer` whether a call makes one node or several.
@overload
def op(forward: Callable[Concatenate[ModuleType, P], Any], /) -> Op[P, Node]: ...
@overload
def op(*, infer: Callable[..., tuple[TensorType, ...]], **rules: Any) -> Decorator[tuple[Node, ...]]: ...
@overload
def op(*, infer: Callable[..., TensorType] | None = None, **rules: Any) -> Decorator[Node]: ...


def op(forward: Callable[..., Any] | None = None, /, **rules: Any) -> Any:
    """Make an operator of `f(xp, *arrays, **attrs)` and enter it in the table. A new definition replaces an old one.

    One of the name of an operator of hetu's is another operator: what hetu makes and looks for remains its own.

    >>> import hetu as ht
    >>> @ht.op
    ... def swish(xp, x, *, beta=1.0):
    ...     return x / (1 + xp.exp(-beta * x))
    >>> swish(ht.placeholder("x", (None, 3))).type.ndim
    2
    """
    if forward is None:
        return partial(op, **rules)
    made: Op[..., Any] = Op(forward, **rules)
    if made.name not in TAKEN:
        OPS[made.name] = made
    return made


def _canonical(name: str, value: Any) -> Any:
    """Attributes are hashable plain data: lists become tuples, NumPy integers ints, dtypes names."""
    if name == "dtype":
        return None if value is None else as_dtype(value).name
    if isinstance(value, list | tuple):
        return tuple(_canonical("", v) for v in value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Node):
        raise ArgumentError(f"attribute {name!r} is a node: {value!r}", fix="attributes are plain numbers")
    return value


# -- turning values into nodes ---------------------------------------------------------------------------------
# What a call makes by itself comes by name: `leaf.py` defines these operators on top of this file.


def unpacked(node: Node) -> Any:
    """What a call returns: the node, or the tuple of its outputs."""
    if isinstance(node.type, tuple):
        return tuple(OPS["item"](node, index=i) for i in range(len(node.type)))
    return node


def as_nodes(values: Sequence[Any]) -> tuple[Node, ...]:
    """Nodes for mixed operands. A Python number takes the dtype of the others, so `x * 2` stays `x`'s dtype."""
    dtypes = [v.dtype for v in values if isinstance(v, Node) and not isinstance(v.type, tuple)]
    return tuple(as_node(v, dtypes) for v in values)


def as_node(value: Any, others: Sequence[np.dtype] = ()) -> Node:
    """A node for one value: itself, a `size` for a Dim, else a constant."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Dim):  # of the dtype that the number would have which it stands for
        size, dtype = OPS["size"](value=value), weak_dtype(1, others)
        return size if size.dtype == dtype else OPS["astype"](size, dtype=dtype.name)
    number = isinstance(value, bool | int | float)
    try:
        array = np.asarray(value, weak_dtype(value, others)) if number else array_from(value)
    except OverflowError as error:
        fix = 'widen the others, as by ht.astype(x, "int64")'
        raise ArgumentError(f"cannot make an array of {type(value).__name__}: {error}", fix=fix) from None
    if array.dtype == np.float64 and isinstance(value, list | tuple):
        array = array.astype(DEFAULT_FLOAT)  # a Python list has no dtype of its own
    if array.dtype.kind in "biu" or is_float(array.dtype):
        return OPS["constant"](value=array)
    said = f"{type(value).__name__} {value!r:.60} cannot be an input of an operator"
    raise ArgumentError(said, fix="pass a node, an int, a float or a NumPy array of numbers")


def weak_dtype(value: bool | int | float, others: Sequence[np.dtype]) -> np.dtype:
    """The dtype a Python number takes beside operands of the given dtypes."""
    if isinstance(value, bool):
        return np.dtype(bool)
    if isinstance(value, float):
        return promote(*floats) if (floats := [d for d in others if is_float(d)]) else DEFAULT_FLOAT
    numbers = [d for d in others if d.kind != "b"]
    return promote(*numbers) if numbers else np.dtype("int64")


# -- families of type rules ------------------------------------------------------------------------------------


def _of_one_output(types: Sequence[NodeType]) -> list[TensorType]:
    found = [t for t in types if not isinstance(t, tuple)]
    if len(found) < len(types):
        raise ArgumentError("an input has several outputs", fix="pick one of the tuple")
    return found


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def infer_by_running(forward: Callable[..., Any], of: Sequence[NodeType], attrs: Mapping[str, Any]) -> NodeType:
    """Run the forward function on ones. Unknown sizes become primes and are found again in the result's shape."""
    types = _of_one_output(of)
    dims = sorted({s for t in types for s in t.shape if isinstance(s, Dim)}, key=repr)
    known = {s for t in types for s in t.shape if isinstance(s, int)}
    primes: dict[Any, int] = dict(zip(dims, (p for p in _PRIMES if p not in known)))
    arrays = [np.ones([primes.get(s, s) for s in t.shape], t.dtype) for t in types]
    try:
        result = forward(np, *arrays, **attrs)
    except (ValueError, IndexError) as error:
        if isinstance(error, HetuError):
            raise
        sizes = f" (here {', '.join(f'{dim} is {p}' for dim, p in primes.items())})" if primes else ""
        text = str(error).strip()
        raise ShapeError(f"fails on these shapes: {text}{sizes}", fix="pass shapes that its function takes") from None
    back = {prime: dim for dim, prime in primes.items()}

    def describe(array: Any) -> TensorType:
        array = np.asarray(array)
        narrow = array.dtype == np.float64 and not any(t.dtype == np.float64 for t in types)
        dtype = DEFAULT_FLOAT if narrow else array.dtype
        return TensorType(tuple(back.get(s, s) for s in array.shape), as_dtype(dtype))

    return tuple(map(describe, result)) if isinstance(result, tuple) else describe(result)
