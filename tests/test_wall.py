"""The wall between meaning and speed: without the rooms of kernels a complete system remains, with the same results."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.core.kernels import KINDS, PLAIN, kernels, kernels_of, room
from hetu.core.op import Op
from hetu.core.types import same_type

ROOT = Path(__file__).parent.parent
ROOMS = [f"{kind}_kernels" for kind in KINDS]
DEADLINE = 240  # seconds, of a test that takes 15 on a machine of its own

# Runs first in processes that tests start, which have `site`: no editable installation finds the rooms.
HERMIT = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in f.__module__]\n"

# What is run without the rooms: files of tests, and which of them.
PARTS = {
    "operators": (("test_ops.py",), "bound_equals or place or every_operator"),
    "graphs": (("test_program.py",), "random_graphs and default or place or updates or fails or size"),
    "training": (("test_training.py",), "learns or equal or resume or best"),
    "optimizers": (("test_optim.py", "ps/test_store.py"), "test_optim or alike or every_row or rate or large_batch"),
    "strategies": (
        ("dist/test_strategies.py", "strategies/test_parameter_server.py"),
        "losses_equal and mlp or by_hand or bsp",
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A copy of the package without the rooms, with the tests; how to run Python so that it finds nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("hetu", "tests"):
        ignored = shutil.ignore_patterns(*ROOMS, "__pycache__", "gpu", "*.pyc")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "setup.cfg", folder)
    (folder / "sitecustomize.py").write_text(HERMIT)
    paths = [folder, *(path for path in sys.path if path and not Path(path).is_relative_to(ROOT))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Without `site` there is no editable installation, which would find the rooms where they are.
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=DEADLINE)

    return run


def test_the_rooms_are_gone(alone):
    script = (
        "import hetu; from hetu.core.kernels import PLAIN, room; "
        f"print({ROOT.as_posix()!r} in hetu.__file__, {{room(kind) is PLAIN for kind in {KINDS}}}, *hetu.passes.PASSES)"
    )
    done = alone("-c", script)
    assert (done.stdout.split(), done.stderr) == ("False {True} simplify sparsify_updates channels_last".split(), "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", PARTS)
def test_a_complete_system_remains_without_the_rooms(alone, part):
    files, chosen = PARTS[part]
    options = ("-p", "no:cacheprovider", "-q", "-x", "-n", "0", "-k", chosen)
    done = alone("-m", "pytest", *options, *(f"tests/{file}" for file in files))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def trained(**options):
    """A loss after three steps, and the operators that computed it."""
    rng = np.random.default_rng(0)
    x, t = ht.placeholder("x", (32, 20)), ht.placeholder("t", (32,), "int64")
    w, b = ht.variable("w", rng.standard_normal((20, 5), np.float32)), ht.variable("b", np.zeros(5, np.float32))
    loss = ht.mean(ht.softmax_cross_entropy(ht.gelu(ht.layer_norm(x, np.ones(20), np.zeros(20)) @ w + b), t))
    ex = ht.Executor([loss, ht.optim.Adam(0.1).minimize(loss)], **options)
    feed = {x: rng.standard_normal((32, 20), np.float32), t: rng.integers(0, 5, 32)}
    return [float(ex.run(feed)[0]) for _ in range(3)], {step.node.op.name for step in ex.program(feed).steps}


def test_kernels_are_switched_off_by_the_environment(monkeypatch):
    fast, names = trained()
    assert "fused" in names and not names & {"layer_norm", "gelu_erf", "adam"}
    monkeypatch.setenv("HETU_KERNELS", "0")
    assert kernels("cpu") is kernels_of(np) is PLAIN
    plain, names = trained()
    assert "fused" not in names and names >= {"layer_norm", "gelu_erf", "adam"}
    np.testing.assert_allclose(plain, fast, rtol=1e-5)
    monkeypatch.setenv("HETU_KERNELS", "off")
    with pytest.raises(ht.errors.ArgumentError, match="set it to 0 or 1"):
        trained()


def test_an_operator_of_the_same_name_is_computed_as_it_says(monkeypatch):
    monkeypatch.setitem(OPS, "relu", OPS["relu"])

    @ht.op(name="relu", infer=lambda x: x)
    def other(xp, x):
        """Not the relu.

        >>> other.name
        'relu'
        """
        return x + 1

    out = np.zeros(3)
    for call in other.bound(np, out, [np.array([-1.0, 0.0, 1.0])], {}):
        call()
    assert out.tolist() == [0.0, 1.0, 2.0]


def test_every_file_of_a_room_enters_what_it_computes():
    for kind in KINDS:
        room(kind).function(OPS["add"])
        functions = [f.func if isinstance(f, partial) else f for f in room(kind).functions.values()]
        assert {*room(kind).files} <= {f.__module__ for f in functions}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_enters_a_kernel_for_an_operator_of_any_name(kind, monkeypatch):
    def calls(xp, out, x, **attrs):
        return [lambda: xp.negative(x, out)]

    ours, other = OPS["matmul"], Op(lambda xp, x: x + 1, name="matmul", infer=same_type)
    assert room(kind).function(ours)  # by now all files have entered what they have
    monkeypatch.setattr(room(kind), "functions", {**room(kind).functions})
    assert room(kind).function(other) is None is not room(kind).function(ours)
    room(kind).kernel(other)(calls)
    assert room(kind).function(other) is calls is not room(kind).function(ours)


def recipes():
    """Files of the rooms that bind operators, make some, or have a pass."""
    modules = {own.module for kind in KINDS for own in room(kind).passes}
    yield from (Path(import_module(m).__file__) for m in modules if m.split(".")[1] in ROOMS)
    for file in (*(ROOT / "hetu/cpu_kernels").glob("*.py"), *(ROOT / "hetu/gpu_kernels/passes").glob("*.py")):
        if "import kernel" in (text := file.read_text("utf-8")) or ", kernel\n" in text or "\n@op" in text:
            yield file


@pytest.mark.parametrize("file", sorted(set(recipes())), ids=lambda f: f.stem)
def test_a_recipe_says_what_it_gains_and_how_to_switch_it_off(file):
    header = ast.get_docstring(ast.parse(file.read_text("utf-8")))
    assert "Gain: " in header, "say what it gains"
    assert "HETU_KERNELS=0" in header or "HETU_PASSES" in header, "say how it is switched off"
