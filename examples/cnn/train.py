"""Classify small gray images, digits or clothes: `python examples/cnn/train.py`.

Each training image is also shown moved by one pixel to every side, which helps as much as a few thousand more images.
Ignored on purpose: choosing anything by a validation set; the test set is looked at and changes nothing.
"""

from __future__ import annotations

import argparse

import models
import numpy as np

import hetu as ht

DATA = {"mnist": ht.data.mnist, "fashion": ht.data.fashion_mnist}
MODELS = {"logistic": models.logistic, "mlp": models.mlp, "lenet": models.lenet, "resnet": models.resnet}


def with_moved_copies(images: ht.data.ArrayDataset) -> ht.data.ArrayDataset:
    """The images, and each moved by one pixel up, down, left and right: five times as many."""
    x, y = images.arrays
    moves = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
    copies = np.concatenate([np.roll(x, move, axis=(1, 2)) for move in moves])
    return ht.data.ArrayDataset(copies, np.tile(y, len(moves)), names=images.names, info=images.info)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of 28 x 28 gray images.")
    parser.add_argument("--model", choices=MODELS, default="lenet")
    parser.add_argument("--data", choices=DATA, default="mnist")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of Adam; falls to 0 along a cosine")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and dropout")
    parser.add_argument("--limit", type=int, metavar="N", help="train on the first N images only")
    parser.add_argument("--checkpoint", metavar="FILE", help="write it after each epoch, continue from it if it exists")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    train, test = DATA[args.data]("train"), DATA[args.data]("test")
    train = with_moved_copies(train.take(args.limit or len(train)))
    batches = ht.data.DataLoader(train, args.batch_size, shuffle=True, seed=args.seed)

    x = ht.placeholder("x", (None, 28, 28))
    t = ht.placeholder("t", (None,), "int64")
    y = MODELS[args.model](x)
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    rate = ht.schedules.cosine(args.learning_rate, steps=args.epochs * len(batches))
    updates = ht.optim.Adam(rate).minimize(loss)

    executor = ht.Executor({"train": [loss, updates], "eval": [loss, y]}, seed=args.seed)
    history = ht.fit(
        executor,
        batches,
        epochs=args.epochs,
        inputs=(x, t),
        validate=("eval", ht.data.DataLoader(test, 200)),
        metrics={"accuracy": ht.metrics.Accuracy()},
        checkpoint=args.checkpoint,
        resume=args.checkpoint is not None,
    )
    print(history)
    print(f"{args.model} on {args.data}: test accuracy {history['val_accuracy'][-1]:.2%}")


if __name__ == "__main__":
    main()
