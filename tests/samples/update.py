"""Rows for the update rules, against the formulas as the papers print them (bias corrections not folded)."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.graph import OPS
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


def row(name, reference, states=(), step=False, label="", **attrs):
    """A dense case; `states` make the optimizer state."""
    inputs = (real(*SHAPE), *(make(*SHAPE) for make in states), real(*SHAPE), RATE, *([STEP] if step else []))
    build = OPS[name]
    return Sample(name, lambda *nodes: build(*nodes, **attrs), inputs, reference, label=label, order=0)


def sparse(name, reference, states=(), step=False):
    inputs = (real(*TABLE), *(make(*TABLE) for make in states), IDS, ROWS, RATE, *([STEP] if step else []))
    tables = 1 + len(states)
    return Sample(name, OPS[name], inputs, on_rows(reference, tables), order=0)


def grouped(name, reference, states=(), step=False, under=None):
    """Two parameters of different shapes, updated by one operator; or not, where the condition `under` says so."""
    each, scalars = 1 + len(states), [RATE, *([STEP] if step else [])]
    old = [make(*shape) for shape in (SHAPE, (7,)) for make in (real, *states)]
    inputs = (*old, real(*SHAPE), real(7), *scalars, *([] if under is None else [given(np.bool_(under))]))

    def cut(values):
        gradients, shared = values[2 * each :][:2], values[2 * each + 2 :][: len(scalars)]
        return [(*values[k * each : (k + 1) * each], g, *shared) for k, g in enumerate(gradients)]

    def build(*nodes):
        made = [OPS[name](*member) for member in cut(nodes)]
        new = [n for m in made for n in (m if isinstance(m, tuple) else (m,))]
        return group_updates(new if under is None else [ht.where(nodes[-1], n, o) for n, o in zip(new, nodes)])

    def values(*arrays):
        return arrays[: 2 * each] if under is False else tuple(v for m in cut(arrays) for v in reference(*m))

    label = name if under is None else f"{name}, {under}"
    return Sample("update_all", build, inputs, values, label=label, order=0)


def in_16_bits():
    """As mixed precision with a loss scale of 8 has it: in float32 no gradient is cast or divided beforehand."""
    first = grouped("adam", adam, [real, positive], step=True)

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
    grouped("sgd", sgd),
    grouped("adam", adam, [real, positive], step=True),
    grouped("lamb", lamb, [real, positive], step=True),
    *(grouped("momentum", momentum, [real], under=under) for under in (True, False)),
    *(grouped("lamb", lamb, [real, positive], step=True, under=under) for under in (True, False)),
    in_16_bits(),
    row("sgd", sgd),
    row("momentum", momentum, [real]),
    row("momentum", lambda *a: momentum(*a, nesterov=True), [real], label="nesterov", nesterov=True),
    row("adagrad", adagrad, [positive]),
    row("rmsprop", rmsprop, [positive]),
    row("adam", adam, [real, positive], step=True),
    row("adam", lambda *a: adam(*a, decay=0.2), [real, positive], step=True, label="decoupled", weight_decay=0.2),
    row("amsgrad", amsgrad, [real, positive, positive], step=True),
    row("lamb", lamb, [real, positive], step=True),
    Sample(
        "lamb",
        lambda *nodes: ht.lamb(*nodes, weight_decay=0.0),
        (given(np.zeros(3)), given(np.zeros(3)), positive(3), given(np.zeros(3)), RATE, STEP),
        lambda p, m, v, g, lr, step: (p, m, 0.999 * v),
        label="zero",
        order=0,
    ),
    sparse("sgd_rows", sgd),
    sparse("momentum_rows", momentum, [real]),
    sparse("adagrad_rows", adagrad, [positive]),
    sparse("rmsprop_rows", rmsprop, [positive]),
    sparse("adam_rows", adam, [real, positive], step=True),
    sparse("amsgrad_rows", amsgrad, [real, positive, positive], step=True),
]
