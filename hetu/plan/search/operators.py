"""Every operator of a graph, the ways to split it over a group of ranks, and what they cost: tables for `eliminate`.

The search space is OptCNN's, read from the operators' own sharding rules: all ranks compute the whole, or each its part
of one factor. Variables and feeds are operators too, kept whole or split along an axis, so that data parallelism, a
weight that is split, and one that is kept in parts and gathered are three choices for one variable. An edge costs the
change of layout on it, and its adjoint in backward, where sums stand for duplicates. The tables know nothing of
overlap, nor of what `deduce` makes of a choice; the simulator does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.graph import Node, topological
from ...core.memory import types_of
from ...core.op import Role
from ...dist.layout.deduce import updating
from ...dist.layout.layout import DUP, SUM
from ...dist.layout.rules import ShardingRule, rule_of
from ..costs.links import Channel, in_bucket
from ..costs.profile import MachineProfile
from .elimination import eliminate

BACKWARD = 3  # forward and backward together, as a multiple of forward


@dataclass(frozen=True)
class Option:
    """The roles that an operator wants of its inputs, those of its outputs, and whether the ranks share the work."""

    wants: tuple[int, ...]
    outs: tuple[int, ...]
    shared: bool = False
    anchored: bool = True  # a variable or several values can bring the split; else the one value that is read must

    def gradient(self, k: int) -> int:
        """The role in which the gradient of an input arises."""
        return SUM if self.shared and self.wants[k] == DUP else self.wants[k]


@dataclass(frozen=True)
class Found:
    """The axis along which each variable is computed with (`split`), or only kept (`stored`), and each feed cut."""

    seconds: float
    split: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    feeds: dict[str, int] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, list[str]]:
        """What is done -> the variables and axes it is done to."""
        found = {"split": self.split, "kept in parts": self.stored}
        return {how: [f"{name} by axis {axis}" for name, axis in axes.items()] for how, axes in found.items()}


def experts_of(outputs: Sequence[Node]) -> dict[str, int]:
    """The variables that hold one weight for each expert: name -> axis of the experts.

    Such an axis stands in the data that the weight is multiplied by and in the product: it is never summed over.

    >>> import hetu as ht
    >>> sent = ht.placeholder("sent", (4, 9, 8))
    >>> experts_of([ht.einsum("ecd,edf->ecf", sent, ht.variable("up", ht.init.zeros, (4, 8, 16)))])
    {'up': 0}
    """
    found: dict[str, int] = {}
    for node in topological(outputs):
        names = [i.name for i in node.inputs if i.role is Role.VARIABLE and i.attrs["trainable"] and i.ndim == 3]
        if len(node.inputs) != 2 or len(names) != 1 or node.tags.get("gradient") or (rule := rule_of(node)) is None:
            continue
        at = next(k for k, i in enumerate(node.inputs) if i.name == names[0])
        data, weight, made = (
            {f for axis in term for f in axis} for term in (rule.inputs[1 - at], rule.inputs[at], rule.outputs[0])
        )
        for factor in data & weight & made if (data & weight) - made else ():
            if (axis := rule.place(rule.inputs[at], factor)) is not None:
                found[names[0]] = axis
    return found


class Operators:
    """The operators of the forward pass of `outputs`, whose sizes are those of one data-parallel part of a batch.

    ranks: the group to split over, of which there are `data`, joined by the link `across`. batches: names of the feeds
    that are cut along their first axis. trained: names of variables -> how often its bytes are kept, with its state.
    """

    def __init__(
        self,
        outputs: Sequence[Node],
        batches: Collection[str],
        trained: Mapping[str, int],
        profile: MachineProfile,
        ranks: Sequence[int],
        data: int = 1,
        across: Channel | None = None,
    ) -> None:
        self.trained, self.profile, self.ranks = trained, profile, len(ranks)
        self.link, self.data, self.across = profile.cluster.link(ranks), data, across
        self.batches = {*batches}
        late = updating(outputs)
        nodes = [n for n in topological(outputs) if n not in late and not n.tags.get("gradient")]
        read = {i for n in nodes for i in n.inputs}  # optimizer state is not
        self.nodes = [n for n in nodes if n.role is not Role.ITEM and (n.inputs or n in read)]
        self.number = {n: k for k, n in enumerate(self.nodes)}
        self.active = set[Node]()  # what gradients flow through
        for n in nodes:
            if n.name in trained if n.role is Role.VARIABLE else any(i in self.active for i in n.inputs):
                self.active.add(n)
        self.options = [self._options(n) for n in self.nodes]

    def best(self, room: float = math.inf) -> Found:
        """The fastest choice for all operators; if it keeps more than `room` bytes of variables, the fastest at the
        lowest price of a byte at which it does not."""
        edges = [*self._edges()]
        low, high, found = 0.0, 1e-12, self._at(0.0, edges)
        while self._kept(found[1]) > room and high < 1.0:
            low, high, found = high, 10 * high, self._at(high, edges)
        for _ in range(8 if low else 0):
            price = math.sqrt(low * high)
            tried = self._at(price, edges)
            low, high, found = (low, price, tried) if self._kept(tried[1]) <= room else (price, high, found)
        return self._read(found)

    def _at(self, price: float, edges: Sequence[Any]) -> tuple[float, tuple[int, ...]]:
        """The seconds and options of the best choice where a byte that is kept costs `price` seconds."""
        cost, picks = eliminate([self._seconds(n, price) for n in self.nodes], edges)
        return cost - price * self._kept(picks), picks

    def _kept(self, picks: Sequence[int]) -> float:
        return sum(self._bytes(n, self.options[k][picks[k]]) for k, n in enumerate(self.nodes))

    def _read(self, found: tuple[float, tuple[int, ...]]) -> Found:
        seconds, picks = found
        picked = {n: self.options[k][picks[k]] for k, n in enumerate(self.nodes)}
        result, wanted = Found(seconds), dict[Node, int]()
        for n in self.nodes:
            for i, want in zip(n.inputs, picked[n].wants):
                wanted[i] = max(want, wanted.get(i, DUP))
        for n, option in picked.items():
            role = option.outs[0]
            if n.role is Role.PLACEHOLDER and role != DUP:
                result.feeds[n.name] = role
            elif n.name in self.trained and n.role is Role.VARIABLE and max(role, wanted.get(n, DUP)) != DUP:
                together = wanted.get(n, DUP) != DUP
                (result.split if together else result.stored)[n.name] = wanted[n] if together else role
        return result

    # -- options -----------------------------------------------------------------------------------------------------

    def _options(self, node: Node) -> list[Option]:
        if not node.inputs:
            axes: Sequence[int] = ()
            if node.role is Role.VARIABLE and node.name in self.trained:
                axes = range(node.ndim)
            elif node.role is Role.PLACEHOLDER and node.name in self.batches:
                axes = (0,)
            return [Option((), (r,)) for r in (DUP, *(a for a in axes if int(node.shape[a]) >= self.ranks))]
        whole = Option((DUP,) * len(node.inputs), (DUP,) * len(types_of(node)))
        rule = rule_of(node) if not any(isinstance(i.type, tuple) for i in node.inputs) else None
        return [whole, *(self._split(node, rule, f) for f in self._factors(node, rule))] if rule else [whole]

    def _factors(self, node: Node, rule: ShardingRule) -> list[str]:
        """Those that an input has as the major one of an axis, and that may be split."""
        found = dict.fromkeys(axis[0] for term in rule.inputs for axis in term if axis)
        known = "window" in node.op.defaults
        free = [f for f in found if f not in rule.fixed or node.op.decompose_rule is not None]
        return [f for f in free if (f not in rule.windowed or known) and rule.can_split(f, self.ranks)]

    def _split(self, node: Node, rule: ShardingRule, factor: str) -> Option:
        places = [rule.place(term, factor) for term in (*rule.inputs, *rule.outputs)]
        wants = tuple(DUP if p is None else p for p in places[: len(node.inputs)])
        outs = tuple(SUM if p is None else p for p in places[len(node.inputs) :])
        bringing = [i for i, want in zip(node.inputs, wants) if want != DUP]
        anchored = len(bringing) > 1 or bringing[0].role is Role.VARIABLE
        return Option(wants, outs, shared=True, anchored=anchored)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _seconds(self, node: Node, price: float) -> np.ndarray:
        """Of each option: computing, what is done on other axes of the mesh, and bytes at their price."""
        if node.inputs:
            whole, launch = self.profile.seconds(node), self.profile.device.launch
            split = min(whole, launch + max(0.0, whole - launch) / self.ranks)
            times = BACKWARD if node in self.active else 1
            return np.array([times * (split if o.shared else whole) for o in self.options[self.number[node]]])
        found = []
        for option in self.options[self.number[node]]:
            seconds = price * self._bytes(node, option)
            if node in self.active and self.data > 1 and self.across is not None:
                mine = int(node.tensor.nbytes) // (self.ranks if option.outs[0] != DUP else 1)
                seconds += in_bucket(self.across, "all_reduce", self.data, mine)
            found.append(seconds)
        return np.array(found)

    def _bytes(self, node: Node, option: Option) -> float:
        if node.role is not Role.VARIABLE:
            return 0.0
        whole = int(node.tensor.nbytes) * self.trained.get(node.name, 1)
        return whole / (1 if option.outs[0] == DUP else self.ranks)

    def _edges(self) -> Iterator[tuple[int, int, np.ndarray]]:
        together: dict[tuple[int, int], Any] = defaultdict(float)
        for v, node in enumerate(self.nodes):
            for k, i in enumerate(node.inputs):
                source, index = (i.inputs[0], i.attrs["index"]) if i.role is Role.ITEM else (i, 0)
                if k not in node.op.like and i.role is not Role.CONSTANT and source in self.number:
                    u = self.number[source]
                    costs = [[self._edge(i, a, index, b, k) for b in self.options[v]] for a in self.options[u]]
                    together[u, v] = together[u, v] + np.array(costs)
        for (u, v), cost in together.items():
            yield u, v, cost

    def _edge(self, value: Node, given: Option, index: int, option: Option, k: int) -> float:
        """Bringing a value from where it is made to where it is read, and its gradient back."""
        has, want, nbytes = given.outs[index], option.wants[k], int(value.tensor.nbytes)
        if not option.anchored and want not in (DUP, has):
            return math.inf  # `deduce` never invents a split
        seconds = self._change(has, want, nbytes)
        if value in self.active:
            seconds += self._change(option.gradient(k), max(has, DUP), nbytes, late=not value.inputs)
        return seconds

    def _change(self, src: int, dst: int, nbytes: int, late: bool = False) -> float:
        """Seconds to bring an array from one role to another; `late` if it waits for others in a bucket."""
        if src in (dst, DUP):
            return 0.0
        if src == SUM:
            kind, given = ("reduce_scatter" if dst >= 0 else "all_reduce"), nbytes
        else:
            kind, given = ("all_to_all" if dst >= 0 else "all_gather"), nbytes // self.ranks
        return in_bucket(self.link, kind, self.ranks, given) if late else self.link.seconds(kind, self.ranks, given)
