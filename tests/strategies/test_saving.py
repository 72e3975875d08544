"""Checkpoints while training goes on, of what servers keep: each of one moment, read by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.checkpoint import generations

from .test_weights_alone import PLACES, executor, job, trained, values


@pytest.mark.parametrize("place", ["servers", "hybrid"])
def test_each_is_of_one_clock(place: str, tmp_path: Path) -> None:
    def body(client: Any, comm: dist.Comm) -> list[np.ndarray]:
        ex, found = executor(**PLACES[place](client, comm)), []
        checkpoints = ht.Checkpoints(ex, tmp_path, keep=2)
        for step in range(3):
            trained(ex, range(2 * step, 2 * step + 2))
            found.append(values(ex))
            checkpoints.save({"step": step})
        trained(ex, range(6, 8))
        checkpoints.wait()
        return found

    results = job(2, body, servers=2)
    assert generations(tmp_path) == [2, 3] and len([*tmp_path.iterdir()]) == 2
    for path, step in ((tmp_path, 2), (tmp_path / "2", 1)):
        alone = executor(seed=9)
        assert alone.load(path) == {"step": step}
        for found in results:
            np.testing.assert_allclose(values(alone), found[step], rtol=1e-5, atol=1e-6)
