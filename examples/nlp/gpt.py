"""A small GPT that writes Shakespeare character by character: `python examples/nlp/gpt.py`.

Decoder-only transformer, A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, at 1/100 of
the size. Ignored on purpose: a cache of keys and values; a sample is made by reading the whole context for each letter.
"""

from __future__ import annotations

import argparse

import numpy as np

import hetu as ht
from hetu import nn


def gpt(x: ht.Node, vocabulary: int, length: int, *, features: int, layers: int, heads: int, dropout: float) -> ht.Node:
    """Characters (n, length) to logits of the next ones (n, length, vocabulary)."""
    h = nn.Embedding(vocabulary, features)(x) + nn.Embedding(length, features)(np.arange(length))
    for _ in range(layers):
        h = nn.TransformerBlock(features, heads, causal=True, dropout=dropout)(h)
    return nn.Linear(features, vocabulary, bias=False)(nn.LayerNorm(features)(h))


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on eight plays of Shakespeare, by character.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters of context")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="highest; warm-up, then a cosine")
    parser.add_argument("--sample", type=int, default=400, metavar="N", help="characters to write in the end")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data, dropout and sample")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N characters of each part only")
    parser.add_argument("--checkpoint", metavar="FILE", help="write it after each epoch, continue from it if it exists")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    plays, held_out = ht.data.shakespeare("train"), ht.data.shakespeare("test")
    train, test = (ht.data.TextData(part.codes[: args.limit], part.vocabulary) for part in (plays, held_out))
    windows = train.windows(args.length, stride=args.length)
    batches = ht.data.DataLoader(windows, args.batch_size, shuffle=True, drop_last=True, seed=args.seed)

    x = ht.placeholder("x", (None, args.length), "int64")
    t = ht.placeholder("t", (None, args.length), "int64")
    sizes = {"features": args.features, "layers": args.layers, "heads": args.heads, "dropout": args.dropout}
    y = gpt(x, len(plays.vocabulary), args.length, **sizes)
    losses = ht.softmax_cross_entropy(y, t)
    loss = ht.mean(losses)
    steps = args.epochs * len(batches)
    rate = ht.schedules.warmup(ht.schedules.cosine(args.learning_rate, steps), steps=max(1, steps // 20))
    updates = ht.optim.AdamW(rate, beta2=0.99, weight_decay=0.1, clip_norm=1.0).minimize(loss)

    graphs = {"train": [loss, updates], "score": [losses], "next": [y[0, -1]]}
    executor = ht.Executor(graphs, seed=args.seed)
    options = {"checkpoint": args.checkpoint, "resume": args.checkpoint is not None}
    history = ht.fit(executor, batches, epochs=args.epochs, inputs=(x, t), **options)
    print(history)
    prompt = test.codes[: args.length]
    written = sample(executor, prompt, args.sample, args.seed)
    print(f"\n{test.decode(prompt)}|{test.decode(written)}\n")
    print(f"gpt on shakespeare: {nats_per_character(executor, test.codes, args.length):.4f} nats a character held out")


if __name__ == "__main__":
    main()
