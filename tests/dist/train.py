"""Trains a model of `models.py` on the ranks of a job: `heturun -w 2 python -m tests.dist.train zero1 cnn`."""

from __future__ import annotations

import sys

import numpy as np

from hetu.dist import world

from .models import MODELS, losses
from .test_strategies import STRATEGIES

if __name__ == "__main__":
    strategy, model = sys.argv[1:]
    found, alone = losses(MODELS[model], STRATEGIES[strategy]()), losses(MODELS[model])
    np.testing.assert_allclose(found, alone, atol=1e-5, rtol=0)
    print(f"rank {world().rank}: {len(found)} losses equal those of one process")
