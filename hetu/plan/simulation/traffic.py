"""How many bytes one step of a program sends between ranks, by ring algorithms and without the headers of messages.

Traffic to servers depends on the ids, so the servers count it (`Client.status`).
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.graph import Node
from ...core.program import Program

# The bytes that each of n ranks sends when its operand has `nbytes`.
SENDS: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda n, nbytes: 2 * (n - 1) * nbytes // n,
    "reduce_scatter": lambda n, nbytes: (n - 1) * nbytes // n,
    "all_to_all": lambda n, nbytes: (n - 1) * nbytes // n,
    "all_gather": lambda n, nbytes: (n - 1) * nbytes,
}


def sent(node: Node) -> int:
    """The bytes that a rank gives to a collective: its inputs, or what packs them, the first of several results."""
    types = node.type[:1] if isinstance(node.type, tuple) else [i.tensor for i in node.inputs]
    return sum(int(t.nbytes) for t in types)


def bytes_between_ranks(program: Program, ranks: int) -> int:
    """Bytes that this rank sends to others per step, if all ranks take part in each collective.

    >>> import hetu as ht
    >>> from hetu.dist import DataParallel, run_ranks
    >>> def work(comm):
    ...     x, w = ht.placeholder("x", (None, 100)), ht.variable("w", ht.init.zeros, (100, 1))
    ...     loss = ht.mean(x @ w)
    ...     ex = ht.Executor([ht.optim.SGD(0.1).minimize(loss)], strategy=DataParallel(), comm=comm)
    ...     return bytes_between_ranks(ex.program({x: np.ones((4, 100))}), comm.world_size)
    >>> import numpy as np
    >>> run_ranks(2, work)
    [400, 400]
    """
    nodes = [s.node for s in program.steps if s.node.op.collective in SENDS]
    return sum(SENDS[n.op.collective](ranks, sent(n)) for n in nodes)
