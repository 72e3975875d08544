"""Lab 9: a parameter server, stale synchronous parallel, and a cache.

The weights can also live on a *server*: workers pull what they need, and push changes, which the server adds up. They
need not wait for each other in every step. In *stale synchronous parallel* (SSP) each worker has a clock, the number of
steps that it has ended, and may be ahead of the slowest by at most a bound s, the *staleness*. With s = 0 all begin
each step together (bulk synchronous, BSP); without a bound nobody ever waits (ASP), but training may not converge.
With one, a worker may also use rows that are up to s of its own clocks old, so it keeps them in a *cache* and pulls
less (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013; with an
embedding table: Miao et al., "HET", VLDB 2022).

The table has rows of one width. Row numbers, *ids*, are integers and may occur twice in one request: as an embedding
table is asked for. A whole network can be kept in rows as well (`to_rows`).
"""

from collections import OrderedDict

import numpy as np

PULL, PUSH, TICK, END = range(4)


class Server:
    """A table (rows, width) of which the server has a copy of its own, and the clock of each of `workers` workers.

    `staleness` is the bound, or None for none.
    """

    def __init__(self, table, workers, staleness):
        ### BEGIN SOLUTION
        self.table, self.clocks, self.staleness = table.copy(), [0] * workers, staleness
        ### END SOLUTION

    def may_start(self, worker):
        """Whether the worker may begin a step: its clock is at most `staleness` ahead of the slowest."""
        ### BEGIN SOLUTION
        return self.staleness is None or self.clocks[worker] - min(self.clocks) <= self.staleness
        ### END SOLUTION

    def tick(self, worker):
        """The worker has ended a step."""
        self.clocks[worker] += 1

    def pull(self, ids):
        """The rows `ids`, as they are now: later pushes do not change what was given away."""
        ### BEGIN SOLUTION
        return self.table[ids]
        ### END SOLUTION

    def push(self, ids, changes):
        """Add `changes` (a row for each id) to the rows. An id that occurs twice gets both."""
        ### BEGIN SOLUTION
        np.add.at(self.table, ids, changes)
        ### END SOLUTION


class Cache:
    """Up to `capacity` rows of the table on a worker, each with the worker's clock when it was pulled.

    A row is fresh while the clock now is at most `staleness` beyond that. When it is full, the row which was not read
    for the longest time makes place (*least recently used*); the ids of one request are read in their order, and may be
    more than there is place for. `pulled` counts the rows asked of the server.
    """

    def __init__(self, capacity, staleness):
        self.capacity, self.staleness, self.pulled = capacity, staleness, 0
        self.rows = OrderedDict()  # id: [clock, row], the least recently read first

    def read(self, ids, clock, pull):
        """An array of the rows `ids`. `pull(ids)` asks the server; call it at most once, for each id that is needed
        once, in rising order: what is not cached, or not fresh. The result is the caller's: writing into it changes no
        cached row."""
        ### BEGIN SOLUTION
        fresh = {i: entry[1] for i, entry in self.rows.items() if clock - entry[0] <= self.staleness}
        needed = sorted({int(i) for i in ids} - fresh.keys())
        if needed:
            self.pulled += len(needed)
            for i, row in zip(needed, pull(np.array(needed))):
                fresh[i] = row
                self.rows[i] = [clock, np.array(row)]
        result = np.array([fresh[int(i)] for i in ids])
        for i in ids:
            self.rows.move_to_end(int(i))
        while len(self.rows) > self.capacity:
            self.rows.popitem(last=False)
        return result
        ### END SOLUTION

    def add(self, ids, changes):
        """The worker has pushed these changes: cached rows get them as well, so that it sees what it did itself."""
        ### BEGIN SOLUTION
        for i, change in zip(ids, changes):
            if int(i) in self.rows:
                self.rows[int(i)][1] += change
        ### END SOLUTION


def finish_times(durations, staleness):
    """When each worker ends each of its steps, in seconds: a list of lists, from the duration of each step, alike.

    A worker begins step k (from 0) when it has ended step k - 1 and all others have ended step k - 1 - staleness, if
    there is one: its clock is then k, and nobody's is below k - staleness. Nothing else takes time. None: no waiting.
    """
    ### BEGIN SOLUTION
    ended = [[] for _ in durations]
    for k in range(len(durations[0])):
        start = 0.0
        if staleness is not None and k - 1 - staleness >= 0:
            start = max(times[k - 1 - staleness] for times in ended)
        for times, mine in zip(ended, durations):
            times.append(max(start, times[-1] if times else 0.0) + mine[k])
    return ended
    ### END SOLUTION


def to_rows(weights, width):
    """All arrays of the dict `weights`, one after the other, as a float32 table with rows of `width`; the rest is 0."""
    ### BEGIN SOLUTION
    flat = np.concatenate([array.reshape(-1) for array in weights.values()]).astype(np.float32)
    table = np.zeros((-(-flat.size // width), width), np.float32)
    table.reshape(-1)[: flat.size] = flat
    return table
    ### END SOLUTION


def from_rows(table, shapes):
    """{name: array} again, for {name: shape} in the same order."""
    ### BEGIN SOLUTION
    weights, start, flat = {}, 0, table.reshape(-1)
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        weights[name] = flat[start : start + size].reshape(shape)
        start += size
    return weights
    ### END SOLUTION


def serve(comm, server):
    """Answer all workers until each has ended. Worker w is rank w; the server is the last rank of `comm`.

    A request is one array of int64, [kind, ids ...]. After PUSH comes another with the changes. PULL is answered with
    the rows. TICK says that a step has ended, and is answered (by an empty array) once the worker may begin its next
    one: until then it waits, and the server goes on with the others. END is the worker's last, and nobody waits for it
    any more. `comm.recv()` is the next array of any rank: (rank, array).
    """
    ### BEGIN SOLUTION
    waiting, working = [], comm.world_size - 1
    while working:
        worker, request = comm.recv()
        kind, ids = request[0], request[1:]
        if kind == PULL:
            comm.send(worker, server.pull(ids))
        elif kind == PUSH:
            server.push(ids, comm.recv(worker))
        elif kind == TICK:
            server.tick(worker)
            waiting.append(worker)
        else:
            server.clocks[worker] = float("inf")
            working -= 1
        for other in [w for w in waiting if server.may_start(w)]:
            waiting.remove(other)
            comm.send(other, np.zeros(0, np.float32))
    ### END SOLUTION


class Worker:
    """A worker's side of `serve`, with its cache. Given."""

    def __init__(self, comm, cache):
        self.comm, self.cache, self.server, self.clock = comm, cache, comm.world_size - 1, 0

    def request(self, kind, ids=()):
        self.comm.send(self.server, np.array([kind, *ids], np.int64))

    def pull(self, ids):
        self.request(PULL, ids)
        return self.comm.recv(self.server)

    def read(self, ids):
        return self.cache.read(ids, self.clock, self.pull)

    def push(self, ids, changes):
        self.request(PUSH, ids)
        self.comm.send(self.server, changes)
        self.cache.add(ids, changes)

    def tick(self):
        self.request(TICK)
        self.comm.recv(self.server)
        self.clock += 1

    def end(self):
        self.request(END)
