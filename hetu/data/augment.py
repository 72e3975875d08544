"""Augmentation: what a loader does to its batches, anew in each epoch: crops, flips, scaling, mixtures of two samples.

A step is a function `(batch, draws) -> batch`; `DataLoader(transform=[...])` applies them in turn. What a sample
becomes follows from the loader's seed, the epoch and the sample's position in the data set alone. So it is the same in
a batch of any size, on any number of ranks, and after a run was resumed. Left out: turns, changes of size or color.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers import AnswersCalls
from ..core.errors import ArgumentError, DataError, ShapeError
from ..ops.random import GOLDEN, words_of
from ..ranges import AtLeast1, Share
from .dataset import Batch, Dataset

Positions = NDArray[np.integer]


class Draws(AnswersCalls):
    """What a step knows of the samples of its batch, and the random numbers of each.

    Args:
        rows: their positions in the data set.
        key: the loader's seed, the epoch and the number of the step.
        total: how many samples the data set has.
        before: makes samples of positions, as they come to this step.
    """

    def __init__(
        self, rows: Positions, key: tuple[int, int, int], total: int, before: Callable[[Positions], Batch]
    ) -> None:
        self.rows, self.key, self.total, self.before = rows, key, total, before

    def uniform(self, count: int = 1) -> NDArray[np.float64]:
        """`count` numbers from 0 to below 1 for each sample: (count, samples).

        They are counted, not drawn, by SplitMix64 (G. Steele et al., "Fast Splittable Pseudorandom Number Generators",
        OOPSLA 2014).

        >>> one, two = (Draws(np.array(rows), (0, 3, 1), 9, lambda rows: ()) for rows in ([4, 8], [8]))
        >>> bool(one.uniform(2)[1, 1] == two.uniform(2)[1, 0])
        True
        """
        words = np.zeros(1, "<u8")
        for part in (*self.key, np.asarray(self.rows)[None, :], np.arange(1, count + 1)[:, None]):
            words = words_of(np.asarray(part), words + GOLDEN)
        return (words >> np.uint64(11)).astype("float64") * 2.0**-53


Transform = Callable[[Batch, Draws], Batch]


def through(dataset: Dataset, steps: Sequence[Transform], seed: int, epoch: int, rows: Positions) -> Batch:
    """The samples at `rows`, taken through all steps.

    >>> from hetu.data import ArrayDataset
    >>> data = ArrayDataset(np.arange(4.0))
    >>> through(data, [lambda batch, draws: (2 * batch[0],)], 0, 0, np.array([3, 1]))
    (array([6., 2.]),)
    """
    if not steps:
        return dataset[rows]

    def before(rows: Positions) -> Batch:
        return through(dataset, steps[:-1], seed, epoch, rows)

    batch = before(rows)
    made = steps[-1](batch, Draws(rows, (seed % 2**64, epoch, len(steps)), len(dataset), before))
    if not isinstance(made, tuple) or any(np.shape(array)[:1] != (len(rows),) for array in made):
        got = (
            f"arrays of shapes {[np.shape(array) for array in made]}"
            if isinstance(made, tuple)
            else type(made).__name__
        )
        name = getattr(steps[-1], "__name__", None) or type(steps[-1]).__name__
        raise DataError(
            f"step {len(steps)} of transform=, {name}, returned {got}",
            fix=f"return a tuple of arrays, each of as many samples as it was given (here {len(rows)})",
        )
    return made


def _images(arrays: Sequence[int]) -> tuple[int, ...]:
    """Which arrays of a batch are images."""
    found = tuple(arrays)
    if not found or len(set(found)) != len(found):
        raise ArgumentError(
            f"arrays={found}", fix="name the arrays of a batch that are images, each once, such as (0,)"
        )
    return found


class RandomCrop(AnswersCalls):
    """Moves each image by up to `padding` pixels up or down, and left or right; zeros come in.

    As if it was padded by zeros on all sides and cut out again where chance will: K. He et al., CVPR 2016, section 4.2.
    `arrays` are those of a batch that are images (n, ..., height, width), and all are moved alike: an image and the
    classes of its pixels.

    >>> from hetu.data import ArrayDataset, DataLoader
    >>> loader = DataLoader(ArrayDataset(np.ones((4, 3, 3))), 4, seed=1, transform=RandomCrop(1))
    >>> next(iter(loader))[0][3].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, padding: int, arrays: Sequence[int] = (0,)) -> None:
        if type(padding) is not int or padding < 1:
            raise ArgumentError(f"padding={padding!r}", fix="move by a whole number of pixels from 1 up")
        self.padding, self.arrays = padding, _images(arrays)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        down, right = (draws.uniform(2) * (2 * self.padding + 1)).astype(int)
        return _changed(batch, self.arrays, lambda x: self._cut(x, down, right))

    def _cut(self, x: NDArray[Any], down: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[Any]:
        p, (height, width) = self.padding, x.shape[-2:]
        padded = np.zeros((*x.shape[:-2], height + 2 * p, width + 2 * p), x.dtype)  # twice as fast as `np.pad`
        padded[..., p:-p, p:-p] = x
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(-2, -1))
        return windows[np.arange(len(x)), ..., down, right, :, :]


class RandomFlip(AnswersCalls):
    """Mirrors half of the images, left to right; `arrays` as in `RandomCrop`.

    >>> from hetu.data import ArrayDataset, DataLoader
    >>> loader = DataLoader(ArrayDataset(np.arange(8.0).reshape(4, 1, 2)), 4, transform=RandomFlip())
    >>> next(iter(loader))[0][:, 0].tolist()
    [[0.0, 1.0], [3.0, 2.0], [5.0, 4.0], [6.0, 7.0]]
    """

    def __init__(self, arrays: Sequence[int] = (0,)) -> None:
        self.arrays = _images(arrays)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        turned = draws.uniform()[0] < 0.5

        def flip(x: NDArray[Any]) -> NDArray[Any]:
            made = x.copy()
            made[turned] = x[turned, ..., ::-1]
            return made

        return _changed(batch, self.arrays, flip)


class Normalize(AnswersCalls):
    """(x - mean) / std of the images x (n, ..., height, width), which become float32 if they are not floats.

    `mean` and `std` are numbers, or one number a channel of images (n, channels, height, width).

    >>> from hetu.data import ArrayDataset, DataLoader
    >>> loader = DataLoader(ArrayDataset(np.full((2, 1, 1), 3, "uint8")), 2, transform=Normalize(1.0, 4.0))
    >>> next(iter(loader))[0].ravel().tolist()
    [0.5, 0.5]
    """

    def __init__(self, mean: ArrayLike, std: ArrayLike) -> None:
        self.mean, self.std = np.asarray(mean, "float64"), np.asarray(std, "float64")
        if max(self.mean.ndim, self.std.ndim) > 1 or not (
            np.isfinite(self.mean).all() and np.isfinite(self.std).all() and (self.std > 0).all()
        ):
            raise ArgumentError(
                f"mean={mean!r:.40}, std={std!r:.40}", fix="pass numbers, or one a channel; a deviation is above 0"
            )

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        return _changed(batch, (0,), self._scaled)

    def _scaled(self, x: NDArray[Any]) -> NDArray[Any]:
        x = _floats(x)
        channels = {self.mean.size, self.std.size} - {1}
        if channels and (x.ndim < 4 or channels != {x.shape[-3]}):
            raise ShapeError(
                f"means and deviations of {max(channels)} channels, and images of shape {x.shape[1:]}",
                fix="pass one number for all, or one a channel of images (n, channels, height, width)",
            )
        mean, std = (
            a.astype(x.dtype).reshape(-1, 1, 1) if a.size > 1 else a.astype(x.dtype) for a in (self.mean, self.std)
        )
        return (x - mean) / std


class Mixup(AnswersCalls):
    """Each sample is mixed with another, and its class with that one's: floats (n, classes) take the place of ids.

    H. Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018, section 2: x = a x_i + (1 - a) x_j, and so
    y, with a from Beta(alpha, alpha) for each sample. The other is any of the data set, not of the batch, as it is in
    this epoch before this step. So the steps before are done twice as often. `softmax_cross_entropy` takes such y. An x
    that is no float becomes float32.

    >>> from hetu.data import ArrayDataset, DataLoader
    >>> data = ArrayDataset(np.arange(4.0), [0, 1, 0, 1])
    >>> x, y = next(iter(DataLoader(data, 4, transform=Mixup(2, alpha=1.0))))
    >>> y.dtype, y.sum(axis=1).tolist()
    (dtype('float32'), [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, classes: AtLeast1, alpha: Share = 0.2) -> None:
        if not 0 < alpha <= 1:
            raise ArgumentError(f"alpha={alpha!r}", fix="pass a number above 0 and at most 1, such as 0.2")
        self.classes, self.shares = classes, _beta_quantiles(alpha)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        chance, other = draws.uniform(2)
        share = np.interp(np.minimum(chance, 1 - chance), *self.shares)
        share = np.where(chance < 0.5, share, 1 - share)
        others = draws.before((other * draws.total).astype(int))
        (x, y), (also_x, also_y) = ((arrays[0], self._one_hot(arrays[-1])) for arrays in (batch, others))
        return _mix(x, also_x, share), *batch[1:-1], _mix(y, also_y, share)

    def _one_hot(self, y: NDArray[Any]) -> NDArray[np.float32]:
        if y.dtype.kind not in "iu" or y.ndim != 1 or not ((y >= 0) & (y < self.classes)).all():
            raise DataError(
                f"mixup of {self.classes} classes got a last array {y.dtype}{list(y.shape)} with {np.unique(y)[-3:]}",
                fix=f"hand it class ids (n,) from 0 to {self.classes - 1}, as the last array of a batch",
            )
        return (y[:, None] == np.arange(self.classes)).astype("float32")


def _mix(x: NDArray[Any], other: NDArray[Any], share: NDArray[np.float64]) -> NDArray[Any]:
    x = _floats(x)
    share = share.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
    return share * x + (1 - share) * other.astype(x.dtype)


def _floats(x: NDArray[Any]) -> NDArray[Any]:
    return x if x.dtype.kind == "f" else x.astype("float32")


def _beta_quantiles(alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Chances up to 1/2, and what a number of Beta(alpha, alpha) is below with them; beyond 1/2 it mirrors that.

    The integral of t^(alpha - 1) (1 - t)^(alpha - 1) dt is that of (1 - t)^(alpha - 1) du / alpha with u = t^alpha,
    which has no pole at 0.
    """
    t = np.linspace(0, 0.5**alpha, 4097) ** (1 / alpha)
    density = (1 - t) ** (alpha - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return below * (0.5 / below[-1]), t


def _changed(batch: Batch, arrays: Sequence[int], change: Callable[[NDArray[Any]], NDArray[Any]]) -> Batch:
    """`batch` with `change` of those of its arrays that are images."""
    made = list(batch)
    for k in arrays:
        if not -len(made) <= k < len(made) or made[k].ndim < 3:
            got = f"only {len(made)} arrays" if not -len(made) <= k < len(made) else f"the shape {made[k].shape}"
            raise ShapeError(
                f"array {k} of a batch is to be images, and it has {got}", fix="images are (n, ..., height, width)"
            )
        made[k] = change(made[k])
    return tuple(made)
