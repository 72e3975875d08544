"""One rank's walk through the schedule of a pipelined step, as one ordinary graph.

All ranks walk the one order of the schedule, and each keeps its own nodes, marked with their place in this order; the
memory plan and the program know only this mark of pipelines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ...core.graph import OPS, Node, origin_of, readers_of
from ...core.op import Role
from ...core.placement import Local
from ...core.types import Box, Shape
from ..layout.boxes import within
from ..layout.deduce import Grid, updating
from ..layout.layout import DUP, MAX, MIN, PENDING, SUM, Layout, Piece
from .bucket import Moment, join_collectives
from .partition import Key, Walk, gradients_of, here, levels_of
from .pipeline_layouts import Stages, lift, over_microbatches, stage_grid, unsplit, within_microbatch
from .pipeline_schedule import BACKWARD, FORWARD, Action, Schedule
from .pipeline_stages import EVERYWHERE, START, UPDATE
from .pipeline_strategy import Staged

COMBINE = {SUM: "add", MAX: "maximum", MIN: "minimum"}


class Pipelined(Walk):
    """Walks the schedule: forward and backward passes once per micro-batch, everything else once.

    `slot` is the current micro-batch, None outside of them; `event` is the place in the order of the schedule.
    """

    strategy: Staged

    def __init__(self, steps: Stages, strategy: Staged, rank: int, count: int) -> None:
        late = updating(steps.outputs)
        super().__init__(steps.found, strategy, rank, late, levels_of(steps.outputs, steps.found, late))
        self.model, self.count = steps, count
        self.slot: int | None = None
        self.event = 0
        self.values: dict[tuple[int | None, Node], Node | None] = {}
        self.totals: dict[Node, Node | None] = {}
        self.phase = self._first_passes()
        self.groups: dict[tuple[int, str], list[Node]] = defaultdict(list)
        for node in steps.nodes:
            if node.inputs:
                self.groups[steps.stage[node], self.phase[node]].append(node)
        self.exports = self._exports()

    def _first_passes(self) -> dict[Node, str]:
        """The phases; what is made once belongs to the pass that reads it first, unless other stages read it too.

        So a weight that only a backward pass reads turned is neither waited for nor kept any earlier.
        """
        phase, stage, readers = dict(self.model.phase), self.model.stage, readers_of(self.model.nodes)
        for node in reversed(self.model.nodes):
            if phase.get(node) != START or stage[node] == EVERYWHERE:
                continue
            found = {(stage[r], phase[r]) for r in readers[node] if r is not None}
            if {s for s, _ in found} == {stage[node]}:
                phase[node] = next(p for p in (START, FORWARD, BACKWARD, UPDATE) if (stage[node], p) in found)
        return phase

    def _exports(self) -> dict[tuple[int, str], dict[tuple[Node, Layout], str]]:
        """(stage, phase) -> the values that it sends to other stages, in which layout, for which phase first."""
        found: dict[tuple[int, str], dict[tuple[Node, Layout], str]] = defaultdict(dict)
        phase, stage = self.phase, self.model.stage
        for reader in self.model.nodes:
            if not reader.inputs or reader.role is Role.ITEM:
                continue
            for i, want in zip(reader.inputs, self.found.wants[reader]):
                sender = stage.get(i, EVERYWHERE)
                if sender not in (EVERYWHERE, stage[reader]) and (
                    phase[reader] != UPDATE or self.is_awaited(i, reader)
                ):
                    made = phase.get(i, START)
                    sent = unsplit(want, over_microbatches(want)) if made == START else want  # it leaves once, whole
                    found[sender, made].setdefault((i, sent), phase[reader])
        return found

    def is_awaited(self, node: Node, update: Node) -> bool:
        """Whether an update on another stage takes a value as soon as it is there, and not at the end of the step."""
        return False

    def run(self, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()) -> Local:
        """This rank's part of the whole step."""
        self.owners = gradients_of(updates, self.updating)
        backward = any(phase == BACKWARD for phase in self.model.phase.values())
        stages = len(self.strategy.stages)
        begun = [Moment(self.event, next(self.numbers))] * stages  # by stage, when its last pass began
        self.start()
        for action in Schedule.of(self.strategy.schedule, stages, self.count, backward=backward).order:
            self.event += 1
            self.slot, stage = action.slot.microbatch, action.slot.stage
            if action.kind == "compute":
                self.since, begun[stage] = begun[stage], Moment(self.event - 0.5, next(self.numbers))
                self.compute(action)
            else:
                self.send(stage, action.slot.phase)
        self.event, self.slot = self.event + 1, None
        new = self.finish(updates, effects)
        acts = [act for node in effects for act in self._acts(node)]
        outputs = (*(self._fetched(node) for node in fetches), *new.values(), *acts)
        joined = join_collectives((*outputs, *self.unread(outputs)), self.turns, self.strategy.bucket_bytes)
        kept, end = len(fetches), len(fetches) + len(new)
        return Local(joined[:kept], joined[end:], dict(zip(new, joined[kept:end])), self.feeds)

    def start(self) -> None:
        """Make the nodes that come before the first pass."""
        self.visit_all(n for n in self.model.nodes if self.phase.get(n) == START)
        for stage in range(len(self.strategy.stages)):
            self.send(stage, START)

    def compute(self, action: Action) -> None:
        """Make a pass of one stage, and add its terms of sums over micro-batches to their totals."""
        stage, phase = action.slot.stage, action.slot.phase
        self.visit_all(self.groups[stage, phase])
        for node in self.groups[stage, phase]:
            if (role := self.added(node)) not in PENDING:
                continue
            with origin_of(node, event=self.event):
                part, total = self.values[self.slot, node], self.totals.get(node)
                self.totals[node] = part if total is None or part is None else OPS[COMBINE[role]](total, part)

    def added(self, node: Node) -> int:
        """How the values of all micro-batches become one: a sum, maximum or minimum; DUP if they don't."""
        return DUP if isinstance(node.type, tuple) else self.model.given(node)

    def send(self, stage: int, phase: str) -> None:
        """Send all that other stages need of a pass."""
        for (node, want), reader in self.exports[stage, phase].items():
            with origin_of(node, event=self.event):
                self.value(node, want, reader)

    def finish(self, updates: Mapping[Node, Node], effects: Collection[Node]) -> dict[Node, Node]:
        """The new values of this rank's variables."""
        late = (n for n in self.model.nodes if self.phase.get(n) == UPDATE and n not in effects)
        self.visit_all(sorted(late, key=lambda n: self.levels[n]))  # gradients before what is sent of them once more
        found = {}
        for variable, node in updates.items():
            with origin_of(node, event=self.event):
                value = self.value(node, lift(self.strategy.store(variable), self.model.count), UPDATE)
            if (local := self.strategy.local_variable(variable, self.rank)) is not None:
                found[local] = here(value)
        return found

    def _acts(self, node: Node) -> Iterator[Node]:
        """The local nodes of one that only acts: one for each micro-batch that it is split along."""
        for _ in self._slots() if self.is_split(node) else (None,):
            with origin_of(node, event=self.event):
                made = self._local(node, [self.term(i, want) for i, want in zip(node.inputs, self.found.wants[node])])
                if made is not None:
                    yield self.acting(made, within_microbatch(self.found.layouts[node][0]))

    def is_split(self, effect: Node) -> bool:
        """Whether it acts for each micro-batch by itself."""
        return self.model.given(effect) != DUP

    def term(self, node: Node, want: Layout) -> Node | None:
        """What one that only acts reads."""
        return self.value(node, want, UPDATE)

    def _fetched(self, node: Node) -> Node:
        """The whole value, on every rank."""
        with origin_of(node, event=self.event):
            return here(self.value(node, lift(self.strategy.whole, self.count), UPDATE))

    # -- nodes ----------------------------------------------------------------------------------------------------

    def _slots(self) -> Iterator[None]:
        """Make each micro-batch the current one, one after the other."""
        before = self.slot
        for slot in range(self.count):
            self.slot = slot
            yield
        self.slot = before

    def visit_all(self, nodes: Iterable[Node]) -> None:
        """Make these nodes, for the current micro-batch if there is one, unless they are made."""
        for node in nodes:
            if (key := (self.home(node), node)) in self.values:
                continue
            with origin_of(node, event=self.event):
                phase = self.phase[node]
                inputs = [self.value(i, want, phase) for i, want in zip(node.inputs, self.found.wants[node])]
                self.values[key] = self._local(node, inputs)

    def piece(self, layout: Layout, shape: Shape) -> Piece | None:
        """What this rank holds of the current micro-batch, as a part of the whole tensor of `shape`."""
        role = over_microbatches(layout)
        part = self._part(shape, role)
        found = within_microbatch(layout).pieces(part).get(self.rank)
        if found is None or role < 0:
            return found
        return found._replace(box=shifted(found.box, role, here(self.slot) * part[role]))

    def _part(self, shape: Shape, role: int) -> tuple[int, ...]:
        """The shape of one micro-batch of a tensor."""
        return tuple(int(size) // self.count if d == role else int(size) for d, size in enumerate(shape))

    def home(self, node: Node) -> int | None:
        """The slot in which to look for the value of a node."""
        once = self.model.phase.get(node, START) in (START, UPDATE)
        return None if once else self.slot or 0

    def value(self, node: Node, want: Layout, phase: str = "") -> Node | None:
        if node.role is Role.CONSTANT:
            return self._constant(node, want)
        if isinstance(node.type, tuple):
            return self.values[self.home(node), node]
        have = self._at_hand(node, want)
        role, need = over_microbatches(have), over_microbatches(want)
        if role >= 0 and need == DUP:
            return self._all_microbatches(node, role, within_microbatch(want), phase)
        if role in PENDING and need == DUP:
            local, role = self.totals[node], DUP
        else:
            local = self._made(node, have, phase)
        if role == DUP and need >= 0:
            return self._microbatch_of(node, have, local, want, phase)
        return self.moved(node, local, have, want, phase)

    def key(self, node: Node, want: Layout, phase: str = "") -> Key:
        slot = self.home(node) if over_microbatches(want) == DUP else self.slot
        return slot, *super().key(node, within_microbatch(want), phase)

    def moved(self, node: Node, local: Node | None, have: Layout, want: Layout, phase: str) -> Node | None:
        """`local` in another layout within a micro-batch; made once, or once per phase for a variable kept in parts."""
        src, dst = within_microbatch(have), within_microbatch(want)
        if src == dst:
            return local
        shape = self._part(node.shape, over_microbatches(want))
        if node.role is not Role.VARIABLE and phase != UPDATE:
            return self.once(node, want, phase, lambda: self._reshard(node.dtype, local, src, dst, shape))
        late = "update" if phase == UPDATE else phase
        return self.once(node, want, phase, lambda: self.brought(node, local, src, dst, shape, late))

    def _at_hand(self, node: Node, want: Layout) -> Layout:
        """The layout in which a value was made; feeds are at hand on every stage."""
        if node.role is Role.VARIABLE:
            return lift(self.strategy.store(node), self.model.count)
        if node.role is Role.PLACEHOLDER:
            fed = here(self.model.leaf(node, False))
            return fed if node.name in self.strategy.local else stage_grid(Grid.of(want), False).carry(fed)
        return self.found.layouts[node][0]

    def _made(self, node: Node, have: Layout, phase: str) -> Node | None:
        """This rank's part of a value in the layout in which it was made."""
        if node.role is Role.VARIABLE:
            return self.read(node, phase)
        if node.role is Role.PLACEHOLDER:
            return self._fed(node, have)
        return self.values.get((self.home(node), node))

    def read(self, node: Node, phase: str) -> Node | None:
        """The value of a variable for readers in `phase`."""
        return self.strategy.local_variable(node, self.rank)

    def is_cut(self, node: Node, have: Layout) -> bool:
        """Whether the parts of a feed differ between micro-batches."""
        return over_microbatches(have) >= 0

    def _fed(self, node: Node, have: Layout) -> Node | None:
        key = self.slot if self.is_cut(node, have) else None, node, have, "fed"
        if key not in self.made:
            piece = self.piece(have, node.shape)
            self.made[key] = None if piece is None else self.placeholder(node, piece)
        return self.made[key]

    def taken(self, node: Node, box: Box) -> Box:
        found, axis = super().taken(node, box), self.strategy.batch_axis(node)
        if node.name not in self.strategy.local or axis is None or not self.slot:
            return found
        return shifted(found, axis, self.slot * found[axis][1])

    def _microbatch_of(self, node: Node, have: Layout, local: Node | None, want: Layout, phase: str) -> Node | None:
        """The current micro-batch of a value that exists as a whole."""
        whole = unsplit(within_microbatch(want), over_microbatches(want))
        local = self.moved(node, local, have, lift(whole, self.model.count), phase)
        piece = self.piece(want, node.shape)
        if piece is None:
            return None
        outer = whole.pieces(node.shape)[self.rank].box
        return OPS["getitem"](local, key=within(piece.box, outer)[: len(outer)])

    def _all_microbatches(self, node: Node, axis: int, want: Layout, phase: str) -> Node | None:
        """The parts of all micro-batches, joined."""
        key = None, node, want, "all"
        if key not in self.made:
            whole = unsplit(want, axis)
            parts = [self.value(node, lift(whole, self.count, axis), phase) for _ in self._slots()]
            joined = None if parts[0] is None else OPS["concat"].make(tuple(map(here, parts)), {"axis": axis})
            self.made[key] = joined if whole == want else self._reshard(node.dtype, joined, whole, want, node.shape)
        return self.made[key]


def shifted(box: Box, axis: int, offset: int) -> Box:
    return tuple((low + offset, high + offset) if d == axis else (low, high) for d, (low, high) in enumerate(box))
