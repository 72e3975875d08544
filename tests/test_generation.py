"""Writing: what is kept gives the tokens that reading the whole text gives; how tokens are chosen."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.generation import Generator, beam_search, chosen
from hetu.models import gpt2, llama

MODELS = {
    "gpt2": lambda: gpt2.GPT2(19, 16, 2, 4, positions=24, dropout=0.5),
    "llama": lambda: llama.Llama(19, 16, 2, 4, key_heads=2, tied=True),
}
CHOICES = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1.0, "nucleus": 0.7}]
LOGITS = np.log([[0.1, 0.5, 0.25, 0.15]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_kept_keys_and_values_give_the_tokens_of_the_whole_text(model):
    made = MODELS[model]()
    kept = Generator(made, 24, batch=2)
    rng = np.random.default_rng(0)
    for variable in made.variables:  # far from even, so that what is likeliest follows from the text
        if variable in kept.executor.variables:
            kept.executor.state[variable] = 0.3 * rng.standard_normal(variable.shape)
    whole = Generator(made, 24, batch=2, state=kept.executor.state, cached=False)
    prompt = rng.integers(0, 19, (2, 5))
    found = [kept.generate(prompt, 19, **choice) for choice in CHOICES]
    for tokens, choice in zip(found, CHOICES):
        np.testing.assert_array_equal(tokens, whole.generate(prompt, 19, **choice))
    assert len({tokens.tobytes() for tokens in found}) == len(CHOICES)
    assert len(np.unique(found[0])) > 2
    np.testing.assert_array_equal(kept.generate(prompt, 19), found[0])  # nothing is left of what was read in between
    np.testing.assert_array_equal(kept.generate(np.c_[prompt, found[0][:, :4]], 15), found[0][:, 4:])


def test_what_is_kept_is_in_no_checkpoint_and_weights_are_shared():
    made = MODELS["gpt2"]()
    ex = ht.Executor({"score": [made(ht.placeholder("x", (None, 5), "int64"))]})
    names = [*ex.state]
    generators = [Generator(made, length, state=ex.state) for length in (24, 12)]  # of two lengths, one state
    first = [generator.generate([[1, 2, 3]], 5).tolist() for generator in generators]
    assert first[0] == first[1] and [*ex.state] == names
    for variable in made.variables:
        ex.state[variable] = np.random.default_rng(1).standard_normal(variable.shape)
    again = [generator.generate([[1, 2, 3]], 5).tolist() for generator in generators]
    assert again[0] == again[1] != first[0]
    with pytest.raises(ht.errors.ArgumentError, match="3 executors share these variables"):
        ex.switch("dp")  # the generators would go on with the old arrays


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({}, [0, 1, 0, 0]),
        ({"temperature": 1.0}, [0.1, 0.5, 0.25, 0.15]),
        ({"temperature": 0.5}, np.array([0.01, 0.25, 0.0625, 0.0225]) / 0.345),
        ({"temperature": 1.0, "top_k": 2}, [0, 2 / 3, 1 / 3, 0]),
        ({"temperature": 1.0, "nucleus": 0.5}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "nucleus": 0.51}, [0, 2 / 3, 1 / 3, 0]),
        ({"temperature": 1.0, "top_k": 3, "nucleus": 0.9}, np.array([0, 0.5, 0.25, 0.15]) / 0.9),
        ({"temperature": 1.0, "top_k": 9, "nucleus": 1.0}, [0.1, 0.5, 0.25, 0.15]),
    ],
)
def test_tokens_are_drawn_by_their_chances(choice, wanted):
    drawn = chosen(np.repeat(LOGITS, 20000, axis=0), np.random.default_rng(0), **choice)
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, wanted, atol=0.012)
    assert ((shares > 0) == (np.asarray(wanted) > 0)).all()


@pytest.mark.parametrize(
    "choice", [{"temperature": -1.0}, {"temperature": np.nan}, {"top_k": 0}, {"nucleus": 0.0}, {"nucleus": 1.5}]
)
def test_choices_that_mean_nothing_are_refused(choice):
    with pytest.raises(ArgumentError, match="got (temperature|top_k|nucleus)="):
        chosen(LOGITS, np.random.default_rng(0), **choice)


def test_prompts_that_do_not_fit_are_refused():
    generator = Generator(gpt2.GPT2(10, 8, 1, 2, positions=8), 8)
    for prompt, said in (([1, 2], r"\(2,\), wanted \(1, tokens\)"), ([[1], [2]], r"\(2, 1\)"), ([[]], r"\(1, 0\)")):
        with pytest.raises(ArgumentError, match=said):
            generator.generate(prompt, 1)
    with pytest.raises(ArgumentError, match="4 tokens and 5 more are over 8"):
        generator.generate([[1, 2, 3, 4]], 5)


def test_what_is_kept_is_written_where_it_lies():
    """A step copies no cache: the new value of each is made in the variable itself."""
    generator = Generator(gpt2.GPT2(10, 8, 2, 2, positions=64), 64)
    program = generator.executor.program({"ids": [[1]], "read": 3})
    assert len(generator.past) == 4
    assert program.plan.arena_bytes < generator.past[0].tensor.nbytes
    assert not program.commits


def chain(seed):
    """Log probabilities of four symbols, 0 the end, given the last two."""
    table = np.random.default_rng(seed).gumbel(size=(4, 4, 4)) * 2
    table = np.log(np.exp(table) / np.exp(table).sum(axis=-1, keepdims=True))
    return lambda texts: table[texts[:, -2] if texts.shape[1] > 1 else 0, texts[:, -1]]


def total(score, text):
    return sum(score(np.array([text[: n + 1]]))[0, token] for n, token in enumerate(text[1:]))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_wide_beams_find_the_likeliest_of_all_texts(seed, penalty):
    """So many beams that nothing is dropped, and ends never fill them: the best of all that end within four tokens."""
    score = chain(seed)
    texts = [[3, *body, 0] for n in range(4) for body in product((1, 2, 3), repeat=n)]
    best = max(texts, key=lambda text: total(score, text) / ((5 + len(text) - 1) / 6) ** penalty)
    assert beam_search(score, 3, 0, width=200, length=4, penalty=penalty) == best[1:-1]


def test_one_beam_is_greedy_and_a_text_that_does_not_end_is_cut():
    score = chain(2)
    text = [3]
    while text[-1] != 0 and len(text) < 7:
        text.append(int(score(np.array([text]))[0].argmax()))
    assert beam_search(score, 3, 0, width=1, length=6) == [token for token in text[1:] if token]
    assert beam_search(lambda texts: np.array([[-9.0, 0.0]] * len(texts)), 1, 0, width=1, length=3) == [1, 1, 1]
    with pytest.raises(ArgumentError, match="got width=0"):
        beam_search(score, 3, 0, width=0, length=3)
