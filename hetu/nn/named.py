"""Models whose variables have the names of published checkpoints, and low-rank updates of their linear maps."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node, tagged
from ..core.leaf import Initializer, scope, variable
from ..data.weights import PublishedWeights
from ..init import normal, ones, zeros
from ..ranges import AtLeast1, Positive
from .layer import Layer, check_sizes, width

SMALL = normal(0.02)


class NamedModel(Layer):
    """Base of models of published checkpoints: `weights` has a variable for every published name, without a prefix.

    A subclass declares them in `__init__` by `_linear`, `_table` and `_norm`, and uses them by name in `forward`.
    They are drawn, or, with `published`, read from a file when an executor makes them. Linear weights are (inputs,
    outputs); where the files have them the other way round (`outputs_first`), they are turned on the way.

    >>> import hetu as ht
    >>> class Two(NamedModel):
    ...     def __init__(self, published=None):
    ...         super().__init__(published)
    ...         self._linear("fc1", 4, 8)
    ...         self._linear("fc2", 8, 3)
    ...         self._declared()
    ...     def forward(self, x):
    ...         return self.linear(ht.relu(self.linear(x, "fc1")), "fc2")
    >>> model = Two()
    >>> [variable.name for variable in model.adapt("fc2", rank=2)]
    ['two/fc2/down', 'two/fc2/up']
    >>> model(ht.placeholder("x", (None, 4))).shape[1]
    3
    """

    prefix = ""  # what files may have in front of the names
    outputs_first = True
    drawn: tuple[str, ...] = ()  # beginnings of the names that a file may lack: heads of tasks
    ignored = r"$^"  # what files may have besides

    def __init__(self, published: PublishedWeights | None, name: str | None = None) -> None:
        super().__init__(name)
        self.published = published
        self.weights: dict[str, Node] = {}
        self.maps: list[str] = []  # the names of linear maps
        self.pieces: dict[str, tuple[str, int, int]] = {}  # weights that files hold as part n of so many of another
        self.updates: dict[str, tuple[Node, Node, float]] = {}  # of low rank, by the name of the linear map
        self._wanted: dict[str, tuple[int, ...]] = {}
        self._lacking: set[str] = set()

    # -- to declare ------------------------------------------------------------------------------------------------

    def _linear(
        self, name: str, inputs: AtLeast1, outputs: AtLeast1, *, bias: bool = True, parts: Sequence[str] = ()
    ) -> None:
        """`parts` are maps `name.part` that files hold beside each other as one; each can be split over ranks."""
        check_sizes(inputs=inputs, outputs=outputs)
        for n, key in enumerate([f"{name}.{part}" for part in parts] or [name]):
            self.maps.append(key)
            kinds = {"weight": (inputs, outputs), "bias": (outputs,)} if bias else {"weight": (inputs, outputs)}
            for kind, shape in kinds.items():
                if parts:
                    self.pieces[f"{key}.{kind}"] = f"{name}.{kind}", n, len(parts)
                init = SMALL if kind == "weight" else zeros
                self._add(f"{key}.{kind}", shape, init, turned=kind == "weight" and self.outputs_first)

    def _table(self, name: str, count: AtLeast1, features: AtLeast1) -> None:
        check_sizes(count=count, features=features)
        self._add(f"{name}.weight", (count, features), SMALL)

    def _norm(self, name: str, features: AtLeast1, *, bias: bool = True) -> None:
        self._add(f"{name}.weight", (features,), ones)
        if bias:
            self._add(f"{name}.bias", (features,), zeros)

    def _vector(self, name: str, features: AtLeast1) -> None:
        self._add(name, (features,), zeros)

    def _add(self, name: str, shape: tuple[int, ...], init: Initializer, turned: bool = False) -> None:
        if self.published is not None:
            whole, n, count = self.pieces.get(name, (name, 0, 1))
            found = self.published.called(whole, self.prefix)
            wanted = (*shape[:-1], count * shape[-1])
            self._wanted[found] = wanted[::-1] if turned else wanted
            if found in self.published:
                init = _reading(self.published, found, turned, n, count)
            elif name.startswith(self.drawn):
                self._lacking.add(found)
        with self.naming():
            self.weights[name] = variable(name, init, shape)

    def _declared(self) -> None:
        """All have been declared: CheckpointError unless they are what the file has."""
        if self.published is not None:
            left = [n for n in self.published if n not in self._wanted and not re.search(self.ignored, n)]
            self.published.fitting(self._wanted, self._lacking, left)

    # -- to compute ------------------------------------------------------------------------------------------------

    def linear(self, x: Node, name: str) -> Node:
        """x @ weight + bias, and the update of low rank if there is one."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        with tagged(layer=f"{self.name}/{name}"):
            y = ops.matmul(x, weight) if bias is None else ops.linear(x, weight, bias)
            if name in self.updates:
                down, up, scale = self.updates[name]
                y = y + scale * ((x @ down) @ up)
            return y

    def layer_norm(self, x: Node, name: str, epsilon: Positive) -> Node:
        return ops.layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], epsilon=epsilon)

    # -- to fine-tune ----------------------------------------------------------------------------------------------

    def adapt(self, pattern: str, *, rank: int = 8, scale: float = 1.0) -> list[Node]:
        """Add low-rank updates to the linear maps whose names match; returns their variables, which alone are trained.

        y = x W + scale x A B, A (inputs, rank) drawn, B (rank, outputs) zero, so that at first nothing changes. To be
        called before the model. E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022, eq. 3.
        """
        check_sizes(rank=rank)
        chosen = [n for n in self.maps if re.search(pattern, n) and n not in self.updates]
        if not chosen:
            fix = f"the linear maps are {', '.join(self.maps[:6])}, ..."
            raise ArgumentError(f"{pattern!r} names no linear map without an update", fix=fix)
        for n in chosen:
            inputs, outputs = (width(self.weights[f"{n}.weight"], axis) for axis in (0, 1))
            with self.naming(), scope(n):
                down = variable("down", normal(1 / rank), (inputs, rank))
                self.updates[n] = down, variable("up", zeros, (rank, outputs)), scale
        return [v for n in chosen for v in self.updates[n][:2]]

    def publish(self, state: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
        """Write what `state` has of the weights as a safetensors file in the published naming, updates added to them.

        Weights of unused heads are left out. ArgumentError where this process has parts of a weight only, or none of
        it, under a strategy that spreads them.
        """
        from safetensors.numpy import save_file

        arrays, axis = defaultdict[str, list[np.ndarray]](list), dict[str, int]()
        for name, weight in self.weights.items():
            array, part = state.get(weight.name), name.removesuffix(".weight")
            if array is None and name.startswith(self.drawn):
                continue  # of a head that was not used
            if array is None or array.shape != weight.shape:
                here = "nothing of it" if array is None else f"{array.shape}"
                said = f"{weight.name!r} has shape {weight.shape}, here lies {here}"
                raise ArgumentError(said, fix="save a checkpoint, and load it in one process")
            if part in self.updates and self.updates[part][0].name in state:
                down, up, scale = self.updates[part]
                array = array + np.float32(scale) * state[down.name] @ state[up.name]
            whole, *_ = self.pieces.get(name, (name,))
            arrays[whole].append(array.T if (turned := self.outputs_first and part in self.maps) else array)
            axis[whole] = 0 if turned else -1
        save_file({n: np.ascontiguousarray(np.concatenate(a, axis[n])) for n, a in arrays.items()}, path)


def _reading(published: PublishedWeights, name: str, turned: bool, n: int, count: AtLeast1) -> Initializer:
    def read(shape: tuple[int, ...], dtype: np.dtype, rng: Any) -> np.ndarray:
        array = published.read(name)
        return np.asarray(np.split(array.T if turned else array, count, axis=-1)[n], dtype)

    return read
