"""Pooling in C against the forward functions, for every kernel, stride, frame and layout, job by job too."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall

from .divided import job_by_job

pytestmark = pytest.mark.compiled
WINDOWS = [  # kernel, stride, padding
    ((2, 2), (2, 2), ((0, 0), (0, 0))),
    ((2, 2), (1, 1), ((1, 0), (0, 1))),
    ((3, 3), (1, 1), ((1, 1), (1, 1))),
    ((3, 3), (2, 2), ((1, 1), (1, 1))),
    ((3, 3), (3, 3), ((0, 0), (0, 0))),
    ((3, 2), (1, 3), ((2, 1), (1, 0))),
    ((5, 5), (2, 1), ((2, 2), (4, 4))),
    ((1, 1), (4, 2), ((0, 0), (0, 0))),
]
SIZES = [(8, 8), (9, 13), (6, 40), (5, 5), (33, 7)]
LAST = {"channels last": (0, 2, 3, 1), "all channels last": (2, 3, 0, 1)}
LAYOUTS = ["rows", *LAST, "cut"]


def laid(x: np.ndarray, layout: str) -> np.ndarray:
    """The same numbers in another order of memory."""
    axes = LAST.get(layout, (0, 1, 2, 3))
    return x.transpose(axes).copy().transpose(np.argsort(axes))


def images(size, layout: str, dtype: str, special: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (2, 19 if layout in LAST else 3, size[0], 2 * size[1])
    x = np.round(rng.standard_normal(shape), 1).astype(dtype)  # with equal neighbors
    if special:
        x[0, 0, ::3, ::4], x[1, 2, 1:4, 1:5], x[0, 1] = np.nan, np.inf, -np.inf
    if layout in LAST:
        return laid(x[..., : size[1]], layout)
    return x[..., ::2] if layout == "cut" else x[..., : size[1]].copy()


def check(name: str, arrays, layout: str = "rows", **attrs) -> None:
    with np.errstate(all="ignore"):
        want = OPS[name].forward(np, *arrays, **attrs)
    whole = want if isinstance(want, tuple) else (want,)
    out = tuple(laid(np.empty_like(w, order="C"), layout) for w in whole)
    *copies, call = OPS[name].bound(np, out if isinstance(want, tuple) else out[0], arrays, attrs)
    assert isinstance(call, CCall)
    runs = [call, lambda: job_by_job(call)]
    if call.function in ("max_pool", "avg_pool"):
        runs.append(CCall(call.source, "pool_plainly", call.words, jobs=call.jobs))
    for run in runs:
        for o in out:
            o.fill(77)
        for copy in copies:
            copy()
        run()
        for o, w in zip(out, whole):
            np.testing.assert_allclose(o, w, rtol=1e-5 if o.dtype == np.float32 else 1e-13, atol=1e-6)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel, stride, padding", WINDOWS, ids=str)
@pytest.mark.sampled(20)
def test_pooling(kernel, stride, padding, layout, dtype, special):
    window = {"kernel": kernel, "stride": stride, "padding": padding}
    for size in SIZES:
        x = images(size, layout, dtype, special)
        best, taps = OPS["max_pool2d"].forward(np, x, **window)
        for made in {layout, "rows"} - {"cut"}:  # where images are laid out otherwise, results may be or not
            best, taps = laid(best, made), laid(taps, made)
            check("max_pool2d", [x], made, **window)
            check("max_pool2d_dx", [best, taps], layout, size=size, **window)
            if not special:
                check("avg_pool2d", [x], made, **window)
                check("avg_pool2d_dx", [best], layout, size=size, **window)
                check("max_pool2d_pick", [x, taps], made, **window)


def test_no_images():
    for shape in ((0, 3, 4, 4), (2, 0, 4, 4)):
        check("max_pool2d", [np.ones(shape, np.float32)], kernel=(2, 2), stride=(2, 2), padding=((0, 0), (0, 0)))
