"""An operator says what it is where it is defined: nobody asks for its name, a stranger's is treated as ours are."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GraphError
from hetu.core.graph import OPS, topological
from hetu.core.op import LEAVES, Op, Role
from hetu.core.simplify import interpret, simplify
from hetu.core.types import same_type
from hetu.dist import DataParallel, Mesh, ZeRO, run_ranks, shard
from hetu.dist.layout.deduce import updating
from hetu.look.picture import family
from hetu.look.profiler import flops, profile
from hetu.ops.elementwise import float_elementwise
from hetu.passes import sparsify_updates
from hetu.passes.mixed_precision import mixed_precision
from hetu.plan import MachineProfile, bytes_between_ranks, simulate
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, ParameterServer

from .ps.network import job
from .samples import SAMPLES
from .test_ops import built

HETU = Path(ht.__file__).parent

# Passes that match a pattern of operators: no others may ask for a name.
PATTERNS = {
    "activation": "the slope of relu",
    "attention": "heads split and merged",
    "channels_last": "convolutions and pooling",
    "bags": "a sum over a lookup",
    "find_attention": "products around a softmax",
    "group_checks": "all, isfinite",
    "group_updates": "updates", "mixed_precision": "casts, transposes, first gradients",
    "fuse_norm_relu": "norm and relu",
    "composition": "p - lr g",
    "sparsify": "an update under a condition",
    "explain": "counts what it prints",
}  # fmt: skip


# -- nobody asks for a name ----------------------------------------------------------------------------------------


def is_name(node: ast.AST) -> bool:
    """`x.op.name`, `OPS["..."]` or the module of anything."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id == "OPS"
    if not isinstance(node, ast.Attribute):
        return False
    inner = getattr(node.value, "attr", getattr(node.value, "id", ""))
    return (node.attr == "name" and inner == "op") or (node.attr == "__module__" and inner == "forward")


def asks(tree: ast.AST, what: Callable[[ast.AST], bool] = is_name) -> list[int]:
    """Lines that compare a name, look it up in a table, or call a method of it."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args[:1] if node.func.attr == "get" else [node.func.value]
            asked = [a for a in asked if isinstance(a, ast.Attribute)]  # `OPS["add"].make(...)` makes a node
        found += [node.lineno for a in asked if what(a)]
    return found


@pytest.mark.parametrize(
    "text",
    [
        'node.op.name == "add"', 'x.op.name in ("a", "b")', "{}[node.op.name]", "TABLE.get(op.name)",
        'node.op is OPS["add"]', 'node.op.forward.__module__.startswith("hetu")', 'node.op.name.startswith("a")',
    ],
)  # fmt: skip
def test_asking_for_a_name_is_seen(text):
    assert asks(ast.parse(text)) == [1]
    assert asks(ast.parse('print(node.op.name); OPS["add"](a, b); v.name == "x"; node.role is Role.MOVE')) == []


def test_only_passes_that_match_a_pattern_ask_for_the_name_of_an_operator():
    files = [f for f in HETU.rglob("*.py") if f.stem not in PATTERNS]
    found = {f"{f.relative_to(HETU)}:{n}" for f in files for n in asks(ast.parse(f.read_text("utf-8")))}
    assert len(files) > 200 and sorted(found) == []


def test_they_ask_for_the_operator_itself():
    """By its name a stranger's would be taken for one of hetu's; it is counted, and servers must know it."""
    files = [f for f in HETU.rglob("*.py") if f.stem not in ("explain", "composition")]
    asked = {
        f.name
        for f in files
        if asks(ast.parse(f.read_text("utf-8")), lambda n: isinstance(n, ast.Attribute) and is_name(n))
    }
    assert asked == set()


# -- what is declared is true ------------------------------------------------------------------------------------------


def role_of(op: Op) -> Role | None:
    return op.role if isinstance(op.role, Role) else None


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_role_has_what_it_needs(name):
    op = OPS[name]
    role = role_of(op)
    assert role is not None or callable(op.role)
    assert ("comm" in op.defaults) == (role is Role.COMMUNICATION)
    assert role not in LEAVES or not op.inputs
    assert role is not Role.HINT or "layout" in op.defaults
    assert role is not Role.UPDATE or (op.inplace.get(0) == (0,) and not op.differentiable)
    assert not {"p", "lr"} <= {*op.inputs} or role is Role.UPDATE
    assert role is not Role.SCATTER or op.inputs == ["like", "ids", "rows"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)
def test_moves_make_no_new_numbers_and_lookups_are_scattered(sample):
    outputs, feed = built(sample)
    for node in topological(outputs):
        if node.role is Role.LOOKUP:
            (gradient,) = ht.gradients(ht.sum(node), [node.inputs[0]])
            assert gradient.role is Role.SCATTER and gradient.inputs[:2] == node.inputs
        if node.role is Role.SCATTER:
            (gradient,) = ht.gradients(ht.sum(node * node), [node.inputs[2]])
            assert Role.LOOKUP in {n.role for n in topological([gradient])}
        if node.role is Role.MOVE and not isinstance(node.type, tuple) and node.dtype.kind == "f":
            read = [i for k, i in enumerate(node.inputs) if k not in node.op.like]
            made, *given = interpret([node, *read], feed)
            known = {*np.ravel([v for v in node.attrs.values() if isinstance(v, int | float)]), 0, 1}
            assert flops(node) == 0
            assert {*np.ravel(made)} <= known.union(*(np.ravel(np.asarray(g, made.dtype)) for g in given))


# -- a stranger's operators --------------------------------------------------------------------------------------------

MESH = Mesh((2,), ("rank",))


def lookup() -> Op:
    """Rows of a table, spelled anew."""
    made = Op(
        lambda xp, table, ids: table[ids],
        name="rows_at",
        role=Role.LOOKUP,
        infer=lambda table, ids: OPS["take"].infer(table, ids, axis=0),
        dims=lambda table, ids: OPS["take"].dims(table, ids, axis=0).replace("@", "!"),
    )
    made.grad(lambda g, y, table, ids: (OPS["scatter_rows"](table, ids, g), None))
    return made


def descent() -> Op:
    """Gradient descent of half the rate."""
    return Op(
        lambda xp, p, g, lr: p - g * lr / 2,
        name="half",
        role=Role.UPDATE,
        infer=same_type,
        dims="...,...,->...",
        inplace={0: (0,)},
        differentiable=False,
    )


def total(**declared) -> Op:
    """The sum over all ranks, by the communicator's own method; its attributes are named as it likes."""

    def forward(xp, x, *, order=0, src=0, comm=None):
        out = np.empty_like(x)
        comm.all_reduce(np.ascontiguousarray(x), out, "sum")
        return out

    return Op(
        forward,
        name="total",
        role=Role.COMMUNICATION,
        infer=same_type,
        dims="a!b!->a!b!",
        differentiable=False,
        **declared,
    )


def model(find):
    ids, t = ht.placeholder("ids", (None, 4), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):  # whose names, and so whose weights, are the same in every thread
        table = ht.variable("table", ht.init.normal(0.0, 1.0), (50, 3))
        y = ht.nn.Linear(12, 3)(ht.flatten(find(table, ids), 1))
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return [loss, ht.optim.SGD(0.3).minimize(loss)]


def batch(step):
    rng = np.random.default_rng(step)
    return {"ids": rng.integers(0, 50, (8, 4)), "t": rng.integers(0, 3, 8)}


def test_a_table_of_a_strangers_lookup_lives_on_the_servers():
    def body(client, rank):
        ex = ht.Executor(model(lookup()), strategy=ParameterServer(), comm=Connected(Place(rank, 2), client))
        losses = [float(ex.run(batch(s))[0]) for s in range(3)]
        return losses, sorted(ex.state), {s.node.op.name for s in ex.program(batch(0)).steps}

    one = ht.Executor(model(ht.embedding))
    wanted = [float(one.run(batch(s))[0]) for s in range(3)]
    results = job("bsp", 2, body)
    np.testing.assert_allclose(np.mean([losses for losses, *_ in results], axis=0), wanted, rtol=1e-5)
    for _, state, names in results:
        assert "model/table" not in state and {"pull_rows", "push_rows"} <= names


def scattered() -> Op:
    """A gradient of rows, spelled anew."""
    ours = OPS["scatter_rows"]
    return Op(
        lambda xp, like, ids, rows: ours.forward(xp, like, ids, rows, window=None),
        name="rows_to",
        role=Role.SCATTER,
        infer=lambda like, ids, rows: like,
        like=(0,),
        linear=(2,),
    )


def test_two_gradients_by_a_strangers_scatter_are_joined():
    table, rows_to = ht.variable("table", ht.init.normal(0.0, 1.0), (50, 3)), scattered()
    pairs = [(ht.placeholder(f"ids{k}", (4,), "int64"), ht.placeholder(f"rows{k}", (4, 3))) for k in "ab"]
    outputs = (OPS["add"](*(rows_to(table, ids, rows) for ids, rows in pairs)),)
    (joined,) = sparsify_updates(outputs)
    assert joined.op is rows_to and joined.inputs[0] is table and joined.inputs[1].shape == (8,)
    rng = np.random.default_rng(0)
    feed = {table: rng.random((50, 3), np.float32)}
    for ids, rows in pairs:
        feed |= {ids: rng.integers(0, 50, 4), rows: rng.random((4, 3), np.float32)}
    np.testing.assert_allclose(interpret([joined], feed)[0], interpret(outputs, feed)[0], rtol=1e-6)


@pytest.mark.parametrize("strategy", [DataParallel(), ZeRO(1), ZeRO(3)], ids=str)
def test_a_strangers_update_is_one(strategy):
    def train(comm, rule, rate):
        x, w = ht.placeholder("x", (None, 4)), ht.variable("w", np.ones((4, 2), np.float32))
        loss = ht.mean(ht.square(x @ w))
        new = rule(w, ht.gradients(loss, [w])[0], rate)
        assert updating([new]) == {new} and family(new) == "update"
        ex, feed = ht.Executor([loss, {w: new}], strategy=strategy, comm=comm), {"x": np.eye(4, dtype=np.float32)}
        losses = [float(ex.run(feed)[0]) for _ in range(4)]
        return losses, [s.node.op.collective for s in ex.program(feed).steps if s.node.role is Role.COMMUNICATION]

    ours = run_ranks(2, lambda comm: train(comm, OPS["sgd"], 0.1))
    assert run_ranks(2, lambda comm: train(comm, descent(), 0.2)) == ours
    assert ours[0][0][0] > ours[0][0][-1]


def test_a_strangers_move_costs_no_operations_and_follows_its_operands():
    flip = Op(lambda xp, x: xp.flip(x, axis=0), name="flip", role=Role.MOVE, infer=same_type)
    halve = Op(lambda xp, x: x / 2, name="halve", infer=float_elementwise)
    x, w = ht.placeholder("x", (3, 4)), ht.placeholder("w", (4, 4))
    moved, computed = flip(x @ w), halve(x @ w)
    assert (flops(moved), flops(computed)) == (0, 12)
    made = mixed_precision([moved, computed], {}, [], "float16")[0]
    kinds = {n.op.name: n.inputs[0].dtype.name for n in topological(made) if n.op.name in ("flip", "halve")}
    assert kinds == {"flip": "float16", "halve": "float32"}


def test_a_strangers_product_takes_16_bits_and_counts_for_itself():
    outer = Op(
        lambda xp, a, b: a[:, None] * b[None, :],
        name="outer",
        precision="low",
        infer=lambda a, b: ht.placeholder("like", (*a.shape, *b.shape), a.dtype).type,
    )
    outer.flops(lambda out, a, b: 2 * int(out.size))
    y = outer(ht.placeholder("a", (3,)), ht.placeholder("b", (5,)))
    assert flops(y) == 30
    (made,) = mixed_precision([y], {}, [], "float16")[0]
    assert [i.dtype.name for i in made.inputs[0].inputs] == ["float16"] * 2


def test_a_strangers_hint_places_a_value():
    here = Op(lambda xp, x, *, layout: x, name="here", role=Role.HINT, infer=lambda x, *, layout: x, dims="...->...")

    def run(comm, hint):
        y = hint(2.0 * ht.placeholder("x", (4, 6)), layout=MESH.layout(rank=1)) + 1.0
        feed = {"x": np.ones((4, 6), np.float32)}
        ex = ht.Executor([y], strategy=DataParallel(), comm=comm)
        return ex.run(feed)[0].sum(), [(s.node.op.name, s.node.type) for s in ex.program(feed).steps]

    assert run_ranks(2, lambda comm: run(comm, here)) == run_ranks(2, lambda comm: run(comm, shard))


def test_a_strangers_communication_gets_the_communicator_is_not_folded_and_is_counted():
    add_up = total(collective="all_reduce")
    x = ht.constant(np.ones((4, 3), np.float32))
    y = add_up(add_up(x) + 1.0)
    assert simplify([y])[0].role is Role.COMMUNICATION and family(y) == "communication"

    def run(comm):
        ex = ht.Executor([y], comm=comm)
        return (
            ex.run({})[0],
            bytes_between_ranks(ex.program({}), 2),
            {r.label for r in profile(ex, repeat=1).rows("layer")},
        )

    for value, sent, labels in run_ranks(2, run):
        np.testing.assert_array_equal(value, np.full((4, 3), 6.0))
        assert sent == 2 * 4 * 12 and "(communication)" in labels


def test_a_planner_asks_a_strangers_communication_what_it_sends():
    x = ht.placeholder("x", (4, 3))

    def cost(op):
        return simulate([op(x + 1.0, order=1)], DataParallel(), MachineProfile(), world_size=2, shapes={"x": (4, 3)})

    assert cost(total(collective="all_reduce")).sent
    with pytest.raises(GraphError, match="does not say what it sends") as caught:
        cost(total())
    assert "collective=" in caught.value.fix
