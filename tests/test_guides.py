"""The pages of the documentation: their code runs, their commands exist, the reference is what its generator writes."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import hetu as ht
import hetu.plan
import hetu.ps
import hetu.strategies
from hetu.core.graph import OPS
from hetu.dist.launch.cluster import parse_cluster
from hetu.dist.launch.options import parse
from hetu.passes import PASSES

from .test_readme import PAGES, ROOT, blocks

GUIDES = sorted((ROOT / "tutorials/guides").glob("*.md"))
REFERENCE = ROOT / "tutorials/reference"
every_guide = pytest.mark.parametrize("page", [g.relative_to(ROOT).as_posix() for g in GUIDES])


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """A page may define operators, and names are counted as in a new process."""
    before = dict(OPS)
    with ht.scope("guide"):
        yield
    OPS.clear()
    OPS.update(before)


@every_guide
def test_python_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [page])  # which a page may read, and which are those of pytest
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # where a dataclass looks for its module
    for code in blocks(page, "python"):
        if not all(map(find_spec, re.findall(r"^import (\w+)", code, re.M))):  # the rest of the page is about it
            pytest.skip(f"it needs {code.partition(chr(10))[0]}")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, page, "exec"), vars(module))


def unknown_words(command: str) -> list[str]:
    """What the script of a command does not know: options, and values that are words."""
    words = shlex.split(command, comments=True)
    if words[0] == "heturun":
        words = parse(words[1:])[1].command
    script, *given = [word for word in words if word != "python"] or [""]
    if not script.startswith("examples/"):
        return []
    shared = (ROOT / f"hetu/{name}.py" for name in ("script", "script_servers", "ps/store/policies", "__init__"))
    files = *(ROOT / script).parent.glob("*.py"), *shared
    source = "".join(file.read_text("utf-8") for file in files)
    assert (ROOT / script).exists(), script
    return [w for w in given if re.fullmatch(r"--[a-z-]+|[a-z][a-z+-]*", w) and f'"{w}"' not in source]


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_options_and_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for command in re.findall(r"(heturun -[^`\n]*|heturun examples/[^`\n]*|python examples/[^`\n]*)", text):
        assert unknown_words(command) == [], command


def test_a_wrong_command_is_found() -> None:
    assert unknown_words("heturun -w 2 python examples/parallel/train.py --strategy dp+tp --steps 3") == []
    assert unknown_words("python examples/parallel/train.py --strategie dp --model cmm") == ["--strategie", "cmm"]
    with pytest.raises(SystemExit):
        unknown_words("heturun --workes 2 python train.py")


def test_the_cluster_file_is_one() -> None:
    (text,) = blocks("tutorials/guides/cluster.md", "yaml")
    hosts = parse_cluster(text)
    assert [(h.name, h.workers, h.servers, h.chief) for h in hosts] == [("node1", 4, 1, True), ("node2", 4, 0, False)]


@pytest.mark.parametrize(("page", "least"), [("from_pytorch", 30), ("from_torchrec", 10), ("from_hetu", 30)])
def test_names_in_the_second_column_exist(page: str, least: int) -> None:
    text = (ROOT / f"tutorials/guides/{page}.md").read_text("utf-8")
    cells = [row.split(" | ")[1] for row in text.splitlines() if row.startswith("| ") and row.count(" | ") > 1]
    names = [n for cell in cells for n in re.findall(r"\b(?:ht|hetu)((?:\.\w+)+)", cell)]
    assert len(names) > least
    for name in names:
        assert functools.reduce(getattr, name.split(".")[1:], ht), name


# -- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_is_what_its_generator_writes(tmp_path: Path) -> None:
    """In a process of its own: other tests define operators. From any folder, with the package alone."""
    command = [sys.executable, ROOT / "tutorials/reference.py", tmp_path]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path, env=variables)
    written = {page.name: page.read_text("utf-8") for page in tmp_path.iterdir()}
    stored = {page.name: page.read_text("utf-8") for page in REFERENCE.iterdir()}
    assert sorted(written) == sorted(stored)
    for name, text in written.items():
        assert stored[name] == text, f"{name} is not what the docstrings say: run python tutorials/reference.py"


def test_the_reference_is_complete_and_names_nothing_of_a_machine() -> None:
    pages = {page.name: page.read_text("utf-8") for page in REFERENCE.iterdir()}
    table = re.findall(r"^\| (?:\[)?(\w+)", pages["operator_table.md"], re.M)[1:]
    # What is made of rules, those of doctests and other tests too, counts as made by the module that makes it.
    rules = {op.name for op in OPS.values() if op.update or op.row_update}
    own = [
        op.name
        for op in OPS.values()
        if op.__module__.startswith(("hetu.ops.", "hetu.passes.", "hetu.cpu_kernels.", "hetu.gpu_kernels."))
        and op.name.removesuffix("_touched") not in rules
    ]
    assert sorted(set(own) - set(table)) == [] and len(table) == len(set(table))
    for name in ht.nn.__all__:
        assert f"\n### {name}\n" in pages["layers.md"], name
    for name in PASSES:
        assert f"\n### {name}\n" in pages["passes.md"], name
    for name, text in pages.items():
        assert not re.search(r"0x[0-9a-f]{6,}|<(?:function|class|module|object)\b|/(?:home|root|tmp|work)/", text), name


def test_the_reference_has_every_environment_variable() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "hetu").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bHETU_[A-Z][A-Z_]*", text)}
    table = re.findall(r"^\| `(HETU_\w+)` \|", (REFERENCE / "environment.md").read_text("utf-8"), re.M)
    assert sorted(table) == sorted(read)
