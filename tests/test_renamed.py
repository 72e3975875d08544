"""Weights of other libraries under our names, and ours read by others: rows of a table, and what does not fit them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from io import BytesIO
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


def memory(folder: Path) -> Any:
    return dict(NUMBERS)


def foreign(folder: Path) -> Any:
    return {name: [*a] if a.ndim else a[()] for name, a in NUMBERS.items()}


def zipped(folder: Path) -> Any:
    np.savez(folder / "w.npz", **NUMBERS)
    return np.load(BytesIO((folder / "w.npz").read_bytes()))


FORMS = [one, half, bfloat16, shards, memory, foreign, zipped]
AS_STORED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "half": lambda a: a.astype("float16").astype("float32"),
    "bfloat16": lambda a: np.asarray(a.view("uint32") & 0xFFFF0000).view("float32"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_names_say_what_is_what(form: Callable[[Path], Any], ranks: int, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("form", FORMS)
def test_what_was_taken_goes_back_under_the_names_that_it_had(form: Callable[[Path], Any], tmp_path: Path) -> None:
    report = ht.load_weights(ex := model(), form(tmp_path), names=ROWS)
    back = report.state_dict(ex.state)
    kept = {name: AS_STORED.get(form.__name__, np.array)(a) for name, a in NUMBERS.items() if name != "step"}
    assert {*back} == {*kept} and all(back[n].tobytes() == a.tobytes() for n, a in kept.items())
    assert all(a.flags.c_contiguous and a.flags.writeable for a in back.values())
    ex.state["net/k"] = np.full((2, 2), 9)
    assert (report.state_dict(ex.state)["qkv"] == 9).tolist() == [[False, False, True, True, False, False]] * 2
    fewer = ht.load_weights(ex, form(tmp_path), names=ROWS, only=["net/q", "net/fc0/*"])
    assert {*fewer.state_dict(ex.state)} == {"fc.0.weight", "fc.0.bias"}
    ex.save(tmp_path / "ours")
    own = ht.load_weights(ex, tmp_path / "ours").state_dict(ex.state)
    assert {*own} == {*ex.state} and own["net/fc0/weight"].shape == (4, 8)


def test_the_first_of_a_kind_may_have_a_number_too(tmp_path: Path) -> None:
    with ht.scope("plain"):
        layers = [ht.nn.Linear(4, 8), ht.nn.Linear(8, 3)]
        late = ht.variable("kept_0", ht.init.zeros, (3,))
    y = layers[1](layers[0](ht.placeholder("x", (None, 4)))) + late
    ex = ht.Executor([y])
    rows = [(r"fc\.(\d)\.weight", r"plain/linear_\1/weight", (1, 0)), (r"fc\.(\d)\.bias", r"plain/linear_\1/bias")]
    report = ht.load_weights(ex, one(tmp_path), names=[*rows, ("step", "plain/kept_0")], only="plain/linear*")
    assert len(report.taken) == 4 and "plain/linear_1/bias" in report.taken
    np.testing.assert_array_equal(ex.state["plain/linear/weight"], NUMBERS["fc.0.weight"].T)


@pytest.mark.parametrize("names", [ROWS, None])
def test_what_one_rank_cannot_read_no_rank_loads(names: Any, tmp_path: Path) -> None:
    model().save(ours := tmp_path / "ours")

    def body(comm: Any) -> tuple[str, bool]:
        ex = model(strategy=ZeRO(3), comm=comm)
        before = dict(ex.state)
        path = tmp_path / "none" if comm.rank else one(tmp_path) if names else ours
        with pytest.raises(CheckpointError) as caught:
            ht.load_weights(ex, path, names=names)
        return caught.value.message, all(np.array_equal(a, before[name]) for name, a in ex.state.items())

    assert [told for told, _ in run_ranks(2, body)][1].startswith("there is no ")
    assert all(same for _, same in run_ranks(2, body))


def test_names_that_are_ours_already_need_no_row(tmp_path: Path) -> None:
    save_file({"net/q": np.ones((2, 2), "float32"), "k": np.zeros(3, "float32")}, path := tmp_path / "w.safetensors")
    report = ht.load_weights(ex := model(), path, names=[], only="net/?")
    assert (report.taken, report.left, ex.state["net/q"].sum()) == (("net/q",), ("k",), 4)


LINEAR = r"fc\.0\.weight"
REFUSED: dict[str, tuple[Any, type[HetuError], str, str]] = {
    "a name": ([(LINEAR, "net/fc0/wieght")], CheckpointError, "'fc.0.weight' is to be 'net/fc0/w", "net/fc0/weight"),
    "nothing fits": ([], CheckpointError, "has none of net/fc0/weight.* it has fc.0.bias", "add a row to names="),
    "not turned": ([(LINEAR, "net/fc0/weight")], CheckpointError, r"the file has float32\(8, 4\), the model", "(1, 0)"),
    "all at once": ([(LINEAR, "net/x"), ("qkv", ["net/q"] * 4), (r"fc\.\d\.bias", "net/fc0/bias")], CheckpointError,
                    "nothing was loaded\n  'fc.0.weight' is .*\n  .*fc.1.bias' are both .*\n  'qkv' .* in 4 parts", ""),
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
    "a name twice": (header(entry()[:-1] + "," + entry()[1:]), "'fc.0.weight' lies in model-0.safetensors, which"),
    "a shape twice": (header(entry().replace("[4],", '[4], "shape": [4],')), "duplicate field"),
    "a name without end": (index(qkv="x" * 5000 + ".safetensors"), "File name too long"),
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


def test_a_file_of_pickles_is_told(tmp_path: Path) -> None:
    for start in (b"PK\3\4", b"\x80\2}q\0."):
        (path := tmp_path / "weights.pt").write_bytes(start + b"\0" * 99)
        with pytest.raises(CheckpointError, match=r"weights.pt is no whole safetensors file") as caught:
            ht.load_weights(model(), path, names=ROWS)
        assert "torch.load(path, weights_only=True)" in caught.value.fix


MEMORY = {
    "no number": ({"qkv": None}, "'qkv' wants float64, got None"),
    "rows in rows": ({"net": NUMBERS}, "'net' wants float64, got {'fc.0.weight'"),
    "whole numbers": ({"qkv": np.ones((2, 6)), "net/step": np.array(1.5)}, "'net/step' wants int64, got float64"),
}


@pytest.mark.parametrize("case", MEMORY)
def test_arrays_in_memory_that_are_none_are_told_by_name(case: str) -> None:
    given, said = MEMORY[case]
    ex = ht.Executor([*model().subgraphs["default"].entries, ht.variable("net/step", 3, (), "int64")])
    before = dict(ex.state)
    with pytest.raises(CheckpointError, match=said):
        ht.load_weights(ex, given, names=ROWS)
    assert all(np.array_equal(before[name], ex.state[name]) for name in before)


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
