"""Writing: what is kept gives the tokens that reading the whole text gives; how tokens are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.errors import ArgumentError
from hetu.generation import Generator, chosen
from hetu.models import gpt2, llama

MODELS = {
    "gpt2": lambda: gpt2.GPT2(19, 16, 2, 4, positions=24, dropout=0.5),
    "llama": lambda: llama.LLaMA(19, 16, 2, 4, key_heads=2, tied=True),
}
CHOICES = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1.0, "nucleus": 0.7}]
LOGITS = np.log([[0.1, 0.5, 0.25, 0.15]])


@pytest.mark.parametrize("model", MODELS)
def test_kept_keys_and_values_give_the_tokens_of_the_whole_text(model):
    made = MODELS[model]()
    kept = Generator(made, 24, batch=2)
    rng = np.random.default_rng(0)
    for variable in made.variables:  # far from even, so that what is likeliest follows from the text
        if variable in kept.executor.variables:
            kept.executor.state[variable] = rng.standard_normal(variable.shape)
    whole = Generator(made, 24, batch=2, state=kept.executor.state, cached=False)
    prompt = rng.integers(0, 19, (2, 5))
    found = [kept.generate(prompt, 19, **choice) for choice in CHOICES]
    for tokens, choice in zip(found, CHOICES):
        np.testing.assert_array_equal(tokens, whole.generate(prompt, 19, **choice))
    assert len({tokens.tobytes() for tokens in found}) == len(CHOICES)
    assert len(np.unique(found[0])) > 2
    np.testing.assert_array_equal(kept.generate(prompt, 19), found[0])  # nothing is left of what was read in between
    np.testing.assert_array_equal(kept.generate(np.c_[prompt, found[0][:, :4]], 15), found[0][:, 4:])


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


@pytest.mark.parametrize("choice", [{"temperature": -1.0}, {"top_k": 0}, {"nucleus": 0.0}, {"nucleus": 1.5}])
def test_choices_that_mean_nothing_are_refused(choice):
    with pytest.raises(ArgumentError, match="temperature of at least 0"):
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
