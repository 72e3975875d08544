"""Leave heads of attention where projections put them, and pack the gradients of queries, keys and values.

`attention` of transposed views and its gradient become operators that read and write (batch, positions, heads,
features): each room of kernels has a pass that says which sizes suit. Where one packed projection made all three, its
gradient then needs no copy. Attention with other than four axes stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..core.graph import OPS, Node, readers_of, rewrite, topological
from .flash_attention import flash_attention, flash_attention_dx

HEADS_FIRST = (0, 2, 1, 3)  # swaps positions and heads, there and back
PARTS_FIRST = (2, 0, 3, 1, 4)  # (n, s, 3, heads, d) -> (3, n, heads, s, d)
WHOLE = ("slice", None, None, 1)


def in_place(outputs: Sequence[Node], suits: Callable[..., bool]) -> tuple[Node, ...]:
    """With attention on heads in place where the types of queries, keys, values and masks suit."""
    nodes = topological(outputs)
    readers = readers_of(nodes, outputs)
    chosen = {n for n in nodes if n.op is OPS["attention"] and _fits(n, suits) and _private(n, readers)}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in chosen:
            return _node_of(flash_attention(*map(_swapped, inputs[:3]), *inputs[3:], **node.attrs))
        if node.op is OPS["item"] and inputs[0].op is flash_attention:
            item = OPS["item"](inputs[0], index=node.attrs["index"])
            return _swapped(item) if node.attrs["index"] == 0 else item
        if node.op is OPS["attention_dx"] and inputs[5].inputs[0].op is flash_attention:
            return _node_of(flash_attention_dx(*map(_swapped, inputs[:5]), *inputs[5:], **node.attrs))
        if node.op is OPS["item"] and inputs[0].op is flash_attention_dx:
            return _swapped(_part(inputs[0], node.attrs["index"]))
        if node.op is OPS["add"]:
            return _packed(inputs)
        return _moved(inputs[0], node.attrs["axes"]) if node.op is OPS["permute_dims"] else None

    return rewrite(outputs, rule) if chosen else tuple(outputs)


def _node_of(made: Node | tuple[Node, ...]) -> Node:
    return made[0].inputs[0] if isinstance(made, tuple) else made


def _part(gradients: Node, index: int) -> Node:
    """That of queries, keys or values; where they are packed, a view."""
    if isinstance(gradients.type, tuple):
        return OPS["item"](gradients, index=index)
    return OPS["getitem"](gradients, key=(slice(None), slice(None), index))


def _swapped(x: Node) -> Node:
    return _moved(x, HEADS_FIRST)


def _fits(node: Node, suits: Callable[..., bool]) -> bool:
    """Whether the kernel supports these sizes."""
    types = [i.tensor for i in node.inputs]
    return types[0].ndim == 4 and suits(*types)


def _private(node: Node, readers: Mapping[Node, Sequence[Node | None]]) -> bool:
    """Whether what is kept for the gradient goes to one gradient at most, and nowhere else."""
    items = [i for i in readers[node] if i is not None and i.op is OPS["item"]]
    gradients = {r for i in items if i.attrs["index"] > 0 for r in readers[i]}
    return len(items) == len(readers[node]) and len(gradients) <= 1 and all(_is_gradient(r, node) for r in gradients)


def _is_gradient(reader: Node | None, node: Node) -> bool:
    if reader is None or reader.op is not OPS["attention_dx"]:
        return False
    return (*reader.inputs[1:4], *reader.inputs[6:]) == node.inputs


def _packed(inputs: tuple[Node, ...]) -> Node | None:
    """The sum of the three parts scattered into zeros, one beside the other, is the array that they came from."""
    terms = [t for i in inputs for t in (i.inputs if i.op is OPS["add"] else (i,))]
    if len(terms) != 3:
        return None
    moves = {t.attrs["axes"] if t.op is OPS["permute_dims"] else None for t in terms}
    found = [_source(t.inputs[0] if t.op is OPS["permute_dims"] else t) for t in terms]
    sources = [source for source in found if source is not None]
    if len(sources) < 3 or len(moves) != 1 or {index for _, index, _ in sources} != {0, 1, 2}:
        return None
    if len({(packed, merged) for packed, _, merged in sources}) != 1:
        return None
    packed, _, merged = sources[0]
    axes = moves.pop()
    made = OPS["reshape"](packed, shape=terms[0].shape) if merged else _moved(packed, PARTS_FIRST)
    return made if axes is None else _moved(made, axes)


def _source(term: Node) -> tuple[Node, int, bool] | None:
    """(packed gradients, index, whether heads are merged) if `term` is one of them scattered to its own place.

    The places are entries 0, 1 and 2 of a first axis, or thirds of the last.
    """
    if term.op is not OPS["slice_scatter"]:
        return None
    x, key = term.inputs[0], term.attrs["key"]
    merged = x.op is OPS["reshape"]
    if not merged and not (x.op is OPS["permute_dims"] and x.attrs["axes"] == HEADS_FIRST):
        return None
    cut = x.inputs[0]
    if cut.op is not OPS["getitem"] or cut.inputs[0].op is not flash_attention_dx:
        return None
    index, width = cut.attrs["key"][2], x.shape[-1]
    place = ("slice", index * width or None, (index + 1) * width, 1) if merged else index
    others = [e for e in key if e != WHOLE]
    fits = others == [place] or others == [("slice", index * width, (index + 1) * width, 1)]
    alone = term.shape == ((*x.shape[:-1], 3 * width) if merged else (3, *x.shape))
    return (cut.inputs[0], index, merged) if fits and alone else None


def _moved(x: Node, axes: tuple[int, ...]) -> Node:
    """`x` with its axes in another order; a transpose of a transpose is one, or none."""
    if x.op is OPS["permute_dims"]:
        x, axes = x.inputs[0], tuple(x.attrs["axes"][a] for a in axes)
    return x if axes == tuple(range(len(axes))) else OPS["permute_dims"](x, axes=axes)
