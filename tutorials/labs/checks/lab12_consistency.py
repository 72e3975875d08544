"""The checks of lab 12. A server is asked by lists of requests; times are played again here."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("12", "a parameter server: BSP, SSP, ASP", "lab12_consistency.py")
Requests = list[list[Any]]
SECONDS = [[1.0, 1.0, 1.0, 1.0], [3.0, 1.0, 1.0, 1.0]]


@lab.check("changes are added at once", hint="A push adds to the values; the next pull of any worker sees it.")
def added(student: Student) -> str:
    asked: Requests = [["push", 0, np.array([1.0, 2.0])], ["pull", 1], ["push", 1, np.array([3.0, 0.0])], ["pull", 0]]
    found = different(student.answers([0.0, 0.0], 2, 0, asked), [[1.0, 2.0], [4.0, 2.0]])
    ### BEGIN HIDDEN TESTS
    start, *changes = student.rng.normal(size=(5, 3))
    asked = [["push", k % 2, change] for k, change in enumerate(changes)]
    found = found or different(student.answers(start, 2, None, [*asked, ["pull", 0]]), [start + sum(changes)])
    ### END HIDDEN TESTS
    return found


@lab.check("what was pulled stays as it was", hint="A worker computes with what it pulled: give it a copy.")
def copied(student: Student) -> str:
    asked: Requests = [["pull", 0], ["push", 1, np.array([1.0])], ["pull", 0]]
    found = different(student.answers([5.0], 2, 0, asked), [[5.0], [6.0]])
    ### BEGIN HIDDEN TESTS
    start, change = student.rng.normal(size=(2, 3))
    asked = [["pull", 0], ["push", 1, change], ["pull", 0]]
    found = found or different(student.answers(start, 2, 0, asked), [start, start + change])
    ### END HIDDEN TESTS
    return found


def may(student: Student, slack: int | None, workers: int, asked: Requests, wanted: list[bool]) -> str:
    got = student.answers([0.0], workers, slack, asked)
    return "" if got == wanted else f"slack {slack}: may_go said {got!r:.120}, wanted {wanted!r:.120}"


@lab.check("slack 0: all begin a clock together", hint="Compare a worker's clock with that of the slowest.")
def bsp(student: Student) -> str:
    asked: Requests = [["may_go", 0], ["clock", 0], ["may_go", 0], ["may_go", 1], ["clock", 1], ["may_go", 0]]
    found = may(student, 0, 2, asked, [True, False, True, True])
    ### BEGIN HIDDEN TESTS
    found = found or course(student, 0)
    ### END HIDDEN TESTS
    return found


@lab.check("slack s: s clocks ahead, and no more", hint="Exactly s ahead of the slowest may still go.", points=2)
def ssp(student: Student) -> str:
    asked = [["clock", 0], ["may_go", 0], ["clock", 0], ["may_go", 0], ["clock", 0], ["may_go", 0], ["may_go", 2]]
    found = may(student, 2, 3, asked, [True, True, False, True])
    ### BEGIN HIDDEN TESTS
    for slack in (1, 2, 3):
        found = found or course(student, slack)
    ### END HIDDEN TESTS
    return found


@lab.check("no slack at all: nobody waits", hint="None is no number: ask for it first. (0 is one.)")
def asp(student: Student) -> str:
    asked: Requests = [*([["clock", 0]] * 9), ["may_go", 0], ["may_go", 1]]
    found = may(student, None, 2, asked, [True, True])
    ### BEGIN HIDDEN TESTS
    found = found or course(student, None) or course(student, 1)
    ### END HIDDEN TESTS
    return found


@lab.check("nobody waits for a worker that is gone", hint="The slowest of those that are still there counts.")
def gone(student: Student) -> str:
    asked: Requests = [["clock", 0], ["clock", 1], ["may_go", 0], ["leave", 2], ["may_go", 0], ["may_go", 1]]
    found = may(student, 0, 3, asked, [False, True, True])
    ### BEGIN HIDDEN TESTS
    for slack in (0, 1, 2):
        found = found or course(student, slack, leaving=True)
    ### END HIDDEN TESTS
    return found


def played(student: Student, seconds: list[list[float]], slack: int | None, wanted: list[list[float]]) -> str:
    return different(student.ends(seconds, slack), wanted, f"slack {slack}: ")


@lab.check("times under BSP", hint="A clock begins when the slowest has ended the one before.")
def times_bsp(student: Student) -> str:
    found = played(student, SECONDS, 0, [[1.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0]])
    ### BEGIN HIDDEN TESTS
    seconds = student.rng.integers(1, 9, (3, 6)).astype(float)
    steps = np.cumsum(np.concatenate([[0.0], seconds.max(0)]))[:-1]
    found = found or played(student, seconds.tolist(), 0, (steps + seconds).tolist())
    ### END HIDDEN TESTS
    return found


@lab.check(
    "times with slack",
    hint="Clock c waits until the slowest has ended clock c - 1 - s, if there is such a clock.",
    points=2,
)
def times_ssp(student: Student) -> str:
    found = played(student, SECONDS, 1, [[1.0, 2.0, 4.0, 5.0], [3.0, 4.0, 5.0, 6.0]])
    found = found or played(student, SECONDS, None, [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]])
    ### BEGIN HIDDEN TESTS
    for slack in (1, 2, 4, None):
        seconds = student.rng.integers(1, 9, (4, 8)).astype(float).tolist()
        found = found or played(student, seconds, slack, simulated(seconds, slack))
    ### END HIDDEN TESTS
    return found


@lab.check("what waiting costs", hint="A worker's time until its last clock ends, less the seconds that it computes.")
def costs(student: Student) -> str:
    found = different(student.waited(SECONDS, 0), 1 / 3) or different(student.waited(SECONDS, None), 0.0)
    ### BEGIN HIDDEN TESTS
    for slack in (0, 1, 3):
        seconds = student.rng.integers(1, 9, (4, 8)).astype(float).tolist()
        lost = max(1 - sum(own) / times[-1] for own, times in zip(seconds, simulated(seconds, slack)))
        found = found or different(student.waited(seconds, slack), lost, f"slack {slack}: ")
    ### END HIDDEN TESTS
    return found


### BEGIN HIDDEN TESTS
def course(student: Student, slack: int | None, leaving: bool = False) -> str:
    """A long course of clocks of four workers, after each of which all that are there are asked."""
    clocks, asked, wanted = {w: 0 for w in range(4)}, [], []
    for moment in range(24):
        if leaving and moment in (8, 16):
            slowest = min(clocks, key=lambda w: clocks[w])
            del clocks[slowest]
            asked.append(["leave", slowest])
        worker = int(student.rng.choice([*clocks]))
        clocks[worker] += 1
        asked.append(["clock", worker])
        for other, own in clocks.items():
            asked.append(["may_go", other])
            wanted.append(slack is None or all(own - behind <= slack for behind in clocks.values()))
    return may(student, slack, 4, asked, wanted)


def simulated(seconds: list[list[float]], slack: int | None) -> list[list[float]]:
    """Second by second: who is done ends its clock, then who may begins the next."""
    workers = range(len(seconds))
    ended: list[list[float]] = [[] for _ in workers]
    until: list[float | None] = [None for _ in workers]
    now = 0.0
    while any(len(ended[w]) < len(seconds[w]) for w in workers):
        for w in workers:
            if until[w] == now:
                ended[w].append(now)
                until[w] = None
        slowest = min(len(ended[w]) for w in workers)
        for w in workers:
            done = len(ended[w])
            if until[w] is None and done < len(seconds[w]) and (slack is None or done - slowest <= slack):
                until[w] = now + seconds[w][done]
        now += 1.0
    return ended


### END HIDDEN TESTS
