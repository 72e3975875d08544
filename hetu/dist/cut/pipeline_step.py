"""Each rank's part of a pipelined training step: the layouts, and the walk that makes its graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...core.errors import GraphError, ShapeError
from ...core.graph import Node, topological
from ...core.placement import Local
from ..layout.deduce import Deduction, PartsOf
from ..layout.rules import rule_of
from .partition import partition, settled
from .pipeline_batches import Averaging, PipeDream
from .pipeline_layouts import Stages
from .pipeline_strategy import Staged
from .pipeline_walk import Pipelined


@partition.register(Staged)
def pipelined(
    strategy: Staged, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()
) -> Callable[[int], Local]:
    """What gives each rank its part of a pipelined step. Sizes in the graph are known, and global except where each
    micro-batch is a batch of its own. `effects` are those of `partition`, each once for every micro-batch that it is
    split along.
    """
    outputs, acting = (*fetches, *updates.values(), *effects), len(fetches) + len(updates)
    whole = _read_whole(outputs, strategy) if updates else None
    count = _microbatches(outputs, strategy, whole, exact=bool(updates))
    walk: type[Pipelined] = Pipelined
    if updates and strategy.own_batches:
        walk = PipeDream if strategy.schedule == "pipedream" else Averaging
    steps = _laid_out(outputs, strategy, count if walk is Pipelined else 1, apart=walk is not Pipelined)
    if (refused := steps.check(steps.outputs[acting:])) is not None:
        if updates:
            raise whole or refused
        count, steps = 1, _laid_out(outputs, strategy, 1)  # it changes nothing, and is right in one piece
        steps.check()
    made = steps.outputs
    kept, new, acts = made[: len(fetches)], dict(zip(updates, made[len(fetches) : acting])), made[acting:]
    return lambda rank: walk(steps, strategy, rank, count).run(kept, new, acts)


def _laid_out(outputs: Sequence[Node], strategy: Staged, count: int, *, apart: bool = False) -> Stages:
    """The graph with layouts over `count` micro-batches, what may not be split as it is decomposed."""
    steps: Stages

    def lay(outputs: Sequence[Node], parts: PartsOf) -> Deduction:
        nonlocal steps
        steps = Stages(outputs, strategy, count, parts=parts, apart=apart)
        return steps.found

    settled(outputs, strategy, lay)
    return steps


def _read_whole(outputs: Sequence[Node], strategy: Staged) -> GraphError | None:
    """What to say, should micro-batches wait for it, of an operator that reads a feed whole along the axis of the batch
    and has no parts, as those of bags do: which entries belong to which samples only the numbers say."""
    for node in topological(outputs) if strategy.microbatches > 1 else ():
        rule = rule_of(node) if node.inputs and node.op.decompose_rule is None else None
        for k, feed in enumerate(node.inputs if rule else ()):
            axis = strategy.batch_axis(feed)
            if rule and axis is not None and rule.factor(rule.inputs[k], axis) in rule.fixed:
                return GraphError(
                    f"{node!r} reads all of {feed.name!r} at once, which would be fed in {strategy.microbatches} "
                    "micro-batches",
                    fix="use what looks at single samples, for bags ht.nn.EmbeddingBag of ids (samples, most), 0 "
                    "where there are none; or feed one micro-batch",
                    site=node.site,
                )
    return None


def _microbatches(outputs: Sequence[Node], strategy: Staged, whole: GraphError | None, exact: bool) -> int:
    """The number of micro-batches: if `exact` the strategy's, else the largest divisor of it and of the batch."""
    if exact and strategy.own_batches:
        return strategy.microbatches
    if not exact and strategy.local:
        return 1  # so that samples come out in the order of the ranks, as they were fed
    count = strategy.microbatches
    for node in topological(outputs):
        axis = strategy.batch_axis(node)
        if axis is None:
            continue
        size = int(node.shape[axis])
        if exact and size % count:
            raise whole or ShapeError(
                f"a batch of {size} in {node.name!r} does not divide into {count} micro-batches",
                fix="feed batches of a multiple of microbatches, or drop the last one: DataLoader(..., drop_last=True)",
                site=node.site,
            )
        count = math.gcd(count, size)
    return count
