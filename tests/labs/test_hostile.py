"""Whoever knows everything and solves nothing earns nothing, and stops nobody's grading."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hetu.teach.labs import Allowance, Student
from hetu.teach.labs.checks import Outcome, labs_in

from .hostile import CLASS, CLEVER, HOSTILE, NAMES, WALLED

ROOT = Path(__file__).parent.parent.parent
LABS = labs_in(ROOT / "tutorials" / "labs")
BRIEF = Allowance(seconds=1.0, total=2.0, memory=1 << 30)


def outcomes(number: str, text: str) -> tuple[list[Outcome], Student]:
    lab = LABS[number]
    with Student(lab.code({lab.file: text}), BRIEF) as student:
        return lab.grade(student), student


def filled(text: str, folder: Path) -> str:
    site = str(Path(np.__file__).parent.parent)
    names = NAMES if "def answer" in text and "\x00" not in text else ""
    for place, path in (("{ROOT}", str(ROOT)), ("{SITE}", site), ("{TMP}", str(folder))):
        text = text.replace(place, path)
    return CLASS + text + "\n" + names


@cache
def walls() -> set[str]:
    """Those that stand on this machine."""
    return set(outcomes("4", (ROOT / "tutorials/labs/lab4_liveness.py").read_text())[1].walls)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HOSTILE)
def test_the_hostile_earn_nothing(name: str, tmp_path: Path) -> None:
    if name in WALLED and not {"files", "processes"} <= walls():
        pytest.skip("this kernel has neither Landlock nor seccomp")
    (tmp_path / "kept").write_text("")
    started = time.process_time()
    found, student = outcomes("4", filled(HOSTILE[name], tmp_path))
    assert sum(o.points for o in found) == 0, [(o.check.wanted, o.state, o.seen) for o in found]
    assert len(found) == len(LABS["4"].checks)
    assert all(c.isprintable() or c == "\n" for o in found for c in o.seen)
    assert all(len(o.seen) < 2000 for o in found)
    assert time.process_time() - started < 30  # the grader's own work is bounded, whatever floods it
    assert student.processes == [] and (tmp_path / "kept").exists()


@pytest.mark.parametrize("name", CLEVER)
def test_messages_cannot_be_forged(name: str) -> None:
    found, _ = outcomes("6", CLEVER[name])
    assert sum(o.points for o in found) == 0, [(o.check.wanted, o.state, o.seen) for o in found]
    assert all(o.state == "error" for o in found[1:]), [o.seen for o in found]
