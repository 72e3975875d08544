"""A small GPT that writes Shakespeare character by character: `python examples/nlp/gpt.py`.

Decoder-only transformer, A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, at 1/100 of
the size. Ignored on purpose: a cache of keys and values; a sample is made by reading the whole context for each letter.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.models import text
from hetu.script import Script


def nats_per_character(executor: ht.Executor, codes: np.ndarray, length: int) -> float:
    """Mean of -log p over all characters but the first, each seen with at least half a context where there is one."""
    starts = [*range(0, len(codes) - length - 1, length // 2), len(codes) - length - 1]
    nats = np.zeros(len(codes) - 1)
    for start in reversed(starts):  # an earlier window overwrites a later one: it gives more context
        rows = codes[start : start + length + 1]
        nats[start : start + length] = executor.run("score", {"x": rows[None, :-1], "t": rows[None, 1:]})[0]
    return float(nats.mean())


def sample(executor: ht.Executor, prompt: np.ndarray, count: int, seed: int, temperature: float = 0.8) -> list[int]:
    """Continue `prompt`, which has the length of a context, by `count` characters."""
    codes, rng = list(prompt), np.random.default_rng(seed)
    for _ in range(count):
        logits = executor.run("next", {"x": [codes[-len(prompt) :]]})[0]
        noise = rng.gumbel(size=logits.shape)  # the largest of logits + Gumbel noise is a draw from softmax(logits)
        codes.append(int(np.argmax(logits / temperature + noise)))
    return codes[len(prompt) :]


def main() -> None:
    script = Script(__doc__, epochs=2, batch_size=16, learning_rate=3e-3)
    numbers = {"type": int, "metavar": "N"}
    script.add("--length", default=64, help="characters of context (%(default)s)", **numbers)
    script.add("--features", default=128, help="(%(default)s)", **numbers)
    script.add("--layers", default=3, help="(%(default)s)", **numbers)
    script.add("--heads", default=4, help="(%(default)s)", **numbers)
    script.add("--dropout", type=float, default=0.0, metavar="SHARE", help="(%(default)s)")
    script.add("--sample", default=400, help="characters to write in the end (%(default)s)", **numbers)
    options = script.parse()
    train, test = (script.first(ht.data.shakespeare(part)) for part in ("train", "test"))
    batches = script.batches(train.windows(options.length, stride=options.length), drop_last=True)

    x = ht.placeholder("x", (None, options.length), "int64")
    t = ht.placeholder("t", (None, options.length), "int64")
    sizes = {name: getattr(options, name) for name in ("features", "layers", "heads", "dropout")}
    y = text.gpt(x, len(train.vocabulary), **sizes)
    losses = ht.softmax_cross_entropy(y, t)
    loss = ht.mean(losses)
    rate = ht.schedules.warmup(script.rate(batches), steps=max(1, options.epochs * len(batches) // 20))
    updates = ht.optim.AdamW(rate, beta2=0.99, weight_decay=0.1, clip_norm=1.0).minimize(loss)

    executor = script.executor({"train": [loss, updates], "score": [losses], "next": [y[0, -1]]})
    script.fit(executor, batches, inputs=(x, t))
    prompt = test.codes[: options.length]
    written = sample(executor, prompt, options.sample, options.seed)
    script.say(f"\n{test.decode(prompt)}|{test.decode(written)}\n")
    nats = nats_per_character(executor, test.codes, options.length)
    script.say(f"gpt on shakespeare: {nats:.4f} nats a character held out")


if __name__ == "__main__":
    main()
