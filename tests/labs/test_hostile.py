"""Whoever knows everything and solves nothing earns nothing, and stops nobody's grading."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetu.teach.labs import Allowance, NoAnswer, Student
from hetu.teach.labs.checks import Outcome, labs_in, outcome
from hetu.teach.labs.release import released

from .hostile import CLASS, CLEVER, HETUS_OWN, HOSTILE, NAMES, PACKED, SENDS_ALL, WALLED

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "tutorials" / "labs"
LABS = labs_in(FOLDER)
BRIEF = Allowance(seconds=0.5, total=1.0, memory=1 << 30)


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


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CLEVER)
def test_messages_cannot_be_forged(name: str) -> None:
    found, _ = outcomes("6", CLEVER[name])
    assert sum(o.points for o in found) == 0, [(o.check.wanted, o.state, o.seen) for o in found]
    assert all(o.state == "error" for o in found[1:]), [o.seen for o in found]


@pytest.mark.parametrize("how", PACKED)
def test_what_is_packed_costs_what_it_holds(how: str) -> None:
    packed, unpacked = PACKED[how]
    lab, text = LABS["6"], SENDS_ALL.replace("{packed}", packed).replace("{unpacked}", unpacked)
    with Student(lab.code({lab.file: text}), lab.limits) as student:
        found = outcome(lab.checks[-1], student)
    assert found.state == "FAIL", found


@pytest.mark.parametrize("which", HETUS_OWN)
def test_what_hetu_has_itself_is_no_answer(which: str) -> None:
    found, _ = outcomes(which.split()[0], HETUS_OWN[which])
    assert sum(o.points for o in found) == 0, [(o.check.wanted, o.state, o.seen) for o in found]


class Remembering(Student):
    """Learns right answers to the examples that students are handed; afterward it knows nothing else."""

    known: dict[str, Any]
    is_learning = True

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._remembered([name, args, kwargs], lambda: super(Remembering, self).call(name, *args, **kwargs))

    def on_ranks(self, n: int, name: str, args: Any, rendezvous: bool = True, **kwargs: Any) -> Any:
        question = [n, name, args]
        return self._remembered(question, lambda: super(Remembering, self).on_ranks(n, name, args, rendezvous))

    def _remembered(self, question: Any, asked: Callable[[], Any]) -> Any:
        key = repr(question)
        if self.is_learning:
            self.known[key] = asked()
        elif key not in self.known:
            raise NoAnswer("this is no example")
        return self.known[key]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", [n for n in LABS if n != "7"])  # of which there are no cases but the examples
def test_who_knows_the_examples_by_heart_earns_nothing(number: str, tmp_path: Path) -> None:
    for name, text in released({number: LABS[number]}, FOLDER).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    lab = LABS[number]
    with Remembering(lab.code_of(FOLDER / lab.file), lab.limits) as student:
        student.known = {}
        learned = labs_in(tmp_path)[number].grade(student)
        assert {o.state for o in learned} == {"pass"}
        student.is_learning = False
        found = lab.grade(student)
    assert sum(o.points for o in found) == 0, [o.check.wanted for o in found if o.points]
