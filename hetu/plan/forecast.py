"""`hetu plan`: the best strategy for a model on a cluster, which one need not have, and what a step there would cost.

Nothing is allocated and nothing measured: the planner plays steps by the figures of the cluster. Left out: what these
do not say, such as contention on links, waiting for data, checkpoints and failures. The model is a file: some sizes in
TOML, or Python that makes the graph.

    kind = "gpt"            # the only one yet; its sizes are whole numbers
    layers = 32             # and so on: features, heads, vocabulary, length
    recompute = true        # of each block, for its gradients, instead of keeping what is inside

A Python file is run; its `entries` are what an executor would be given, `[loss, update]`. It should be one of yours.
Where `entries` is a function of the number of equal blocks, `layers` says how many the model has: of so deep a model a
few blocks are compiled, and the rest follows.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError, HetuError, did_you_mean, public
from ..core.passes import PRECISIONS
from ..core.types import Dim, as_dtype
from ..files import check_place, write_text
from ..look.columns import in_columns, show_bytes
from ..models import text
from ..ops import mean, placeholder, softmax_cross_entropy
from ..optim import Adam
from ..progress import bar
from ..ranges import AtLeast1, Layers
from .costs.links import Cluster, cluster, known, made, read_toml
from .costs.profile import MachineProfile
from .plan import Plan
from .search.auto import auto
from .search.deep import LEAST, DeepSearch
from .simulation.deep import Described
from .simulation.trials import parts_of


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


SHOWN = 3  # runners-up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sizes = 'a .toml file of kind = "gpt", layers, features, heads, vocabulary, length and perhaps recompute = true'
    add("model", type=Path, help=f"{sizes}; or a .py file that makes `entries`, such as [loss, update]")
    clusters = f"one of {', '.join(known())} or the path of a .toml file, and how many hosts: dgx-h100:16"
    add("--cluster", required=True, metavar="NAME[:HOSTS]", help=clusters)
    add("--batch", type=int, default=64, help="samples of a step on all devices together (default: %(default)s)")
    add("--budget", type=float, metavar="GB", help="what a plan may need of each device's memory (default: all)")
    add("--precision", choices=PRECISIONS, default="float32", help="what products compute in (default: %(default)s)")
    add("--price", type=float, metavar="DOLLARS", help="of a device and hour (default: what the cluster's file says)")
    add("--svg", type=Path, metavar="FILE", help="draw what the first devices do and hold, beside the runner-up's")
    add("--json", type=Path, metavar="FILE", help="write the plan, as ht.plan.Plan.from_json reads it")


def main(args: argparse.Namespace) -> int:
    """Print the forecast for a model on a cluster, and write what is asked for."""
    for path in filter(None, (args.svg, args.json)):
        check_place(path)  # now, because the search takes long
    there, model = cluster(args.cluster), read_model(args.model)
    there = there if args.price is None else replace(there, price=args.price)
    budget = None if args.budget is None else 1e9 * args.budget
    found = forecast(model, there, args.batch, budget=budget, precision=args.precision, progress=None)
    print(f"{args.model} on {there.name}: {args.batch:,} samples a step, {args.precision}\n\n{found}")
    if args.svg:
        write_text(args.svg, found.plan.why().to_svg())
    if args.json:
        write_text(args.json, found.plan.to_json())
    return 0


def forecast(
    model: Described,
    there: Cluster,
    batch: int,
    *,
    budget: float | None = None,
    precision: str = "float32",
    progress: bool | None = False,
) -> Forecast:
    """Search for the best plan; `budget` is in bytes, by default the memory of a device."""
    began, profile = time.perf_counter(), MachineProfile.of(there)
    chooser = auto(profile.device.memory if budget is None else budget, batch_size=batch, profile=profile)
    if model.layers < LEAST:
        plan = chooser.choose(model.entries, world_size=there.world_size, precision=precision, progress=progress)
    else:
        with bar("plans", 0, progress) as shown:
            plan = DeepSearch(chooser, model, there.world_size, precision).run(shown)
    return Forecast(plan, model, there, batch, precision, time.perf_counter() - began)


@dataclass(frozen=True)
class Forecast:
    """A plan for a model on a cluster, which `took` seconds to find; `print` shows what follows from it."""

    plan: Plan
    model: Described
    there: Cluster
    batch: int
    precision: str
    took: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.plan.why().best.seconds

    @property
    def utilization(self) -> float:
        """The MFU of A. Chowdhery et al., "PaLM", 2022: operations that the model needs, of those that all could do."""
        rate = MachineProfile.of(self.there).device.promised(as_dtype(self.precision))
        return self.model.operations(self.batch) / (rate * self.there.world_size * self.seconds)

    @property
    def counted(self) -> int:
        """Tokens, or samples, of a step."""
        return self.batch * self.model.length

    @property
    def dollars(self) -> float | None:
        """What a million of them costs; None where no price is known."""
        hours = self.there.world_size * self.seconds / 3600
        return None if self.there.price is None else 1e6 * hours * self.there.price / self.counted

    def __str__(self) -> str:
        why, whole, unit = self.plan.why(), MachineProfile.of(self.there).device.memory, self.model.unit
        peak, unpriced = why.best.peak, "unknown: --price says what a device costs for an hour"
        rows = [
            ("plan", why.best.name),
            ("degrees", self._degrees()),
            ("step", f"{1e3 * self.seconds:,.3f} ms"),
            ("model FLOPs utilization", f"{100 * self.utilization:.3g} %"),
            ("memory of a device", f"{show_bytes(peak)}, {100 * peak / whole:.3g} % of {show_bytes(whole)}"),
            (f"{unit} per second", f"{self.counted / self.seconds:,.0f}"),
            (f"a million {unit}", unpriced if self.dollars is None else f"${self.dollars:,.4g}"),
            ("sent in a step", show_bytes(sum(why.cost.sent.values()))),
        ]
        lines = in_columns(rows)
        others = [
            (f"{1e3 * r.seconds:,.3f} ms", f"{100 * (r.seconds / self.seconds - 1):+.1f} %", show_bytes(r.peak), r.name)
            for r in why.next_best[:SHOWN]
        ]
        if others:
            lines += ["", *in_columns([("step", "", "of a device", "runners-up"), *others], right={0, 1, 2})]
        return "\n".join([*lines, "", str(why), "", f"{len(why.rated)} plans looked at in {self.took:.1f} s"])

    def _degrees(self) -> str:
        """How many ways the plan divides what; how far it shards over data-parallel ranks stands in its name."""
        strategy, ranks = self.plan.strategy, self.there.world_size
        stages, data = len(strategy.grids()), ranks if strategy.alone else parts_of(strategy)
        return ", ".join([*[f"stages {stages}"] * (stages > 1), f"data {data}", f"tensor {ranks // (stages * data)}"])
