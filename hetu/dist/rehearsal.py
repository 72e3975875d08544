"""Some steps under a strategy before there are ranks: on threads of this process, with what they hold and send.

Left out: time, which `hetu.plan.trace` and `simulate` tell, and servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.executor import Executor
from ..ranges import AtLeast1
from .comm.comm import Comm
from .comm.threads import run_ranks


@dataclass(frozen=True)
class Rehearsal:
    """What the steps made, as rank 0 saw it: `fetched` is what each returned, `sent` are the collectives of one, each
    by its kind and the shape that this rank gives. Of each rank, `kept` are the bytes of variables, `arena` the rest.
    """

    fetched: tuple[Sequence[Any], ...]
    sent: list[tuple[str, tuple[int, ...]]]
    kept: tuple[int, ...]
    arena: tuple[int, ...]

    @property
    def losses(self) -> list[float]:
        """The number that was fetched first, of each step."""
        return [float(values[0]) for values in self.fetched]

    def __str__(self) -> str:
        sent = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _ in self.sent).items())
        return f"{max(self.kept):,} bytes kept; {sent or 'nothing'} sent"


def rehearse(
    entries: Sequence[Any], strategy: Any, feed: Mapping[Any, Any], *, world_size: AtLeast1, steps: AtLeast1 = 1
) -> Rehearsal:
    """Run `steps` steps of `entries` (what an executor is given) on `world_size` ranks that are threads, at most 8.

    The first check of any strategy: its losses are those of one process, which are `rehearse(entries, None, feed,
    world_size=1, steps=...).losses`. Errors are those of the executor and of `run_ranks`.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (None, 4)), ht.variable("w", ht.init.ones, (4, 6))
    >>> tried = rehearse([ht.sum(x @ w)], ht.dist.TensorParallel({"w": 1}), {x: [[1.0] * 4]}, world_size=2)
    >>> print(tried, tried.losses)
    48 bytes kept; 1 all_reduce sent [24.0]
    """

    def act(comm: Comm) -> tuple[Any, ...]:
        executor = Executor(entries, strategy=strategy, comm=comm)
        fetched = tuple(executor.run(feed) for _ in range(steps))
        program = executor.program(feed)
        nodes = [step.node for step in program.steps if step.node.op.collective and step.node.inputs]
        sent = [(node.op.collective, tuple(map(int, node.inputs[0].shape))) for node in nodes]
        kept = sum(part.nbytes for part in executor.state.arrays.values())
        return fetched, sent, kept, program.plan.arena_bytes

    played = run_ranks(world_size, act)
    fetched, sent, *_ = played[0]
    return Rehearsal(fetched, sent, *(tuple(rank[k] for rank in played) for k in (2, 3)))
