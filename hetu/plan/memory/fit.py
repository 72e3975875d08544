"""Make one rank's step fit into its memory: free the largest values of the fullest moment until the rest fits.

The greedy search of TSplit (ICDE 2022), guided by the memory plan itself: at the instruction where most bytes live, the
largest values are made to go and the graph is planned anew. A value is dropped and computed again (`split.py`), first
whole, then in ever more parts; or it waits in the memory of the host (`swap.py`), if the profile knows the speed of the
way there (`DeviceFigures.host_bandwidth`). Then each value goes the way that takes fewer seconds, and the step competes
with those that only recompute or only swap. On a CPU the arena is host memory already, so a measured profile knows no
such way. Values are chosen by size, not by seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ...core.errors import BudgetError
from ...core.graph import Node
from ...core.memory import MemoryPlan, Storage, plan
from ...core.op import Role
from ...core.passes import Pass, applied
from ..costs.profile import MachineProfile
from .split import BatchSplit, batched
from .swap import Rewritten, Swap, gaps

PARTS = (1, 2, 4, 8, 16, 32)
CALL = 160  # bytes of a bound call: twenty words of C, between 14 and 24 on average of the steps that were measured


class TooLarge(BudgetError):
    """A step that needs `least` bytes: beside variables, or on a rank, if `Within` makes it fit."""

    def __init__(self, message: str, *, fix: str, least: int) -> None:
        super().__init__(message, fix=fix)
        self.least = least


def fit(
    fetches: Sequence[Node],
    updates: Mapping[Node, Node],
    budget: int,
    profile: MachineProfile | None = None,
    then: Sequence[Pass] = (),
) -> Rewritten:
    """The same step with at most `budget` bytes beside variables once the passes `then` are applied, which may take
    more. BudgetError if that is impossible.

    >>> import hetu as ht
    >>> h = x = ht.placeholder("x", (640, 32))
    >>> for _ in range(6):
    ...     h = ht.exp(ht.sin(h))
    >>> grad = ht.gradients(ht.sum(h), [x])
    >>> before = plan(grad, {}).arena_bytes
    >>> plan(*fit(grad, {}, budget=before * 3 // 4)).arena_bytes < before * 3 // 4
    True
    """
    profile = profile or MachineProfile()
    search = _GreedySearch(fetches, updates, budget, profile, then)
    ways = [(True, False), (False, True), (True, True)] if profile.device.host_bandwidth else [(True, False)]
    found = [search.smallest(drops, swaps) for drops, swaps in ways]
    if fitting := [step for step, nbytes in found if nbytes <= budget]:
        return min(fitting, key=lambda step: sum(map(profile.seconds, planned_for(profile, step).order)))
    least = min(nbytes for _, nbytes in found)
    try:
        fit(fetches, updates, least, profile, then)  # which frees less at a time, and may not come as far
    except TooLarge as error:
        least = error.least
    left = f"the {budget:,} left" if budget >= 0 else f"there are: they alone take {-budget:,} too many"
    raise TooLarge(
        f"a step needs at least {least:,} bytes beside variables, {least - budget:,} more than {left}",
        fix=f"raise the budget by {least - budget:,} bytes, use more ranks, or feed smaller batches",
        least=least,
    )


def planned_for(profile: MachineProfile, step: Rewritten) -> MemoryPlan:
    """The plan of a step, in which kernels of a GPU, whose memory is not that of the host, bring their own scratch."""
    return plan(*step, scratch=not profile.device.host_bandwidth)


class _GreedySearch:
    """Greedy searches for values to drop and to swap, which are nodes of the given graph."""

    def __init__(
        self,
        fetches: Sequence[Node],
        updates: Mapping[Node, Node],
        budget: int,
        profile: MachineProfile,
        then: Sequence[Pass],
    ) -> None:
        self.fetches, self.updates, self.budget, self.profile, self.then = fetches, updates, budget, profile, then
        self.outputs = (*fetches, *updates.values())
        self.rules = batched(self.outputs)

    def smallest(self, drops: bool, swaps: bool) -> tuple[Rewritten, int]:
        """The step in as few parts as make it fit, else the smallest, and its bytes."""
        found = []
        for parts in PARTS if drops else PARTS[:1]:
            found.append(self._search(parts, drops, swaps))
            if found[-1][1] <= self.budget:
                break
        return min(found, key=lambda f: f[1])

    def _search(self, parts: int, drops: bool, swaps: bool) -> tuple[Rewritten, int]:
        """The first step that fits, else the smallest one, and its bytes."""
        self.parts, self.drops, self.swaps = parts, drops, swaps
        self.dropped, self.swapped = set[Node](), set[Node]()
        best: tuple[Rewritten, int] | None = None
        while True:
            self._make()
            nbytes = self.plan.arena_bytes + beside(self.plan, self.step[0])
            if nbytes <= self.budget and (nbytes := self._once_done(self.step)) <= self.budget:
                return self.step, nbytes
            best = (self.step, nbytes) if best is None or nbytes < best[1] else best
            if not self._free(nbytes - self.budget):
                return best[0], self._once_done(best[0])

    def _once_done(self, step: Rewritten) -> int:
        """The bytes of a step as it will run."""
        outputs = applied(self.then, (*step[0], *step[1].values()))
        made = outputs[: len(step[0])], dict(zip(step[1], outputs[len(step[0]) :]))
        planned = planned_for(self.profile, made)
        return planned.arena_bytes + beside(planned, made[0]) + bound(self.profile, planned)

    def _make(self) -> None:
        """Make the step without the dropped and swapped values, and its plan. `made` has the new node of each given
        one, `late` those of the values that come back from the host."""
        self.split = BatchSplit(self.outputs, self.dropped, self.parts, self.rules)
        made = self.split.run()
        self.made, self.late = dict(self.split.made), dict[Node, Node]()
        self.step: Rewritten = made[: len(self.fetches)], dict(zip(self.updates, made[len(self.fetches) :]))
        self.plan = planned_for(self.profile, self.step)
        if away := {self.made[node] for node in self.swapped if node in self.made}:
            swap = Swap(*self.step, self.plan, away)
            self.step, self.plan = swap.step, planned_for(self.profile, swap.step)
            self.late = {node: swap.late[made] for node, made in self.made.items() if made in swap.late}
            self.made = {node: swap.made[made] for node, made in self.made.items()}

    def _free(self, excess: int) -> bool:
        """Drop or swap the largest values of the fullest moment until they make `excess` bytes; whether there are any.

        What came back from the host is dropped only if nothing else can be.
        """
        at, storages = _fullest(self.plan)
        for among in (self.made, self.late):
            means = self._means(storages, among, self._swappable(at, among))
            for _, nbytes, done, nodes in sorted(means, key=lambda m: -m[1]):
                if excess > 0:
                    done |= nodes
                    excess -= nbytes
            if means:
                return True
        return False

    def _means(
        self, storages: Sequence[Storage], among: Mapping[Node, Node], away: set[Node]
    ) -> list[tuple[float, int, set[Node], set[Node]]]:
        """The faster way to free each storage: (seconds, bytes, `dropped` or `swapped`, the nodes to put there)."""
        held: dict[int, set[Node]] = defaultdict(set)
        for node, made in among.items():
            if not isinstance(node.type, tuple) and (made, 0) in self.plan.roots:
                held[id(self.plan.storage(made))].add(node)
        found = []
        for storage in storages:
            ways = []
            if self.drops and (values := self._droppable(held[id(storage)])):
                ways.append((self._again_seconds(values), storage.nbytes, self.dropped, values))
            if waiting := held[id(storage)] & away:
                ways.append((2 * self.profile.between(storage.nbytes), storage.nbytes, self.swapped, waiting))
            found += [min(ways, key=lambda m: m[0])] if ways else []
        return found

    def _droppable(self, held: set[Node]) -> set[Node]:
        """The values to drop so that a storage is free; none if that is impossible, or done."""
        values = {node for node in held if self.split.can_drop(node)}
        others = held - values  # views, such as a transpose, are made again with what they look into
        free = values - self.split.dropped and all(self.made[node] in self.plan.views for node in others)
        return values if free else set()

    def _swappable(self, at: int, among: Mapping[Node, Node]) -> set[Node]:
        """Values that no instruction reads around `at`."""
        if not self.swaps:
            return set()
        known = gaps(self.plan, (*self.step[0], *self.step[1].values()))
        waiting = {value for value, gap in known.items() if gap.before < at < gap.after}
        return {
            node
            for node, made in among.items()
            if not isinstance(node.type, tuple)
            and self.plan.roots.get((made, 0)) in waiting
            and node not in self.swapped
            and (made not in self.plan.views or made.role is Role.ITEM)
        }

    def _again_seconds(self, values: Collection[Node]) -> float:
        """Seconds to compute values for each reader but one, with the dropped values that they need."""
        known: dict[Node, float] = {}

        def once(node: Node) -> float:
            source = node.inputs[0] if node.role is Role.ITEM else node
            if source not in known:
                gone = [i for i in source.inputs if i in self.dropped]
                known[source] = self.profile.seconds(source) + sum(map(once, gone))
            return known[source]

        return sum(once(node) * (len(self.split.readers[node]) - 1) for node in values)


def bound(profile: MachineProfile, planned: MemoryPlan) -> int:
    """Bytes of what instructions are bound to: those of a GPU lie in the memory of the host."""
    return 0 if profile.device.host_bandwidth else CALL * len(planned.order)


def beside(planned: MemoryPlan, fetches: Sequence[Node]) -> int:
    """Bytes outside the arena: buffers of feeds, copies that a step returns, and of values whose place others take."""
    updated = {*planned.late, *planned.donated.values()}
    aside = [value for value in planned.late.values() if planned.roots[value, 0][0] in updated]
    fed = (n for n in planned.nodes if n.role is Role.PLACEHOLDER)
    return sum(int(n.tensor.nbytes) for n in (*fed, *fetches, *aside))


def bytes_held(storages: Iterable[Storage], instructions: int) -> np.ndarray:
    """Bytes of the values in the arena during each instruction; less than the arena where it has gaps."""
    change = np.zeros(instructions + 1, np.int64)
    for s in (s for s in storages if s.home is None and not s.on_host):
        change[s.first] += s.nbytes
        change[min(s.last + 1, instructions)] -= s.nbytes
    held: np.ndarray = np.cumsum(change)[:-1]
    return held


def _fullest(planned: MemoryPlan) -> tuple[int, list[Storage]]:
    """The instruction where most of the arena is in use, and what lives then."""
    finals = {id(s): s for s in map(Storage.final, planned.storages.values())}.values()
    held = bytes_held(finals, len(planned.order))
    at = int(held.argmax()) if held.size else 0
    return at, [s for s in finals if s.home is None and not s.on_host and s.first <= at <= s.last]
