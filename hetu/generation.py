"""Writing with a language model, a token after the other: the likeliest, or drawn from top k or a nucleus; and beams.

Keys and values of what was read are kept in variables, so that a step reads one token only; beams read the whole text
again. Left out: batches of prompts of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .answers import answer_calls as _answer_calls
from .core.backend import array_from
from .core.errors import ArgumentError
from .core.executor import Executor
from .core.graph import Node
from .core.leaf import placeholder, scope, unique_name
from .core.state import State
from .nn.attention import Past
from .ops import arange, take
from .ranges import AtLeast0, AtLeast1, Count, Seed, Share

__all__ = ["Generator", "LanguageModel", "beam_search", "chosen"]


class LanguageModel(Protocol):
    """Ids (n, length), and perhaps what was read before, to logits (n, length, vocabulary)."""

    def __call__(self, ids: Node, past: Past | None = None) -> Node: ...


class Generator:
    """Writes by `model`, with the weights in `state`, texts of at most `length` tokens, `batch` side by side.

    With `cached=False` each step reads the whole text again, which gives the same tokens.

    >>> import hetu as ht
    >>> generator = Generator(ht.models.gpt2.GPT2(10, 8, 1, 2, positions=16), length=16)
    >>> generator.generate([[1, 2, 3]], 5).shape
    (1, 5)
    """

    def __init__(
        self, model: LanguageModel, length: int, *, batch: int = 1, state: State | None = None, cached: bool = True
    ) -> None:
        self.length, self.batch, self.past = length, batch, list[Node]()
        ids, read = placeholder("ids", (batch, None if cached else length), "int64"), placeholder("read", (), "int64")
        if cached:
            with scope(unique_name("past_of")):
                past = Past(read + arange(ids.shape[1]), length)
                entries: list[Any] = [model(ids, past=past)[:, -1], past.updates]
            self.past = list(past.updates)
        else:
            entries = [take(model(ids), read, axis=1)]
        self.executor = Executor(entries, state=None if state is None else _sharing(state))

    def generate(
        self,
        prompt: Any,
        count: AtLeast1,
        *,
        seed: Seed = 0,
        temperature: AtLeast0 = 0.0,
        top_k: AtLeast1 | None = None,
        nucleus: Share | None = None,
    ) -> np.ndarray:
        """The `count` tokens (batch, count) that follow `prompt` (batch, tokens), each as `chosen` takes it."""
        text = np.asarray(array_from(prompt), np.int64)
        if text.ndim != 2 or len(text) != self.batch or not text.shape[1]:
            fix = f"pass {self.batch} rows of ids, of one length"
            raise ArgumentError(f"the prompt has shape {text.shape}, wanted ({self.batch}, tokens)", fix=fix)
        if (wanted := text.shape[1] + count) > self.length:
            fix = f"make the generator with length={wanted}, if the model has as many positions"
            raise ArgumentError(f"{text.shape[1]} tokens and {count} more are over {self.length}", fix=fix)
        rng, read = np.random.default_rng(seed), 0
        for kept in self.past:
            self.executor.state[kept] = np.zeros(kept.shape, kept.dtype)
        for _ in range(count):
            if self.past:
                logits = self.executor.run({"ids": text[:, read:], "read": read})[0]
                read = text.shape[1]
            else:  # what is behind the last token is not seen
                whole = np.pad(text, ((0, 0), (0, self.length - text.shape[1])))
                logits = self.executor.run({"ids": whole, "read": text.shape[1] - 1})[0]
            token = chosen(logits, rng, temperature=temperature, top_k=top_k, nucleus=nucleus)
            text = np.concatenate([text, token[:, None]], axis=1)
        return text[:, text.shape[1] - count :]


def _sharing(state: State) -> State:
    """A state of the same arrays, to which others can be added that no checkpoint of the first will hold."""
    made = State(seed=state.seed, device=state.device)
    made.stream, made.copies, made.executors = state.stream, dict(state.copies), state.executors
    made.variables, made.arrays = dict(state.variables), dict(state.arrays)
    return made


def chosen(
    logits: np.ndarray,
    rng: np.random.Generator,
    *,
    temperature: AtLeast0 = 0.0,
    top_k: AtLeast1 | None = None,
    nucleus: Share | None = None,
) -> np.ndarray:
    """A token for each row of logits (n, vocabulary): the likeliest if `temperature` is 0, else drawn.

    Drawn by softmax(logits / temperature) from the `top_k` likeliest, and from the fewest likeliest whose probability
    is at least `nucleus`. A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, eq. 2-3.

    >>> chosen(np.log([[0.1, 0.6, 0.3]]), np.random.default_rng(0)).tolist()
    [1]
    >>> draws = chosen(np.log([[0.1, 0.6, 0.3]] * 1000), np.random.default_rng(0), temperature=1.0, nucleus=0.7)
    >>> np.bincount(draws)[1] in range(620, 710), set(draws.tolist())
    (True, {1, 2})
    """
    if (
        np.ndim(logits) != 2
        or np.asarray(logits).dtype.kind not in "iuf"
        or not np.size(logits)
        or np.isnan(logits).any()
    ):
        said = f"logits {np.asarray(logits).dtype}{list(np.shape(logits))}"
        raise ArgumentError(said, fix="pass numbers (n, vocabulary), none of which is NaN")
    if not temperature:
        return np.asarray(np.argmax(logits, axis=-1))
    order = np.argsort(-logits, axis=-1, kind="stable")
    scores = np.take_along_axis(logits, order, axis=-1).astype(np.float64) / temperature
    chances = np.exp(scores - scores[:, :1])
    if top_k is not None:
        chances[:, top_k:] = 0
    chances /= chances.sum(axis=-1, keepdims=True)
    if nucleus is not None:
        chances[chances.cumsum(axis=-1) - chances >= nucleus] = 0  # those before it are enough
    ends = chances.cumsum(axis=-1)
    place = (ends <= rng.random((len(ends), 1)) * ends[:, -1:]).sum(axis=-1)
    return np.take_along_axis(order, np.minimum(place, ends.shape[1] - 1)[:, None], axis=-1)[:, 0]


def beam_search(
    score: Callable[[np.ndarray], np.ndarray],
    first: Count,
    end: Count,
    *,
    width: AtLeast1 = 4,
    length: AtLeast1 = 32,
    penalty: AtLeast0 = 0.0,
) -> list[int]:
    """The likeliest text from `first` to `end`, both left out, of those that keeping `width` at each length finds.

    `score` says the log probabilities (n, vocabulary) of what follows each of n texts (n, tokens). Texts compare by
    log p / ((5 + tokens) / 6)^penalty, Y. Wu et al., "Google's Neural Machine Translation System", 2016, eq. 14. After
    `length` tokens the best is returned as it is.

    >>> def score(texts):  # 1 is likelier than 2 at first, but after it nothing is
    ...     chances = {1: [0.5, 0.5, 0, 0], 2: [0, 0, 0, 1], 3: [0, 0.6, 0.4, 0]}
    ...     return np.log(np.array([chances[last] for last in texts[:, -1]]) + 1e-9)
    >>> [beam_search(score, 3, end, width=width, length=2) for end, width in ((3, 1), (3, 2))]
    [[1, 0], [2]]
    """
    live, done = [(0.0, [first])], list[tuple[float, list[int]]]()
    for tokens in range(1, length + 1):
        totals = score(np.array([text for _, text in live])) + np.array([[total] for total, _ in live])
        order = np.argsort(-totals, axis=None, kind="stable")[: 2 * width]
        places = [divmod(int(place), totals.shape[1]) for place in order]
        found = [(float(totals[row, token]), [*live[row][1], token]) for row, token in places]
        weight = ((5 + tokens) / 6) ** penalty
        done += [(total / weight, text) for total, text in found[:width] if text[-1] == end]
        live = [(total, text) for total, text in found if text[-1] != end][:width]
        if len(done) >= width or not live:
            break
    ended = [(total, text[1:-1]) for total, text in done] or [(total, text[1:]) for total, text in live]
    return max(ended, key=lambda pair: pair[0])[1]


_answer_calls(__name__)
