"""Join small reductions of gradients, and let them run during the backward pass.

Each all-reduce costs a latency, so gradients are copied into flat buckets, and a bucket is reduced as a whole. A
reduction starts when its last gradient exists; the first update that reads it waits for it (S. Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", 2020; A. Sergeev and M. Del Balso, "Horovod", 2018).
The wait takes the buffer as an input, so that the memory plan keeps it. Reductions in the forward pass are not joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...core.graph import OPS, Node, origin_of, replace, topological
from ...core.op import Role, op
from ...core.types import TensorType
from ..comm.comm import Comm, Handle
from ..layout.redistribute import plan
from ..ops import whole_reduction

_under_way: WeakKeyDictionary[Comm, dict[int, Handle]] = WeakKeyDictionary()


def bucket_reductions(outputs: Sequence[Node], gradients: Sequence[Node], limit: int) -> tuple[Node, ...]:
    """The graph with the all-reduces in `gradients` joined into buckets of at most `limit` bytes; 0 changes nothing.

    In the order of communication a bucket takes the place of its last member; all ranks of a group join alike.
    """
    if not limit:
        return tuple(outputs)
    gradients = sorted(gradients, key=lambda n: n.attrs["order"])
    needed, behind = _dependence(outputs, gradients)
    buckets: list[list[Node]] = []
    opened: dict[Any, list[Node]] = {}
    for node in gradients:
        group = _group(node)
        if group is None or node in behind:
            continue
        bucket = opened.get(group)
        due = min((needed[n] for n in bucket or () if n in needed), default=node.attrs["order"] + 1)
        if bucket is None or due <= node.attrs["order"] or sum(int(n.tensor.nbytes) for n in (*bucket, node)) > limit:
            bucket = opened[group] = []
            buckets.append(bucket)
        bucket.append(node)
    return replace(outputs, {node: new for bucket in buckets for node, new in _joined(bucket).items()})


def _dependence(outputs: Sequence[Node], gradients: Sequence[Node]) -> tuple[dict[Node, int], set[Node]]:
    """Where in the order other communication first needs each reduction, and the reductions that depend on others.

    A bucket must end before the first and cannot hold the second.
    """
    needed: dict[Node, int] = {}
    number = {node: k for k, node in enumerate(gradients)}
    masks: dict[Node, int] = {}  # the reductions that a node depends on, as bits
    for node in topological(outputs):
        mask = reduce(or_, (masks[i] for i in node.inputs), 0)
        masks[node] = mask | (1 << number[node] if node in number else 0)
        if node.role is Role.COMMUNICATION:
            for k in (k for k in range(mask.bit_length()) if mask >> k & 1):
                needed[gradients[k]] = min(needed.get(gradients[k], node.attrs["order"]), node.attrs["order"])
    return needed, {node for node in gradients if masks.get(node.inputs[0])}


def _group(node: Node) -> Any:
    """What reductions of one bucket have in common; None for one that is not the whole array of a single group."""
    a = node.attrs
    mine = whole_reduction(plan(a["src"], a["dst"], a["shape"]), a["rank"])
    return None if mine is None else (mine.group, mine.op, a["dtype"])


def _joined(bucket: Sequence[Node]) -> dict[Node, Node]:
    """The slice of the reduced bucket for each member."""
    last = bucket[-1]
    group, combine, _ = _group(last)
    with origin_of(last):
        order = last.attrs["order"]
        flat = start.make(tuple(n.inputs[0] for n in bucket), {"group": group, "op": combine, "order": order})
        done = wait.make((flat,), {"order": order})
        found, at = {}, 0
        for node in bucket:
            size = int(node.tensor.size)
            found[node] = OPS["reshape"](OPS["getitem"](done, key=(slice(at, at + size),)), shape=node.shape)
            at += size
    return found


def _flat_type(*xs: TensorType, **_: Any) -> TensorType:
    return TensorType((sum(int(x.size) for x in xs),), xs[0].dtype)


@op(
    name="all_reduce_start",
    role=Role.COMMUNICATION,
    collective="all_reduce",
    infer=_flat_type,
    differentiable=False,
)
def start(xp: ModuleType, *xs: Any, group: tuple[int, ...], op: str, order: int, comm: Comm) -> Any:
    """Copy the arrays into one flat buffer and start to reduce it over `group`; `wait` finishes it."""
    out = np.concatenate([x.reshape(-1) for x in xs])
    comm.split(group).all_reduce(out, out, op)
    return out


@start.bind
def start_bind(
    xp: ModuleType, out: Any, *xs: Any, group: tuple[int, ...], op: str, order: int, comm: Comm
) -> list[Callable[[], Any]]:
    calls: list[Callable[[], Any]] = []
    at = 0
    for x in xs:
        calls.append(partial(np.copyto, out[at : at + x.size].reshape(x.shape), x))
        at += x.size
    members, handles = comm.split(group), _under_way.setdefault(comm, {})

    def begin() -> None:
        handles[order] = members.all_reduce_async(out, out, op)

    return [*calls, begin]


@op(
    name="all_reduce_wait",
    role=Role.COMMUNICATION,
    infer=lambda x, **_: x,
    differentiable=False,
    lazy=True,
    inplace={0: (0,)},
)
def wait(xp: ModuleType, x: Any, *, order: int, comm: Comm) -> Any:
    """The reduced buffer, as soon as the reduction that `start` began has ended."""
    return x


@wait.bind
def wait_bind(xp: ModuleType, out: Any, x: Any, *, order: int, comm: Comm) -> list[Callable[[], Any]]:
    handles = _under_way.setdefault(comm, {})
    finish = [lambda: handles.pop(order).wait()]
    return finish if np.shares_memory(out, x) else [*finish, partial(np.copyto, out, x)]
