"""Join the casts of variables and feeds to 16 bits, with which a step in mixed precision begins, into few launches.

Only for GPUs. A launch takes about as long as the cast of a million elements, and a model has hundreds of parameters.
The 16-bit copies are not kept from one step to the next. The optimizer could write them too, but then every other
writer of a variable (a checkpoint, the user, another executor) would have to keep them up to date.

Gain: not measured apart. Off by leaving `group_casts` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from types import ModuleType
from typing import Any

from ...core.graph import OPS, Node, origin_of, readers_of, rewrite, topological
from ...core.op import Op
from ...core.types import TensorType, as_dtype, same
from ...passes.mixed_precision import is_cast
from ..launchers import kernel
from ..many import cast_all

MOST = 1 << 22  # elements of one launch: beyond, it takes far longer than to start it, and copies would wait for use


def group_casts(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Casts of leaves to one dtype of 16 bits become `cast_all`, each up to a number of elements."""
    places = {}
    for members in _groups(outputs):
        with origin_of(members[0]):
            made = CAST_ALL.make(tuple(m.inputs[0] for m in members), {"dtype": members[0].dtype.name})
        places |= {member: (made, k) for k, member in enumerate(members)}
    return rewrite(
        outputs, lambda node, _: OPS["item"](places[node][0], index=places[node][1]) if node in places else None
    )


def _groups(outputs: Sequence[Node]) -> Iterator[list[Node]]:
    """Casts that one launch makes, in the order in which the graph needs them."""
    nodes = topological(outputs)
    readers = readers_of(nodes)
    groups: dict[Any, list[list[Node]]] = defaultdict(lambda: [[]])
    for node in nodes:
        if _fits(node) and not all(_takes_in(reader, node) for reader in readers[node]):
            found = groups[node.dtype, node.tags.get("event")]
            if sum(prod(m.shape) for m in (*found[-1], node)) > MOST:
                found.append([])
            found[-1].append(node)
    return (group for found in groups.values() for group in found if len(group) > 1)


def _fits(node: Node) -> bool:
    return is_cast(node, 4, 2) and node.inputs[0].op.name in ("variable", "placeholder")


def _takes_in(reader: Node, cast: Node) -> bool:
    """Whether a kernel of elementwise operators makes the cast on the way."""
    return reader.op.code is not None and same(reader.shape, cast.shape)


def _type(*types: TensorType, dtype: str) -> tuple[TensorType, ...]:
    return tuple(TensorType(t.shape, as_dtype(dtype)) for t in types)


def _forward(xp: ModuleType, *arrays: Any, dtype: str) -> tuple[Any, ...]:
    return tuple(OPS["astype"].forward(xp, a, dtype=dtype) for a in arrays)


CAST_ALL: Op[..., tuple[Node, ...]] = Op(_forward, name="cast_all", infer=_type, differentiable=False)
CAST_ALL.__doc__ = "All inputs in another dtype."
kernel(CAST_ALL)(cast_all)
