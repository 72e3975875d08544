"""The labs: solutions pass their checks, blanks pass none, wrong answers fail the check that is about them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from hetu.core.errors import ArgumentError
from hetu.teach.labs import Lab, Student
from hetu.teach.labs.checks import labs_in, outcome
from hetu.teach.labs.release import BLANK, SOLUTION, released, without
from hetu.teach.labs.report import report

from .mistakes import MISTAKES

FOLDER = Path(__file__).parent.parent.parent / "tutorials" / "labs"
LABS = labs_in(FOLDER)
every_lab = pytest.mark.parametrize("lab", LABS.values(), ids=lambda lab: lab.file)


@functools.cache
def texts() -> dict[str, str]:
    """What students are handed."""
    return released(LABS, FOLDER)


def source(lab: Lab) -> str:
    return (FOLDER / lab.file).read_text("utf-8")


def answers(lab: Lab) -> list[str]:
    """The lines of a solution that are not in the students' file."""
    rows, inside = [], False
    for row in source(lab).splitlines():
        inside = row.strip() == SOLUTION[0] or (inside and row.strip() != SOLUTION[1])
        if inside and row.strip() != SOLUTION[0] and row.strip() and row not in texts()[lab.file].splitlines():
            rows.append(row.strip())
    return rows


@every_lab
def test_the_solution_passes(lab: Lab) -> None:
    with Student(lab.code_of(FOLDER / lab.file), lab.limits) as student:
        outcomes = lab.grade(student)
    assert [o.state for o in outcomes] == ["pass"] * len(lab.checks), report(lab, outcomes) + student.notes
    assert len(lab.checks) >= 4 and sum(o.points for o in outcomes) == lab.points > 0


@pytest.mark.sampled(4)
@every_lab
def test_the_blanks_pass_nothing(lab: Lab) -> None:
    with Student(lab.code({lab.file: texts()[lab.file]}), lab.limits) as student:
        assert {o.state for o in lab.grade(student)} == {"blank"}


@every_lab
def test_what_is_handed_out_has_no_solution_and_no_hidden_case(lab: Lab) -> None:
    handed = "\n".join(texts().values())
    assert not [row for row in answers(lab) if len(row) > 12 and row in handed]
    assert "BEGIN SOLUTION" not in handed and "HIDDEN TESTS" not in handed and BLANK in texts()[lab.file]
    assert "student.rng" not in texts()[f"checks/{lab.file}"] or lab.number == "7"  # whose cases are all there are


@every_lab
def test_no_hint_gives_the_answer(lab: Lab) -> None:
    words = " ".join(c.hint + c.wanted for c in lab.checks)
    assert answers(lab) and not [a for a in answers(lab) if len(a) > 12 and a in words]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("number", "right", "wrong", "wanted"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_fails_its_check(number: str, right: str, wrong: str, wanted: str) -> None:
    lab = LABS[number]
    text = source(lab)
    assert right in text
    (check,) = [c for c in lab.checks if wanted in c.wanted]
    with Student(lab.code({lab.file: text.replace(right, wrong)}), lab.limits) as student:
        found = outcome(check, student)
    assert found.state in ("FAIL", "error") and found.seen, found


def test_every_check_has_a_mistake() -> None:
    for lab in LABS.values():
        for check in lab.checks:
            if not check.wanted.startswith(("a chain of 5,000", "a training step")):
                assert any(n == lab.number and w in check.wanted for n, _, _, w in MISTAKES), check.wanted


def test_students_check_with_what_they_were_handed(tmp_path: Path) -> None:
    """The checks without their hidden cases are whole: solutions pass them, and most mistakes do not."""
    for name, text in texts().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    handed = labs_in(tmp_path)
    assert list(handed) == list(LABS)
    for number, lab in handed.items():
        assert [(c.wanted, c.hint, c.points) for c in lab.checks] == [
            (c.wanted, c.hint, c.points) for c in LABS[number].checks
        ]
        with Student(lab.code({lab.file: source(lab)}), lab.limits) as student:
            assert {o.state for o in lab.grade(student)} == {"pass"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("### BEGIN SOLUTION\n", "f.py: the last ### BEGIN SOLUTION has no ### END SOLUTION"),
        ("x\n### END SOLUTION", "f.py, line 2: ### END SOLUTION"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION", "f.py, line 2: ### BEGIN SOLUTION"),
    ],
)
def test_marks_come_in_pairs(text: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        without(text, SOLUTION, BLANK, "f.py")
