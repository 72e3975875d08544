"""Rows for the update rules, against the formulas as the papers print them (bias corrections not folded).

A rule is one row of `RULES`; from it follow those for whole parameters, for rows of a table, for tables of
which rows were looked up, and for groups. Other
tests take the rules from here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import hetu as ht
from hetu.core.op import Op

from . import Sample, given, positive, real
from .index import NO_SCATTER

SHAPE = (4, 3)
RATE, STEP = given(0.1), given(np.int64(3))
TABLE, IDS, ROWS = (5, 4), given([[3, 1, 3], [0, 3, 1]]), real(2, 3, 4)  # row 3 three times, rows 2 and 4 never


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


def ftrl(p, z, n, g, lr, beta=1.0, l1=0.0, l2=0.0):
    z, n = z + g - (np.sqrt(n + g**2) - np.sqrt(n)) / lr * p, n + g**2
    return -np.sign(z) * np.maximum(np.abs(z) - l1, 0) / ((beta + np.sqrt(n)) / lr + l2), z, n


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
    "ftrl": Rule(ht.optim.ftrl, ftrl, (real, positive), [("l1", *2 * [{"l1": 0.5, "l2": 0.3}])]),
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
    return Sample(
        f"{name}_rows", rule.op.update.rows, rule.inputs(TABLE, IDS, ROWS), reference, order=0, strict=NO_SCATTER
    )


def guarded(name, holds):
    """As `sparse`, under a condition."""
    rule = RULES[name]
    update = rule.op.update.guarded

    def reference(*arrays):
        *arrays, condition = arrays
        return on_rows(rule.reference, update.tables)(*arrays) if condition else arrays[: update.tables]

    inputs = (*rule.inputs(TABLE, IDS, ROWS), given(np.float64(holds)))
    return Sample(f"{name}_rows", update.rows, inputs, reference, label=f"if {holds}", order=0, strict=NO_SCATTER)


def touched(name):
    """On whole tables, of which rows 0 and 2 were not looked up."""
    rule = RULES[name]
    tables = rule.op.update.tables

    def reference(*arrays):
        (*old, g, counts), scalars = arrays[: tables + 2], arrays[tables + 2 :]
        made = [np.where(counts[:, None] > 0, *pair) for pair in zip(rule.reference(*old, g, *scalars), old)]
        return tuple(made) if tables > 1 else made[0]

    counts = given(np.array([0.0, 2.0, 0.0, 1.0, 1.0]))
    return Sample(
        f"{name}_touched", rule.op.update.touched, rule.inputs(TABLE, real(*TABLE), counts), reference, order=0
    )


SAMPLES = [
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
    *map(touched, ON_ELEMENTS),
    *(guarded(name, holds) for name in ("sgd", "adam", "stranger") for holds in (1, 0)),
]
