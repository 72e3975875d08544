"""Launches the kernels of `update.cu`: every parameter of a model updated by one launch, tables row by row.

LAMB needs the norms of whole parameters, so it takes the two launches of `lamb.cu` and has no row form. Ignored on
purpose: deciding which parameters go together, see `passes/group_updates.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .machine import Call, Machine, address, contiguous
from .many import CHUNK, KINDS, chunks, keeping
from .source import assemble, compute_dtype, file_text, number_text
from .tables import summed, warps, with_runs


class Rule(NamedTuple):
    """How a parameter p and its states a, b, c change by a gradient g; the attributes are constants of type T."""

    states: int
    apply: str
    folded: bool = False  # whether it needs Adam's rate and epsilon with both bias corrections folded in


_MOMENTS = "a = beta1 * a + ((T)1 - beta1) * g; b = beta2 * b + ((T)1 - beta2) * (g * g);"
RULES = {
    "sgd": Rule(0, "p = p - s.rate * g;"),
    "momentum": Rule(1, "a = momentum * a + g; p = p - s.rate * (nesterov ? g + momentum * a : a);"),
    "adagrad": Rule(1, "a = a + g * g; p = p - s.rate * g / (sqrt(a) + epsilon);"),
    "rmsprop": Rule(1, "a = rho * a + ((T)1 - rho) * (g * g); p = p - s.rate * g / (sqrt(a) + epsilon);"),
    "adam": Rule(2, f"{_MOMENTS} p = p * s.keep - s.alpha * a / (sqrt(b) + s.epsilon);", True),
    "amsgrad": Rule(3, f"{_MOMENTS} c = fmax(c, b); p = p - s.alpha * a / (sqrt(c) + s.epsilon);", True),
}
STATES = {name: rule.states for name, rule in RULES.items()} | {"lamb": 2}
# D. Kingma, J. Ba, "Adam", ICLR 2015, end of section 2: the corrections in the rate and in epsilon
_FOLDED = """const double root = ::sqrt(1 - ::pow(d_beta2, step));
    s.alpha = rate * root / (1 - ::pow(d_beta1, step)), s.epsilon = d_epsilon * root;
    s.keep = 1 - rate * d_weight_decay;"""


def _text(name: str, attrs: Mapping[str, Any], **dtypes: str) -> str:
    rule = RULES[name]
    numbers = {"weight_decay": 0.0, **attrs} if rule.folded else attrs
    constants = "".join(f"    const T {k} = (T){number_text(v)};\n" for k, v in attrs.items())
    doubles = "".join(f"    const double d_{k} = {number_text(float(v))};\n" for k, v in numbers.items())
    early = (
        f"#define STATES {rule.states}\n"
        "struct Scalars { T rate, alpha, epsilon, keep; };\n"
        f"__device__ inline Scalars prepare(double rate, double step) {{\n{doubles}"
        f"    Scalars s{{(T)rate, 0, 0, 1}};\n    {_FOLDED if rule.folded else ''}\n    return s;\n}}\n"
        "__device__ inline void apply(const Scalars& s, T& p, T& a, T& b, T& c, T g) {\n"
        f"{constants}    {rule.apply}\n}}\n"
    )
    body = f"{early}{file_text('tensors')}{with_runs('update')}\n#undef STATES\n"
    return assemble(body, "update.cu", **dtypes)


class Tensor(NamedTuple):
    """One parameter: new and old values, the parameter first and then its states, and the gradient."""

    new: Sequence[Any]
    old: Sequence[Any]
    gradient: Any


def update_all(
    machine: Machine,
    name: str,
    tensors: Sequence[Tensor],
    rate: Any,
    step: Any,
    attrs: Mapping[str, Any],
    ok: Any = None,
    scale: Any = None,
) -> list[Call] | None:
    """One launch that applies a rule to all tensors, of one dtype; `rate` and `step` are arrays of one number.

    Gradients may have 16 bits where the rest has more. They are divided by `scale`, one number of the dtype of the
    rest. `ok` is one bool: if it is false, the old values stay.
    """
    rows = [(*t.new, *t.old, t.gradient) for t in tensors]
    stored, xp = rows[0][0].dtype, machine.xp
    ok = xp.asarray(np.True_) if ok is None else ok
    scale = xp.ones((), stored) if scale is None else scale
    whole = [scale, *(a for row in rows for a in row[:-1])]
    if not contiguous(*whole, *(row[-1] for row in rows), rate, step) or any(a.dtype != stored for a in whole):
        return None
    if any(row[-1].dtype.name not in (stored.name, *KINDS) for row in rows):
        return None
    dtypes = {"S": stored.name, "R": rate.dtype.name, "N": step.dtype.name}
    grid, block, where = chunks(machine, rows)
    if name == "lamb":
        text = _lamb_text(attrs, **dtypes)
        parts = xp.empty((*grid, 2), compute_dtype(stored.name))
        counts = [-(-t.gradient.size // CHUNK) for t in tensors]
        first = xp.asarray(np.cumsum([0, *counts]).astype("int64"))
        calls = [
            partial(machine.kernel(text, "lamb_moments"), grid, block, (*where, step, ok, scale, parts)),
            partial(machine.kernel(text, "lamb_step"), grid, block, (*where, first, rate, step, ok, parts)),
        ]
    else:
        kernel = machine.kernel(_text(name, attrs, **dtypes, I="int64"), "update_all")
        calls = [partial(kernel, grid, block, (*where, rate, step, ok, scale))]
    return [keeping(rows, call) for call in calls]


def _lamb_text(attrs: Mapping[str, Any], **dtypes: str) -> str:
    constants = "".join(f"constexpr double {k} = {number_text(float(v))};\n" for k, v in attrs.items())
    return assemble(f"{constants}{file_text('tensors')}{file_text('lamb')}", "lamb.cu", **dtypes)


def update_rows(
    machine: Machine,
    name: str,
    tables: Sequence[Any],
    ids: Any,
    rows: Any,
    rate: Any,
    step: Any,
    attrs: Mapping[str, Any],
) -> list[Call] | None:
    """Calls that apply the rule to the rows `ids` of a table and its states, in place; equal ids are summed first."""
    if not contiguous(*tables, ids, rows, rate, step) or any(t.dtype != rows.dtype for t in tables):
        return None
    dtypes = {"S": rows.dtype.name, "R": rate.dtype.name, "N": step.dtype.name, "I": ids.dtype.name}
    text, sizes = _text(name, attrs, **dtypes), (ids.size, tables[0].shape[0], prod(tables[0].shape[1:]))
    order, parts, calls = summed(machine, text, ids, rows, sizes[2])
    four = [*tables, *[tables[0]] * (4 - len(tables))]
    kernel = machine.kernel(text, "update_rows")
    return [*calls, partial(kernel, *warps(ids.size), (*four, ids, rows, order, parts, rate, step, *sizes))]


def dense(name: str, machine: Machine, out: Any, *arrays: Any, **attrs: Any) -> list[Call] | None:
    """The operator `name` on one parameter."""
    new, count = out if isinstance(out, tuple) else (out,), STATES[name] + 1
    old, gradient, (rate, *step) = arrays[:count], arrays[count], arrays[count + 1 :]
    return update_all(machine, name, [Tensor(new, old, gradient)], rate, step[0] if step else rate, attrs)


def grouped(
    machine: Machine, out: Any, *arrays: Any, rule: str, count: int, options: Any, conditional: bool, scaled: bool
) -> list[Call] | None:
    """Updates by one rule.

    `arrays` are all old values, all gradients, the rate and, for some, step, condition and scale of the gradients.
    """
    *arrays, scale = arrays if scaled else (*arrays, None)
    *arrays, ok = arrays if conditional else (*arrays, None)
    each = STATES[rule] + 1
    cut = [slice(k * each, (k + 1) * each) for k in range(count)]
    gradients, (rate, *step) = arrays[each * count :][:count], arrays[(each + 1) * count :]
    tensors = [Tensor(out[at], arrays[at], g) for at, g in zip(cut, gradients)]
    return update_all(machine, rule, tensors, rate, step[0] if step else rate, dict(options), ok, scale)


def sparse(name: str, machine: Machine, out: Any, *arrays: Any, **attrs: Any) -> list[Call] | None:
    """The row form of the operator `name`; a result that does not lie on its table is copied there first."""
    new, count = out if isinstance(out, tuple) else (out,), RULES[name].states + 1
    old, (ids, rows, rate, *step) = arrays[:count], arrays[count:]
    copies = [partial(machine.xp.copyto, n, o) for n, o in zip(new, old) if address(n) != address(o)]
    calls = update_rows(machine, name, new, ids, rows, rate, step[0] if step else rate, attrs)
    return None if calls is None else [*copies, *calls]


LAUNCHERS = {
    "update_all": grouped,
    **{name: partial(dense, name) for name in STATES},
    **{f"{name}_rows": partial(sparse, name) for name in RULES},
}
