"""A step made of groups has the same bits by any compiler, for any vectors, and on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.cpu_kernels import c_calls, openblas
from hetu.cpu_kernels.compiler import SETTING
from hetu.optim import Adam

from .every_compiler import others as every_other

pytestmark = pytest.mark.compiled
ROWS, STEPS = 131, 2  # sums around rows are made in blocks of 64 rows


def classifier(x, labels):
    """Its products are those of BLAS, whatever the compiler is."""
    h = ht.nn.Linear(33, 65, activation=ht.relu)(x)
    h = ht.nn.Linear(65, 45, activation=ht.tanh)(h)
    return ht.softmax_cross_entropy(ht.nn.Linear(45, 33)(h), labels)


def norm_and_softmax(x, labels):
    return ht.softmax_cross_entropy(ht.softmax(ht.nn.LayerNorm(33)(x)) * 10, labels)


def wide_rows(x, labels):
    """More columns than a strip of a sum has."""
    wide = ht.sin(x[:, :1] * np.arange(4125, dtype=np.float32))
    return ht.softmax_cross_entropy(ht.nn.LayerNorm(4125)(wide), labels)


def batch_norm(x, labels):
    return ht.nn.BatchNorm(33)(x)


def gelus(x, labels):
    x = x * ht.variable("scale", ht.init.uniform(0.5, 1.5), (33,))
    return ht.gelu(x) + ht.gelu(x * x, "tanh")


def functions(x, labels):
    y = ht.exp(-ht.abs(x * ht.variable("scale", ht.init.uniform(0.5, 1.5), (33,))))
    return ht.log(y) + ht.log1p(y) * ht.sin(x) + ht.sqrt(y) * ht.rsqrt(1 + y) + ht.cos(y) ** 1.7 + ht.erf(x * y)


def doubles(x, labels):
    x = ht.astype(x, "float64") * ht.variable("scale", ht.init.uniform(0.5, 1.5), (33,))
    return ht.softplus(x) * ht.tanh(x) + ht.gelu(x)


MODELS = (classifier, norm_and_softmax, wide_rows, batch_norm, gelus, functions, doubles)


def trained(models=MODELS):
    """What models compute in a few steps, and all variables then. One program, so that a compiler starts once."""
    x, labels = ht.placeholder("x", (ROWS, 33)), ht.placeholder("labels", (ROWS,), "int64")
    outputs = []
    for model in models:
        with ht.scope(model.__name__):
            outputs.append(model(x, labels))
    executor = ht.Executor([*outputs, Adam(0.01).minimize(sum(ht.mean(y) for y in outputs))], seed=0)
    rng = np.random.default_rng(0)
    feed = {x: rng.standard_normal((ROWS, 33), np.float32), labels: rng.integers(0, 33, ROWS)}
    assert [type(call) for call in executor.program(feed).calls] == [c_calls.CTable]  # no call of NumPy among them
    steps = [executor.run(feed) for _ in range(STEPS)]
    found = {f"{model.__name__}, step {k}": y for k, step in enumerate(steps) for model, y in zip(models, step)}
    return found | {f"variable {k}": x for k, x in enumerate(executor.state.arrays.values())}


@pytest.fixture(autouse=True)
def every_text_is_asked_for_anew(monkeypatch):
    """Another compiler in the same process; after the test, the one that is usual."""
    c_calls._written.cache_clear()
    yield
    monkeypatch.undo()
    c_calls._written.cache_clear()


def differing(found, wanted):
    return [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


@every_other
def test_every_compiler_and_every_vector_gives_the_same_bits(monkeypatch, others):
    wanted = trained()
    for command in others():
        monkeypatch.setenv(SETTING, command)
        c_calls._written.cache_clear()
        assert differing(trained(), wanted) == [], command


def test_any_number_of_threads_gives_the_same_bits():
    before, found = openblas.get_threads(), []
    if before is None:
        pytest.skip("NumPy's OpenBLAS, which says how many threads there may be, is not there")
    try:
        for threads in (1, 2, 3):
            openblas.set_threads(threads)
            found.append(trained())
    finally:
        openblas.set_threads(before)
    assert [differing(other, found[0]) for other in found] == [[], [], []]


def test_other_bits_are_seen(monkeypatch):
    wanted = trained([norm_and_softmax])
    monkeypatch.setenv(SETTING, "cc -freciprocal-math -fassociative-math -fno-signed-zeros")
    assert differing(trained([norm_and_softmax]), wanted)
