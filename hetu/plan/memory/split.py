"""Compute values again instead of keeping them, and in parts of the batch, so that they never exist as a whole.

After TSplit (X. Nie et al., "TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor
Splitting", ICDE 2022). A *dropped* value is computed by each of its readers from what is still there. A reader that
works on the samples of a batch one by one does so a part of the batch at a time, and its result is assembled in place;
one that joins them, such as the gradient of a weight, gets the value whole. So sums run over the same numbers in the
same order, and gradients keep their bits. One part is plain recomputation (T. Chen et al., 2016). Only the first axis
is split; `fit.py` chooses the values. What is made of parts is a chain `pad`, `set_rows`, `set_rows`, ..., one array
that is filled in place: a part is needed no longer than it takes to write it, while `concat` needs all of them beside
the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from ...core.backend import address
from ...core.errors import ShapeError
from ...core.graph import OPS, Node, origin_of, readers_of, topological
from ...core.op import Role, op
from ...core.types import TensorType
from ...dist.layout.rules import ShardingRule, rule_of
from ...ops.join import pad


def _at(axis: int, first: int, stop: int | None = None) -> tuple[Any, ...]:
    """The key of a range along one axis."""
    return (*(slice(None),) * axis, slice(first, stop), ...)


def _set_type(whole: TensorType, part: TensorType, *, first: int, axis: int = 0) -> TensorType:
    others = [t.shape[:axis] + t.shape[axis + 1 :] for t in (whole, part)]
    if others[0] != others[1] or whole.dtype != part.dtype or first + part.shape[axis] > whole.shape[axis]:
        raise ShapeError(f"{part} are no rows of {whole} from row {first}", fix="give rows of the same shape and dtype")
    return whole


@op(role=Role.MOVE, infer=_set_type, inplace={0: (0,)}, differentiable=False)
def set_rows(xp: ModuleType, whole: Any, part: Any, *, first: int, axis: int = 0) -> Any:
    """`whole` with `part` in place of its rows along `axis` from `first` on.

    >>> import hetu as ht
    >>> ht.evaluate(set_rows(ht.constant([1.0, 2.0, 3.0]), ht.constant([7.0]), first=1)).tolist()
    [1.0, 7.0, 3.0]
    """
    last = first + part.shape[axis]
    return xp.concat([whole[_at(axis, 0, first)], part, whole[_at(axis, last)]], axis=axis)


@set_rows.into
def set_rows_into(xp: ModuleType, out: Any, whole: Any, part: Any, *, first: int, axis: int) -> None:
    if address(out) != address(whole):
        xp.copyto(out, whole)
    xp.copyto(out[_at(axis, first, first + part.shape[axis])], part)


def batched(outputs: Sequence[Node]) -> dict[Node, tuple[ShardingRule, int]]:
    """The nodes that treat one axis of what they compute sample by sample, with their sharding rules and that axis.

    The axis is the first of what is fed or comes from other ranks; operators may move it.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (8, 4))
    >>> y = ht.relu(x)
    >>> [(node.op.name, axis) for node, (_, axis) in batched([ht.sum(y), ht.permute_dims(y, (1, 0)) + 1]).items()]
    [('relu', 0), ('permute_dims', 1), ('add', 1)]
    """
    found: dict[Node, tuple[ShardingRule, int]] = {}
    carried: dict[Node, int] = {}
    for node in topological(outputs):
        if node.role in (Role.PLACEHOLDER, Role.COMMUNICATION) and not isinstance(node.type, tuple) and node.ndim:
            carried[node] = 0
        elif node.role is Role.ITEM:
            carried |= {node: found[node.inputs[0]][1]} if node.inputs[0] in found else {}
        elif node.inputs and (made := _by_sample(node, carried)) is not None:
            found[node] = made
            carried[node] = made[1]
    return found


def _by_sample(node: Node, carried: Mapping[Node, int]) -> tuple[ShardingRule, int] | None:
    """The rule of a node and the axis of its results, all alike, that is the batch of inputs that have one."""
    if any(isinstance(i.type, tuple) for i in node.inputs) or (rule := rule_of(node)) is None:
        return None
    for i, term in zip(node.inputs, rule.inputs):
        axis = term[carried[i]] if i in carried and term else ()
        place = _place(axis, rule) if len(axis) == 1 and not {*axis} & {*rule.fixed, *rule.windowed} else None
        if place is not None and all(
            carried.get(other, at.index(axis)) == at.index(axis)
            for other, at in zip(node.inputs, rule.inputs)
            if axis in at
        ):
            return rule, place
    return None


def _place(axis: tuple[str, ...], rule: ShardingRule) -> int | None:
    """Where all results have an axis, if every value has it alone and at most once."""
    terms = (*rule.inputs, *rule.outputs)
    if any(sum(axis[0] in other for other in term) != term.count(axis) or term.count(axis) > 1 for term in terms):
        return None
    places = {term.index(axis) if axis in term else None for term in rule.outputs}
    return places.pop() if len(places) == 1 else None


class BatchSplit:
    """The graph in which no `dropped` value is kept for later; readers compute it in `parts` parts of the batch.

    Values that are not computed sample by sample, or that are fetched, cannot be dropped and stay as they are. `rules`
    are those of `batched`; `made` has the new node of every value that exists as a whole.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (4, 2))
    >>> h = ht.exp(x)
    >>> (y,) = BatchSplit([ht.sin(h)], {h}, parts=2).run()
    >>> [n.op.name for n in topological([y])][1:]
    ['getitem', 'exp', 'sin', 'pad', 'getitem', 'exp', 'sin', 'set_rows']
    """

    def __init__(
        self,
        outputs: Sequence[Node],
        dropped: Collection[Node],
        parts: int,
        rules: Mapping[Node, tuple[ShardingRule, int]] | None = None,
    ) -> None:
        self.outputs, self.rules = outputs, batched(outputs) if rules is None else rules
        self.readers = readers_of(topological(outputs))
        self.dropped = {d for d in dropped if self.can_drop(d)}
        self.parts = min([parts, *(int(d.shape[self._axis(d)]) for d in self.dropped)])
        self.made: dict[Node, Node] = {}

    def run(self) -> tuple[Node, ...]:
        for node in topological(self.outputs):
            if node not in self.dropped and not isinstance(node.type, tuple):
                self._whole(node)
        return tuple(self.made[node] for node in self.outputs)

    def can_drop(self, node: Node) -> bool:
        """Whether a value is computed sample by sample and not fetched. A gradient must also have a single reader,
        which works in parts: computing gradients again would mean computing all that they come from again."""
        if self._source(node) not in self.rules or node in self.outputs:
            return False
        readers = {*self.readers[node]}
        once = len(readers) == 1 and all(r is not None and self._source(r) in self.rules for r in readers)
        return once or not node.tags.get("gradient")

    def _source(self, node: Node) -> Node:
        """The node that computes a value."""
        return node.inputs[0] if node.role is Role.ITEM else node

    def _axis(self, node: Node) -> int:
        """Where the batch stands in what a node of the rules computes."""
        return self.rules[self._source(node)][1]

    def _whole(self, node: Node) -> Node:
        """The value of a node as a whole; in parts if it is dropped itself, or computed from what is."""
        if node in self.made:
            return self.made[node]
        source = self._source(node)
        with origin_of(node):
            if source in self.rules and (node in self.dropped or any(i in self.dropped for i in source.inputs)):
                self.made[node] = self._assembled(node)
            elif isinstance(source.type, tuple):
                if source not in self.made:
                    self.made[source] = self._again(source)
                self.made[node] = OPS["item"](self.made[source], index=node.attrs["index"])
            else:
                self.made[node] = self._again(node)
        return self.made[node]

    def _again(self, node: Node) -> Node:
        inputs = tuple(self._whole(i) for i in node.inputs)
        same = all(a is b for a, b in zip(inputs, node.inputs))
        return node if same else node.op.make(inputs, node.attrs)

    def _assembled(self, node: Node) -> Node:
        """All parts, one after the other; what they need of dropped values is theirs alone."""
        whole, axis = self._part(node, 0, {}), self._axis(node)
        if self.parts > 1:
            behind = int(node.shape[axis]) - whole.shape[axis]
            whole = pad(whole, pad_width=tuple((0, behind * (d == axis)) for d in range(node.ndim)))
        for k in range(1, self.parts):
            whole = set_rows(whole, self._part(node, k, {}), first=self._span(node, axis, k)[0], axis=axis)
        return whole

    def _span(self, node: Node, axis: int, k: int) -> tuple[int, int]:
        rows = int(node.shape[axis])
        return rows * k // self.parts, rows * (k + 1) // self.parts

    def _part(self, node: Node, k: int, memo: dict[Node, Node]) -> Node:
        """Part `k` of a value; `memo` has what was made for the same reader."""
        source = self._source(node)
        if source not in memo:
            (rule, axis), inputs = self.rules[source], []
            factor = rule.outputs[0][axis]
            for i, term in zip(source.inputs, rule.inputs):
                if factor not in term:
                    inputs.append(self._whole(i))
                elif i in self.dropped:
                    inputs.append(self._part(i, k, memo))
                else:
                    inputs.append(self._slice(i, term.index(factor), k))
            low, high = self._span(node, axis, k)
            shape = (*node.shape[:axis], high - low, *node.shape[axis + 1 :])
            attrs = {**source.attrs, "shape": shape} if "shape" in source.attrs else source.attrs
            with origin_of(source):
                memo[source] = source.op.make(tuple(inputs), attrs)
        return memo[source] if source is node else OPS["item"](memo[source], index=node.attrs["index"])

    def _slice(self, node: Node, axis: int, k: int) -> Node:
        whole, span = self._whole(node), slice(*self._span(node, axis, k))
        if self.parts == 1:
            return whole
        return OPS["getitem"](whole, key=(*(slice(None),) * axis, span) if axis else span)
