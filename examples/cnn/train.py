"""Classify small gray images, digits or clothes: `python examples/cnn/train.py`.

Each training image is also shown moved by one pixel to every side, which helps as much as a few thousand more images.
With `--augment` the loader changes images anew in each epoch instead, and scales them.
Ignored on purpose: choosing anything by a validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

from functools import partial

import numpy as np

import hetu as ht
from hetu.models import vision, vit
from hetu.script import Script

DATA = {"mnist": ht.data.mnist, "fashion": ht.data.fashion_mnist}
MODELS = {
    "logistic": vision.logistic,
    "mlp": vision.mlp,
    "lenet": vision.lenet,
    "vgg": partial(vision.vgg, width=16),
    "resnet": vision.resnet,
    "resnet18": partial(vision.resnet18, width=16),
    "resnet34": partial(vision.resnet34, width=8),
    "resnet50": partial(vision.resnet50, width=8),
    "mobilenet": partial(vision.mobilenet, stages=((1, 16, 1, 2), (6, 24, 2, 2), (6, 40, 2, 2), (6, 80, 2, 1))),
    "densenet": partial(vision.densenet, growth=8, blocks=(4, 4, 4)),
    "vit": vit.vit,
}

AUGMENT = {"crop": ht.data.RandomCrop(2), "flip": ht.data.RandomFlip(), "mixup": ht.data.Mixup(10)}


def with_moved_copies(images: ht.data.ArrayDataset) -> ht.data.ArrayDataset:
    """The images, and each moved by one pixel up, down, left and right: five times as many."""
    x, y = images.arrays
    moves = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
    copies = np.concatenate([np.roll(x, move, axis=(1, 2)) for move in moves])
    return ht.data.ArrayDataset(copies, np.tile(y, len(moves)), names=images.names, info=images.info)


def main() -> None:
    script = Script(__doc__, epochs=8, batch_size=100, learning_rate=3e-3)
    script.add("--model", choices=MODELS, default="lenet", help="(%(default)s)")
    script.add("--data", choices=DATA, default="mnist", help="(%(default)s)")
    script.add("--augment", nargs="+", choices=AUGMENT, default=[], help="in this order")
    options = script.parse()
    train, test = script.first(DATA[options.data]("train")), DATA[options.data]("test")
    steps, scale = [AUGMENT[name] for name in options.augment], []
    if steps:
        scale = [ht.data.Normalize(train.arrays[0].mean(), train.arrays[0].std())]
        batches = script.batches(train, transform=[*steps, *scale])
    else:
        batches = script.batches(with_moved_copies(train))

    x = ht.placeholder("x", (None, 28, 28))
    t = ht.placeholder("t", (None,), "int64")
    shares = ht.placeholder("shares", (None, 10))  # of the classes in a mixture
    y = MODELS[options.model](ht.expand_dims(x, axis=1), 10)
    target = shares if "mixup" in options.augment else t
    loss, error = (ht.mean(ht.softmax_cross_entropy(y, wanted)) for wanted in (target, t))
    updates = ht.optim.Adam(script.rate(batches)).minimize(loss)

    executor = script.executor({"train": [loss, updates], "eval": [error, y]})
    validate = "eval", ht.data.DataLoader(test, 200, transform=scale), (x, t)
    metrics = {"accuracy": ht.metrics.Accuracy()}
    history = script.fit(executor, batches, inputs=(x, target), validate=validate, metrics=metrics)
    script.say(f"{options.model} on {options.data}: test accuracy {history['val_accuracy'][-1]:.2%}")


if __name__ == "__main__":
    main()
