"""The initial values of a variable's part. Each rank makes the whole and cuts it, which costs memory for a moment."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.types import Box
from .boxes import within


class LocalInitializer:
    """This rank's part of what an initializer gives for the whole variable: all ranks together start as one would."""

    def __init__(self, init: Any, shape: tuple[int, ...], box: Box) -> None:
        self.init, self.shape, self.box = init, shape, box

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        whole = self.init(self.shape, dtype, rng) if callable(self.init) else self.init
        return np.asarray(whole)[within(self.box, tuple((0, s) for s in self.shape))]
