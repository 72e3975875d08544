"""Augmentation: each step does what it says, by chances that follow from seed, epoch and sample and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError, ShapeError
from hetu.data import ArrayDataset, DataLoader, Mixup, Normalize, RandomCrop, RandomFlip
from hetu.dist import DataParallel, world

from ..dist.test_launch import heturun

RNG = np.random.default_rng(0)
IMAGES = RNG.random((2000, 2, 5, 4)).astype("float32") + 1  # no zeros: those come in from the sides
LABELS = RNG.integers(0, 3, 2000)
DATA = ArrayDataset(IMAGES[:52], LABELS[:52])
STEPS = [RandomCrop(2), RandomFlip(), Normalize([1.5, 1.4], 0.3), Mixup(3, alpha=0.4)]


def whole(*arrays: np.ndarray, transform, **options) -> tuple[np.ndarray, ...]:
    return next(iter(DataLoader(ArrayDataset(*arrays), len(arrays[0]), transform=transform, **options)))


def bytes_of(batches) -> list[bytes]:
    return [b"".join(a.tobytes() for a in batch) for batch in batches]


def moved(x: np.ndarray, down: int, right: int) -> np.ndarray:
    made = np.zeros_like(x)
    for i in range(x.shape[-2]):
        for j in range(x.shape[-1]):
            if 0 <= i + down < x.shape[-2] and 0 <= j + right < x.shape[-1]:
                made[..., i, j] = x[..., i + down, j + right]
    return made


def test_a_crop_moves_by_each_distance_as_often():
    found, classes = whole(IMAGES, IMAGES[:, 0], transform=RandomCrop(1, arrays=(0, 1)))
    count = dict.fromkeys(((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)), 0)
    for image, pixels, x in zip(found, classes, IMAGES):
        (move,) = (move for move in count if np.array_equal(image, moved(x, *move)))
        assert np.array_equal(pixels, moved(x[0], *move))
        count[move] += 1
    np.testing.assert_allclose([*count.values()], 2000 / 9, rtol=0.3)  # four deviations


def test_half_of_the_images_are_turned():
    found, _ = whole(IMAGES, LABELS, transform=[RandomFlip()])
    turned = (found == IMAGES[..., ::-1]).all(axis=(1, 2, 3))
    assert np.array_equal(found[~turned], IMAGES[~turned]) and 900 < turned.sum() < 1100


def test_channels_are_scaled_by_their_own_mean():
    (found,) = whole(IMAGES, transform=Normalize(IMAGES.mean(axis=(0, 2, 3)), IMAGES.std(axis=(0, 2, 3))))
    np.testing.assert_allclose(found.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=(0, 2, 3)), 1, atol=1e-5)
    (found,) = whole(np.full((2, 3, 3), 7, "uint8"), transform=Normalize(5, 4))
    assert found.dtype == "float32" and (found == 0.5).all()


@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0])
def test_mixup_draws_partners_evenly_and_shares_from_a_beta(alpha):
    """Of data that are unit vectors a mixture shows its shares."""
    rows, epochs = 400, 25
    y = RNG.integers(0, 3, rows)
    loader = DataLoader(ArrayDataset(np.eye(rows), y), rows, transform=Mixup(3, alpha=alpha), prefetch=0)
    shares, partners = [], np.zeros(rows)
    for _ in range(epochs):
        ((x, soft),) = loader
        np.testing.assert_allclose(x.sum(axis=1), 1)
        np.testing.assert_allclose(soft, x @ np.eye(3)[y], atol=1e-6)
        shares.append(x.diagonal())
        partners += ((x - np.diag(x.diagonal())) > 0).sum(axis=0)
    quantiles = np.linspace(0.02, 0.98, 49)
    wanted = np.quantile(np.random.default_rng(1).beta(alpha, alpha, 10**6), quantiles)
    np.testing.assert_allclose(np.quantile(shares, quantiles), wanted, atol=0.03)
    assert partners.max() < 60 and partners.min() > 5  # each some 25 times; less where a share of 1 hides it


@pytest.mark.parametrize("kind", ["uint8", "int32", "bool"])
def test_images_that_are_no_floats_are_mixed_as_floats(kind):
    images = (50 * IMAGES[:40]).astype(kind)
    found, _ = whole(images, LABELS[:40], transform=Mixup(3, alpha=1.0))
    wanted, _ = whole(images.astype("float32"), LABELS[:40], transform=Mixup(3, alpha=1.0))
    assert found.dtype == "float32" and np.array_equal(found, wanted)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_sample_becomes_does_not_follow_from_its_batch(prefetch):
    options = {"shuffle": True, "seed": 5, "transform": STEPS, "prefetch": prefetch}

    def samples(loader):
        return {sample for x, y in loader for sample in bytes_of(zip(x[:, None], y[:, None]))}

    one = DataLoader(DATA, 52, **options)
    wanted = samples(one)
    assert len(wanted) == 52
    for size, ranks in ((10, 1), (10, 3), (52, 3)):
        parts = [samples(DataLoader(DATA, size, shard=(rank, ranks), **options)) for rank in range(ranks)]
        assert set.union(*parts) == wanted
    assert not samples(one) & wanted  # the next epoch
    assert not samples(DataLoader(DATA, 10, **options | {"seed": 6})) & wanted


@pytest.mark.parametrize("stop", [1, 4, 8])
def test_a_run_resumed_within_an_epoch_goes_on_bit_for_bit(stop):
    def loader(seed=3):
        return DataLoader(DATA, 10, shuffle=True, seed=seed, transform=STEPS)

    unbroken = loader()
    wanted = bytes_of([*unbroken, *unbroken])
    first, seen = loader(), []
    while len(seen) < stop:
        for batch in first:
            seen.append(batch)
            if len(seen) == stop:
                state = first.state()
                break
    second = loader(seed=0)
    second.load_state(state)
    seen += [*second]
    if len(seen) < len(wanted):
        seen += [*second]
    assert bytes_of(seen) == wanted


MISTAKES = [
    (lambda: RandomCrop(0), ArgumentError, "padding=0"),
    (lambda: Normalize(0.0, [1.0, 0.0]), ArgumentError, "a deviation is above 0"),
    (lambda: Mixup(3, alpha=2.0), ArgumentError, "alpha=2.0"),
    (lambda: DataLoader(DATA, 3, transform=[4]), DataError, r"transform=\[4\]"),
    (
        lambda: whole(LABELS, transform=RandomFlip()),
        ShapeError,
        r"array 0 .* to be images, and it has the shape \(2000,",
    ),
    (lambda: whole(IMAGES, transform=RandomCrop(1, (1,))), ShapeError, "array 1 .* only 1 arrays"),
    (
        lambda: whole(IMAGES, transform=Normalize([1, 2, 3], 1)),
        ShapeError,
        r"3 channels, and images of shape \(2, 5, 4\)",
    ),
    (lambda: whole(IMAGES, LABELS, transform=Mixup(2)), DataError, r"mixup of 2 classes got .*int64\[2000\]"),
    (lambda: whole(IMAGES, transform=lambda batch, draws: batch[0]), DataError, "step 1 .*<lambda>, returned ndarray"),
    (lambda: whole(IMAGES, transform=lambda batch, draws: (batch[0][:3],)), DataError, r"arrays of shapes \[\(3, 2, 5"),
]


@pytest.mark.parametrize(("make", "error", "said"), MISTAKES, ids=[said for *_, said in MISTAKES])
def test_mistakes_are_told(make, error, said):
    with pytest.raises(error, match=said) as caught:
        make()
    assert caught.value.fix


def run(strategy=None, shard=False) -> tuple[list[tuple[np.ndarray, ...]], list[float], list[tuple[np.ndarray, ...]]]:
    """The batches of two epochs, the losses of a network that learns from them, and what a resumed loader hands out."""
    loader, again = (DataLoader(DATA, 10, shuffle=True, seed=s, shard=shard, transform=STEPS) for s in (3, 0))
    x, t = ht.placeholder("x", (None, 2, 5, 4)), ht.placeholder("t", (None, 3))
    with ht.scope("run"):  # the first values follow from the name
        y = ht.nn.Linear(40, 3)(ht.flatten(x, 1))
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    executor = ht.Executor([loss, ht.optim.Adam(0.05).minimize(loss)], strategy=strategy)
    batches, losses, state = [], [], {}
    for batch in [*loader, *loader]:
        batches.append(batch)
        losses.append(float(executor.run(dict(zip((x, t), batch)))[0]))
    for n, _ in enumerate(loader):
        if n == 2:
            state = loader.state()
            break
    again.load_state(state)
    return batches, losses, [*again]


@pytest.mark.nightly
@pytest.mark.usefixtures("meaning")
def test_two_ranks_see_what_one_process_sees(tmp_path):
    job = heturun("-w", 2, "python", "-m", "tests.data.test_augment", tmp_path)
    assert job.returncode == 0, job.stderr
    batches, losses, resumed = run()
    parts = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    for part in parts:
        np.testing.assert_allclose(part["losses"], losses, rtol=1e-5)
    for n, batch in enumerate([*batches, *resumed]):
        for name, array in zip("xt", batch):
            found = np.concatenate([part[f"{name}{n}"] for part in parts])
            assert found.tobytes() == array.tobytes()


if __name__ == "__main__":
    batches, losses, resumed = run(DataParallel(local_feeds=True), shard=True)
    named = {f"{name}{n}": a for n, batch in enumerate([*batches, *resumed]) for name, a in zip("xt", batch)}
    np.savez(Path(sys.argv[1]) / f"{world().rank}.npz", losses=losses, **named)
