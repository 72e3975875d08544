"""The checks of lab 9: events and what they come to, and real workers, whose clocks are counted by their messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Ran, Student, different, first

lab = Lab("9", "a parameter server, SSP and a cache", "server.py")
TABLE = np.arange(12.0).reshape(6, 2)


def rng_of(student: Student) -> np.random.Generator:
    rng = np.random.default_rng(9)
    ### BEGIN HIDDEN TESTS
    rng = student.rng
    ### END HIDDEN TESTS
    return rng


@lab.check(
    "a push adds, twice where an id occurs twice",
    hint="`table[ids] += x` adds once for each id: see np.add.at.",
)
def pushes(student: Student) -> str:
    rng = rng_of(student)
    table, ids = rng.normal(size=(6, 2)), [int(i) for i in rng.integers(6, size=4)]
    ids, changes = [ids[0], *ids], rng.normal(size=(5, 2))
    wanted = table.copy()
    for i, change in zip(ids, changes):
        wanted[i] += change
    _, got, _ = student.server(table, 1, 0, [["push", np.array(ids), changes]])
    return different(got, wanted, f"ids {ids}: ")


@lab.check(
    "the table is the server's own, and rows are given away as copies",
    hint="Copy the table when the server is made. What was pulled stays as it was when another pushes.",
)
def own(student: Student) -> str:
    table, ids = rng_of(student).normal(size=(6, 2)), np.array([1, 3])
    events = [["pull", ids], ["push", ids, np.ones((2, 2))], ["pull", ids]]
    answers, _, given = student.server(table, 1, 0, events)
    seen = different(answers[0], table[ids], "pulled before the push: ")
    seen = seen or different(answers[2], table[ids] + 1, "pulled after the push: ")
    return seen or different(given, table, "the table that the server was made of: ")


@lab.check(
    "a worker may be ahead of the slowest by the staleness",
    hint="clocks[worker] - min(clocks) <= staleness; with None always.",
    points=2,
)
def ahead(student: Student) -> str:
    events: list[list[Any]] = [["tick", 0], ["may_start", 0], ["may_start", 1], ["tick", 0], ["may_start", 0]]
    wanted = {0: [False, True, False], 1: [True, True, False], 2: [True, True, True], None: [True, True, True]}
    seen = ""
    for staleness, right in wanted.items():
        answers, *_ = student.server(TABLE, 2, staleness, events)
        seen = seen or different([answers[k] for k in (1, 2, 4)], right, f"staleness {staleness}: ")
    ### BEGIN HIDDEN TESTS
    for staleness in (0, 2):
        clocks, events, right = [0, 0, 0], [], []
        for w in student.rng.integers(3, size=20):
            clocks[w] += 1
            other = int(student.rng.integers(3))
            events += [["tick", int(w)], ["may_start", other]]
            right.append(clocks[other] - min(clocks) <= staleness)
        answers, *_ = student.server(TABLE, 3, staleness, events)
        seen = seen or different(answers[1::2], right, f"staleness {staleness}, 20 ticks: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a cache asks for each needed row once, in rising order",
    hint="A set of what is needed, sorted; one call of `pull` with all of them, and none if nothing is needed.",
)
def once(student: Student) -> str:
    table, ids = rng_of(student).normal(size=(6, 2)), [4, 1, 4, 1, 5]
    events = [["read", ids, 0], ["read", [1, 0], 0], ["read", [0, 5], 0]]
    answers, pulled = student.cache(table, 6, 0, events)
    seen = first(different(got, table[event[1]], f"read {event[1]}: ") for (got, _), event in zip(answers, events))
    seen = seen or different([asked for _, asked in answers], [[[1, 4, 5]], [[0]], []], "ids asked: ")
    return seen or different(pulled, 4, "pulled: ")


@lab.check(
    "a row is fresh for `staleness` clocks, and pulled again after that",
    hint="Fresh while clock - (clock when pulled) <= staleness. What is pulled again replaces the row and its clock.",
    points=2,
)
def fresh(student: Student) -> str:
    rng, seen = rng_of(student), ""
    for s in (0, 1, 3):
        table = rng.normal(size=(6, 2))
        old, new, newer = table[2].copy(), *rng.normal(size=(2, 2))
        events = [["read", [2], 5], ["set", [2], new], ["read", [2], 5 + s], ["read", [2], 6 + s], ["set", [2], newer]]
        events += [["read", [2], 6 + 2 * s], ["read", [2], 7 + 2 * s]]
        answers, _ = student.cache(table, 6, s, events)
        what = f"staleness {s}: rows read at the clocks 5, {5 + s}, {6 + s}, {6 + 2 * s}, {7 + 2 * s}: "
        seen = seen or different([got[0] for got, _ in answers], [old, old, new, new, newer], what)
    return seen


@lab.check(
    "the least recently used row makes place",
    hint="Reading a row moves it to the end of the order, a fresh one as well; the first one goes, until no more"
    " than `capacity` are left.",
    points=2,
)
def evicted(student: Student) -> str:
    events = [["read", [0], 0], ["read", [1], 0], ["read", [0], 0], ["read", [2], 0], ["read", [0, 1], 0]]
    answers, _ = student.cache(TABLE.copy(), 2, 9, events)
    seen = different([asked for _, asked in answers], [[[0]], [[1]], [], [[2]], [[1]]], "two rows, ids asked: ")
    many = [["read", [0, 1, 2, 3, 4], 0], ["read", [2], 0], ["read", [4], 0]]
    answers, _ = student.cache(TABLE.copy(), 2, 9, many)
    seen = seen or different([asked for _, asked in answers][1:], [[[2]], []], "five rows at once, ids asked: ")
    ### BEGIN HIDDEN TESTS
    ids = [int(i) for i in student.rng.integers(6, size=40)]
    answers, _ = student.cache(TABLE.copy(), 3, 99, [["read", [i], 0] for i in ids])
    seen = seen or different([bool(asked) for _, asked in answers], misses(ids, 3), "40 reads, 3 rows, misses: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "a worker sees its own pushes, and what it was given is its own",
    hint="`add` changes the cached rows, if they are cached; `read` returns an array that is no view of them.",
)
def mine(student: Student) -> str:
    table, change = rng_of(student).normal(size=(2, 6, 2))
    events = [["read", [1, 2], 0], ["add", [2, 5, 2], change[:3]], ["read", [1, 2], 0], ["read", [5], 0]]
    answers, _ = student.cache(table.copy(), 6, 0, events)
    seen = different(answers[1][0], [table[1], table[2] + change[0] + change[2]], "rows 1 and 2 after a push to 2: ")
    return seen or different(answers[2][0], [table[5]], "row 5, which was not cached: ")


@lab.check(
    "when steps end: a worker waits for the slowest, `staleness` steps back",
    hint="Step k waits for everybody's step k - 1 - staleness, if there is one: for staleness 0 the one before.",
    points=2,
)
def times(student: Student) -> str:
    slow = [[1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 1.0]]
    right = {0: [[1, 5, 6, 7], [4, 5, 6, 7]], 1: [[1, 2, 5, 6], [4, 5, 6, 7]], None: [[1, 2, 3, 4], [4, 5, 6, 7]]}
    seen = first(different(student.finish_times(slow, s), wanted, f"staleness {s}: ") for s, wanted in right.items())
    ### BEGIN HIDDEN TESTS
    for s in (0, 1, 3, None):
        durations = student.rng.integers(1, 9, (3, 8)).astype(float).tolist()
        seen = seen or different(student.finish_times(durations, s), played(durations, s), f"staleness {s}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "weights as rows, and back",
    hint="The last row is filled up with 0: ceil(numbers / width) rows, in float32.",
)
def as_rows(student: Student) -> str:
    rng = rng_of(student)
    shapes = {"b": [3], "a": [2, 5], "c": [int(rng.integers(1, 9))]}
    weights = {name: rng.normal(size=size).astype("f4") for name, size in shapes.items()}
    flat = np.concatenate([weights[name].ravel() for name in shapes])
    seen = ""
    for width in (4, len(flat)):
        table, dtype, again = student.rows(weights, width, shapes)
        wanted = np.pad(flat, (0, -len(flat) % width)).reshape(-1, width)
        seen = seen or different(table, wanted, f"width {width}: ") or different(dtype, "float32", "dtype: ")
        seen = seen or different(again, weights, f"width {width}, back: ")
    return seen


STEPS = [2, 4]  # of the two workers


def served(student: Student, staleness: int | None) -> tuple[Ran, np.ndarray]:
    """Two workers, one of which ends early, and a server; and the table that all pushes together make."""
    rng = rng_of(student)
    table, changes = rng.normal(size=(6, 2)), rng.normal(size=(2, 2, 2))
    args = [[table, staleness, [*STEPS, 0][r], [1, 4], changes[min(r, 1)]] for r in range(3)]
    ran = student.on_ranks(3, "served", args, rendezvous=False)
    wanted = table.copy()
    wanted[[1, 4]] += STEPS[0] * changes[0] + STEPS[1] * changes[1]
    return ran, wanted


@lab.check(
    "two workers and a server: all pushes arrive",
    hint="PUSH is followed by an array of changes from the same worker: `comm.recv(worker)`, not from anybody.",
    points=2,
)
def arrived(student: Student) -> str:
    ran, wanted = served(student, None)
    seen = different(ran.values[2], wanted, "the table at the end: ")
    table, changes = rng_of(student).normal(size=(6, 2)), rng_of(student).normal(size=(2, 2, 2))
    ran = student.on_ranks(3, "crossed", [[table, [4, 1], changes[min(r, 1)]] for r in range(3)], rendezvous=False)
    table[[4, 1]] += changes.sum(0)
    return seen or different(ran.values[2], table, "the table, after pushes that crossed: ")


@lab.check(
    "the server lets nobody begin too early, and waits for nobody who has ended",
    hint="Answer a TICK when `may_start` says so: after each request, look at all that wait. A worker that has "
    "ended must not be the slowest for ever.",
    points=2,
)
def in_bounds(student: Student) -> str:
    for staleness in (0, 1):
        ran, wanted = served(student, staleness)
        early = too_early(ran, staleness, STEPS)
        table = rng_of(student).normal(size=(6, 2))
        ran_ahead = student.on_ranks(3, "ahead", [[table, staleness]] * 3, rendezvous=False)
        early = early or too_early(ran_ahead, staleness, [staleness + 1, 1])
        if seen := early or different(ran.values[2], wanted, f"staleness {staleness}: the table at the end: "):
            return seen
    return ""


def too_early(ran: Ran, staleness: int, steps: list[int]) -> str:
    """Who was told to begin while its clock was too far ahead. Requests of one number are TICK, and at last END."""
    clocks = [0.0, 0.0]
    for m in ran.messages:
        if m.to == 2 and m.numbers == 1:
            clocks[m.source] += 1
            clocks[m.source] = float("inf") if clocks[m.source] > steps[m.source] else clocks[m.source]
        elif m.source == 2 and m.numbers == 0 and clocks[m.to] - min(clocks) > staleness:
            return f"staleness {staleness}: worker {m.to} began with the clocks {clocks}"
    return ""


### BEGIN HIDDEN TESTS
def misses(ids: list[int], capacity: int) -> list[bool]:
    """By the definition: whether `capacity` different others were read since the last time."""
    found = []
    for k, i in enumerate(ids):
        before = [j for j in range(k) if ids[j] == i]
        found.append(not before or len(set(ids[before[-1] + 1 : k])) >= capacity)
    return found


def played(durations: list[list[float]], staleness: int | None) -> list[list[float]]:
    """Event by event: of all workers that may begin, the one that can do so first."""
    ends: list[list[float]] = [[] for _ in durations]
    while any(len(mine) < len(durations[0]) for mine in ends):
        for mine, times in zip(ends, durations):
            k = len(mine)
            if k == len(times):
                continue
            bound = -1 if staleness is None else k - staleness  # all clocks must have come to it
            if all(len(other) >= bound for other in ends):
                reached = [other[bound - 1] for other in ends] if bound > 0 else []
                mine.append(max([*reached, *mine[-1:], 0.0]) + times[k])
    return ends


### END HIDDEN TESTS
