"""Predictors: any number of rows, from few programs, by many threads; rows that are not apart are never joined."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import FeedError
from hetu.serving.predictor import rows_of_run

RNG = np.random.default_rng(0)
X = RNG.standard_normal((100, 4)).astype("float32")


def predictor(folder: Path, build: Callable[..., Any], *shapes: tuple[int | None, ...], **options: Any) -> ht.Predictor:
    with ht.scope("model"):
        made = build(*(ht.placeholder(f"x{n}", shape) for n, shape in enumerate(shapes)))
    ht.save_model(folder / "m.hetu", {"y": made}, ht.Executor([made]).state)
    return ht.Predictor(folder / "m.hetu", **options)


def layer(x: ht.Node) -> ht.Node:
    return ht.softmax(ht.nn.Linear(4, 3)(x))


@pytest.mark.parametrize("most", [1, 5, 256])
def test_any_number_of_rows_is_predicted_by_few_programs(most: int, tmp_path: Path) -> None:
    found = predictor(tmp_path, layer, (None, 4), most_rows=most)
    wanted = ht.Executor([*found._model.outputs.values()]).run({"x0": X})[0]
    for count in (0, 1, 2, 3, 5, 6, 7, 8, 11, 13, 100):
        np.testing.assert_allclose(found(x0=X[:count])["y"], wanted[:count], rtol=1e-5, atol=1e-6)
    assert len(found._sub.programs) <= {1: 2, 5: 5, 256: 9}[most]


@pytest.mark.parametrize("count", range(1, 70))
def test_a_run_is_filled_up_by_a_third_at_most(count: int) -> None:
    size = rows_of_run(count)
    assert count <= size <= max(count, 1.5 * count - 0.5) and rows_of_run(size) == size


TABLE = ht.constant(RNG.standard_normal((3, 4)).astype("float32"))


def regrouped(x: ht.Node, size: int) -> ht.Node:
    """The softmax over groups of rows, back in its rows."""
    return ht.reshape(ht.softmax(ht.reshape(x, (x.shape[0] // size, size, 4)), axis=1), (x.shape[0], 4))


def token_first(x: ht.Node) -> ht.Node:
    return ht.concat([ht.broadcast_to(TABLE[:1][:, None], (x.shape[0], 1, 4)), x], axis=1)


@ht.op
def centered(xp: Any, x: Any) -> Any:
    return x - xp.mean(x, axis=0)


@ht.op(dims="...->...")
def doubled(xp: Any, x: Any) -> Any:
    return 2 * x


@ht.op(dims=lambda x: 1 // 0)
def unruly(xp: Any, x: Any) -> Any:
    return 2 * x


APART: dict[str, tuple[Callable[..., Any], list[tuple[int | None, ...]], bool]] = {
    "a layer": (layer, [(None, 4)], True),
    "over the rows": (lambda x: ht.softmax(x, axis=0), [(None, 4)], False),
    "a mean": (lambda x: x - ht.mean(x, axis=0), [(None, 4)], False),
    "the number of rows": (lambda x: x / x.shape[0], [(None, 4)], False),
    "the place of a row": (lambda x: x + ht.astype(ht.arange(x.shape[0]), "float32")[:, None], [(None, 4)], False),
    "all pairs": (lambda x: x @ ht.matrix_transpose(x), [(None, 4)], False),
    "in turn": (lambda x: ht.cumsum(x, axis=0), [(None, 4)], False),
    "another order": (lambda x: ht.flip(x, axis=0), [(None, 4)], False),
    "zeros as long": (lambda x: x + ht.full((x.shape[0], 4), 1.0), [(None, 4)], True),
    "drawn": (lambda x: x + ht.normal((4,)), [(None, 4)], False),
    "fixed": (layer, [(3, 4)], False),
    "one for all": (lambda x, scale: x * scale, [(None, 4), ()], False),
    "two inputs": (lambda x, y: x + y, [(None, 4), (None, 4)], True),
    "beside a table": (lambda x, y: ht.matmul(x, y), [(None, 4), (4, 2)], False),
    "three in a group": (lambda x: regrouped(x, 3), [(None, 4)], False),
    "two for each": (lambda x: ht.reshape(x, (-1, 2)), [(None, 4)], False),
    "each twice": (lambda x: ht.repeat(x, 2, axis=0), [(None, 4)], False),
    "a table by place": (lambda x: x + TABLE[: x.shape[0]], [(None, 4)], False),
    "so many of a table": (lambda x: x + ht.sum(TABLE[: x.shape[0]], axis=0), [(None, 4)], False),
    "one by place": (lambda x: x + ht.one_hot(ht.constant(2), x.shape[0])[:, None], [(None, 4)], False),
    "counted ones": (lambda x: x / ht.sum(ht.full((x.shape[0],), 1.0)), [(None, 4)], False),
    "half as many ones": (lambda x: x / ht.sum(ht.full((x.shape[0] // 2 + 1,), 1.0)), [(None, 4)], False),
    "ones beside": (lambda x: ht.sum(x[:, :1] + ht.full((1, x.shape[0]), 1.0), axis=1), [(None, 4)], False),
    "one repeated": (lambda x: x / ht.sum(ht.broadcast_to(TABLE[0, 0], x.shape)), [(None, 4)], False),
    "as many as a table": (lambda x: x + ht.reshape(TABLE, (x.shape[0], 4)), [(None, 4)], False),
    "one token for all": (token_first, [(None, 3, 4)], True),
    "steps first": (lambda x: ht.cumsum(ht.permute_dims(x, (1, 0, 2)), axis=0)[1], [(None, 3, 4)], True),
    "steps as rows": (lambda x: ht.reshape(ht.softmax(ht.reshape(x, (-1, 4))), x.shape), [(None, 3, 4)], True),
    "its own operator": (lambda x: centered(x), [(None, 4)], False),
    "its own, whose rule fails": (lambda x: unruly(x), [(None, 4)], False),
    "its own with a rule": (lambda x: doubled(x), [(None, 4)], True),
}


@pytest.mark.parametrize("case", APART)
def test_rows_that_are_not_apart_are_not_joined(case: str, tmp_path: Path) -> None:
    build, shapes, apart = APART[case]
    found = predictor(tmp_path, build, *shapes)
    fed = {
        name: RNG.standard_normal([3 if s is None else s for s in shape]) for name, shape in zip(found.inputs, shapes)
    }
    fitted = found.fitting(fed)
    assert found.joins(fitted) is apart
    one = found.predict(fed)["y"]
    if case != "drawn":
        np.testing.assert_allclose(one, ht.evaluate(found._model.outputs["y"], fed), rtol=1e-5, atol=1e-6)
    if apart:
        several = found.joined([fitted, {n: a[:1] for n, a in fitted.items()}, fitted])
        for each, wanted in zip(several, (one, one[:1], one), strict=True):
            np.testing.assert_allclose(each["y"], wanted, rtol=1e-5, atol=1e-6)


def test_inputs_of_unlike_lengths_are_an_error_of_the_model_alone(tmp_path: Path) -> None:
    found = predictor(tmp_path, lambda x, y: x + y, (None, 4), (None, 4))
    fed = found.fitting({"x0": X[:3], "x1": X[:2]})
    assert not found.joins(fed)
    with pytest.raises(FeedError, match=r"does not take 'x0' \(3, 4\), 'x1' \(2, 4\): .* do not broadcast") as caught:
        found.predict(fed)
    assert caught.value.fix == "give sizes that fit the model, and each other"


def test_what_has_no_numbers_has_no_dtype(tmp_path: Path) -> None:
    """As a list without any, which NumPy takes for floats."""
    with ht.scope("model"):
        ids = ht.placeholder("ids", (None, None), "int64")
        y = ht.sum(ht.nn.Embedding(5, 2)(ids), axis=1)
    ht.save_model(tmp_path / "m.hetu", {"y": y}, ht.Executor([y]).state)
    assert ht.Predictor(tmp_path / "m.hetu")(ids=[[], []])["y"].tolist() == [[0, 0], [0, 0]]


def test_the_same_again_is_not_looked_at_again(tmp_path: Path) -> None:
    """Counted: names, shapes and dtypes that have fitted once, also among others."""
    found, looked = predictor(tmp_path, layer, (None, 4)), list[Any]()
    fitting = found.fitting
    found.fitting = lambda arrays: looked.append(arrays) or fitting(arrays)
    for rows in (X[:2], X[:3], X[:2] + 1, X[:3] + 1):
        np.testing.assert_allclose(found(x0=rows)["y"], ht.evaluate(found._model.outputs["y"], {"x0": rows}), rtol=1e-5)
    assert len(looked) == 2
    for other in (X[:2].astype("float64"), X[:2].tolist(), X[:5], np.asfortranarray(X[:2])):
        wanted = ht.evaluate(found._model.outputs["y"], {"x0": other})
        np.testing.assert_allclose(found(x0=other)["y"], wanted, rtol=1e-5)
    assert len(looked) == 5
    with pytest.raises(FeedError, match="the model has no input 'x'"):
        found(x0=X[:2], x=1)


def test_threads_share_one(tmp_path: Path) -> None:
    found = predictor(tmp_path, layer, (None, 4))
    wanted = found(x0=X)["y"]

    def work(seed: int) -> bool:
        rows = np.random.default_rng(seed).integers(0, 100, 1 + seed % 9)
        return all(np.allclose(found(x0=X[rows])["y"], wanted[rows], atol=1e-5) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24), timeout=60))


OF_X = "give it float32 numbers of shape (?, 4), where ? is any size"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({}, r"the model was not given 'x0' f32\[\?, 4\]", "an array for each input"),
    "another": ({"x1": X}, "the model has no input 'x1'", "known names: x0"),
    "a shape": ({"x0": X[0]}, r"input 'x0' is f32\[\?, 4\], got shape \(4,\)", OF_X),
    "a size": ({"x0": X[:, :3]}, r"is f32\[\?, 4\], got shape \(100, 3\)", OF_X),
    "a dtype": ({"x0": X + 1j}, "wants float32", OF_X),
    "a text": ({"x0": [["a"] * 4]}, "wants float32, got", OF_X),
    "unlike rows": ({"x0": [[1, 2], [3]]}, "rows of different lengths", OF_X),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_told(case: str, tmp_path: Path) -> None:
    fed, said, fix = REFUSED[case]
    with pytest.raises(FeedError, match=said) as caught:
        predictor(tmp_path, layer, (None, 4)).predict(fed)
    assert fix in caught.value.fix


def test_memory_is_that_of_the_largest_run(tmp_path: Path) -> None:
    found = predictor(tmp_path, lambda x: ht.cumsum(ht.exp(x), axis=0), (None, 4))
    for count in range(1, 60):
        found(x0=X[:count])
    blocks = {
        id(program.block.base if program.block.base is not None else program.block)
        for program in found._sub.programs.values()
    }
    assert len(blocks) <= 1


def test_a_file_of_onnx_is_a_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]> line (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {1, 3}> '
        "{ y = MatMul(x, w) }"
    )
    onnx.save(model, tmp_path / "line.onnx")
    found = ht.Predictor(tmp_path / "line.onnx")
    fed = found.fitting({"x": [[1.0, 1.0]]})
    assert found.predict(fed)["y"].tolist() == [[4.0]] and found.joins(fed)
