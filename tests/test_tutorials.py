"""The course: every tutorial runs as a script, and its stored notebook has its cells and their outputs.

A source with magics (`# %%ranks 2` in the percent format) runs cell by cell in an IPython shell. Where Jupyter is
installed the notebooks are executed too; without it the scripts run the same code.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .pairs import nightly

TUTORIALS = Path(__file__).parent.parent / "tutorials"
opened = runpy.run_path(str(TUTORIALS / "opening.py"))["opened"]
SOURCES = sorted(TUTORIALS.glob("[0-9]*.py"))
JUPYTER = ("jupytext", "nbclient", "ipykernel")
MOST_CELLS = 45  # exercises are a third of them
MAGIC = re.compile(r"^# (%{1,2}[a-z_]+ )", re.MULTILINE)
SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
try:
    for cell in json.load(sys.stdin):
        shell.run_cell(cell).raise_error()
finally:
    shell.run_line_magic("ranks", "stop")
"""
IN_CELLS = [source for source in SOURCES if MAGIC.search(source.read_text("utf-8"))]
LONG = (
    "05_training_for_real",
    "07_the_parameter_server",
    "08_hybrid_and_the_embedding_cache",
    "10_pipeline_schedules",
    "11_automatic_parallelism",
    "12_a_cuda_kernel_without_a_gpu",
    "13_from_python_to_a_c_program",
    "14_reading_a_profile",
    "15_a_mixture_of_experts",
    "16_a_graph_larger_than_a_rank",
    "17_ten_million_rows_in_the_memory_of_one",
    "19_a_search_one_can_watch",
)  # which take nine tenths of the time of all
RANKS = ("09_tensor_parallel_and_zero", "10_pipeline_schedules")  # about layouts, whichever way values are computed


def stem(source: Path) -> str:
    return source.stem


def short_first(sources: list[Path]) -> list[Any]:
    """The long ones are run nightly."""
    return [*(s for s in sources if s.stem not in LONG), *nightly([s] for s in sources if s.stem in LONG)]


every_tutorial = pytest.mark.parametrize("source", SOURCES, ids=stem)


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell of a script in the percent format; the # in front of prose is taken off."""
    found = []
    for head, body in re.findall(r"^# %%(| .*)\n((?:(?!# %%[ \n]).*\n?)*)", source, re.MULTILINE):
        prose = head.strip() == "[markdown]"
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if prose else re.sub(MAGIC, r"\1", body)
        found.append(("markdown" if prose else "code", text.strip("\n")))
    return found


def stored(source: Path) -> list[dict[str, Any]]:
    return json.loads(source.with_suffix(".ipynb").read_text("utf-8"))["cells"]


def displays(code: str) -> bool:
    """Whether a cell surely shows something: its last statement prints, draws, or is a value that is no call."""
    *_, last = ast.parse(re.sub(r"^%.*", "", code, flags=re.MULTILINE)).body
    calls = [n.func for n in ast.walk(last) if isinstance(n, ast.Call)]
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
    if isinstance(last, ast.FunctionDef):
        return False
    is_value = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)
    return is_value or bool(names & {"print", "Graph"}) or any(name.endswith("_svg") for name in names)


def run(command: list[str], folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TUTORIALS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=variables,
        input=given,
        capture_output=True,
        text=True,
        timeout=270,  # a busy machine takes five times as long
    )


def test_the_course_is_found_and_numbered_without_holes() -> None:
    assert [s.name[:2] for s in SOURCES] == [f"{i:02d}" for i in range(1, len(SOURCES) + 1)] != []
    assert {p.stem for p in TUTORIALS.glob("*.ipynb")} == {s.stem for s in SOURCES}


@pytest.mark.parametrize("source", short_first([s for s in SOURCES if s not in IN_CELLS]), ids=stem)
@pytest.mark.parametrize("plain", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["", "compiled"])
def test_runs_as_a_script_and_leaves_nothing_behind(
    source: Path, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain and source.stem in RANKS:
        monkeypatch.setenv("HETU_KERNELS", "0")
    done = run(["-W", "error", str(source)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", short_first(IN_CELLS), ids=stem)
def test_runs_in_ipython_and_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="the extra [dev] is not installed")
    given = json.dumps([text for kind, text in cells(source.read_text("utf-8")) if kind == "code"])
    done = run(["-W", "error", "-c", SHELL], tmp_path, given)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@every_tutorial
def test_says_first_what_the_reader_will_be_able_to_do(source: Path) -> None:
    (kind, first), *rest = cells(source.read_text("utf-8"))
    assert kind == "markdown" and first.startswith(f"# {int(source.name[:2])}. ")
    assert "**After this notebook you can**" in first
    assert len(rest) < MOST_CELLS
    assert sum(kind == "markdown" for kind, _ in rest) * 3 >= len(rest)


@every_tutorial
def test_prose_has_cells_of_its_own(source: Path) -> None:
    code = [text for kind, text in cells(source.read_text("utf-8")) if kind == "code"]
    assert [line for text in code for line in text.splitlines() if re.match(r"#( \*\*| #|$)", line)] == []


@every_tutorial
def test_the_stored_notebook_has_the_cells_of_its_source(source: Path) -> None:
    wanted = opened(source.stem, cells(source.read_text("utf-8")))
    assert [(c["cell_type"], "".join(c["source"])) for c in stored(source)] == wanted, "run tutorials/build.py"


@every_tutorial
def test_the_stored_notebook_shows_what_its_cells_show(source: Path) -> None:
    for cell in stored(source)[2:]:  # after what installs
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            assert cell["outputs"] or not displays(code), code
            assert all(o["output_type"] != "error" for o in cell["outputs"]), code


@every_tutorial
def test_nothing_of_the_machine_is_stored(source: Path) -> None:
    outputs = [c.get("outputs", []) for c in stored(source)]
    text = json.dumps(outputs)
    assert not re.search(r"[\s'\"(=](/[\w.-]+){3,}| at 0x[0-9a-f]{6,}|[A-Z]:\\\\\\\\", text)


@every_tutorial
def test_links_lead_somewhere(source: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", source.read_text("utf-8")):
        assert "://" in target or (TUTORIALS / target).exists(), target


@pytest.mark.parametrize("source", [*SOURCES[:1], *nightly([s] for s in SOURCES[1:])], ids=stem)
@pytest.mark.skipif(not all(map(importlib.util.find_spec, JUPYTER)), reason=f"needs {', '.join(JUPYTER)}")
def test_executes_as_a_notebook_and_shows_the_same_kinds_of_output(source: Path) -> None:
    script = f"import build, json, pathlib; print(json.dumps(build.execute(pathlib.Path({str(source)!r}))))"
    done = run(["-c", script], TUTORIALS)
    assert done.returncode == 0, done.stderr
    fresh = json.loads(done.stdout.splitlines()[-1])["cells"]
    assert [kinds(c) for c in fresh] == [kinds(c) for c in stored(source)]


def kinds(cell: dict[str, Any]) -> list[list[str]]:
    return [sorted(o.get("data", {"text": 0})) for o in cell.get("outputs", [])]


# -- the checks themselves -----------------------------------------------------------------------------------------


def test_cells_are_read_as_jupytext_reads_them() -> None:
    source = "# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1  # %% no cell\n\n\ny = x\n\n# %%\n# %%ranks 2\ny\n"
    assert cells(source) == [
        ("markdown", "# Title\n\nWords."),
        ("code", "x = 1  # %% no cell\n\n\ny = x"),
        ("code", "%%ranks 2\ny"),
    ]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x = 1", False),
        ("x", True),
        ("print(1)", True),
        ("for i in x:\n    print(i)", True),
        ("ht.Graph([x])", True),
        ("check(x)", False),
        ("def f():\n    print(1)", False),
        ("%%ranks 2\nprint(1)", True),
    ],
)
def test_what_displays(code: str, shown: bool) -> None:
    assert displays(code) == shown
