"""Compute forward what backward would compute again from the same input.

Each pass looks for an operator and its gradient that read the same nodes, and replaces both by operators that hand an
intermediate result over. Where only one of the two is in the graph (inference, recomputation) nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.graph import OPS, Node, rewrite, topological

Rule = Callable[[Node, tuple[Node, ...]], Node]


def _share(outputs: Sequence[Node], pairs: dict[Node, Node], forward: Rule, backward: Rule) -> tuple[Node, ...]:
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


GELUS = {"gelu_tanh": "gelu_tanh_slope", "gelu_erf": "gelu_erf_slope"}


def share_gelu(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`gelu(x)` and `gelu_dx(g, x)` become `y, slope = gelu_slope(x)` and `g * slope`."""
    nodes = topological(outputs)
    gelus = {(f"{n.op.name}_dx", n.inputs[0]): n for n in nodes if n.op.name in GELUS}
    pairs = {n: f for n in nodes if len(n.inputs) == 2 and (f := gelus.get((n.op.name, n.inputs[1]))) is not None}
    return _share(
        outputs,
        {n: f for n, f in pairs.items() if n.type == f.type == n.inputs[0].type},
        lambda node, inputs: OPS[GELUS[node.op.name]].make(inputs, {}),
        lambda both, inputs: OPS["multiply"](inputs[0], OPS["item"](both, index=1)),
    )


def share_layer_norm(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`layer_norm` also returns its normal rows and inverse deviations, from which the gradient starts."""
    nodes = topological(outputs)
    norms = {(n.inputs[0], n.attrs["epsilon"]): n for n in nodes if n.op.name == "layer_norm" and _of_one_dtype(n)}
    found = {n: norms.get((n.inputs[1], n.attrs["epsilon"])) for n in nodes if n.op.name == "layer_norm_dx"}
    return _share(
        outputs,
        {n: f for n, f in found.items() if f is not None},
        lambda node, inputs: OPS["layer_norm_rows"].make(inputs, {"epsilon": node.attrs["epsilon"]}),
        lambda both, inputs: _node(
            OPS["layer_norm_rows_dx"](inputs[0], *(OPS["item"](both, index=i) for i in (1, 2)), inputs[2])
        ),
    )


def _of_one_dtype(node: Node) -> bool:
    return all(i.dtype == node.dtype for i in node.inputs)


def _node(items: tuple[Node, ...]) -> Node:
    return items[0].inputs[0]


def share_cross_entropy(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`softmax_cross_entropy` makes its gradient too, where what scales that is a constant, as under a mean."""
    nodes = topological(outputs)
    pairs: dict[Node, Node] = {}
    scales: dict[Node, Node] = {}
    for n in nodes:
        if n.op.name != "softmax_cross_entropy_dx" or n.inputs[3].op.name != "item":
            continue
        loss = n.inputs[3].inputs[0]
        same = loss.op.name == "softmax_cross_entropy" and loss.inputs == n.inputs[1:3]
        same = same and n.attrs.get("window") is None and all(n.attrs[k] == v for k, v in loss.attrs.items())
        same = same and loss.attrs["dtype"] is None
        if same and n.inputs[0].op.name == "constant" and loss not in scales:
            pairs[n], scales[loss] = loss, n.inputs[0]
    return _share(
        outputs,
        pairs,
        lambda node, inputs: OPS["cross_entropy_slope"].make(
            (scales[node], *inputs), {k: v for k, v in node.attrs.items() if k != "dtype"}
        ),
        lambda both, inputs: OPS["item"](both, index=2),
    )
