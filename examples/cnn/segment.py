"""Tell for each pixel of a picture what is there: `python examples/cnn/segment.py`.

Two clothes lie on a canvas, the second over the first: nothing, or one of ten kinds, is at each pixel. O. Ronneberger
et al., "U-Net", MICCAI 2015. The loader moves and turns a picture and the classes of its pixels alike. Ignored on
purpose: pixels near an edge count like all others.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.models.vision import unet
from hetu.script import Script, positive

SIZE, KINDS = 40, 11  # of a canvas in pixels; nothing is kind 0, as are zeros that come in from the sides
VISIBLE = 0.15


class Overlap(ht.metrics.ConfusionMatrix):
    """The mean over classes of |predicted and true| / |predicted or true| of their pixels, in the whole test set."""

    def update(self, predicted: np.ndarray, labels: np.ndarray) -> None:
        super().update(predicted.reshape(-1, predicted.shape[-1]), labels.reshape(-1))

    def result(self) -> float:
        table = super().result()
        both = table.diagonal()
        return float(np.mean(both / np.maximum(table.sum(axis=0) + table.sum(axis=1) - both, 1)))


def pictures(clothes: ht.data.ArrayDataset, seed: int) -> ht.data.ArrayDataset:
    """As many pictures, (n, SIZE, SIZE) of grays and of classes: each with a piece of clothing, and on it a second."""
    rng = np.random.default_rng(seed)
    x, y = clothes.arrays
    grays = np.zeros((len(x), SIZE, SIZE), "float32")
    classes = np.zeros(grays.shape, "int64")
    for chosen in (np.arange(len(x)), rng.permutation(len(x))):
        corners = rng.integers(0, SIZE - 28 + 1, (len(x), 2))
        for n, (k, (top, left)) in enumerate(zip(chosen, corners)):
            seen, where = x[k] > VISIBLE, np.s_[n, top : top + 28, left : left + 28]
            grays[where] = np.where(seen, x[k], grays[where])
            classes[where] = np.where(seen, 1 + y[k], classes[where])
    return ht.data.ArrayDataset(grays, classes, names=("x", "classes"))


def main() -> None:
    script = Script(__doc__, epochs=6, batch_size=50, learning_rate=5e-3)
    script.add("--width", type=positive, default=12, metavar="N", help="channels of the first level (%(default)s)")
    options = script.parse()
    data = ht.data.fashion_mnist
    train, test = pictures(script.first(data("train")), 0), pictures(data("test"), 1)
    steps = [ht.data.RandomCrop(2, arrays=(0, 1)), ht.data.RandomFlip(arrays=(0, 1))]
    batches = script.batches(train, transform=steps)

    x = ht.placeholder("x", (None, SIZE, SIZE))
    t = ht.placeholder("t", (None, SIZE, SIZE), "int64")
    logits = unet(ht.expand_dims(x, axis=1), KINDS, width=options.width)
    y = ht.permute_dims(logits, (0, 2, 3, 1))
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    updates = ht.optim.Adam(script.rate(batches)).minimize(loss)

    executor = script.executor({"train": [loss, updates], "eval": [loss, y]})
    validate, metrics = ("eval", ht.data.DataLoader(test, 100)), {"overlap": Overlap(KINDS)}
    history = script.fit(executor, batches, inputs=(x, t), validate=validate, metrics=metrics)
    script.say(f"unet on fashion pixels: mean overlap {history['val_overlap'][-1]:.2%} of {KINDS} classes")


if __name__ == "__main__":
    main()
