"""Lab 5: all-reduce on a ring of ranks.

Ranks that train together must add up their gradients: every rank has an array, and every rank needs the sum of all. If
each sends its own to all others, n ranks send n (n - 1) whole arrays, and the more ranks, the slower. On a *ring*, rank
r sends to rank r + 1 only. The array is cut into n chunks, and each chunk travels around the ring twice: on the first
way the ranks add their own to it (*reduce-scatter*: in the end rank r has the whole sum of chunk r, and of no other),
on the second it is handed on as it is (*all-gather*). A rank sends 2 (n - 1) / n of its array, however many there are
(Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009).

`comm` is this rank's communicator: `comm.rank`, `comm.world_size`, `comm.exchange(sends, recvs)` with lists of
(rank to, array) and (rank from, buffer that the message fills). See transport.py.
"""

from itertools import pairwise

import numpy as np


def chunks(size, n):
    """The bounds (start, stop) of n chunks, which cover 0 to `size` in order. Where n does not divide `size`, the first
    ones are longer by one; they may be empty."""
    ### BEGIN SOLUTION
    least, more = divmod(size, n)
    starts = [k * least + min(k, more) for k in range(n + 1)]
    return list(pairwise(starts))
    ### END SOLUTION


def reduce_scatter(comm, x):
    """Add up the arrays `x` (one axis) of all ranks in n - 1 steps: afterward chunk r of rank r's `x` holds the sum.

    The other chunks of `x` are changed as well, to sums of some ranks. In each step a rank sends one chunk to its right
    neighbor, receives another from its left one and adds it to its own. Which is the first to leave, if rank r shall
    end with chunk r? Draw a table for three ranks.
    """
    ### BEGIN SOLUTION
    n, rank, bounds = comm.world_size, comm.rank, chunks(len(x), comm.world_size)
    for step in range(n - 1):
        sent, arriving = bounds[(rank - 1 - step) % n], bounds[(rank - 2 - step) % n]
        buffer = np.empty(arriving[1] - arriving[0], x.dtype)
        comm.exchange([((rank + 1) % n, x[slice(*sent)])], [((rank - 1) % n, buffer)])
        x[slice(*arriving)] += buffer
    ### END SOLUTION


def all_gather(comm, x):
    """Chunk r of rank r's `x` (one axis) is right: hand all chunks around, in n - 1 steps, until every `x` is."""
    ### BEGIN SOLUTION
    n, rank, bounds = comm.world_size, comm.rank, chunks(len(x), comm.world_size)
    for step in range(n - 1):
        sent, arriving = bounds[(rank - step) % n], bounds[(rank - 1 - step) % n]
        buffer = np.empty(arriving[1] - arriving[0], x.dtype)
        comm.exchange([((rank + 1) % n, x[slice(*sent)])], [((rank - 1) % n, buffer)])
        x[slice(*arriving)] = buffer
    ### END SOLUTION


def all_reduce(comm, x):
    """The sum of the arrays `x` of all ranks, on every rank: a new array of the shape and dtype of `x`.

    `x` has any shape, may be a transpose, and is not changed.
    """
    ### BEGIN SOLUTION
    flat = x.flatten()
    reduce_scatter(comm, flat)
    all_gather(comm, flat)
    return flat.reshape(x.shape)
    ### END SOLUTION


def broadcast(comm, x, root):
    """Give the array `x` (contiguous) of rank `root` to all ranks, in place, along a tree.

    In each round every rank that has it sends it to one that does not, so that 1, 2, 4, 8 ... ranks have it. Number the
    ranks from the root, around the ring: in round k those below 2 ** k send to the one that is 2 ** k further on.
    """
    ### BEGIN SOLUTION
    n, place = comm.world_size, (comm.rank - root) % comm.world_size
    have = 1
    while have < n:
        if place < have and place + have < n:
            comm.exchange([((comm.rank + have) % n, x)], [])
        elif have <= place < 2 * have:
            comm.exchange([], [((comm.rank - have) % n, x)])
        have *= 2
    ### END SOLUTION
