"""Ranks that average in groups (`strategies/partners.py`), played on a clock by the controller that will group them.

A rank's step there is not one of all ranks together, so its seconds are not those to compare. What it is worth is told
by a noisy quadratic (G. Zhang et al., "Which Algorithmic Choices Matter at Which Batch Sizes?", NeurIPS 2019): a step
takes a rank's model a part `RATE` of its way to the optimum and adds noise of its own, and groups average by their
weights, so that who is behind adds less. *Seconds* are those in which the farthest model comes as far as by one step
of all ranks together, times its variance over theirs, as a rate that is so much smaller has the same noise. With small
rates only the number of gradients counts, as X. Miao et al. prove for large numbers of steps ("Heterogeneity-Aware
Distributed Machine Learning Training via Partial Reduce", SIGMOD 2021). Where there is little noise, groups are worth
more than is said here. Left out: states of optimizers, and speeds that change.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.op import Role
from ...ps.store.partial_reduce import Controller
from ...strategies.partners import Partial
from ..costs.profile import MachineProfile
from .instructions import SENDS, SimulatedJob
from .timeline import COMMUNICATION, COMPUTE, Event, Timeline

RATE = 0.1
SPANS = 40  # how often groups connect all ranks, until half of them are looked at
REQUEST = 200  # bytes to the controller, and from it


@dataclass
class Played:
    """Groups on a clock: seconds in which models come as far as by one step of all ranks, and their noise over its."""

    seconds: float = 0.0
    noise: float = 0.0
    last: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # rank -> begun, ready, went on
    met: dict[tuple[int, ...], float] = field(default_factory=lambda: defaultdict(float))  # groups -> how often a step


def play(seconds: Sequence[float], group: int, decay: float, together: Callable[[Sequence[int]], float]) -> Played:
    """Ranks that take so long for a step, and as long `together` for an average.

    >>> played = play([1, 1, 1, 3], group=3, decay=0.5, together=lambda members: 0.0)
    >>> print(f"{played.seconds:.2f} s, {played.noise:.2f} times the noise")
    1.10 s, 1.40 times the noise
    """
    ranks = len(seconds)
    controller, keeps = Controller(ranks, group, decay=decay), 1 - RATE
    whole = SPANS * (controller.span + 2)
    coming = [(float(each), rank, 0, 0.0) for rank, each in enumerate(seconds)]  # (ready, rank, iteration, begun)
    heapq.heapify(coming)
    mean, spread, waiting, played = np.ones(ranks), np.zeros((ranks, ranks)), dict[int, tuple[float, float]](), Played()
    marks, variance = list[tuple[float, float]](), list[float]()
    while len(marks) <= whole:
        now, rank, iteration, begun = heapq.heappop(coming)
        waiting[rank] = begun, now
        if (made := controller.add(rank, iteration, now)) is None:
            continue
        members, weights = [*made.members], np.array(made.weights)
        mean[members] *= keeps
        spread[members] *= keeps
        spread[:, members] *= keeps
        spread[members, members] += 1
        mean[members] = weights @ mean[members]
        spread[members] = weights @ spread[members]
        spread[:, members] = (spread[:, members] @ weights)[:, None]
        end = now + together(members)
        for member in members:
            played.last[member] = (*waiting.pop(member), end)
            heapq.heappush(coming, (end + seconds[member], member, made.iteration + 1, end))
        marks.append((now, -math.log(mean.max())))
        variance.append(float(spread.diagonal().max()))
        if len(marks) > whole // 2 + 1:
            played.met[made.members] += 1.0
    (before, far), (after, farther) = marks[whole // 2], marks[-1]
    steps = (farther - far) / -math.log(keeps)
    played.seconds = (after - before) / steps
    played.noise = float(np.mean(variance[whole // 2 :])) * ranks * (1 - keeps**2)
    for each in played.met:
        played.met[each] /= steps
    return played


def seconds_alone(job: SimulatedJob, profile: MachineProfile) -> list[float]:
    """What each rank computes in a step."""
    found = [0.0] * job.world_size
    for program in job.programs:
        plain = profile.overhead(program.fed) + sum(map(profile.seconds, program.order))
        for rank in program.ranks:
            found[rank] = plain * profile.speeds.get(rank, 1.0)
    return found


def played_of(job: SimulatedJob, strategy: Partial, profile: MachineProfile) -> tuple[Played, int]:
    """The groups of a job, and the bytes that each member gives."""
    nodes = job.programs[0].order
    nbytes = sum(int(n.tensor.nbytes) for n in nodes if n.role is Role.COMMUNICATION)
    asked = 2 * profile.cluster.outer.message(REQUEST)

    def together(members: Sequence[int]) -> float:
        return asked + profile.cluster.link(members).seconds("all_reduce", len(members), nbytes)

    return play(seconds_alone(job, profile), strategy.group, strategy.decay, together), nbytes


def timeline_of(played: Played, traced: int) -> Timeline:
    """The last step of the first ranks."""
    origin, events = min(begun for begun, _, _ in played.last.values()), list[Event]()
    for rank, (begun, ready, end) in played.last.items():
        if rank < traced:
            begun, ready, end = begun - origin, ready - origin, end - origin
            events.append(Event(rank, COMPUTE, "step", begun, ready))
            events.append(Event(rank, COMMUNICATION, "waits for partners, and averages", ready, end))
    return Timeline(tuple(sorted(events)))


def sent_by(played: Played, nbytes: int) -> dict[tuple[int, int], int]:
    """Bytes on each link in a step, along a ring in each group."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    for members, times in played.met.items():
        for a, b in zip(members, (*members[1:], members[0])):
            found[a, b] += times * SENDS["all_reduce"](len(members), nbytes)
    return {link: round(each) for link, each in sorted(found.items())}
