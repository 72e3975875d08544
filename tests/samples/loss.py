"""Rows for losses; the references work in plain probabilities, one row at a time."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, distinct, given, ints, real


def cross_entropy(logits, labels, ignore=None, smoothing=0.0):
    loss = np.zeros(labels.shape)
    for place in np.ndindex(*labels.shape):
        p = np.exp(logits[place]) / np.exp(logits[place]).sum()
        target = np.full(len(p), smoothing / len(p))
        if labels[place] != ignore:
            target[labels[place]] += 1 - smoothing
            loss[place] = -(target * np.log(p)).sum()
    return loss


def cross_entropy_dx(g, logits, labels, ignore=None, smoothing=0.0):
    dx = np.zeros(logits.shape)
    for place in np.ndindex(*labels.shape):
        p = np.exp(logits[place]) / np.exp(logits[place]).sum()
        target = np.full(len(p), smoothing / len(p))
        if labels[place] != ignore:
            target[labels[place]] += 1 - smoothing
            dx[place] = g[place] * (p - target)
    return dx


def dx_of(**attrs):
    """The gradient operator, with log(sum(exp(logits))) made from the logits as it always is."""

    def build(g, logits, labels):
        return OPS["softmax_cross_entropy_dx"](g, logits, labels, ht.logsumexp(logits, axis=-1), **attrs)

    return build


def distribution(rng):
    p = rng.random((4, 3)) + 0.1
    return p / p.sum(axis=1, keepdims=True)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


SKIPPING = given(np.array([2, -1, 0, -1, 1]))

SAMPLES = [
    Sample("softmax_cross_entropy", ht.softmax_cross_entropy, (real(2, 4, 5), ints(2, 4)), cross_entropy),
    Sample(
        "softmax_cross_entropy",
        ht.softmax_cross_entropy,
        (real(3, 4), given(np.array([3, 0, 1], np.uint64))),
        lambda x, y: cross_entropy(x, y.astype(int)),
        label="unsigned-ids",
    ),
    Sample(
        "softmax_cross_entropy",
        lambda x, y: ht.softmax_cross_entropy(x, y, ignore_index=-1, label_smoothing=0.2),
        (real(3, 4), given(np.array([3, 0, 1], np.uint8))),
        lambda x, y: cross_entropy(x, y.astype(int), -1, 0.2),
        label="unsigned-ids-ignore",
    ),
    Sample(
        "softmax_cross_entropy",
        lambda x, y: ht.softmax_cross_entropy(x, y, ignore_index=-1, label_smoothing=0.2),
        (real(5, 3), SKIPPING),
        lambda x, y: cross_entropy(x, y, -1, 0.2),
        label="ignore-smooth",
    ),
    Sample(
        "softmax_cross_entropy",
        lambda x, y: ht.softmax_cross_entropy(x, y, label_smoothing=0.1),
        (real(4, 3), distribution),
        lambda x, y: -((0.9 * y + 0.1 / 3) * np.log(softmax(x))).sum(axis=-1),
        label="distribution",
    ),
    Sample(
        "softmax_cross_entropy",
        lambda x, y: OPS["softmax_cross_entropy"].decompose_rule(x, y, ignore_index=-1, label_smoothing=0.2)[0],
        (real(5, 3), SKIPPING),
        lambda x, y: cross_entropy(x, y, -1, 0.2),
        label="parts",
    ),
    Sample("softmax_cross_entropy_dx", dx_of(), (real(2, 4), real(2, 4, 5), ints(2, 4)), cross_entropy_dx),
    Sample(
        "softmax_cross_entropy_dx",
        dx_of(ignore_index=-1, label_smoothing=0.2),
        (real(5), real(5, 3), SKIPPING),
        lambda g, x, y: cross_entropy_dx(g, x, y, -1, 0.2),
        label="ignore-smooth",
    ),
    Sample(
        "nll_loss",
        ht.nll_loss,
        (real(3, 4), ints(3, high=4)),
        lambda x, y: np.array([-row[label] for row, label in zip(x, y)]),
    ),
    Sample(
        "binary_cross_entropy_with_logits",
        ht.binary_cross_entropy_with_logits,
        (real(3, 4), real(3, 4, low=0, high=1)),
        lambda x, t: -t * np.log(1 / (1 + np.exp(-x))) - (1 - t) * np.log(1 - 1 / (1 + np.exp(-x))),
    ),
    Sample("mse_loss", ht.mse_loss, (real(3, 4), real(3, 4)), lambda x, t: (x - t) ** 2),
    Sample("mae_loss", ht.mae_loss, (distinct(3, 4), given(np.zeros((3, 4)))), lambda x, t: np.abs(x - t)),
    Sample(
        "huber_loss",
        lambda x, t: ht.huber_loss(x, t, 0.32),
        (distinct(3, 4), given(np.zeros((3, 4)))),
        lambda x, t: np.where(np.abs(x) < 0.32, x * x / 2, 0.32 * (np.abs(x) - 0.16)),
    ),
    Sample(
        "kl_divergence",
        ht.kl_divergence,
        (real(4, 3), distribution),
        lambda x, t: t * (np.log(t) - x),
    ),
]
