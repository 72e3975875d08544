"""Lab 3: a program with a memory plan.

To run a graph a thousand times, work out once what is the same each time: the order of the calls, and where each value
lies. A value needs memory from the call that writes it to the last call that reads it. Two values that are never alive
together can share the same bytes, so one block of memory, the *arena*, holds all of them at *offsets* that are found
once. What remains of a step is a flat list of calls without a decision in it: the *program*.

A reshape moves nothing. Its result is a *view*: the memory of its input in another shape, which must then stay alive
as long as the view is read, or a view of the view.
"""

import numpy as np
from values import placeholder, reshape, topological_order

ALIGNMENT = 64  # bytes: a line of the cache, and the widest registers


def storage_of(node):
    """The node whose memory `node` lies in: that of its input for a reshape, which may be one itself; else its own."""
    ### BEGIN SOLUTION
    while node.operator is reshape:
        node = node.inputs[0]
    return node
    ### END SOLUTION


def lifetimes(order, outputs):
    """{node: [first, last]} for each node with memory in the arena: the numbers of the calls between which it is alive.

    `order` is a topological order; call k makes order[k]. A node is alive from the call that makes it to the last that
    reads it or a view of it, both included (no result may overwrite what its own call still reads). Outputs are read
    after the last call, so they live to `len(order)`. Reshapes have no memory; neither have placeholders in the arena,
    as they keep what they are fed.
    """
    ### BEGIN SOLUTION
    alive = {}
    for k, node in enumerate(order):
        if node.operator not in (placeholder, reshape):
            alive[node] = [k, k]
        for x in node.inputs:
            if storage_of(x) in alive:
                alive[storage_of(x)][1] = k
    for node in outputs:
        if storage_of(node) in alive:
            alive[storage_of(node)][1] = len(order)
    return alive
    ### END SOLUTION


def plan(blocks):
    """(offsets, size of the arena) for a list of blocks (bytes, first, last), so that no two which are alive together
    overlap. Offsets are multiples of ALIGNMENT and stand in the order of `blocks`.

    Finding the smallest arena is NP-hard; greedy by size comes within a few percent (Pisarchyk and Lee, "Efficient
    Memory Management for Deep Neural Net Inference", 2020). Place large blocks first, of equal ones the first in the
    list. Each goes to the lowest offset where it fits between the placed blocks that are alive together with it.
    """
    ### BEGIN SOLUTION
    offsets, placed, arena = [0] * len(blocks), [], 0
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i][0]):
        nbytes, first, last = blocks[i]
        offset = 0
        for start, end, j in sorted(placed):
            if blocks[j][1] <= last and first <= blocks[j][2]:
                if offset + nbytes <= start:
                    break
                offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[i] = offset
        placed.append((offset, offset + nbytes, i))
        arena = max(arena, offset + nbytes)
    return offsets, arena
    ### END SOLUTION


class Program:
    """The graph of `outputs` (nodes), made ready to be run many times, with numbers of one dtype.

    `arena` is its memory, an array of bytes; `fed` maps each placeholder to its array; `calls` is a list of
    (forward, out, arrays, attrs).
    """

    def __init__(self, outputs, dtype=np.float32):
        ### BEGIN SOLUTION
        order = topological_order(outputs)
        alive = lifetimes(order, outputs)
        blocks = [(int(np.prod(n.shape)) * np.dtype(dtype).itemsize, *alive[n]) for n in alive]
        offsets, size = plan(blocks)
        self.arena = np.empty(size, np.uint8)
        self.fed = {node: np.zeros(node.shape, dtype) for node in order if node.operator is placeholder}
        arrays = dict(self.fed)
        for node, offset, (nbytes, *_) in zip(alive, offsets, blocks):
            arrays[node] = self.arena[offset : offset + nbytes].view(dtype).reshape(node.shape)
        self.calls = []
        for node in order:
            if node.operator is reshape:
                arrays[node] = arrays[node.inputs[0]].reshape(node.shape)
            elif node in alive:
                read = [arrays[x] for x in node.inputs]
                self.calls.append((node.operator.forward, arrays[node], read, node.attrs))
        self.results = [arrays[node] for node in outputs]
        ### END SOLUTION

    def run(self, feeds):
        """The arrays of the outputs. They belong to the caller: the next run must not change them.

        `feeds` maps placeholders to arrays; one that is missing keeps the value it was fed before.
        """
        ### BEGIN SOLUTION
        for node, array in feeds.items():
            self.fed[node][...] = array
        for forward, out, arrays, attrs in self.calls:
            forward(out, *arrays, **attrs)
        return [result.copy() for result in self.results]
        ### END SOLUTION
