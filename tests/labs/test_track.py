"""The cumulative track: its right answers pass, common mistakes fail the check whose hint is about them, and all of it
together trains as one process does.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np
import pytest

from hetu import cli
from hetu.core.errors import ArgumentError
from hetu.teach.lab import CHECKOUT, labs_folder
from hetu.teach.labs import Lab, Student
from hetu.teach.labs.beside import WAYS, bytes_a_step, digits
from hetu.teach.labs.checks import labs_in, outcome, read
from hetu.teach.labs.figures import HEAD, figures
from hetu.teach.labs.release import BLANK, notebook, released
from hetu.teach.labs.report import report

from .track_mistakes import MISTAKES

TRACK = CHECKOUT / "track"
LABS = {lab.file: lab for lab in labs_in(TRACK).values()}
TEXTS = {file.name: file.read_text("utf-8") for file in TRACK.glob("*.py")}
HANDED = released({lab.number: lab for lab in LABS.values()}, TRACK)
SYSTEM = [*LABS, "transport.py"]
CASES = [(file, *row) for file, rows in MISTAKES.items() for row in rows]
every_lab = pytest.mark.parametrize("file", LABS)


def student(lab: Lab, text: str) -> Student:
    """A submission with this text, on right answers of the labs before."""
    return Student(lab.code({name: TEXTS[name] for name in lab.needs} | {lab.file: text}), lab.limits)


@every_lab
def test_right_answers_pass(file: str) -> None:
    with student(LABS[file], TEXTS[file]) as right:
        outcomes = LABS[file].grade(right)
    assert [o.state for o in outcomes] == ["pass"] * len(LABS[file].checks), report(LABS[file], outcomes)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("file", "right", "wrong", "words"), CASES, ids=lambda value: str(value)[:40])
def test_a_mistake_fails_the_check_whose_hint_names_it(file: str, right: str, wrong: str, words: str) -> None:
    lab = LABS[file]
    assert right in TEXTS[file]
    (check,) = (c for c in lab.checks if words in c.wanted)
    with student(lab, TEXTS[file].replace(right, wrong, 1)) as mistaken:
        found = outcome(check, mistaken)
    assert found.state in ("FAIL", "error") and found.seen, found


@every_lab
def test_every_check_has_a_hint_and_a_mistake(file: str) -> None:
    lab, words = LABS[file], [words for *_, words in MISTAKES[file]]
    assert len(lab.checks) >= 6 and len(words) >= 8
    for check in lab.checks:
        assert check.hint and check.points > 0
        assert any(w in check.wanted for w in words) or check.wanted in WITHOUT, check.wanted


WITHOUT = (  # what a small edit cannot break alone
    "thousands of nodes, each computed once",
    "the gradient of a gradient",
    "all-reduce on one rank and on four",
)


@every_lab
def test_no_hint_gives_the_answer(file: str) -> None:
    blank = HANDED[file]
    answers = {row.strip() for row in TEXTS[file].splitlines() if row.strip() and row not in blank}
    words = " ".join(check.hint + check.wanted for check in LABS[file].checks)
    assert answers and not [a for a in answers if len(a) > 20 and a in words]


@pytest.mark.sampled(5)
@every_lab
def test_blanks_earn_nothing(file: str) -> None:
    assert BLANK in HANDED[file]
    with student(LABS[file], HANDED[file]) as blank:
        outcomes = LABS[file].grade(blank)
    assert not [o.check.wanted for o in outcomes if o.state == "pass"]


@every_lab
def test_cells_of_the_notebook_form_have_names_of_their_own(file: str) -> None:
    cells = json.loads(HANDED[str(Path(file).with_suffix(".ipynb"))])["cells"]
    names = [cell["metadata"]["nbgrader"]["grade_id"] for cell in cells if "nbgrader" in cell["metadata"]]
    assert len(names) == len(set(names)), sorted(names)


@pytest.mark.sampled(5)
@every_lab
def test_what_is_handed_out_checks_without_the_hidden_cases(file: str, tmp_path: Path) -> None:
    for name, text in HANDED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    lab = read(tmp_path / "checks" / file)
    with student(lab, TEXTS[file]) as right:
        outcomes = lab.grade(right)
    assert [o.state for o in outcomes] == ["pass"] * len(lab.checks), report(lab, outcomes)


# -- the system ----------------------------------------------------------------------------------------------------


def code_lines(text: str) -> int:
    """Lines with code: neither blank, nor comments, nor docstrings."""
    strings = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    prose = {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in kinds:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - prose)


def test_the_system_is_small_and_uses_numpy_alone() -> None:
    counts = {name: code_lines(TEXTS[name]) for name in SYSTEM}
    assert 700 <= sum(counts.values()) <= 850 and max(counts.values()) <= 125, counts
    for name in [*SYSTEM, "train.py"]:
        found = set()
        for node in ast.walk(ast.parse(TEXTS[name])):
            found.update([a.name for a in node.names] if isinstance(node, ast.Import) else [])
            found.update([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        others = {each for each in found if f"{each}.py" not in TEXTS and each not in sys.stdlib_module_names}
        assert others <= {"numpy"}, name


@every_lab
def test_a_lab_builds_on_the_files_that_it_names(file: str) -> None:
    needed, todo = set(), [file]
    while todo:
        for node in ast.walk(ast.parse(TEXTS[todo.pop()])):
            name = f"{node.module}.py" if isinstance(node, ast.ImportFrom) else ""
            if name in LABS and name not in needed:
                needed.add(name)
                todo.append(name)
    assert needed <= set(LABS[file].needs)
    order = list(LABS)
    assert all(order.index(name) < order.index(file) for name in LABS[file].needs)


def trained(tmp_path: Path, ranks: int, way: str, images: Path, folder: Path = TRACK) -> dict[str, object]:
    result = tmp_path / f"{way}.json"
    command = [folder / "transport.py", ranks, folder / "train.py", way, images, result, 1]
    ran = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(result.read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 256 digits: two batches."""
    file = tmp_path_factory.mktemp("images") / "digits.npz"
    np.savez(file, **{name: array[: 256 if "train" in name else 100] for name, array in digits().items()})
    return file


def test_all_ways_train_as_one_process_does(tmp_path: Path, images: Path) -> None:
    """On real processes; what they send is what rings and stages of this size send."""
    one = trained(tmp_path, 1, "one", images)
    for way in ("data", "tensor", "pipeline"):
        found = trained(tmp_path, 4, way, images)
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-4)
        weights = 4 * 61706
        if way == "data":  # each rank 2 (n - 1) / n of the weights and of the loss
            assert abs(found["bytes_a_step"] - 6 * (weights + 4)) < 100
        if way == "pipeline":  # four micro-batches of 16 samples there and back, two rings of two, and the loss
            assert abs(found["bytes_a_step"] - (2 * 2 * 4 * 16 * 400 * 4 + 2 * weights)) < 200


def test_a_server_trains_and_a_cache_spares_every_other_pull(tmp_path: Path, images: Path) -> None:
    found, steps, workers, rows = trained(tmp_path, 5, "server", images), 2, 4, 965
    table, request = rows * 64 * 4, 8 * (rows + 1)
    pushes, ticks = workers * steps * (request + table), workers * steps * 8
    pulls = workers * (request + table)  # in the first step; in the second all rows are fresh
    last = workers * table  # when the clock has been stopped, but the server counts what it sends
    assert found["bytes_a_step"] == (pushes + ticks + pulls + last) / steps
    assert found["losses"][0] < 2.6


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import numpy as np\nfrom transport import connect\ncomm = connect()\n"
        "if comm.rank == 1:\n    raise SystemExit(3)\ncomm.recv(1)\n"
    )
    command = [sys.executable, str(TRACK / "transport.py"), "3", str(script)]
    env = {"PYTHONPATH": str(TRACK), "PATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert ran.returncode and "waits for rank 1, which has ended" in ran.stderr


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_track_is_listed_handed_out_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "track"]) == 0
    assert [row.split()[-1] for row in capsys.readouterr().out.splitlines()] == list(LABS)
    assert cli.main(["lab", "track", "release"]) == 0
    made = tmp_path / "hetu-track"
    assert {"train.py", "transport.py", "README.md"} <= {file.name for file in made.iterdir()}
    monkeypatch.chdir(made)  # as `%lab` does in a notebook of the folder
    assert cli.main(["lab"]) == 0
    assert [row.split()[-1] for row in capsys.readouterr().out.splitlines()][-len(LABS) :] == list(LABS)
    for name in ("values.py", "operators.py"):
        (made / name).write_text(TEXTS[name], "utf-8")
    capsys.readouterr()
    assert cli.main(["lab", "track", "check", "2"]) == 0
    assert re.search(r"\d+ of \d+ points", capsys.readouterr().out)
    (made / "values.py").write_text(TEXTS["values.py"].replace("return g * b, g * a", "return g * a, g * b"), "utf-8")
    assert cli.main(["lab", "track", "check", "2"]) == 1  # the labs before are one's own


def test_a_class_may_hand_in_each_lab_in_its_own_folder_and_notebooks_beside_blanks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As nbgrader lays them out; and as students have them, who were handed both forms and filled one."""
    for number, name in enumerate(("values.py", "operators.py"), 1):
        for form in (f"in/ada/lab{number}", "in/bob"):
            (tmp_path / form).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/ada/lab{number}" / name).write_text(TEXTS[name], "utf-8")
        (tmp_path / "in/bob" / name).write_text(HANDED[name], "utf-8")
        (tmp_path / "in/bob" / name).with_suffix(".ipynb").write_text(notebook(LABS[name], TEXTS[name]), "utf-8")
    assert cli.main(["lab", "track", "grade", str(tmp_path / "in")]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[1].split() == ["of", "13", "16", "29"]
    assert [row.split()[:4] for row in page[2:4]] == [["ada", "13", "16", "29"], ["bob", "13", "16", "29"]]
    for name, text in HANDED.items():
        place = tmp_path / "in/bob" / name
        place.parent.mkdir(exist_ok=True)
        if not place.exists():
            place.write_text(text, "utf-8")
    assert cli.main(["lab", "--labs", str(tmp_path / "in/bob"), "track", "check", "2"]) == 0


def test_figures_need_the_track_and_tell_who_fails(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"there are no labs of the track in") as elsewhere:
        labs_folder(CHECKOUT / "labs", "track")
    assert "name it: `hetu lab --labs FOLDER ...`" in str(elsewhere.value)
    with pytest.raises(ArgumentError, match=r"there is no .*transport.py") as nothing:
        figures(tmp_path, 1)
    assert "name the folder of the track: --labs FOLDER" in str(nothing.value)
    for name, text in HANDED.items():
        if "/" not in name:
            (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ArgumentError, match="your system, plan: NotImplementedError") as blank:
        figures(tmp_path, 1)
    assert "check the labs first: `hetu lab track check all`" in str(blank.value)


@pytest.mark.nightly
def test_bytes_of_hetus_ranks_are_those_of_their_rings() -> None:
    """61,706 weights in float32: and the loss, on rings of four; there and back, for each of four workers."""
    assert bytes_a_step("one") == 0
    assert bytes_a_step("data") == 6 * 4 * (61706 + 1)
    assert bytes_a_step("server") == 4 * 2 * 4 * 61706


@pytest.mark.nightly
def test_the_table_of_figures() -> None:
    head, *rows, _, last = figures(TRACK, 2).splitlines()
    assert max(map(len, (head, *rows, last))) <= 80
    assert re.split(r"  +", head) == list(HEAD)
    assert [row.split()[0] for row in rows] == list(WAYS)
    for row in rows:
        _, loss, hetus, *_ = row.split()
        if not row.startswith("server"):
            assert abs(float(loss) - float(hetus)) < 0.02
    assert last.startswith("your planner chooses data ")
