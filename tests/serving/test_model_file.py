"""Models as files: what is loaded gives the same bits, and a file that is not what it says is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import hetu as ht
import hetu.dist
from hetu.core.errors import ArgumentError, CheckpointError, HetuError
from hetu.serving.model_file import load_model

from ..models.table import MODELS

X = np.random.default_rng(0).standard_normal((5, 4)).astype("float32")
Lines = list[list[Any]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    fed = MODELS[name].fed
    with ht.scope("model"):
        y = MODELS[name].build(**{k: ht.placeholder(k, (None, *a.shape[1:]), a.dtype) for k, a in fed.items()})
    ex = ht.Executor([y])
    ht.save_model(path := tmp_path / "m.hetu", {"y": y}, ex.state)
    loaded, before = load_model(path), ex.subgraphs["default"].placeholders
    assert {k: n.type for k, n in loaded.inputs.items()} == {k: n.type for k, n in before.items()}
    np.testing.assert_array_equal(ht.Executor([loaded.outputs["y"]]).run(fed)[0], ex.run(fed)[0])


def small(**options: Any) -> tuple[dict[str, ht.Node], ht.Executor]:
    """Layers that train otherwise, sizes that are computed with, constants, and numbers that JSON has not."""
    x = ht.placeholder("x", (None, 4))
    with ht.scope("net"):
        h = ht.nn.Dropout(0.5)(ht.nn.BatchNorm(8)(ht.nn.Linear(4, 8)(x)))
        y = ht.where(h[:, 1:-1:2] > 0, h[:, 1:-1:2], -np.inf) + ht.reshape(h, (x.shape[0] * 8,))[0] / x.shape[0]
        z = h[..., ::2] @ ht.constant(np.arange(8.0, dtype="float32").reshape(4, 2))
        loss = ht.mean(ht.square(z))
    return {"y": y, "z": z}, ht.Executor(
        {"train": [loss, ht.optim.Adam(0.1).minimize(loss)], "eval": [y, z]}, **options
    )


def saved(folder: Path) -> Path:
    outputs, ex = small()
    ht.save_model(folder / "m.hetu", outputs, ex.state)
    return folder / "m.hetu"


def test_what_was_trained_predicts_as_it_did_where_it_was(tmp_path: Path) -> None:
    outputs, ex = small()
    for _ in range(3):
        ex.run("train", {"x": X})
    ht.save_model(path := tmp_path / "m.hetu", outputs, ex.state)
    found = ht.Predictor(path)(x=X)
    for name, array in zip(outputs, ex.run("eval", {"x": X})):
        np.testing.assert_array_equal(found[name], array)
    weights = {name for name in ex.state if "adam" not in name and name.startswith("net/")}
    assert weights < {*load_file(path)}  # other libraries open it as well
    report = ht.load_weights(small()[1], path)
    assert {*report.taken} == weights and all(name.startswith("constant ") for name in report.left)


@pytest.mark.parametrize("number", range(3))
def test_constants_stand_beside_variables_of_any_name(number: int, tmp_path: Path) -> None:
    x, w = ht.placeholder("x", (None, 4)), ht.variable(f"constant {number}", X[0])
    y = (x + ht.constant(X[1])) * w + ht.constant(X[2])
    ht.save_model(path := tmp_path / "m.hetu", {"y": y}, (ex := ht.Executor([y])).state)
    np.testing.assert_array_equal(ht.Predictor(path)(x=X)["y"], ex.run({"x": X})[0])


class NoFile:
    def __call__(self) -> float:
        return 1.0


def foreign() -> tuple[dict[str, ht.Node], ht.Executor]:
    """Of an operator whose attribute is code."""

    @ht.op(infer=lambda x, *, function: x)
    def applied(xp: Any, x: Any, *, function: Any) -> Any:
        return function() * x

    y = applied(ht.placeholder("x", (None, 4)), function=NoFile())
    return {"y": y}, ht.Executor([y])


def elsewhere() -> tuple[dict[str, ht.Node], ht.Executor]:
    return small()[0], ht.Executor([ht.placeholder("x", (2,))])


NOT_WRITTEN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no outputs": (lambda: ({}, small()[1]), "outputs are {}", 'name the nodes: {"y": y}'),
    "values": (lambda: ({"y": 3}, small()[1]), "outputs are {'y': 3}", 'name the nodes: {"y": y}'),
    "code": (foreign, "has an attribute .*NoFile", "make it of other operators"),
    "no values": (
        elsewhere,
        "'net/.*' has shape .*, here lies nothing of it",
        "pass the state of the executor that has it",
    ),
}


@pytest.mark.parametrize("case", NOT_WRITTEN)
def test_what_no_file_can_hold_is_told_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    make, said, fix = NOT_WRITTEN[case]
    outputs, ex = make()
    with pytest.raises(ArgumentError, match=said) as caught:
        ht.save_model(tmp_path / "m.hetu", outputs, ex.state)
    assert fix in caught.value.fix and [*tmp_path.iterdir()] == []


# -- files that are not what they say ---------------------------------------------------------------------------------


def spoiled(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The file with its graph changed."""
    with safe_open(path, "np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    told = json.loads(metadata["model"])
    made = change(told)
    text = made if isinstance(made, str) else json.dumps(told if made is None else made)
    save_file(tensors, path, {**metadata, "model": text})


def line(told: dict[str, Any], op: str) -> list[Any]:
    return next(each for each in told["lines"] if each[0] == op)


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda told: line(told, old).__setitem__(0, new)


def attribute(op: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda told: line(told, op)[2].__setitem__(key, value)


def strange(told: dict[str, Any]) -> None:
    """All that another process would have to import, at once."""
    for op in ("matmul", "reshape", "where"):
        line(told, op)[0] = f"mine.{op}"


DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no JSON": (lambda told: "{", "is no model: JSONDecodeError"),
    "a list": (lambda told: [], "is no model: TypeError"),
    "deep": (lambda told: DEEP, "is no model: RecursionError"),
    "no lines": (lambda told: {"lines": {}, "outputs": {}}, "it has 0 lines"),
    "many lines": (lambda told: told["lines"].extend([None] * (1 << 17)), "lines, of which 131072 are read"),
    "an operator": (renamed("matmul", "os.system"), "does not have the operators 'os.system'"),
    "operators": (strange, r"does not have the operators 'mine.\w+', 'mine.\w+', 'mine.\w+'"),
    "no name": (renamed("matmul", 3), "does not have the operators 3"),
    "a long text": (attribute("placeholder", "dtype", "x" * 9999), "unknown dtype 'xxx"),
    "another operator": (renamed("matmul", "add"), "do not broadcast"),
    "more inputs": (renamed("matmul", "exp"), "exp of 2 inputs"),
    "talks": (renamed("matmul", "all_reduce"), "all_reduce with"),
    "a later line": (lambda told: line(told, "matmul")[1].__setitem__(0, 10**6), "no value 1000000 before it is used"),
    "no place": (lambda told: line(told, "matmul")[1].__setitem__(0, "x"), "no value 'x'"),
    "no output": (lambda told: told["outputs"].clear(), "it has no output"),
    "an output": (lambda told: told["outputs"].update(y=-1), "no value -1"),
    "more attributes": (attribute("matmul", "code", "1"), r"matmul with \['code'\]"),
    "no attribute": (lambda told: line(told, "reshape")[2].clear(), r"reshape with \[\]"),
    "a kind": (attribute("reshape", "shape", {"pickle": "x"}), "an attribute that is a 'pickle'"),
    "two kinds": (attribute("reshape", "shape", {"size": [1, []], "slice": []}), "is no model: ValueError"),
    "a word": (attribute("reshape", "shape", {"is": "quit"}), "is no model: KeyError"),
    "a size": (attribute("reshape", "shape", [{"size": ["1", []]}]), "'1' is no whole number"),
    "a symbol": (attribute("reshape", "shape", [{"size": [1, [["**", 1, 2]]]}]), r"\('\*\*', 1, 2\) is no size"),
    "an array": (attribute("constant", "value", {"array": "none"}), "is no model: KeyError"),
    "a variable": (attribute("variable", "name", "none"), "is no model: KeyError"),
    "an input": (attribute("placeholder", "shape", [{"size": [1, [["y", 0]]]}, 4]), "the input 'x' has the sizes"),
    "a dtype": (attribute("placeholder", "dtype", "object"), "unknown dtype 'object'"),
    "a shape": (attribute("placeholder", "shape", [-3]), "a size must be a number >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_graph_that_is_not_what_it_says_is_an_error_that_tells_it(case: str, tmp_path: Path) -> None:
    change, said = HOSTILE[case]
    spoiled(path := saved(tmp_path), change)
    with pytest.raises(CheckpointError, match=said) as caught:
        ht.Predictor(path)
    assert str(path) in caught.value.message and caught.value.fix and len(caught.value.message) < 1000


NOT_MODELS: dict[str, tuple[Callable[[Path], Any], type[HetuError], str]] = {
    "nothing": (lambda path: path.unlink(), CheckpointError, "there is no checkpoint"),
    "half": (lambda path: path.write_bytes(path.read_bytes()[:-1]), CheckpointError, "is not a whole checkpoint file"),
    "a text": (lambda path: path.write_text("model"), CheckpointError, "is not a whole checkpoint file"),
    "values alone": (lambda path: small()[1].save(path), CheckpointError, "holds values, and no graph"),
    "of others": (lambda path: save_file({"x": X}, path), CheckpointError, "was not written by hetu"),
}


@pytest.mark.parametrize("case", NOT_MODELS)
def test_what_is_no_model_is_told(case: str, tmp_path: Path) -> None:
    spoil, error, said = NOT_MODELS[case]
    spoil(path := saved(tmp_path))
    with pytest.raises(error, match=said):
        ht.Predictor(path)


@pytest.mark.parametrize("size", [1 << 36, 1 << 39, 1 << 62])
def test_sizes_are_compared_before_memory_is_taken(size: int, tmp_path: Path) -> None:
    x = ht.placeholder("x", (None, 2))
    y = ht.broadcast_to(ht.reshape(x, (-1, 2, 1)), (x.shape[0], 2, 7)) + x[0, 0]
    ht.save_model(path := tmp_path / "m.hetu", {"y": y}, ht.Executor([y]).state)
    spoiled(path, attribute("broadcast_to", "shape", [{"size": [1, [["x", 0]]]}, 2, size]))
    said = "a run takes .* may be taken|a run of these sizes|too large for any machine"
    with pytest.raises((ht.errors.BudgetError, CheckpointError), match=said):
        ht.Predictor(path)(x=np.ones((3, 2)))
