"""Every operator of a graph, the ways to split it over a group of ranks, and what they cost: tables for `eliminate`.

The search space is OptCNN's, read from the operators' own sharding rules: all ranks compute the whole, or each its part
of one factor. Variables and feeds are operators too, kept whole or split along an axis, so that data parallelism, a
weight that is split, and one that is kept in parts and gathered are three choices for one variable. An edge costs the
change of layout on it, and its adjoint in backward. There sums stand for duplicates, and what is read in parts of what
all have is read whole. The tables know nothing of overlap, nor of all that `deduce` makes of a choice; the simulator
does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.graph import Node, rewrite, topological
from ...core.memory import types_of
from ...core.op import Role
from ...dist.layout.deduce import updating
from ...dist.layout.layout import DUP, SUM
from ...dist.layout.rules import ShardingRule, rule_of
from ...passes import sparsify_updates
from ..costs.links import in_bucket
from ..costs.profile import MachineProfile
from .elimination import eliminate

DUAL = -9  # the adjoint of SUM: all have the value, and each some terms of its gradient
HALF = -10  # less an axis: all have the value, and each a part of its gradient
DEAR = ((1.0, True), (0.5, True), (2.0, True), (1.0, False))  # times what communication costs, and if feeds may be cut


@dataclass(frozen=True)
class Option:
    """The roles that an operator wants of its inputs, those of its outputs, and whether the ranks share the work."""

    wants: tuple[int, ...]
    outs: tuple[int, ...]
    shared: bool = False
    anchor: int = -1  # the input that has to bring the split, where no variable does


@dataclass(frozen=True)
class Found:
    """The axis along which each variable is computed with (`split`), or only kept (`stored`), and each feed cut."""

    seconds: float
    split: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    feeds: dict[str, int] = field(default_factory=dict)


def forth(role: int) -> int:
    """The role in which a value lies."""
    return DUP if role <= DUAL else role


def back(role: int) -> int:
    """The role in which its gradient lies."""
    return HALF - role if role <= HALF else {DUAL: SUM, SUM: DUP}.get(role, role)


def experts_of(outputs: Sequence[Node]) -> dict[str, int]:
    """The variables that hold one weight for each expert: name -> axis of the experts.

    Such an axis stands in the data that the weight is multiplied by and in the product: it is never summed over. What
    is computed with products along it, such as a bias, is of the experts too.

    >>> import hetu as ht
    >>> sent = ht.placeholder("sent", (4, 9, 8))
    >>> up, bias = (ht.variable(name, ht.init.zeros, (4, n, 16)) for name, n in (("up", 8), ("bias", 1)))
    >>> experts_of([ht.einsum("ecd,edf->ecf", sent, up) + bias])
    {'up': 0, 'bias': 0}
    """
    found, along = dict[str, int](), dict[Node, int]()  # values, and the axis of the experts
    for node in topological(outputs):
        trained = {k: i for k, i in enumerate(node.inputs) if i.role is Role.VARIABLE and i.attrs["trainable"]}
        followed = [k for k, i in enumerate(node.inputs) if i in along]
        product = len(node.inputs) == 2 and [i.ndim for i in trained.values()] == [3]
        if node.tags.get("gradient") or not (followed or product) or (rule := rule_of(node)) is None:
            continue
        axes = [rule.inputs[k][along[node.inputs[k]]] for k in followed if along[node.inputs[k]] < len(rule.inputs[k])]
        factors = {axis[0] for axis in axes if len(axis) == 1}
        if product and not followed:
            data, weight, made = ({f for axis in term for f in axis} for term in (*rule.inputs, rule.outputs[0]))
            factors = data & weight & made if (data & weight) - made else set()
        for factor in factors:
            places = {i.name: rule.place(rule.inputs[k], factor) for k, i in trained.items()}
            found |= {name: axis for name, axis in places.items() if axis is not None}
            if (axis := rule.place(rule.outputs[0], factor)) is not None:
                along[node] = axis
    return found


class Operators:
    """The operators of the forward pass of `outputs`, whose sizes are those of one data-parallel part of a batch.

    Each is split over `ranks` ranks that follow each other, of which there are `data` groups. batches: names of the
    feeds that are cut along their first axis. trained: names of variables -> how often its bytes are kept, with its
    state.
    """

    def __init__(
        self,
        outputs: Sequence[Node],
        batches: Collection[str],
        trained: Mapping[str, int],
        profile: MachineProfile,
        ranks: int,
        data: int = 1,
    ) -> None:
        self.trained, self.profile, self.ranks, self.data = trained, profile, ranks, data
        self.link = profile.cluster.link(range(ranks))
        self.batches = {*batches}
        self.second = set[Node]()  # of operators that are taken apart into two
        outputs = rewrite(outputs, self._in_two)
        late = updating(outputs := sparsify_updates(outputs))
        self.updates = defaultdict[str, float](float)  # seconds of updating each variable
        self.rows = dict[str, int]()  # bytes of a table's gradient where it is that of the rows looked up
        for update in late:
            if (rule := update.op.row_update) is not None:
                self.rows[update.inputs[0].name] = int(update.inputs[rule.tables + 1].tensor.nbytes)
            for variable in (i for i in update.inputs if i.role is Role.VARIABLE and i.name in trained):
                self.updates[variable.name] += profile.seconds(update)
        nodes = [n for n in topological(outputs) if n not in late and not n.tags.get("gradient")]
        read = {i for n in nodes for i in n.inputs}  # optimizer state is not
        self.nodes = [n for n in nodes if n.role is not Role.ITEM and (n.inputs or n in read)]
        self.reads = Counter(i for n in self.nodes for i in n.inputs)
        self.number = {n: k for k, n in enumerate(self.nodes)}
        self.active = set[Node]()  # what gradients flow through
        for n in nodes:
            if n.name in trained if n.role is Role.VARIABLE else any(i in self.active for i in n.inputs):
                self.active.add(n)
        self.readers = Counter(i for n in topological(outputs) for i in n.inputs)
        self.times = {n: self._computing(n) for n in self.nodes if n.inputs}
        self.options = [self._options(n) for n in self.nodes]

    def _in_two(self, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        """An operator of the forward pass as the two in it, so that a sum may be scattered between them."""
        if node.op.decompose_rule is None or node.op.update or node.op.row_update or node.tags.get("gradient"):
            return None
        made = node.op.decompose_rule(*inputs, **node.attrs)
        if not isinstance(made, Node) or len({*topological([made])} - {*topological(inputs)}) != 2:
            return None
        self.second.add(made)
        return made

    def choices(self) -> list[Found]:
        """The fastest choices for all operators, each once: if communication costs what it does, less, or more, and if
        no feed is cut: gradients flatten batches, and need those whole that do not divide, which tables do not know.
        """
        edges, found = [*self._edges()], dict[Any, Found]()
        for dear, fed in DEAR:
            seconds, picks = self._at(0.0, [(u, v, dear * cost) for u, v, cost in edges], fed)
            if math.isfinite(seconds):
                found.setdefault(picks, self._read((seconds, picks)))
        return [*found.values()]

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

    def _at(self, price: float, edges: Sequence[Any], fed: bool = True) -> tuple[float, tuple[int, ...]]:
        """The seconds and options of the best choice where a byte that is kept costs `price` seconds."""
        costs = [self._seconds(n, price) for n in self.nodes]
        for node, of in zip(self.nodes, costs):
            of[1:] += 0.0 if fed or node.role is not Role.PLACEHOLDER else math.inf
        cost, picks = eliminate(costs, edges)
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
            known = self.trained if node.role is Role.VARIABLE else self.batches
            axes = range(node.ndim if node.name in known else 0)
            return [Option((), (r,)) for r in (DUP, *(a for a in axes if int(node.shape[a]) >= self.ranks))]
        whole = Option((DUP,) * len(node.inputs), (DUP,) * len(types_of(node)))
        rule = rule_of(node) if not any(isinstance(i.type, tuple) for i in node.inputs) else None
        if rule is None:
            return [whole]
        splits = (option for f in self._factors(node, rule) for option in self._splits(node, rule, f))
        return [whole, *self._passing(node), *splits, *self._halves(node, rule)]

    def _passing(self, node: Node) -> Iterator[Option]:
        """Sums that are yet to be completed pass what is linear, unless others read them too; backward as well."""
        inputs, outs = node.inputs, len(types_of(node))
        if node.op.linear == "joint":
            yield Option((SUM,) * len(inputs), (SUM,) * outs)
            return
        active = [k for k, i in enumerate(inputs) if i in self.active]
        for k in node.op.linear if len(active) == 1 else ():
            if k in active and self.readers[inputs[k]] == 1:
                for role in (SUM, DUAL):
                    yield Option(tuple(role if j == k else DUP for j in range(len(inputs))), (role,) * outs)

    def _halves(self, node: Node, rule: ShardingRule) -> Iterator[Option]:
        """All compute the whole, and a gradient that comes in parts goes on so, unless it needs parts of a variable."""
        for factor in self._factors(node, rule):
            *places, out = (rule.place(term, factor) for term in (*rule.inputs, rule.outputs[0]))
            cut = {i for i, p in zip(node.inputs, places) if i.role is Role.VARIABLE and p is not None}
            free = [i in self.active and (node.op.linear == "joint" or cut <= {i}) for i in node.inputs]
            if out is not None and len(rule.outputs) == 1 and any(free):
                backs = [DUAL if p is None else HALF - p for p in places]
                yield Option(tuple(b if f else DUP for b, f in zip(backs, free)), (HALF - out,))

    def _factors(self, node: Node, rule: ShardingRule) -> list[str]:
        """Those that an input has as the major one of an axis, and that may be split."""
        found = dict.fromkeys(axis[0] for term in rule.inputs for axis in term if axis)
        known = "window" in node.op.defaults
        free = [f for f in found if f not in rule.fixed or node.op.decompose_rule is not None]
        return [f for f in free if (f not in rule.windowed or known) and rule.can_split(f, self.ranks)]

    def _splits(self, node: Node, rule: ShardingRule, factor: str) -> list[Option]:
        """The ways to split one factor: one for each value that may bring the split."""
        places = [rule.place(term, factor) for term in (*rule.inputs, *rule.outputs)]
        wants = tuple(DUAL if p is None else p for p in places[: len(node.inputs)])
        outs = tuple(SUM if p is None else p for p in places[len(node.inputs) :])
        bringing = [k for k, want in enumerate(wants) if want != DUAL]
        given = any(node.inputs[k].role is Role.VARIABLE for k in bringing)
        return [Option(wants, outs, True, k) for k in ([-1] if given else bringing)]

    # -- costs -------------------------------------------------------------------------------------------------------

    def _seconds(self, node: Node, price: float) -> np.ndarray:
        """Of each option: computing, what is done on other axes of the mesh, and bytes at their price."""
        if node.inputs:
            return np.array([self._working(node, option) for option in self.options[self.number[node]]])
        found = []
        for option in self.options[self.number[node]]:
            parts = 1 if option.outs[0] == DUP else self.ranks
            seconds = price * self._bytes(node, option) + self.updates.get(node.name, 0.0) / parts
            if node in self.active:
                rows = 1 if option.outs[0] == 0 else parts
                seconds += self._added(node, parts, rows, range(0, self.data * self.ranks, self.ranks))
            found.append(seconds)
        return np.array(found)

    def _working(self, node: Node, option: Option) -> float:
        """Seconds of an operator and of the gradients of its inputs; one that is needed whole is gathered."""
        joint = node.op.linear == "joint"  # the gradient is that of the output, or a view of it
        wants = [want for i, want in zip(node.inputs, option.wants) if i in self.active and not joint]
        whole, split = self.times[node]
        if option.outs[0] > HALF:
            return (1 + len(wants)) * (split if option.shared else whole)
        rest = wants.count(DUP)
        gather = self._change(back(option.outs[0]), DUP, int(node.tensor.nbytes)) if rest else 0.0
        return (1 + rest) * whole + (len(wants) - rest) * split + gather

    def _computing(self, node: Node) -> tuple[float, float]:
        """Seconds of a rank that computes all of it, or its part; a view is free."""
        if node.op.view_rule is not None:
            return 0.0, 0.0
        whole, launch = self.profile.seconds(node), self.profile.device.launch
        return whole, min(whole, launch + max(0.0, whole - launch) / self.ranks)

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
                    made = [option.outs[index] for option in self.options[u]]
                    costs = [[self._edge(v, k, has, made, option) for option in self.options[v]] for has in made]
                    together[u, v] = together[u, v] + np.array(costs)
        for (u, v), cost in together.items():
            yield u, v, cost

    def _edge(self, v: int, k: int, has: int, made: Collection[int], option: Option) -> float:
        """Bringing a value, of those in which it can be `made` in the role `has`, to the input `k` of an operator, and
        its gradient back."""
        node, want = self.nodes[v], option.wants[k]
        value = node.inputs[k]
        if self._is_barred(v, k, has, made, option):
            return math.inf
        if value.role is Role.PLACEHOLDER:
            return 0.0  # of which all have the whole
        nbytes = int(value.tensor.nbytes)
        seconds = self._change(forth(has), forth(want), nbytes)
        if value in self.active:
            src, dst = back(want), back(has)
            if src >= 0 and value.inputs:  # such parts of a gradient are of no use there, but for variables
                serves = all(i.role is Role.VARIABLE for i in value.inputs if i in self.active)
                dst = src if serves else dst if src in made else DUP
            seconds += self._change(src, dst, nbytes) if value.inputs else self._summed(value, src, dst)
        if has <= HALF and want >= 0 and node in self.second:  # both are one operator
            whole, split = self.times[value]
            seconds += split - whole
        if has == DUP and want >= 0 and option.outs[0] == SUM and value.role is not Role.VARIABLE:
            whole, split = self.times[node]  # gradients of other inputs read what all have
            seconds += (whole - split) * sum(i in self.active for j, i in enumerate(node.inputs) if j != k)
        return seconds

    def _is_barred(self, v: int, k: int, has: int, made: Collection[int], option: Option) -> bool:
        """Whether `deduce` never does so: it invents no split or terms, and keeps a split if it can, also backward."""
        value, want = self.nodes[v].inputs[k], option.wants[k]
        if want != has and (option.anchor == k or want == SUM or has == DUAL):
            return True
        if has >= 0:
            return not option.shared and self._kept_split(v, k, has)
        if has <= HALF:
            return back(want) != back(has) and (back(want) != DUP or self.reads[value] == 1)
        return has == DUP and HALF - back(want) in {*made} - {DUAL}

    def _kept_split(self, v: int, k: int, has: int) -> bool:
        """Whether an operator can compute its part of an input `k` in parts with weights that all ranks have."""
        weights = [j for j, i in enumerate(self.nodes[v].inputs) if i.role is Role.VARIABLE]
        return any(o.shared and o.wants[k] == has and all(o.wants[j] < 0 for j in weights) for o in self.options[v])

    def _change(self, src: int, dst: int, nbytes: int, late: bool = False) -> float:
        """Seconds to bring an array from one role to another; `late` if it waits for others in a bucket."""
        if src in (dst, DUP):
            return 0.0
        if src == SUM:
            kind, given = ("reduce_scatter" if dst >= 0 else "all_reduce"), nbytes
        else:
            kind, given = ("all_to_all" if dst >= 0 else "all_gather"), nbytes // self.ranks
        return in_bucket(self.link, kind, self.ranks, given) if late else self.link.seconds(kind, self.ranks, given)

    def _summed(self, variable: Node, src: int, dst: int) -> float:
        """Seconds to bring a gradient to where it is waited for: each number of it, or the rows that were looked up, of
        which a rank needs all, or all of the columns that it keeps."""
        if src == SUM and dst == DUP:  # among all ranks at once
            ranks = range(self.data * self.ranks)
            return self._added(variable, 1, self.ranks, ranks) - self._added(variable, 1, 1, ranks[:: self.ranks])
        seconds = self._change(src, dst, int(variable.tensor.nbytes), late=True)
        if src != SUM or (rows := self.rows.get(variable.name)) is None:
            return seconds
        kind = "all_to_all" if dst > 0 else "all_gather"
        return min(seconds, in_bucket(self.link, kind, self.ranks, rows // self.ranks))

    def _added(self, variable: Node, parts: int, rows: int, ranks: Sequence[int]) -> float:
        """Seconds in which ranks add up one of so many parts of a gradient, or gather those of the rows looked up."""
        link, nbytes = self.profile.cluster.link(ranks), int(variable.tensor.nbytes) // parts
        seconds = in_bucket(link, "all_reduce", len(ranks), nbytes)
        if (looked_up := self.rows.get(variable.name)) is None:
            return seconds
        return min(seconds, in_bucket(link, "all_gather", len(ranks), looked_up // rows))
