"""The checks of lab 8. The table lies here, and every request is counted."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different, first

lab = Lab("8", "a cache of embedding rows", "lab8_cache.py")
Actions = list[list[Any]]
KNOWN = np.arange(40.0).reshape(10, 4)


class Table:
    """Rows, and the requests for them in order."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows.copy()
        self.requests: list[tuple[str, int]] = []

    def pull(self, row: int) -> np.ndarray:
        self.requests.append(("pull", int(row)))
        made: np.ndarray = self.rows[int(row)].copy()
        return made

    def push(self, row: int, change: np.ndarray) -> None:
        self.requests.append(("push", int(row)))
        self.rows[int(row)] += change


def used(student: Student, rows: np.ndarray, capacity: int, bound: int, actions: Actions) -> tuple[list[Any], Table]:
    """What the student's cache reads, and the table afterward."""
    table = Table(rows)
    student.serves = {"pull": table.pull, "push": table.push}
    return student.used(capacity, bound, actions), table


def compared(
    student: Student, capacity: int, bound: int, actions: Actions, wanted: list[str], rows: np.ndarray = KNOWN
) -> str:
    """Whether these requests were made (and no value is made up: rows are read as the table and changes say)."""
    read, table = used(student, rows, capacity, bound, actions)
    made = [f"{kind} {row}" for kind, row in table.requests]
    return different(made, wanted, "requests: ") or different(read, seen(rows, actions), "what was read: ")


def seen(rows: np.ndarray, actions: Actions) -> list[np.ndarray]:
    """What is read where nobody else changes the table: the rows with one's own changes."""
    rows, made = rows.copy(), []
    for name, *args in actions:
        if name == "add":
            rows[args[0]] += args[1]
        elif name == "read":
            made.append(rows[args[0]].copy())
    return made


def reads(*rows: int, clock: int = 0) -> Actions:
    return [["read", row, clock] for row in rows]


ONE = np.ones(4)


@lab.check("what is not there is pulled, and what is there is not pulled again", hint="Keep what was pulled, by row.")
def hits(student: Student) -> str:
    wanted = ["pull 3", "pull 5"]
    found = compared(student, 4, 9, reads(3, 3, 5, 3, 5), wanted)
    ### BEGIN HIDDEN TESTS
    found = found or drawn(student, capacity=10, bound=99, adds=0.0)
    ### END HIDDEN TESTS
    return found


@lab.check(
    "a copy is used until it is older than the bound",
    hint="Compare the clock now with the clock when it was pulled. One that is exactly `bound` old may still be used.",
    points=2,
)
def stale(student: Student) -> str:
    actions = [["read", 1, clock] for clock in (0, 2, 3, 5, 6)]
    found = compared(student, 4, 2, actions, ["pull 1", "pull 1", "pull 1"])
    ### BEGIN HIDDEN TESTS
    found = found or drawn(student, capacity=10, bound=int(student.rng.integers(2, 6)), adds=0.0)
    ### END HIDDEN TESTS
    return found


@lab.check("no more copies are kept than there is room for", hint="Make room before you keep another one.")
def full(student: Student) -> str:
    found = compared(student, 2, 9, reads(1, 2, 3, 1), ["pull 1", "pull 2", "pull 3", "pull 1"])
    ### BEGIN HIDDEN TESTS
    rows = [int(r) for r in student.rng.permutation(10)[:5]]
    wanted = [f"pull {r}" for r in [*rows, *rows]]
    found = found or compared(student, 4, 99, reads(*rows, *rows), wanted)
    ### END HIDDEN TESTS
    return found


@lab.check(
    "the copy that was read longest ago leaves",
    hint="Not the one that was pulled longest ago: a hit makes a copy young again. A dict remembers the order in which "
    "keys were put in.",
    points=2,
)
def least_recent(student: Student) -> str:
    found = compared(student, 2, 9, reads(1, 2, 1, 3, 1, 2), ["pull 1", "pull 2", "pull 3", "pull 2"])
    ### BEGIN HIDDEN TESTS
    found = found or drawn(student, capacity=4, bound=99, adds=0.0)
    ### END HIDDEN TESTS
    return found


@lab.check("one's own changes are seen at once, and sent later", hint="Add to the copy, and keep what is to be sent.")
def own(student: Student) -> str:
    actions = [*reads(1), ["add", 1, ONE], *reads(1), ["add", 1, 2 * ONE], *reads(1)]
    found = compared(student, 4, 9, actions, ["pull 1"])
    ### BEGIN HIDDEN TESTS
    row, change = int(student.rng.integers(10)), student.rng.normal(size=4)
    actions = [*reads(row), ["add", row, change], *reads(row)]
    found = found or compared(student, 4, 9, actions, [f"pull {row}"], student.rng.normal(size=(10, 4)))
    ### END HIDDEN TESTS
    return found


@lab.check("a row without a copy is changed on the server", hint="There is nothing to add to here: push at once.")
def without(student: Student) -> str:
    found = compared(student, 4, 9, [["add", 1, ONE], *reads(1)], ["push 1", "pull 1"])
    ### BEGIN HIDDEN TESTS
    row, change = int(student.rng.integers(10)), student.rng.normal(size=4)
    found = found or compared(student, 4, 9, [["add", row, change], *reads(row)], [f"push {row}", f"pull {row}"])
    ### END HIDDEN TESTS
    return found


@lab.check(
    "changes are sent when their copy leaves, and before it is pulled again",
    hint="Otherwise they are lost. All changes of a copy go in one request; a copy that was not changed sends none.",
    points=2,
)
def sent(student: Student) -> str:
    leaving = [*reads(1), ["add", 1, ONE], ["add", 1, ONE], *reads(2, 1)]
    again = [*reads(1), ["add", 1, ONE], *reads(1, clock=3)]
    found = first(
        [
            compared(student, 1, 9, leaving, ["pull 1", "push 1", "pull 2", "pull 1"]),
            compared(student, 1, 2, again, ["pull 1", "push 1", "pull 1"]),
        ]
    )
    ### BEGIN HIDDEN TESTS
    found = found or drawn(student, capacity=4, bound=3, adds=0.5)
    ### END HIDDEN TESTS
    return found


@lab.check("flush sends what is left, once", hint="What was sent must not be sent again.")
def flushed(student: Student) -> str:
    actions = [*reads(1, 2), ["add", 1, ONE], ["add", 1, ONE], ["flush"], ["flush"], *reads(1)]
    found = compared(student, 4, 9, actions, ["pull 1", "pull 2", "push 1"])
    ### BEGIN HIDDEN TESTS
    found = found or drawn(student, capacity=4, bound=99, adds=0.4, flushes=0.1)
    ### END HIDDEN TESTS
    return found


### BEGIN HIDDEN TESTS
def drawn(student: Student, capacity: int, bound: int, adds: float, flushes: float = 0.0) -> str:
    """A long course of actions, in which some rows are popular; the table must hold all changes in the end."""
    rng = student.rng
    rows, actions = rng.normal(size=(10, 4)), []
    for clock in range(60):
        row = int(min(rng.geometric(0.25) - 1, 9))
        actions.append(["read", row, clock // 4])
        if rng.random() < adds:
            actions.append(["add", int(rng.integers(10)), rng.normal(size=4)])
        if rng.random() < flushes:
            actions.append(["flush"])
    actions.append(["flush"])
    wanted = requests(capacity, bound, actions)
    read, table = used(student, rows, capacity, bound, actions)
    made = in_order([f"{kind} {row}" for kind, row in table.requests])
    for k, (one, other) in enumerate(zip([*made, ""], [*in_order(wanted), ""])):
        if one != other:
            return f"request {k + 1} of a long course: got {one or 'none'}, wanted {other or 'none'}"
    whole = rows.copy()
    for name, *args in actions:
        if name == "add":
            whole[args[0]] += args[1]
    return different(read, seen(rows, actions), "what was read: ") or different(table.rows, whole, "the table: ")


def in_order(made: list[str]) -> list[str]:
    """Requests with those to push that follow each other sorted: a flush may take any order."""
    found: list[str] = []
    for kind, group in groupby(made, key=lambda request: request[:4]):
        requests = list(group)
        found += sorted(requests) if kind == "push" else requests
    return found


def requests(capacity: int, bound: int, actions: Actions) -> list[str]:
    """The requests that are needed, by the words of the task: tables of when each row was read, pulled and changed."""
    read_at: dict[int, int] = {}
    pulled_at: dict[int, int] = {}
    changed: set[int] = set()
    made = []

    def push(row: int) -> None:
        if row in changed:
            made.append(f"push {row}")
            changed.remove(row)

    for moment, (name, *args) in enumerate(actions):
        row = args[0] if args else -1
        if name == "flush":
            for held in sorted(pulled_at, key=lambda r: read_at[r]):
                push(held)
        elif name == "add":
            if row in pulled_at:
                changed.add(row)
            else:
                made.append(f"push {row}")
        else:
            if row in pulled_at and args[1] - pulled_at[row] > bound:
                push(row)
                del pulled_at[row]
            elif row not in pulled_at and len(pulled_at) == capacity:
                oldest = min(pulled_at, key=lambda r: read_at[r])
                push(oldest)
                del pulled_at[oldest]
            if row not in pulled_at:
                made.append(f"pull {row}")
                pulled_at[row] = args[1]
            read_at[row] = moment
    return made


### END HIDDEN TESTS
