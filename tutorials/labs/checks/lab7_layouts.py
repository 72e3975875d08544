"""The checks of lab 7: two ranks compute what the student claims about layouts.

There are sixteen products and twelve moves, so nothing is drawn but the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hetu.dist import DUP as WHOLE
from hetu.dist import SUM as TERMS
from hetu.dist import Layout, Shard, plan
from hetu.teach.labs import Lab, Student

lab = Lab("7", "layouts: who holds what, and what must be sent", "lab7_layouts.py")
DUP, SUM = "DUP", "SUM"
LAYOUTS = (DUP, 0, 1, SUM)
Role = int | str


def held(value: np.ndarray, role: Role, rng: np.random.Generator) -> list[np.ndarray]:
    """What two ranks hold of a matrix."""
    if role == SUM:
        part = rng.normal(size=value.shape)
        return [part, value - part]
    return [value, value] if role == DUP else np.split(value, 2, axis=int(role))


def computed(x: Role, w: Role, rng: np.random.Generator) -> list[Role]:
    """The layouts that the local products of two ranks have, as numbers show."""
    whole_x, whole_w = rng.normal(size=(2, 4, 4))
    parts = list(zip(held(whole_x, x, rng), held(whole_w, w, rng)))
    if any(a.shape[1] != b.shape[0] for a, b in parts):
        return []
    one, two = (a @ b for a, b in parts)
    wanted = whole_x @ whole_w
    readings: dict[Role, Any] = {DUP: (one, two), 0: np.vstack([one, two]), 1: np.hstack([one, two]), SUM: one + two}
    return [role for role, made in readings.items() if _is(made, wanted)]


def _is(made: Any, wanted: np.ndarray) -> bool:
    pieces = made if isinstance(made, tuple) else (made,)
    return all(p.shape == wanted.shape and np.allclose(p, wanted) for p in pieces)


def claims(student: Student, cases: Sequence[tuple[Role, Role]]) -> str:
    for x, w in cases:
        claim, true = student.product(x, w), computed(x, w, student.rng)
        if not isinstance(claim, (int, str, type(None))) or isinstance(claim, bool):
            return f"product({x}, {w}) was said to be {claim!r:.80}, which is no layout"
        if (claim not in true) if true else (claim is not None):
            return f"product({x}, {w}) was said to be {claim!r:.80}, and is not"
    return ""


for wanted, hint, points, cases in (
    ("nothing is split", "Both ranks compute all of it.", 0, [(DUP, DUP)]),
    (
        "data parallel: rows of x are split, w is whole",
        "A row of y needs one row of x, and all of w.",
        1,
        [(0, DUP)],
    ),
    (
        "tensor parallel: x is whole, columns of w are split",
        "A column of y needs one column of w, and all of x.",
        1,
        [(DUP, 1)],
    ),
    (
        "the second half of tensor parallel: columns of x and rows of w",
        "Each rank has half of the ks, for all i and j. The sum over k is then cut in two.",
        1,
        [(1, 0)],
    ),
    (
        "a sum that nobody has added up yet",
        "(a + b) w = a w + b w. And (a + b)(c + d)?",
        2,
        [(SUM, DUP), (DUP, SUM), (SUM, SUM)],
    ),
    (
        "all sixteen",
        "Most of the rest do not fit: say None. The two ranks need the same ks, and all of what is asked.",
        3,
        [(x, w) for x in LAYOUTS for w in LAYOUTS],
    ),
):
    lab.check(wanted, hint=hint, points=points)(partial(claims, cases=cases))


def layout(role: Role) -> Layout:
    return Layout((Shard((0, 1), (({DUP: WHOLE, SUM: TERMS}.get(role, role), 2),)),))


def sent(student: Student, cases: Sequence[tuple[Role, Role]]) -> str:
    for before, after in cases:
        kind = plan(layout(before), layout(after), (4, 4)).kind
        claim, wanted = student.communication(before, after), "nothing" if kind == "slice" else kind
        if not isinstance(claim, str) or claim != wanted:
            return f"communication({before}, {after}) was said to be {claim!r:.80}, which is not the cheapest"
    return ""


lab.check(
    "communication toward whole matrices",
    hint="What is missing on a rank: the other part, or the other term?",
    points=2,
)(partial(sent, cases=[(before, DUP) for before in LAYOUTS]))
lab.check(
    "communication toward parts", hint="Who needs only a part of the sum should not be sent all of it.", points=2
)(partial(sent, cases=[(before, after) for before in LAYOUTS for after in (0, 1)]))
