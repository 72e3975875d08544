"""The operator that a group of elementwise operators, and of reductions of what they make, becomes.

On a GPU it is one generated kernel; its forward function applies the operators one after the other.

Gain: see `fuse_elementwise.py`. Off by leaving `fuse_elementwise` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from ...core.backend import dtype_in
from ...core.op import Op, op
from ...core.types import TensorType
from ...fuse.form import Line, Operand
from ...ops.random import _dropout, _scale, _threshold
from ..elementwise import computed, folded, make_step
from ..generated import Expression, Fold, Work
from ..launchers import kernel
from ..machine import Call, Machine
from ..reduce import FOLDS

MOST_INPUTS = 10  # beyond, a thread runs out of registers
KEEP = "y = kept ? x * scale : (T)0"
Lines = tuple[Line, ...]


def _types(types: Sequence[TensorType], lines: Lines) -> list[TensorType]:
    """Those of all values by number."""
    known = list(types)
    for member, operands, attrs in lines:
        inputs = [TensorType((), np.dtype(o[0])) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(member.infer(*inputs, **dict(attrs)))
    return known


def _fused_type(*types: TensorType, lines: Lines, results: tuple[int, ...]) -> TensorType | tuple[TensorType, ...]:
    known = _types(types, lines)
    return known[results[0]] if len(results) == 1 else tuple(known[r] for r in results)


@op(name="fused_elementwise", infer=_fused_type, differentiable=False)
def fused_elementwise(xp: ModuleType, *arrays: Any, lines: Lines, results: tuple[int, ...]) -> Any:
    """Some elementwise operators, dropout too, applied one after the other, and reductions of what they make.

    Each of `lines` is (operator, operands, attributes). Operands are numbered: first the inputs, then the lines'
    results; one that is a number is (dtype, value). `results` are the values that are wanted: first those of the
    elementwise operators, all of one shape, then the reductions, all over the same axes of that shape.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (3,))
    >>> lines = ((ht.square, (0,), ()), (ht.maximum, (1, ("float32", 2.0)), ()))
    >>> [y.shape for y in fused_elementwise(x, lines=lines, results=(1, 2))]
    [(3,), (3,)]
    """
    known = list(arrays)
    for member, operands, attrs in lines:
        inputs = [xp.asarray(o[1], dtype=dtype_in(xp, o[0])) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(member.forward(xp, *inputs, **dict(attrs)))
    return known[results[0]] if len(results) == 1 else tuple(known[r] for r in results)


@cache
def fused(elementwise: int) -> Op[..., Any]:
    """`fused_elementwise` for groups whose first results are so many of elementwise operators.

    Those may overwrite an input, of which a thread reads what it writes. A reduction may not: others still read.
    """
    made = copy(fused_elementwise)
    made.inplace = dict.fromkeys(range(elementwise), tuple(range(MOST_INPUTS)))
    kernel(made)(launched)
    return made


@kernel(fused_elementwise)
def launched(machine: Machine, out: Any, *arrays: Any, lines: Lines, results: tuple[int, ...]) -> list[Call] | None:
    """Calls that compute the results into `out`, or None if these arrays need CuPy."""
    outs = out if isinstance(out, tuple) else (out,)
    work = work_of(lines, [a.dtype for a in arrays], results)
    dropouts = [(operands[1], dict(attrs)["stream"]) for member, operands, attrs in lines if member is _dropout]
    draws = [(arrays[state], stream) for state, stream in dropouts]
    read = [a for k, a in enumerate(arrays) if k not in dict(dropouts)]
    axes = next((dict(attrs)["axis"] for member, _, attrs in lines if member in FOLDS), None)
    if axes is None:
        return computed(machine, work, outs, read, draws)
    count = len(work.results)
    return folded(machine, work, outs[:count], outs[count:], read, axes, draws)


def work_of(lines: Lines, dtypes: Sequence[np.dtype], results: tuple[int, ...]) -> Work:
    """What the generated kernel does; the lines have the reductions last.

    A state of random numbers is no array of the kernel: each dropout has a draw instead, numbered behind the arrays.
    """
    elementwise = tuple(line for line in lines if line[0] not in FOLDS)
    known = [t.dtype.name for t in _types([TensorType((), d) for d in dtypes], elementwise)]
    states = [operands[1] for member, operands, _ in lines if member is _dropout]
    value = {k: new for new, k in enumerate(k for k in range(len(dtypes)) if k not in states)}
    draw, first = len(value), len(value) + len(states)
    steps: list[Expression] = []
    draws: list[int] = []
    for number, (member, operands, attrs) in enumerate(elementwise, len(dtypes)):
        if member is _dropout:
            rate = dict(attrs)["rate"]
            inputs = (("x", value[operands[0]]), ("kept", draw + len(draws)))
            step = make_step(KEEP, inputs, (("scale", _scale(rate)),), [known[number]], known[number])
            draws.append(_threshold(rate))
        else:
            step = _step(member, operands, attrs, known, value, known[number])
        value[number] = first + len(steps)
        steps.append(step)
    folds = {k: Fold(value[o[0]], FOLDS[m]) for k, (m, o, _) in enumerate(lines, len(dtypes)) if m in FOLDS}
    written, folded = (tuple(r for r in results if (r in folds) == wanted) for wanted in (False, True))
    return Work(tuple(steps), tuple(value[r] for r in written), tuple(folds[r] for r in folded), tuple(draws))


def _step(
    made: Op,
    operands: tuple[Operand, ...],
    attrs: tuple[tuple[str, Any], ...],
    known: Sequence[str],
    value: dict[int, int],
    dtype: str,
) -> Expression:
    """The step of one operator; its numbers are operands and attributes."""
    pairs = list(zip(made.inputs, operands))
    inputs = tuple((n, value[o]) for n, o in pairs if not isinstance(o, tuple))
    numbers = [(n, o[1]) for n, o in pairs if isinstance(o, tuple)]
    numbers += [(n, v) for n, v in attrs if isinstance(v, bool | int | float)]
    types = [o[0] if isinstance(o, tuple) else known[o] for o in operands]
    return make_step(made.code, inputs, tuple(numbers), types, dtype)
