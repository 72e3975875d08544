"""Weights of other libraries under our names, and ours read by others: rows of a table, and what does not fit them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hetu as ht
from hetu.core.errors import ArgumentError, CheckpointError, HetuError
from hetu.dist import ZeRO, run_ranks

RNG = np.random.default_rng(0)
THEIRS = {"fc.0.weight": (8, 4), "fc.0.bias": (8,), "fc.1.weight": (3, 8), "fc.1.bias": (3,), "qkv": (2, 6), "step": ()}
NUMBERS = {name: RNG.standard_normal(shape).astype("float32") for name, shape in THEIRS.items()}
ROWS = [
    (r"fc\.(\d)\.weight", r"net/fc\1/weight", (1, 0)),
    (r"fc\.(\d)\.bias", r"net/fc\1/bias"),
    ("qkv", ["net/q", "net/k", "net/v"]),
]
X = RNG.standard_normal((5, 4)).astype("float32")


def upper(array: np.ndarray) -> np.ndarray:
    return (array.view("uint32") >> 16).astype("uint16")


def entries(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """A reader of safetensors in four lines, which knows nothing of hetu or of its library."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = {name: e for name, e in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    return {n: (e["dtype"], e["shape"], data[8 + size :][slice(*e["data_offsets"])]) for n, e in header.items()}


def write(path: Path, arrays: dict[str, np.ndarray], codes: dict[str, str]) -> None:
    """And a writer, for dtypes that NumPy has not."""
    ends = [0, *accumulate(a.nbytes for a in arrays.values())]
    header = {
        name: {"dtype": codes[a.dtype.name], "shape": a.shape, "data_offsets": ends[k : k + 2]}
        for k, (name, a) in enumerate(arrays.items())
    }
    text = json.dumps(header).encode()
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *(a.tobytes() for a in arrays.values())]))


def model(**options: Any) -> ht.Executor:
    with ht.scope("net"):
        first, second = ht.nn.Linear(4, 8, name="fc0"), ht.nn.Linear(8, 3, name="fc1")
        more = [ht.variable(name, ht.init.zeros, (2, 2)) for name in "qkv"]
    y = second(ht.relu(first(ht.placeholder("x", (None, 4)))))
    return ht.Executor([y, *more], **options)


def one(folder: Path) -> Path:
    save_file(NUMBERS, folder / "model.safetensors")
    return folder / "model.safetensors"


def half(folder: Path) -> Path:
    save_file({name: a.astype("float16") for name, a in NUMBERS.items()}, folder / "half.safetensors")
    return folder / "half.safetensors"


def bfloat16(folder: Path) -> Path:
    write(folder / "bf.safetensors", {n: upper(a) for n, a in NUMBERS.items()}, {"uint16": "BF16"})
    return folder / "bf.safetensors"


def shards(folder: Path) -> Path:
    where = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(NUMBERS)}
    for file in {*where.values()}:
        save_file({name: a for name, a in NUMBERS.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


AS_STORED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "half": lambda a: a.astype("float16").astype("float32"),
    "bfloat16": lambda a: np.asarray(a.view("uint32") & 0xFFFF0000).view("float32"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", [one, half, bfloat16, shards])
def test_rows_of_names_say_what_is_what(form: Callable[[Path], Path], ranks: int, tmp_path: Path) -> None:
    path = form(tmp_path)
    kept = {name: AS_STORED.get(form.__name__, np.array)(a) for name, a in NUMBERS.items()}

    def values(**options: Any) -> tuple[Any, list[np.ndarray]]:
        ex = model(**options)
        return ht.load_weights(ex, path, names=ROWS), ex.run({"x": X})

    results = [values()] if ranks == 1 else run_ranks(ranks, lambda comm: values(strategy=ZeRO(3), comm=comm))
    hidden = np.maximum(X @ kept["fc.0.weight"].T + kept["fc.0.bias"], 0)
    for report, (y, *parts) in results:
        np.testing.assert_allclose(y, hidden @ kept["fc.1.weight"].T + kept["fc.1.bias"], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), kept["qkv"])
        assert (len(report.taken), report.missing, report.left) == (7, (), ("step",))


def test_names_that_are_ours_already_need_no_row(tmp_path: Path) -> None:
    save_file({"net/q": np.ones((2, 2), "float32"), "k": np.zeros(3, "float32")}, path := tmp_path / "w.safetensors")
    report = ht.load_weights(ex := model(), path, names=[], only="net/?")
    assert (report.taken, report.left, ex.state["net/q"].sum()) == (("net/q",), ("k",), 4)


LINEAR = r"fc\.0\.weight"
REFUSED: dict[str, tuple[Any, type[HetuError], str, str]] = {
    "a name": ([(LINEAR, "net/fc0/wieght")], CheckpointError, "'fc.0.weight' is to be 'net/fc0/w", "net/fc0/weight"),
    "nothing fits": ([], CheckpointError, "has none of net/fc0/weight.* it has fc.0.bias", "add a row to names="),
    "not turned": ([(LINEAR, "net/fc0/weight")], CheckpointError, r"the file has float32\(8, 4\), the model", ""),
    "two of one": ([(r"fc\.\d\.bias", "net/fc0/bias")], CheckpointError, "'fc.0.bias' and 'fc.1.bias' are", "one row"),
    "parts": ([(LINEAR, ["net/q", "net/k", "net/v"])], CheckpointError, r"\(8, 4\) has no axes .* the last in 3", ""),
    "axes": ([(LINEAR, "net/fc0/weight", (1, 1))], CheckpointError, r"has no axes \(1, 1\)", "number each axis once"),
    "no axis": ([("step", "net/q", (0,))], CheckpointError, r"'step' of shape \(\) has no axes \(0,\)", ""),
    "a word for axes": ([(LINEAR, "net/q", "turn")], ArgumentError, "has axes 'turn'", "write"),
    "a pattern": ([("(", "net/q")], ArgumentError, "is no row of names: missing", "write"),
    "a group": ([(LINEAR, r"net/\3")], ArgumentError, "invalid group reference 3", "write"),
    "a text": (["ab"], ArgumentError, "'ab' is no row of names", "write"),
    "a number": ([(LINEAR, 3)], ArgumentError, "is no row of names", "write"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_do_not_fit_are_told_and_nothing_is_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, error, said, fix = REFUSED[case]
    monkeypatch.setattr("hetu.data.weights.PublishedWeights.read", None)
    ex, path = model(), one(tmp_path)
    before = dict(ex.state)
    with pytest.raises(error, match=said) as caught:
        ht.load_weights(ex, path, names=rows)
    assert fix in caught.value.fix and all(np.array_equal(before[name], ex.state[name]) for name in before)


# -- files that are not what they say ---------------------------------------------------------------------------------


def header(text: str, data: bytes = b"\0" * 16, size: int | None = None) -> Callable[[Path], None]:
    raw = struct.pack("<Q", len(text) if size is None else size) + text.encode() + data
    return lambda folder: (folder / "model-0.safetensors").write_bytes(raw) and None


def entry(**changes: Any) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}})


def index(**where: str) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where})) and None
    )


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a short length": (lambda folder: (folder / "model-0.safetensors").write_bytes(b"\1\0\0"), "no whole safetensors"),
    "a cut header": (header(entry()[:-9]), "no whole safetensors file"),
    "an endless header": (header(entry(), size=1 << 62), "no whole safetensors file"),
    "beyond the file": (header(entry(shape=[4, 1 << 40], data_offsets=[0, 1 << 44])), "no whole safetensors file"),
    "sizes that overflow": (header(entry(shape=[1 << 62, 4])), "no whole safetensors file"),
    "another size": (header(entry(shape=[3])), "no whole safetensors file"),
    "before the file": (header(entry(data_offsets=[-16, 0])), "no whole safetensors file"),
    "overlaps": (
        header(json.dumps({n: json.loads(entry(data_offsets=[k, k + 16]))["a"] for n, k in (("a", 0), ("b", 8))}),
               b"\0" * 24), "no whole safetensors file"),
    "a gap": (header(entry(data_offsets=[8, 24]), b"\0" * 24), "no whole safetensors file"),
    "no dtype": (header(entry(dtype="Q7")), "no whole safetensors file"),
    "a shard is gone": (lambda folder: (folder / "model-1.safetensors").unlink(), "no file of weights.*model-1"),
    "a name is elsewhere": (index(qkv="model-1.safetensors"), "'qkv' lies in model-1.safetensors, which lacks it"),
    "outside": (index(qkv="../model.safetensors"), r"names '\.\./model.safetensors', wanted files beside it"),
    "an absolute path": (index(qkv="/etc/passwd"), "names '/etc/passwd', wanted files beside it"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_not_what_it_says_is_refused_before_memory_is_taken(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, said = HOSTILE[case]
    path = shards(tmp_path)
    spoil(path)
    monkeypatch.setattr("hetu.data.weights.PublishedWeights.read", None)
    with pytest.raises(CheckpointError, match=said):
        ht.load_weights(model(), path, names=ROWS)


# -- ours, read by others ---------------------------------------------------------------------------------------------


def test_a_checkpoint_of_ours_is_plain_safetensors(tmp_path: Path) -> None:
    flags = {"b": np.array([True, False]), "n": np.arange(3), "h": np.array([0.5], "float16"), "e": np.zeros((0, 2))}
    ex = ht.Executor([model().subgraphs["default"].entries[0], *(ht.variable(n, a) for n, a in flags.items())])
    ex.save(path := tmp_path / "ours.safetensors")
    by_library, by_hand = load_file(path), entries(path)
    codes = {"BOOL": "?", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "U64": "<u8"}
    assert {*by_library} == {*by_hand} == {*ex.state}
    for name, (code, shape, data) in by_hand.items():
        found = np.frombuffer(data, codes[code]).reshape(shape)
        np.testing.assert_array_equal(found, ex.state[name])
        np.testing.assert_array_equal(found, by_library[name])
        assert found.dtype == ex.state[name].dtype == by_library[name].dtype
