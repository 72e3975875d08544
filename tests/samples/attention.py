"""Rows for attention; the reference handles one query after the other."""

from __future__ import annotations

import numpy as np

import hetu as ht
import hetu.passes.flash_attention
from hetu.core.graph import OPS

from . import Sample, given, real
from .normalization import slopes


def attend(q, k, v, mask=None, scale=None):
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (np.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (q, k, v))
    allowed = np.ones((*lead, q.shape[-2], k.shape[-2]), bool) if mask is None else mask
    allowed = np.broadcast_to(allowed, (*lead, q.shape[-2], k.shape[-2]))
    y = np.zeros((*q.shape[:-1], v.shape[-1]))
    for place in np.ndindex(*q.shape[:-1]):
        seen = allowed[place]
        weights = np.exp(k[place[:-1]][seen] @ q[place] * scale)
        y[place] = weights @ v[place[:-1]][seen] / weights.sum() if seen.any() else v[place[:-1]].mean(axis=0)
    return y


def full_float(q, k, v, mask):
    """Adding a mask to the scores is multiplying the weights by its power."""
    y = np.zeros((*q.shape[:-1], v.shape[-1]))
    for a, b, i in np.ndindex(*q.shape[:-1]):
        weights = np.exp(k @ q[a, b, i] / 2 + mask[i]) * (np.arange(3) <= i)
        y[a, b, i] = weights @ v / weights.sum()
    return y


def full(q, k, v, causal=False):
    """Both outputs of the operator."""
    scores, seen = 0.5 * q @ np.swapaxes(k, -1, -2), None
    if causal:
        seen = np.tri(q.shape[-2], dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    return attend(q, k, v, seen, 0.5), np.log(np.exp(scores).sum(-1))


def dx(g, q, k, v, causal=False):
    outputs = OPS["attention"](q, k, v, scale=0.5, causal=causal)
    return OPS["attention_dx"](g, q, k, v, *outputs, scale=0.5, causal=causal)


def flash(q, k, v, causal=False):
    """Attention of (n, positions, heads, d) and the logarithm of each query's sum, (n, heads, queries)."""
    y, total = full(*(a.transpose(0, 2, 1, 3) for a in (q, k, v)), causal=causal)
    return y.transpose(0, 2, 1, 3), total


def flash_slopes(g, q, k, v, causal=False):
    made = slopes(lambda *heads: flash(*heads, causal)[0], g, q, k, v)
    return np.stack(made, axis=2) if q.shape == k.shape == v.shape else made


def flash_attention_dx(g, q, k, v, causal=False):
    outputs = OPS["flash_attention"](q, k, v, scale=0.5, causal=causal)
    return OPS["flash_attention_dx"](g, q, k, v, *outputs, scale=0.5, causal=causal)


FLASH = [  # q, k, v and whether causal; those of 16 features go to tensor cores
    ("", (2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 3), False),
    ("causal", (2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4), True),
    ("tensor", (1, 3, 2, 16), (1, 5, 2, 16), (1, 5, 2, 32), False),
    ("tensor-causal", (1, 5, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16), True),
]

SEEN = given(np.array([[True, True, False, True], [False, True, False, False], [True] * 4]))

BLIND = given(np.array([[[False] * 3, [False] * 3, [True, False, True]], [[True] * 3, [False] * 3, [True] * 3]]))

SAMPLES = [
    Sample("add_mask", OPS["add_mask"], (real(2, 3, 4), real(3, 1)), np.add),
    Sample(
        "attention",
        lambda q, k, v: OPS["attention"](q, k, v, scale=0.5),
        (real(2, 3, 4), real(2, 5, 4), real(2, 5, 3)),
        full,
        order=0,
    ),
    Sample(
        "attention",
        lambda q, k, v: ht.scaled_dot_product_attention(q, k, v, causal=True),
        (real(2, 2, 5, 4), real(2, 2, 5, 4), real(2, 2, 5, 3)),
        lambda q, k, v: attend(q, k, v, np.tri(5, dtype=bool)),
        label="causal",
    ),
    Sample(
        "attention",
        lambda x: ht.scaled_dot_product_attention(x, x, x, scale=0.3),
        (real(4, 3),),
        lambda x: attend(x, x, x, scale=0.3),
        label="self",
        fixed=True,
    ),
    Sample(
        "scaled_dot_product_attention",
        lambda q, k, v, mask: ht.scaled_dot_product_attention(q, k, v, mask),
        (real(2, 3, 4), real(2, 4, 4), real(2, 4, 3), SEEN),
        attend,
        label="mask",
    ),
    Sample(
        "scaled_dot_product_attention",
        lambda q, k, v, mask: ht.scaled_dot_product_attention(q, k, v, mask, causal=True),
        (real(2, 2, 3, 4), real(3, 4), real(3, 5), real(3, 3)),
        full_float,
        label="float-mask",
    ),
    Sample(
        "attention",
        lambda q, k, v, mask: ht.scaled_dot_product_attention(q, k, v, mask, causal=True),
        (real(2, 3, 4), real(2, 3, 4), real(2, 3, 2), BLIND),
        lambda q, k, v, mask: attend(q, k, v, mask & np.tri(3, dtype=bool)),
        label="blind",
    ),
    Sample(
        "scaled_dot_product_attention",
        lambda q, k, v: ht.scaled_dot_product_attention(q, k, v, np.where(BLIND(None), 0, -np.inf)),
        (real(2, 3, 4), real(2, 3, 4), real(2, 3, 2)),
        lambda q, k, v: attend(q, k, v, BLIND(None)),
        label="blind-float",
    ),
    Sample(
        "attention",
        lambda q, k, v, mask: ht.scaled_dot_product_attention(q, k, v, mask),
        (real(2, 2, 3, 4), real(2, 2, 4, 4), real(2, 2, 4, 3), given(np.array([True, False, True, False]))),
        attend,
        label="keys",
    ),
    Sample(
        "attention_dx",
        dx,
        (real(2, 3, 2), real(2, 3, 4), real(2, 4, 4), real(2, 4, 2)),
        lambda g, q, k, v: slopes(lambda *x: attend(*x, scale=0.5), g, q, k, v),
    ),
    Sample(
        "attention_dx",
        lambda g, q, k, v: dx(g, q, k, v, causal=True),
        (real(2, 3, 2), real(2, 3, 4), real(2, 3, 4), real(2, 3, 2)),
        lambda g, q, k, v: slopes(lambda *x: attend(*x, np.tri(3, dtype=bool), 0.5), g, q, k, v),
        label="causal",
    ),
    *(
        Sample(
            "flash_attention",
            lambda q, k, v, causal=causal: OPS["flash_attention"](q, k, v, scale=0.5, causal=causal),
            tuple(real(*shape) for shape in shapes),
            lambda q, k, v, causal=causal: flash(q, k, v, causal),
            label=label,
            order=0,
        )
        for label, *shapes, causal in FLASH
    ),
    *(
        Sample(
            "flash_attention_dx",
            lambda g, q, k, v, causal=causal: flash_attention_dx(g, q, k, v, causal),
            (real(*q[:3], v[3]), *(real(*shape) for shape in (q, k, v))),
            lambda g, q, k, v, causal=causal: flash_slopes(g, q, k, v, causal),
            label=label,
            order=0,
            fixed=True,
            tolerance=1e-4,
        )
        for label, q, k, v, causal in FLASH
    ),
]
