"""Weights alone out of a checkpoint: under every placement what one process has then, and training goes on as there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.dist.comm.threads import count_names_apart
from hetu.inference import Loaded
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, Hybrid, ParameterServer

from .test_hybrid import job

ROWS = 8
ONLY = {
    "all": None,
    "the table": "*/embedding/*",
    "the head": ["model/head/*"],
    "a bias of a bundle": ["model/body/bias"],
    "the table's states": ["*/embedding/weight/adam_m"],
    "all but the count": ["model/*"],
}
PLACES: dict[str, Callable[[Any, dist.Comm], dict[str, Any]]] = {
    "data": lambda client, comm: {"strategy": dist.DataParallel(), "comm": comm},
    "zero": lambda client, comm: {"strategy": dist.ZeRO(3), "comm": comm},
    "tensor": lambda client, comm: {"strategy": dist.TensorParallel({"*/body/weight": 1}), "comm": comm},
    "servers": lambda client, comm: {"strategy": ParameterServer(), "comm": Connected(Place(comm.rank, 2), client)},
    "hybrid": lambda client, comm: {
        "strategy": Hybrid(served=["*/embedding/*"]),
        "comm": Connected(comm, client),
    },
}


def executor(seed: int = 0, classes: int = 3, **where: Any) -> ht.Executor:
    count_names_apart()
    ids, t = ht.placeholder("ids", (None, 4), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        x = ht.flatten(ht.nn.Embedding(50, 3, name="embedding")(ids), 1)
        x = ht.nn.Linear(12, 5, activation=ht.tanh, name="body")(x)
        y = ht.nn.Linear(5, classes, name="head" if classes == 3 else "new")(x)
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    with ht.scope("optimizer"):
        updates = ht.optim.Adam(0.05).minimize(loss)
    return ht.Executor({"train": [loss, updates], "predict": [y]}, seed=seed, **where)


def trained(ex: ht.Executor, steps: range) -> list[float]:
    made = [np.random.default_rng(step) for step in steps]
    feeds = [{"ids": rng.integers(0, 50, (ROWS, 4)), "t": rng.integers(0, 3, ROWS)} for rng in made]
    return [float(ex.run("train", feed)[0]) for feed in feeds]


def values(ex: ht.Executor) -> np.ndarray:
    return ex.predict(np.arange(44).reshape(11, 4), name="predict", batch_size=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, meaning: None) -> Path:
    path = tmp_path_factory.mktemp("weights") / "run"
    other = executor(seed=7)
    trained(other, range(20, 25))
    other.save(path)
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_taken_is_what_one_process_takes_and_training_goes_on(place: str, saved: Path) -> None:
    """After steps of its own, so that what is not taken differs from the first values."""

    def goes_on(ex: ht.Executor) -> list[tuple[list[float], np.ndarray]]:
        found = []
        for n, only in enumerate(ONLY.values()):
            losses = trained(ex, range(2 * n, 2 * n + 2))
            ex.load(saved, only=only, strict=n % 2 == 0)
            found.append((losses, values(ex)))
        return [*found, (trained(ex, range(50, 53)), values(ex))]

    wanted = goes_on(executor())
    results = job(2, lambda client, comm: goes_on(executor(**PLACES[place](client, comm))), servers=2)
    for (losses, y), *found in zip(wanted, *results):
        # A worker apart has the loss of its own rows.
        np.testing.assert_allclose(np.mean([own for own, _ in found], axis=0), losses, rtol=1e-4)
        for _, own_y in found:
            np.testing.assert_allclose(own_y, y, rtol=1e-3, atol=5e-4)  # Adam amplifies rounding


@pytest.mark.parametrize("place", PLACES)
def test_a_report_tells_what_was_taken_and_what_was_not(place: str, saved: Path) -> None:
    def body(client: Any, comm: dist.Comm) -> Loaded:
        return ht.load_weights(executor(seed=3, classes=5, **PLACES[place](client, comm)), saved)

    one = executor(seed=3, classes=5)
    report = ht.load_weights(one, saved)
    model = [f"model/{name}" for name in ("embedding/weight", "body/weight", "body/bias")]
    assert sorted(report.taken) == sorted(model)
    assert set(report.missing) == {"model/new/weight", "model/new/bias"}
    assert {"model/head/weight", "model/body/bias/adam_m"} < set(report.left)
    assert job(2, body, servers=2) == [report, report]
