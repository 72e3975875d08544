"""Exercises of notebooks: what counts as right, what is said, and that those in the course can be answered."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetu.teach.try_it import WAITING, is_same, sealed, try_it

TUTORIALS = Path(__file__).parent.parent / "tutorials"
SOURCES = sorted(TUTORIALS.glob("[0-9]*.py"))
EXERCISE = re.compile(r"^try_it\(\s*None,", re.MULTILINE)
IN_CELLS = re.compile(r"^# %%?[a-z]", re.MULTILINE)


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        (3, 3, True),
        (3.0, 3, True),
        (3, 3.05, True),
        (3, 3.2, False),
        (100, 101, False),  # whole numbers are counted
        (100.0, 101.0, True),
        (np.float32(0.5), 0.5, True),
        (np.array([1, 2]), [1, 2], True),
        ([1, 2], [2, 1], False),
        ((None, 4), (None, 4), True),
        ((None, 4), (None, 5), False),
        ([1, 2], 1, False),
        ([[1], [2, 3]], [[1], [2, 3]], True),
        (True, True, True),
        (np.True_, True, True),
        (1, True, False),
        (False, 0.0, False),
        ("BSP ", "bsp", True),
        ("asp", "bsp", False),
        (1, "1", False),
        ("1", 1, False),
        ({"a", "b"}, {"b", "a"}, True),
        (["b", "a"], {"b", "a"}, True),
        ("ba", {"b", "a"}, False),
        ({0, 1}, [1, 0], True),
        ({0, 1}, [1, 2], False),
        ({0, 1}, 1, False),
        (0, 0.0, True),
        (float("nan"), 1.0, False),
        (object(), 1.0, False),
    ],
)
def test_what_counts_as_right(answer: Any, right: Any, same: bool) -> None:
    assert is_same(answer, right) is same


def test_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    computed = []

    def right() -> int:
        computed.append(1)
        return 5

    for answer in (None, 5, 4):
        try_it(answer, right, "count again")
    assert capsys.readouterr().out.splitlines() == [WAITING, "Right.", "Not yet: count again"]
    assert len(computed) == 2  # not while there is no answer


@pytest.mark.parametrize("right", [640, 1.5, "relu", False, [0.5, 2.0], float("-inf")])
def test_what_is_sealed_is_opened(capsys: pytest.CaptureFixture[str], right: Any) -> None:
    assert str(right).encode() not in sealed(right)
    for answer in (right, "another"):
        try_it(answer, sealed(right), "think")
    assert capsys.readouterr().out.splitlines() == ["Right.", "Not yet: think"]


# -- those of the course -----------------------------------------------------------------------------------------------


def sections(source: Path) -> dict[str, str]:
    """The text of each section by its heading; what stands after "What to remember" is none."""
    text = source.read_text("utf-8").partition("# **What to remember.**")[0]
    found = re.split(r"^# ## (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2]))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_every_section_ends_with_an_exercise_that_checks_itself(source: Path) -> None:
    lacking = [heading for heading, text in sections(source).items() if not ends_with_one(text)]
    assert lacking == []


def ends_with_one(section: str) -> bool:
    """Whether the last cell of code is an exercise without an answer, and the prose before it asks."""
    cells = re.split(r"^# %%(.*)\n", section, flags=re.MULTILINE)
    texts = [(head.strip(), body.strip()) for head, body in zip(cells[1::2], cells[2::2]) if body.strip("# \n")]
    prose = [(head, body) for head, body in [("[markdown]", cells[0].strip()), *texts] if body]
    return len(prose) > 1 and len(EXERCISE.findall(prose[-1][1])) == 1 and "**Try it:**" in prose[-2][1]


RUN = """
import base64, json, runpy, sys
from hetu.teach import try_it as module
found = []

def answered(answer, right, hint):
    value = right() if callable(right) else json.loads(base64.b64decode(right))
    found.append((answer is None, bool(hint), module.is_same(value, value), module.is_same("no answer", value)))

module.try_it = answered
runpy.run_path(sys.argv[1], run_name="__main__")
print(found)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source", [s for s in SOURCES if not IN_CELLS.search(s.read_text("utf-8"))], ids=lambda s: s.stem
)
def test_what_exercises_compute_is_an_answer(source: Path, tmp_path: Path) -> None:
    """Each is answered by what it computes itself, and wrongly; cells of ranks have none."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(source)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert len(found) == len(EXERCISE.findall(source.read_text("utf-8"))) > 0
    assert set(found) == {(True, True, True, False)}, found
