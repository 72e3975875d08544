"""An encoder-decoder reads the letters of a word and writes how it sounds: `python examples/nlp/sounds.py`.

A. Vaswani et al., "Attention Is All You Need", 2017, at 1/1000 of the size, or with `--model recurrent` LSTMs, of which
one attends, M. Luong et al., EMNLP 2015; on the pronouncing dictionary of Carnegie Mellon University. Every sound is
chosen after those before it, so that several beams find more than one. Ignored on purpose: other ways to say a word,
and stress.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.generation import beam_search
from hetu.models.translation import EncoderDecoder, RecurrentEncoderDecoder
from hetu.script import Script, positive

FILL, BEGIN, END = 0, 1, 2


def right(executor: ht.Executor, source: np.ndarray, target: np.ndarray, width: int) -> float:
    """The share of words that a search with so many beams writes as they are."""

    def written(row: np.ndarray) -> list[int]:
        def score(texts: np.ndarray) -> np.ndarray:
            whole = np.pad(texts, ((0, 0), (0, target.shape[1] - 1 - texts.shape[1])))
            read = np.broadcast_to(row, (len(texts), len(row)))
            return executor.run("score", {"read": read, "begun": whole})[0][:, texts.shape[1] - 1]

        return beam_search(score, BEGIN, END, width=width, length=target.shape[1] - 1)

    wanted = [[int(i) for i in row if i > END] for row in target]
    return float(np.mean([written(row) == word for row, word in zip(source, wanted)]))


def main() -> None:
    script = Script(__doc__, epochs=20, batch_size=64, learning_rate=3e-3)
    numbers = {"type": positive, "metavar": "N"}
    script.add("--model", choices=("encoder_decoder", "recurrent"), default="encoder_decoder", help="(%(default)s)")
    script.add("--features", default=64, help="(%(default)s)", **numbers)
    script.add("--layers", default=2, help="(%(default)s)", **numbers)
    script.add("--beams", default=4, help="(%(default)s)", **numbers)
    script.add("--asked", default=300, help="words that the search is asked for (%(default)s)", **numbers)
    options = script.parse()
    parts = [script.first(ht.data.cmudict("train")), ht.data.cmudict("test")]

    def rows(part: ht.data.ArrayDataset) -> ht.data.ArrayDataset:
        letters, sounds = part.arrays
        return ht.data.ArrayDataset(letters, sounds[:, :-1], sounds[:, 1:])

    train, test = map(rows, parts)
    batches = script.batches(train, drop_last=True)
    read, begun, t = (
        ht.placeholder(name, (None, a.shape[1]), "int64") for name, a in zip(("read", "begun", "t"), train.arrays)
    )
    sizes = [len(parts[0].info[name]) for name in ("letters", "sounds")] + [options.features, options.layers]
    if options.model == "recurrent":
        model = RecurrentEncoderDecoder(*sizes)
    else:
        model = EncoderDecoder(*sizes, positions=t.shape[1], dropout=0.1)
    y = model(read, begun)
    losses = ht.softmax_cross_entropy(y, t, ignore_index=FILL)
    nats = ht.sum(losses) / ht.sum(ht.astype(ht.not_equal(t, FILL), "float32"))
    updates = ht.optim.AdamW(script.rate(batches), weight_decay=0.01, clip_norm=1.0).minimize(nats)

    executor = script.executor({"train": [nats, updates], "eval": [nats], "score": [ht.log_softmax(y)]})
    validate = ht.data.DataLoader(test, min(100, len(test)))
    script.fit(executor, batches, inputs=(read, begun, t), validate=("eval", validate))
    asked = [array[: options.asked] for array in parts[1].arrays]
    greedy, beams = (right(executor, *asked, width) for width in (1, options.beams))
    found = f"{greedy:.2%} of words right by one beam, {beams:.2%} by {options.beams}"
    script.say(f"{options.model} on sounds of words: {found}")


if __name__ == "__main__":
    main()
