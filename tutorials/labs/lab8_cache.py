"""Lab 8: a cache of embedding rows. After tutorial 8.

A table of a billion rows lies on a server; a worker reads some rows in every step, and a few of them again and again.
It keeps copies of those. While it computes, other workers change the table, so that a copy grows old: one that was
pulled `bound` clocks ago may still be used, an older one may not.

The worker's own changes go into its copy at once, so that it sees them, and to the server later, together.

Check yourself with `hetu lab check 8`: it counts every request to the server.
"""

from typing import Any


class Cache:
    """At most `capacity` copies of rows. `server.pull(row)` returns a row, `server.push(row, change)` adds to it.

    Rows are NumPy arrays. Each request costs the same, so make none that is not needed.
    """

    def __init__(self, server: Any, capacity: int, bound: int) -> None:
        self.server, self.capacity, self.bound = server, capacity, bound
        ### BEGIN SOLUTION
        self.copies: dict[int, list[Any]] = {}  # row: [copy, clock when pulled, change to send], by last use
        ### END SOLUTION

    def read(self, row: int, clock: int) -> Any:
        """The row at this clock: the copy if it is young enough, else pulled from the server.

        If there is no room for another copy, the one that was *read* longest ago leaves. What was changed in a copy is
        sent before it leaves, and before it is pulled again.
        """
        ### BEGIN SOLUTION
        copy = self.copies.pop(row, None)
        if copy is None or clock - copy[1] > self.bound:
            if copy is not None:
                self.send(row, copy)
            elif len(self.copies) == self.capacity:
                oldest = next(iter(self.copies))
                self.send(oldest, self.copies.pop(oldest))
            copy = [self.server.pull(row), clock, None]
        self.copies[row] = copy
        return copy[0]
        ### END SOLUTION

    def add(self, row: int, change: Any) -> None:
        """Add to a row: to its copy, to be sent later; at once to the server if there is none."""
        ### BEGIN SOLUTION
        if row not in self.copies:
            self.server.push(row, change)
            return
        copy = self.copies[row]
        copy[0] = copy[0] + change
        copy[2] = change if copy[2] is None else copy[2] + change
        ### END SOLUTION

    def flush(self) -> None:
        """Send all changes that were not sent yet, each row's in one request. The copies stay."""
        ### BEGIN SOLUTION
        for row, copy in self.copies.items():
            self.send(row, copy)
        ### END SOLUTION

    def send(self, row: int, copy: Any) -> None:
        """Send what was changed in a copy, if anything was."""
        ### BEGIN SOLUTION
        if copy[2] is not None:
            self.server.push(row, copy[2])
            copy[2] = None
        ### END SOLUTION
