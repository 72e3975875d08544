"""Convolutions and batch normalization with the channels last, bound in many pieces, against their plain forms."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import OPS
from hetu.cpu_kernels import batch_sweeps, conv_last, lanes, openblas, winograd


@pytest.fixture(params=(1, 2))
def threads(request):
    """BLAS with one thread, or with two and as many lanes."""
    before = openblas.get_threads()
    if before is None:
        pytest.skip("no BLAS to be told")
    openblas.set_threads(request.param)
    yield request.param
    openblas.set_threads(before)


def bound(name, like, *arrays, **attrs):
    """What the calls of an operator write over NaN, and their number."""
    out = tuple(np.full_like(a, np.nan) for a in like) if isinstance(like, tuple) else np.full_like(like, np.nan)
    calls = OPS[name].bound(np, out, arrays, attrs, Scratch())
    for call in calls:
        call()
    return out, len(calls)


SIZES = [(8, 8, 3, 32, 40), (7, 9, 2, 40, 32), (2, 3, 1, 32, 32), (17, 5, 3, 33, 32), (6, 7, 2, 3, 33)]
PADS = [((1, 1), (1, 1)), ((0, 0), (0, 0)), ((2, 0), (1, 2)), ((2, 2), (2, 2))]


@pytest.mark.parametrize("window", [(3, (1, 1)), (3, (2, 2)), (1, (2, 2)), (2, (1, 2))])
def test_pieces_of_any_size_make_the_same_convolution(window, threads, monkeypatch):
    """Borders, odd sizes and pieces of a few pixels; two pieces of more than one share a lane, and its sums."""
    (kernel, stride), rng, made = window, np.random.default_rng(0), 0
    for module, name in (
        (winograd, "CHUNK"),
        (winograd, "LEAST_TILES"),
        (winograd, "LEAST_KERNEL"),
        (winograd, "LEAST_PLACES"),
        (conv_last, "CHUNK"),
        (conv_last, "LEAST_COPY"),
        (conv_last, "LEAST_ROWS"),
    ):
        monkeypatch.setattr(module, name, 1)
    for (h, w, n, c, o), pads in [(s, p) for s in SIZES for p in PADS]:
        if min(h + sum(pads[0]), w + sum(pads[1])) < kernel:
            continue
        x, k = rng.standard_normal((h, w, n, c)), rng.standard_normal((o, c, kernel, kernel))
        attrs = {"stride": stride, "padding": pads}
        y = OPS["conv2d_last"].forward(np, x, k, **attrs)
        g = rng.standard_normal(y.shape)
        for name, arrays, more in (
            ("conv2d_last", (x, k), {}),
            ("conv2d_last_dx", (g, k), {"size": (h, w)}),
            ("conv2d_last_dw", (x, g), {"kernel": (kernel, kernel)}),
        ):
            plain = OPS[name].forward(np, *arrays, **attrs, **more)
            out, count = bound(name, plain, *arrays, **attrs, **more)
            np.testing.assert_allclose(
                out, plain, rtol=1e-12, atol=1e-12 * np.abs(plain).max(), err_msg=f"{name} {pads}"
            )
            made += count
    assert made > 0


@pytest.mark.parametrize("shape", [(5, 7, 3, 33), (4, 4, 8, 32), (1, 1, 9, 5), (301, 4)])
def test_sweeps_over_pieces_make_the_same_normalization(shape, threads, monkeypatch):
    monkeypatch.setattr(batch_sweeps, "PIECE", 256)
    monkeypatch.setattr(batch_sweeps, "WIDE", 100)
    rng = np.random.default_rng(1)
    x, g = rng.standard_normal((2, *shape)) * 3 + 50
    scale, bias = rng.standard_normal((2, shape[-1]))
    axis = {"axis": len(shape) - 1}
    _, mean, var = OPS["batch_norm_train"].forward(np, x, scale, bias, **axis)
    for name, arrays in (
        ("batch_norm_train", (x, scale, bias)),
        ("batch_norm_dx", (g - 50, x, scale, mean, var)),
    ):
        attrs = {"epsilon": 1e-5, **axis}
        plain = OPS[name].forward(np, *arrays, **attrs)
        out, _ = bound(name, plain, *arrays, **attrs)
        for a, b in zip(out, plain):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)


def test_variance_is_exact_far_from_zero():
    """Squares are summed around the mean of each piece: around 0 nothing would be left of the variance."""
    x = np.random.default_rng(2).standard_normal((4096, 32)).astype(np.float32) + np.float32(1000)
    (_, _, var), _ = bound("batch_norm_train", (x, x[0], x[0]), x, x[0], x[0], axis=1, epsilon=1e-5)
    np.testing.assert_allclose(var, x.astype(np.float64).var(0), rtol=1e-5)


def test_steps_run_with_a_small_buffer_that_stays_theirs():
    """NumPy copies rows that are shorter than half of its buffer before it computes; the caller keeps his own size."""
    before = np.getbufsize()
    executor = ht.Executor([ht.placeholder("x", (2,)) + 1])
    assert executor.quiet.run(np.getbufsize) < np.getbufsize() == before


def factors(m, k, n):
    """Two factors and a start at each of the 16 places."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal((16, *shape)) for shape in ((m, k), (k, n), (m, n))]


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize(("shape", "calls"), [((512, 64, 64), 3), ((512, 128, 128), 1)])
def test_products_of_small_matrices_are_cut_to_what_blas_does_not_pack(shape, calls, threads):
    a, b, out = factors(*shape)
    made = winograd._products(a, b, out)
    for call in made:
        call()
    assert len(made) == calls
    np.testing.assert_allclose(out, a @ b, atol=1e-12)


@pytest.mark.parametrize(("shape", "calls"), [((64, 512, 64), 6), ((64, 100, 64), 2), ((128, 128, 128), 16)])
def test_products_are_added_to_what_is_there(shape, calls):
    """Small ones aside, by as many calls as there are parts of them; others by BLAS, place by place."""
    a, b, start = factors(*shape)
    out, aside = start.copy(), None if calls == 16 else np.full_like(start, np.nan)
    made = winograd._added(a, b, out, aside)
    for call in made:
        call()
    assert len(made) == calls
    np.testing.assert_allclose(out, a @ b + start, atol=1e-12)


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_the_only_piece_of_an_image_is_cut_along_images_and_places(threads):
    """Kernels; tiles, products and results: four divided calls, which write what one thread does."""
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((4, 4, 64, 128)), rng.standard_normal((128, 128, 3, 3))
    attrs = {"stride": (1, 1), "padding": ((1, 1), (1, 1))}
    out = np.empty_like(x)
    calls = OPS["conv2d_last"].bound(np, out, (x, w), attrs, Scratch())
    assert [*map(lanes.is_divided, calls)] == [True] * 4
    for call in calls:
        call()
    np.testing.assert_allclose(out, OPS["conv2d_last"].forward(np, x, w, **attrs), atol=1e-10)
