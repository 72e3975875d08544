"""Graphs as files of ONNX, run by ONNX Runtime: every operator, every model, and what cannot be written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS, topological
from hetu.core.op import Role
from hetu.models import bert, gpt2, llama, text, vision
from hetu.onnx.rows import slice_scatter

from ..models.table import MODELS
from ..models.test_models import built as model_of
from ..samples import SAMPLES, Sample
from ..test_ops import built
from ..test_program import random_feed, random_graph

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
onnxruntime.set_default_logger_severity(4)

# Operators that cannot be written, and why.
CANNOT = {
    "draws by counting": {"random", "dropout", "sketched", "drawn_topics"},
    "works on the host": {"balanced_assignment", "best_cuts", "grow_trees", "histograms", "part_rows", "tree_leaves"},
    "is made by a pass": {"bag", "spread", "summed_entries"},
    "has no counterpart": {"bitcast", "prod_dx"},
}
WRITTEN = {"scatter_rows", "set_rows"}  # other operators on rows are updates, which write into their table


def run(path: Path, feed: Mapping[Any, Any]) -> list[np.ndarray]:
    """What ONNX Runtime makes of a file that ONNX's own checker takes."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    fed = {getattr(key, "name", key): value for key, value in feed.items()}
    return list(session.run(None, {i.name: fed[i.name] for i in session.get_inputs()}))


def is_left_out(sample: Sample) -> bool:
    name = sample.op
    return any(name in names for names in CANNOT.values()) or (name.endswith("_rows") and name not in WRITTEN)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
@pytest.mark.parametrize("unknown", [False, True], ids=["fixed", "open"])
def test_every_operator(sample, unknown, tmp_path):
    if unknown and sample.fixed:
        return
    outputs, feed = built(sample, "float32", unknown=unknown)
    named, state = {f"y{i}": o for i, o in enumerate(outputs)}, ht.Executor([*outputs]).state
    path = tmp_path / "model.onnx"
    if is_left_out(sample):
        with pytest.raises(ht.errors.GraphError, match="cannot be written"):
            ht.onnx.save(path, named, state)
        assert not path.exists()
        return
    try:
        ht.onnx.save(path, named, state)
    except ht.errors.GraphError as error:
        assert unknown and "not known while the graph is built" in error.message, error
        ht.onnx.save(path, named, state, fixed={f"{n.name}_0": a.shape[0] for n, a in feed.items() if a.ndim})
    for got, wanted in zip(run(path, feed), sample.wanted, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=max(1e-4, sample.tolerance))


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name, tmp_path):
    """After a step of training, in a batch of another size too, and read again."""
    model, path = MODELS[name], tmp_path / "model.onnx"
    y, loss = model_of(model)
    ex = ht.Executor({"train": [loss, ht.optim.Momentum(0.05).minimize(loss)], "run": [y]})
    ex.run("train", {**model.fed, "t": model.targets})
    ht.onnx.save(path, {"y": y}, ex.state)
    loaded = ht.onnx.load(path)
    written = {n.name for n in topological([y]) if n.role is Role.VARIABLE}
    assert {*loaded.variables} == written - {"random_state"}
    again = ht.Executor([loaded.outputs["y"]])
    whole = name.startswith(("wide.", "graphs.Sampled"))
    for feed in (model.fed, model.fed if whole else {k: v[:5] for k, v in model.fed.items()}):
        wanted = ex.run("run", feed)[0]
        scale = 1e-5 * max(1, abs(wanted).max())
        for got in (run(path, feed)[0], again.run({loaded.inputs[k]: feed[k] for k in loaded.inputs})[0]):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=scale)


def of_any_size(build: Callable[[ht.Node], ht.Node], *shapes: tuple[int, ...], words: bool = False) -> Any:
    """A model whose sizes are open where these shapes differ, and arrays of the shapes."""
    rng = np.random.default_rng(0)
    open_ = tuple(None if len({*sizes}) > 1 else sizes[0] for sizes in zip(*shapes))
    x = ht.placeholder("x", open_, "int64" if words else "float32")
    made = (rng.integers(0, 11, s) if words else rng.normal(size=s).astype("float32") for s in shapes)
    return build(x), [{"x": array} for array in made]


WORDS, IMAGES = ((2, 5), (3, 7), (1, 1)), ((2, 3, 16, 16), (1, 3, 24, 32))
ANY_SIZE = {
    "gpt2": lambda: of_any_size(lambda x: gpt2.GPT2(11, 8, 2, 2, positions=9)(x), *WORDS, words=True),
    "llama": lambda: of_any_size(lambda x: llama.Llama(11, 16, 2, 4, key_heads=2)(x), *WORDS, words=True),
    "bert": lambda: of_any_size(lambda x: bert.BERT(11, 8, 2, 2, positions=9)(x), *WORDS, words=True),
    "recurrent": lambda: of_any_size(lambda x: text.RecurrentText(11, 6, features=4)(x)[0], *WORDS, words=True),
    "resnet": lambda: of_any_size(lambda x: vision.resnet18(x, 5, width=4), *IMAGES),
    "unet": lambda: of_any_size(lambda x: vision.unet(x, 5, width=4), *IMAGES),
    "densenet": lambda: of_any_size(lambda x: vision.densenet(x, 5), *IMAGES),
}


@pytest.mark.parametrize("name", ANY_SIZE)
def test_models_of_any_size(name, tmp_path):
    """With the operators that ONNX has as a whole: a model that falls apart into single pixels has thousands."""
    with ht.scope(name):
        y, feeds = ANY_SIZE[name]()
    ex = ht.Executor([y])
    ht.onnx.save(tmp_path / "model.onnx", {"y": y}, ex.state)
    assert len(onnx.load(tmp_path / "model.onnx").graph.node) < 600
    for feed in feeds:
        np.testing.assert_allclose(run(tmp_path / "model.onnx", feed)[0], ex.run(feed)[0], rtol=1e-5, atol=1e-5)


def test_random_graphs(tmp_path):
    for seed in range(40):
        fetches, _, feeds, _ = random_graph(seed, open_sizes=seed % 2 == 1)
        ex, path = ht.Executor(fetches), tmp_path / "model.onnx"
        ht.onnx.save(path, {f"y{i}": node for i, node in enumerate(fetches)}, ex.state)
        feed, taken = random_feed(np.random.default_rng(seed), feeds, ex)
        for got, wanted in zip(run(path, feed), ex.run(taken), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")


def test_parts_of_arrays():
    """The gradient of a slice, whatever its bounds and step."""
    bounds = [None, -6, -3, -1, 0, 2, 4, 7]
    for size, start, stop, step in itertools.product(range(5), bounds, bounds, [-2, -1, 1, 2, 3]):
        key, wanted = slice(start, stop, step), np.zeros((size, 2), "float32")
        wanted[key] = values = np.arange(1.0, 1 + wanted[key].size, dtype="float32").reshape(-1, 2)
        node = OPS["slice_scatter"](values, np.zeros((size, 2)), key=(key,))
        assert ht.evaluate(slice_scatter(*node.inputs, **node.attrs)).tolist() == wanted.tolist(), (size, key)


# -- operators of a user ---------------------------------------------------------------------------------------
# Forward functions as people write them: methods, assignments to parts, views, indices.


def methods(xp, x, *, k=2):
    return x.reshape((x.shape[0], -1)).T.sum(axis=0, keepdims=True) * k + x.max() - x.mean(axis=1).sum()


def assigned(xp, x):
    y = xp.zeros(x.shape, dtype=x.dtype)
    y[:, 1:] = x[:, :-1]
    y[0, ::2] += 1
    y[-1] *= x[0]
    return y


def through_views(xp, x):
    y = x * 1
    top = y[0]
    top += 10
    part = top[1:3]
    part -= 3
    alias = y
    alias /= 2
    return y - x


def by_indices(xp, x):
    ids = xp.argsort(x, axis=0)[:, 0]
    counts = xp.zeros(x.shape[0], dtype=x.dtype)
    xp.add.at(counts, ids - 1, xp.ones(ids.shape, dtype=x.dtype))
    return x[ids] + xp.expand_dims(counts, axis=1), counts


def of_kinds(xp, x):
    whole = xp.astype(xp.round(x * 4), xp.int64)
    bits = (whole & 5) | (whole ^ 3) | (abs(whole) << 1) | (whole >> 1)
    chosen = xp.where((x > 0) & ~(x == 1), bits % 7 // 2, xp.asarray(-1, dtype=xp.int64))
    return xp.astype(chosen, x.dtype) ** 2 - x % 0.75 + (-x // 0.5), xp.any(x != 0), xp.concatenate([x, -x], axis=1)


def with_arrays(xp, x):
    table = np.arange(4, dtype="float32")
    return (
        table * x
        + xp.stack([x, x], axis=0)[1] @ np.eye(4, dtype="float32")
        + xp.pi
        - x.astype(xp.float32).copy()
        + xp.copysign(x, np.array([0.0, -0.0, 1, -1], "f4"))
    )


def by_numpy(xp, x):
    y = np.where(x > 0, np.exp(x), [1, 2, 3, 4]).astype("float32")
    np.negative(y, out=y)
    np.add.at(y, [0, -1], np.ones(4, "float32"))
    first, *_, last = x.transpose(1, 0)
    y.sort()
    return np.concatenate([y, x]), np.sum(x, axis=0), first * last, xp.transpose(x).clip(max=x[:, 0]), x == [0, 1, 2, 3]


def by_arrays(xp, x):
    best = x.argmax(axis=1)
    y = x.copy()
    y[y < 0] = 0
    y[best > 1] = -1
    y = y if x.shape[0] == 0 else y + 1
    return (
        x[xp.arange(x.shape[0]), best],
        x[:, [0, -1]],
        x[np.array([[0, -1]])],
        xp.take(y, [1]),
        y,
        y[None][:, 1:, [2]],
    )


def in_parts(xp, x):
    y = x * 1
    left, right = xp.split(y, 2, axis=1)
    moved = left.reshape(-1) * 2
    flat = (right + 1).reshape(-1)
    flat[:2] = 7
    return moved, flat, y


def by_sizes(xp, x):
    n = x.shape[0]
    return n * x + (n - x) / n + x % n + n // 2 * +x, np.left_shift(xp.astype(x > 0, xp.int32), 1), np.copy(x)


OWN = [by_sizes, methods, assigned, through_views, by_indices, of_kinds, with_arrays, by_numpy, by_arrays, in_parts]


@pytest.mark.parametrize("forward", OWN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [3, None], ids=["fixed", "open"])
def test_own_operators(forward, rows, tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    op = ht.op(forward, name=f"own_{forward.__name__}")
    made = op(ht.placeholder("x", (rows, 4)))
    ht.onnx.save(tmp_path / "model.onnx", made)
    wanted = forward(np, x)
    for got, value in zip(run(tmp_path / "model.onnx", {"x": x}), wanted if isinstance(wanted, tuple) else [wanted]):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)


def written_through(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Assigns to what may be a view of an array, which it returns."""

    def forward(xp, x):
        y = x * 1
        make(xp, y)[:1] = 7
        return y

    return forward


def into_numpys(xp, x):
    y = np.zeros((3, 4), "float32")
    y[0] += x[0]
    return y


def assigned_by_ids(xp, x):
    y = x * 1
    y[:, [0, 1]] = 0
    return y


VIEW, SIZE = "after assigning to what may be a view", "is not known while the graph is built"
REFUSED = {  # what else would be other numbers
    "reshape": (written_through(lambda xp, y: y.reshape(-1)), VIEW),
    "T": (written_through(lambda xp, y: y.T), VIEW),
    "flip": (written_through(lambda xp, y: xp.flip(y, axis=0)), VIEW),
    "split": (written_through(lambda xp, y: xp.split(y, 2, axis=1)[1]), VIEW),
    "a part": (written_through(lambda xp, y: xp.swapaxes(y[1:], 0, 1)), VIEW),
    "a batch of one": (lambda xp, x: x * 2 if x.shape[0] == 1 else x, SIZE),
    "a size computed": (lambda xp, x: x * 2 if x.shape[0] * 4 + 1 in (5, 9) else x, SIZE),
    "a mask": (lambda xp, x: x[x > 0].sum(), "takes a mask"),
    "other places": (lambda xp, x: x[[0, 1], None], "side by side"),
    "ids": (assigned_by_ids, "assigns to what an array of indices"),
    "an array of NumPy's": (into_numpys, "asks for the values|that xp has not made"),
    "linalg": (lambda xp, x: x / np.linalg.norm(x), "numpy.linalg.norm, of which there is no counterpart"),
    "linalg of xp": (lambda xp, x: x / xp.linalg.norm(x), "xp.linalg, of which there is no counterpart"),
    "a reduction": (lambda xp, x: xp.add.reduce(x), "the method 'reduce'"),
    "a list": (lambda xp, x: xp.stack([x, float(x[0, 0]) * x]), "asks for the values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_own_operators_that_cannot(name, tmp_path):
    forward, said = REFUSED[name]
    made = ht.op(forward, name="own_refused", infer=lambda x: x)(ht.placeholder("x", (None, 4)))
    with pytest.raises(ht.errors.GraphError, match=f"own_refused at test_save.py.*{said}"):
        ht.onnx.save(tmp_path / "model.onnx", made)


# -- kinds of numbers ------------------------------------------------------------------------------------------

FLOATS = np.array([[7, -7, 0.3, -0.3, 0, np.inf, np.nan]], "float32").T
EXTREMES = np.array([[-128, 127, 1, -3, 100, 8, -7]], "int8").T
BYTES = np.array([[255, 0, 2, 3, 200, 1, 1]], "uint8").T
KINDS = {
    "floor_divide floats": (FLOATS, lambda x: OPS["floor_divide"](x, np.array([3, -3, 0.1, -0.1, np.inf, 0], "f4"))),
    "remainder floats": (FLOATS, lambda x: OPS["remainder"](x, np.array([3, -3, 0.1, -0.1, np.inf, 1e-30], "f4"))),
    "floor_divide extremes": (EXTREMES, lambda x: OPS["floor_divide"](x, np.array([127, -2, 5, 3], "int8"))),
    "remainder extremes": (EXTREMES, lambda x: OPS["remainder"](x, np.array([127, -2, 5, 3], "int8"))),
    "power": (EXTREMES, lambda x: OPS["power"](x, np.array([0, 1, 2, 3], "int8"))),
    "matmul": (EXTREMES, lambda x: x @ np.array([[3, -5]], "int8")),
    "isnan": (EXTREMES, OPS["isnan"]),
    "max": (EXTREMES.astype("int16"), ht.max),
    "negative": (BYTES, OPS["negative"]),
    "relu": (BYTES, ht.relu),
    "sort": (BYTES > 1, lambda x: ht.sort(x, axis=0)),
    "where": (BYTES > 1, lambda x: ht.where(x, np.array([True, False]), x)),
    "less": (BYTES > 1, lambda x: OPS["less"](x, np.array([True, False]))),
    "big-endian": (FLOATS, lambda x: x + np.arange(4).astype(">f4")),
    "any of none": (FLOATS[:0], lambda x: ht.any(OPS["isnan"](x))),
    "all of none": (FLOATS[:0], lambda x: ht.all(OPS["isnan"](x))),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_numbers(name, tmp_path):
    x, build = KINDS[name]
    y = build(ht.placeholder("x", (None, 1), x.dtype.name))
    ht.onnx.save(tmp_path / "model.onnx", y)
    with np.errstate(all="ignore"):
        wanted = ht.core.simplify.interpret([y], {n: x for n in topological([y]) if n.role is Role.PLACEHOLDER})[0]
    for got in (*run(tmp_path / "model.onnx", {"x": x}), *ht.Executor([y]).run({"x": x})):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_file_of_bfloat16(tmp_path):
    """ONNX's checker takes it; ONNX Runtime has no such operators on CPUs."""
    x = ht.placeholder("x", (None, 4), "bfloat16")
    ht.onnx.save(tmp_path / "model.onnx", [ht.sort(ht.round(x), axis=1) // 2, ht.full_like(x, 1)])
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


# -- files -----------------------------------------------------------------------------------------------------


def line(path: Path, value: float) -> None:
    x, w = ht.placeholder("x", (None, 2)), ht.variable("w", np.full((2, 3), value, "float32"))
    b = ht.variable("b", np.asarray(value, "float32"))
    ht.onnx.save(path, {"y": x @ w + b}, {"w": np.full((2, 3), value), "b": value})


def test_numbers_beside_a_large_model(tmp_path, monkeypatch):
    """Another save writes another file for them, and removes the old one when it is whole."""
    monkeypatch.setitem(ht.onnx.save.__wrapped__.__globals__, "LARGEST", 10)
    path, feed = tmp_path / "model.onnx", {"x": np.ones((1, 2), "float32")}
    others = {"model.onnx.training.data", "[m]odel.onnx"}
    for name in others:
        (tmp_path / name).touch()
    for value in (1.0, 2.0):
        line(path, value)
        line(tmp_path / "[m]odel.onnx", value)
        beside = [file.name for file in tmp_path.glob("*.data") if file.name not in others]
        assert len(beside) == 2 and {file.name for file in tmp_path.iterdir()} == {"model.onnx", *beside, *others}
        assert run(path, feed)[0].tolist() == [[3 * value] * 3]
        assert float(ht.Executor([ht.onnx.load(path).outputs["y"]]).run(feed)[0][0, 0]) == 3 * value


X, W = ht.placeholder("x", (None, 2)), ht.variable("w", np.ones((2, 3), "float32"))
BAD = {
    "no state": (lambda p: ht.onnx.save(p, X @ W), "variable 'w' needs a value", "ex.state"),
    "a name less": (lambda p: ht.onnx.save(p, X @ W, {"v": 1}), "the state has no variable 'w'", ""),
    "a shape": (lambda p: ht.onnx.save(p, X @ W, {"w": [1]}), "variable 'w' has shape (2, 3), got (1,)", "executor"),
    "a kind": (lambda p: ht.onnx.save(p, X @ W, {"w": "word"}), "variable 'w' wants float32, got 'word'", ""),
    "no node": (lambda p: ht.onnx.save(p, [X, 3]), "an output is", '{"y": y}'),
    "no outputs": (lambda p: ht.onnx.save(p, {}), "there are no outputs", '{"y": y}'),
    "no name": (lambda p: ht.onnx.save(p, {"": X}), "an output is ''", '{"y": y}'),
    "a name twice": (lambda p: ht.onnx.save(p, {"x": X * 2}), "variables and outputs are called 'x'", "another name"),
    "two of a name": (lambda p: ht.onnx.save(p, X + ht.variable("x", 1.0), {"x": 1}), "are called 'x'", "another name"),
    "two inputs": (lambda p: ht.onnx.save(p, X + ht.placeholder("x", ())), "two placeholders are called 'x'", ""),
    "an executor": (
        lambda p: ht.onnx.save(p, X @ W, ht.Executor([X @ W])),
        "save got state=",
        "pass state as {str: Any}",
    ),
    "a negative size": (lambda p: ht.onnx.save(p, X * 2, fixed={"x_0": -1}), "-1", ""),
    "no size": (lambda p: ht.onnx.save(p, X * 2, fixed={"x_1": 2}), "no open size 'x_1'", "x_0"),
    "no folder": (lambda p: ht.onnx.save(p / "a" / "b", X * 2), "folder", "create it"),
    "a folder": (lambda p: ht.onnx.save(p.parent, X * 2), "is a folder", "name a file"),
    "no file": (lambda p: ht.onnx.save("", X * 2), "'.' is a folder", "name a file"),
    "a long name": (lambda p: ht.onnx.save(p.with_name("x" * 300), X * 2), "name too long", "another name"),
    "all that cannot": (
        lambda p: ht.onnx.save(p, [ht.normal((2,)), OPS["bitcast"](X, dtype="int32")]),
        "2 operators cannot be written as ONNX: random at test_save.py",
        "decompose",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, tmp_path):
    call, said, fix = BAD[name]
    with pytest.raises(ht.errors.HetuError) as caught:
        call(tmp_path / "model.onnx" if name != "no folder" else tmp_path)
    assert said in caught.value.message and fix in caught.value.fix
    assert not [*tmp_path.iterdir()]


def test_an_operator_made_of_itself(tmp_path):
    @ht.op
    def turned(xp, x):
        return turned(x.node) if hasattr(x, "node") else x

    with pytest.raises(ht.errors.GraphError, match="turned at .* is made of itself"):
        ht.onnx.save(tmp_path / "model.onnx", turned(X))


def test_outputs_without_names_and_leaves(tmp_path):
    path = tmp_path / "model.onnx"
    ht.onnx.save(path, [X, X * 2, X * 3, W, ht.constant([1.0, 2.0])], {"w": np.ones((2, 3))})
    x = np.ones((4, 2), "float32")
    assert [*ht.onnx.load(path).outputs] == ["x_out", "multiply", "multiply_1", "w_out", "constant_out"]
    assert [value.shape for value in run(path, {"x": x})] == [(4, 2), (4, 2), (4, 2), (2, 3), (2,)]


def test_sizes_of_inputs(tmp_path):
    """Sums, products and quotients of open ones, also of an input of which nothing else is read."""
    a, b = ht.placeholder("a", (None, 2)), ht.placeholder("b", (None, None))
    n, m = b.shape
    with pytest.raises(ht.errors.GraphError, match="axis 0 of 'b', which is no input of the outputs"):
        ht.onnx.save(tmp_path / "model.onnx", ht.arange(n))
    y = ht.concat([ht.arange(n * m + 1), ht.reshape(ht.full((n + 1, m), 7), (-1,)), ht.arange(-(-n // 2))])
    ht.onnx.save(tmp_path / "model.onnx", {"y": y, "z": a / a.shape[0], "likes": ht.broadcast_like(0.0, b)})
    feed = {"a": np.ones((2, 2), "float32"), "b": np.zeros((3, 4), "float32")}
    got, scaled, _ = run(tmp_path / "model.onnx", feed)
    assert got.tolist() == [*range(13), *[7] * 16, 0, 1] and scaled.tolist() == [[0.5, 0.5]] * 2


def test_open_sizes_that_meet(tmp_path):
    """Two open sizes are equal, or one of them is 1, also beside none."""
    a, b = ht.placeholder("a", (None, None)), ht.placeholder("b", (None, None))
    ht.onnx.save(tmp_path / "model.onnx", [a + b, ht.full_like(a + b, 1), ht.sum(ht.ones_like(a * b), axis=0)])
    for left, right in itertools.product(itertools.product((0, 1, 3), (1, 4)), ((1, 4), (3, 1))):
        if {left[0], right[0]} == {0, 3}:
            continue
        feed = {"a": np.zeros(left, "float32"), "b": np.ones(right, "float32")}
        wanted = feed["a"] + feed["b"]
        got = run(tmp_path / "model.onnx", feed)
        assert got[0].tolist() == got[1].tolist() == wanted.tolist() and got[2].tolist() == wanted.sum(axis=0).tolist()
