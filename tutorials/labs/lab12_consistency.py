"""Lab 12: a parameter server, and how far its workers may drift apart. After tutorial 7.

Workers pull values, compute, push a change and say that a *clock* is over. How long does a fast one wait for a slow?
With `slack` s a worker may begin a clock only if the slowest has ended all clocks but the last s before it:

    slack 0       BSP: all begin a clock together
    slack s       SSP: stale synchronous parallel (Q. Ho et al., 2013)
    slack None    ASP: nobody waits

Check yourself with `hetu lab check 12`.
"""

import numpy as np


class Server:
    """Values for `workers` workers, which are numbered from 0."""

    def __init__(self, values, workers, slack):
        self.values, self.slack = np.array(values, float), slack
        self.clocks = dict.fromkeys(range(workers), 0)  # how many clocks each worker has ended

    def pull(self, worker):
        """The values as they are now; what is pushed later does not change what was pulled."""
        ### BEGIN SOLUTION
        return self.values.copy()
        ### END SOLUTION

    def push(self, worker, change):
        """Add a change to the values at once."""
        ### BEGIN SOLUTION
        self.values += change
        ### END SOLUTION

    def clock(self, worker):
        """A worker has ended a clock."""
        ### BEGIN SOLUTION
        self.clocks[worker] += 1
        ### END SOLUTION

    def may_go(self, worker):
        """Whether a worker may begin its next clock, True or False."""
        ### BEGIN SOLUTION
        return self.slack is None or self.clocks[worker] - min(self.clocks.values()) <= self.slack
        ### END SOLUTION

    def leave(self, worker):
        """A worker is gone, and nobody waits for it any more."""
        ### BEGIN SOLUTION
        del self.clocks[worker]
        ### END SOLUTION


def ends(seconds, slack):
    """When each worker ends each clock: a list like `seconds`, whose [worker][clock] say how long it computes.

    All begin at 0 and have the same number of clocks. A worker begins a clock when its last is over and slack allows.
    """
    ### BEGIN SOLUTION
    workers, clocks = range(len(seconds)), range(len(seconds[0]))
    ended = [[0.0] * len(clocks) for _ in workers]
    for clock in clocks:
        for worker in workers:
            begin = ended[worker][clock - 1] if clock else 0.0
            if slack is not None and clock > slack:
                begin = max(begin, *(ended[other][clock - 1 - slack] for other in workers))
            ended[worker][clock] = begin + seconds[worker][clock]
    return ended
    ### END SOLUTION


def waited(seconds, slack):
    """The part of the time, until its own last clock ends, for which the worker that waits most does nothing."""
    ### BEGIN SOLUTION
    totals = [times[-1] for times in ends(seconds, slack)]
    return max(1 - sum(own) / total for own, total in zip(seconds, totals))
    ### END SOLUTION
