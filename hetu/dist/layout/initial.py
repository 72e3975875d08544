"""Initial values of a part of a variable. Each rank makes the whole and cuts it, which costs memory for a moment."""

from __future__ import annotations

import numpy as np

from ...core.leaf import Initializer
from ...core.types import Box, Shape
from .boxes import within


class LocalInitializer:
    """A part of the values that `init` gives for the whole variable, so that all ranks together start as one would."""

    def __init__(self, init: Initializer | np.ndarray | float, shape: Shape, box: Box) -> None:
        self.init, self.shape, self.box = init, tuple(map(int, shape)), box

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        whole = self.init(self.shape, dtype, rng) if callable(self.init) else self.init
        part: np.ndarray = np.asarray(whole)[within(self.box, tuple((0, s) for s in self.shape))]
        return part
