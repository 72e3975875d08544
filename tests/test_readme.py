"""What README.md and CONTRIBUTING.md show is true: their Python runs, and the quoted error is the real one."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.core.op import op
from hetu.core.types import elementwise

from .test_package import FLOORS

ROOT = Path(__file__).parent.parent
MOST_MET = 30  # files of hetu that the README's MLP meets from build to the second step; it may only fall
TREE = ("hetu", "tests", "examples", "tutorials", "docs")


def blocks(file: str, language: str) -> list[str]:
    """The fenced blocks of one language, without the indentation of the list they stand in."""
    text = (ROOT / file).read_text("utf-8")
    return [textwrap.dedent(b) for b in re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.M | re.S)]


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """A block may define an operator, and names are counted as in a new process."""
    before = dict(OPS)
    with ht.scope("readme"):
        yield
    OPS.clear()
    OPS.update(before)


@pytest.mark.parametrize("code", blocks("README.md", "python"), ids=lambda code: code.split("\n")[0])
def test_python_of_the_readme_runs(code: str) -> None:
    names: dict[str, object] = {"ht": ht}
    exec(compile(code, "readme.py", "exec"), names)
    if "loss_value" in names:
        assert 0 < float(names["loss_value"]) < 1.0, "one pass over the digits has learned something"


def test_the_quoted_error_is_the_real_one(tmp_path: Path) -> None:
    (quoted,) = (b for b in blocks("README.md", "text") if "fix: " in b)
    file, line = re.search(r"  at (\w+\.py):(\d+)\n", quoted).groups()
    rows = ["import hetu as ht", "x = ht.placeholder('x', (None, 784))"]
    rows += ["w = ht.variable('w', ht.init.zeros, (256, 10))"]
    rows += [""] * (int(line) - 1 - len(rows)) + ["y = x @ w"]
    (tmp_path / file).write_text("\n".join(rows))
    with pytest.raises(ht.errors.ShapeError) as caught:
        exec(compile("\n".join(rows), str(tmp_path / file), "exec"), {})
    assert quoted.rstrip() == f"{type(caught.value).__name__}: {caught.value}"


def test_the_operator_of_the_contributors_guide_is_right() -> None:
    (code,) = blocks("CONTRIBUTING.md", "python")
    names = {"op": op, "elementwise": elementwise, "sigmoid": ht.sigmoid}
    exec(compile(code, "contributing.py", "exec"), names)
    ht.check_gradients(names["softplus"], (3, 4), beta=2.0)


def test_the_commands_stand_first_and_their_files_exist() -> None:
    commands = blocks("README.md", "bash")[0].splitlines()
    assert len(commands) == 2
    assert (ROOT / commands[0].split()[-1]).is_file() and commands[1].endswith("python -m pytest")


def test_the_floors_are_those_that_are_kept() -> None:
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \|", (ROOT / "hetu/README.md").read_text("utf-8"), re.M)
    assert rows == FLOORS


def test_every_rule_of_an_operator_is_described() -> None:
    text = (ROOT / "hetu/README.md").read_text("utf-8")
    table = text[text.index("## The operator in one place") : text.index("## Many ranks")]
    hooks = [name.removesuffix("_rule") for name in vars(ht.exp) if name.endswith("_rule")]
    hooks = ["infers" if name == "infer" else name for name in hooks]
    options = set(inspect.signature(type(ht.exp).__init__).parameters) - {"self", "forward", "name", "dims"}
    assert [name for name in hooks if f"`.{name}`" not in table] == []
    assert [name for name in options if f"`{name}=`" not in table] == []


PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (*ROOT.glob("*.md"), *(p for top in TREE for p in (ROOT / top).rglob("*.md")))
)


@functools.cache
def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings: small letters, digits, - and _, with - for spaces; -1 after a second one."""
    text, found = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), set()
    for heading in re.findall(r"^#+ (.*)", text, re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(n for n in (name, *(f"{name}-{k}" for k in range(1, 100))) if n not in found))
    return found


def dead_links(page: Path) -> list[str]:
    """Links to files or headings that are not there, and names of files in backticks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    prose, dead = re.sub(r"`[^`\n]*`", "", text), []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        file, _, heading = target.partition("#")
        to = page.parent / file if file else page
        if "://" not in target and (not to.exists() or (heading and heading not in anchors(to))):
            dead.append(target)
    named = re.findall(r"`((?:hetu|tests|examples|tutorials|\.ci)/[\w./-]*)`", text)
    return dead + [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str) -> None:
    assert dead_links(ROOT / page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page, of `x_y`\n## Same\n## Same\n[a](#a-page-of-x_y) [b](#same-1) [c](page.md#same) [d](https://e.org/f)\n"
        "[e](#same-2) [f](other.md) [g](page.md#none) `hetu/none.py` `hetu/core/op.py` `[h](none.md)`\n"
        "```text\n# No heading\n[i](none.md)\n```\n[j](#no-heading)\n"
    )
    assert dead_links(page) == ["#same-2", "other.md", "page.md#none", "#no-heading", "hetu/none.py"]


# -- how much there is to read ---------------------------------------------------------------------------------------

ROOMS = {  # as README's table names them, and what they hold; the rest of the package is that of `nn/`
    name: name.split("`")[1].rstrip("/").split("/")[0]
    for name in re.findall(r"^\| (`.*?`.*?) \| .* \| [\d,]+ \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
}


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(f.read_text("utf-8").splitlines()) for f in files if f.suffix in (".py", ".c", ".cpp", ".cu", ".h"))


@pytest.mark.parametrize("name", ROOMS)
def test_the_table_of_rooms_is_true(name: str) -> None:
    (stated,) = re.findall(
        rf"^\| {re.escape(name)} \| .* \| ([\d,]+) \|$", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    folders = {*ROOMS.values()} - {"nn"}
    rest = [f for f in (ROOT / "hetu").rglob("*") if f.relative_to(ROOT / "hetu").parts[0] not in folders]
    found = lines_of(rest if ROOMS[name] == "nn" else (ROOT / "hetu" / ROOMS[name]).rglob("*"))
    assert abs(found - int(stated.replace(",", ""))) <= 100, f"{name} has {found} lines"


def test_every_folder_has_a_row_in_the_table_of_rooms() -> None:
    folders = {f.name for f in (ROOT / "hetu").iterdir() if (f / "__init__.py").exists()}
    assert folders - {*ROOMS.values()} == {"data", "optim"}  # which stand beside `nn/`


def test_the_sum_of_all_rooms_is_true() -> None:
    (stated,) = re.findall(r"^\| all \| \| ([\d,]+) \|$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert abs(lines_of((ROOT / "hetu").rglob("*")) - int(stated.replace(",", ""))) <= 500


def test_the_book_is_read_in_an_evening() -> None:
    text = (ROOT / "hetu/README.md").read_text("utf-8")
    stated = {f: (int(n), int(m)) for f, n, m in re.findall(r"^\| `(\w+\.py)` \| .* \| (\d+) \| (\d+) \|$", text, re.M)}
    core = {f.name: lines_of([f]) for f in (ROOT / "hetu/core").glob("*.py") if f.name != "__init__.py"}
    assert stated.keys() == core.keys() and sum(core.values()) <= 4000
    assert {f: n for f, n in core.items() if abs(n - stated[f][0]) > 10} == {}
    assert {f: n for f, n in core.items() if abs(n / 20 - stated[f][1]) > 2} == {}


def test_no_chapter_of_the_book_needs_a_later_one() -> None:
    chapters = re.findall(
        r"^\| `(\w+)\.py` \| .* \| \d+ \| \d+ \|$", (ROOT / "hetu/README.md").read_text("utf-8"), re.M
    )
    assert "executor" in chapters
    for number, chapter in enumerate(chapters):
        body = ast.parse(
            (ROOT / f"hetu/core/{chapter}.py").read_text("utf-8")
        ).body  # not what only a type checker reads
        needed = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.level == 1]
        assert {*needed} <= {*chapters[:number]}, f"{chapter}.py imports {needed}"


MET = """
import sys, pathlib, numpy as np, hetu as ht
root, met = pathlib.Path(ht.__file__).parent, set()
sys.setprofile(lambda frame, event, _: event == "call" and met.add(frame.f_code.co_filename))
x = ht.placeholder("x", (None, 784))
t = ht.placeholder("t", (None,), "int64")
y = ht.nn.Linear(256, 10)(ht.nn.Linear(784, 256, activation=ht.relu)(x))
loss = ht.mean(ht.softmax_cross_entropy(y, t))
ex = ht.Executor({"train": [loss, ht.optim.Adam(1e-3).minimize(loss)], "eval": [loss, y]})
for _ in range(2):
    ex.run("train", {x: np.zeros((128, 784), "float32"), t: np.zeros(128, "int64")})
sys.setprofile(None)
files = [p.relative_to(root) for p in map(pathlib.Path, met) if p.is_relative_to(root)]
looking = ("ranges.py", "promises.py", "arguments.py", "answers.py", "doubts.py", "look")  # which change nothing
apart = ("cpu_kernels", "gpu_kernels", "data", *looking)
print(*sorted(f.as_posix() for f in files if f.parts[0] not in apart))
"""


def test_a_training_step_meets_few_files() -> None:
    plain = {**os.environ, "HETU_KERNELS": "0"}  # what makes it fast is behind the wall
    done = subprocess.run([sys.executable, "-c", MET], cwd=ROOT, capture_output=True, text=True, timeout=60, env=plain)
    met = done.stdout.split()
    assert done.stderr == "" and "core/executor.py" in met
    assert len(met) <= MOST_MET, f"{len(met)} files: {' '.join(met)}"
