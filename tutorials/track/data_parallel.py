"""Lab 6: data parallel training.

Every rank has the whole network, and computes on its own part of each batch. The gradient of a mean over the batch is
the mean of the gradients of its parts, if the parts are of one size. So after each backward pass the ranks average
their gradients, and all make the same update to the same weights: they stay equal without ever sending a weight again.

Sending many small arrays is slow, as each message has its own latency. Gradients are therefore joined into *buckets*
of a few megabytes, from the last layer to the first, since backward the last one is ready first (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.2).
"""

import numpy as np
from ring import all_reduce, broadcast


def shard(numbers, rank, n):
    """This rank's part of a batch, an array of sample numbers: the n parts are of one size, follow each other in the
    order of the ranks, and together are the batch. ValueError if n does not divide it."""
    ### BEGIN SOLUTION
    if len(numbers) % n:
        raise ValueError(f"{n} ranks cannot share {len(numbers)} samples equally")
    size = len(numbers) // n
    return numbers[rank * size : (rank + 1) * size]
    ### END SOLUTION


def buckets(sizes, limit):
    """Lists of names: {name: bytes} divided into buckets, filled in the reverse order of `sizes`.

    A bucket is closed when the next gradient would take it above `limit` bytes. One that is larger by itself has a
    bucket of its own; no bucket is empty.
    """
    ### BEGIN SOLUTION
    found, filled = [], limit + 1
    for name in reversed(sizes):
        if filled + sizes[name] > limit:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += sizes[name]
    return found
    ### END SOLUTION


def average(comm, arrays, limit):
    """The mean over all ranks of each array of the dict `arrays`, as a dict of new arrays: one all-reduce per bucket.

    All arrays have one dtype. Shapes, dtype and the order of names are as in `arrays`.
    """
    ### BEGIN SOLUTION
    means = dict.fromkeys(arrays)
    for names in buckets({name: array.nbytes for name, array in arrays.items()}, limit):
        flat = all_reduce(comm, np.concatenate([arrays[name].reshape(-1) for name in names])) / comm.world_size
        start = 0
        for name in names:
            size = arrays[name].size
            means[name] = flat[start : start + size].reshape(arrays[name].shape).astype(arrays[name].dtype)
            start += size
    return means
    ### END SOLUTION


class DataParallel:
    """A `Model` (lab 4) on the ranks of `comm`: the same calls, with one batch for all ranks.

    `model` takes one rank's part of a batch. All ranks must begin with the same weights: `start` sees to it.
    """

    def __init__(self, model, comm, limit=1 << 20):
        self.model, self.comm, self.limit = model, comm, limit

    def start(self, weights):
        """Give the weights of rank 0 (a dict of arrays) to all, in place, in the order of the dict."""
        ### BEGIN SOLUTION
        for array in weights.values():
            broadcast(self.comm, array, 0)
        ### END SOLUTION

    def gradients(self, weights, x, labels):
        """(loss, {name: gradient}) of the whole batch (x, labels), from this rank's part of it. All ranks get the same.

        The loss is averaged with the gradients: it is one number more in a bucket, and no message of its own.
        """
        ### BEGIN SOLUTION
        mine = shard(np.arange(len(x)), self.comm.rank, self.comm.world_size)
        loss, found = self.model.gradients(weights, x[mine], labels[mine])
        means = average(self.comm, found | {"loss": np.array([loss], np.float32)}, self.limit)
        return float(means.pop("loss")[0]), means
        ### END SOLUTION
