"""Plan the memory of one program: which values share storage, which overwrite, where each lies in the arena.

A *value* is (node, slot). Views and `item`s alias the value they look into, so everything is decided per storage:
when it dies, whether a new value of a variable may be written straight into that variable (donation), whether
a result may overwrite an operand (in place), and at which offset it lives. Nothing is allocated here; rules that
need strides run on arrays without memory.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import mmap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .backend import ALIGNMENT, Scratch
from .errors import GraphError
from .graph import Node, topological
from .op import LEAVES, Role
from .types import TensorType

Value = tuple[Node, int]
NEVER = 1 << 60  # the instruction index "after the last"
SPAN = 256  # instructions
SCRATCH = -1  # the slot of an instruction's working memory


@dataclass
class Storage:
    """One block of bytes. `home` is the leaf that owns it, or None for a place in an arena."""

    owner: Value
    nbytes: int
    first: int
    last: int
    home: Node | None = None
    offset: int = 0
    shared_with: Storage | None = None  # an operand this value overwrites
    on_host: bool = False  # a place in the arena of the host

    def final(self) -> Storage:
        storage = self
        while storage.shared_with is not None:
            storage = storage.shared_with
        return storage


@dataclass
class MemoryPlan:
    """The decisions of `plan`; `order` lists the nodes to execute, without views."""

    order: list[Node]
    nodes: list[Node]
    storages: dict[Value, Storage]
    roots: dict[Value, Value]
    views: set[Node]
    late: dict[Node, Node]  # variable -> new value that is copied at the end of the step
    arena_bytes: int = 0
    host_bytes: int = 0  # of what `to_host` puts away
    in_place: set[Value] = field(default_factory=set)
    donated: dict[Value, Node] = field(default_factory=dict)

    def storage(self, node: Node, slot: int = 0) -> Storage:
        """Where the bytes of a value finally are."""
        return self.storages[self.roots[node, slot]].final()

    @property
    def unplanned_bytes(self) -> int:
        """Bytes all results would take if none were reused."""
        return sum(s.nbytes for s in self.storages.values() if s.owner[0].role not in LEAVES)


def types_of(node: Node) -> tuple[TensorType, ...]:
    return node.type if isinstance(node.type, tuple) else (node.type,)


def plan(
    fetches: Sequence[Node],
    updates: Mapping[Node, Node],
    *,
    donate: bool = True,
    reuse: bool = True,
    scratch: bool = True,
) -> MemoryPlan:
    """Order the nodes and give every value a storage. Without `donate` a step is atomic, without `reuse` none share.

    Without `scratch` there is no place for working memory: kernels of a GPU bring their own.
    """
    return _Planner(fetches, updates, scratch).run(donate, reuse)


class _Planner:
    def __init__(self, fetches: Sequence[Node], updates: Mapping[Node, Node], scratch: bool) -> None:
        self.fetches, self.updates, self.scratch = fetches, updates, scratch
        # Last variable first: backward finishes with the first layer, so its gradients are asked for last.
        nodes = topological((*fetches, *reversed([*updates.values()])))
        self.metas = _Metas(nodes)
        # A pass may have marked when a node is due (`event`); what is not marked is due at once.
        self.nodes = self._schedule(_promptly(sorted(nodes, key=lambda node: node.tags.get("event", 0))))
        order = [n for n in self.nodes if n.role not in LEAVES and n not in self.metas.views]
        self.at = {node: index for index, node in enumerate(order)}
        self.plan = MemoryPlan(order, self.nodes, {}, self.metas.roots, self.metas.views, dict(updates))
        self.readers: dict[Value, set[int]] = {}
        self._storages()
        self._liveness()

    def run(self, donate: bool, reuse: bool) -> MemoryPlan:
        if donate:
            self._donate()
        if reuse:
            self._reuse_in_place()
        storages = self.plan.storages.values()
        self.plan.arena_bytes = _pack([s for s in storages if not s.on_host], reuse)
        self.plan.host_bytes = _pack([s for s in storages if s.on_host], reuse)
        return self.plan

    # -- order ----------------------------------------------------------------------------------------------------

    def _schedule(self, nodes: list[Node]) -> list[Node]:
        """Depth-first order, in which the producer of a variable's new value waits for all readers of the old one.

        That is a wish, not a rule: on a cycle of wishes one is dropped and the value is copied at the end instead.
        """
        position = {node: i for i, node in enumerate(nodes)}
        waits = [len(set(node.inputs)) for node in nodes]
        users: dict[Node, list[int]] = {node: [] for node in nodes}
        for node in nodes:
            for i in set(node.inputs):
                users[i].append(position[node])
        talking = [n for n in nodes if n.role is Role.COMMUNICATION and not n.op.lazy]
        if all("order" in n.attrs for n in talking):  # what is written by hand comes as the graph has it
            talking.sort(key=lambda n: n.attrs["order"])
        for first, then in itertools.pairwise(talking):  # all ranks communicate in one order
            users[first].append(position[then])
            waits[position[then]] += 1
        wishes, wished_by = self._wishes(nodes)
        waiting = {position[n] for n in wishes} | {i for i, n in enumerate(nodes) if n.op.lazy}
        end = {node.tags.get("event", 0): i for i, node in enumerate(nodes, 1)}  # what is lazy gives way until then
        ready = [(i, i) for i, count in enumerate(waits) if not count]  # a heap of depth-first positions
        order: dict[int, Node] = {}
        while ready:
            _, place = heapq.heappop(ready)
            if place in order:
                continue
            if place in waiting:
                waiting.discard(place)
                due = end[nodes[place].tags.get("event", 0)] if nodes[place].op.lazy else len(nodes) + 1
                heapq.heappush(ready, (due, place))
                continue
            order[place] = nodes[place]
            for user in users[nodes[place]]:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (user, user))
            for producer in wished_by.get(nodes[place], ()):
                wishes[producer] -= 1
                if not wishes[producer]:
                    waiting.discard(position[producer])
                    if not waits[position[producer]]:
                        heapq.heappush(ready, (position[producer], position[producer]))
        if len(order) < len(nodes):
            stuck = next(n for n in talking if position[n] not in order)
            said = f"{stuck!r} waits for communication that all ranks do after it"
            fix = "leave out the pass that joined what comes before it with what comes after: Executor(passes=[...])"
            raise GraphError(said, fix=fix, site=stuck.site)
        return [*order.values()]

    def _wishes(self, nodes: list[Node]) -> tuple[dict[Node, int], dict[Node, list[Node]]]:
        """How many readers each producer would like to wait for, and for whom each reader is waited."""
        producers: dict[Value, list[Node]] = {}
        for variable, value in self.updates.items():
            producers.setdefault((variable, 0), []).append(self.metas.roots[value, 0][0])
        counts: dict[Node, int] = {}
        wished_by: dict[Node, list[Node]] = {}
        for node in nodes:
            for root in {self.metas.roots[i, 0] for i in node.inputs}:
                for producer in producers.get(root, ()):
                    if producer is not node and node not in self.metas.views and producer.inputs:
                        counts[producer] = counts.get(producer, 0) + 1
                        wished_by.setdefault(node, []).append(producer)
        return counts, wished_by

    # -- storages and their lives -----------------------------------------------------------------------------------

    def _storages(self) -> None:
        for node in self.nodes:
            if node in self.metas.views:
                continue
            leaf = node.role in LEAVES
            for slot, type_ in enumerate(types_of(node)):
                first, last, home = (-1, NEVER, node) if leaf else (self.at[node], self.at[node], None)
                storage = Storage((node, slot), int(type_.nbytes), first, last, home, on_host=node.op.on_host)
                self.plan.storages[node, slot] = storage
            if self.scratch and not leaf and (nbytes := self.metas.scratch_bytes(node)):
                self.plan.storages[node, SCRATCH] = Storage((node, SCRATCH), nbytes, first, last)

    def _liveness(self) -> None:
        for node, index in self.at.items():
            for root in [self.metas.roots[i, slot] for i in node.inputs for slot in range(len(types_of(i)))]:
                self.readers.setdefault(root, set()).add(index)
                storage = self.plan.storages[root]
                storage.last = max(storage.last, index)
                if storage.on_host and not node.op.reads_host:
                    raise _out_of_reach(f"{node!r} reads {root[0]!r}", node)
        self.read_at_end = {self.metas.roots[f, 0] for f in self.fetches}
        for value in self.updates.values():
            self.plan.storages[self.metas.roots[value, 0]].last = NEVER
        for root in self.read_at_end:
            self.plan.storages[root].last = NEVER
            if self.plan.storages[root].on_host:
                raise _out_of_reach(f"{root[0]!r} is fetched", root[0])

    # -- donation ---------------------------------------------------------------------------------------------------

    def _donate(self) -> None:
        """Write a new value straight into its variable where no node reads the old one afterward."""
        values_of_others = {self.metas.roots[value, 0] for value in self.updates.values()}
        for variable, value in self.updates.items():
            root = self.metas.roots[value, 0]
            storage = self.plan.storages[root]
            whole = self.metas.is_whole(value, storage.nbytes)
            if storage.home is not None or not whole or value.type != variable.type:
                continue
            old = (variable, 0)
            if old in self.read_at_end or old in values_of_others or not self._read_before(old, root):
                continue
            storage.home = variable
            self.plan.donated[root] = variable
            del self.plan.late[variable]

    def _read_before(self, old: Value, new: Value) -> bool:
        """Whether all reads of `old` come before `new` is written, or are made by an operator that may overwrite it."""
        producer, slot = new
        at = self.at[producer]
        later = [r for r in self.readers.get(old, ()) if r >= at]
        return not later or (later == [at] and self._may_overwrite(producer, slot, old))

    def _may_overwrite(self, node: Node, slot: int, root: Value) -> bool:
        """Whether `node` may write `slot` over the storage of `root`, given every input that lies there."""
        allowed = node.op.inplace.get(slot, ())
        type_ = types_of(node)[slot]
        for position, i in enumerate(node.inputs):
            if isinstance(i.type, tuple):
                return False
            if self.plan.storages[self.metas.roots[i, 0]].final() is self.plan.storages[root].final():
                whole = self.metas.is_whole(i, self.plan.storages[root].nbytes)
                if position not in allowed or not whole or i.type != type_:
                    return False
        return True

    # -- in place -----------------------------------------------------------------------------------------------------

    def _reuse_in_place(self) -> None:
        for node, index in self.at.items():
            for slot, positions in node.op.inplace.items():
                storage = self.plan.storages[node, slot]
                if storage.home is not None or storage.shared_with is not None:
                    continue
                for position in positions:
                    if position < len(node.inputs) and self._overwrite(node, slot, node.inputs[position], index):
                        break

    def _overwrite(self, node: Node, slot: int, operand: Node, index: int) -> bool:
        root = self.metas.roots[operand, 0]
        target, storage = self.plan.storages[root].final(), self.plan.storages[node, slot]
        if target.home is not None or target.last != index or target is storage or target.first == index:
            return False
        if operand.type != types_of(node)[slot] or not self._may_overwrite(node, slot, root):
            return False
        storage.shared_with = target
        target.last = storage.last
        self.plan.in_place.add((node, slot))
        return True


def _promptly(nodes: list[Node]) -> list[Node]:
    """The nodes, each copy to the host right behind what it copies, so that the place in the arena is free early."""
    copies: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.op.on_host:
            copies.setdefault(node.inputs[0], []).append(node)
    return [n for node in nodes if not node.op.on_host for n in (node, *copies.get(node, ()))]


def in_line(outputs: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """What each node of a graph comes after: its inputs and, for communication, the one that all ranks do before it.

    The nodes stand in such an order. A pass that joins nodes must not make one come after itself.
    """
    order = topological(outputs)
    talking = [n for n in order if "order" in n.attrs and n.role is Role.COMMUNICATION and not n.op.lazy]
    talking.sort(key=lambda n: n.attrs["order"])
    before = {then: (first,) for first, then in itertools.pairwise(talking)}
    return {n: (*n.inputs, *before.get(n, ())) for n in (topological((*talking, *outputs)) if talking else order)}


def _out_of_reach(what: str, node: Node) -> GraphError:
    fix = "let nothing but `from_host` read it"
    return GraphError(f"{what}, which lies in the memory of the host", fix=fix, site=node.site)


class _Metas:
    """Arrays with real strides but no memory, to learn which nodes are views and of what."""

    def __init__(self, nodes: list[Node]) -> None:
        largest = max((int(t.nbytes) for n in nodes for t in types_of(n)), default=0)
        # Address space only, of which there is more than memory: nothing is written, so none is reserved.
        if hasattr(mmap, "MAP_ANONYMOUS"):
            block = mmap.mmap(-1, largest + ALIGNMENT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        else:
            block = mmap.mmap(-1, largest + ALIGNMENT, access=mmap.ACCESS_READ)
        self.scratch = np.frombuffer(block, np.uint8)
        self.arrays: dict[Node, Any] = {}
        self.roots: dict[Value, Value] = {}
        self.views: set[Node] = set()
        for node in nodes:
            self._enter(node)

    def _enter(self, node: Node) -> None:
        if node.role is Role.ITEM:
            parent, index = node.inputs[0], node.attrs["index"]
            self._alias(node, self.arrays[parent][index], self.roots[parent, index])
            return
        if node.role is Role.CONSTANT:
            self.arrays[node] = node.attrs["value"]
        else:
            if (view := self._view(node)) is not None:
                self._alias(node, view, self.roots[node.inputs[0], 0])
                return
            made = tuple(np.ndarray(t.shape, t.dtype, self.scratch) for t in types_of(node))
            self.arrays[node] = made if isinstance(node.type, tuple) else made[0]
        for slot in range(len(types_of(node))):
            self.roots[node, slot] = (node, slot)

    def scratch_bytes(self, node: Node) -> int:
        """Working memory that `node` asks for when it is bound: where it may be, or has floats of 16 bits."""
        scratch, local = Scratch(self.scratch), node.role is not Role.COMMUNICATION
        if node.op.scratch or (local and any(t.dtype.itemsize == 2 for n in (node, *node.inputs) for t in types_of(n))):
            node.op.bound(np, self.arrays[node], [self.arrays[i] for i in node.inputs], node.attrs, scratch)
        return scratch.used

    def _view(self, node: Node) -> Any:
        """What the operator's rule says; GraphError unless it is a part of the first input, as `infer` says."""
        rule = node.op.view_rule
        made = rule and rule(np, *(self.arrays[i] for i in node.inputs), **node.attrs)
        if made is not None and (
            (made.shape, made.dtype) != (node.shape, node.dtype)
            or (made.size and not np.may_share_memory(made, self.arrays[node.inputs[0]]))
        ):
            said = f"the view of {node.op.name!r} is no part of its first input that is {node.type}"
            raise GraphError(said, fix="return such a view, or None", site=node.site)
        return made

    def _alias(self, node: Node, array: Any, root: Value) -> None:
        self.arrays[node] = array
        self.roots[node, 0] = root
        self.views.add(node)

    def is_whole(self, node: Node, nbytes: int) -> bool:
        """Whether a value covers its storage exactly, in order."""
        array = self.arrays[node]
        return array.flags.c_contiguous and array.nbytes == nbytes and node.role is not Role.CONSTANT


def _pack(storages: Any, reuse: bool) -> int:
    """Offsets in the arena, biggest first, each at the lowest place free during its whole life. Returns the size."""
    pending = [s for s in storages if s.home is None and s.shared_with is None]
    if not reuse:
        for storage in pending:
            storage.first, storage.last = 0, NEVER
    pending.sort(key=lambda s: (-s.nbytes, s.first))
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first, last), sorted by offset
    spans: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)  # of them those alive then: few to look at
    size, most = 0, max((s.first for s in pending), default=0)
    for storage in pending:
        alive = range(storage.first // SPAN, min(storage.last, most) // SPAN + 1)
        nbytes, offset = -(-storage.nbytes // ALIGNMENT) * ALIGNMENT, 0
        for start, end, first, last in spans[alive[0]] if len(alive) == 1 else placed:
            if first <= storage.last and storage.first <= last:
                if start >= offset + nbytes:
                    break
                offset = end if end > offset else offset  # a million times: `max` takes twice as long
        storage.offset = offset
        for known in (placed, *(spans[k] for k in alive)) if nbytes else ():
            bisect.insort(known, (offset, offset + nbytes, storage.first, storage.last))
        size = max(size, offset + nbytes)
    return size
