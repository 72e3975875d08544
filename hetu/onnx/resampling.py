"""Operators of ONNX that read images between their pixels: at places that are known, or that a node gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.operators import cast_to
from ..core.types import Dim, normalize_axis
from ..ops.reduction import as_floats
from .known import bounded
from .meaning import KnownArray, meaning
from .shapes import whole

# -- known places ----------------------------------------------------------------------------------------------------

ByDistance = Callable[[np.ndarray], np.ndarray]  # the weight of a pixel by its distance
NEAREST: dict[str, ByDistance] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def cubic(distance: np.ndarray, a: float) -> np.ndarray:
    d = np.abs(distance)
    near, far = cubic_parts(d, a)
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def cubic_parts(d: Any, a: float) -> tuple[Any, Any]:
    """R. Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981: within 1 of a pixel, and 2."""
    return ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a


def places(mode: str, old: int, new: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
    """Where the new pixels of an axis lie among the old ones."""
    y, length = np.arange(new, dtype=float), scale * old
    first, last = roi
    centers = (y + 0.5) / scale - 0.5
    if mode == "align_corners":
        return y * (old - 1) / (length - 1 or 1)
    if mode == "tf_crop_and_resize":
        steps = y + 0.5 if length == 1 else y / (length - 1)
        return (first + steps * (last - first)) * (old - 1)
    if mode == "pytorch_half_pixel" and length == 1:
        return np.full(new, -0.5)
    if mode == "half_pixel_symmetric":
        return centers + old / 2 * (1 - new / length)
    known = {"asymmetric": y / scale, "tf_half_pixel_for_nn": (y + 0.5) / scale}
    known |= dict.fromkeys(("half_pixel", "pytorch_half_pixel"), centers)
    return known[mode]


def weights(at: np.ndarray, old: int, kernel: ByDistance, reach: int, stretch: float, inside: bool) -> np.ndarray:
    """The (new, old) matrix whose rows weigh the pixels around places; beyond an end stands its last pixel again."""
    bounded(len(at), old)
    beyond = math.ceil(reach / stretch) + 1
    shares = kernel((np.arange(-beyond, old + beyond) - at[:, None]) * stretch)
    made = shares[:, beyond:-beyond].copy()
    if not inside:
        made[:, 0] += shares[:, :beyond].sum(1)
        made[:, -1] += shares[:, -beyond:].sum(1)
    whole: np.ndarray = made / np.maximum(made.sum(1, keepdims=True), 1e-9)  # of none where nothing is near
    return whole


@meaning("Resize")
def resize(
    x: Node,
    roi: KnownArray = None,
    scales: KnownArray = None,
    sizes: KnownArray = None,
    *,
    antialias: int = 0,
    axes: tuple[int, ...] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Node:
    chosen = [normalize_axis(a, x.ndim) for a in axes] if axes is not None else list(range(x.ndim))
    olds: list[Any] = [x.shape[axis] for axis in chosen]
    if news := whole(sizes):
        factors = [1.0 if new == old else new / int(old) for old, new in zip(olds, news)]
        if keep_aspect_ratio_policy != "stretch":
            factors = [(min if keep_aspect_ratio_policy == "not_larger" else max)(factors)] * len(chosen)
            news = [int(f * old + 0.5) for old, f in zip(olds, factors)]
    else:
        factors = whole(scales)
        news = [old * int(f) if f == int(f) else int(f * int(old)) for old, f in zip(olds, factors)]
    ends = whole(roi) or [0.0] * len(chosen) + [1.0] * len(chosen)
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    cubes = partial(cubic, a=cubic_coeff_a)
    kernels: dict[str, Any] = {"linear": (lambda d: np.maximum(1 - np.abs(d), 0), 1), "cubic": (cubes, 2)}
    for k, (axis, scale, old, new) in enumerate(zip(chosen, factors, olds, news)):
        crop = ends[k], ends[len(chosen) + k]
        if new == old and math.isclose(scale, 1) and not (crops and crop != (0, 1)):
            continue
        if isinstance(old, Dim) and mode == "nearest":  # what is so of some sizes is so of all
            few = places(coordinate_transformation_mode, 8, 8 * int(scale), scale, crop)
            if np.array_equal(NEAREST[nearest_mode](few), np.arange(8).repeat(int(scale))):
                x = ops.repeat(x, int(scale), axis=axis)
                continue
        bounded(new)
        at = places(coordinate_transformation_mode, int(old), new, scale, crop)
        if mode == "nearest":
            x = ops.take(x, np.clip(NEAREST[nearest_mode](at), 0, old - 1).astype(int), axis=axis)
        else:
            (kernel, reach), stretch = kernels[mode], min(scale, 1) if antialias else 1
            matrix = weights(at, old, kernel, reach, stretch, bool(exclude_outside))
            order = [*range(axis), *range(axis + 1, x.ndim), axis]  # its own axis last
            turned = ops.permute_dims(as_floats(x), order)
            x = ops.permute_dims(turned @ matrix.T.astype(turned.dtype), np.argsort(order).tolist())
        if crops and (outside := (at < 0) | (at > old - 1)).any():
            x = ops.where(outside.reshape(-1, *(1,) * (x.ndim - axis - 1)), extrapolation_value, x)
    return x


# -- places that a node gives ------------------------------------------------------------------------------------------


def reflected(at: Node, low: float, high: float) -> Node:
    """Places within [low, high], turned back at either end as often as it takes."""
    way = ops.abs(at - low) % (2 * (high - low)) if high > low else at * 0
    return low + ops.where(way > high - low, 2 * (high - low) - way, way)


@meaning("GridSample")
def grid_sample(
    x: Node, grid: Node, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Node:
    """x (n, c, *sizes) at places (n, *new, axes), from -1 to 1 along each axis, the last axis first."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    sizes = [int(s) for s in x.shape[2:]]
    n, count, new = x.shape[0], len(sizes), grid.shape[1:-1]
    pixels, spots = ops.reshape(x, (n, x.shape[1], math.prod(sizes))), math.prod(new)
    grid = cast_to(ops.reshape(grid, (n, 1, spots, count)), np.dtype("float32"))
    beside = []
    for axis, size in enumerate(sizes):
        span = grid[..., count - 1 - axis] + 1
        at = span * ((size - 1) / 2) if align_corners else (span * size - 1) / 2
        ends = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        beside.append(list(_beside(at, size, ends, mode, padding_mode)))
    parts = []
    for chosen in itertools.product(*beside):
        pixel, share, inside = chosen[0]
        for (place, weight, there), size in zip(chosen[1:], sizes[1:]):
            pixel, share, inside = pixel * size + place, share * weight, ops.logical_and(inside, there)
        place = ops.broadcast_to(cast_to(pixel, np.dtype("int64")), (n, x.shape[1], spots))
        found = ops.take_along_axis(pixels, place, axis=2)
        parts.append(ops.where(inside, found * cast_to(share, x.dtype), 0))
    return ops.reshape(reduce(OPS["add"], parts), (n, x.shape[1], *new))


def _beside(
    at: Node, size: int, ends: tuple[float, float], mode: str, padding: str
) -> Iterator[tuple[Node, Node, Node]]:
    """The pixels that count for places along one axis, their shares, and whether they lie inside."""
    low = ops.floor(at) if mode != "nearest" else ops.round(at)
    for step in {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}[mode]:
        pixel = low + step
        distance = ops.abs(at - pixel)
        near, far = cubic_parts(distance, -0.75)
        share = {"nearest": distance * 0 + 1, "linear": 1 - distance, "cubic": near if step in (0, 1) else far}[mode]
        pixel = ops.floor(reflected(pixel, *ends)) if padding == "reflection" else pixel
        clipped = ops.clip(pixel, 0, size - 1)
        inside = ops.equal(pixel, clipped) if padding == "zeros" else ops.equal(clipped, clipped)
        yield clipped, share, inside
