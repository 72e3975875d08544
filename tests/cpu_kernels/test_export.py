"""Steps as C programs: compiled and run without Python, they print what the executor computes."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

import hetu as ht
from hetu import optim
from hetu.core.errors import ArgumentError
from hetu.cpu_kernels.compiler import compiler
from hetu.passes import PASSES, chosen_passes

DEADLINE = 120
STEPS = 3
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


def lenet(rng: np.random.Generator):
    x, labels = ht.placeholder("x", (None, 1, 12, 12)), ht.placeholder("labels", (None,), "int64")
    images = ht.max_pool2d(ht.relu(ht.nn.Conv2d(1, 4, 3, name="first")(x)), 2)
    logits = ht.nn.Linear(100, 10, name="last")(ht.reshape(images, (-1, 100)))
    feed = {x: rng.standard_normal((5, 1, 12, 12), np.float32), labels: rng.integers(0, 10, 5)}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def gpt(rng: np.random.Generator):
    ids, labels = ht.placeholder("ids", (None, 6), "int64"), ht.placeholder("labels", (None, 6), "int64")
    h = ht.nn.Embedding(11, 8, name="tokens")(ids)
    h = h + ht.nn.MultiHeadAttention(8, 2, causal=True, name="attention")(ht.nn.LayerNorm(8, name="norm")(h))
    h = h + ht.nn.Linear(16, 8, name="down")(ht.gelu(ht.nn.Linear(8, 16, name="up")(h)))
    logits = ht.nn.Linear(8, 11, name="head")(ht.dropout(h, 0.1))
    feed = {ids: rng.integers(0, 11, (3, 6)), labels: rng.integers(0, 11, (3, 6))}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def clicks(rng: np.random.Generator):
    ids, labels = ht.placeholder("ids", (None, 5), "int64"), ht.placeholder("labels", (None,), "int64")
    rows = ht.flatten(ht.nn.Embedding(30, 4, name="wide")(ids), 1)
    bag = ht.sum(ht.nn.Embedding(30, 3, name="bag")(ids), 1)
    logits = ht.nn.Linear(23, 2, name="head")(ht.concat([rows, bag], 1))
    feed = {ids: rng.integers(0, 30, (6, 5)), labels: rng.integers(0, 2, 6)}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def executor_of(loss: ht.Node, outputs: ht.Node) -> ht.Executor:
    without = "fuse_conv_pool"  # what it makes is computed by NumPy
    passes = [name for name, run in PASSES.items() if run in chosen_passes(None, "cpu") and name != without]
    return ht.Executor({"train": [loss, optim.Adam(0.01).minimize(loss)], "eval": [outputs]}, passes=passes)


def printed(folder, name: str, steps: int) -> list[list[float]]:
    """The numbers of each line that the program prints."""
    flags = [*(compiler().command), "-O1", "-march=native", "-fno-strict-aliasing", f"{name}.c", "-o", name]
    subprocess.run([*flags, "-lm", "-lpthread"], cwd=folder, check=True, timeout=DEADLINE)
    command = [f"./{name}", f"{name}.inputs", str(steps)]
    done = subprocess.run(command, cwd=folder, check=True, timeout=DEADLINE, capture_output=True, text=True)
    return [[*map(float, line.partition(":")[2].split())] for line in done.stdout.splitlines()]


@needs_compiler
@pytest.mark.parametrize("model", [lenet, gpt, clicks])
def test_a_program_runs_without_python(model, tmp_path):
    loss, outputs, feed = model(np.random.default_rng(0))
    executor = executor_of(loss, outputs)
    inputs = {p: a for p, a in feed.items() if p.name != "labels"}
    executor.run("train", feed)
    for name, fed in (("train", feed), ("eval", inputs)):
        path = executor.export_c(name, tmp_path, fed)
        assert path == tmp_path / f"{name}.c" and f"{name}.inputs" in path.read_text("utf-8")
        lines = printed(tmp_path, name, STEPS)
        for line in lines:
            want = executor.run(name, fed)[0]
            np.testing.assert_allclose(line, want.ravel(), rtol=2e-4, atol=1e-5)
        assert len(lines) == STEPS


@needs_compiler
def test_what_has_no_c_is_named(tmp_path):
    x = ht.placeholder("x", (4,))
    executor = ht.Executor({"sort": [ht.argsort(ht.exp(x))]})
    with pytest.raises(ArgumentError, match=r"of 'sort' have no C: argsort(.|\n)*leave them out"):
        executor.export_c("sort", tmp_path, {x: np.zeros(4, np.float32)})
    assert not [*tmp_path.iterdir()]


@needs_compiler
def test_a_program_says_what_it_lacks(tmp_path):
    x = ht.placeholder("x", (4,))
    path = ht.Executor({"go": [ht.exp(x)]}).export_c("go", tmp_path, {x: np.zeros(4, np.float32)})
    assert printed(tmp_path, "go", 1) == [[1, 1, 1, 1]]
    done = subprocess.run([tmp_path / "go"], timeout=DEADLINE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "give a file with 16 bytes of x\n") and path.exists()
