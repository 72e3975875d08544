"""Which pipeline stage computes what: the user's marks or a balanced cut, carried over to every node of a graph.

Nodes belong to a phase: S depends on no fed batch and runs once per step; F is the forward pass of a micro-batch, B its
backward pass; U follows from gradients and runs once they are complete. Forward passes flow to later stages only,
backward passes to earlier ones.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from ...core.errors import ArgumentError, GraphError, ShapeError
from ...core.graph import Node, readers_of, tagged, topological
from ...core.leaf import random_state
from ...core.op import Role
from ...core.types import Dim
from ...look.profiler import flops
from ...passes import specialize
from ...ranges import Count
from ..layout.deduce import updating
from .pipeline_schedule import BACKWARD, FORWARD

START, UPDATE = "S", "U"
EVERYWHERE = -1  # the stage of nodes on all ranks: the step count, learning rates, random state
NOMINAL = 32  # size of an unknown axis when operations are counted
SLACK = 1.1  # how much slower than the best balanced cut one may be that sends less
Label = Callable[[Node], "int | None"]


def stage(index: Count) -> AbstractContextManager[None]:
    """Mark all nodes made inside as computed by pipeline stage `index` (from 0); their gradients follow them.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 4))
    >>> with stage(1):
    ...     y = x * 2
    >>> y.tags["stage"]
    1
    """
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ArgumentError(f"stage {index!r}", fix="number the stages 0, 1, 2, ...")
    return tagged(stage=index)


def label_by(cut: Mapping[str, int]) -> Label:
    """How nodes get labels: the stage of their layer in `cut`, or the user's mark if there is no cut."""
    return lambda node: cut.get(node.tags.get("layer", "")) if cut else node.tags.get("stage")


def phases(outputs: Sequence[Node], batches: Collection[str], *, apart: bool = False) -> dict[Node, str]:
    """The phase of every node that has inputs; `batches` names the placeholders that are fed in micro-batches.

    What is computed with gradients waits for those of the whole batch. If each micro-batch is a batch of its own
    (`apart`), only what an optimizer computes does, and random numbers too are drawn for each.
    """
    late, found, fed, drawn = updating(outputs), dict[Node, str](), set[Node](), set[Node]()
    nodes = topological(outputs)
    for node in nodes:
        if not node.inputs:
            if node.role is Role.PLACEHOLDER and node.name in batches:
                fed.add(node)
            elif apart and node is random_state:
                drawn.add(node)
            continue
        before = {found[i] for i in node.inputs if i in found}
        gradient = bool(node.tags.get("gradient"))
        waits = bool(node.tags.get("update")) if apart else BACKWARD in before and not gradient
        if node in late or UPDATE in before or waits:
            found[node] = UPDATE
        elif any(i in fed or i in drawn for i in node.inputs):
            found[node] = BACKWARD if gradient or BACKWARD in before else FORWARD
            (fed if any(i in fed for i in node.inputs) else drawn).add(node)
        else:
            found[node] = START
    readers = readers_of(nodes)
    for node in reversed(nodes):  # updates read a value last: one that only they read is made then
        once = found.get(node) == START or node in drawn
        if once and readers[node] and {found[r] for r in readers[node] if r in found} == {UPDATE}:
            found[node] = UPDATE
    return found


def stages_of(
    outputs: Sequence[Node], phase: Mapping[Node, str], label: Label, homes: Mapping[str, int] | None = None
) -> dict[Node, int]:
    """The stage of every variable and every node with inputs; `phase` is the result of `phases` for the same graph.

    `homes` are the stages of variables if they are decided already; all others are then everywhere.
    """
    nodes = topological(outputs)
    placed: dict[Node, int] = {}
    _place_forward([n for n in nodes if phase.get(n) == FORWARD], label, placed)
    read = _last_reads(nodes, phase, placed)
    _place_backward([n for n in nodes if phase.get(n) == BACKWARD], phase, label, placed, read)
    if homes is not None:
        placed |= {n: homes.get(n.name, EVERYWHERE) for n in nodes if n.role is Role.VARIABLE}
    _place_once(nodes, phase, placed)
    return placed


def _place_forward(nodes: Sequence[Node], label: Label, placed: dict[Node, int]) -> None:
    """Place a forward pass by its labels, but never before what it needs; nodes without a label follow their inputs."""
    for node in nodes:
        found = [placed[i] for i in node.inputs if i in placed]
        if node.role is not Role.ITEM and (marked := label(node)) is not None:
            found.append(marked)
        if found:
            placed[node] = max(found)
    readers = readers_of(topological(nodes))
    for node in reversed(nodes):  # values that follow from feeds alone are computed where they are read first
        if node not in placed:
            placed[node] = min((placed[r] for r in readers[node] if r in placed), default=0)


def _last_reads(nodes: Sequence[Node], phase: Mapping[Node, str], placed: Mapping[Node, int]) -> dict[Node, int]:
    """The last stage whose forward pass reads a trained variable, or what is made of it once."""
    found: dict[Node, int] = {}
    for node in nodes:
        for i in node.inputs if phase.get(node) == FORWARD else ():
            if i.role is Role.VARIABLE and i.attrs["trainable"]:
                found[i] = max(found.get(i, 0), placed[node])
    for node in nodes:
        if phase.get(node) == START and (read := [found[i] for i in node.inputs if i in found]):
            found[node] = max(read)
    return found


def _place_backward(
    nodes: Sequence[Node], phase: Mapping[Node, str], label: Label, placed: dict[Node, int], read: Mapping[Node, int]
) -> None:
    """Place each gradient on the stage of its forward nodes, but never before what it needs or after what needs it.

    One without any is placed where the variables are that it reads. A sum of gradients is formed on the stage of the
    last of them, before it is sent.
    """

    def wish(node: Node) -> int | None:
        kept = [placed[i] for i in node.inputs if phase.get(i) == FORWARD]
        kept = kept or [read[i] for i in node.inputs if i in read]
        marked = label(node)
        return max(kept if marked is None else [marked, *kept], default=None)

    least: dict[Node, int] = {}  # stage of the last that needs a node
    for node in reversed(nodes):
        bound = max(least.get(node, 0), wish(node) or 0)
        for i in node.inputs:
            least[i] = max(least.get(i, 0), bound)
    readers = readers_of(topological(nodes))
    for node in nodes:
        arrived = [placed[i] for i in node.inputs if phase.get(i) == BACKWARD and i in placed]
        if arrived and (node.role is Role.ITEM or (node.op.ufunc == "add" and len(arrived) == 2)):
            placed[node] = min(arrived)
        elif (wanted := wish(node)) is not None:
            placed[node] = min([max(wanted, least.get(node, 0)), *arrived])
        elif arrived:
            placed[node] = min(arrived)
    for node in reversed(nodes):
        if node not in placed:
            placed[node] = max((placed[r] for r in readers[node] if r in placed), default=0)
        elif wish(node) is None:
            _follow_readers(node, readers, placed)


def _follow_readers(node: Node, readers: Mapping[Node, Sequence[Node | None]], placed: dict[Node, int]) -> None:
    """Place a gradient where all its readers are, if all that it reads goes there anyway: then one message less does.

    Such as that of dropout at the border of a stage, beside the gradient of the residual sum.
    """
    there = {placed[r] for r in readers[node] if r is not None}
    if len(there) != 1:
        return
    for i in node.inputs:
        others = {placed.get(r) for r in readers[i] if r is not None and r is not node}
        everywhere = i is random_state or i.role is Role.CONSTANT
        if not everywhere and not there & {placed.get(i), *others}:
            return
    (placed[node],) = there


def _place_once(nodes: Sequence[Node], phase: Mapping[Node, str], placed: dict[Node, int]) -> None:
    """Place variables and the nodes computed once per step with their readers, updates with their largest operand."""
    readers = readers_of(nodes)

    def is_free(node: Node) -> bool:
        return node not in placed and (node.role is Role.VARIABLE or bool(node.inputs))

    def largest(node: Node) -> int | None:
        known = [i for i in node.inputs if placed.get(i, EVERYWHERE) != EVERYWHERE]
        return placed[max(known, key=_nbytes)] if known else None

    for node in reversed(nodes):
        found = {placed[r] for r in readers[node] if r in placed}
        if is_free(node) and phase.get(node) != UPDATE and found:
            several = node.role is Role.VARIABLE and not node.attrs["trainable"] and len(found) > 1
            shared = several or node is random_state
            placed[node] = EVERYWHERE if shared else min(found)
    for node in nodes:
        if phase.get(node) == UPDATE and (at := largest(node)) is not None:
            placed[node] = at
    for node in reversed(nodes):
        if is_free(node):
            found = {placed[r] for r in readers[node] if r in placed}
            at = largest(node) if node.inputs else None
            placed[node] = found.pop() if len(found) == 1 else EVERYWHERE if at is None else at


def _nbytes(node: Node) -> int:
    """The bytes of a value, if it is one and they are known, else 0."""
    size = 0 if isinstance(node.type, tuple) else node.type.nbytes
    return size if isinstance(size, int) else 0


# -- the user's marks ---------------------------------------------------------------------------------------------


def marked_stages(outputs: Sequence[Node]) -> int:
    """How many stages the user has marked; 0 for none.

    ArgumentError if a stage is missing, GraphError if one needs a later one.
    """
    nodes = {n for n in topological(outputs) if "stage" in n.tags and n.inputs and not n.tags.get("gradient")}
    found = {n.tags["stage"] for n in nodes}
    if missing := set(range(max(found, default=-1) + 1)) - found:
        raise ArgumentError(
            f"stages {sorted(found)} are marked, stage {min(missing)} is not", fix="number the stages 0, 1, 2, ..."
        )
    latest: dict[Node, Node] = {}  # the marked node of the last stage among a node and what it needs
    for node in topological(outputs):
        for top in (latest[i] for i in node.inputs if i in latest):
            if node in nodes and top.tags["stage"] > node.tags["stage"]:
                raise GraphError(
                    f"{node!r} in stage {node.tags['stage']} needs {top!r} of stage {top.tags['stage']}",
                    fix="stages flow forward: give it that stage or a later one",
                    site=node.site,
                )
            latest[node] = max(latest.get(node, top), top, key=lambda n: int(n.tags["stage"]))
        if node in nodes:
            latest[node] = node
    return len(found)


# -- a balanced cut -----------------------------------------------------------------------------------------------


def balanced_cut(outputs: Sequence[Node], batches: Collection[str], stages: Sequence[int]) -> dict[str, int]:
    """Layer -> stage, so that the slowest stage is fast; among nearly equal cuts, the one that sends the fewest bytes.

    `stages` says of each how many ranks share its work. Layers with variables stay whole, in the order in which they
    are used; other nodes follow their inputs, and layers made of layers may be cut. The work of a layer is its
    floating-point operations. ArgumentError for more stages than layers.
    """
    outputs = at_nominal_size(outputs)
    layers, place = layers_of(outputs, batches, len(stages))
    work = [0] * len(layers)
    for node, k in place.items():
        work[k] += flops(node)
    ends = _cut(work, crossing(outputs, place, len(layers)), stages)
    return {name: bisect.bisect_right(ends, k) for k, name in enumerate(layers)}


def layers_of(outputs: Sequence[Node], batches: Collection[str], stages: int = 1) -> tuple[list[str], dict[Node, int]]:
    """The layers with variables, in the order in which they are used, and the number of each forward node's layer.

    ArgumentError if there are fewer than `stages`.
    """
    phase = phases(outputs, batches)
    nodes = [n for n in topological(outputs) if phase.get(n) == FORWARD]
    layers = [*dict.fromkeys(n.tags["layer"] for n in nodes if "layer" in n.tags and _reads_variable(n))]
    layers = [name for name in layers if not any(other.startswith(f"{name}/") for other in layers)]
    if stages > len(layers):
        raise ArgumentError(
            f"{stages} stages for {len(layers)} layers",
            fix="use fewer stages, or mark them: with ht.dist.stage(i): ...",
        )
    number = {name: k for k, name in enumerate(layers)}
    place: dict[Node, int] = {}
    for node in nodes:
        place[node] = number.get(node.tags.get("layer"), max((place[i] for i in node.inputs if i in place), default=0))
    return layers, place


def runs_of(
    layers: Sequence[str], pipelines: Sequence[Sequence[object]], cuts: Sequence[Mapping[str, int]]
) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Layer -> run of layers that no pipeline cuts, and of each run the stages that the pipelines have it on."""
    for cut, stages in zip(cuts, pipelines, strict=True):
        found = [cut.get(layer, -1) for layer in layers]
        if found != sorted(found) or {*found} != {*range(len(stages))}:
            raise ArgumentError(
                f"the cut {dict(cut)} of a pipeline of {len(stages)} stages",
                fix=f"give each layer a stage, from 0 on, in this order: {', '.join(layers)}",
            )
    at = {layer: tuple(cut[layer] for cut in cuts) for layer in layers}
    runs = [*dict.fromkeys(at.values())]
    return {layer: runs.index(stages) for layer, stages in at.items()}, runs


def crossing(outputs: Sequence[Node], place: dict[Node, int], layers: int) -> list[int]:
    """The bytes that a forward pass sends over the cut behind each layer; sizes have to be known."""
    sent = [0] * layers
    for node, readers in readers_of(topological(outputs)).items():
        if node in place:
            last = max((place[r] for r in readers if r in place), default=0)
            for k in range(place[node], last):
                sent[k] += _nbytes(node)
    return sent


def _reads_variable(node: Node) -> bool:
    """Whether it computes with a parameter, in whatever precision and order of axes."""
    read = [*node.inputs]
    for i in read:
        if i.role is Role.VARIABLE and i.attrs["trainable"]:
            return True
        read += i.inputs if i.role is Role.MOVE else ()
    return False


def at_nominal_size(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """The graph with a size for each unknown one. ArgumentError if no graph has these sizes."""
    sizes = {
        (n.name, axis): NOMINAL
        for n in topological(outputs)
        if n.role is Role.PLACEHOLDER
        for axis, size in enumerate(n.shape)
        if isinstance(size, Dim)
    }
    try:
        return specialize(outputs, sizes)
    except ShapeError as error:
        raise ArgumentError(
            f"cannot weigh the layers with {NOMINAL} for every unknown size: {error.message}",
            fix="mark the stages yourself: with ht.dist.stage(i): ...",
        ) from None


def _cut(work: Sequence[int], sent: Sequence[int], parts: Sequence[int]) -> list[int]:
    """Where the second, third, ... part begins: of cuts near the best balance the one that sends least.

    >>> _cut([4, 1, 1, 4], [9, 9, 1, 9], [1, 1]), _cut([10, 10, 10, 11], [9, 1, 9, 9], [1, 1])
    ([2], [2])
    >>> _cut([1] * 6, [1] * 6, [2, 1])
    [4]
    """
    total = [0, *itertools.accumulate(work)]
    pairs = [*itertools.combinations(range(len(total)), 2)]
    spans = sorted({(total[j] - total[i]) / ranks for i, j in pairs for ranks in {*parts}})
    best = spans[bisect.bisect_left(spans, True, key=lambda limit: bool(_cheapest(total, sent, parts, limit)))]
    (starts,) = _cheapest(total, sent, parts, best * SLACK)
    return starts


def _cheapest(total: Sequence[int], sent: Sequence[int], parts: Sequence[int], limit: float) -> list[list[int]]:
    """The one cut that sends least, if there is any, into parts of which a rank has `limit` at most."""
    found: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # end of the parts so far -> bytes, where parts begin
    for part, ranks in enumerate(parts):
        longer: dict[int, tuple[int, list[int]]] = {}
        for start, (cost, starts) in found.items():
            for end in range(start + 1, len(total)):
                if total[end] - total[start] > limit * ranks:
                    break
                here = (cost + (sent[start - 1] if start else 0), [*starts, start] if part else starts)
                longer[end] = min(longer.get(end, here), here)
        found = longer
    return [starts for end, (_, starts) in found.items() if end == len(total) - 1]
