"""A small GPT-2 or LLaMA that writes Shakespeare, by characters or byte pairs: `python examples/nlp/gpt.py`.

A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, or H. Touvron et al., "LLaMA", 2023, at
1/100 of the size. `--pieces 1024` reads byte pairs, from a vocabulary that is made first. Ignored on purpose: a sample
where several processes have trained, each of which may have parts of the weights only.
"""

from __future__ import annotations

from functools import partial

import numpy as np

import hetu as ht
from hetu.generation import Generator
from hetu.models import gpt2, llama
from hetu.script import Script, number, positive


def nats_in_all(executor: ht.Executor, codes: np.ndarray, length: int) -> float:
    """Sum of -log p over all tokens but the first, each seen with at least half a context where there is one."""
    starts = [*range(0, len(codes) - length - 1, length // 2), len(codes) - length - 1]
    nats = np.zeros(len(codes) - 1)
    for start in reversed(starts):  # an earlier window overwrites a later one: it gives more context
        rows = codes[start : start + length + 1]
        nats[start : start + length] = executor.run("score", {"x": rows[None, :-1], "t": rows[None, 1:]})[0]
    return float(nats.sum())


def sample(generator: Generator, prompt: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Continue `prompt`, half a context, by `count` tokens; of each context the second half is written."""
    text, half = prompt, len(prompt)
    for n in range(-(-count // half)):
        more = generator.generate(text[None, -half:], half, seed=seed + n, temperature=0.8, nucleus=0.95)
        text = np.concatenate([text, more[0]])
    return text[half : half + count]


def options_of(script: Script) -> None:
    numbers = {"type": positive, "metavar": "N"}
    script.add("--model", choices=["gpt2", "llama"], default="gpt2", help="(%(default)s)")
    script.add("--pieces", help="byte pairs of so many pieces (default: none, characters)", **numbers)
    script.add("--length", default=64, help="tokens of context (%(default)s)", **numbers)
    script.add("--features", default=128, help="(%(default)s)", **numbers)
    script.add("--layers", default=3, help="(%(default)s)", **numbers)
    script.add("--heads", default=4, help="(%(default)s)", **numbers)
    script.add("--dropout", type=number, default=0.0, metavar="SHARE", help="of GPT-2 (%(default)s)")
    script.only("--dropout", model=("gpt2",))
    script.add(
        "--sample",
        default=400,
        help="tokens to write in the end (%(default)s)",
        **numbers | {"type": partial(positive, least=0)},
    )


def main() -> None:
    script = Script(__doc__, epochs=2, batch_size=16, learning_rate=3e-3)
    options_of(script)
    options = script.parse()
    plays, held_out = (script.first(ht.data.shakespeare(part)) for part in ("train", "test"))
    written, asked = (part.decode(part.codes) for part in (plays, held_out))
    tokens = ht.data.BytePairs.train(written, options.pieces) if options.pieces else plays
    train, test = tokens.encode(written), tokens.encode(asked)
    rows = ht.data.sliding_windows(train, options.length + 1, options.length)
    batches = script.batches(ht.data.ArrayDataset(rows[:, :-1], rows[:, 1:]), drop_last=True)

    x = ht.placeholder("x", (None, options.length), "int64")
    t = ht.placeholder("t", (None, options.length), "int64")
    vocabulary = len(tokens) if options.pieces else len(plays.vocabulary)
    sizes = (vocabulary, options.features, options.layers, options.heads)
    if options.model == "gpt2":
        model = gpt2.GPT2(*sizes, positions=options.length, dropout=options.dropout)
    else:
        model = llama.Llama(*sizes, key_heads=max(1, options.heads // 2))
    losses = ht.softmax_cross_entropy(model(x), t)
    loss = ht.mean(losses)
    rate = ht.schedules.warmup(script.rate(batches), steps=max(1, options.epochs * len(batches) // 20))
    updates = ht.optim.AdamW(rate, beta2=0.99, weight_decay=0.1, clip_norm=1.0).minimize(loss)

    executor = script.executor({"train": [loss, updates], "score": [losses]})
    script.fit(executor, batches, inputs=(x, t))
    if executor.placement.world_size == 1:
        generator = Generator(model, options.length, state=executor.state)
        prompt = test[: options.length // 2]
        rest = sample(generator, prompt, options.sample, options.seed)
        script.say(f"\n{tokens.decode(prompt)}|{tokens.decode(rest)}\n")
    nats = nats_in_all(executor, test, options.length) / (len(asked) - 1)
    script.say(f"{options.model} on shakespeare: {nats:.4f} nats a character held out")


if __name__ == "__main__":
    main()
