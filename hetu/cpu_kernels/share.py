"""What passes share that compute forward what backward would compute again from the same input.

An operator and its gradient that read the same nodes are replaced by operators that hand an intermediate result over.
Where only one of the two is in the graph (inference, recomputation) nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.graph import OPS, Node, rewrite

ShareRule = Callable[[Node, tuple[Node, ...]], Node]


def share(
    outputs: Sequence[Node], pairs: dict[Node, Node], forward: ShareRule, backward: ShareRule
) -> tuple[Node, ...]:
    """Rewrite each backward node of `pairs` and its forward node. `forward(node, inputs)` makes the operator of both;
    `backward(both, inputs)` gets that operator and the inputs of the backward node."""
    made: dict[Node, Node] = {}
    wanted = set(pairs.values())

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in wanted:
            made[node] = forward(node, inputs)
            return made[node] if isinstance(node.type, tuple) else OPS["item"](made[node], index=0)
        return backward(made[pairs[node]], inputs) if node in pairs else None

    # a forward node that was rebuilt must be met before its gradient, which does not read it
    order = (*pairs.values(), *outputs)
    return rewrite(order, rule)[len(pairs) :] if pairs else tuple(outputs)
