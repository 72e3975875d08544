"""Every model of `hetu.models` at the size that an example trains: what it has to learn, and what it has to compute.

Of one sample: an image of 28 x 28, 64 characters of 76, a row of the census with 800 ids, the graph of 3,000 nouns, a
triple, a user and an item. Left out: parts of models without variables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hetu as ht
from hetu import models
from hetu.core.graph import topological
from hetu.look.profiler import flops

Build = Callable[[Any], ht.Node]


def builds() -> dict[str, Build]:
    """The output of a model, by its name, or of those of a family."""
    pixels, words = ht.placeholder("x", (1, 1, 28, 28)), ht.placeholder("x", (1, 64), "int64")
    numbers, ids = ht.placeholder("x", (1, 6)), ht.placeholder("ids", (1, 14), "int64")
    one, vector = ht.placeholder("one", (1,), "int64"), ht.placeholder("vector", (1, 64))
    bag, by_field = ht.placeholder("ids", (14,), "int64"), {"field_count": 14}
    nouns = ht.data.wordnet_nouns()
    nodes, classes = ht.placeholder("x", nouns.features.shape), len(nouns.info["classes"])
    graph = ht.data.adjacency(nouns.edges, len(nouns))
    return {
        "vision": lambda made: made(pixels, 10),
        "vit": lambda made: made(pixels, 10),
        "text": lambda made: made(words, 76),
        "clicks": lambda made: made(numbers, ids, 800),
        "wide": lambda made: made(bag, one, 800),
        "field_factorization": lambda made: made(bag, bag, one, 800, **by_field),
        "deep_factorization": lambda made: made(bag, bag, one, 800, **by_field),
        "graphs": lambda made: made(nodes, graph, classes),
        "knowledge": lambda made: made(vector, vector, vector),
        "gpt_of_experts": lambda made: made(words, 76, lambda: ht.nn.TopKGate(64, 4))[0],
        "RecurrentText": lambda made: made(76, 192)(words)[0],
        "ncf": lambda made: made(one, one, 943, 1682),
        "two_towers": lambda made: made(one, one, 943, 1682),
        "Sampled": lambda made: made(nouns.features.shape[1], classes)(nodes, ((None, graph), (None, graph))),
        "SampledAttention": lambda made: made(nouns.features.shape[1], classes)(nodes, ((None, graph), (None, graph))),
        "GPT2": lambda made: made(76, 128, 3, 4, positions=64)(words),
        "Llama": lambda made: made(76, 128, 3, 4, key_heads=2)(words),
        "BERT": lambda made: (model := made(76, 128, 3, 4, positions=64)).words(model(words)),
        "EncoderDecoder": lambda made: made(76, 76)(words, words),
        "RecurrentEncoderDecoder": lambda made: made(76, 76)(words, words),
        "Triples": lambda made: made(4516, 18, 64, models.knowledge.transe)(one, one, one),
    }


def sizes() -> Iterator[tuple[str, str, int, float]]:
    """Family, name, parameters and millions of operations forward of every model that has parameters."""
    known = builds()
    for family in models.__all__:
        module = getattr(models, family)
        for name in module.__all__:
            if name == "load":  # makes one of a file
                continue
            y = known.get(name, known.get(family))(getattr(module, name))
            if count := ht.summary(y).trainable:
                yield family, name, count, sum(map(flops, topological([y]))) / 1e6
