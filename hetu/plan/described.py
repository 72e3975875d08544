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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError, HetuError, did_you_mean, public
from ..core.types import Dim
from ..models import text
from ..ops import mean, placeholder, softmax_cross_entropy
from ..optim import Adam
from ..ranges import AtLeast1, Layers
from .costs.clusters import made, read_toml
from .simulation.deep import Described


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

    return Described(at, "tokens", length, layers)


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
    if not any(n.shape and isinstance(n.shape[0], Dim) for n in model.shallow.placeholders.values()):
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
        return Described(made, layers=layers) if callable(made) else Described(lambda depth: made)
    except HetuError as error:
        raise ArgumentError(f"{path}: {error.message}\n{error.place}".rstrip(), fix=error.fix) from None
    finally:
        sys.path.pop(0)
