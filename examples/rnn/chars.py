"""An LSTM that writes Shakespeare character by character: `python examples/rnn/chars.py`.

Trained on pieces of text, each from a zero state; the held-out text is then read from start to end in one go, the state
carried from piece to piece. Ignored on purpose: several layers, and carrying the state in training too.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

import hetu as ht
from hetu.models.text import RecurrentText
from hetu.script import Script, positive


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


def main() -> None:
    script = Script(__doc__, epochs=3, batch_size=32, learning_rate=5e-3)
    numbers = {"type": positive, "metavar": "N"}
    script.add("--length", default=64, help="characters of a piece of text (%(default)s)", **numbers)
    script.add("--units", default=192, help="of the LSTM (%(default)s)", **numbers)
    script.add(
        "--sample",
        default=400,
        help="characters to write in the end (%(default)s)",
        **numbers | {"type": partial(positive, least=0)},
    )
    options = script.parse()
    train, test = (script.first(ht.data.shakespeare(part)) for part in ("train", "test"))
    batches = script.batches(train.windows(options.length), drop_last=True)

    x, t = (ht.placeholder(name, (None, options.length), "int64") for name in "xt")
    state = tuple(ht.placeholder(name, (1, options.units)) for name in "hc")
    model = RecurrentText(len(train.vocabulary), options.units)
    loss = ht.mean(ht.softmax_cross_entropy(model(x)[0], t))
    updates = ht.optim.Adam(script.rate(batches), clip_norm=1.0).minimize(loss)

    y, (h, c) = model(x, state)
    reading = [ht.mean(ht.softmax_cross_entropy(y, t)), h, c]
    following, last = model(ht.placeholder("last", (1, 1), "int64"), state)
    executor = script.executor({"train": [loss, updates], "read": reading, "next": [following, *last]})
    script.fit(executor, batches, inputs=(x, t))
    nats, h, c = read(executor, test.codes, options.length, options.units)
    written = sample(executor, h, c, test.codes[-1], options.sample, options.seed)
    script.say(f"\n{test.decode(test.codes[-60:])}|{test.decode(written)}\n")
    script.say(f"lstm on shakespeare: {nats:.4f} nats ({nats / math.log(2):.4f} bits) a character held out")


if __name__ == "__main__":
    main()
