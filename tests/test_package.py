"""The house rules: what may import what, what importing hetu may load, file names, docstrings, shipped files."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hetu"
FILES = sorted(PACKAGE.rglob("*.py"))
TOP = 8

# Imports go down or stay on the floor. Every module and folder of the package stands here.
FLOORS = {
    0: "errors source kernels types backend",
    1: "graph op",
    2: "ops",
    3: "autodiff interpret passes memory show cpu_kernels gpu_kernels",
    4: "nn optim schedules init metrics data",
    5: "program subgraph executor checkpoint state profiler summary gradcheck training",
    6: "dist ps",
    7: "plan embed ml automl models",
    TOP: "hetu __main__ cli doctor lab labs notebook",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}

# The rooms of kernels, which nobody imports: `kernels.py` loads them when they are there. What a room loads first may
# import little, for this is done by the passes; of the GPU's, only its passes may know graphs.
ROOMS = {"cpu_kernels", "gpu_kernels"}
BELOW = {"errors", "kernels", "backend"}
FIRST = {"cpu_kernels": {*BELOW, "op"}} | {
    f"cpu_kernels.{name}": {*BELOW, "op"} for name in ("table", "ufuncs", "blas", "lanes")
}
SWITCHED_BY_MODULE = {"update.py", "update_rows.py", "fused_update.py"}  # whose blocks are to follow behind the wall

# Heavy or optional packages, and the only places that may name them.
GUARDED = {
    "cupy": ("backend", "gpu_kernels", "dist.nccl"),
    "mpi4py": ("dist.mpi", "dist.launch"),
    "ml_dtypes": ("types",),
    "yaml": ("dist.cluster",),
    "zmq": ("ps.server", "ps.client", "ps.status", "doctor"),
    "IPython": ("notebook.magic",),
}
REQUIREMENTS = {"numpy", "tqdm", "safetensors", *GUARDED}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
LOADERS = {"import_module", "__import__", "find_spec"}

DATA_FILES = {
    "adult.npz": "d21a663e18a77a005721d47964b04cf7344d54caf11a26787b696857f5f6f05d",
    "fashion_mini.npz": "0f39f09bc1fe353e5ad2d72d367047ce1daa772ac18b1ffc7f957c9cd44039b5",
    "mnist5k.npz": "f814240cf7e0d3cbaacc1a898905819a40ab46fb317a600d2a4b91a5c184c810",
    "seattle-weather.csv": "62f0609f787158128aa2bd102967173a4953122dd4f872bf1d502cae1037df0b",
    "shakespeare.txt.gz": "59ba595bfa4079bde9a3ba8ee2726b85c22da35af6d418c30f5a3c060207c32a",
    "wordnet_kg_5k.txt.gz": "9a61d24d5a18dcc5b363cdd01dd4645e81a93c9d4900920d98e7a73379e9ae51",
    "wordnet_nouns.npz": "7e7763279239ea08e7a25c9c197e1fd2f76e70b9c1a4b3fddbc5701846520879",
}


def module_name(file: Path) -> str:
    """`hetu/dist/mpi.py` -> `dist.mpi`, `hetu/dist/__init__.py` -> `dist`, `hetu/__init__.py` -> `hetu`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "hetu"


MODULES = {module_name(file) for file in FILES}


def imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names a file imports anywhere in it, imports by a string included; own modules without `hetu.`."""
    inside = [] if module == "hetu" else module.split(".")
    package = inside if is_package else inside[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("hetu.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from _from(node, (node.module or "").removeprefix("hetu.").split("."))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1]
            yield from _from(node, above + (node.module.split(".") if node.module else []))
        elif isinstance(node, ast.Call) and _called(node) in LOADERS:
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _from(node: ast.ImportFrom, base: list[str]) -> Iterator[str]:
    """`from base import a, b`: the modules a and b where there are such, otherwise base."""
    for alias in node.names:
        whole = ".".join([*(base if base != ["hetu"] else []), alias.name])
        yield whole if whole in MODULES or whole in FLOOR_OF else ".".join(base) or "hetu"


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a file imports against the rules."""
    own = module.split(".")[0]
    found = []
    for name in imported(source, module, is_package):
        root = name.split(".")[0]
        if root in GUARDED and not any(f"{module}.".startswith(f"{place}.") for place in GUARDED[root]):
            found.append(f"{module} names {root}, only {', '.join(GUARDED[root])} may")
        elif root in FLOOR_OF:
            if FLOOR_OF[root] > FLOOR_OF[own]:
                found.append(f"{module} (floor {FLOOR_OF[own]}) imports {name} (floor {FLOOR_OF[root]})")
            elif {own, root} == {"dist", "ps"}:
                found.append(f"{module} imports {name}: what joins dist and ps stands above both")
            elif root in ROOMS and own != root:
                found.append(f"{module} imports {name}: a room of kernels may be missing, ask `kernels(...)`")
            elif own in ROOMS and root != own and root not in _known_to(module):
                found.append(f"{module} imports {name}: what a room loads first knows {sorted(_known_to(module))}")
        elif root not in REQUIREMENTS and root not in sys.stdlib_module_names:
            found.append(f"{module} imports {name}, which is no requirement")
    return found


def _known_to(module: str) -> Iterable[str]:
    if module.startswith("gpu_kernels") and not module.startswith("gpu_kernels.passes"):
        return BELOW
    return FIRST.get(module, FLOOR_OF)


def files(of: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", of, ids=lambda f: f.relative_to(ROOT).as_posix())


@files(FILES)
def test_a_file_keeps_the_rules(file: Path) -> None:
    source, module = file.read_text("utf-8"), module_name(file)
    assert module.split(".")[0] in FLOOR_OF, f"give {module} a floor in FLOORS"
    assert breaches(source, module, file.name == "__init__.py") == []
    assert ast.get_docstring(ast.parse(source)), f"{module} does not open with what it is and what it ignores"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph", "from .ops import add"),
        ("graph", "def f():\n    from . import ops"),
        ("types", "import hetu.graph"),
        ("types", "from hetu.graph import Node"),
        ("ops.shape", "from .. import executor"),
        ("executor", "from hetu import dist"),
        ("nn.linear", "import hetu"),
        ("dist.comm", "from ..ps.store import Store"),
        ("ps.store", "from .. import dist"),
        ("executor", "import cupy as cp"),
        ("ops.nn", "importlib.import_module('cupy.cuda')"),
        ("dist.comm", "from mpi4py import MPI"),
        ("ps.store", "import zmq.asyncio"),
        ("gpu_kernels.adam", "from ..types import TensorType"),
        ("cpu_kernels.table", "from ..graph import OPS"),
        ("ops.linalg", "from ..cpu_kernels import blas"),
        ("gpu_kernels.passes.group", "from ...cpu_kernels import blas"),
        ("cpu_kernels.gelu", "from ..executor import Executor"),
        ("metrics", "import sklearn.metrics"),
    ],
)
def test_the_walker_sees_a_breach(module: str, source: str) -> None:
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("op", "from .graph import Node"),
        ("ops.shape", "from ..graph import Node\nfrom .leaf import size\nimport numpy as np"),
        ("dist.nccl", "from cupy.cuda import nccl"),
        ("dist.mpi", "importlib.import_module('mpi4py.MPI')"),
        ("ps.client", "import zmq"),
        ("gpu_kernels.adam", "from ..backend import Device"),
        ("gpu_kernels.passes.group", "from ...graph import OPS\nfrom ..reduce import COMBINE"),
        ("cpu_kernels.gelu", "from ..graph import OPS\nfrom ..ops.activation import RATE\nfrom .table import kernel"),
        ("plan.search", "from .. import dist, ps"),
    ],
)
def test_the_walker_lets_the_rest_pass(module: str, source: str) -> None:
    assert breaches(source, module) == []


@files([f for f in FILES if f.parent in (PACKAGE / "ops", PACKAGE / "passes") and f.name not in SWITCHED_BY_MODULE])
def test_what_operators_mean_has_no_branch_on_the_array_module(file: Path) -> None:
    assert not re.search(r"\bxp is (not )?np\b|\bxp\.__name__", file.read_text("utf-8"))


def test_importing_hetu_loads_no_optional_package() -> None:
    script = f"import sys, hetu; print(sorted({set(GUARDED)!r} & set(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@files(sorted(f for part in ("hetu", "tests", "examples", "tutorials") for f in (ROOT / part).rglob("*.py")))
def test_no_file_or_folder_has_a_name_that_says_nothing(file: Path) -> None:
    assert not FORBIDDEN_NAMES & {*file.relative_to(ROOT).parent.parts, file.stem}


def test_shipped_data_is_unaltered_and_its_licences_go_with_it() -> None:
    folder = PACKAGE / "data" / "files"
    licences = (folder / "LICENSES.md").read_text("utf-8")
    assert {f.name for f in folder.iterdir()} == {*DATA_FILES, "LICENSES.md"}
    for name, digest in DATA_FILES.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert f"`{name}`" in licences
    for notice in ("MNIST", "Fashion-MNIST", "Adult", "Shakespeare", "WordNet", "Seattle weather"):
        assert f"\n**{notice}**" in licences


@pytest.mark.parametrize("file", [f for f in FILES if "data" in f.parts], ids=lambda f: f.name)
def test_loaders_never_unpickle(file: Path) -> None:
    source = file.read_text("utf-8")
    assert "allow_pickle=True" not in source
    assert not {"pickle", "marshal", "shelve"} & set(imported(source, module_name(file), False))
