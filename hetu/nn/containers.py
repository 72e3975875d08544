"""Layers made of layers.

For branches write a `Layer` with a `forward` of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic

from ..core.errors import ArgumentError
from .layer import Layer, R


class Sequential(Layer, Generic[R]):
    """Layers and plain functions applied one after the other. Index it to get a layer, iterate over all.

    >>> import hetu as ht
    >>> model = Sequential(ht.nn.Linear(784, 64), ht.relu, ht.nn.Linear(64, 10))
    >>> model(ht.placeholder("x", (None, 784))).shape[1], len(model.variables)
    (10, 4)
    """

    # The last of the layers says what a call makes.
    def __init__(
        self, *layers: *tuple[*tuple[Callable[[Any], Any], ...], Callable[[Any], R]], name: str | None = None
    ) -> None:
        for layer in layers:
            if not callable(layer):
                raise ArgumentError(f"{layer!r:.60} is no layer", fix="pass layers and functions, one argument each")
        super().__init__(name)
        self.layers: list[Callable[[Any], Any]] = list(layers)

    def forward(self, x: Any) -> R:
        for layer in self.layers:
            x = layer(x)
        return x

    def __getitem__(self, index: int) -> Callable[[Any], Any]:
        return self.layers[index]

    def __iter__(self) -> Iterator[Callable[[Any], Any]]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {layer!r}" for layer in self.layers)
        return super().__repr__() + rows
