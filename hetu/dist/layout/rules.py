"""Sharding rules, read: an operator's `dims` string applied to the shapes of one node.

The string says which axes of inputs and outputs are the same *factor* (grammar: `hetu/ops/shape.py`). It follows which
factor a split of one axis splits, which other axes have this factor, and whether it may be split at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ...core.graph import Node
from ...core.memory import types_of
from ...core.op import Role
from ...core.types import Dim, Shape, is_float
from .layout import ACROSS, Layout, MeshAxis

Factors = tuple[str, ...]  # the factors of one axis, the major one first; none for an axis of size 1
AxisFactors = tuple[Factors, ...]


@dataclass(frozen=True)
class ShardingRule:
    """The factors of every axis of a node's inputs and outputs.

    `fixed` factors may not be split. `windowed` ones, in the order in which the rule names them, may be split if the
    operator is told its slice. `sizes` are known sizes.
    """

    inputs: tuple[AxisFactors, ...]
    outputs: tuple[AxisFactors, ...]
    fixed: frozenset[str]
    windowed: tuple[str, ...]
    sizes: dict[str, int]

    def factor(self, term: AxisFactors, dim: int) -> str | None:
        """The factor that a split of axis `dim` splits: the major one; None for an axis of size 1."""
        return term[dim][0] if term[dim] else None

    def place(self, term: AxisFactors, factor: str) -> int | None:
        """The axis that `factor` splits in `term`: where it is the major factor."""
        return next((d for d, axis in enumerate(term) if axis and axis[0] == factor), None)

    def can_split(self, factor: str, degree: int) -> bool:
        """Whether none of `degree` parts of `factor` is empty, and each cuts merged axes at whole steps of it."""
        terms = (*self.inputs, *self.outputs)
        merged = any(len(axis) > 1 and factor in axis for term in terms for axis in term)
        minor = any(factor in axis[1:] for term in terms for axis in term)
        size = self.sizes.get(factor, 1)
        return size >= degree and not minor and (not merged or size % degree == 0)


def rule_of(node: Node) -> ShardingRule | None:
    """The rule of a node; None where its operator has none, so that its inputs must be gathered."""
    dims = node.op.dims
    if dims is None:
        return None
    text = dims(*(i.type for i in node.inputs), **node.attrs) if callable(dims) else dims
    return _parse(text, tuple(i.tensor.shape for i in node.inputs), tuple(t.shape for t in types_of(node)))


def roles_along(node: Node, layout: Layout, back: bool = False) -> dict[MeshAxis, int] | None:
    """The roles in which the result of an operator that only moves numbers lies if its one input lies in `layout`; with
    `back` those in which the input has to lie, for a result in `layout`. None for others."""
    if node.role is not Role.MOVE or len(node.inputs) != 1 or (rule := rule_of(node)) is None or rule.windowed:
        return None
    (src,), (dst,) = (rule.outputs, rule.inputs) if back else (rule.inputs, rule.outputs)
    found, degrees = dict[MeshAxis, int](), dict[str, int]()
    for axis, (role, n) in layout.axes().items():
        if role < 0:
            found[axis] = role
            continue
        parts = sum(layout.ratio) if axis == ACROSS and layout.ratio else n
        factor = rule.factor(src, role)
        place = None if factor is None or factor in rule.fixed else rule.place(dst, factor)
        if factor is None or place is None or not rule.can_split(factor, degrees.get(factor, 1) * parts):
            return None
        degrees[factor], found[axis] = degrees.get(factor, 1) * parts, place
    return found


def holds(dtype: np.dtype, other: np.dtype) -> bool:
    """Whether `dtype` has every number of `other`, bfloat16 included."""
    return bool(np.can_cast(other, dtype)) or (is_float(other) and is_float(dtype) and other.itemsize < dtype.itemsize)


def widens(node: Node) -> bool:
    """Whether it turns floats into longer ones, which loses nothing: sums may be taken before or after."""
    if node.role is not Role.MOVE or len(node.inputs) != 1:
        return False
    old, new = node.inputs[0].type, node.type
    if isinstance(old, tuple) or isinstance(new, tuple):
        return False
    return is_float(old.dtype) and is_float(new.dtype) and old.dtype.itemsize < new.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def _parse(text: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> ShardingRule:
    marks: dict[str, str] = {}
    left, right = text.split("->")
    terms = [
        tuple(_term(part, shape, marks) for part, shape in zip(side.split(","), shapes, strict=True))
        for side, shapes in ((left, inputs), (right, outputs))
    ]
    sizes: dict[str, int] = {}
    for term, shape in zip((*terms[0], *terms[1]), (*inputs, *outputs)):
        known = ((axis[0], size) for axis, size in zip(term, shape) if len(axis) == 1 and not isinstance(size, Dim))
        sizes.update({factor: int(size) for factor, size in known})
    fixed = frozenset(f for f, mark in marks.items() if mark == "!")
    windowed = tuple(f for f, mark in marks.items() if mark == "@")
    return ShardingRule(terms[0], terms[1], fixed, windowed, sizes)


def _term(text: str, shape: Shape, marks: dict[str, str]) -> AxisFactors:
    """The axes of one term; `...` takes all others, named from the last so that broadcasting aligns."""
    axes: list[Factors | None] = []
    position = 0
    while position < len(text):
        letter = text[position]
        if text.startswith("...", position):
            axes.append(None)
            position += 3
        elif letter == "(":
            end = text.index(")", position)
            axes.append(_factors(text[position + 1 : end], marks))
            position = end + 1
        else:
            end = position + 1 + (text[position + 1 : position + 2] in ("!", "@"))
            axes.append(() if letter == "1" else _factors(text[position:end], marks))
            position = end
    if None in axes:
        at, count = axes.index(None), len(shape) - len(axes) + 1
        axes[at : at + 1] = [(f"~{count - 1 - i}",) for i in range(count)]
    return tuple(() if size == 1 else axis or () for axis, size in zip(axes, shape, strict=True))


def _factors(text: str, marks: dict[str, str]) -> Factors:
    found = []
    for position, letter in enumerate(text):
        if letter in "!@":
            continue
        found.append(letter)
        if text[position + 1 : position + 2] in ("!", "@"):
            marks[letter] = text[position + 1]
    return tuple(found)
