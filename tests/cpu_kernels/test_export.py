"""Steps as C programs: compiled and run without Python, they print what the executor computes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hetu as ht
from hetu import optim
from hetu.core.errors import ArgumentError
from hetu.cpu_kernels import export
from hetu.cpu_kernels.compiled import CSource
from hetu.cpu_kernels.compiler import compiler

from ..pairs import nightly

DEADLINE = 120
STEPS = 3


def lenet(rng: np.random.Generator):
    x, labels = ht.placeholder("x", (5, 1, 28, 28)), ht.placeholder("labels", (5,), "int64")
    h = ht.max_pool2d(ht.relu(ht.nn.Conv2d(1, 6, 5, padding=2, name="first")(x)), 2)
    h = ht.max_pool2d(ht.relu(ht.nn.Conv2d(6, 16, 5, name="second")(h)), 2)
    h = ht.nn.Linear(400, 120, activation=ht.relu, name="third")(ht.flatten(h, 1))
    logits = ht.nn.Linear(120, 10, name="last")(h)
    feed = {x: rng.standard_normal((5, 1, 28, 28), np.float32), labels: rng.integers(0, 10, 5)}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def mobilenet(rng: np.random.Generator):
    """Convolutions of every kind: their texts share names that macros make."""
    x, labels = ht.placeholder("x", (2, 3, 12, 12)), ht.placeholder("labels", (2,), "int64")
    h = ht.relu(ht.nn.Conv2d(3, 32, 3, stride=2, padding=1, name="stem")(x))
    h = ht.relu(ht.nn.Conv2d(32, 32, 3, padding=1, groups=32, name="depthwise")(h))
    h = ht.nn.Conv2d(32, 32, 3, padding=1, name="around")(ht.nn.Conv2d(32, 32, 1, name="pointwise")(h))
    logits = ht.nn.Linear(32, 10, name="last")(ht.global_avg_pool2d(h))
    feed = {x: rng.standard_normal((2, 3, 12, 12), np.float32), labels: rng.integers(0, 10, 2)}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def gpt(rng: np.random.Generator):
    ids, labels = ht.placeholder("ids", (3, 6), "int64"), ht.placeholder("labels", (3, 6), "int64")
    h = ht.nn.Embedding(11, 8, name="tokens")(ids)
    h = h + ht.nn.MultiHeadAttention(8, 2, causal=True, name="attention")(ht.nn.LayerNorm(8, name="norm")(h))
    h = h + ht.nn.Linear(16, 8, name="down")(ht.gelu(ht.nn.Linear(8, 16, name="up")(h)))
    logits = ht.nn.Linear(8, 11, name="head")(ht.dropout(h, 0.1))
    feed = {ids: rng.integers(0, 11, (3, 6)), labels: rng.integers(0, 11, (3, 6))}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def clicks(rng: np.random.Generator):
    """The one of an open size: C is compiled for other sizes, too."""
    ids, labels = ht.placeholder("ids", (None, 5), "int64"), ht.placeholder("labels", (None,), "int64")
    rows = ht.flatten(ht.nn.Embedding(30, 4, name="wide")(ids), 1)
    bag = ht.sum(ht.nn.Embedding(30, 3, name="bag")(ids), 1)
    logits = ht.nn.Linear(23, 2, name="head")(ht.concat([rows, bag], 1))
    feed = {ids: rng.integers(0, 30, (6, 5)), labels: rng.integers(0, 2, 6)}
    return ht.mean(ht.softmax_cross_entropy(logits, labels)), logits, feed


def executor_of(loss: ht.Node, outputs: ht.Node) -> ht.Executor:
    return ht.Executor({"train": [loss, optim.Adam(0.01).minimize(loss)], "eval": [outputs]})


def make(folder, name: str) -> None:
    """Compile a program."""
    flags = [*(compiler().command), "-O1", "-march=native", "-fno-strict-aliasing", f"{name}.c", "-o", name]
    subprocess.run([*flags, "-lm", "-lpthread"], cwd=folder, check=True, timeout=DEADLINE)


def ran(folder, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([f"./{name}", *arguments], cwd=folder, timeout=DEADLINE, capture_output=True, text=True)


def printed(folder, name: str, steps: int) -> list[list[str]]:
    """The numbers of each line that the program prints."""
    make(folder, name)
    done = ran(folder, name, f"{name}.inputs", str(steps))
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(":")[2].split() for line in done.stdout.splitlines()]


@pytest.mark.sampled(3)
@pytest.mark.compiled
@pytest.mark.parametrize("model", [*nightly([[lenet]]), mobilenet, gpt, clicks])
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
            np.testing.assert_allclose([*map(float, line)], want.ravel(), rtol=2e-4, atol=1e-5)
        assert len(lines) == STEPS


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("dtype", "size", "made", "said"),
    [
        ("float32", 4, lambda x: ht.argsort(ht.exp(x)), "argsort i64[4]"),
        ("uint8", 4, lambda x: x + x, "add u8[4]"),
        ("float32", 0, lambda x: ht.sum(ht.exp(x)), "sum f32[]"),
    ],
    ids=["never", "of a dtype", "of nothing"],
)
def test_what_has_no_c_is_named_with_its_type_and_place(dtype, size, made, said, tmp_path):
    x = ht.placeholder("x", (None,), dtype)
    executor = ht.Executor({"go": [made(x)]})
    with pytest.raises(ArgumentError) as caught:
        executor.export_c("go", tmp_path, {x: np.zeros(size, dtype)})
    assert f"these operators of 'go' have no C: {said}\n  at test_export.py:" in str(caught.value)
    assert "made(x)" not in str(caught.value) and "leave them out of what is exported, or give" in str(caught.value)
    assert not [*tmp_path.iterdir()]


X, WIDE = ht.placeholder("x", (3, 4)), ht.placeholder('a name / 100%\n"of\\', (2,), "int64")
IDS, DOUBLES = ht.placeholder("i", (2,), "int64"), ht.placeholder("d", (2,), "float64")
HALVES = ht.placeholder("h", (3,), "float16")
NUMBERS = np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-40], np.float32)


def w(name: str = "w") -> ht.Node:
    return ht.variable(name, np.arange(9, dtype="float32").reshape(3, 3) + len(name))


def vectors() -> tuple[ht.Node, ht.Node]:
    return w("a.b"), w("a_b")


def swapped(a: ht.Node, b: ht.Node) -> tuple:
    return a, b, {a: b, b: a}


def doubled(a: ht.Node, b: ht.Node) -> tuple:
    return a, b, {a: b, b: a * 2}


# What is fetched, and what variables become after each step.
EXACT = {
    "transposed": lambda: (ht.matrix_transpose(X), ht.matrix_transpose(ht.relu(X))),
    "reversed": lambda: (ht.flip(X, 1), X[::-1, ::-1], ht.relu(X)[::-2]),
    "every second": lambda: (X[:, ::2], X[1:, 1], ht.matrix_transpose(X)[::3, 1:]),
    "repeated": lambda: (ht.broadcast_to(X[:1], (2, 3, 4)), ht.broadcast_to(X[:, 1:2], (3, 5))),
    "no calls": lambda: (X, ht.reshape(X, (4, 3)), ht.constant(np.arange(3.0)), ht.constant(np.array([True, False]))),
    "nothing": lambda: (X[:0], X[0, 0]),
    "swapped": lambda: swapped(*vectors()),
    "swapped, one with a new value": lambda: doubled(*vectors()),
    "its own transpose": lambda: ((a := w()), {a: ht.matrix_transpose(a)}),
    "its own reverse": lambda: ((a := w()), {a: a[::-1]}),
    "the transpose of another": lambda: ((a := w()), {a: ht.matrix_transpose(w("other"))}),
    "a row of itself": lambda: ((a := w()), {a: ht.broadcast_to(a[1], (3, 3))}),
    "names that C has not": lambda: (w("größe") + w("gr__e") * w("int"), *vectors(), WIDE, IDS * WIDE),
    "all digits": lambda: (IDS, IDS + 1, DOUBLES, DOUBLES * 3, X),
    "least and most": lambda: (ht.variable("ends", np.array([-(2**63), 2**63 - 1])),),
    "no numbers": lambda: (ht.where(X > 0, X, -np.inf), ht.maximum(X, np.inf), X + np.nan),
    "numbers that it begins with": lambda: (
        ht.variable("single", NUMBERS),
        ht.variable("double", NUMBERS.astype(float) / 3),
    ),
    "truths": lambda: (X > 0, ht.logical_not(X > 0)),
}
FEED = {
    X: np.random.default_rng(0).standard_normal((3, 4)).astype("float32"),
    WIDE: np.array([3, -(2**40)]),
    IDS: np.array([2**61 + 1, -(2**62) - 1]),
    DOUBLES: np.array([1 / 3, 1e-17]),
    HALVES: np.array([0.5, -2, 65504], "float16"),
}


@pytest.mark.sampled(4)
@pytest.mark.compiled
@pytest.mark.parametrize("case", EXACT)
def test_a_program_prints_every_bit(case, tmp_path):
    executor = ht.Executor({"a step": [*EXACT[case]()]}, device="cpu")
    fed = {p: a for p, a in FEED.items() if p in executor.subgraphs["a step"].placeholders.values()}
    executor.export_c("a step", tmp_path, fed)
    want = [value for _ in range(STEPS) for value in executor.run("a step", fed) if value is not None]
    lines = printed(tmp_path, "a step", STEPS)
    assert len(lines) == len(want)
    for line, value in zip(lines, want):
        read = np.array([*map(float if value.dtype.kind == "f" else int, line)], value.dtype)
        assert repr(read.tolist()) == repr(value.ravel().tolist())


@pytest.mark.compiled
def test_a_program_says_what_it_lacks(tmp_path):
    ids = ht.placeholder('100% "ids"', (2,), "int64")
    ht.Executor({"go": [ht.exp(ht.take(w(), ids))]}).export_c("go", tmp_path, {ids: np.array([0, 2])})
    np.array([0, 3]).tofile(tmp_path / "bad")
    make(tmp_path, "go")
    for arguments, said in {
        ("go.inputs", "2"): "",
        (): "give a file with 16 bytes of 100_ _ids_, not none",
        ("nowhere",): "give a file with 16 bytes of 100_ _ids_, not nowhere",
        ("go.inputs", "two"): "give a number of steps, not two",
        ("go.inputs", "0"): "give a number of steps, not 0",
        ("go.inputs", "2 "): "give a number of steps, not 2 ",
        ("go.inputs", ""): "give a number of steps, not ",
        ("bad",): "take",
    }.items():
        done = ran(tmp_path, "go", *arguments)
        assert (done.returncode, said in done.stderr, bool(done.stderr)) == (bool(said), True, bool(said)), done


BAD = {
    "a name that leaves the folder": (
        "../up",
        ".",
        [X],
        r"no file can be called '../up'(.|\n)*fix: give the sub-graph",
    ),
    "no name": ("", ".", [X], "no file can be called ''"),
    "an option": ("-o", ".", [X], "no file can be called '-o'"),
    "no folder": ("go", None, [X], r"export_c got folder=None(.|\n)*fix: pass folder as str"),
    "a number": ("go", 5, [X], "export_c got folder=5"),
    "a file": ("go", __file__, [X], "nothing can be written to .*test_export.py'"),
    "a result that C has no name for": ("go", ".", [HALVES], r"results of 'go' are float16(.|\n)*fix: .*ht.astype"),
}


@pytest.mark.parametrize(("name", "folder", "fetches", "said"), BAD.values(), ids=BAD)
def test_what_cannot_be_exported(name, folder, fetches, said, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(ArgumentError, match=said):
        ht.Executor({name: fetches}).export_c(name, folder, {p: FEED[p] for p in fetches})
    assert [f.name for f in tmp_path.rglob("*")] == ["in"]


@pytest.mark.compiled
def test_every_written_text_may_stand_twice_beside_all_others(tmp_path):
    """For two types, as where a model has both. The command that a file names finds nothing to warn of."""
    files = sorted(f.name for f in Path(export.__file__).parent.glob("*.c"))
    texts = [
        f'#define T {t}\n#define INT long long\n#define BETTER >\n#include "{file}"'
        for file in files
        if file not in ("walk.c", "plain_blas.c")
        for t in ("float", "double")
    ]
    nothing = SimpleNamespace(block=np.zeros(0), feeds={}, state=SimpleNamespace(arrays={}))
    calls = [(None, SimpleNamespace(source=CSource(text, str(k)))) for k, text in enumerate(texts)]
    made = export._File(nothing, calls, random=False)
    (tmp_path / "all.c").write_text("\n".join(made.functions()), "utf-8")
    loud = [word for word in compiler().command if word != "-w"]
    command = [*loud, *export.FLAGS.split(), "-c", "all.c", "-fsyntax-only"]
    done = subprocess.run(command, cwd=tmp_path, timeout=DEADLINE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
