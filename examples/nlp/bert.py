"""BERT learns Shakespeare by masked words, then to tell from a speech the play it is of: `python examples/nlp/bert.py`.

J. Devlin et al., "BERT", 2019, at 1/1000 of the size, on byte pairs. `--tune frozen` trains the head alone, `whole`
all, `lora` the head and low-rank updates of queries and values. `--weights` begins with a published checkpoint and its
vocabulary. Short speeches are padded, and masks hide that. Ignored on purpose: pairs of sentences.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hetu as ht
from hetu.models.bert import BERT, load
from hetu.script import Script, positive

HEADS, NAMES = 4, ["[PAD]", "[CLS]", "[MASK]"]
COPIES = 4  # of the text, each with other words masked
TITLE = re.compile(r"^.+\n\nby William Shakespeare$", re.M)


def speeches() -> tuple[list[str], np.ndarray]:
    """The speeches of all plays, each with who speaks, and the play that it is of."""
    parts = [ht.data.shakespeare(split) for split in ("train", "test")]
    text = "".join(part.decode(part.codes) for part in parts)
    starts = [found.start() for found in TITLE.finditer(text)] or [0]
    texts, plays = list[str](), list[int]()
    for play, (start, end) in enumerate(zip(starts, [*starts[1:], len(text)])):
        said = [paragraph.strip() for paragraph in text[start:end].split("\n\n")]
        texts += (said := [speech for speech in said if len(speech.split()) >= 8])
        plays += [play] * len(said)
    return texts, np.array(plays)


def padded(rows: list[np.ndarray], length: int, pad: int, first: int) -> np.ndarray:
    """(n, length) ids: `first`, then those of a row, as many as there is room for, then `pad`."""
    out = np.full((len(rows), length), pad, np.int64)
    out[:, 0] = first
    for n, row in enumerate(rows):
        out[n, 1 : 1 + len(row)] = row[: length - 1]
    return out


def learn_words(script: Script, x: ht.Node, model: BERT, pad: int, rows: Any, folder: Path) -> None:
    """Train by masked words, and publish the weights."""
    batches = script.batches(ht.data.ArrayDataset(*rows), drop_last=True)
    t = ht.placeholder("t", (None, script.options.length), "int64")
    losses = ht.softmax_cross_entropy(model.words(model(x, mask=ht.not_equal(x, pad))), t, ignore_index=-1)
    nats = ht.sum(losses) / ht.sum(ht.astype(t >= 0, "float32"))
    rate = ht.schedules.warmup(script.rate(batches), steps=max(1, script.options.epochs * len(batches) // 20))
    updates = ht.optim.AdamW(rate, weight_decay=0.01, clip_norm=1.0).minimize(nats)
    executor = script.executor({"train": [nats, updates]})
    script.fit(executor, batches, inputs=(x, t))
    model.publish(executor.state, folder / "model.safetensors")


def learn_plays(script: Script, x: ht.Node, model: BERT, pad: int, told: Any, asked: Any) -> tuple[float, int]:
    """Fine-tune as asked for; the share of plays that it tells, and how many numbers were trained."""
    options, batches = script.options, script.batches(told, drop_last=True)
    chosen = [v for name, v in model.weights.items() if name.startswith(("pooler.", "classifier."))]
    if options.tune == "lora":
        chosen += model.adapt(r"self\.(query|value)$", rank=8, scale=2.0)
    play = ht.placeholder("play", (None,), "int64")
    y = model.chances(model(x, mask=ht.not_equal(x, pad)))
    loss = ht.mean(ht.softmax_cross_entropy(y, play))
    highest = options.learning_rate / (4 if options.tune == "whole" else 1)
    rate = ht.schedules.cosine(highest, steps=options.tune_epochs * len(batches))
    updates = ht.optim.AdamW(rate, weight_decay=0.01, clip_norm=1.0).minimize(
        loss, None if options.tune == "whole" else chosen
    )
    executor = script.executor({"train": [loss, updates], "score": [loss, y]})
    history = ht.fit(
        executor, batches, epochs=options.tune_epochs, inputs=(x, play), metrics={"accuracy": ht.metrics.Accuracy()},
        validate=("score", ht.data.DataLoader(asked, min(64, len(asked)))),
    )  # fmt: skip
    script.say(str(history))
    return history["val_accuracy"][-1], sum(math.prod(v.shape) for v in updates.gradients)


def main() -> None:
    script = Script(__doc__, epochs=4, batch_size=32, learning_rate=2e-3)
    numbers = {"type": positive, "metavar": "N"}
    script.add("--tune", choices=["frozen", "whole", "lora"], default="whole", help="(%(default)s)")
    script.add("--tune-epochs", default=10, help="passes over the speeches with labels (%(default)s)", **numbers)
    script.add("--labels", default=1600, help="of how many speeches the play is told (%(default)s)", **numbers)
    script.add("--pieces", default=300, help="of the vocabulary (%(default)s)", **numbers)
    script.add("--length", default=32, help="tokens of a speech (%(default)s)", **numbers)
    script.add("--features", default=64, help="(%(default)s)", **numbers)
    script.add("--weights", metavar="FOLDER", help="begin with a published BERT, and leave out masked words")
    script.add("--layers", default=2, help="(%(default)s)", **numbers)
    for option in ("--epochs", "--pieces", "--features", "--layers"):
        script.only(option, weights=(None,))
    options = script.parse()
    texts, plays = speeches()
    order = np.random.default_rng(0).permutation(len(texts))
    train = order[len(texts) // 10 :][: options.limit]
    test = order[: len(texts) // 10][: options.limit]
    if options.weights:
        tokens = ht.data.WordPieces.load(options.weights)
    else:
        tokens = ht.data.BytePairs.train("\n\n".join(texts[n] for n in train), options.pieces, names=NAMES)
    pad, first, mask = map(tokens.id, NAMES)
    ids, asked = (padded([tokens.encode(texts[n]) for n in part], options.length, pad, first) for part in (train, test))

    x = ht.placeholder("x", (None, options.length), "int64")
    sizes = {"features": options.features, "layers": options.layers, "positions": options.length}
    with tempfile.TemporaryDirectory() as folder:
        if not options.weights:
            rng, copies = np.random.default_rng(options.seed), np.concatenate([ids] * COPIES)
            masked = ht.data.masked_words(copies, rng, mask, range(pad))
            learn_words(script, x, BERT(len(tokens), heads=HEADS, **sizes), pad, masked, Path(folder))
        known = {"classes": int(plays.max()) + 1} | ({} if options.weights else {"heads": HEADS})
        model = load(options.weights or folder, name="tuned", **known)
        told = ht.data.ArrayDataset(ids[: options.labels], plays[train[: options.labels]])
        share, trained = learn_plays(script, x, model, pad, told, ht.data.ArrayDataset(asked, plays[test]))
    script.say(f"bert_{options.tune} on shakespeare: test accuracy {share:.2%} of plays, {trained:,} numbers trained")


if __name__ == "__main__":
    main()
