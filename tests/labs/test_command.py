"""`hetu lab`: what students and teachers type."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hetu import cli
from hetu.teach.labs.checks import labs_in
from hetu.teach.labs.release import released

from .hostile import HOSTILE
from .test_hostile import filled

FOLDER = Path(__file__).parent.parent.parent / "tutorials" / "labs"
LABS = labs_in(FOLDER)


def test_a_student_is_handed_a_lab_works_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "release"]) == 0
    assert cli.main(["lab", "check", "7"]) == 1
    assert capsys.readouterr().out.endswith("0 of 12 points, 8 of 8 checks not written yet\n")
    assert cli.main(["lab", "check", "7", "hetu-labs"]) == 1
    assert capsys.readouterr().out.endswith("0 of 12 points, 8 of 8 checks not written yet\n")
    monkeypatch.chdir(tmp_path / "hetu-labs")
    Path(LABS["7"].file).write_text((FOLDER / LABS["7"].file).read_text("utf-8"), "utf-8")
    assert cli.main(["lab", "check", "7"]) == 0
    assert capsys.readouterr().out.endswith("12 of 12 points\n")
    assert cli.main(["lab", "check", "7", "lab7_layouts.ipynb"]) == 1


def test_the_list_and_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab"]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == [*LABS]
    for asked, told in (
        (["check", "99"], "fix: choose one of 1, 2"),
        (["check", "4", "nowhere.py"], "there is no nowhere.py"),
        (["--labs", ".", "check", "4"], "fix: go to the folder that your teacher gave you"),
    ):
        assert cli.main(["lab", *asked]) == 2
        assert told in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "work.py").write_text("")
    assert cli.main(["lab", "release", "full"]) == 2
    assert "fix: name a new folder, so that nobody's work is lost" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["work.py"]


def test_nobody_is_graded_by_what_students_were_handed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher releases and then grades in the same folder, where the released checks know no hidden case."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "release"]) == 0
    handed = tmp_path / "in" / "eve"
    handed.mkdir(parents=True)
    (handed / LABS["4"].file).write_text(filled(HOSTILE["knows the examples"], tmp_path), "utf-8")
    (handed / "lab 4 final.py").write_text("")
    (handed / "transport.ipynb").write_text("")
    for folder in (tmp_path, tmp_path / "hetu-labs"):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert cli.main(["lab", "grade", str(tmp_path / "in")]) == 0
        page = capsys.readouterr().out.splitlines()
        assert page[2].split() == ["eve", "0", "0"]
        assert page[-2:] == [
            f"not graded, since no lab has this name: eve/{n}" for n in ("lab 4 final.py", "transport.ipynb")
        ]
    monkeypatch.setattr("hetu.teach.lab.CHECKOUT", tmp_path)
    assert cli.main(["lab", "grade", str(tmp_path / "in")]) == 2
    told = capsys.readouterr().err
    assert "there are no labs with solutions and hidden cases in" in told and "go to a checkout of hetu" in told
    assert cli.main(["lab", "--labs", str(tmp_path / "hetu-labs"), "grade", str(tmp_path / "in")]) == 0  # if asked for
    assert capsys.readouterr().out.splitlines()[-1].startswith("graded without hidden cases, which ")


TINY = """from hetu.teach.labs import Lab, different
lab = Lab("{0}", "times {0}", "lab{0}.py")
@lab.check("so many times as much", hint="multiply")
def times(student):
    return different(student.times(2), {1})
"""


def test_all_labs_of_a_folder_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checks").mkdir()
    for number, wanted in (("3", 6), ("10", 20)):
        (tmp_path / "checks" / f"lab{number}.py").write_text(TINY.format(number, wanted))
        (tmp_path / f"lab{number}.py").write_text(f"def times(x):\n    return {number} * x")
    assert cli.main(["lab", "--labs", str(tmp_path), "check", "all"]) == 0
    assert capsys.readouterr().out == (
        "lab 3: times 3\n  pass   so many times as much\n1 of 1 points\n\n"
        "lab 10: times 10\n  pass   so many times as much\n1 of 1 points\n"
    )
    (tmp_path / "lab3.py").write_text("print('loaded')\ndef times(x):\n    return 3 * x")
    assert cli.main(["lab", "--labs", str(tmp_path), "check", "3"]) == 0
    assert capsys.readouterr().out.endswith("1 of 1 points\n\nwhat the code printed:\nloaded\n\n")
    (tmp_path / "lab10.py").write_text("")
    assert cli.main(["lab", "--labs", str(tmp_path), "check", "all"]) == 1
    (tmp_path / "checks" / "lab3.py").write_text("lab = 3")
    assert cli.main(["lab", "--labs", str(tmp_path), "list"]) == 2
    assert "fix: write `lab = Lab(number, title, file)` in it" in capsys.readouterr().err


def test_what_is_handed_out_is_the_same_each_time() -> None:
    first, second = released(LABS, FOLDER), released(LABS, FOLDER)
    assert first == second
    assert {"README.md", *(lab.file for lab in LABS.values())} <= first.keys()
    assert all(lab.title in first["README.md"] for lab in LABS.values())


def test_notebooks_are_notebooks() -> None:
    nbformat = pytest.importorskip("nbformat")
    for name, text in released(LABS, FOLDER).items():
        if name.endswith(".ipynb"):
            nbformat.validate(nbformat.reads(text, 4))
            cells = json.loads(text)["cells"]
            marks = [c["metadata"]["nbgrader"] for c in cells if c["cell_type"] == "code"]
            assert len({m["grade_id"] for m in marks}) == len(marks)
            for cell in cells[1:]:
                assert cell["metadata"]["nbgrader"]["solution"] == ("raise NotImplementedError" in cell["source"])


@pytest.mark.skipif("not __import__('importlib.util').util.find_spec('IPython')", reason="needs IPython")
def test_the_cells_of_a_notebook_are_checked_by_ipython(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "release", "."]) == 0
    monkeypatch.setattr(sys, "ps1", "", raising=False)  # a shell sets it, and trainings ask whether somebody types
    shell = InteractiveShell()
    shell.run_cell("%load_ext hetu", store_history=True)
    for text in (
        "DUP, SUM = 'DUP', 'SUM'",
        "def product(x, w):\n    return x.y",
        "%lab check 7",
        "%lab check",
        "%lab check 99",
    ):
        shell.run_cell(text, store_history=True)
    shown = capsys.readouterr()
    page = shown.out + shown.err
    assert "AttributeError: 'str' object has no attribute 'y'\n         in cell 3, line 2: return x.y" in page
    assert "use %lab check N, with the number of a lab" in page and "there is no lab 99" in page
