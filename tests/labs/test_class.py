"""A class: right, wrong, blank, missing and hostile submissions, as scripts and as notebooks, in one table."""

from __future__ import annotations

import csv
import json
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetu import cli
from hetu.teach.labs import Student, classroom
from hetu.teach.labs.checks import labs_in
from hetu.teach.labs.release import BLANK, SOLUTION, notebook, without

from .hostile import CLASS, HOSTILE, NAMES
from .mistakes import MISTAKES

FOLDER = Path(__file__).parent.parent.parent / "tutorials" / "labs"
LABS = labs_in(FOLDER)


def handed_in(folder: Path, number: str, size: int) -> dict[str, str]:
    """`size` submissions: of ten six are right, two wrong, one blank, one hostile; by student, what each is."""
    lab = LABS[number]
    right = (FOLDER / lab.file).read_text("utf-8")
    wrong = [right.replace(a, b) for n, a, b, _ in MISTAKES if n == number]
    hostile = [CLASS + text + "\n" + NAMES * ("def answer" in text) for text in HOSTILE.values()]
    kinds = {}
    for k in range(size):
        kind = ("right", "wrong", "right", "hostile", "right", "blank", "right", "wrong", "right", "right")[k % 10]
        text = {
            "right": right,
            "wrong": wrong[k % len(wrong)],
            "blank": without(right, SOLUTION, BLANK, lab.file),
            "hostile": hostile[k % len(hostile)],
        }[kind]
        kinds[f"student{k:03}"] = kind
        place = folder / f"student{k:03}" / f"lab{number}"
        place.mkdir(parents=True)
        if kind == "right" and k % 4 == 0:
            (place / lab.file).with_suffix(".ipynb").write_text(notebook(lab, text), "utf-8")
        else:
            (place / lab.file).write_text(text, "utf-8")
    return kinds


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with ten submissions of lab 4, one student who has none, and what grading wrote."""
    folder = tmp_path_factory.mktemp("class")
    kinds = handed_in(folder / "in", "4", 10)
    (folder / "in" / "zoe").mkdir()
    (folder / "in" / ".git").mkdir()
    yield folder, kinds | {"zoe": "missing"}


def test_a_class_is_graded(graded: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, kinds = graded
    asked = ["lab", "grade", str(folder / "in"), "--csv", str(folder / "a.csv"), "--json", str(folder / "a.json")]
    assert cli.main(asked) == 0
    page = capsys.readouterr().out
    with (folder / "a.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(kinds) * len(LABS["4"].checks)
    points = {s: sum(float(r["points"]) for r in rows if r["student"] == s) for s in kinds}
    for student, kind in kinds.items():
        states = {r["state"] for r in rows if r["student"] == student}
        assert points[student] == LABS["4"].points if kind == "right" else points[student] < LABS["4"].points, student
        assert kind in ("right", "wrong") or points[student] == 0, student
        assert (states == {kind}) is (kind in ("blank", "missing")), (student, states)
    whole = json.loads((folder / "a.json").read_text("utf-8"))
    assert [(r["student"], r["points"]) for r in whole["rows"]] == [(r["student"], float(r["points"])) for r in rows]
    seeds = [s["seed"] for s in whole["submissions"] if kinds[s["student"]] == "right"]
    assert None not in seeds and len(set(seeds)) == len(seeds)  # each draws its own
    assert page.splitlines()[0].split() == ["student", "lab", "4", "points"]
    assert page.splitlines()[1].split() == ["of", "10", "10"]
    assert "student000            10       10  ████████████████████" in page
    assert "1 missing" in page and all(len(line) <= 80 for line in page.splitlines())


def test_a_spreadsheet_runs_nothing(tmp_path: Path) -> None:
    rows = [classroom.Row("=2+3", "4", "-x", 0.0, 1.0, "FAIL", "@SUM(A1)")]
    classroom.write_csv(tmp_path / "a.csv", {("=2+3", "4"): classroom.Graded(rows)})
    assert (tmp_path / "a.csv").read_text().splitlines()[1] == "'=2+3,4,'-x,0.0,1.0,FAIL,'@SUM(A1)"


def test_the_better_of_two_forms_counts(tmp_path: Path) -> None:
    """Who works in the notebook leaves the script blank."""
    lab = LABS["4"]
    right = (FOLDER / lab.file).read_text("utf-8")
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / lab.file).write_text(without(right, SOLUTION, BLANK, lab.file))
    (tmp_path / "ada" / lab.file).with_suffix(".ipynb").write_text(notebook(lab, right))
    found = classroom.grade(tmp_path, {"4": lab}, progress=False)
    assert found["ada", "4"].points == lab.points
    assert classroom.table(found, LABS).splitlines()[2].endswith("█" * 20)


def test_a_table_of_all_labs_fits_a_terminal() -> None:
    """Whatever letters names have: those of East Asia take two columns."""
    rows = {
        (student, number): classroom.Graded(
            [classroom.Row(student, number, c.wanted, c.points, c.points, "pass") for c in lab.checks]
        )
        for student in ("ada", "李小龙" * 9)
        for number, lab in LABS.items()
    }
    lines = classroom.table(rows, LABS).splitlines()
    assert lines[0].split() == ["student", "lab", *LABS, "points"]
    assert lines[3].startswith("李小龙李小龙李小…  ") and lines[3].split()[1:] == lines[1].split()[1:]
    assert all(len(line) + sum(unicodedata.east_asian_width(c) == "W" for c in line) <= 80 for line in lines)


def test_names_of_students_harm_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in Latin-1 as an old archive leaves them, with control letters, and two that look alike."""
    lab = LABS["4"]
    for name in (b"M\xfcller", b"M\xf6ller", b"\x1b[2Jeve\nada"):
        folder = os.path.join(os.fsencode(tmp_path / "in"), name)
        try:
            os.makedirs(folder)
        except OSError:
            pytest.skip("this file system keeps no such names")
        Path(os.fsdecode(folder), lab.file).write_text("")
    written = tmp_path / "a.csv", tmp_path / "a.json"
    assert cli.main(["lab", "grade", str(tmp_path / "in"), "--csv", str(written[0]), "--json", str(written[1])]) == 0
    page = capsys.readouterr().out
    assert "M\N{REPLACEMENT CHARACTER}ller'" in page and "\N{REPLACEMENT CHARACTER}[2Jeve ada" in page
    assert "\x1b" not in page + written[0].read_text("utf-8") + written[1].read_text("utf-8")


def test_a_link_is_no_submission(tmp_path: Path) -> None:
    lab = LABS["4"]
    (tmp_path / "eve").mkdir()
    (tmp_path / "eve" / lab.file).symlink_to(FOLDER / lab.file)
    (row, *_) = classroom.grade(tmp_path, {"4": lab}, progress=False)["eve", "4"].rows
    assert (row.points, row.state) == (0.0, "error") and "is a link" in row.seen


def test_of_many_files_those_nearest_to_the_top_are_graded(tmp_path: Path) -> None:
    lab = LABS["4"]
    for name in (".", *(f"old/{k}" for k in range(9))):
        (tmp_path / "eve" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "eve" / name / lab.file).write_text("raise OSError\n")
    (tmp_path / "eve" / lab.file).write_text((FOLDER / lab.file).read_text("utf-8"))
    assert classroom.grade(tmp_path, {"4": lab}, progress=False)["eve", "4"].points == lab.points


def test_a_fault_of_the_grader_costs_one_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = LABS["4"]
    for student in ("ada", "eve"):
        (tmp_path / student).mkdir()
        (tmp_path / student / lab.file).write_text(f"# {student}\n" + (FOLDER / lab.file).read_text("utf-8"))
    whole = Student.ready

    def fails(self: Student, n: int) -> Any:
        if "# eve" in self.source:
            raise OSError("no space left")
        return whole(self, n)

    monkeypatch.setattr(Student, "ready", fails)
    monkeypatch.setattr("hetu.teach.labs.classroom.Lab.grade", lambda lab, student: student.ready(1) and [])
    found = classroom.grade(tmp_path, {"4": lab}, progress=False)
    assert found["ada", "4"].rows == []
    assert found["eve", "4"].rows[0].seen == "the grader failed: OSError: no space left"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("lab4_liveness.py", b"\xff\xfe", "cannot be read"),
        ("lab4_liveness.ipynb", b"{}", "is no notebook"),
        (
            "lab4_liveness.ipynb",
            b'{"cells":[{"cell_type":"code","source":"x = \'\\ud800\'"}]}',
            "nothing defines last_use",
        ),
        ("lab4_liveness.ipynb", b"[" * 100_000, "is no notebook"),
        ("lab4_liveness.py", b" " * (3 << 20), "hand in at most"),
    ],
)
def test_what_cannot_be_read_is_told_and_earns_nothing(name: str, text: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / name).write_bytes(text)
    (row, *_) = classroom.grade(tmp_path, {"4": LABS["4"]}, progress=False)["ada", "4"].rows
    assert (row.points, row.state) == (0.0, "error") and told in row.seen


def test_a_link_is_no_work(tmp_path: Path) -> None:
    """To the solution, or to a folder that has it."""
    lab = LABS["4"]
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / lab.file).symlink_to(FOLDER / lab.file)
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "work").symlink_to(FOLDER, target_is_directory=True)
    found = classroom.grade(tmp_path, {"4": lab}, progress=False)
    assert [found[s, "4"].rows[0].state for s in ("ada", "bob")] == ["error", "missing"]
    assert "is a link" in found["ada", "4"].rows[0].seen and found["ada", "4"].points == found["bob", "4"].points == 0


def test_a_folder_without_submissions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "lab 4.py").write_text("")
    for asked, told in (
        (["grade", str(tmp_path)], "there is ada/lab 4.py"),
        (["grade", str(tmp_path)], "give it a folder for each student"),
        (["grade", str(tmp_path / "nowhere")], "there is no folder"),
        (["grade", str(tmp_path), "--lab", "99"], "there is no lab 99"),
        (["grade", str(tmp_path), "--csv", str(tmp_path / "no" / "a.csv")], "name a file in a folder that exists"),
    ):
        assert cli.main(["lab", *asked]) == 2
        assert told in capsys.readouterr().err
