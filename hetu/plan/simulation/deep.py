"""What a step of a deep model takes, from a few of its blocks and three micro-batches: equal parts are compiled once.

Whoever describes a model may say how many blocks follow one another in it, all alike, and give it at any depth
(`Described`). A pipeline of five blocks, in stages of one, one, two and one, then tells what each pass of a stage takes
and keeps: one of n blocks does what one of a single block does, and n - 1 times what the stage of two does more. Passes
are played in the order of the schedule. Without stages, a model of three blocks is compared with one of two. Left out:
ranks of one stage that are not alike, and how collectives at the end of a step hide behind more blocks than were seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...core.graph import Graph, Node
from ...core.leaf import scope
from ...core.op import LEAVES, Role
from ...core.operators import barrier
from ...core.subgraph import SubGraph
from ...dist.cut.builders import Parallel
from ...dist.cut.pipeline_builder import Pipeline
from ...dist.cut.pipeline_schedule import BACKWARD, FORWARD, Action, Schedule
from ...dist.cut.pipeline_stages import layers_of
from ...look.profiler import flops
from ..costs.profile import MachineProfile
from .instructions import (
    AT_ONCE,
    SENDS,
    Exchange,
    RankProgram,
    SimulatedCollective,
    SimulatedJob,
    Wait,
    shapes_of,
    typed,
)
from .simulate import Cost, Play, Player
from .timeline import COMMUNICATION, COMPUTE, GRADIENT, Timeline

SHALLOW = (0, 1, 2, 2, 3)  # the stages of five blocks
SEEN = 3  # micro-batches that are compiled
DRAWN = 6  # stages from the first to the last of which the timeline has a rank, besides the one that computes most
OTHERS = -1  # stands in `Cost.sent` for whomever a rank sends to
PARTS = ("start", "F0", "F", "B0", "B", "send F", "wait F", "send B", "wait B", "finish")
SECONDS, COMPUTING, SENT = range(3)  # the rows of `Passes.parts`


@dataclass(frozen=True)
class Described:
    """A model of `layers` equal blocks, or without any: `at` makes what a step of it with so many fetches and updates.

    "tokens" or "samples" are counted, so many in a sample. The whole is made where it is asked for: it may be deep.
    """

    at: Callable[[int], Sequence[Any]]
    unit: str = "samples"
    length: int = 1
    layers: int = 0

    def __post_init__(self) -> None:
        self.shallow  # noqa: B018 - what is wrong with the model is told now

    @cached_property
    def entries(self) -> Sequence[Any]:
        """What a step of the whole fetches and updates."""
        return self.at(self.layers)

    @cached_property
    def sub(self) -> SubGraph:
        return SubGraph("plan", self.entries)

    @cached_property
    def shallow(self) -> SubGraph:
        """The model with at most one block, which is fed as the whole is."""
        return SubGraph("plan", self.at(1)) if self.layers > 1 else self.sub

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Those of what is fed."""
        return shapes_of(self.shallow, batch)

    def operations(self, batch: int) -> int:
        """Those of forward and backward on a batch: not of the optimizer, and nothing that is computed once more."""
        if self.layers > 2:
            one, two = (replace(self, layers=depth).operations(batch) for depth in (1, 2))
            return one + (self.layers - 1) * (two - one)
        nodes = Graph(typed(self.sub, self.shapes(batch))).nodes
        again = set[Node]()  # what a barrier lets be computed once more, and what follows from that alone
        for node in nodes:
            made = {i for i in node.inputs if i.role not in LEAVES}
            if node.op is barrier or (made and made <= again):
                again.add(node)
        return sum(flops(node) for node in nodes if node not in again and not node.tags.get("update"))


@dataclass(frozen=True)
class Passes:
    """One stage: seconds, those of them that compute and bytes sent, of each of `PARTS`; and the bytes that are kept.

    "F0" and "B0" are the passes of the first micro-batch. `kept` has what `_kept` says.
    """

    parts: np.ndarray
    kept: np.ndarray

    def more(self, block: Passes, times: float) -> Passes:
        return Passes(self.parts + times * block.parts, self.kept + times * block.kept)

    def peak(self, under_way: int, microbatches: int) -> int:
        """The most bytes with so many micro-batches between their passes."""
        fixed, stored, during, after, fed = self.kept
        return int(fixed + max(during + under_way * stored, after) + microbatches * fed)

    def of(self, name: str, row: int = SECONDS) -> float:
        return float(self.parts[row, PARTS.index(name)])


def passes(
    job: SimulatedJob, program: RankProgram, profile: MachineProfile, stage: int, order: Sequence[Action]
) -> Passes:
    """What `program` takes by itself: collectives of its stage begin when it comes to them, messages come at once."""
    parts, part_of, rank = np.zeros((3, len(PARTS))), _parts(stage, order), program.ranks[0]
    size = job.world_size // (1 + max(a.slot.stage for a in order))
    now, busy, ends = 0.0, dict[Any, float](), dict[int, float]()
    for node in program.order:
        before, sent = now, 0
        computing = profile.seconds(node)
        now += computing
        part = part_of.get(node.tags.get("event", 0))
        for action in job.action(node, program, rank) if node.role is Role.COMMUNICATION else ():
            if isinstance(action, SimulatedCollective):
                count, link = len(action.group), profile.cluster.link([r % size for r in action.group])
                seconds = link.seconds(action.kind, count, action.nbytes)
                ends[action.token] = busy[action.group] = max(now, busy.get(action.group, 0.0)) + seconds
                sent += SENDS[action.kind](count, action.nbytes)
            if isinstance(action, Wait) or (isinstance(action, SimulatedCollective) and action.token == AT_ONCE):
                now = max(now, ends[action.token])
            if isinstance(action, Exchange):
                sent += sum(nbytes for _, nbytes in action.sends)
        if part is not None:
            parts[:, part] += now - before, computing, sent
    parts[:2, 0] += profile.overhead(program.fed)
    return Passes(parts, _kept(program, order, stage))


def _parts(stage: int, order: Sequence[Action]) -> dict[int, int]:
    """The part of `PARTS` that the events of a stage are; those of the second micro-batch stand for all that follow."""
    found = {0: 0, len(order) + 1: len(PARTS) - 1}
    for event, (_, kind, slot) in enumerate(order, 1):
        first = slot.microbatch == 0
        if kind == "compute" and slot.stage == stage and slot.microbatch < 2:
            found[event] = PARTS.index(f"{slot.phase}0" if first else slot.phase)
        elif kind == "transfer" and slot.microbatch == 1:
            before = slot.stage + (1 if slot.phase == FORWARD else -1)
            if slot.stage == stage:
                found[event] = PARTS.index(f"send {slot.phase}")
            elif before == stage:
                found[event] = PARTS.index(f"wait {slot.phase}")
    return found


def _kept(program: RankProgram, order: Sequence[Action], stage: int) -> np.ndarray:
    """Bytes: those of variables and of gaps in the arena, of a micro-batch between its passes, of all else at most
    during passes, of all at most at the end, and of one fed micro-batch."""
    mine = {event: a.slot for event, a in enumerate(order, 1) if a.kind == "compute" and a.slot.stage == stage}
    events = [node.tags.get("event", 0) for node in program.order]
    end, first = len(order) + 1, [e for e, slot in mine.items() if slot.microbatch == 0]
    forward = max((i for i, event in enumerate(events) if event == first[0]), default=-1)
    live, stored = np.array(program.live), 0
    for s in (s for s in program.storages if s.home is None and not s.on_host):
        last = min(s.last, len(events) - 1)
        stored += s.nbytes if s.first <= forward < last and events[last] == first[-1] else 0
    begun = [sum(slot.phase == FORWARD for e, slot in mine.items() if e <= event) for event in events]
    ended = [sum(slot.phase == BACKWARD for e, slot in mine.items() if e < event) for event in events]
    under_way, late = np.subtract(begun, ended), np.array(events) == end
    during, after = (live - stored * under_way)[~late], live[late]
    gaps = program.peak - program.fed - live.max(initial=0)
    fed = program.fed / len({a.slot.microbatch for a in order})
    return np.array([gaps, stored, during.max(initial=0), after.max(initial=0), fed])


def parts_of(builder: Parallel) -> tuple[int, int]:
    """The stages and the micro-batches of a plan."""
    return (builder.stages or 1, builder.microbatches) if isinstance(builder, Pipeline) else (1, builder.accumulate)


class DeepSteps:
    """Simulated steps of a deep model. What was compiled for one plan serves all with passes of as many rows."""

    def __init__(self, blocks: Described, profile: MachineProfile, batch: int, precision: str) -> None:
        self.blocks, self.profile, self.batch, self.precision = blocks, profile, batch, precision
        self.compiled: dict[Any, list[Passes]] = {}
        self.shallow: dict[int, SubGraph] = {}
        self.sent = 0.0  # bytes of a row between stages, once it is known

    def at(self, depth: int) -> SubGraph:
        """The model at another depth, in which equal parts have equal names."""
        if depth not in self.shallow:
            with scope("plan"):
                self.shallow[depth] = SubGraph("plan", self.blocks.at(depth), self.precision)
        return self.shallow[depth]

    def simulate(self, builder: Parallel, world: int) -> Cost:
        """The cost of a step under a `Pipeline` of the 1F1B schedule, or under `Parallel`, which may accumulate."""
        micro = parts_of(builder)[1]
        stages, _ = self._stages(builder, world)
        schedule, size = Schedule.of("1f1b", len(stages), micro), world // len(stages)
        time, timeline = self._played(schedule, stages, size)
        peak = [p.peak(schedule.live(s), micro) for s, p in enumerate(stages)]
        times = np.array([1, 1, micro - 1, 1, micro - 1, micro, micro, micro, micro, 1])
        sent = {(rank, OTHERS): int(stages[rank // size].parts[SENT] @ times) for rank in range(world)}
        note = f"foretold from {len(SHALLOW)} of {self.blocks.layers} blocks and {SEEN} micro-batches at most"
        return Cost(time, tuple(peak[rank // size] for rank in range(world)), sent, timeline, note)

    def _stages(self, builder: Parallel, world: int) -> tuple[list[Passes], list[int]]:
        """The stages, and how many blocks each has: so that the slowest is fast."""
        (stages, micro), layers = parts_of(builder), self.blocks.layers
        rows = self.batch // micro
        if stages == 1:
            plain = builder.but(accumulate=min(SEEN, builder.accumulate))
            (two,), (three,) = (self.seen(plain, depth, world, rows * plain.accumulate) for depth in (2, 3))
            return [two.more(three.more(two, -1), layers - 2)], [layers]
        cut = {name: SHALLOW[k] for name, k in self.block_of(self.at(len(SHALLOW))).items()}
        shallow = builder.but(stages=max(SHALLOW) + 1, microbatches=SEEN, cut=cut)
        size = world // stages
        first, one, two, last = self.seen(shallow, len(SHALLOW), size * (max(SHALLOW) + 1), rows * SEEN)
        self.sent = first.of("send F", SENT) * (builder.data or 1) / rows
        block, found = two.more(one, -1), [first, *[one] * (stages - 2), last]
        busy, counts = [p.of("F") + p.of("B") for p in found], [1] * stages
        for _ in range(layers - stages):
            s = min(range(stages), key=lambda s: (busy[s], -s))  # of equals the later, which keeps less under way
            busy[s], counts[s] = busy[s] + block.of("F") + block.of("B"), counts[s] + 1
        return [p.more(block, count - 1) for p, count in zip(found, counts)], counts

    def cut(self, builder: Pipeline, world: int, sub: SubGraph) -> dict[str, int]:
        """Layer -> stage, for the whole model."""
        stage_of = [s for s, count in enumerate(self._stages(builder, world)[1]) for _ in range(count)]
        return {name: stage_of[block] for name, block in self.block_of(sub).items()}

    def seen(self, builder: Parallel, depth: int, world: int, batch: int) -> list[Passes]:
        """The passes of each stage under a plan that is compiled as it is; of unlike ranks the most of each part."""
        key = repr(builder), parts_of(builder), depth, world, batch
        if key not in self.compiled:
            entries, shapes = self.at(depth).entries, self.blocks.shapes(batch)
            job = SimulatedJob(entries, builder, world, shapes, self.precision, self.profile)
            stages = max(1, len(job.strategy.grids()))
            micro = job.strategy.microbatches
            found, order = dict[int, Passes](), Schedule.of("1f1b", stages, micro).order
            for program in job.programs:
                stage = program.ranks[0] * stages // world
                mine = passes(job, program, self.profile, stage, order)
                other = found.setdefault(stage, mine)
                found[stage] = Passes(np.maximum(mine.parts, other.parts), np.maximum(mine.kept, other.kept))
            self.compiled[key] = [found[stage] for stage in range(stages)]
        return self.compiled[key]

    def block_of(self, sub: SubGraph) -> dict[str, int]:
        """Layer -> the number of its block; what is before or behind them belongs to the first or last."""
        one, two, names = (layers_of(s.written.outputs, s.placeholders)[0] for s in (self.at(1), self.at(2), sub))
        size = len(two) - len(one)
        before = sum(a == b for a, b in zip(one, two)) - size
        most = (len(names) - len(one)) // size
        return {name: min(most, max(0, (k - before) // size)) for k, name in enumerate(names)}

    def _played(self, schedule: Schedule, stages: Sequence[Passes], size: int) -> tuple[float, Timeline]:
        """Seconds of a step, and what some stages do and hold when: passes in order, and messages between them."""
        cluster, last = self.profile.cluster, len(stages) - 1
        play = Play(cluster, lambda pair: cluster.link((min(pair), max(pair) + size - 1)))
        mine = defaultdict[int, list[tuple[str, str, Exchange | None]]](list)
        busiest = max(range(len(stages)), key=lambda s: stages[s].of("F", COMPUTING) + stages[s].of("B", COMPUTING))
        shown = {k * last // (DRAWN - 1) for k in range(DRAWN)} | {busiest}
        for _, kind, (_, _, s, phase, number) in schedule.order:
            other = s + (1 if phase == FORWARD else -1)
            if kind == "compute":
                mine[s].append((phase if number else f"{phase}0", f"{phase}{number}", None))
            elif 0 <= other <= last:
                nbytes = int(stages[s].of(f"send {phase}", SENT))
                mine[s].append((f"send {phase}", f"send {phase}{number}", Exchange(((other * size, nbytes),), ())))
                mine[other].append((f"wait {phase}", f"take {phase}{number}", Exchange((), (s * size,))))
        for s, found in enumerate(stages):
            player = Player(s * size, s in shown, int(found.kept[0] + schedule.microbatches * found.kept[-1]))
            play.add(player, _steps(play, player, found, mine[s]))
        return play.run(), play.timeline


def _steps(
    play: Play, player: Player, found: Passes, mine: Sequence[tuple[str, str, Exchange | None]]
) -> Iterator[None]:
    """What a stage does in a step: parts with their names in a picture, each with what it then sends or waits for."""
    _, stored, during, after, _ = found.kept
    held = {"start": 0 if found.of("F0") else max(during, after), "finish": after}  # without passes it begins with all
    seconds, computing = (dict(zip(PARTS, row)) for row in found.parts[:SENT].tolist())
    under_way = 0
    for part, name, message in (("start", "start", None), *mine, ("finish", "update", None)):
        under_way += part[0] == FORWARD
        live = int(under_way * stored + held.get(part, 0 if message else during))
        player.compute(computing[part], name, live, GRADIENT if part[0] == BACKWARD else COMPUTE)
        player.compute(seconds[part] - computing[part], name, live, COMMUNICATION)
        under_way -= part[0] == BACKWARD
        if message:
            yield from play.act(player, name, message)
