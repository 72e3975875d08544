"""A switch between strategies that leave the same to servers: what these keep stays, and training goes on."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError
from hetu.ps import Cache, Client
from hetu.strategies import Connected, Hybrid, ParameterServer

from .test_hybrid import OPTIMIZERS, PARALLEL, batch, hybrid, job, model

RANKS, STEPS = 4, 8
WAYS = {**PARALLEL, "stages": lambda: dist.Pipeline(2, 2, data=2)}
FRESH = Cache("lru", pull_bound=0, push_bound=0)


def made(comm: dist.Comm | None, client: Client | None, optimizer: str, **more) -> ht.Executor:
    """Data parallel on ranks, or alone."""
    strategy, ranks = (hybrid(**more), Connected(comm, client)) if comm and client else (None, None)
    return ht.Executor(model(OPTIMIZERS[optimizer]()), strategy=strategy, comm=ranks)


def trained(ex: ht.Executor, ways=(), **more):
    """The losses where each step is made under the next of these, and what evaluation gives."""
    found = []
    for step in range(STEPS):
        if ways:
            ex.switch(hybrid(parallel=WAYS[ways[step % len(ways)]](), **more))
        found.append(float(ex.run("train", batch(step))[0]))
    return found, ex.run("eval", batch(100))[1]


@pytest.mark.parametrize(("optimizer", "more"), [("adam", {}), ("adagrad-cosine", {}), ("sgd", {"cache": FRESH})])
def test_training_equals_that_of_one_process(optimizer, more):
    losses, y = trained(made(None, None, optimizer))

    def body(client: Client, comm: dist.Comm):
        return trained(made(comm, client, optimizer, **more), ["data", "zero", "stages", "tensor", "zero"], **more)

    for found, own in job(RANKS, body, servers=2):
        np.testing.assert_allclose(found, losses, rtol=1e-4)
        np.testing.assert_allclose(own, y, rtol=1e-3, atol=5e-4)


def test_rows_that_fit_asks_for_ahead_are_those_of_the_next_step():
    batches = [tuple(batch(step)[name] for name in ("ids", "few", "t")) for step in range(STEPS)]

    def fitted(client: Client | None = None, comm: dist.Comm | None = None):
        ex, ways = made(comm, client, "adam"), ["zero", "tensor", "stages", "data"]

        def after(step, loss):
            if comm:
                ex.switch(hybrid(parallel=WAYS[ways[step % 4]]()))

        return ht.fit(ex, batches, epochs=2, inputs=["ids", "few", "t"], after_step=after)["loss"]

    for found in job(RANKS, fitted, servers=2):
        np.testing.assert_allclose(found, fitted(), rtol=1e-4)


def test_only_what_ranks_keep_is_moved_and_what_servers_would_keep_otherwise_is_told():
    def body(client: Client, comm: dist.Comm):
        ex = made(comm, client, "sgd")
        for strategy, match in (
            ("dp", "'model/large/weight' is by rows, kept as servers, under the other strategy"),
            (hybrid(cache=FRESH), "'model/large/weight' is by rows, kept as servers, .*Cache"),
            (ParameterServer(), "under 'serving' ranks keep values, or a connection, of their own"),
        ):
            with pytest.raises(ArgumentError, match=match) as caught:
                ex.switch(strategy)
            assert "save, and load" in caught.value.fix
        moved = ex.switch(hybrid(parallel=dist.ZeRO(3)))
        none = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=Hybrid(batch_size=0), comm=Connected(comm, client))
        none.switch("zero3")  # servers keep nothing under either
        return moved.moves.keys() & ex.state.copies.keys(), trained(none)[0]

    for kept, found in job(RANKS, body):
        assert not kept
        np.testing.assert_allclose(found, trained(made(None, None, "sgd"))[0], rtol=1e-4)
