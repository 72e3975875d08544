"""Arrays of other libraries go in where arrays go in, read where they lie, and results go out the same way.

Stand-ins have the protocols alone. Rows that need another library are skipped without it.
"""

from __future__ import annotations

import array

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import aligned_empty, array_from
from hetu.core.errors import HetuError
from hetu.cpu_kernels import fed

ROWS = np.random.default_rng(5).normal(size=(160, 64)).astype(np.float32)  # more bytes than what is always copied
CPU, CUDA = (1, 0), (2, 0)


class OfDLPack:
    """A tensor that has DLPack and nothing else."""

    def __init__(self, numbers, device=CPU, says=None):
        self.numbers, self.device, self.says = numbers, device, says

    def __dlpack__(self, **asked):
        if self.says is not None:
            raise self.says
        return self.numbers.__dlpack__(**asked)

    def __dlpack_device__(self):
        return self.device


class OfOldDLPack(OfDLPack):
    """One of before versions were told."""

    def __dlpack__(self, stream=None):
        return self.numbers.__dlpack__()


class OfRows(OfDLPack):
    """One that is a sequence as well, whose numbers nobody asks for one by one."""

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        raise AssertionError("it was read row by row")


class OfNumPy:
    """A tensor that NumPy asks for an array of it."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __array__(self, dtype=None, copy=None):
        return self.numbers


class OfInterface:
    """One that says where its numbers lie."""

    def __init__(self, numbers):
        self.numbers, self.__array_interface__ = numbers, numbers.__array_interface__


def aligned(numbers):
    """A copy that begins where every library takes one."""
    made = aligned_empty(np, numbers.nbytes).view(numbers.dtype).reshape(numbers.shape)
    made[...] = numbers
    return made


def constant(numbers):
    numbers = numbers.view()
    numbers.flags.writeable = False
    return numbers


def of(library, make):
    """Of a library that may not be there."""
    return lambda numbers: make(pytest.importorskip(library), numbers)


SHARED = {  # how another library holds the numbers of an array, which are read where they lie
    "DLPack": OfDLPack,
    "DLPack, constant": lambda numbers: OfDLPack(constant(numbers)),
    "old DLPack": OfOldDLPack,
    "DLPack and rows": OfRows,
    "__array__": OfNumPy,
    "__array_interface__": OfInterface,
    "buffer": memoryview,
    "constant buffer": lambda numbers: memoryview(constant(numbers)),
    "array API": of("array_api_strict", lambda xp, numbers: xp.asarray(numbers, copy=False)),
    "torch": of("torch", lambda torch, numbers: torch.from_numpy(numbers)),
    "jax": of("jax", lambda jax, numbers: jax.dlpack.from_dlpack(numbers, copy=False)),
    "pandas": of("pandas", lambda pandas, numbers: pandas.DataFrame(numbers, copy=False)),
    "arrow": of("pyarrow", lambda arrow, numbers: arrow.Tensor.from_numpy(numbers)),
}
shared = pytest.mark.parametrize("made", SHARED.values(), ids=SHARED)


@shared
@pytest.mark.filterwarnings("ignore:Exporting an unversioned DLPack:DeprecationWarning")
def test_numbers_are_read_where_they_lie(made):
    numbers = aligned(ROWS[:8])
    assert np.shares_memory(array_from(made(numbers)), numbers)


COLUMNS = {  # of one axis
    "array.array": lambda numbers: array.array("f", numbers.tolist()),
    "pandas": of("pandas", lambda pandas, numbers: pandas.Series(numbers, copy=False)),
    "pandas of arrow": of("pandas", lambda pandas, numbers: pandas.Series(numbers, dtype="float32[pyarrow]")),
    "arrow": of("pyarrow", lambda arrow, numbers: arrow.array(numbers)),
}


@pytest.mark.parametrize("made", COLUMNS.values(), ids=COLUMNS)
def test_columns_are_read_where_they_lie(made):
    column = made(ROWS[0].copy())
    first, second = array_from(column), array_from(column)
    assert np.shares_memory(first, second) and first.tolist() == ROWS[0].tolist()


@shared
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Exporting an unversioned DLPack:DeprecationWarning")
def test_a_large_feed_is_not_copied(made):
    x = ht.placeholder("x", (None, 64))
    ex = ht.Executor([ht.sum(ht.exp(x), axis=0)])
    for k in range(3):
        numbers = aligned(ROWS + k)
        np.testing.assert_allclose(ex.run({x: made(numbers)})[0], np.exp(numbers).sum(0), rtol=1e-4)
        lent = ex.subgraphs["default"].last.takes[0][2].__self__
        assert isinstance(lent, fed.Lent) and np.shares_memory(lent.fed(), numbers)
        assert k == 0 or not lent.buffer.any()
        lent.buffer[...] = 0


AGAIN = {  # how small feeds come that are known at once when they come again
    "DLPack": OfDLPack,
    "__array__": OfNumPy,
    "buffer": memoryview,
    "torch": SHARED["torch"],
    "float64": lambda numbers: numbers.astype("float64"),
    "integers": lambda numbers: numbers.astype("int64"),
    "truths": lambda numbers: numbers > 0,
    "other bytes": lambda numbers: numbers.astype(numbers.dtype.newbyteorder("S")),
    "list": np.ndarray.tolist,
    "rows": list,
}


@pytest.mark.compiled
@pytest.mark.parametrize("made", AGAIN.values(), ids=AGAIN)
def test_a_feed_of_any_kind_is_recognized_when_it_comes_again(made, monkeypatch):
    x, s = ht.placeholder("x", (None, 64)), ht.placeholder("s", ())
    ex = ht.Executor([x * s])
    ex.run({x: made(ROWS[:8]), s: 1.5})
    matched = ex.subgraphs["default"].match
    monkeypatch.setattr(ex.subgraphs["default"], "match", lambda feed: counted.append(1) or matched(feed))
    for k, counted in ((2, []), (3, [])):
        numbers = made(ROWS[:8] * k)
        np.testing.assert_array_equal(ex.run({x: numbers, s: k / 2})[0], array_from(numbers).astype("f4") * (k / 2))
        assert not counted
    ex.run({x: made(ROWS[:7]), s: 1})  # of other shapes and kinds
    assert counted
    with pytest.raises(ht.errors.FeedError, match="placeholder 'x' got a OfDLPack whose numbers cannot be read: no\n"):
        ex.run({x: OfDLPack(ROWS, says=BufferError("no")), s: 1})


def feed(given):
    x = ht.placeholder("x", (None, 64))
    return ht.Executor([x * 1]).run({x: given})[0]


def look(given):
    x = ht.placeholder("x", (None, 64))
    return ht.evaluate(x * 1, {x: given})


def predict(given):
    x = ht.placeholder("x", (None, 64))
    return ht.Executor([x * 1]).predict(given)


def assign(given):
    state = ht.Executor([ht.variable("w", np.zeros((8, 64), np.float32)) * 1]).state
    state["w"] = given
    return state["w"]


def train(given):
    x, w = ht.placeholder("x", (8, 64)), ht.variable("w", np.zeros((8, 64), np.float32))
    ex = ht.Executor({"train": [ht.sum(x), {w: x}]})
    ht.fit(ex, [(given,)], epochs=1, inputs=[x])
    return ex.state["w"]


def mean(given):
    metric = ht.metrics.Mean()
    metric.update(given)
    return np.full((8, 64), metric.result() - ROWS[:8].mean() + ROWS[:8])


def listed(numbers):
    return [OfDLPack(row) for row in numbers]


def nested(numbers):
    return [(OfDLPack(row[:1]), row[1:2].tolist(), *np.split(row[2:], 62)) for row in numbers]


TAKEN = {
    "fed": feed,
    "looked at": look,
    "predicted": predict,
    "trained on": train,
    "a constant": lambda given: ht.evaluate(ht.constant(given)),
    "a variable": lambda given: ht.evaluate(ht.variable("w", given)),
    "an operand": lambda given: ht.evaluate(ht.constant(np.zeros((8, 64), np.float32)) + given),
    "an input": lambda given: ht.evaluate(-ht.relu(given) + ht.relu(-ht.constant(given)), {}) * -1,
    "a value": assign,
    "a column of data": lambda given: ht.data.ArrayDataset(given).arrays[0],
    "a series": lambda given: ht.data.sliding_windows(given, 8)[0],
    "rows of ml": lambda given: ht.ml.PCA(2).fit(given).mean_ - ROWS[:8].mean(0) + ROWS[:8],
    "measured": mean,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("made", [OfDLPack, OfNumPy, memoryview, listed, SHARED["torch"]])
def test_they_are_taken_wherever_arrays_are(take, made):
    np.testing.assert_allclose(take(made(np.array(ROWS[:8]))), ROWS[:8], rtol=1e-4, atol=1e-5)


def test_lists_of_lists_may_hold_them():
    assert array_from(nested(ROWS[:8])).reshape(8, 64).tolist() == ROWS[:8].tolist()


MASKED = {
    "an array": lambda masked: masked,
    "of nothing": lambda masked: np.ma.array(ROWS[:8]),
    "a constant one": constant,
    "given out": OfNumPy,
    "rows": list,
    "one row": lambda masked: [ROWS[0], masked[0]],
    "rows of rows": lambda masked: [[*row.reshape(64, 1)] for row in masked],
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("made", MASKED.values(), ids=MASKED)
def test_a_mask_is_not_lost(take, made):
    if (made, take) == (MASKED["of nothing"], TAKEN["rows of ml"]):
        pytest.skip("scikit-learn's convention")
    with pytest.raises(HetuError, match="mask"):
        take(made(np.ma.masked_greater(ROWS[:8], 0)))


KEPT = {
    "a constant": ht.constant,
    "an operand": lambda given: ht.constant(np.zeros((8, 64), np.float32)) + given,
    "an input": lambda given: ht.relu(given) - ht.relu(-ht.constant(given)),
    "a variable": lambda given: ht.variable("w", given),
    "a first value": lambda given: ht.variable("w", lambda *_: given, (8, 64)),
}
OWNED = {name: SHARED[name] for name in ("DLPack", "__array__", "constant buffer", "torch")} | {
    "NumPy": lambda numbers: numbers,
    "a constant view": constant,
    "one row": lambda numbers: np.broadcast_to(numbers[0], numbers.shape),
    "one number": lambda numbers: np.broadcast_to(numbers[0, 0], numbers.shape),
    "one number, its owner's": lambda numbers: np.lib.stride_tricks.as_strided(numbers, None, (0, 0), writeable=False),
}


@pytest.mark.parametrize("take", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("made", OWNED.values(), ids=OWNED)
def test_what_its_owner_changes_later_changes_nothing(take, made):
    numbers = ROWS[:8].copy()
    given = made(numbers)
    wanted = np.array(array_from(given))
    ex = ht.Executor([take(given)])
    numbers[...] = 7
    np.testing.assert_array_equal(ex.run()[0], wanted)


@pytest.mark.compiled
@pytest.mark.parametrize("size", [8, 160])
@pytest.mark.parametrize("made", [np.asarray, OfDLPack, SHARED["torch"]])
def test_what_is_fed_is_not_written_and_results_stay(made, size):
    """Also where all that follows could be computed in its place, and where the next step is fed the same memory."""
    x = ht.placeholder("x", (None, 64))
    ex = ht.Executor([x, ht.relu(x), ht.exp(ht.relu(x) * 2), ht.matrix_transpose(x), x[1:]])
    numbers, results, wanted = aligned(ROWS[:size]), [], []
    for k in range(4):
        numbers[...] = before = ROWS[:size] + k
        results.append(ex.run({x: made(numbers)}))
        assert numbers.tobytes() == before.tobytes()
        wanted.append([before, relu := before.clip(0), np.exp(relu * 2), before.T, before[1:]])
    numbers[...] = 7
    for found, right in zip(results, wanted):
        for a, b in zip(found, right):
            np.testing.assert_allclose(a, b, rtol=1e-6)
            assert a.flags.writeable and not np.shares_memory(a, numbers)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "uint8"])
@pytest.mark.parametrize("make", [ht.constant, lambda given: ht.variable("v", given)], ids=["constant", "variable"])
def test_they_keep_their_dtype(make, dtype):
    for made in (OfDLPack, OfNumPy, memoryview):
        assert make(made(np.ones(3, dtype))).dtype == dtype


LYING = {
    "backward": lambda numbers: numbers[::-1],
    "columns": np.asfortranarray,
    "gaps": lambda numbers: np.repeat(numbers, 2, axis=1)[:, ::2],
    "other bytes": lambda numbers: numbers.astype(numbers.dtype.newbyteorder("S")),
    "repeated": lambda numbers: np.broadcast_to(numbers[:1], numbers.shape),
    "none": lambda numbers: numbers[:0],
}


@pytest.mark.parametrize("take", [feed, TAKEN["a constant"], TAKEN["a variable"]], ids=["fed", "constant", "variable"])
@pytest.mark.parametrize("lying", LYING.values(), ids=LYING)
def test_numbers_that_lie_otherwise_are_right(lying, take):
    numbers = lying(ROWS[:8])
    assert take(numbers).tobytes() == numbers.astype(np.float32).tobytes()
    x = ht.placeholder("x", numbers.shape)
    product = ht.Executor([x * ht.constant(numbers) + ht.exp(x)]).run({x: np.ones(numbers.shape)})[0]
    np.testing.assert_allclose(product, numbers + np.e, rtol=1e-6, atol=1e-6)


def failing(error):
    """Of a library with a mistake in it."""
    return lambda: OfDLPack(ROWS, says=error)


REFUSED = {  # what another library says, or hetu, of numbers that cannot be read
    "differentiated": (
        lambda: OfDLPack(ROWS, says=BufferError("Can't export tensors that require gradient, use tensor.detach()")),
        "use tensor.detach()",
    ),
    "on a GPU": (lambda: OfDLPack(ROWS, CUDA, RuntimeError("Unsupported device in DLTensor.")), "Unsupported device"),
    "of no shape": (lambda: OfDLPack(ROWS, says=ValueError("the data cannot be exported")), "cannot be exported"),
    "by a mistake": (failing(KeyError("rows")), "'rows'"),
    "by a number": (failing(ZeroDivisionError("division by zero")), "division by zero"),
    "without a word": (failing(MemoryError()), "MemoryError"),
    "torch, differentiated": (of("torch", lambda t, n: t.from_numpy(n).clone().requires_grad_()), "detach()"),
    "torch, sparse": (of("torch", lambda t, n: t.from_numpy(n).to_sparse()), "to_dense()"),
    "torch, elsewhere": (of("torch", lambda t, n: t.empty(8, 64, device="meta")), "meta device"),
    "torch, bfloat16": (of("torch", lambda t, n: t.from_numpy(n).bfloat16()), "BFloat16"),
    "jax, deleted": (of("jax", lambda jax, n: deleted(jax.numpy.asarray(n))), "deleted"),
}


def deleted(tensor):
    tensor.delete()
    return tensor


@pytest.mark.parametrize("take", [feed, TAKEN["a constant"], TAKEN["a variable"], TAKEN["a column of data"]])
@pytest.mark.parametrize(("made", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_told_in_the_words_of_its_library(made, says, take):
    given = made(ROWS) if made.__code__.co_argcount else made()
    with pytest.raises(HetuError) as caught:
        take(given)
    assert f"a {type(given).__name__} whose numbers cannot be read: " in caught.value.message
    assert says in caught.value.message and "tensor.detach().to_dense().cpu().float()" in caught.value.fix


@pytest.mark.parametrize("take", [feed, TAKEN["a constant"], assign])
@pytest.mark.parametrize("given", [None, "text", ["1", "2"], [1, None], ROWS.astype(object), [2**70], {}, object()])
def test_what_is_no_array_of_numbers_is_shown(take, given):
    with pytest.raises(HetuError, match="wants float(64|32), got ") as caught:
        take(given)
    assert (
        " ".join(repr(given).split()).strip("[]")[:50] in caught.value.message
        and "values.astype(dtype)" in caught.value.fix
    )


def test_texts_and_dates_are_refused_in_one_line():
    pandas = pytest.importorskip("pandas")
    for frame in (pandas.DataFrame({"a": ["x", "y"]}), pandas.Series(pandas.to_datetime(["2020-01-01"]))):
        with pytest.raises(ht.errors.FeedError, match="placeholder 'x' wants float32, got .{7,60}\n"):
            feed(frame)


def test_bfloat16_of_a_library_that_numpy_reads():
    numpy = pytest.importorskip("jax").numpy
    assert ht.constant(numpy.ones(3, numpy.bfloat16)).dtype.name == "bfloat16"
    assert feed(numpy.asarray(ROWS, numpy.bfloat16)).dtype == np.float32


GIVEN = {
    "whole": lambda x: x * 2,
    "a view": lambda x: x[:, 1],
    "no axes": ht.sum,
    "truths": lambda x: x > 0,
    "numbers": lambda x: ht.argmax(x, axis=1),
}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("node", GIVEN.values(), ids=GIVEN)
def test_results_go_out_as_they_came_in(node, library):
    """A result belongs to its caller, so that it may be written into."""
    x = ht.placeholder("x", (None, 64))
    result = ht.Executor([node(x)]).run({x: ROWS})[0]
    module = pytest.importorskip(library)
    taken = (module.dlpack if library == "jax" else module).from_dlpack(result)
    assert result.flags.writeable and np.asarray(taken).tolist() == result.tolist()
    if library != "jax":  # which may copy, as it wants memory of its own alignment
        assert np.shares_memory(np.asarray(taken), result)


def test_bfloat16_goes_out_as_its_bits():
    pytest.importorskip("ml_dtypes")
    x = ht.placeholder("x", (None, 64))
    result = ht.Executor([ht.astype(x, "bfloat16")]).run({x: ROWS})[0]
    with pytest.raises(BufferError, match="DLPack only supports"):
        np.from_dlpack(result)
    bits = np.from_dlpack(result.view(np.uint16))
    assert np.shares_memory(bits, result)
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(bits).view(torch.bfloat16).float().tolist() == result.astype(np.float32).tolist()
