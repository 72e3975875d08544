"""How many bytes one step of a program sends between ranks, by ring algorithms and without the headers of messages.

Traffic to servers depends on the ids, so the servers count it (`Client.status`).
"""

from __future__ import annotations

from ...core.program import Program

# How often each byte of a rank's operand is sent by it, of n ranks.
SENDS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
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
    sent = 0.0
    for step in program.steps:
        if (kind := step.node.op.collective) in SENDS:
            sent += SENDS[kind](ranks) * sum(int(i.tensor.nbytes) for i in step.node.inputs)
    return round(sent)
