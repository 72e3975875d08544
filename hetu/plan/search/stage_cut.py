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


def cut_by_seconds(
    outputs: Sequence[Node],
    batches: Collection[str],
    stages: int,
    profile: MachineProfile,
    link: Channel,
    kept: Mapping[str, int],
    budget: float = math.inf,
) -> dict[str, int]:
    """Layer -> stage by the seconds of a profile, for a graph whose sizes are those of a micro-batch of one rank.

    link: between stages. kept: bytes of each trained variable with its state; those of a stage may be `budget`. An
    update counts once per micro-batch, as adding its gradient does, which takes about as long.
    """
    layers, forward = layers_of(outputs, batches, stages)
    sent, seconds, nbytes = crossing(outputs, forward, len(layers)), [0.0] * len(layers), [0] * len(layers)
    alone = {name: k for k, name in enumerate(layers)}  # where every layer would be a stage of its own
    for node, k in stages_of(outputs, phases(outputs, batches), label_by(alone)).items():
        if k != EVERYWHERE:
            seconds[k] += profile.seconds(node) if node.inputs else 0.0
            nbytes[k] += kept.get(node.name, 0) if node.role is Role.VARIABLE else 0
    time, room = ([0, *itertools.accumulate(found)] for found in (seconds, nbytes))

    def stage(first: int, last: int) -> float:
        return time[last] - time[first] if room[last] - room[first] <= budget else math.inf

    _, starts = cut_stages(len(layers), stages, stage, lambda first: 2 * link.message(sent[first - 1]))
    return {name: sum(start <= k for start in starts) for k, name in enumerate(layers)}
