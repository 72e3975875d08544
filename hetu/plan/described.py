"""Models to be planned for, as files: some sizes in TOML, or Python that makes the graph.

    kind = "gpt"            # the only one yet; its sizes are whole numbers
    layers = 32             # and so on: features, heads, vocabulary, length
    recompute = true        # of each block, for its gradients, instead of keeping what is inside

A Python file is run; its `entries` are what an executor would be given, `[loss, update]`. It should be one of yours.
Where `entries` is a function of the number of equal blocks, `layers` says how many the model has: of so deep a model a
few blocks are compiled, and the rest follows.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError, HetuError, did_you_mean, public
from ..core.graph import Graph, Node
from ..core.op import LEAVES
from ..core.operators import barrier
from ..core.subgraph import SubGraph
from ..core.types import Dim
from ..look.profiler import flops
from ..models import text
from ..ops import mean, placeholder, softmax_cross_entropy
from ..optim import Adam
from ..passes import specialize
from ..ranges import AtLeast1, Layers
from .costs.clusters import made, read_toml
from .search.planner import shapes_of
from .simulation.deep import DeepModel


@dataclass(frozen=True)
class Described:
    """What a step fetches and updates; "tokens" or "samples" are counted, so many in a sample.

    If it has `layers` equal blocks, `at` makes the entries at any other number of them.
    """

    entries: Sequence[Any]
    unit: str = "samples"
    length: int = 1
    layers: int = 0
    at: Callable[[int], Sequence[Any]] | None = None

    @property
    def blocks(self) -> DeepModel | None:
        """The model by its blocks, if it has any."""
        if self.at is None:
            return None
        return DeepModel(self.entries, self.at, self.layers, lambda rows: shapes_of(self.sub, rows))

    @cached_property
    def sub(self) -> SubGraph:
        return SubGraph("plan", self.entries)

    def operations(self, batch: int) -> int:
        """Those of forward and backward on a batch: not of the optimizer, and nothing that is computed once more."""
        if self.at is not None and self.layers > 2:
            one, two = (Described(self.at(depth)).operations(batch) for depth in (1, 2))
            return one + (self.layers - 1) * (two - one)
        shapes = shapes_of(self.sub, batch)
        sizes = {(name, axis): size for name, shape in shapes.items() for axis, size in enumerate(shape)}
        nodes = Graph(specialize(self.sub.written.outputs, sizes)).nodes
        again = set[Node]()  # what a barrier lets be computed once more, and what follows from that alone
        for node in nodes:
            made = {i for i in node.inputs if i.role not in LEAVES}
            if node.op is barrier or (made and made <= again):
                again.add(node)
        return sum(flops(node) for node in nodes if node not in again and not node.tags.get("update"))


@public
def gpt(
    *,
    layers: Layers,
    features: AtLeast1,
    heads: AtLeast1,
    vocabulary: AtLeast1,
    length: AtLeast1,
    recompute: bool = False,
) -> Described:
    """`ht.models.text.gpt`, trained by Adam to tell the next token."""

    def at(depth: int) -> Sequence[Any]:
        ids, wanted = (placeholder(name, (None, length), "int64") for name in ("ids", "wanted"))
        logits = text.gpt(ids, vocabulary, features=features, layers=depth, heads=heads, recompute=recompute)
        loss = mean(softmax_cross_entropy(logits, wanted))
        return [loss, Adam(1e-4).minimize(loss)]

    return Described(at(layers), "tokens", length, layers, at)


KINDS = {"gpt": gpt}


def read_model(path: Path) -> Described:
    """The model that a file describes; ArgumentError says what is wrong with it."""
    if path.suffix == ".py":
        model = _run(path)
    else:
        table = read_toml(path)
        if (kind := table.pop("kind", None)) not in [*KINDS]:
            raise ArgumentError(f"{path}: got kind={kind!r:.80}", fix=did_you_mean(kind, KINDS))
        model = made(KINDS[kind], table, f"{path}")
    if not any(n.shape and isinstance(n.shape[0], Dim) for n in model.sub.placeholders.values()):
        fix = 'leave open the first size of what is fed: ht.placeholder("x", (None, 10))'
        raise ArgumentError(f"{path}: nothing that the model is fed has a batch", fix=fix)
    return model


def _run(path: Path) -> Described:
    if not path.is_file():
        raise ArgumentError(f"there is no file {str(path)!r}", fix="pass a .py or .toml file")
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    try:
        names = runpy.run_path(str(path))
        if "entries" not in names:
            raise ArgumentError(
                "it makes no entries", fix="write in it what a step fetches and updates: entries = [loss, update]"
            )
        made = names["entries"]
        layers = names.get("layers", 0) if callable(made) else 0
        model = Described(made(layers), layers=layers, at=made) if callable(made) else Described(made)
        model.sub  # noqa: B018 - its errors too are those of the file
        return model
    except HetuError as error:
        raise ArgumentError(f"{path}: {error.message}\n{error.place}".rstrip(), fix=error.fix) from None
    finally:
        sys.path.pop(0)
