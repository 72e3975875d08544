"""Fix what a graph leaves open: whether it trains, and the sizes that were unknown while it was built.

A sub-graph trains if and only if it commits updates; there is no mode argument. Each set of fed shapes gets its own
program; sizes are not put into buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import GraphError
from .graph import OPS, Node, rewrite
from .types import Atom, has_dim, substitute


def resolve_training(
    fetches: Sequence[Node], updates: Mapping[Node, Node]
) -> tuple[tuple[Node, ...], dict[Node, Node]]:
    """(fetches, updates) without `if_training` and `with_updates`; carried updates are added in training.

    Two updates of one variable are a GraphError: neither could be right.
    """
    training = bool(updates)
    carried: dict[Node, Node] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op.name == "if_training":
            return inputs[0] if training else inputs[1]
        if node.op.name != "with_updates":
            return None
        if training:
            for variable, value in zip(node.inputs[1::2], inputs[2::2]):
                if carried.setdefault(variable, value) is not value:
                    raise GraphError(
                        f"{variable!r} gets two new values in one step",
                        fix="do not apply a layer that keeps statistics twice in one sub-graph; build a second layer",
                        site=node.site,
                    )
        return inputs[0]

    outputs = rewrite((*fetches, *updates.values()), rule)
    merged = dict(zip(updates, outputs[len(fetches) :]))
    for variable, value in carried.items():
        if variable in merged:
            raise GraphError(
                f"{variable!r} is updated by an optimizer and by its own layer",
                fix="make it trainable=False, or leave it out of minimize(...)",
                site=variable.site,
            )
        merged[variable] = value
    return outputs[: len(fetches)], merged


def specialize(outputs: Sequence[Node], sizes: Mapping[Atom, int]) -> tuple[Node, ...]:
    """The graph at the given sizes, for example `{("x", 0): 128}`; every type follows anew.

    A size that does not fit is a ShapeError.
    """

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not any(map(has_dim, node.attrs.values())):
            return None
        attrs = {name: substitute(value, sizes) for name, value in node.attrs.items()}
        if node.op.name == "size" and isinstance(attrs["value"], int):
            return OPS["constant"](value=attrs["value"])
        return node.op.make(inputs, attrs)

    return rewrite(outputs, rule)
