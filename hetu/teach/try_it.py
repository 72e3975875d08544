"""Exercises of notebooks that check themselves: a question, the reader's answer, and what is right, computed only then.

The answer is never shown, and one that is not computed is sealed, so that nobody reads it by accident. Left out: points
and files, which labs have; see `lab.py`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

CLOSE = 0.02  # of the right number, so that rounded answers count
WAITING = "Your turn: put your answer in the place of None, and run this cell again."


def try_it(answer: Any, right: Any | Callable[[], Any], hint: str) -> None:
    """Say whether an answer is right, or the hint; nothing is computed while it is None.

    Numbers, also those of arrays and sequences, count within 2 %, texts however they are capitalized; sets, truth
    values and whole numbers exactly.

    Args:
        answer: the reader's, None at first.
        right: a function that computes what is right, or that itself, which may be `sealed`.
        hint: what to think of, if the answer is wrong.

    >>> try_it(None, lambda: 1 / 0, "not computed yet")
    Your turn: put your answer in the place of None, and run this cell again.
    >>> try_it(3.14, 3.1416, "half a turn")
    Right.
    >>> try_it("Left", "right", "the other one")
    Not yet: the other one
    """
    if answer is None:
        print(WAITING)
        return
    wanted = right() if callable(right) else json.loads(b64decode(right)) if isinstance(right, bytes) else right
    print("Right." if is_same(answer, wanted) else f"Not yet: {hint}")


def sealed(value: Any) -> bytes:
    """An answer as exercises write it, where it could be read: a number, text, truth value or list of such.

    >>> sealed(640), sealed("relu")
    (b'NjQw', b'InJlbHUi')
    """
    return b64encode(json.dumps(value).encode())


def is_same(answer: Any, right: Any) -> bool:
    """Whether two values are the same to somebody who answers.

    >>> is_same([1, 2], (1, 2)), is_same({2, 1}, [1, 2]), is_same(2, 2.02), is_same(True, 1), is_same("a", 1)
    (True, True, True, False, False)
    """
    if isinstance(right, str):
        return isinstance(answer, str) and answer.strip().lower() == right.lower()
    if isinstance(answer, set):
        return isinstance(right, list | set) and {*right} == answer
    if isinstance(right, set):
        return isinstance(answer, set | frozenset | list | tuple) and {*answer} == right
    if isinstance(answer, str) or isinstance(answer, bool | np.bool_) != isinstance(right, bool | np.bool_):
        return False
    try:
        given, wanted = np.asarray(answer), np.asarray(right)
        if given.shape != wanted.shape:
            return False
        exact = wanted.dtype.kind in "biu" and given.dtype.kind in "biu"
        return bool(np.array_equal(given, wanted) if exact else np.allclose(given, wanted, rtol=CLOSE, atol=1e-9))
    except (TypeError, ValueError):
        return bool(answer == right)
