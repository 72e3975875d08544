"""Cut the layers of a model into pipeline stages, each on as many ranks as it needs, so that a step is fast.

The recurrence is PipeDream's (D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1), over a graph of layers instead of a chain: towers that do not read each other pass at the same time.
The default cut weighs layers by their operations alone (`balanced_cut`), this one by seconds on the given links and in
the given memory. Activations do not count here, though an early stage holds those of more micro-batches, nor does what
hides behind what; the simulator counts them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.errors import ArgumentError
from ...core.graph import Node, readers_of, topological
from ...core.op import Role
from ...dist.cut.pipeline_schedule import BACKWARD, FORWARD
from ...dist.cut.pipeline_stages import EVERYWHERE, label_by, layers_of, phases, stages_of
from ..costs.links import Channel
from ..costs.profile import MachineProfile

BACK = 2 / 3  # the share of a pass that goes back


@dataclass(frozen=True)
class LayerCosts:
    """What each layer of a graph takes: seconds for a micro-batch on one rank, those of them that no rank is spared,
    those of adding its gradients to others, and of a step's updates; bytes of variables with their state and without,
    and those that it reads of each layer before it."""

    names: list[str]
    seconds: list[float]
    launches: list[float]
    adds: list[float]
    updates: list[float]
    kept: list[int]
    trained: list[int]
    reads: list[dict[int, int]]

    @staticmethod
    def of(
        outputs: Sequence[Node],
        batches: Collection[str],
        stages: int,
        profile: MachineProfile,
        variables: Mapping[str, tuple[int, int]],
    ) -> LayerCosts:
        """Those of a graph of known sizes; variables: of each trained one how often its bytes are kept, and these."""
        names, forward = layers_of(outputs, batches, stages)
        reads, phase = [defaultdict[int, int](int) for _ in names], phases(outputs, batches)
        for node, readers in readers_of(topological(outputs)).items():
            if node in forward and not isinstance(node.type, tuple):
                for k in {forward[r] for r in readers if r in forward} - {forward[node]}:
                    reads[k][forward[node]] += int(node.tensor.nbytes)
        none: dict[str, Any] = {name: [0] * len(names) for name in Work._fields}
        found = LayerCosts(names, **none, reads=[{**r} for r in reads])
        alone = {name: k for k, name in enumerate(names)}  # where every layer would be a stage of its own
        for node, k in stages_of(outputs, phase, label_by(alone)).items():
            if k != EVERYWHERE and phase.get(node) in (FORWARD, BACKWARD):
                found.seconds[k] += profile.seconds(node)
                found.launches[k] += profile.device.launch
            elif k != EVERYWHERE and node.role is Role.VARIABLE:
                times, nbytes = variables.get(node.name, (0, 0))
                found.kept[k] += times * nbytes
                found.trained[k] += nbytes
                for of, passes in ((found.adds, 3), (found.updates, 2 * times + 1)) if times else ():
                    of[k] += profile.device.launch + passes * nbytes / profile.device.bandwidth
        return found


class Work(NamedTuple):
    """What the layers of a stage take together, as `LayerCosts` has it."""

    seconds: float
    launches: float
    adds: float
    updates: float
    kept: int
    trained: int


class Way(NamedTuple):
    """Stages so far: when each layer is done that went first through all of them, by how much the slowest outlasts
    that, the layer at which each ends, and how many ranks share the batch, or do all alike."""

    done: tuple[float, ...] = ()
    rest: float = 0.0
    ends: tuple[int, ...] = ()
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def seconds(self) -> float:
        return max(self.done, default=0.0) + self.rest


def cut_stages(
    layers: LayerCosts,
    speeds: Sequence[float],
    microbatches: int,
    link: Channel,
    budget: float = math.inf,
    sizes: Collection[int] | None = None,
) -> tuple[float, list[tuple[int, int]], dict[str, int]]:
    """About how long a step takes that is cut into stages of any numbers of ranks (of `sizes`, if given); of each how
    many ranks share a micro-batch and how many do the same; and layer -> stage.

    `layers` are those of a whole micro-batch; speeds: factors on the time of each rank. A stage on more ranks computes
    less, but sums its gradients; ranks that are slow, or too many, had better do what others do. A step goes through
    all stages once, each of which waits for those that it reads, and the slowest is there for all other micro-batches.
    The fastest way to each layer with each number of ranks is kept, which need not be part of the fastest of all.
    ArgumentError if nothing fits.

    >>> from hetu.dist import Link
    >>> none = [0] * 3
    >>> layers = LayerCosts(["a", "b", "c"], [3, 1, 1], none, none, none, none, none, [{}, {0: 8}, {1: 8}])
    >>> cut_stages(layers, [1, 1], 4, Link(0.25, math.inf))
    (10.5, [(2, 1)], {'a': 0, 'b': 0, 'c': 0})
    >>> cut_stages(layers, [1, 1], 4, Link(0.25, math.inf), sizes=(1,))
    (14.5, [(1, 1), (1, 1)], {'a': 0, 'b': 1, 'c': 1})
    """
    ranks, found = len(speeds), {(0, 0): Way()}  # by the layers that it has passed, and its ranks
    for last in range(1, len(layers.names) + 1):
        for first in range(last):
            work = Work(**{name: sum(getattr(layers, name)[first:last]) for name in Work._fields})
            for used in (n for n in range(ranks) if (first, n) in found and work.kept <= budget):
                way, begin = found[first, used], _begin(layers, found[first, used], first, last, link)
                for size in (n for n in sizes or range(1, ranks + 1) if used + n <= ranks):
                    for grid, once, more, late in _divided(work, speeds[used : used + size], microbatches, link):
                        done = *way.done, *(begin + once,) * (last - first)
                        rest = max(way.rest, more + max(0.0, late - BACK * begin))
                        made = Way(done, rest, (*way.ends, last), (*way.grids, grid))
                        known = found.get((last, used + size), made)
                        found[last, used + size] = min(known, made, key=lambda w: w.seconds)
    if (len(layers.names), ranks) not in found:
        raise ArgumentError(
            f"{len(layers.names)} layers, of up to {max(layers.kept):,} bytes, fit into no stages on {ranks} ranks "
            f"with {budget:,.0f} bytes each",
            fix="raise the budget, split variables, or use fewer stages",
        )
    way = found[len(layers.names), ranks]
    cut = {name: sum(end <= k for end in way.ends) for k, name in enumerate(layers.names)}
    return way.seconds, [*way.grids], cut


def _begin(layers: LayerCosts, way: Way, first: int, last: int, link: Channel) -> float:
    """When all is there that the layers from `first` to `last` read, forth and back."""
    read = [(k, nbytes) for reads in layers.reads[first:last] for k, nbytes in reads.items() if k < first]
    return max((way.done[k] + 2 * link.message(nbytes) for k, nbytes in read), default=0.0)


def _divided(
    work: Work, speeds: Sequence[float], microbatches: int, link: Channel
) -> Iterator[tuple[tuple[int, int], float, float, float]]:
    """How ranks may do the work of a stage: the seconds of a micro-batch, of the others, and of what ends a step."""
    size, slowest = len(speeds), max(speeds)
    once = slowest * (work.launches + (work.seconds - work.launches) / size)
    summed = link.seconds("all_reduce", size, work.trained) if size > 1 else 0.0
    yield (size, 1), once, (microbatches - 1) * (once + slowest * work.adds), summed + slowest * work.updates
    if size > 1:  # the first is heard, and the slowest ends last
        once, others = speeds[0] * work.seconds, (microbatches - 1) * slowest * (work.seconds + work.adds)
        yield (1, size), once, slowest * work.seconds + others - once, slowest * work.updates
