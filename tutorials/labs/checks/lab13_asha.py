"""The checks of lab 13. A trial is a row [budget, loss, parent]; the course of a search is played here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("13", "a search: ASHA and TPE", "lab13_asha.py")
Rows = list[list[Any]]
Next = tuple[float, int | None]
BUDGETS = [1.0, 3.0, 9.0]
PLACES = [0.0, 0.25, 0.5, 1.0]


@lab.check(
    "the rungs of a ladder",
    hint="Multiply while the product is below the largest budget by more than rounding; the largest comes last.",
)
def climbs(student: Student) -> str:
    found = different(student.ladder(1, 27, 3), [1, 3, 9, 27]) or different(student.ladder(1, 20, 3), [1, 3, 9, 20])
    found = found or different(student.ladder(5, 5, 2), [5], "least and most are 5: ")
    found = found or different(student.ladder(0.7, 6.3, 3), [0.7, 2.1, 6.3], "0.7 * 3 * 3 is 6.299999999999999: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(40):  # in every fifth of which a product misses the largest budget
        least, factor = student.rng.uniform((0.5, 1.5), (2.0, 4.0)).tolist()
        wanted = [least * factor**k for k in range(int(student.rng.integers(3, 6)))]
        found = found or different(student.ladder(least, wanted[-1], factor), wanted)
        most = wanted[-1] * float(student.rng.uniform(1.2, 1.4))
        found = found or different(student.ladder(least, most, factor), [*wanted, most])
    ### END HIDDEN TESTS
    return found


def said(got: Any, wanted: list[int] | Next, what: str) -> str:
    """Whether both have the same parts, which may be None."""
    same = isinstance(got, (list, tuple, np.ndarray)) and [*got] == [*wanted]
    return "" if same else f"{what}: got {got!r:.60}, wanted {wanted!r:.60}"


def going(student: Student, rows: Rows, factor: float, wanted: list[int]) -> str:
    return said(student.may_go_on(rows, 1.0, factor), wanted, f"of {len(rows)} trials by {factor:g}")


def ended(*losses: float | None) -> Rows:
    return [[1.0, loss, None] for loss in losses]


@lab.check(
    "the best of a rung go on",
    hint="Sort the places by their losses, and take n / factor: of 5 by 3 that is one, of 2 none.",
)
def best(student: Student) -> str:
    found = going(student, ended(0.5, 0.2, 0.4, 0.1, 0.3, 0.6), 3, [3, 1])
    found = found or going(student, ended(0.5, 0.2, 0.4, 0.1, 0.3), 3, [3]) or going(student, ended(0.5, 0.2), 3, [])
    found = found or going(student, [*ended(0.5, 0.2), [3.0, 0.1, None], [3.0, 0.3, None]], 2, [1])  # of two rungs
    found = found or going(student, ended(0.4, 0.2, 0.4, 0.2, 0.3), 2.5, [1, 3])
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        found = found or compared(student, some_trials(student.rng))
    ### END HIDDEN TESTS
    return found


@lab.check("only trials that have ended count", hint="The n is that of losses: what still runs has none.")
def running(student: Student) -> str:
    found = going(student, ended(0.5, None, 0.4, None), 2, [2]) or going(student, ended(0.5, None, None), 3, [])
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        found = found or compared(student, some_trials(student.rng, running=6))
    ### END HIDDEN TESTS
    return found


@lab.check(
    "no trial goes on twice",
    hint="Take the best first, then leave out parents: their places are not given to others.",
)
def once(student: Student) -> str:
    found = going(student, [*ended(0.1, 0.2, 0.3, 0.4), [3.0, None, 0]], 2, [1])
    found = found or going(student, [*ended(0.1, 0.2, 0.3, 0.4), [3.0, 0.1, 0], [3.0, None, 1]], 2, [])
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        found = found or compared(student, some_trials(student.rng, parents=3))
    ### END HIDDEN TESTS
    return found


@lab.check("who failed does not go on", hint="A failed trial counts among the n; leave it out at the end.")
def failed(student: Student) -> str:
    found = going(student, ended(inf, 0.3, inf, inf), 4, [1]) or going(student, ended(inf, 0.3, inf, inf), 2, [1])
    found = found or going(student, ended(inf, inf, inf), 3, [])
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        found = found or compared(student, some_trials(student.rng, failed=12))
    ### END HIDDEN TESTS
    return found


def told(student: Student, rows: Rows, budgets: list[float], factor: float, wanted: Next) -> str:
    return said(student.next_trial(rows, budgets, factor), wanted, f"after {len(rows)} trials by {factor:g}")


@lab.check(
    "the highest rung comes first, a new trial last",
    hint="Ask the rungs from above, but not the last one. Where none may go on, a trial begins at the smallest.",
)
def highest(student: Student) -> str:
    low = ended(0.3, 0.2, 0.1, 0.4, 0.5, 0.6)
    high = [[3.0, 0.2, 2], [3.0, 0.1, 1]]
    found = told(student, low, BUDGETS, 2, (3.0, 2)) or told(student, low + high, BUDGETS, 2, (9.0, 7))
    found = found or told(student, low[:4] + [[9.0, 0.2, 2], [9.0, 0.1, 1]], [1.0, 9.0], 2, (1.0, None))
    found = found or told(student, [], BUDGETS, 3, (1.0, None)) or told(student, low, BUDGETS, 7, (1.0, None))
    ### BEGIN HIDDEN TESTS
    for _ in range(8):
        low, high = some_trials(student.rng, parents=3), some_trials(student.rng)
        rows = low + [[3.0, loss, int(student.rng.integers(len(low)))] for _, loss, _ in high]
        found = found or told(student, rows, BUDGETS, 3, asha(rows, BUDGETS, 3))
    least = float(student.rng.uniform(1, 9))
    rows = [[least, loss, None] for loss in student.rng.uniform(size=3).tolist()]
    found = found or told(student, rows, [least, 10.0, 20.0], 4, (least, None))
    ### END HIDDEN TESTS
    return found


def course(student: Student, losses: list[float], workers: int, factor: float, wanted: Callable[[Rows], Next]) -> str:
    """A whole search: each time that a worker is free it asks, and runs as many seconds as its trial has epochs."""
    rows: Rows = []
    ends: dict[int, float] = {}
    now, found = 0.0, ""
    while len(rows) < len(losses) and not found:
        if len(ends) == workers:
            place = min(ends, key=lambda k: ends[k])
            now = ends.pop(place)
            rows[place][1] = losses[place]
        budget, parent = wanted(rows)
        found = told(student, rows, BUDGETS, factor, (budget, parent))
        ends[len(rows)] = now + budget - (0 if parent is None else rows[parent][0])
        rows.append([budget, None, parent])
    return found


KNOWN: list[Next] = [(1, None), (1, None), (1, None), (3, 1), (3, 2), (1, None), (9, 3), (3, 5)]


@lab.check(
    "a search of several workers",
    hint="A trial is a parent as soon as another goes on from it, long before that one ends.",
    points=2,
)
def whole(student: Student) -> str:
    found = course(student, [0.5, 0.4, 0.3, 0.2, 0.6, 0.1, 0.7, 0.0], 2, 2, lambda rows: KNOWN[len(rows)])
    ### BEGIN HIDDEN TESTS
    for workers in (1, 3, 5):
        factor = float(student.rng.choice([2.0, 2.5, 3.0]))
        losses = student.rng.uniform(size=40)
        losses[student.rng.uniform(size=40) < 0.1] = inf
        found = found or course(
            student, losses.tolist(), workers, factor, lambda rows, by=factor: asha(rows, BUDGETS, by)
        )
    ### END HIDDEN TESTS
    return found


@lab.check(
    "a window that is cut at 0 and 1",
    hint="Divide the height of the bell by the width, too, and by the chance that such a number lies between 0 and 1.",
)
def ends(student: Student) -> str:
    found = different(student.windows([0.3, 0.5, 0.6], 0.5, 0.1), [0.5399098, 3.9894251, 2.4197085], tolerance=1e-5)
    found = found or different(student.windows([0.0, 0.1], 0.0, 0.1), [7.9788502, 4.8394170], tolerance=1e-5)
    found = found or different(student.windows([0.8], 1.0, 0.2), [2.4197086], tolerance=1e-5)
    ### BEGIN HIDDEN TESTS
    for low, high in ((0.0, 0.2), (0.4, 0.6), (0.8, 1.0)):
        center, width = student.rng.uniform((low, 0.1), (high, 0.9)).tolist()
        places = student.rng.uniform(size=9).tolist()
        found = found or different(student.windows(places, center, width), cut(places, center, width))
    ### END HIDDEN TESTS
    return found


@lab.check("a density of several windows", hint="The mean of the windows, not their sum; and a tenth everywhere.")
def mixed(student: Student) -> str:
    found = different(student.densities([0.5, 0.9], [0.5], 0.05), [7.2809617, 0.1], tolerance=1e-5)
    found = found or different(student.densities([0.25], [0.25, 0.75], 0.05), [3.6904823], tolerance=1e-5)
    found = found or different(student.densities(PLACES, [], 0.1), [1.0] * 4, "without any center: ")
    ### BEGIN HIDDEN TESTS
    for count in (1, 2, 7):
        centers, width = student.rng.uniform(size=count).tolist(), float(student.rng.uniform(0.05, 0.5))
        places = student.rng.uniform(size=9).tolist()
        found = found or different(student.densities(places, centers, width), mixture(places, centers, width))
    ### END HIDDEN TESTS
    return found


def halves(student: Student, numbers: list[float], losses: list[float], share: float, count: int) -> str:
    """Whether the `count` of least losses are good, and the others bad."""
    order = np.argsort(losses, kind="stable")
    wanted = [sorted(numbers[k] for k in part) for part in (order[:count], order[count:])]
    good, bad = student.parted(numbers, losses, share)
    return different(sorted(good), wanted[0], "good: ") or different(sorted(bad), wanted[1], "bad: ")


@lab.check("good and bad", hint="The numbers where the loss is small are good: of 5 by 0.25 there are two.")
def parts(student: Student) -> str:
    found = halves(student, [0.1, 0.2, 0.3, 0.4, 0.5], [5.0, 1.0, 4.0, 2.0, 3.0], 0.25, 2)
    found = found or halves(student, [0.9], [1.0], 0.25, 1) or halves(student, [0.9, 0.8], [1.0, 1.0], 0.5, 1)
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        n = int(student.rng.integers(6, 20))
        numbers, losses = student.rng.uniform(size=n).tolist(), student.rng.integers(0, 6, n).astype(float).tolist()
        found = found or halves(student, numbers, losses, 0.25, -(-n // 4))
    ### END HIDDEN TESTS
    return found


@lab.check(
    "likely among the good, unlikely among the bad",
    hint="The density of the good numbers alone is not enough: where there are many bad ones, others were no better.",
    points=2,
)
def chosen(student: Student) -> str:
    found = different(student.choice(PLACES, [0.2, 0.25, 0.3, 0.5], [0.25, 0.9, 0.9, 0.9], 0.1), 0.5)
    found = found or different(student.choice(PLACES, [0.3], [0.9], 0.1), 0.25)
    found = found or different(student.choice(PLACES, [0.4], [], 0.1), 0.5, "no bad ones: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(8):
        good, bad, candidates = (student.rng.uniform(size=n).tolist() for n in (3, 9, 24))
        width = float(student.rng.uniform(0.05, 0.3))
        ratio = mixture(candidates, good, width) / mixture(candidates, bad, width)
        found = found or different(student.choice(candidates, good, bad, width), candidates[int(ratio.argmax())])
    ### END HIDDEN TESTS
    return found


### BEGIN HIDDEN TESTS
def some_trials(rng: np.random.Generator, running: int = 0, parents: int = 0, failed: int = 0) -> Rows:
    """Trials on the first rung, of which some losses are equal, and trials that go on from some of the best of them."""
    count = int(rng.integers(9, 25))
    losses: list[float | None] = rng.integers(0, 12, count).astype(float).tolist()
    best = np.argsort(losses, kind="stable")[: count // 3]
    begun = [[3.0, None, int(k)] for k in rng.choice(best, size=parents, replace=False)] if parents else []
    for place in rng.choice(count, size=min(failed, count), replace=False):
        losses[place] = inf
    return [*ended(*losses, *([None] * running)), *begun]


def climbing(rows: Rows, budget: float, factor: float) -> list[int]:
    """Those that may go on, by how many are before each: no list is sorted and cut."""
    ended = [(loss, place) for place, (of, loss, _) in enumerate(rows) if of == budget and loss is not None]
    parents = [parent for _, _, parent in rows]
    ranks = {place: 1 + sum(other < (loss, place) for other in ended) for loss, place in ended}
    going = [
        place for loss, place in ended if ranks[place] * factor <= len(ended) and loss != inf and place not in parents
    ]
    return sorted(going, key=lambda place: ranks[place])


def compared(student: Student, rows: Rows) -> str:
    factor = float(student.rng.choice([2.0, 2.5, 3.0, 4.0]))
    return going(student, rows, factor, climbing(rows, 1.0, factor))


def asha(rows: Rows, budgets: list[float], factor: float) -> Next:
    """What is next, from above."""
    for budget, more in reversed([*pairwise(budgets)]):
        for place in climbing(rows, budget, factor):
            return more, place
    return budgets[0], None


def cut(places: list[float], center: float, width: float) -> np.ndarray:
    """A window whose integral is made 1 by numbers: the mean of a bell at 20,000 places."""
    middles = (np.arange(20_000) + 0.5) / 20_000
    at, everywhere = (np.exp(-0.5 * ((np.asarray(x) - center) / width) ** 2) for x in (places, middles))
    made: np.ndarray = at / everywhere.mean()
    return made


def mixture(places: list[float], centers: list[float], width: float) -> np.ndarray:
    made: np.ndarray = 0.1 + 0.9 * np.mean([cut(places, center, width) for center in centers], axis=0)
    return made


### END HIDDEN TESTS
