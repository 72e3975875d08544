"""Initial values of a part of a variable: only its rows, if a law makes them, else the whole, of which it is cut."""

from __future__ import annotations

import numpy as np

from ...core.leaf import Initializer
from ...core.types import Box, Shape
from ...init import law_of
from .boxes import within


class LocalInitializer:
    """A part of the values that `init` gives for the whole variable, so that all ranks together start as one would."""

    def __init__(self, init: Initializer | np.ndarray | float, shape: Shape, box: Box) -> None:
        self.init, self.shape, self.box = init, tuple(map(int, shape)), box

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        _, *columns = inside = within(self.box, tuple((0, s) for s in self.shape))
        if (law := law_of(self.init, self.shape)) is not None:
            made = np.empty(shape, dtype)
            for places, values in law.blocks(self.shape, dtype, rng, range(*self.box[0])):
                made[places] = values[(slice(None), *columns)]
            return made
        whole = self.init(self.shape, dtype, rng) if callable(self.init) else self.init
        part: np.ndarray = np.asarray(whole)[inside]
        return part
