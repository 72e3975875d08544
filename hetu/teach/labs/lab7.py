"""The checks of lab 7: two ranks compute what the student claims about layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import numpy as np

from ...dist import DUP, SUM, Comm, Layout, Shard, plan, redistribute, run_ranks
from .grading import Lab, different

lab = Lab(7, "layouts: who holds what, and what must be sent", "lab7_layouts.py")
NAMES = {DUP: "DUP", SUM: "SUM", 0: "0", 1: "1", None: "None"}
LAYOUTS = (DUP, 0, 1, SUM)
RNG = np.random.default_rng(7)
X, W = (RNG.integers(-9, 9, (4, 4)).astype(float) for _ in range(2))


def layout(role: int) -> Layout:
    return Layout((Shard((0, 1), ((role, 2),)),))


def held(value: np.ndarray, role: int, rank: int) -> np.ndarray:
    """What a rank holds of a matrix."""
    if role == SUM:
        part = np.arange(16.0).reshape(4, 4)
        return part if rank == 0 else value - part
    return value if role == DUP else np.split(value, 2, axis=role)[rank]


def computed(x: int, w: int) -> list[int]:
    """The layouts that the local products of two ranks have, as numbers show."""
    parts = [(held(X, x, r), held(W, w, r)) for r in (0, 1)]
    if any(a.shape[1] != b.shape[0] for a, b in parts):
        return []
    products = [np.ascontiguousarray(a @ b) for a, b in parts]
    return [role for role in LAYOUTS if _means(products, role)]


def _means(products: Sequence[np.ndarray], role: int) -> bool:
    """Whether the parts on two ranks, read in a layout, are the product."""
    shape = held(X @ W, role, 0).shape
    if any(p.shape != shape for p in products):
        return False

    def rank(comm: Comm) -> np.ndarray | None:
        return redistribute(comm, products[comm.rank], layout(role), layout(DUP), (4, 4))

    return all(whole is not None and np.array_equal(whole, X @ W) for whole in run_ranks(2, rank))


def claims(student: ModuleType, cases: Sequence[tuple[int, int]]) -> str:
    for x, w in cases:
        claim, true = student.product(x, w), computed(x, w)
        if (claim not in true) if true else (claim is not None):
            return f"product({NAMES[x]}, {NAMES[w]}) was said to be {NAMES.get(claim, claim)}, and is not"
    return ""


for wanted, hint, cases in (
    ("nothing is split", "Both ranks compute all of it.", [(DUP, DUP)]),
    (
        "data parallel: rows of x are split, w is whole",
        "A row of y needs one row of x, and all of w.",
        [(0, DUP)],
    ),
    (
        "tensor parallel: x is whole, columns of w are split",
        "A column of y needs one column of w, and all of x.",
        [(DUP, 1)],
    ),
    (
        "the second half of tensor parallel: columns of x and rows of w",
        "Each rank has half of the ks, for all i and j. The sum over k is then cut in two.",
        [(1, 0)],
    ),
    (
        "a sum that nobody has added up yet",
        "(a + b) w = a w + b w. And (a + b)(c + d)?",
        [(SUM, DUP), (DUP, SUM), (SUM, SUM)],
    ),
    (
        "all sixteen",
        "Most of the rest do not fit: say None. The two ranks need the same ks, and all of what is asked.",
        [(x, w) for x in LAYOUTS for w in LAYOUTS],
    ),
):
    lab.check(wanted, hint=hint)(partial(claims, cases=cases))


def sent(student: ModuleType, cases: Sequence[tuple[int, int]]) -> str:
    for before, after in cases:
        kind = plan(layout(before), layout(after), (4, 4)).kind
        claim, wanted = student.communication(before, after), "nothing" if kind == "slice" else kind
        if different(claim, wanted):
            return f"communication({NAMES[before]}, {NAMES[after]}) was said to be {claim!r}, which is not the cheapest"
    return ""


lab.check("communication toward whole matrices", hint="What is missing on a rank: the other part, or the other term?")(
    partial(sent, cases=[(before, DUP) for before in LAYOUTS])
)
lab.check("communication toward parts", hint="Who needs only a part of the sum should not be sent all of it.")(
    partial(sent, cases=[(before, after) for before in LAYOUTS for after in (0, 1)])
)
