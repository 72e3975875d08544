"""Rows for random numbers: NumPy's Philox generator at the key (seed, stream) and the counter (0, 0, 0, step)."""

from __future__ import annotations

import math

import numpy as np

from hetu.core.graph import OPS

from . import Sample, given, real

SEED, STEP, STREAM = 11, 3, 5
STATE = given(np.array([SEED, STEP], np.uint64))


def philox():
    return np.random.Philox(key=[SEED, STREAM], counter=[0, 0, 0, STEP])


def row(kind, reference, dtype="float64", a=0.0, b=1.0):
    attrs = {"kind": kind, "shape": (3, 50), "dtype": dtype, "a": a, "b": b, "stream": STREAM}
    return Sample(
        "random",
        lambda state: OPS["random"](state, **attrs),
        (STATE,),
        lambda state: reference(np.random.Generator(philox())),
        label=kind,
        order=0,
    )


def truncated(generator):
    draw = generator.standard_normal((3, 50)).reshape(-1)
    while len(outside := [i for i, v in enumerate(draw) if not -2 <= v <= 2]):
        draw[outside] = generator.standard_normal(len(outside))
    return draw.reshape(3, 50) * 0.5 + 1


def normal(generator):
    """Each 32 bytes are two radii and two angles, of which come two cosines and two sines."""
    words = [int(word) for word in generator.bit_generator.random_raw(152)]
    far, turns = [math.sqrt(-2 * math.log((w >> 1) / 2**63 + 0.5**64)) for w in words], [w / 2**64 for w in words]
    made = [
        far[k + i] * function(2 * math.pi * turns[k + 2 + i])
        for k in range(0, 152, 4)
        for function in (math.cos, math.sin)
        for i in (0, 1)
    ]
    return np.reshape(made[:150], (3, 50)) * 2 + 1


def kept(count, rate):
    bits = np.frombuffer(philox().random_raw(count).tobytes(), np.uint16)[:count]
    return bits >= rate * 65536


SAMPLES = [
    row("uniform", lambda generator: generator.random((3, 50)) * 5 - 2, a=-2.0, b=3.0),
    row("normal", normal, a=1.0, b=2.0),
    row("truncated_normal", truncated, a=1.0, b=0.5),
    row("bernoulli", lambda generator: generator.random((3, 50), np.float32) < 0.25, "bool", 0.25, 0.0),
    row("randint", lambda generator: generator.integers(-3, 9, (3, 50), np.int32), "int32", -3, 9),
    row("gumbel", lambda generator: 1 - 2 * np.log(generator.standard_exponential((3, 50))), a=1.0, b=2.0),
    Sample(
        "dropout",
        lambda x, state: OPS["dropout"](x, state, rate=0.25, stream=STREAM),
        (real(8, 9), STATE),
        lambda x, state: np.where(kept(72, 0.25).reshape(8, 9), x / 0.75, 0),
    ),
    Sample(
        "dropout",
        lambda x, state: OPS["dropout"](x, state, rate=0.5, stream=STREAM, channels=True),
        (real(3, 5, 2, 2), STATE),
        lambda x, state: np.where(kept(15, 0.5).reshape(3, 5, 1, 1), x * 2, 0),
        label="channels",
    ),
]
