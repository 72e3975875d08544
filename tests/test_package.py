"""The house rules: what may import what, what importing hetu may load, file names, docstrings, shipped files."""

from __future__ import annotations

import ast
import configparser
import graphlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hetu.core.kernels import kernels

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hetu"
FILES = sorted(PACKAGE.rglob("*.py"))
# Imports go up this page or stay in their row. The longest name that begins a module's says where it stands.
FLOORS = [
    "core.errors core.kernels core.types core.backend job system",
    "core.graph core.op codec files plain_data ranges growth promises arguments answers doubts elsewhere foreign",
    "core.leaf core.operators ops",
    "core.autodiff core.simplify core.memory core.passes fuse passes cpu_kernels gpu_kernels",
    "nn embed models onnx pytorch optimizer updates optim schedules init metrics data",
    "core look gradcheck checkpoint saving lent renamed progress training inference generation",
    "dist.comm ps.store",
    "dist.layout dist.ops dist.by_hand ps.wire",
    "dist.cut ps",
    "dist",
    "strategies",
    "plan.costs",
    "plan.simulation plan.memory",
    "plan.plan plan.why",
    "plan.search",
    "plan",
    "ml",
    "automl",
    "hetu __main__ cli script script_servers serving switching teach",
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}

# The rooms of kernels, which nobody imports: `kernels.py` loads them when they are there. What a room loads first may
# import little, for this is done by the passes; of the GPU's, only its passes may know graphs.
ROOMS = {"cpu_kernels", "gpu_kernels"}
BELOW = {"core.errors", "core.kernels", "core.backend", "job", "system"}
FIRST = {
    *("cpu_kernels", *(f"cpu_kernels.{name}" for name in ("recipes", "blas", "c_calls", "compiled"))),
    *("gpu_kernels", "gpu_kernels.launchers", "gpu_kernels.machine"),
}

# Heavy or optional packages, and the only places that may name them.
GUARDED = {
    "cupy": ("core.backend", "gpu_kernels", "dist.comm.nccl"),
    "mpi4py": ("dist.comm.process", "dist.launch"),
    "ml_dtypes": ("core.types",),
    "yaml": ("dist.launch.cluster",),
    "zmq": ("ps.wire", "teach.doctor"),
    "IPython": ("teach.notebook.magic", "look.growing"),
    "tensorboardX": ("look.logs",),
    "pymetis": ("ps.store.bigraph",),
    "sklearn": ("ml.estimator",),
    "cloudpickle": ("teach.notebook.wire",),
    "ziglang": ("cpu_kernels.compiler",),
    "onnx": ("onnx", "hetu", "pytorch", "serving.predictor"),  # it has a room of this name
    "google": ("onnx.standard",),
    "torch": ("pytorch",),
    "uvicorn": ("serving.serve",),
}
REQUIREMENTS = {"numpy", "tqdm", "safetensors", *GUARDED}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ONE_WAY = {"dist", "ps", "strategies", "plan"}
LOADERS = {"import_module", "__import__", "find_spec"}

DATA_FILES = {
    "adult.npz": "d21a663e18a77a005721d47964b04cf7344d54caf11a26787b696857f5f6f05d",
    "cmudict_mini.dict.gz": "9085fad53789f7f91460d46909dc70e6c0d4322a5ae6306b909bfc08a8a9ccc7",
    "fashion_mini.npz": "0f39f09bc1fe353e5ad2d72d367047ce1daa772ac18b1ffc7f957c9cd44039b5",
    "mnist5k.npz": "f814240cf7e0d3cbaacc1a898905819a40ab46fb317a600d2a4b91a5c184c810",
    "seattle-weather.csv": "62f0609f787158128aa2bd102967173a4953122dd4f872bf1d502cae1037df0b",
    "shakespeare.txt.gz": "59ba595bfa4079bde9a3ba8ee2726b85c22da35af6d418c30f5a3c060207c32a",
    "wordnet_kg_5k.txt.gz": "9a61d24d5a18dcc5b363cdd01dd4645e81a93c9d4900920d98e7a73379e9ae51",
    "wordnet_nouns.npz": "7e7763279239ea08e7a25c9c197e1fd2f76e70b9c1a4b3fddbc5701846520879",
}


def module_name(file: Path) -> str:
    """`hetu/dist/comm/mpi.py` -> `dist.mpi`, `hetu/dist/__init__.py` -> `dist`, `hetu/__init__.py` -> `hetu`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "hetu"


MODULES = {module_name(file) for file in FILES}
SPREAD = {"core"}  # packages that stand in several rows; their own file imports nothing
ALLOWED = {("dist.comm.guard", "dist.launch.boot")}  # it forks the process that this runs in


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


def floor_of(module: str) -> int | None:
    """The row of a module, or of the longest part of its name that has one."""
    parts = module.split(".")
    starts = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((FLOOR_OF[name] for name in starts if name in FLOOR_OF), None)


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a file imports against the rules."""
    own, floor = module.split(".")[0], floor_of(module)
    found = []
    for name in imported(source, module, is_package):
        root, below = name.split(".")[0], floor_of(name)
        if root in GUARDED and not any(f"{module}.".startswith(f"{place}.") for place in GUARDED[root]):
            found.append(f"{module} names {root}, only {', '.join(GUARDED[root])} may")
        elif below is not None:
            if own == "core" != root:
                found.append(f"{module} imports {name}: the core knows nothing above it")
            elif below > floor and (module, name) not in ALLOWED:
                found.append(f"{module} (row {floor}) imports {name} (row {below})")
            elif {own, root} == {"dist", "ps"}:
                found.append(f"{module} imports {name}: what joins dist and ps stands above both")
            elif root in ROOMS and own != root:
                found.append(f"{module} imports {name}: a room of kernels may be missing, ask `kernels(...)`")
            elif own in ROOMS and root != own and not _knows(module, name):
                found.append(f"{module} imports {name}: what a room loads first knows {sorted(BELOW)}")
        elif root not in REQUIREMENTS and root not in sys.stdlib_module_names and root not in SPREAD:
            found.append(f"{module} imports {name}, which is no requirement")
    return found


def _knows(module: str, name: str) -> bool:
    """Whether a module of a room of kernels may import what stands below all rooms."""
    if module not in FIRST and module.startswith("gpu_kernels") and not module.startswith("gpu_kernels.passes"):
        return name in BELOW or name.startswith(
            ("ops.", "passes.", "fuse.")
        )  # the operators that its files launch kernels for
    return module not in FIRST or name in {*BELOW, "core.op"}


def files(of: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", of, ids=lambda f: f.relative_to(ROOT).as_posix())


@files(FILES)
def test_a_file_keeps_the_rules(file: Path) -> None:
    source, module = file.read_text("utf-8"), module_name(file)
    assert module in SPREAD or floor_of(module) is not None, f"give {module} a row in FLOORS"
    assert breaches(source, module, file.name == "__init__.py") == []
    assert ast.get_docstring(ast.parse(source)), f"{module} does not open with what it is and what it ignores"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.graph", "from ..ops import add"),
        ("core.graph", "def f():\n    from .. import ops"),
        ("core.types", "import hetu.core.graph"),
        ("core.types", "from hetu.core.graph import Node"),
        ("ops.shape", "from ..core import executor"),
        ("core.executor", "from hetu import dist"),
        ("nn.linear", "import hetu"),
        ("dist.comm.comm", "from ...ps.store import store"),
        ("dist.comm.comm", "from ..layout.layout import Layout"),
        ("ps.store.store", "from ... import dist"),
        ("core.executor", "import cupy as cp"),
        ("ops.nn", "importlib.import_module('cupy.cuda')"),
        ("dist.comm.comm", "from mpi4py import MPI"),
        ("ps.store.store", "import zmq.asyncio"),
        ("gpu_kernels.adam", "from ..core.types import TensorType"),
        ("cpu_kernels.recipes", "from ..core.graph import OPS"),
        ("ops.linalg", "from ..cpu_kernels import blas"),
        ("gpu_kernels.passes.group", "from ...cpu_kernels import blas"),
        ("cpu_kernels.gelu", "from ..core.executor import Executor"),
        ("metrics", "import sklearn.metrics"),
    ],
)
def test_the_walker_sees_a_breach(module: str, source: str) -> None:
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.op", "from .graph import Node"),
        ("ops.shape", "from ..core.graph import Node\nfrom ..core.leaf import size\nimport numpy as np"),
        ("dist.comm.nccl", "from cupy.cuda import nccl"),
        ("dist.comm.process", "importlib.import_module('mpi4py.MPI')"),
        ("ps.wire.client", "import zmq"),
        ("gpu_kernels.adam", "from ..core.backend import Device"),
        ("gpu_kernels.passes.group", "from ...core.graph import OPS\nfrom ..reduce import reduced"),
        (
            "cpu_kernels.gelu",
            "from ..core.graph import OPS\nfrom ..ops.activation import RATE\nfrom .recipes import kernel",
        ),
        ("plan.search.planner", "from ... import dist, ps"),
    ],
)
def test_the_walker_lets_the_rest_pass(module: str, source: str) -> None:
    assert breaches(source, module) == []


def test_imports_between_the_files_of_distribution_go_one_way() -> None:
    """Those inside functions count too: whoever has to hide an import has a circle."""
    graph = {}
    for file in FILES:
        module = module_name(file)
        if module.split(".")[0] in ONE_WAY:
            graph[module] = {*imported(file.read_text("utf-8"), module, file.name == "__init__.py")} & MODULES
    for module, name in ALLOWED:
        graph[module].remove(name)
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


@files([f for f in FILES if f.parent in (PACKAGE / "ops", PACKAGE / "passes")])
def test_what_operators_mean_has_no_branch_on_the_array_module(file: Path) -> None:
    assert not re.search(r"\bxp is (not )?np\b|\bxp\.__name__", file.read_text("utf-8"))


def test_importing_hetu_loads_no_optional_package() -> None:
    script = f"import sys, hetu; print(sorted({set(GUARDED)!r} & set(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_processes_that_tests_start_find_the_package_compiled() -> None:
    """Whatever the environment says: so one takes half as long."""
    assert Path(importlib.util.cache_from_source(kernels.__code__.co_filename)).exists()
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    parts = ("hetu", "tests", "examples", "tutorials")
    files = [f.relative_to(ROOT) for part in parts for f in (ROOT / part).rglob("*.py")]
    assert len(files) > 500
    assert [f.as_posix() for f in files if FORBIDDEN_NAMES & {*f.parent.parts, f.stem}] == []


def test_shipped_data_is_unaltered_and_its_licenses_go_with_it() -> None:
    folder = PACKAGE / "data" / "files"
    licenses = (folder / "LICENSES.md").read_text("utf-8")
    assert {f.name for f in folder.iterdir()} == {*DATA_FILES, "LICENSES.md"}
    for name, digest in DATA_FILES.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert f"`{name}`" in licenses
    for notice in ("MNIST", "Fashion-MNIST", "Adult", "Shakespeare", "WordNet", "Seattle weather"):
        assert f"\n**{notice}**" in licenses


@pytest.mark.parametrize("file", [f for f in FILES if "data" in f.parts], ids=lambda f: f.name)
def test_loaders_never_unpickle(file: Path) -> None:
    source = file.read_text("utf-8")
    assert "allow_pickle=True" not in source
    assert not {"pickle", "marshal", "shelve"} & set(imported(source, module_name(file), False))


PACKED = """
import hetu, numpy as np
from hetu.core.kernels import kernels
images = np.arange(64.0, dtype="f").reshape(1, 1, 8, 8)
assert hetu.Executor([hetu.max_pool2d(hetu.constant(images), 8)]).run()[0] == 63
texts = [s.text for s in kernels("cpu").compiled.built()]
print(hetu.__file__, any("max_pool" in text for text in texts))
"""


TRACKED = ("hetu", "tests", "examples", "tutorials", "docs", ".ci", ".binder")
LEFTOVERS = ("__pycache__", "*.pyc", ".ipynb_checkpoints", ".DS_Store")


@pytest.mark.nightly
def test_what_is_built_and_packed_carries_the_texts_of_kernels(tmp_path: Path) -> None:
    """What a wheel holds runs a kernel of C, in a process that finds no other hetu first; the sdist has every file."""
    pytest.importorskip("setuptools")
    source, built, packed = tmp_path / "source", tmp_path / "built", tmp_path / "packed"
    for name in TRACKED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*LEFTOVERS))
    top = [*ROOT.glob("*.md"), *(ROOT / n for n in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE"))]
    for file in (*top, ROOT / "CITATION.cff", ROOT / ".gitignore"):
        shutil.copy(file, source)
    wanted = {file.relative_to(source).as_posix() for file in source.rglob("*") if file.is_file()}
    commands = f"['build_py', '-d', {str(built)!r}, 'sdist', '-d', {str(packed)!r}]"
    setup = f"import setuptools; setuptools.setup(script_args=['-q', *{commands}])"
    for script, place in ((setup, source), (PACKED, tmp_path)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(built)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    compiles = any(kernels("cpu").compiled.digest())
    assert done.stdout.split() == [str(built / "hetu" / "__init__.py"), str(compiles)]
    (archive,) = packed.iterdir()
    with tarfile.open(archive) as members:
        inside = {name.partition("/")[2] for name in members.getnames()}
    assert sorted(wanted - inside) == []
    texts = [f.relative_to(ROOT) for f in PACKAGE.rglob("*") if f.suffix in (".c", ".h", ".cu")]
    assert all((built / text).exists() for text in texts)


def test_it_is_cited_by_the_version_and_the_address_that_it_has() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", "utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    stated = settings["metadata"]
    assert (cited["version"], cited["license"]) == (stated["version"], stated["license"])
    assert cited["repository-code"] == stated["url"]
