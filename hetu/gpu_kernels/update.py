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

from .machine import Call, Machine, address, contiguous, index_dtype, spread
from .source import assemble, compute_dtype, file_text, number_text
from .tables import has_atomics, sorting

CHUNK = 1 << 14  # elements of one block: 64 a thread, and a model of 100 million parameters makes 6,000 blocks


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
    return assemble(f"{early}{file_text('update')}\n#undef STATES\n", "update.cu", **dtypes)


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
) -> list[Call] | None:
    """One launch that applies a rule to all tensors, of one dtype; `rate` and `step` are arrays of one number.

    `ok` is one bool: if it is false, the old values stay.
    """
    whole = [a for t in tensors for a in (*t.new, *t.old, t.gradient)]
    if not contiguous(*whole, rate, step) or any(a.dtype != whole[0].dtype for a in whole):
        return None
    chunks = [(k, start) for k, t in enumerate(tensors) for start in range(0, t.gradient.size, CHUNK)]
    asarray = machine.xp.asarray
    ok = asarray(np.True_) if ok is None else ok
    dtypes = {"S": whole[0].dtype.name, "R": rate.dtype.name, "N": step.dtype.name}
    rows = [[address(a) for a in (*t.new, *t.old, t.gradient)] for t in tensors]
    table, sizes = asarray(np.array(rows, "uint64")), asarray(np.array([t.gradient.size for t in tensors], "int64"))
    tensor, start = (
        asarray(np.array([k for k, _ in chunks], "int32")),
        asarray(np.array([s for _, s in chunks], "int64")),
    )
    shape, where = ((len(chunks),), (256,)), (table, sizes, tensor, start)
    if name == "lamb":
        text = _lamb_text(attrs, **dtypes)
        parts = machine.xp.empty((len(chunks), 2), compute_dtype(dtypes["S"]))
        counts = [-(-t.gradient.size // CHUNK) for t in tensors]
        first = asarray(np.cumsum([0, *counts]).astype("int64"))
        calls = [
            partial(machine.kernel(text, "lamb_moments"), *shape, (*where, step, ok, parts, CHUNK)),
            partial(machine.kernel(text, "lamb_step"), *shape, (*where, first, rate, step, ok, parts, CHUNK)),
        ]
    else:
        kernel = machine.kernel(_text(name, attrs, **dtypes, I="int64", Index="int32"), "update_all")
        calls = [partial(kernel, *shape, (*where, rate, step, ok, CHUNK))]
    return [_keeping(whole, call) for call in calls]


def _keeping(arrays: Sequence[Any], call: Call) -> Call:
    """`call`, which keeps `arrays` alive: a table holds addresses only."""

    def run() -> None:
        call()

    run.arrays = arrays
    return run


def _lamb_text(attrs: Mapping[str, Any], **dtypes: str) -> str:
    constants = "".join(f"constexpr double {k} = {number_text(float(v))};\n" for k, v in attrs.items())
    return assemble(f"{constants}{file_text('lamb')}", "lamb.cu", **dtypes)


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
    """Calls that apply the rule to the rows `ids` of a table and its states, in place; equal ids are summed first.

    A rule without states subtracts them one by one where the dtype has atomics: no sorting, but varying last digits.
    """
    if not contiguous(*tables, ids, rows, rate, step) or any(t.dtype != rows.dtype for t in tables):
        return None
    dtypes = {"S": rows.dtype.name, "R": rate.dtype.name, "N": step.dtype.name, "I": ids.dtype.name}
    text = _text(name, attrs, **dtypes, Index=index_dtype(rows.size))
    if name == "sgd" and has_atomics(rows.dtype):
        (table,), numbers = tables, (rows.size, tables[0].shape[0], prod(tables[0].shape[1:]))
        return [partial(machine.kernel(text, "descend_rows"), *spread(rows.size), (table, ids, rows, rate, *numbers))]
    order = machine.xp.empty(ids.size, "int64")
    four = [*tables, *[tables[0]] * (4 - len(tables))]
    numbers = (ids.size, tables[0].shape[0], prod(tables[0].shape[1:]))
    kernel = machine.kernel(text, "update_rows")
    launch = partial(kernel, (-(-ids.size // 8),), (32, 8), (*four, ids, rows, order, rate, step, *numbers))
    return [sorting(machine, ids, order), launch]


def dense(name: str, machine: Machine, out: Any, *arrays: Any, **attrs: Any) -> list[Call] | None:
    """The operator `name` on one parameter."""
    new, count = out if isinstance(out, tuple) else (out,), STATES[name] + 1
    old, gradient, (rate, *step) = arrays[:count], arrays[count], arrays[count + 1 :]
    return update_all(machine, name, [Tensor(new, old, gradient)], rate, step[0] if step else rate, attrs)


def grouped(
    machine: Machine, out: Any, *arrays: Any, rule: str, count: int, options: Any, conditional: bool
) -> list[Call] | None:
    """Updates by one rule: `arrays` are all old values, all gradients, the rate and, for some, step and condition."""
    *arrays, ok = arrays if conditional else (*arrays, None)
    each = STATES[rule] + 1
    cut = [slice(k * each, (k + 1) * each) for k in range(count)]
    gradients, (rate, *step) = arrays[each * count :][:count], arrays[(each + 1) * count :]
    tensors = [Tensor(out[at], arrays[at], g) for at, g in zip(cut, gradients)]
    return update_all(machine, rule, tensors, rate, step[0] if step else rate, dict(options), ok)


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
