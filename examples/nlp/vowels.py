"""An encoder-decoder reads a word without its vowels and writes the word: `python examples/nlp/vowels.py`.

A. Vaswani et al., "Attention Is All You Need", 2017, at 1/1000 of the size. `wnd` may be wind, wand or wound, so that
several beams find more than one. Words are those of Shakespeare, and those of the test part are in no other. Ignored on
purpose: how often a word stands in the plays.
"""

from __future__ import annotations

import re

import numpy as np

import hetu as ht
from hetu.generation import beam_search
from hetu.models.translation import EncoderDecoder
from hetu.script import Script

PAD, BEGIN, END, LETTERS = 0, 1, 2, 3
LONGEST = 14


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """(words, LONGEST) ids of each word without its vowels, and (words, LONGEST + 2) of the word, begun and ended."""
    parts = [ht.data.shakespeare(split) for split in ("train", "test")]
    found = {*re.findall(r"[a-z]+", "".join(part.decode(part.codes) for part in parts).lower())}
    words = sorted(word for word in found if 3 <= len(word) <= LONGEST and not re.fullmatch("[aeiou]+", word))
    source, target = (np.full((len(words), LONGEST + more), PAD) for more in (0, 2))
    for n, word in enumerate(words):
        codes = np.frombuffer(word.encode(), np.uint8) - ord("a") + LETTERS
        kept = codes[[letter not in "aeiou" for letter in word]]
        source[n, : len(kept)] = kept
        target[n, : len(word) + 2] = [BEGIN, *codes, END]
    return source, target


def right(executor: ht.Executor, source: np.ndarray, target: np.ndarray, width: int) -> float:
    """The share of words that a search with so many beams writes as they are."""

    def written(row: np.ndarray) -> list[int]:
        def score(texts: np.ndarray) -> np.ndarray:
            whole = np.pad(texts, ((0, 0), (0, target.shape[1] - 1 - texts.shape[1])))
            read = np.broadcast_to(row, (len(texts), len(row)))
            return executor.run("score", {"source": read, "target": whole})[0][:, texts.shape[1] - 1]

        return beam_search(score, BEGIN, END, width=width, length=LONGEST + 1)

    wanted = [[int(i) for i in row if i >= LETTERS] for row in target]
    return float(np.mean([written(row) == word for row, word in zip(source, wanted)]))


def main() -> None:
    script = Script(__doc__, epochs=20, batch_size=64, learning_rate=3e-3)
    numbers = {"type": int, "metavar": "N"}
    script.add("--features", default=64, help="(%(default)s)", **numbers)
    script.add("--layers", default=2, help="(%(default)s)", **numbers)
    script.add("--beams", default=4, help="(%(default)s)", **numbers)
    script.add("--asked", default=300, help="words that the search is asked for (%(default)s)", **numbers)
    options = script.parse()
    source, target = pairs()
    order, held_out = np.random.default_rng(0).permutation(len(source)), len(source) // 10
    test, train = order[:held_out], order[held_out:][: options.limit]

    def rows(part: np.ndarray) -> ht.data.ArrayDataset:
        return ht.data.ArrayDataset(source[part], target[part, :-1], target[part, 1:])

    batches = script.batches(rows(train), drop_last=True)
    read = ht.placeholder("source", (None, LONGEST), "int64")
    begun = ht.placeholder("target", (None, LONGEST + 1), "int64")
    t = ht.placeholder("t", (None, LONGEST + 1), "int64")
    symbols = LETTERS + 26
    model = EncoderDecoder(symbols, symbols, options.features, options.layers, positions=LONGEST + 1, dropout=0.1)
    y = model(read, begun)
    losses = ht.softmax_cross_entropy(y, t, ignore_index=PAD)
    nats = ht.sum(losses) / ht.sum(ht.astype(ht.not_equal(t, PAD), "float32"))
    updates = ht.optim.AdamW(script.rate(batches), weight_decay=0.01, clip_norm=1.0).minimize(nats)

    executor = script.executor({"train": [nats, updates], "eval": [nats], "score": [ht.log_softmax(y)]})
    validate = ht.data.DataLoader(rows(test), min(100, len(test)))
    script.fit(executor, batches, inputs=(read, begun, t), validate=("eval", validate))
    asked = test[: options.asked]
    greedy, beams = (right(executor, source[asked], target[asked], width) for width in (1, options.beams))
    found = f"{greedy:.2%} of words right by one beam, {beams:.2%} by {options.beams}"
    script.say(f"encoder_decoder on words of shakespeare: {found}")


if __name__ == "__main__":
    main()
