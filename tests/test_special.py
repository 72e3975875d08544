"""Every row of the table with nothing in an axis, and with special numbers: the passes answer as the plain meaning."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from itertools import product

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GradientError, HetuError
from hetu.core.graph import OPS
from hetu.core.simplify import interpret
from hetu.core.types import is_float

from .at_once import chosen, compiled_at_once
from .samples import SAMPLES, Sample, real
from .test_ops import as_tuple, each_sample

NUMBERS = [(0.0, -0.0), (0.5,), (np.nan, 1.0, -0.5), (np.inf, 1.0, -0.5), (-np.inf, 0.5, 2.0)]


def asked(sample, arrays, passes=None, slopes=False):
    """An executor of a row, perhaps with the gradients of its first output, and its placeholders."""
    nodes = [
        ht.placeholder(f"x{k}", a.shape, "float32" if a.dtype.kind == "f" else a.dtype) for k, a in enumerate(arrays)
    ]
    outputs, floats = as_tuple(sample.build(*nodes)), [n for n in nodes if is_float(n.dtype)]
    sought = []
    for x in floats if slopes and sample.order else ():
        with suppress(GradientError):  # of what only lends its shape
            sought += ht.gradients(outputs[0], [x], ht.ones_like(outputs[0]))
    return ht.Executor([*outputs, *sought], passes=passes), nodes


def answers(sample, arrays, feeds, slopes=False):
    """What all passes and none of them make of each feed; HetuError where these arrays are refused."""
    made = []
    for passes in (None, []):
        try:
            executor, nodes = asked(sample, arrays, passes, slopes)
            made.append([executor.run(dict(zip(nodes, feed))) for feed in feeds])
        except HetuError:
            made.append(HetuError)
    return made


@pytest.fixture(scope="module")
def all_compiled(request):
    def program(sample):
        with suppress(HetuError):
            executor, nodes = asked(sample, sample.arrays())
            executor.program(dict(zip(nodes, sample.arrays())))

    cases = chosen(request, test_special_numbers_go_through_all_passes_as_through_none)
    compiled_at_once(partial(program, case["sample"]) for case in cases)


def references(sample, arrays) -> list[np.ndarray]:
    """What plain NumPy makes of them, if it does; formulas that know the sizes of a row give other shapes."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            return [*map(np.asarray, as_tuple(sample.reference(*arrays)))]
    except Exception:
        return []


def empty(array: np.ndarray, size: int) -> np.ndarray:
    """The array with nothing along the axes of that size; the state of random numbers stays."""
    return array if array.dtype == np.uint64 else array[tuple(slice(0 if n == size else None) for n in array.shape)]


# What has a gradient only of some: of ids, whose rows must be there, of a window, of experts, of steps in second order.
OF_SOME = {"scatter_rows", "put_along_axis_add", "repeat_pixels", "moe_combine", "moe_products", "gru_dx", "lstm_dx"}


@each_sample
@pytest.mark.sampled(16)
def test_an_empty_axis_is_answered_or_refused_in_our_words(sample):
    """Sizes that are equal are emptied together, as they may be one axis."""
    arrays = sample.arrays()
    for size in {n for a in arrays if a.dtype != np.uint64 for n in a.shape if n > 1}:
        parts = [empty(a, size) for a in arrays]
        mine, plain = answers(sample, parts, [parts], slopes=True)
        assert (mine is HetuError) == (plain is HetuError)
        if mine is HetuError and sample.op not in OF_SOME:  # the gradient of what is there is there
            assert answers(sample, parts, [parts])[1] is HetuError
        for got, wanted in zip(*(() if mine is HetuError else (mine[0], plain[0])), strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
        for got, right in zip(() if mine is HetuError else mine[0], references(sample, parts), strict=False):
            if got.shape == right.shape:
                np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-3)


@each_sample
@pytest.mark.sampled(8)
def test_special_numbers_go_through_all_passes_as_through_none(all_compiled, sample):
    arrays, rng = sample.arrays(), np.random.default_rng(0)
    if not any(a.dtype.kind == "f" for a in arrays):
        return
    feeds = [[rng.choice(some, a.shape) if a.dtype.kind == "f" else a for a in arrays] for some in NUMBERS]
    mine, plain = answers(sample, arrays, feeds)
    for got, wanted in ((g, w) for both in zip(mine, plain, strict=True) for g, w in zip(*both, strict=True)):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)


EVERY = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64"]
OF_TWO = "add subtract multiply floor_divide remainder maximum minimum equal not_equal less greater_equal".split()


def pairs_of_dtypes(limits: dict[str, np.ndarray]) -> tuple[list, dict]:
    """Functions of two numbers near the limits of each two dtypes, where they take them, and their feeds."""
    nodes, feed = [], {}
    for a, b in product(limits, limits):
        x, y = ht.placeholder(f"{a} beside {b}", (8, 1), a), ht.placeholder(f"{b} above {a}", (8,), b)
        for name in OF_TWO:
            with suppress(HetuError):
                nodes.append(OPS[name](x, y))
                feed |= {x: limits[a][:, None], y: limits[b]}
    return nodes, feed


@pytest.mark.usefixtures("meaning")
def test_two_dtypes_meet_in_one_however_they_are_computed():
    """NumPy's own functions would take float64 for an int32 beside a float32, and compare integers exactly."""
    limits = {"bool": np.array([True] * 8)}  # which divides
    for d in EVERY[1:6]:
        i = np.iinfo(d)
        limits[d] = np.array([i.max, i.max - 1, 1, 3, i.max // 2 + 1, i.min + 1, i.max // 3, 7], d)
    for d in EVERY[6:]:
        numbers = np.array([2.0**31, 1.5, 3, 16_777_216, -128, 0.1, 65504, 2.0**63])
        limits[d] = numbers.clip(max=np.finfo(d).max).astype(d)
    nodes, feed = pairs_of_dtypes(limits)
    assert len(nodes) > 800
    with np.errstate(all="ignore"):
        wanted = interpret(nodes, feed)
    for node, got, right in zip(nodes, ht.Executor(nodes).run(feed), wanted, strict=True):
        np.testing.assert_array_equal(got, right, err_msg=f"{node.op.name} of {[i.name for i in node.inputs]}")


PRODUCTS = {
    "matmul": (ht.matmul, (2, 5), (5, 3)),
    "linear": (lambda x, y: ht.linear(x, y, np.ones(3)), (2, 5), (5, 3)),
    "sums first": (lambda x, y: ht.einsum("ab,cd->c", x, y), (5, 7), (3, 6)),
    "a single sum": (lambda x, y: ht.einsum(",abc->b", y, x), (5, 7, 2), ()),
    "outer": (ht.outer, (5,), (3,)),
    "conv2d": (ht.conv2d, (2, 3, 5, 5), (4, 3, 3, 3)),
    "sampled_matmul": (lambda x, y: ht.sampled_matmul([0, 2], [1, 1], x, y), (3, 4), (2, 4)),
    "sparse_matmul": (lambda x, y: ht.sparse_matmul([0, 1, 0, 1], [1, 1, 0, 2], x, y, size=2), (4,), (3, 4)),
}


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("first", ["float32", "float64"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_floats_are_computed_in_the_wider(name, first):
    """Sums of one operand too: in the narrower they would lose digits which the result has."""
    (build, *shapes), rng = PRODUCTS[name], np.random.default_rng(0)
    dtypes = (first, "float64" if first == "float32" else "float32")
    arrays = [np.asarray(rng.random(s)).astype(d) for s, d in zip(shapes, dtypes)]
    made = [[ht.placeholder(f"x{k}", s, d) for k, (s, d) in enumerate(zip(shapes, ds))] for ds in (dtypes, ["f8"] * 2)]
    mixed, wide = (ht.Executor([build(*xs)], passes=[]).run(dict(zip(xs, arrays)))[0] for xs in made)
    np.testing.assert_allclose(mixed, wide, rtol=1e-14)
    np.testing.assert_allclose(ht.evaluate(build(*made[0]), dict(zip(made[0], arrays))), wide, rtol=1e-14)


AVERAGED = ["float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("dtype", AVERAGED)
def test_means_and_norms_are_not_lost_in_a_sum_that_overflows(dtype):
    """Of numbers near the limits of the dtype and of many ones; also how far they lie from the mean."""
    kind = np.iinfo(dtype) if "int" in dtype else np.finfo(dtype)
    most, low = (int(kind.max), int(kind.min)) if "int" in dtype else (60_000.0, -60_000.0)
    cases = [[most] * 3, [low] * 5, [most, low] * 4, [1] * 100_000, [most, most // 2, 0], [90, 110] * 40]
    for case in (np.array(c, dtype) for c in cases):
        x = ht.placeholder("x", case.shape, dtype)
        norms = [ht.norm(x, ord=ord) for ord in (2, 1, np.inf)]
        ends = [ht.logsumexp(x), ht.max(ht.softmax(x))]
        found = ht.Executor([ht.mean(x), ht.var(x), ht.mean(x, 0, keepdims=True), *norms, *ends]).run({x: case})
        exact = case.astype("longdouble")
        powers = np.exp(exact - exact.max()).sum()
        wanted = (
            exact.mean(),
            ((exact - exact.mean()) ** 2).mean(),
            exact.mean(keepdims=True),
            np.sqrt((exact**2).sum()),
            np.abs(exact).sum(),
            np.abs(exact).max(),
            exact.max() + np.log(powers),
            1 / powers,
        )
        assert {v.dtype.name for v in found} == {dtype if "float" in dtype else "float32"}
        for got, want in zip(found, wanted):
            with np.errstate(over="ignore"):
                want = want.astype(got.dtype)
            near = {"rtol": 4 * np.finfo(got.dtype).eps, "atol": 1e-30 if "int64" not in dtype else 1e26}
            np.testing.assert_allclose(got, want, **near, err_msg=str(case[:3]))


def _batch_norm(x, scale, bias):
    return ht.batch_norm(
        x, scale, bias, *(ht.variable(n, 0.0, (3,), x.dtype, trainable=False) for n in ("mean", "var"))
    )


SQUARED = [s for s in SAMPLES if s.op in ("layer_norm", "rms_norm", "group_norm", "avg_pool2d")]
SQUARED.append(Sample("batch_norm", _batch_norm, (real(6, 3, 5), real(3), real(3)), np.add))


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("sample", SQUARED, ids=lambda s: s.id)
def test_squares_and_sums_of_16_bits_do_not_overflow(sample):
    """Of numbers up to 40,000; also in gradients."""
    arrays = [(a * 20_000).astype("float16") for a in sample.arrays()]
    both = []
    for dtype in ("float16", "float64"):
        xs = [ht.placeholder(f"x{k}", a.shape, dtype) for k, a in enumerate(arrays)]
        y = as_tuple(sample.build(*xs))[0]
        slopes = ht.gradients(y, xs, ht.constant(np.resize([0.5, -1.0, 1.5, 2.0], y.shape).astype(dtype)))
        training = ht.optim.SGD(0.1).minimize(ht.sum(ht.variable("v", np.ones(1, "f"))))
        executor = ht.Executor([y, *slopes, training])
        both.append(executor.run(dict(zip(xs, (a.astype(dtype) for a in arrays))))[:-1])
    for got, right in zip(*both, strict=True):
        with np.errstate(over="ignore"):
            wanted = right.astype("float16").astype("float64")
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(got.astype("float64"), wanted, rtol=0.01, atol=0.01 * scale)
