"""The compiled program against the naive interpreter on random graphs, and what the plan promises about memory.

The random graphs hold views, broadcasts, reductions, several outputs, in-place candidates and variables whose new
values read one another in every order: where sharing memory can go wrong. Half of them leave sizes of feeds open.
"""

from __future__ import annotations

import operator
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import Graph, Node
from hetu.core.program import Program
from hetu.core.simplify import interpret
from hetu.core.types import substitute
from hetu.passes import PASSES, specialize

from .at_once import compiled_at_once
from .samples import lines_of

CHUNK = 100
FIRST = [pytest.param(n, marks=pytest.mark.nightly if n else ()) for n in range(0, 300, CHUNK)]
SHAPES = [(4, 4), (4,), (1, 4), (4, 1), ()]
FED = {(f"x{i}", axis): 4 for i in range(2) for axis in range(2)}  # the sizes that are left open


def unary(rng: np.random.Generator, x: Node) -> Node:
    """One random operator of one operand: arithmetic, a view, a reduction or one output of several."""
    choices = [operator.neg, lambda v: v * 0.5, ht.sin, lambda v: v + 1.0, lambda v: ht.sum(v) * 0.1]
    choices += [lambda v: ht.reshape(v, (-1,)), lambda v: ht.where(v > 0, v, v * 0.5)]
    if x.ndim == 2:
        choices += [ht.matrix_transpose, lambda v: v[::-1], lambda v: v[:, :1], lambda v: ht.sum(v, 0, keepdims=True)]
        choices += [lambda v: ht.sort(v, axis=1), lambda v: ht.topk(v, k=1)[0]]
    return choices[rng.integers(len(choices))](x)


def binary(rng: np.random.Generator, a: Node, b: Node) -> Node | None:
    choices = [operator.add, operator.sub, operator.mul, ht.maximum]
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
        choices += [lambda x, y: ht.matmul(x, y) * 0.25] * 2
    try:
        made = choices[rng.integers(len(choices))](a, b)
        specialize([made], FED)
    except ht.errors.ShapeError:
        return None
    return made


def random_graph(seed: int, open_sizes: bool = False) -> tuple[list[Node], dict[Node, Node], list[Node], list[Node]]:
    """Fetches, updates, placeholders, of which all or some sizes of 4 may be open, and variables."""
    rng = np.random.default_rng(seed)
    shapes = [SHAPES[rng.integers(len(SHAPES))] for _ in range(2)]
    if open_sizes:
        shapes = [tuple(None if size == 4 and rng.random() < 0.7 else size for size in shape) for shape in shapes]
    feeds = [ht.placeholder(f"x{i}", shape) for i, shape in enumerate(shapes)]
    variables = [
        ht.variable(f"v{i}", rng.uniform(-1, 1, SHAPES[rng.integers(3)]).astype(np.float32))
        for i in range(rng.integers(1, 4))
    ]
    pool = [*feeds, *variables]
    for _ in range(rng.integers(4, 22)):
        a, b = pool[rng.integers(len(pool))], pool[rng.integers(max(0, len(pool) - 6), len(pool))]
        made = unary(rng, a) if rng.random() < 0.5 else binary(rng, a, b)
        if made is not None and made.dtype == np.float32:
            pool.append(made)
    updates = {}
    for v in variables:
        fitting = [n for n in pool if n.shape == v.shape]
        if rng.random() < 0.8:
            value = fitting[rng.integers(len(fitting))]
            updates[v] = value if rng.random() < 0.5 else v * 0.5 + value * 0.25
    fetches = [pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 4))]
    return fetches, updates, feeds, variables


def naive_step(fetches, updates, values):
    outputs = specialize([*fetches, *updates.values()], FED)
    named = {node.name: a for node, a in values.items()}
    leaves = {n: named[n.name] for n in Graph(outputs).nodes if not n.inputs and n.name in named}
    results = interpret(outputs, leaves)
    new = dict(zip(updates, (np.array(r) for r in results[len(fetches) :])))
    return [np.array(r) for r in results[: len(fetches)]], values | new


CONFIGURATIONS = {
    "default": {},
    "no passes": {"passes": []},
    "no donation": {"donate": False},
    "no reuse": {"reuse": False, "passes": ["simplify"]},
}


def random_feed(rng, feeds, ex):
    """Numbers for the placeholders, and those among them that the program takes."""
    shapes = (substitute(f.shape, FED) for f in feeds)
    feed = {f: rng.uniform(-1, 1, shape).astype(np.float32) for f, shape in zip(feeds, shapes)}
    taken = {n.name for n in ex.subgraphs["default"].placeholders.values()}
    return feed, {f: a for f, a in feed.items() if f.name in taken}


def bound_program(name, seed):
    fetches, updates, feeds, _ = random_graph(seed, open_sizes=seed % 2 == 1)
    ex = ht.Executor([*fetches, updates], **CONFIGURATIONS[name])
    return ex.program(random_feed(np.random.default_rng(seed), feeds, ex)[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_random_graphs_equal_the_interpreter(name, first):
    seeds = range(first, first + CHUNK)
    compiled_at_once(partial(bound_program, name, seed) for seed in seeds)
    for seed in seeds:
        fetches, updates, feeds, variables = random_graph(seed, open_sizes=seed % 2 == 1)
        ex = ht.Executor([*fetches, updates], **CONFIGURATIONS[name])
        rng = np.random.default_rng(seed)
        values = {v: np.array(v.attrs["init"]) for v in variables}
        for step in range(3):
            feed, taken = random_feed(rng, feeds, ex)
            got = ex.run(taken)[: len(fetches)]
            with np.errstate(all="ignore"):
                wanted, values = naive_step(fetches, updates, values | feed)
            for g, w in zip(got, wanted, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}, step {step}")
            for v in variables:
                if v.name in ex.state:
                    np.testing.assert_allclose(ex.state[v], values[v], rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")


def mlp(width: int = 64, batch: int = 32):
    x = ht.placeholder("x", (batch, width))
    h = x
    for layer in range(6):
        h = ht.maximum(h @ ht.variable(f"w{layer}", np.eye(width, dtype=np.float32)) + 1.0, 0.0)
    return x, h


def test_forward_of_an_mlp_needs_little_of_the_memory_it_would_take_without_reuse():
    x, y = mlp()
    program = ht.Executor([y]).program({x: np.zeros((32, 64), np.float32)})
    assert program.plan.arena_bytes <= 0.6 * program.plan.unplanned_bytes


def deep_training(wrap, depth: int = 16, blocks: int = 4):
    """A program that trains a deep MLP in blocks of layers, and the gradients of its weights."""
    rng = np.random.default_rng(0)
    x = ht.placeholder("x", (256, 32))
    weights = [ht.variable(f"w{i}", rng.normal(0, 0.2, (32, 32)).astype(np.float32)) for i in range(depth)]

    def block(h, layers):
        for w in layers:
            h = ht.tanh(h @ w)
        return h

    y, size = x, depth // blocks
    for i in range(blocks):
        y = wrap(block)(y, weights[i * size : (i + 1) * size])
    loss = ht.mean(ht.square(y))
    gradients = ht.gradients(loss, weights)
    ex = ht.Executor({"train": [loss, dict(zip(weights, gradients))], "look": gradients})
    feed = {x: rng.normal(size=(256, 32)).astype(np.float32)}
    return ex.program("train", feed).plan, ex.run("look", feed)


def test_recomputation_halves_the_peak_of_a_deep_network_and_changes_no_gradient():
    """16 layers in 4 blocks: about 4 + 4 values live at once where 16 were (Chen et al., 2016)."""
    kept, gradients = deep_training(lambda f: f)
    again, same = deep_training(ht.recompute)
    value = 256 * 32 * 4
    assert kept.arena_bytes >= 16 * value
    assert again.arena_bytes <= 10 * value
    for a, b in zip(gradients, same, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_recomputed_block_that_reads_only_feeds_is_computed_twice_too():
    """Its copy must not be merged with the first values, although its inputs are leaves."""
    plan, _ = deep_training(ht.recompute, depth=4, blocks=1)
    assert lines_of(plan.order).count("tanh") == 8


def test_sgd_writes_every_parameter_in_place():
    x, y = mlp()
    variables = ht.Graph((y,)).leaves("variable")
    updates = {v: v - 0.1 * g for v, g in zip(variables, ht.gradients(ht.sum(y), variables))}
    for order in (updates, dict(reversed(updates.items()))):
        program = ht.Executor([ht.sum(y), order]).program({x: np.zeros((32, 64), np.float32)})
        assert len(program.plan.donated) == len(variables)
        assert not program.commits


@pytest.mark.parametrize(
    "new",
    [
        lambda a, b: {a: b, b: a},
        lambda a, b: {a: ht.matrix_transpose(a), b: a},
        lambda a, b: {a: a + b, b: a - b},
        lambda a, b: {a: b * 1.0, b: ht.matrix_transpose(a)},
    ],
)
def test_updates_that_read_each_other_see_old_values(new):
    a, b = ht.variable("a", np.arange(4.0).reshape(2, 2)), ht.variable("b", np.full((2, 2), 5.0))
    ex = ht.Executor([a, new(a, b)])
    old = {a: ex.state[a], b: ex.state[b]}
    wanted = dict(zip((a, b), interpret([*new(a, b).values()], old)))
    fetched = ex.run()[0]
    np.testing.assert_array_equal(fetched, old[a])
    for v in (a, b):
        np.testing.assert_array_equal(ex.state[v], wanted[v])


def test_returned_values_never_change_later():
    x, w = ht.placeholder("x", (3,)), ht.variable("w", np.zeros(3))
    ex = ht.Executor([w, x * 2.0, {w: w + 1.0}])
    kept = ex.run({x: [1, 2, 3]})[:2]
    first = [np.array(v) for v in kept]
    ex.run({x: [7, 8, 9]})
    for before, now in zip(first, kept):
        np.testing.assert_array_equal(before, now)


def test_an_unknown_size_gets_one_program_per_size():
    x = ht.placeholder("x", (None, 3))
    ex = ht.Executor([ht.sum(x, 1)])
    for rows in (4, 2, 4, 1):
        assert ex.run({x: np.ones((rows, 3))})[0].tolist() == [3.0] * rows
    assert len(ex.subgraphs["default"].programs) == 3


def test_printing_a_program_shows_slots_frees_and_the_peak():
    x, y = mlp()
    program = ht.Executor([y]).program({x: np.zeros((32, 64), np.float32)})
    text = str(program)
    assert f"arena {program.plan.arena_bytes:,} bytes at the peak" in text
    assert "in place" in text and "frees" in text and isinstance(program, Program)


def test_a_printed_program_is_narrow_and_keeps_the_ends_of_names():
    with ht.scope("a_model_with_a_long_name"):
        x = ht.placeholder("x", (8, 64))
        h = ht.nn.Linear(64, 64, activation=ht.tanh, name="first")(x)
        loss = ht.mean(ht.nn.Linear(64, 64, name="second")(h) ** 2)
    text = str(ht.Executor([loss, ht.optim.Adam(0.1).minimize(loss)]).program({x: np.zeros((8, 64))}))
    assert max(map(len, text.splitlines())) <= 110
    assert "second/weight" in text and "…" in text


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_can_be_switched_off(name, monkeypatch):
    x, y = mlp()
    feed = {x: np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)}
    everything = ht.Executor([y]).run(feed)[0]
    monkeypatch.setenv("HETU_PASSES", ",".join(p for p in PASSES if p != name))
    np.testing.assert_allclose(ht.Executor([y]).run(feed)[0], everything, rtol=1e-5)


def test_a_failing_step_marks_the_state_only_after_it_was_written():
    table, ids = ht.variable("table", np.zeros((4, 2))), ht.placeholder("ids", (None,), "int64")
    rows = ht.take(table, ids, axis=0)
    w = ht.variable("w", np.zeros(2))
    ex = ht.Executor([rows, {w: w + ht.sum(rows, 0)}])
    with pytest.raises(ht.errors.ValueRangeError):
        ex.run({ids: [9]})
    assert not ex.state.dirty
    ex.run({ids: [3]})
