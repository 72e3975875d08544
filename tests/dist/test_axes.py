"""What tensor parallelism splits follows from the graph: as Megatron's names say it, under any names."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.dist import MEGATRON, TensorParallel, run_ranks
from hetu.dist.cut.axes import tensor_axes
from hetu.models import bert, gpt2, llama

from .models import batches, communication, losses, mlp, transformer

LENGTH, WORDS = 6, 40
MEGATRONS_NAMES = {  # of layers of hetu, then of published checkpoints: columns are axis 1, rows axis 0
    "*query/weight": 1, "*key/weight": 1, "*value/weight": 1, "*query/bias": 0, "*key/bias": 0, "*value/bias": 0,
    "*attention/output/weight": 0, "*up/weight": 1, "*up/bias": 0, "*down/weight": 0,
    "*embedding/weight": 0, "*head*/weight": 1, "*head*/bias": 0,
    "*.query.*": -1, "*.key.*": -1, "*.value.*": -1, "*.[qkv]_proj.weight": 1, "*.o_proj.weight": 0,
    "*.intermediate.dense.*": -1, "*.c_attn.*": -1, "*.c_fc.*": -1, "*.gate_proj.weight": 1, "*.up_proj.weight": 1,
    "*.output.dense.weight": 0, "*.c_proj.weight": 0, "*.down_proj.weight": 0,
    "*word_embeddings.weight": 0, "*embed_tokens.weight": 0, "*wte.weight": 0, "*lm_head.weight": 1,
}  # fmt: skip
ALSO = (
    "*wpe.weight",
    "*position_embeddings.*",
    "*predictions.bias",
)  # where the graph has rows and columns that names leave


def learned(y: ht.Node) -> list[ht.Node]:
    loss = ht.mean(ht.softmax_cross_entropy(y, ht.placeholder("t", (None, *y.shape[1:-1]), "int64")))
    return [loss, *ht.optim.Adam(0.01).minimize(loss).values()]


def ids() -> ht.Node:
    return ht.placeholder("x", (None, LENGTH), "int64")


def words() -> ht.Node:
    model = bert.BERT(WORDS, 16, 2, 4)
    return model.words(model(ids()))


def blocks_of(model: Callable[..., tuple[dict, list]]) -> list[ht.Node]:
    graph, _ = model()
    return [graph["train"][0], *graph["train"][1].values()]


NAMED: dict[str, Callable[[], list[ht.Node]]] = {
    "transformer": lambda: blocks_of(transformer),
    "mlp": lambda: blocks_of(mlp),
    "gpt2": lambda: learned(gpt2.GPT2(WORDS, 16, 2, 4)(ids())),
    "llama": lambda: learned(llama.Llama(WORDS, 16, 2, 4, key_heads=2)(ids())),
    "bert": lambda: learned(words()),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])  # of three, some divide no heads, and four no heads of keys
@pytest.mark.parametrize("model", NAMED)
def test_the_graph_says_what_names_say(model: str, ranks: int) -> None:
    outputs, wanted = NAMED[model](), dict[str, int]()
    for node in topological(outputs):
        if node.role is Role.VARIABLE and node.attrs["trainable"]:
            axis = next((a for like, a in MEGATRONS_NAMES.items() if fnmatch.fnmatch(node.name, like)), None)
            wanted |= {node.name: axis % node.ndim} if axis is not None else {}
    found = tensor_axes(outputs, ranks)
    assert wanted and {name: axis for name, axis in found.items() if name in wanted} == wanted
    assert all(any(fnmatch.fnmatch(name, also) for also in ALSO) for name in found.keys() - wanted.keys())


def weight(name: str, *shape: int) -> ht.Node:
    return ht.variable(name, ht.init.normal(0.2), shape)


def linears(*sizes: int) -> ht.Node:
    y = ht.placeholder("x", (None, sizes[0]))
    for k, (n, m) in enumerate(itertools.pairwise(sizes)):
        y = ht.tanh(y @ weight(f"w{k}", n, m) + weight(f"b{k}", m))
    return y


def attention_by_hand(depth: int = 1, heads: int = 4, size: int = 16) -> ht.Node:
    """Of plain products, between norms, with names that say nothing; then a gated part."""
    h = ht.embedding(weight("v", WORDS, size), ids())
    for k in range(depth):
        with ht.scope(f"u{k}"):
            y = ht.layer_norm(h, weight("v1", size), weight("v2", size))
            q, k, v = (
                ht.permute_dims(ht.reshape(y @ weight(n, size, size), (-1, LENGTH, heads, size // heads)), (0, 2, 1, 3))
                for n in ("v3", "v4", "v5")
            )
            seen = ht.permute_dims(ht.softmax(q @ ht.matrix_transpose(k) / 2.0, axis=-1) @ v, (0, 2, 1, 3))
            h = h + ht.reshape(seen, (-1, LENGTH, size)) @ weight("v6", size, size)
            y = ht.layer_norm(h, weight("v7", size), weight("v8", size))
            gated = ht.silu(y @ weight("v9", size, 24)) * (y @ weight("va", size, 24))
            h = h + ht.einsum("bsh,hd->bsd", gated, weight("vb", 24, size))
    return ht.einsum("bsd,vd->bsv", h, weight("vz", WORDS, size))


def convolutions() -> ht.Node:
    h = ht.placeholder("x", (None, 2, 8, 8))
    for k, channels in enumerate((8, 4)):
        h = ht.conv2d(h, weight(f"c{k}", channels, int(h.shape[1]), 3, 3), padding=1)
        h = ht.relu(ht.nn.BatchNorm(channels, name=f"n{k}")(h))
    return ht.flatten(h, 1) @ weight("last", 4 * 64, 10)


def through_a_stranger(dims: str | None) -> ht.Node:
    odd = ht.op(name="odd", infer=lambda x: x, dims=dims)(lambda xp, x: x)
    odd.grad(lambda g, y, x: g)
    return ht.tanh(odd(linears(8, 32)) @ weight("last", 32, 9))


def recurrent() -> ht.Node:
    """Each state has the columns of the weight, and is multiplied by its rows."""
    h, own = linears(8, 16), weight("own", 16, 16)
    for _ in range(3):
        h = ht.tanh(h @ own)
    return h @ weight("out", 16, 4)


STRANGE: dict[str, tuple[Callable[[], ht.Node], dict[str, int]]] = {
    "columns, rows": (lambda: linears(8, 32, 4), {"w0": 1, "b0": 0, "w1": 0}),
    "and columns": (lambda: linears(8, 32, 8, 32), {"w0": 1, "b0": 0, "w1": 0, "w2": 1, "b2": 0}),
    "rows first": (lambda: linears(64, 2, 16, 3), {"w0": 0, "w1": 1, "b1": 0, "w2": 0}),
    "attention by hand": (
        attention_by_hand,
        {"v": 0, "vz": 0, **{f"u0/v{n}": axis for n, axis in zip("34569ab", (1, 1, 1, 0, 1, 1, 0))}},
    ),
    "channels": (convolutions, {"c0": 0, "n0/scale": 0, "n0/bias": 0, "c1": 1, "last": 1}),
    "an operator that says nothing": (lambda: through_a_stranger(None), {"w0": 0, "last": 1}),
    "one that says something": (lambda: through_a_stranger("...->..."), {"w0": 1, "b0": 0, "last": 0}),
    "a weight that meets itself": (recurrent, {"w0": 0, "out": 1}),
}


def trained(make: Callable[[], ht.Node]) -> tuple[dict, list]:
    """A model with its batches, as `models.py` gives them."""
    y = make()
    x = next(n for n in topological([y]) if n.role is Role.PLACEHOLDER)
    words = len(y.shape) == 3
    made = batches(tuple(map(int, x.shape[1:])), int(y.shape[-1]), ids=words, count=3)
    loss = ht.mean(ht.softmax_cross_entropy(y, ht.placeholder("t", (None, *y.shape[1:-1]), "int64")))
    return {"train": [loss, ht.optim.Momentum(0.05).minimize(loss)], "eval": [y]}, made


@pytest.mark.filterwarnings("ignore:operator 'odd' has no dims rule")
@pytest.mark.parametrize("model", STRANGE)
def test_models_of_strangers(model: str) -> None:
    make, wanted = STRANGE[model]
    for outputs in ([make()], blocks_of(lambda: trained(make))):
        assert {re.sub(r"_\d+/", "/", name): axis for name, axis in tensor_axes(outputs, 2).items()} == wanted
    graph = functools.partial(trained, make)
    wanted = losses(graph, steps=3)
    for rank in run_ranks(2, lambda comm: losses(graph, TensorParallel(), comm, steps=3)):
        np.testing.assert_allclose(rank, wanted, atol=1e-5, rtol=0)


def test_a_layer_by_hand_sums_twice_each_way_and_gathers_nothing() -> None:
    """M. Shoeybi et al., 2019, section 3."""
    one, two = (
        communication(lambda: trained(lambda: attention_by_hand(depth)), TensorParallel(), 2)  # noqa: B023
        for depth in (1, 2)
    )
    assert two - one == {"all_reduce": 4}


def test_what_patterns_say_comes_before_what_the_graph_says() -> None:
    outputs = learned(linears(8, 32, 8, 32))
    given = TensorParallel(MEGATRON | {"w1": 1, "b1": 0}).build(outputs, 2).variables
    split = {name: kept.compute.parts[0].axes[-1][0] for name, kept in given.items() if name in ("w0", "w1", "w2")}
    assert split == {"w0": 0, "w1": 1, "w2": 0}
    assert repr(MEGATRON | {"w1": 1}) == "RuleBook({'w1': 1}, by_graph=True)" and MEGATRON
