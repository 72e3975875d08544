"""How many bytes one step of a program sends between ranks, by ring algorithms and without the headers of messages.

Traffic to servers depends on the ids, so the servers count it (`Client.status`).
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.program import Program

# The bytes that each of n ranks sends when its operand has `nbytes`.
SENDS: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda n, nbytes: 2 * (n - 1) * nbytes // n,
    "reduce_scatter": lambda n, nbytes: (n - 1) * nbytes // n,
    "all_to_all": lambda n, nbytes: (n - 1) * nbytes // n,
    "all_gather": lambda n, nbytes: (n - 1) * nbytes,
}


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
    given = [(n.op.collective, sum(int(i.tensor.nbytes) for i in n.inputs)) for n in (s.node for s in program.steps)]
    return sum(SENDS[kind](ranks, nbytes) for kind, nbytes in given if kind in SENDS)
