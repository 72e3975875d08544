"""Cut the layers of a model into pipeline stages so that the slowest stage, or link between two, is fast.

The recurrence is PipeDream's (D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1), for stages of equally many ranks, as a `Staged` strategy has them. The default cut weighs layers by
their operations alone (`balanced_cut`), this one by seconds on the given links and in the given memory. Activations do
not count here, though an early stage holds those of more micro-batches; the simulator counts them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ...core.errors import ArgumentError
from ...core.graph import Node
from ...core.op import Role
from ...dist.cut.pipeline_stages import EVERYWHERE, crossing, label_by, layers_of, phases, stages_of
from ..costs.links import Channel
from ..costs.profile import MachineProfile


def cut_stages(
    layers: int, stages: int, stage: Callable[[int, int], float], send: Callable[[int], float]
) -> tuple[float, list[int]]:
    """The seconds of the slowest stage or link of the best cut, and where the second, third, ... stage begins.

    stage(first, last): seconds of the layers [first, last), infinite if they do not fit. send(first): seconds to carry
    what the layers before `first` give to those from there on. ArgumentError if nothing fits.

    >>> work = [3.0, 1.0, 1.0, 1.0]
    >>> cut_stages(4, 2, lambda i, j: sum(work[i:j]), lambda i: 0.5)
    (3.0, [1])
    """
    found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # end of the stages so far -> slowest, where they begin
    for number in range(stages):
        longer: dict[int, tuple[float, list[int]]] = {}
        for first, (slowest, starts) in found.items():
            arrived = max(slowest, send(first)) if number else slowest
            for last in range(first + 1, layers + 1):
                here = max(arrived, stage(first, last)), [*starts, first] if number else starts
                if math.isfinite(here[0]):
                    longer[last] = min(longer.get(last, here), here)
        found = longer
    if layers not in found:
        raise ArgumentError(
            f"{layers} layers cannot be cut into {stages} stages", fix="use fewer stages, or more memory"
        )
    return found[layers]


@dataclass(frozen=True)
class LayerCosts:
    """What each layer of a graph takes: seconds on one rank, those of them that no rank is spared, bytes of variables
    with their state and without, and the bytes that a forward pass sends over the cut behind it."""

    names: list[str]
    seconds: list[float]
    launches: list[float]
    kept: list[int]
    trained: list[int]
    sent: list[int]

    @staticmethod
    def of(
        outputs: Sequence[Node],
        batches: Collection[str],
        stages: int,
        profile: MachineProfile,
        variables: Mapping[str, tuple[int, int]],
    ) -> LayerCosts:
        """Those of a graph of known sizes; variables: of each trained one how often its bytes are kept, and these.

        An update counts once per micro-batch, as adding its gradient does, which takes about as long."""
        names, forward = layers_of(outputs, batches, stages)
        none, sent = [0] * len(names), crossing(outputs, forward, len(names))
        found = LayerCosts(names, [0.0] * len(names), [0.0] * len(names), [*none], none, sent)
        alone = {name: k for k, name in enumerate(names)}  # where every layer would be a stage of its own
        for node, k in stages_of(outputs, phases(outputs, batches), label_by(alone)).items():
            if k != EVERYWHERE and node.inputs:
                found.seconds[k] += profile.seconds(node)
                found.launches[k] += profile.device.launch
            elif k != EVERYWHERE and node.role is Role.VARIABLE:
                times, nbytes = variables.get(node.name, (0, 0))
                found.kept[k] += times * nbytes
                found.trained[k] += nbytes
        return found


def cut_by_seconds(layers: LayerCosts, stages: int, link: Channel, budget: float = math.inf) -> dict[str, int]:
    """Layer -> stage, for a graph whose sizes are those of a micro-batch of one rank.

    link: between stages. The variables of a stage may have `budget` bytes.
    """
    time, room = ([0, *itertools.accumulate(found)] for found in (layers.seconds, layers.kept))

    def stage(first: int, last: int) -> float:
        return time[last] - time[first] if room[last] - room[first] <= budget else math.inf

    _, starts = cut_stages(len(layers.names), stages, stage, lambda first: 2 * link.message(layers.sent[first - 1]))
    return {name: sum(start <= k for start in starts) for k, name in enumerate(layers.names)}


def moved(cut: Mapping[str, int]) -> list[dict[str, int]]:
    """The cuts in which one layer, the first or last of a stage with others, is on the stage before or behind.

    >>> moved({"up": 0, "middle": 0, "down": 1})
    [{'up': 0, 'middle': 1, 'down': 1}]
    """
    found = []
    for (a, s), (b, t) in itertools.pairwise(cut.items()):
        for name, to in ((a, t), (b, s)) if s != t else ():
            made = {**cut, name: to}
            found += [made] if {*made.values()} == {*cut.values()} else []
    return found


def replicated_stages(
    layers: LayerCosts, speeds: Sequence[float], microbatches: int, link: Channel, budget: float = math.inf
) -> tuple[float, list[int], dict[str, int]]:
    """About how long a step takes that is cut into stages of any numbers of ranks, which share a micro-batch; these
    numbers, and layer -> stage. `layers` are those of a whole micro-batch; speeds: factors on the time of each rank.

    After PipeDream too: a stage on more ranks computes less, but sums its gradients. A step takes all stages one after
    the other once, and the slowest for all micro-batches but one. The fastest way to each layer with each number of
    ranks is kept, which need not be part of the fastest of all. ArgumentError if nothing fits.
    """
    ranks = len(speeds)
    time, launch = ([0.0, *itertools.accumulate(found)] for found in (layers.seconds, layers.launches))
    room, trained = ([0, *itertools.accumulate(found)] for found in (layers.kept, layers.trained))
    found = {(0, 0): (0.0, 0.0, [0], list[int]())}  # end, ranks -> all stages once, the slowest's rest, ends, sizes
    for last in range(1, len(layers.names) + 1):
        for used, size, first in itertools.product(range(ranks), range(1, ranks + 1), range(last)):
            if used + size > ranks or (first, used) not in found or room[last] - room[first] > budget:
                continue
            once, rest, ends, sizes = found[first, used]
            least = launch[last] - launch[first]
            mine = max(speeds[used : used + size]) * (least + (time[last] - time[first] - least) / size)
            summed = link.seconds("all_reduce", size, trained[last] - trained[first]) if size > 1 else 0.0
            once += mine + (2 * link.message(layers.sent[first - 1]) if first else 0.0)
            made = once, max(rest, (microbatches - 1) * mine + summed), [*ends, last], [*sizes, size]
            known = found.get((last, used + size), made)
            found[last, used + size] = min(known, made, key=lambda m: m[0] + m[1])
    if (len(layers.names), ranks) not in found:
        raise ArgumentError(
            f"{len(layers.names)} layers, of up to {max(layers.kept):,} bytes, fit into no stages on {ranks} ranks "
            f"with {budget:,.0f} bytes each",
            fix="raise the budget, or split variables",
        )
    once, rest, ends, sizes = found[len(layers.names), ranks]
    cut = {name: sum(end <= k for end in ends[1:]) for k, name in enumerate(layers.names)}
    return once + rest, sizes, cut
