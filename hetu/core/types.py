"""Static types: shapes with known or symbolic sizes, dtypes, and families of rules by which types follow from types.

A size that is unknown while the graph is built is a `Dim`: an integer times symbols such as `x.0` (axis 0 of
placeholder x). Code can compute with it and put it into a shape; asking for its number raises and says why. Sums and
quotients that do not cancel stay opaque symbols.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import add, floordiv
from typing import Any, Union

import numpy as np

from .errors import AxisError, DTypeError, MissingDependencyError, NodeUseError, ShapeError

Size = Union[int, "Dim"]
Shape = tuple[Size, ...]
Atom = tuple[Any, ...]
Box = tuple[tuple[int, int], ...]  # start and end along each axis
DEFAULT_FLOAT = np.dtype("float32")


@dataclass(frozen=True, slots=True, eq=True)
class Dim:
    """`coef * atom * atom ...`; an atom is (name, axis) or an opaque (operator, left, right).

    >>> batch = Dim.of("x", 0)
    >>> batch * 28 // 28 == batch
    True
    >>> str(batch * 56), repr(batch)
    ('56*?', '?x.0')
    """

    coef: int
    atoms: tuple[Atom, ...]

    @staticmethod
    def of(name: str, axis: int) -> Dim:
        return Dim(1, ((name, axis),))

    def __mul__(self, other: Size) -> Size:
        if isinstance(other, Dim):
            return Dim(self.coef * other.coef, tuple(sorted(self.atoms + other.atoms, key=repr)))
        return Dim(self.coef * other, self.atoms) if other else 0

    __rmul__ = __mul__

    def __add__(self, other: Size) -> Size:
        if isinstance(other, Dim):
            if other.atoms == self.atoms:
                total = self.coef + other.coef
                return Dim(total, self.atoms) if total else 0
            return _opaque("+", *sorted((self, other), key=repr))
        if other == 0:
            return self
        if self.coef == 1 and len(self.atoms) == 1 and self.atoms[0][0] == "+" and isinstance(self.atoms[0][2], int):
            _, base, constant = self.atoms[0]
            shifted: Size = base + (constant + other)
            return shifted
        return _opaque("+", self, other)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + -1 * other

    def __rsub__(self, other: Size) -> Size:
        return self * -1 + other

    def __floordiv__(self, other: Size) -> Size:
        if isinstance(other, int):
            return Dim(self.coef // other, self.atoms) if self.coef % other == 0 else _opaque("//", self, other)
        rest = list(self.atoms)
        for atom in other.atoms:
            if atom not in rest:
                return _opaque("//", self, other)
            rest.remove(atom)
        if self.coef % other.coef:
            return _opaque("//", self, other)
        return Dim(self.coef // other.coef, tuple(rest)) if rest else self.coef // other.coef

    def __rfloordiv__(self, other: int) -> Size:
        return _opaque("//", other, self)

    def __mod__(self, other: Size) -> Size:
        return self - (self // other) * other

    def __rmod__(self, other: int) -> Size:
        return other - (other // self) * self

    def __str__(self) -> str:
        return "?" if self.coef == 1 else f"{self.coef}*?"

    def __repr__(self) -> str:
        atoms = "*".join(f"{a[0]}.{a[1]}" if len(a) == 2 else f"({a[1]!r}{a[0]}{a[2]!r})" for a in self.atoms)
        return f"?{atoms}" if self.coef == 1 else f"{self.coef}*?{atoms}"

    def _refuse(self, *_: object) -> Any:
        said = f"the size {self!r} is not known while the graph is built: no value to compare, count or divide"
        fix = (
            "use it in shapes, with whole numbers or beside nodes, or give the placeholder a fixed size instead of None"
        )
        raise NodeUseError(said, fix=fix)

    __bool__ = __int__ = __index__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse


def _with_sizes(rule: Callable[[Dim, Any], Any]) -> Callable[[Dim, Any], Any]:
    """Arithmetic with whole numbers: a fraction of a size would be lost, and whatever else computes with it itself."""

    def operate(self: Dim, other: Any) -> Any:
        if isinstance(other, Dim | int | np.integer):
            return rule(self, other)
        return self._refuse() if isinstance(other, float | np.floating) else NotImplemented

    return operate


for _name in "add radd sub rsub mul rmul floordiv rfloordiv mod rmod truediv rtruediv pow rpow".split():
    setattr(Dim, f"__{_name}__", _with_sizes(getattr(Dim, f"__{_name}__")))


def _opaque(operator: str, left: Size, right: Size) -> Dim:
    return Dim(1, ((operator, left, right),))


def substitute(value: Any, sizes: Mapping[Atom, int]) -> Any:
    """`value` (a Dim, or a tuple holding some) with every symbol in `sizes` replaced by its number."""
    if isinstance(value, tuple):
        return tuple(substitute(v, sizes) for v in value)
    if not isinstance(value, Dim):
        return value
    result: Size = value.coef
    for atom in value.atoms:
        if len(atom) == 3:
            result = result * _EVALUATE[atom[0]](substitute(atom[1], sizes), substitute(atom[2], sizes))
        else:
            result = result * sizes.get(atom, Dim(1, (atom,)))
    return result


def has_dim(value: Any) -> bool:
    """Whether a Dim hides in `value`, a size, shape or attribute."""
    return isinstance(value, Dim) or (isinstance(value, tuple) and any(map(has_dim, value)))


def compatible(a: Size, b: Size) -> bool:
    """Not provably different: two unknown sizes agree until a run fixes them."""
    return isinstance(a, Dim) or isinstance(b, Dim) or a == b


def unify(a: Size, b: Size) -> Size:
    """The better known of two sizes that must agree."""
    return b if isinstance(a, Dim) and not isinstance(b, Dim) else a


def product(sizes: Iterable[Size]) -> Size:
    """Number of elements of a shape; 1 for no axes."""
    return math.prod(sizes)


def broadcast_sizes(a: Size, b: Size) -> Size:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, Dim) and isinstance(b, Dim):
        return _opaque("bc", *sorted((a, b), key=repr))
    if isinstance(a, Dim) or isinstance(b, Dim):
        return unify(a, b)
    raise ShapeError(f"sizes {a} and {b} do not broadcast", fix="make them equal, or one of them 1")


_EVALUATE: dict[str, Callable[[Any, Any], Any]] = {"+": add, "//": floordiv, "bc": broadcast_sizes}


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape of an elementwise result, aligned at the last axis.

    >>> broadcast_shapes((4, 1), (3,))
    (4, 3)
    """
    rank = max(map(len, shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, start=rank - len(shape)):
            try:
                result[axis] = broadcast_sizes(result[axis], size)
            except ShapeError as error:
                text = " and ".join(map(show_shape, shapes))
                raise ShapeError(f"shapes {text} do not broadcast: {error.message}", fix=error.fix) from None
    return tuple(result)


def show_shape(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool", "complex": "c"}
DTYPES = {np.dtype(n).name: np.dtype(n) for n in "?bhilqBHILQefd"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # NumPy puts a name together each time it is asked
_KNOWN: dict[Any, np.dtype] = DTYPES | {key: d for d in _NAMES for key in (d, d.type)}


def as_dtype(dtype: Any) -> np.dtype:
    """A supported dtype from its name, NumPy type or dtype; DTypeError otherwise."""
    if getattr(dtype, "__name__", dtype) == "bfloat16":  # also of the type itself
        return bfloat16()
    try:
        return _KNOWN[dtype] if dtype in _KNOWN else DTYPES[np.dtype(dtype).name]
    except (TypeError, KeyError):
        fix = f"use one of {', '.join(sorted(DTYPES))}, such as dtype='float32'"
        raise DTypeError(f"unknown dtype {dtype!r}", fix=fix) from None


@cache
def bfloat16() -> np.dtype:
    """The upper half of a float32, which NumPy knows from another package."""
    try:
        import ml_dtypes
    except ImportError:
        raise MissingDependencyError("bfloat16 needs ml_dtypes", fix="pip install ml_dtypes") from None
    found: np.dtype = np.dtype(ml_dtypes.bfloat16)
    return found


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name == "bfloat16")


def promote(*dtypes: np.dtype) -> np.dtype:
    """The dtype of an elementwise result. A float wins over an integer without growing: i64 with f32 gives f32.

    >>> promote(np.dtype("int64"), np.dtype("float32")).name
    'float32'
    """
    floats = [d for d in dtypes if is_float(d)]
    try:
        return np.result_type(*(floats or dtypes))
    except np.exceptions.DTypePromotionError:
        names = " and ".join(dict.fromkeys(d.name for d in floats))
        raise DTypeError(f"no dtype holds both {names}", fix='convert one with ht.astype(x, "float32")') from None


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of one array. Prints as `f32[?, 784]`."""

    shape: Shape
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Size:
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        name = _NAMES.get(self.dtype) or self.dtype.name
        digits = name.lstrip("abcdefghijklmnopqrstuvwxyz")
        return f"{_SHORT[name.removesuffix(digits)]}{digits}[{', '.join(map(str, self.shape))}]"


NodeType = TensorType | tuple[TensorType, ...]


def show_type(type_: NodeType) -> str:
    return str(type_) if isinstance(type_, TensorType) else f"({', '.join(map(str, type_))})"


def require_sizes(type_: NodeType) -> None:
    """ShapeError unless all sizes are whole numbers that are not negative, or not known yet."""
    for part in (type_,) if isinstance(type_, TensorType) else type_:
        for size in part.shape:
            if type(size) is not Dim and not (isinstance(size, int | np.integer) and size >= 0):
                raise ShapeError(f"{size!r} is no size of an axis", fix="pass a whole number that is not negative")


def normalize_axis(axis: int, ndim: int) -> int:
    """A non-negative axis; AxisError when the array has no such axis."""
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        fix = f"use {-ndim} to {ndim - 1}" if ndim else "give it an axis, by ht.expand_dims"
        raise AxisError(f"axis {axis!r} does not exist in an array of {ndim} axes", fix=fix)
    return axis % ndim


def normalize_axes(axis: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """Sorted non-negative axes; `None` means all. Repeated axes are an AxisError."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    found = sorted(normalize_axis(a, ndim) for a in axes)
    if len(set(found)) != len(found):
        raise AxisError(f"axes {axes} name one axis twice", fix="name each axis once")
    return tuple(found)


# -- families of type rules ------------------------------------------------------------------------------------


def elementwise(*types: TensorType, **_: Any) -> TensorType:
    """Shapes broadcast, dtypes promote."""
    return TensorType(broadcast_shapes(*(t.shape for t in types)), promote(*(t.dtype for t in types)))


def numbers(*types: TensorType, **_: Any) -> TensorType:
    """Type rule of arithmetic: as `elementwise`, but booleans alone are a DTypeError."""
    result = elementwise(*types)
    if result.dtype.kind == "b":
        fix = 'convert with ht.astype(x, "float32"), or combine truth values with ht.logical_and and ht.logical_or'
        raise DTypeError("got booleans, wanted numbers", fix=fix)
    return result


def same_type(x: TensorType, *_: TensorType, **__: Any) -> TensorType:
    """The type of the first input."""
    return x


def require_float(*types: TensorType) -> None:
    """DTypeError unless all types are floating and can be computed with together."""
    for type_ in types:
        if not is_float(type_.dtype):
            raise DTypeError(f"got {type_}, wanted floats", fix='convert with ht.astype(x, "float32")')
    promote(*(type_.dtype for type_ in types))


def axis_letters(count: int) -> list[str]:
    """One letter per axis, for `dims` rules that are built from types.

    >>> axis_letters(3)
    ['a', 'b', 'c']
    """
    return list(string.ascii_letters[:count])
