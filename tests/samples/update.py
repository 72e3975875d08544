"""Rows for the update rules, against the formulas as the papers print them (bias corrections not folded).

A rule is one row of `RULES`; from it follow those for whole parameters, for rows of a table, and for groups. Other
tests take the rules from here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import hetu as ht
from hetu.core.graph import OPS
from hetu.core.op import Op
from hetu.passes.group_updates import group_updates

from . import Sample, given, positive, real

SHAPE = (4, 3)
RATE, STEP = given(0.1), given(np.int64(3))
TABLE, IDS, ROWS = (5, 3), given([[3, 1, 3], [0, 3, 1]]), real(2, 3, 3)  # row 3 three times, rows 2 and 4 never


def sgd(p, g, lr):
    return (p - lr * g,)


def momentum(p, v, g, lr, mu=0.9, nesterov=False):
    v = mu * v + g
    return p - lr * (g + mu * v if nesterov else v), v


def adagrad(p, a, g, lr, epsilon=1e-10):
    a = a + g**2
    return p - lr * g / (np.sqrt(a) + epsilon), a


def rmsprop(p, v, g, lr, rho=0.9, epsilon=1e-8):
    v = rho * v + (1 - rho) * g**2
    return p - lr * g / (np.sqrt(v) + epsilon), v


def moments(m, v, g, step, beta1=0.9, beta2=0.999):
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    return m, v, 1 - beta1**step, 1 - beta2**step


def adam(p, m, v, g, lr, step, epsilon=1e-8, decay=0.0):
    m, v, c1, c2 = moments(m, v, g, step)
    return p - lr * decay * p - lr * (m / c1) / (np.sqrt(v / c2) + epsilon), m, v


def amsgrad(p, m, v, top, g, lr, step):
    m, v, c1, c2 = moments(m, v, g, step)
    top = np.maximum(top, v)
    return p - lr * (m / c1) / (np.sqrt(top / c2) + 1e-8), m, v, top


def lamb(p, m, v, g, lr, step, decay=0.01):
    m, v, c1, c2 = moments(m, v, g, step)
    r = (m / c1) / (np.sqrt(v / c2) + 1e-6) + decay * p
    return p - lr * np.linalg.norm(p) / np.linalg.norm(r) * r, m, v


def lion(p, m, g, lr, decay=0.0):
    return p - lr * (np.sign(0.9 * m + 0.1 * g) + decay * p), 0.99 * m + 0.01 * g


@ht.optim.update_rule
def stranger(p, fast, slow, g, lr, step, *, blend=0.7, most=1.5):
    """A rule that nobody has heard of, with most of what a rule can be made of."""
    g = ht.clip(g, min=-most, max=most)
    fast = blend * fast + (1 - blend) * g
    slow = ht.maximum(slow - 0.1 * ht.square(slow), ht.abs(g))
    rate = ht.where(step > 2.0, lr / (1 + 0.5 * step), lr)
    return p - rate * ht.where(fast * g > 0, fast / (slow + 1e-3), ht.tanh(g)), fast, slow


def strange(p, fast, slow, g, lr, step, blend=0.7, most=1.5):
    g = np.clip(g, -most, most)
    fast = blend * fast + (1 - blend) * g
    slow = np.maximum(slow - 0.1 * slow**2, np.abs(g))
    rate = lr / (1 + 0.5 * step) if step > 2 else lr
    return p - rate * np.where(fast * g > 0, fast / (slow + 1e-3), np.tanh(g)), fast, slow


@dataclass(frozen=True)
class Rule:
    """A rule, its formula, makers of its states, and attributes to try beside the defaults: (label, those of the
    operator, those of the formula)."""

    op: Op
    reference: Callable
    states: tuple = ()
    variants: tuple = ()

    def inputs(self, shape, *gradient):
        values = [make(*shape) for make in (real, *self.states)]
        return (*values, *gradient, RATE, *([STEP] if self.op.update.timed else []))

    @property
    def whole(self):
        """Whether the rule needs whole parameters."""
        return bool(self.op.update.composition(SHAPE, self.op.defaults).whole)


RULES = {
    "sgd": Rule(ht.optim.sgd, sgd),
    "momentum": Rule(ht.optim.momentum, momentum, (real,), [("nesterov", {"nesterov": True}, {"nesterov": True})]),
    "adagrad": Rule(ht.optim.adagrad, adagrad, (positive,)),
    "rmsprop": Rule(ht.optim.rmsprop, rmsprop, (positive,)),
    "adam": Rule(ht.optim.adam, adam, (real, positive), [("decoupled", {"weight_decay": 0.2}, {"decay": 0.2})]),
    "amsgrad": Rule(ht.optim.amsgrad, amsgrad, (real, positive, positive)),
    "lamb": Rule(ht.optim.lamb, lamb, (real, positive)),
    "lion": Rule(ht.optim.lion, lion, (real,), [("decay", {"weight_decay": 0.2}, {"decay": 0.2})]),
    "stranger": Rule(stranger, strange, (real, positive)),
}
ON_ELEMENTS = [name for name, rule in RULES.items() if not rule.whole]


def on_rows(rule, tables):
    """The row form of a textbook rule: one touched row after the other."""

    def reference(*arrays):
        values, (ids, rows, *scalars) = [a.copy() for a in arrays[:tables]], arrays[tables:]
        for row in np.unique(ids):
            new = rule(*(v[row] for v in values), rows[ids == row].sum(axis=0), *scalars)
            for v, n in zip(values, new):
                v[row] = n
        return tuple(values)

    return reference


def row(name, label="", attrs=(), more=()):
    """A dense case."""
    rule, attrs, more = RULES[name], dict(attrs), dict(more)

    def build(*nodes):
        return rule.op(*nodes, **attrs)

    return Sample(name, build, rule.inputs(SHAPE, real(*SHAPE)), partial(rule.reference, **more), label=label, order=0)


def sparse(name):
    rule = RULES[name]
    reference = on_rows(rule.reference, rule.op.update.tables)
    return Sample(f"{name}_rows", rule.op.update.rows, rule.inputs(TABLE, IDS, ROWS), reference, order=0)


def grouped(name, under=None):
    """Two parameters of different shapes, updated by one operator; or not, where the condition `under` says so."""
    rule, each = RULES[name], RULES[name].op.update.tables
    _, *scalars = rule.inputs((), None)[each:]
    old = [make(*shape) for shape in (SHAPE, (7,)) for make in (real, *rule.states)]
    inputs = (*old, real(*SHAPE), real(7), *scalars, *([] if under is None else [given(np.bool_(under))]))

    def cut(values):
        gradients, shared = values[2 * each :][:2], values[2 * each + 2 :][: len(scalars)]
        return [(*values[k * each : (k + 1) * each], g, *shared) for k, g in enumerate(gradients)]

    def build(*nodes):
        made = [rule.op(*member) for member in cut(nodes)]
        new = [n for m in made for n in (m if isinstance(m, tuple) else (m,))]
        return group_updates(new if under is None else [ht.where(nodes[-1], n, o) for n, o in zip(new, nodes)])

    def values(*arrays):
        return arrays[: 2 * each] if under is False else tuple(v for m in cut(arrays) for v in rule.reference(*m))

    label = name if under is None else f"{name}, {under}"
    return Sample("update_all", build, inputs, values, label=label, order=0)


def in_16_bits():
    """As mixed precision with a loss scale of 8 has it: in float32 no gradient is cast or divided beforehand."""
    first = grouped("adam")

    def rounded(g):
        return ht.astype(ht.astype(g * 8.0, dtype="float16"), dtype=g.dtype.name) / 8.0

    def build(*nodes):
        made = [OPS["adam"](*nodes[3 * k :][:3], rounded(nodes[6 + k]), *nodes[8:]) for k in range(2)]
        return group_updates([n for m in made for n in m])

    def values(*arrays):
        gradients = [(g * 8.0).astype(np.float16).astype(g.dtype) / 8.0 for g in arrays[6:8]]
        return first.reference(*arrays[:6], *gradients, *arrays[8:])

    extra = {"no_float16": "its gradients would be rounded once more"}
    no_float16 = "the standard has no float16"
    return Sample("update_all", build, first.inputs, values, label="16 bits", order=0, strict=no_float16, extra=extra)


SAMPLES = [
    *map(grouped, RULES),
    *(grouped(name, under=under) for name in ("momentum", "lamb") for under in (True, False)),
    in_16_bits(),
    *map(row, RULES),
    *(row(name, *variant) for name, rule in RULES.items() for variant in rule.variants),
    Sample(
        "lamb",
        lambda *nodes: ht.optim.lamb(*nodes, weight_decay=0.0),
        (given(np.zeros(3)), given(np.zeros(3)), positive(3), given(np.zeros(3)), RATE, STEP),
        lambda p, m, v, g, lr, step: (p, m, 0.999 * v),
        label="zero",
        order=0,
    ),
    *map(sparse, ON_ELEMENTS),
]
