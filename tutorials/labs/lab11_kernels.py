"""Lab 11: kernels. After tutorial 12.

A kernel is what one thread does; a GPU runs thousands of them, in *blocks*. Threads of a block share a small memory,
can wait for each other, and run in *warps*, whose requests for neighboring numbers are served together. Here a kernel
is a Python generator: it yields what it asks of the memory, and the machine, which is in the grader, sees all of it.

    value = yield read("x", i)          a number of an array
    yield write("out", i, value)        put one there; "shared" is the memory of the block, a number for each thread
    yield add("out", i, value)          add to one, in a way that no other thread can disturb
    yield wait()                        go on when all threads of the block are here

Blocks run in any order, and so do the threads of a block between two waits: two threads that touch the same place, one
of them writing, must be separated by a wait, or both add. Check yourself with `hetu lab check 11`.
"""

from typing import NamedTuple


class Thread(NamedTuple):
    block: int  # its number, from 0
    thread: int  # its number in its block, from 0
    block_size: int


def read(array, index):
    return "read", array, index


def write(array, index, value):
    return "write", array, index, value


def add(array, index, value):
    return "add", array, index, value


def wait():
    return ("wait",)


def blocks_for(n, block_size):
    """How many blocks have a thread for each of `n` numbers."""
    ### BEGIN SOLUTION
    return -(-n // block_size)
    ### END SOLUTION


def saxpy(t, n, a):
    """out[i] = a * x[i] + y[i] for each i below n: one number for each thread, and nothing for threads beyond."""
    ### BEGIN SOLUTION
    i = t.block * t.block_size + t.thread
    if i < n:
        x = yield read("x", i)
        y = yield read("y", i)
        yield write("out", i, a * x + y)
    ### END SOLUTION


def total(t, n, blocks):
    """Add the sum of x[0] to x[n - 1] to out[0]. There are `blocks` blocks, maybe far fewer threads than numbers.

    Each thread adds up some numbers; neighboring threads should take neighboring ones at the same time. Then threads of
    a block add up their sums in shared memory: first the lower half adds those of the upper half, then the lower
    quarter those of the second, and so on. Block sizes are powers of 2. In the end one thread of each block adds to
    out[0].
    """
    ### BEGIN SOLUTION
    i, own = t.block * t.block_size + t.thread, 0.0
    while i < n:
        own += yield read("x", i)
        i += t.block_size * blocks
    yield write("shared", t.thread, own)
    half = t.block_size // 2
    while half:
        yield wait()
        if t.thread < half:
            lower = yield read("shared", t.thread)
            upper = yield read("shared", t.thread + half)
            yield write("shared", t.thread, lower + upper)
        half //= 2
    if t.thread == 0:
        yield add("out", 0, (yield read("shared", 0)))
    ### END SOLUTION


def histogram(t, n):
    """Count in out[k] how often k stands among x[0] to x[n - 1], whole numbers; one for each thread."""
    ### BEGIN SOLUTION
    i = t.block * t.block_size + t.thread
    if i < n:
        k = yield read("x", i)
        yield add("out", int(k), 1)
    ### END SOLUTION
