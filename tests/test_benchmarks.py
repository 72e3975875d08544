"""The peers of the CPU benchmark: what they are started with, and that all ways of hetu train alike.

Ignored on purpose: times, and PyTorch's side, which is checked by its losses whenever the benchmark runs.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"


@pytest.fixture
def first(monkeypatch):
    """What a peer that trains the tiny MLP reports before it is timed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sampling = importlib.import_module("sampling")

    def started(variant: str, threads: int) -> dict:
        peer = sampling.Peer("hetu", variant, "tiny_mlp", threads)
        try:
            assert peer.title == "hetu"
            assert peer.run(2)["cpu"] > 0
            return peer.first
        finally:
            peer.close()

    return started


def test_a_peer_chooses_its_kernels_itself(monkeypatch, first):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    assert "for Nehalem" not in first("default", 1)["versions"]["numpy BLAS"]


def test_halves_of_a_batch_on_two_threads_train_as_the_whole(first):
    whole, halves = (first(variant, 2)["losses"] for variant in ("default", "split"))
    assert len(whole) == 4
    np.testing.assert_allclose(halves, whole, rtol=1e-5)
