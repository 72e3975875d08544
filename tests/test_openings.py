"""How the course is opened: its index is complete and true, and a stored notebook installs hetu where it is missing."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
import types

import pytest

from hetu.core import errors
from hetu.teach import device
from hetu.teach.labs.checks import labs_in

from .test_tutorials import SOURCES, TUTORIALS, cells, stored

LABS = labs_in(TUTORIALS / "labs")
WORDS, LINES = 100, 8  # that are read in a minute
OPENING = runpy.run_path(str(TUTORIALS / "opening.py"))
INDEX = (TUTORIALS / "README.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| \d+ \|.*\|$", INDEX, re.M)]
every_row = pytest.mark.parametrize(("source", "row"), [*zip(SOURCES, ROWS)], ids=[s.stem for s in SOURCES])


def minutes(text: str) -> int:
    """What a reader needs, to the nearest five."""
    found = cells(text)
    words = sum(len(prose.split()) for kind, prose in found if kind == "markdown")
    lines = sum(bool(line.strip()) for kind, code in found if kind == "code" for line in code.splitlines())
    return 5 * round((words / WORDS + lines / LINES) / 5)


def labs(text: str) -> list[str]:
    """Those that a notebook sends its readers to."""
    named = re.findall(r"\blabs?\s+(\d+)(?:\s+and\s+(\d+))?", re.sub(r"\n# ?", " ", text), re.I)
    return [number for pair in named for number in pair if number]


def test_the_index_has_a_row_for_each_notebook() -> None:
    assert len(ROWS) == len(SOURCES) > 0
    assert [row[1].partition("](")[2] for row in ROWS] == [f"{s.stem}.ipynb)" for s in SOURCES]


@every_row
def test_a_row_of_the_index_is_true(source, row) -> None:
    number, name, shows, takes, before, lab = row
    text = source.read_text("utf-8")
    assert f"# {number}. {name[1:].partition('](')[0]}" == cells(text)[0][1].partition("\n")[0]
    assert shows and int(takes) == minutes(text)
    assert all(int(n) < int(number) for n in re.findall(r"\b\d+\b", before)) and before
    assert re.findall(r"\[(\d+)\]\(#labs\)", lab) == labs(text)
    assert {*labs(text)} <= LABS.keys()


def test_every_lab_has_a_notebook() -> None:
    assert sorted(n for s in SOURCES for n in labs(s.read_text("utf-8"))) == sorted(LABS)


def test_the_syllabus_has_each_notebook_and_each_lab_once() -> None:
    text = (TUTORIALS / "SYLLABUS.md").read_text("utf-8")
    weeks = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| \d+ \|.*\|$", text, re.M)]
    assert [week[0] for week in weeks] == [str(k) for k in range(1, 15)]
    named = [name for week in weeks for name in re.findall(r"\]\((\w+)\.ipynb\)", week[2])]
    assert sorted(named) == [source.stem for source in SOURCES]
    assert sorted(n for week in weeks for n in re.findall(r"\d+", week[4])) == sorted(LABS)
    track = [week[5].partition(" ") for week in weeks if week[5]]
    assert [number for number, _, _ in track] == [str(k) for k in range(1, 11)]
    for week in weeks:
        folder = ""
        for name in re.findall(r"`([^`]+)`", week[3]):
            folder = name.rpartition("/")[0] if "/" in name else folder
            assert any((TUTORIALS.parent / "hetu" / place).exists() for place in (name, f"{folder}/{name}")), name


def test_the_commands_that_open_the_course_are_those_of_the_readme() -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", INDEX, re.S)
    assert commands in (TUTORIALS.parent / "README.md").read_text("utf-8")
    settings = configparser.ConfigParser()
    settings.read(TUTORIALS.parent / "setup.cfg")
    assert (
        "tutorials" in settings["options.extras_require"]
        and "jupyterlab" in settings["options.extras_require"]["tutorials"]
    )


# -- what stored notebooks begin with ------------------------------------------------------------------------------


def test_the_address_of_the_repository_stands_in_one_place() -> None:
    address = OPENING["url"]()
    for source in SOURCES:
        assert address.removeprefix("https://github.com/") not in source.read_text("utf-8")
        first, install = ("".join(cell["source"]) for cell in stored(source)[:2])
        assert first.count(address.removeprefix("https://github.com/")) == 2 and address in install
        assert all((TUTORIALS / picture).exists() for picture in re.findall(r"\((badges/\w+\.svg)\)", first))


@pytest.mark.parametrize(
    ("there", "extra"),
    [
        ((), ""),
        (("nvidia-smi",), "[gpu]"),
        (("nvidia-smi", "cupy"), ""),
        (("hetu",), None),
        (("hetu", "nvidia-smi"), None),
    ],
)
def test_the_first_cell_installs_what_is_missing(there, extra, monkeypatch: pytest.MonkeyPatch) -> None:
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="the extra [dev] is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setattr(sys, "ps1", "", raising=False)  # a shell sets it, and trainings ask whether somebody types
    shell, ran = shells.InteractiveShell.instance(), []
    monkeypatch.setitem(shell.magics_manager.magics["line"], "pip", ran.append)
    shell.run_cell(OPENING["install"]()).raise_error()
    wanted = f'install --quiet "hetu-dl{extra} @ git+{OPENING["url"]()}"'
    assert ran == ([] if extra is None else [wanted])


def test_binder_gets_a_python_that_hetu_runs_on() -> None:
    settings = configparser.ConfigParser()
    settings.read(TUTORIALS.parent / "setup.cfg")
    folder = TUTORIALS.parent / ".binder"
    version = (folder / "runtime.txt").read_text().strip().removeprefix("python-")
    assert f"Programming Language :: Python :: {version}" in settings["metadata"]["classifiers"].splitlines()
    assert (folder / "requirements.txt").read_text().strip() == "-e .[tutorials]"


def test_notebooks_take_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class There:
        def __init__(self, kind: str) -> None:
            self.xp = types.ModuleType(kind)

    class Missing:
        def __init__(self, kind: str) -> None:
            pass

        @property
        def xp(self):
            raise errors.MissingDependencyError("no GPU", fix="none")

    for made, found in ((There, "gpu"), (Missing, "cpu")):
        monkeypatch.setattr(device, "Device", made)
        assert device.best_device() == found
    for source in SOURCES[:5]:
        made = [
            line for line in source.read_text("utf-8").splitlines() if "Executor(" in line and "program(" not in line
        ]
        assert made and all("device=device" in line for line in made), made
