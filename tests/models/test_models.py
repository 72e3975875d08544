"""Every model: its output is its formula's, and each strategy that suits it trains it as one process does."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest

import hetu as ht
from hetu import dist, models
from hetu.core.errors import ArgumentError
from hetu.dist import run_ranks
from hetu.ps import Client
from hetu.strategies import Connected, Hybrid

from ..pairs import nightly
from ..strategies.test_hybrid import job
from .table import MODELS, Model

STRATEGIES = {
    "data": dist.DataParallel,
    "zero3": lambda: dist.ZeRO(3),
    "tensor": dist.TensorParallel,
    "pipeline": lambda: dist.Pipeline(microbatches=2),
}
DEEP = "vision.resnet18 vision.resnet34 vision.resnet50 vision.densenet vision.mobilenet vision.unet".split()
CASES = [(name, s) for name, model in MODELS.items() for s in ("data", "zero3", *model.also)]
SLOW = [case for case in CASES if case[0] in DEEP and case != ("vision.mobilenet", "data")]
CASES = [*(case for case in CASES if case not in SLOW), *nightly(SLOW)]


def built(model: Model) -> tuple[ht.Node, ht.Node]:
    """The output and the loss, of placeholders for what is fed and for `t`."""

    def fed(name: str, array: np.ndarray) -> ht.Node:
        return ht.placeholder(name, (None, *array.shape[1:]), array.dtype.name)

    with ht.scope("model"):
        y = model.build(**{name: fed(name, array) for name, array in model.fed.items()})
    t = fed("t", model.targets)
    floats = model.targets.dtype.kind == "f"
    return y, ht.mean(ht.binary_cross_entropy_with_logits(y, t) if floats else ht.softmax_cross_entropy(y, t))


def losses(model: Model, strategy=None, comm=None, steps: int = 4) -> list[float]:
    _, loss = built(model)
    executor = ht.Executor([loss, ht.optim.Momentum(0.05).minimize(loss)], strategy=strategy, comm=comm)
    feed = {**model.fed, "t": model.targets}
    return [float(executor.run(feed)[0]) for _ in range(steps)]


@functools.cache
def alone(name: str) -> list[float]:
    return losses(MODELS[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_that_of_the_formula(name):
    model = MODELS[name]
    executor = ht.Executor({"eval": [built(model)[0]]})
    rng, values = np.random.default_rng(1), []
    for variable in sorted(executor.variables, key=lambda v: v.serial):  # away from zeros, ones and means of 0
        drawn = 0.3 * rng.standard_normal(variable.shape) + 0.1
        if variable.dtype != "float32":
            continue  # the state of random numbers
        executor.state[variable] = np.abs(drawn) + 0.5 if variable.name.endswith(("scale", "var")) else drawn
        values.append(executor.state[variable].astype("float64"))
    weights = iter(values)
    wanted = model.formula(weights, **model.fed)
    assert next(weights, None) is None, "a variable that the formula does not know"
    np.testing.assert_allclose(executor.run("eval", model.fed)[0], wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_strategy_trains_as_one_process_does(name, strategy, monkeypatch):
    monkeypatch.setattr(ht.nn.Dropout, "forward", lambda self, x: x)
    model = MODELS[name]
    for found in run_ranks(2, lambda comm: losses(model, STRATEGIES[strategy](), comm)):
        np.testing.assert_allclose(found[: model.steps], alone(name)[: model.steps], atol=model.atol, rtol=0)
    assert alone(name)[-1] < alone(name)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns(name):
    """Its loss of one batch falls by a twentieth at least in 30 steps, with dropout and with kernels."""
    _, loss = built(MODELS[name])
    executor = ht.Executor({"train": [loss, ht.optim.Adam(0.01).minimize(loss)], "eval": [loss]})
    feed = {**MODELS[name].fed, "t": MODELS[name].targets}
    first = float(executor.run("eval", feed)[0])
    for _ in range(30):
        executor.run("train", feed)
    assert float(executor.run("eval", feed)[0]) < 0.95 * first


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("clicks.")])
def test_tables_on_servers_train_as_one_process_does(name, monkeypatch):
    monkeypatch.setattr(ht.nn.Dropout, "forward", lambda self, x: x)

    def body(client: Client, comm: dist.Comm) -> list[float]:
        return losses(MODELS[name], Hybrid(served="*weight"), Connected(comm, client))

    for found in job(2, body):
        np.testing.assert_allclose(found, alone(name), atol=1e-5, rtol=0)


def test_every_model_has_a_row():
    public = {f"{room}.{name}" for room in models.__all__ for name in getattr(models, room).__all__ if name != "load"}
    assert public == {*MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_where_it_comes_from(name):
    room, _, model = name.partition(".")
    text = inspect.getdoc(getattr(getattr(models, room), model))
    assert "20" in text or "19" in text or name in ("vision.logistic", "vision.mlp"), "the paper and its year"


@pytest.mark.parametrize("score", [models.knowledge.complex_, models.knowledge.rotate])
def test_complex_vectors_have_an_even_number_of_features(score):
    with pytest.raises(ArgumentError, match="7 features are no complex numbers[\\s\\S]*choose an even number"):
        score(*(ht.placeholder(name, (None, 7)) for name in "hrt"))


def test_two_directions_have_an_even_number_of_features():
    with pytest.raises(ArgumentError, match="features=7 do not divide between two directions"):
        models.translation.RecurrentEncoderDecoder(5, 5, 7)
    with pytest.raises(ArgumentError, match="layers is -1, wanted a positive integer"):
        models.translation.RecurrentEncoderDecoder(5, 5, 8, -1)
