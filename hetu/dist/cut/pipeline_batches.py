"""Pipelines in which every micro-batch is a batch of its own: what looks at a whole batch looks at a micro-batch.

The graph has the size of one micro-batch. `Averaging` updates once a step, by gradients that are averaged over the
micro-batches; statistics that layers keep, such as those of batch norm, are averaged too (Y. Huang et al., "GPipe",
2019). `PipeDream` updates after each: new weights are new values in the graph, and a stashed version is simply a value
that is still needed.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ...core.errors import GraphError
from ...core.graph import OPS, Node, origin_of
from ...core.leaf import random_state
from ...core.op import Role
from ...core.placement import Local
from ...core.types import Box, is_float
from ..layout.layout import DUP, MAX, MIN, SUM, Layout
from .partition import here
from .pipeline_layouts import Stages, lift, unsplit, within_microbatch
from .pipeline_schedule import BACKWARD, FORWARD, Action
from .pipeline_stages import EVERYWHERE, START, UPDATE
from .pipeline_strategy import Staged
from .pipeline_walk import Pipelined, shifted

RUN = 40  # bits between the random numbers of two micro-batches


class OwnBatches(Pipelined):
    """Walks the schedule with a graph of the size of one micro-batch, whose random numbers differ."""

    def taken(self, node: Node, box: Box) -> Box:
        axis = self.strategy.batch_axis(node)
        if axis is not None:  # the graph has the size of a micro-batch, the feed that of all
            box = shifted(box, axis, here(self.slot) * int(node.shape[axis]))
        return super().taken(node, box)

    def is_cut(self, node: Node, have: Layout) -> bool:
        return self.strategy.batch_axis(node) is not None

    def random_numbers(self, state: Node) -> Node:
        """The state of random numbers for the current micro-batch."""
        if not self.slot:
            return state
        return OPS["add"](state, OPS["constant"].make((), {"value": np.array([0, self.slot << RUN], np.uint64)}))


class Averaging(OwnBatches):
    """Updates once, by what the micro-batches give on average.

    So gradients are those of the mean of their losses. Values for each example are joined along their axis of the
    batch, which the rules of layouts carry along.
    """

    def __init__(self, steps: Stages, strategy: Staged, rank: int, count: int) -> None:
        super().__init__(steps, strategy, rank, count)
        late = {i for n in steps.nodes if n.inputs and steps.phase[n] == UPDATE for i in n.inputs}
        self.averaged = {n for n in (*late, *steps.outputs) if self._is_own(n) and self._batch_axis(n) < 0}
        for node in self.averaged:
            if not isinstance(node.type, tuple) and not is_float(node.dtype):
                raise GraphError(
                    f"{node!r} is one of each of {count} micro-batches, and {node.dtype.name} has no average",
                    fix='make it a float, ht.astype(..., "float32"), or fetch what it has for each example',
                    site=node.site,
                )

    def _is_own(self, node: Node) -> bool:
        """Whether each micro-batch has a value of its own."""
        if node.inputs:
            return self.model.phase[node] in (FORWARD, BACKWARD)
        return node.role is Role.PLACEHOLDER and self.strategy.batch_axis(node) is not None

    def _laid(self, node: Node) -> Layout:
        return self.found.layouts[node][0] if node.inputs else here(self.model.leaf(node, False))

    def _batch_axis(self, node: Node) -> int:
        """The axis of the batch, negative if there is none."""
        return self._laid(node).parts[0].axes[0][0]

    def _is_extreme(self, node: Node) -> bool:
        """Whether a value is still to be compared with those of other ranks, so that terms must not be added."""
        return any(role in (MAX, MIN) for role, _ in self._laid(node).axes().values())

    def home(self, node: Node) -> int | None:
        return self.slot if node is random_state or self._is_own(node) else super().home(node)

    def read(self, node: Node, phase: str) -> Node | None:
        local = super().read(node, phase)
        return self.random_numbers(here(local)) if node is random_state else local

    def added(self, node: Node) -> int:
        return SUM if node in self.averaged and not self._is_extreme(node) else DUP

    def value(self, node: Node, want: Layout, phase: str = "") -> Node | None:
        if self.slot is not None or not self._is_own(node) or isinstance(node.type, tuple):
            return super().value(node, want, phase)
        key = None, node, want, "all"
        if key not in self.made:
            make = self._average if node in self.averaged else self._joined
            self.made[key] = make(node, within_microbatch(want), phase)
        return self.made[key]

    def is_split(self, effect: Node) -> bool:
        return any(self._is_own(i) and i not in self.averaged for i in effect.inputs)

    def term(self, node: Node, want: Layout) -> Node | None:
        value = super().term(node, want)
        shared = value is not None and self.slot is not None and self.phase.get(node) == BACKWARD
        return self._share(here(value)) if shared else value

    def _average(self, node: Node, want: Layout, phase: str) -> Node | None:
        if self._is_extreme(node):
            parts = [self.value(node, lift(want, 1), phase) for _ in self._slots()]
            return None if parts[0] is None else self._share(functools.reduce(OPS["add"], map(here, parts)))
        total = self.totals[node]
        mean = None if total is None else self._share(total)
        return self.moved(node, mean, self._laid(node), lift(want, 1), phase)

    def _joined(self, node: Node, want: Layout, phase: str) -> Node | None:
        axis = self._batch_axis(node)
        whole = unsplit(want, axis)
        parts = [self.value(node, lift(whole, 1), phase) for _ in self._slots()]
        joined = None
        if parts[0] is not None:
            joined = OPS["concat"].make(tuple(map(here, parts)), {"axis": axis})
            joined = self._share(joined) if self.model.phase.get(node) == BACKWARD else joined
        shape = tuple(int(size) * (self.count if d == axis else 1) for d, size in enumerate(node.shape))
        return joined if whole == want else self._reshard(node.dtype, joined, whole, want, shape)

    def _fetched(self, node: Node) -> Node:
        rows = {n.shape[axis] for n in self.model.nodes if (axis := self.strategy.batch_axis(n)) is not None}
        if node in self.averaged and not isinstance(node.type, tuple) and 1 in rows and 1 in node.shape:
            raise GraphError(  # rules of layouts do not follow an axis of 1
                f"{node!r} of micro-batches of one row has no axis that is known to be that of the batch",
                fix="make micro-batches of two rows at least, or fetch a mean",
                site=node.site,
            )
        return super()._fetched(node)

    def _share(self, value: Node) -> Node:
        """A micro-batch's share of a value of all of them together."""
        return value * (1 / self.count)


class PipeDream(OwnBatches):
    """Every micro-batch updates the weights of a stage as soon as its backward pass there is done.

    A micro-batch uses one version of the weights for both passes: the newest when its forward pass begins.
    """

    def __init__(self, steps: Stages, strategy: Staged, rank: int, count: int) -> None:
        super().__init__(steps, strategy, rank, count)
        self.newest: dict[Node, Node | None] = {}
        self.stashed: dict[tuple[int | None, Node], Node | None] = {}
        for (stage, phase), sent in self.exports.items():
            if phase == START and sent:
                self._refuse(next(iter(sent))[0], stage)
        for reader in steps.nodes:
            mine = steps.stage.get(reader)
            if reader.inputs and steps.phase[reader] == UPDATE:
                for i in reader.inputs:
                    if steps.stage.get(i, EVERYWHERE) not in (EVERYWHERE, mine) and not self.is_awaited(i, reader):
                        self._refuse(i, steps.stage[i])

    def is_awaited(self, node: Node, update: Node) -> bool:
        """Passes that a stage's own backward pass follows have made it: any forward ones, and those backward after it.

        Such as the rows for a table, which nothing computes with on its stage.
        """
        mine, phase = self.model.stage[update], self.phase.get(node, START)
        later = mine < self.model.stage[node]
        return mine != EVERYWHERE and (phase == FORWARD or (phase == BACKWARD and later))

    def _refuse(self, node: Node, stage: int) -> None:
        raise GraphError(
            f"{node!r} of stage {stage} is needed by the update of another, but PipeDream updates each on its own",
            fix='use schedule="1f1b" for shared variables and clipping by the global norm',
            site=node.site,
        )

    def run(self, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()) -> Local:
        self.updates = updates
        return super().run(fetches, updates, effects)

    def start(self) -> None:
        pass  # nodes that depend on the weights alone are computed anew for each version

    def compute(self, action: Action) -> None:
        stage, phase = action.slot.stage, action.slot.phase
        if phase == FORWARD:
            self.visit_all(self._own(stage, START))
        self.visit_all(self.groups[stage, phase])
        if phase == BACKWARD:
            self._update(stage)

    def _own(self, stage: int, phase: str) -> list[Node]:
        """The nodes of a stage, and those everywhere for the ranks of the stage."""
        stages = (stage, EVERYWHERE) if self.rank in self.strategy.stages[stage].ranks else (stage,)
        mine = {n for s in stages for n in self.groups[s, phase]}
        return [n for n in self.model.nodes if n in mine]

    def _update(self, stage: int) -> None:
        self.visit_all(self._own(stage, UPDATE))
        here = self.rank in self.strategy.stages[stage].ranks
        new = {}
        for variable, node in self.updates.items():
            home = self.strategy.homes.get(variable.name, EVERYWHERE)
            if home == stage or (home == EVERYWHERE and here):
                with origin_of(node, event=self.event):
                    new[variable] = self.value(node, lift(self.strategy.store(variable), 1), UPDATE)
        self.newest |= new

    def finish(self, updates: Mapping[Node, Node], effects: Collection[Node]) -> dict[Node, Node]:
        mine = {v: self.strategy.local_variable(v, self.rank) for v in updates}
        return {local: here(self.newest[v]) for v, local in mine.items() if local is not None}

    def _fetched(self, node: Node) -> Node:
        """Scalars averaged over the micro-batches, other values joined along the first axis."""
        with origin_of(node, event=self.event):
            parts = [here(self.value(node, lift(self.strategy.whole, 1), UPDATE)) for _ in self._slots()]
            if node.ndim:
                return OPS["concat"].make(tuple(parts), {"axis": 0})
            total: Node = functools.reduce(OPS["add"], parts)
            return total / self.count

    def home(self, node: Node) -> int | None:
        return self.slot

    def read(self, node: Node, phase: str) -> Node | None:
        local = super().read(node, phase)
        if phase == UPDATE:
            return self.newest.get(node, local)
        key = self.slot, node
        if key not in self.stashed:
            drawn = node is random_state
            self.stashed[key] = self.random_numbers(here(local)) if drawn else self.newest.get(node, local)
        return self.stashed[key]
