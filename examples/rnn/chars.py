"""An LSTM that writes Shakespeare character by character: `python examples/rnn/chars.py`.

Trained on pieces of text, each from a zero state; the held-out text is then read from start to end in one go, the state
carried from piece to piece. Ignored on purpose: several layers, and carrying the state in training too.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

import hetu as ht
from hetu import nn


class CharacterModel:
    """Embedding, LSTM, linear: characters (n, time) and a first state to logits (n, time, characters), last state."""

    def __init__(self, characters: int, units: int) -> None:
        self.embedding = nn.Embedding(characters, 64, weight_init=ht.init.normal(0.3))
        self.lstm = nn.LSTM(64, units)
        self.head = nn.Linear(units, characters)

    def __call__(self, x: ht.Node, state: tuple[ht.Node, ht.Node] | None = None) -> tuple[ht.Node, ht.Node, ht.Node]:
        outputs, (h, c) = self.lstm(self.embedding(x), state)
        return self.head(outputs), h, c


def read(executor: ht.Executor, codes: np.ndarray, length: int, units: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Read `codes` in whole pieces of `length`; returns nats a character and the state behind them."""
    h = c = np.zeros((1, units), "float32")
    nats = []
    for start in range(0, len(codes) - length, length):
        rows = codes[start : start + length + 1]
        loss, h, c = executor.run("read", {"x": rows[None, :-1], "t": rows[None, 1:], "h": h, "c": c})
        nats.append(float(loss))
    return float(np.mean(nats)), h, c


def sample(
    executor: ht.Executor, h: np.ndarray, c: np.ndarray, first: int, count: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """`count` characters that follow the state (h, c) and the character `first`."""
    codes, rng = [first], np.random.default_rng(seed)
    for _ in range(count):
        logits, h, c = executor.run("next", {"last": [[codes[-1]]], "h": h, "c": c})
        noise = rng.gumbel(size=logits.shape)  # the largest of logits + Gumbel noise is a draw from softmax(logits)
        codes.append(int(np.argmax(logits / temperature + noise)))
    return codes[1:]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an LSTM on eight plays of Shakespeare, by character.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="characters of a piece of text")
    parser.add_argument("--units", type=int, default=192, help="of the LSTM")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="of Adam; falls to 0 along a cosine")
    parser.add_argument("--sample", type=int, default=400, metavar="N", help="characters to write in the end")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the sample")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N characters of each part only")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    plays, held_out = ht.data.shakespeare("train"), ht.data.shakespeare("test")
    train, test = (ht.data.TextData(part.codes[: args.limit], part.vocabulary) for part in (plays, held_out))
    pieces = train.windows(args.length)
    batches = ht.data.DataLoader(pieces, args.batch_size, shuffle=True, drop_last=True, seed=args.seed)

    x, t = (ht.placeholder(name, (None, args.length), "int64") for name in "xt")
    state = tuple(ht.placeholder(name, (1, args.units)) for name in "hc")
    model = CharacterModel(len(plays.vocabulary), args.units)
    loss = ht.mean(ht.softmax_cross_entropy(model(x)[0], t))
    rate = ht.schedules.cosine(args.learning_rate, steps=args.epochs * len(batches))
    updates = ht.optim.Adam(rate, clip_norm=1.0).minimize(loss)

    y, h, c = model(x, state)
    reading = [ht.mean(ht.softmax_cross_entropy(y, t)), h, c]
    writing = list(model(ht.placeholder("last", (1, 1), "int64"), state))
    executor = ht.Executor({"train": [loss, updates], "read": reading, "next": writing}, seed=args.seed)
    history = ht.fit(executor, batches, epochs=args.epochs, inputs=(x, t))
    print(history)
    nats, h, c = read(executor, test.codes, args.length, args.units)
    written = sample(executor, h, c, test.codes[-1], args.sample, args.seed)
    print(f"\n{test.decode(test.codes[-60:])}|{test.decode(written)}\n")
    print(f"lstm on shakespeare: {nats:.4f} nats ({nats / math.log(2):.4f} bits) a character held out")


if __name__ == "__main__":
    main()
