"""Strategies as plain data, and the errors for those that do not fit a graph, the ranks or one another."""

from __future__ import annotations

import copy
import inspect
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, AxisError, GraphError, UnknownNameError
from hetu.dist import SUM, Layout, Mesh, SerialComm, Shard, Staged, run_ranks, shard
from hetu.dist.cut.builders import MEGATRON, DataParallel, ExpertParallel, Parallel, RuleBook, TensorParallel, ZeRO
from hetu.dist.cut.heterogeneous import Heterogeneous
from hetu.dist.cut.pipeline_builder import Pipeline
from hetu.dist.cut.strategy import KINDS, Builder, Kept, Strategy
from hetu.plain_data import kinds_of

from .models import losses, mlp

MESH = Mesh((2,), ("data",))
BUILDERS = {
    "data": (DataParallel(), 2),
    "zero": (ZeRO(3), 4),
    "tensor": (TensorParallel({"mlp/up/weight": 1}), 2),
    "both": (Parallel(tensor=2, zero=1), 4),
    "unequal": (Heterogeneous([(0, 1), (2,)], (2, 1)), 3),
}


def outputs():
    (loss, updates), _ = mlp()[0]["train"], None
    return [loss, *updates.values()]


def test_a_kind_that_nothing_has_brought_yet_says_what_to_import(monkeypatch):
    text = ht.strategies.Hybrid(served="*").build(outputs(), 2).to_json()
    assert Strategy.from_json(text).to_json() == text
    monkeypatch.delitem(KINDS, "serving")
    with pytest.raises(ArgumentError, match=r"a kind 'serving', wanted one of[\s\S]*import first .* hetu.strategies"):
        Strategy.from_json(text)


@pytest.mark.parametrize("name", BUILDERS)
def test_json_round_trip(name):
    builder, ranks = BUILDERS[name]
    strategy = builder.build(outputs(), ranks)
    assert Strategy.from_json(strategy.to_json()) == strategy


def subclasses(of):
    for kind in of.__subclasses__():
        yield from (kind, *subclasses(kind))


PLACED = ht.ps.partition_bigraph(np.eye(4, dtype=int), 2).placed
CACHE, ALL = ht.ps.Cache("lfu", 0.25, 3, 5), {"data": 2, "tensor": 2, "zero": 1, "split": {"w": 1}, "experts": {"e": 0}}
GIVEN = ALL | {"hosts": [(0,), (1,)], "accumulate": 2, "statistics": "microbatch", "local_feeds": True, "stage": 3,
    "groups": [(0,), (1,)], "shares": [1, 2], "pipelines": [[(0,)], [(1,)]], "microbatches": 2, "schedule": "gpipe",
    "cuts": [{"l": 0}, {"l": 0}], "cut": {"l": 0}, "stages": 2, "levels": {"l": 3}, "stored": {"w": 0},
    "feeds": {"x": 0}, "parallel": ZeRO(1), "batch_size": 8, "served": ["w"], "consistency": ht.ps.SSP(2),
    "cache": CACHE, "compress": ht.ps.Compress(), "placed": PLACED, "pooled": ["w"], "min_ranks": 3, "wait": 0.5,
    "decay": 0.25, "chunk_size": 3, "wire": "int8", "seed": 2,
    "grids": [(1, 1), (2, 1)], "updated": {"w": 0}, "copies": 2}  # fmt: skip
WRITERS = [k for k in subclasses(Builder) if k.__module__.startswith("hetu.") and not is_dataclass(k)]
CHOICES = [(kind, name) for kind in WRITERS for name in inspect.signature(kind).parameters]


@pytest.mark.parametrize(("kind", "name"), CHOICES, ids=lambda value: getattr(value, "__name__", value))
def test_a_builder_shows_all_that_it_was_given_and_nothing_else_and_keeps_it(kind, name):
    needed = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    builder = kind(**(given := {each: GIVEN[each] for each in dict.fromkeys((*needed, name))}))
    order = [each for each in inspect.signature(kind).parameters if each in given]
    assert repr(builder) == f"{kind.__name__}({', '.join(f'{each}={given[each]!r}' for each in order)})"
    assert not isinstance(builder, Parallel) or repr(builder.but()) == repr(builder)


@pytest.mark.parametrize("kind", [*KINDS.values(), ht.plan.Plan, ht.plan.MachineProfile])
def test_what_is_compared_is_written_and_read(kind):
    assert {*kinds_of(kind)} == {f.name for f in fields(kind) if f.compare}


def test_the_state_of_a_strangers_optimizer_lies_with_its_parameter_under_any_name():
    @ht.optim.update_rule
    def signs(p, m, g, lr, *, beta=0.5):
        m = beta * m + (1 - beta) * g
        return p - lr * ht.sign(m), m

    with ht.scope("strange"):
        w = ht.variable("w", ht.init.ones, (4, 3))
        speed = ht.variable("speed", ht.init.zeros, (4, 3), trainable=False)
        beside = ht.variable("w/beside", ht.init.zeros, (4, 3), trainable=False)
        new = dict(zip((w, speed), signs(w, speed, w * w, 0.1)))
    outputs = [*new.values(), beside + 1]
    strategy = ZeRO(1).build(outputs, 2)
    assert [strategy.store(v).local_shape(v.shape, 0) for v in (w, speed, beside)] == [(4, 3), (2, 3), (4, 3)]
    row = next(line for line in strategy.table(outputs).splitlines() if line.startswith("strange/w "))
    assert row.endswith("all_gather")


def test_what_was_read_trains_like_what_was_written():
    text = ZeRO(1).build(outputs(), 2).to_json()
    found = run_ranks(2, lambda comm: losses(mlp, Strategy.from_json(text), comm, steps=3))
    np.testing.assert_allclose(found, [losses(mlp, steps=3)] * 2, atol=1e-5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"base": {"parts": [], "across": "dup", "ratio": []}}'])
def test_text_that_is_no_strategy(text):
    with pytest.raises(ArgumentError):
        Strategy.from_json(text)


def test_table():
    def table(comm):
        return str(ht.Executor(mlp()[0], strategy=ZeRO(3), comm=comm).placement)

    first, _ = run_ranks(2, table)
    header, *rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in first.splitlines()]
    assert header == ["variable", "shape", "compute", "store", "bytes a rank", "collectives"]
    weight = next(row for row in rows if row[0] == "mlp/up/weight")
    assert weight == [
        "mlp/up/weight", "(10, 16)", "[dup/2, dup/1] on 0-1", "[0/2, dup/1] on 0-1", "320",
        "all_gather, reduce_scatter",
    ]  # fmt: skip
    lines = [[*map(str.strip, re.split("  +", line))] for line in str(ZeRO(3).build(outputs(), 2)).splitlines()]
    whole, rows = "[dup/2, dup/1] on 0-1", "[0/2, dup/1] on 0-1"
    assert lines[:2] == [
        ["", "compute", "store", "synchronized"],
        ["all else", *2 * [whole], "buckets of 4,194,304 bytes"],
    ]
    assert ["mlp/up/weight", whole, rows] in lines and ["x (fed)", rows] in lines


def test_a_notebook_shows_a_table_and_the_shards():
    def shown(comm):
        return ht.Executor(mlp()[0], strategy=ZeRO(3), comm=comm).placement._repr_html_()

    first, _ = run_ranks(2, shown)
    table, _, picture = first.partition("<svg")
    cells = [c.text for c in ElementTree.fromstring(table).iter("td")]
    start = cells.index("mlp/up/weight")
    assert cells[start + 1 : start + 6] == [
        "(10, 16)", "[dup/2, dup/1] on 0-1", "[0/2, dup/1] on 0-1", "320", "all_gather, reduce_scatter",
    ]  # fmt: skip
    assert "mlp/up/weight on rank 1: [5:10, 0:16]" in "".join(ElementTree.fromstring("<svg" + picture).itertext())


def test_names_are_escaped_in_a_notebook():
    kept = Kept(MESH.layout(), MESH.layout(data=0))
    html = Strategy(MESH.layout(), {"<b>": kept}, {"a&b": MESH.layout(data=0)})._repr_html_()
    cells = [c.text for c in ElementTree.fromstring(html).iter("td")]
    whole, split = "[dup/2] on 0-1", "[0/2] on 0-1"
    assert cells[:4] == ["all else", whole, whole, "buckets of 4,194,304 bytes"]
    assert cells[4:] == ["<b>", whole, split, None, "a&b (fed)", split, None, None]


# -- mistakes ------------------------------------------------------------------------------------------------------


def attach(strategy, comm=None):
    return ht.Executor(mlp()[0], strategy=strategy, comm=comm or SerialComm())


def test_unknown_variable():
    kept = Kept(MESH.layout(), MESH.layout())
    with pytest.raises(UnknownNameError, match=r"variable 'mlp/up/wait', which the graph lacks") as caught:
        attach(Strategy(MESH.layout(), {"mlp/up/wait": kept}))
    assert "mlp/up/weight" in str(caught.value)


def test_unknown_feed():
    with pytest.raises(UnknownNameError, match="placeholder 'y', which the graph lacks"):
        attach(Strategy(MESH.layout(), {}, {"y": MESH.layout(data=0)}))


def test_unknown_rank():
    far = Layout(Shard((0, 7), ((0, 2),)))
    with pytest.raises(ArgumentError, match="the layout of 'x' uses rank 7, the job has 1 ranks"):
        attach(Strategy(Layout(Shard((0,))), {}, {"x": far}))


def test_mesh_larger_than_the_world():
    with pytest.raises(ArgumentError, match=r"uses rank 1, the job has 1 ranks.*"):
        attach(Strategy(MESH.layout()))
    with pytest.raises(ArgumentError, match=r"2 x 3 \(data x tensor\) ranks, there are 1"):
        attach(Parallel(data=2, tensor=3))
    with pytest.raises(ArgumentError, match="groups of 3 ranks, there are 1"):
        attach(Heterogeneous([(0, 1), (2,)], (2, 1)))


def test_hint_on_ranks_that_do_not_exist():
    y = shard(ht.placeholder("x", (4, 4)), layout=Mesh((8,), ("model",)).layout(model=1))
    with pytest.raises(ArgumentError, match=r"the hint at test_strategy.py:\d+ uses rank 7, the job has 1 ranks"):
        ht.Executor([y], strategy=DataParallel(), comm=SerialComm())


def test_layouts_that_do_not_fit():
    with pytest.raises(AxisError, match="splits axis 1 of <variable 'mlp/up/bias'"):
        attach(Strategy(MESH.layout(), {"mlp/up/bias": Kept(MESH.layout(data=1), MESH.layout())}))
    with pytest.raises(ArgumentError, match="keeps <variable 'mlp/up/bias' .* as a pending result"):
        attach(Strategy(MESH.layout(), {"mlp/up/bias": Kept(MESH.layout(), MESH.layout(data=SUM))}))


def test_what_a_gradient_cannot_go_through_is_refused():
    whole, split, summed = MESH.layout(), MESH.layout(data=1), MESH.layout(data=SUM)
    with pytest.raises(AxisError, match="splits axis 1 of <variable 'mlp/up/bias'"):
        attach(Strategy(whole, {"mlp/up/bias": Kept(whole, whole, through=(summed, split))}))
    staged = Staged(whole, {"mlp/up/bias": Kept(whole, whole, through=(summed,))}, stages=(whole,))
    with pytest.raises(ArgumentError, match=r"the gradient of 'mlp/up/bias' is to go through .*[\s\S]*through= empty"):
        staged.check(outputs(), 2)


def test_what_all_ranks_draw_by_is_not_split():
    drawn = ht.dropout(ht.placeholder("x", (4, 4)), 0.5)
    strategy = Strategy(MESH.layout(), {"random_state": Kept(MESH.layout(data=0), MESH.layout())})
    with pytest.raises(ArgumentError, match="splits <variable 'random_state' .*, which every rank draws by"):
        strategy.check([drawn], 2)


@pytest.mark.parametrize("groups", [[(0, 1), (1,)], [(1, 2), (3,)], [(0,), (1,), (2,)]])
def test_groups_that_are_no_groups(groups):
    with pytest.raises(ArgumentError, match="groups"):
        Heterogeneous(groups, (2, 1))


def test_unknown_stage_of_zero():
    with pytest.raises(ArgumentError, match="zero=4"):
        ZeRO(4)


def test_different_graphs_are_named_at_the_first_difference():
    def run(comm):
        x = ht.placeholder("x", (None, 3))
        y = ht.exp(x) if comm.rank != 2 else ht.tanh(x)
        return ht.Executor([ht.sum(y)], strategy=DataParallel(), comm=comm).run({"x": np.ones((6, 3))})

    with pytest.raises(GraphError, match=r"line \d+ is\n.*(exp|tanh)\(%0\).*\n.*(exp|tanh)\(%0\)"):
        run_ranks(3, run)


def test_different_strategies_are_named():
    def run(comm):
        strategy = DataParallel() if comm.rank else ZeRO(1)
        return losses(mlp, strategy, comm, steps=1)

    with pytest.raises(ArgumentError, match="given different things: variable 'mlp/up/weight/adam_m'"):
        run_ranks(2, run)


MISTAKEN = {  # patterns that split nothing: the builder, and what is said
    "a name": (
        lambda: TensorParallel({"no/such": 1}),
        UnknownNameError,
        r"split=\{'no/such': 1\} fits no trained v",
    ),
    "one of two": (
        lambda: TensorParallel({"mlp/up/weight": 1, "mlp/down/wieght": 0}),
        UnknownNameError,
        r"'mlp/down/wieght': 0.* fits no[\s\S]*did you mean 'mlp/down/weight'\?",
    ),
    "a wildcard": (
        lambda: Parallel(tensor=2, split={"*/up/kernel": 1}),
        UnknownNameError,
        r"/kernel': 1\} fits no",
    ),
    "not even used": (lambda: Parallel(split={"no/such": 1}), UnknownNameError, "fits no trained variable"),
    "groups": (lambda: Heterogeneous([(0,), (1,)], (1, 1), split={"no/such": 1}), UnknownNameError, "fits no trained"),
    "a pipeline": (lambda: Pipeline(1, tensor=2, split={"no/such": 1}), UnknownNameError, "fits no trained variable"),
    "experts": (
        lambda: ExpertParallel({"no/such/*": 0}),
        UnknownNameError,
        r"experts=\{'no/such/\*': 0\} fits no",
    ),
    "an axis": (lambda: TensorParallel({"mlp/up/weight": 5}), AxisError, r"splits axis 5 of <variable 'mlp/up/weight'"),
    "an axis from the end": (
        lambda: TensorParallel({"*/bias": -2}),
        AxisError,
        r"axis -2 of [\s\S]*has the axes 0 to 0",
    ),
    "an axis of experts": (lambda: ExpertParallel({"*/weight": 2}), AxisError, "splits axis 2 of <variable"),
}


@pytest.mark.parametrize("what", MISTAKEN)
def test_patterns_that_split_nothing(what):
    make, kind, said = MISTAKEN[what]
    with pytest.raises(kind) as caught:
        make().build(outputs(), 2)
    assert re.search(said, str(caught.value)), caught.value


STRANGERS = RuleBook({"*wide/weight": 1, "*narrow/weight": 0})  # none of whose patterns is Megatron's


NO_NAME = "no trained variable has a name that a pattern of split= fits"
NOTHING = {  # the size of a layer, patterns, and what is said where they split nothing
    "by graph": (1, None, "^the graph has no weights that 2 ranks can divide; its variables: front/"),
    "both": (1, MEGATRON | RuleBook({"conv*": 0}), f"^the graph has no weights that 2 ranks can divide, and {NO_NAME}"),
    "names": (4, STRANGERS, f"^{NO_NAME}"),
}


@pytest.mark.parametrize("what", NOTHING)
def test_models_in_which_nothing_can_be_split(what):
    """Patterns of a rule book are for many models, so not all must fit; but one must."""
    size, split, said = NOTHING[what]
    loss = ht.mean(ht.square(ht.nn.Linear(size, size, name="front")(ht.placeholder("x", (None, size)))))
    unknown = [loss, *ht.optim.SGD(0.1).minimize(loss).values()]
    for builder in (TensorParallel(split), Parallel(tensor=2, split=split)):
        with pytest.raises(UnknownNameError, match=said):
            builder.build(unknown, 2)
    assert Parallel(split=split).build(unknown, 2).variables == {}
    many = TensorParallel(RuleBook({}) | MEGATRON | STRANGERS)
    assert many.build(outputs(), 2) == TensorParallel().build(outputs(), 2)


def test_all_patterns_of_a_dict_must_fit_even_if_they_are_those_of_a_book():
    with pytest.raises(
        UnknownNameError, match=r"'\*wide/weight': 1\} fits no[\s\S]*in a RuleBook, a pattern may fit none"
    ):
        TensorParallel({**STRANGERS}).build(outputs(), 2)


def joined_in_place():
    book = RuleBook(STRANGERS)
    book |= {"*/up/*": -1}
    return book


JOINED = {  # books and dicts: the patterns that must fit
    "a book, a dict": (STRANGERS | {"*/up/*": -1}, {"*/up/*"}),
    "a dict, a book": ({"*/up/*": -1} | STRANGERS, {"*/up/*"}),
    "two books": (STRANGERS | RuleBook({"*/up/*": -1}), set()),
    "in place": (joined_in_place(), {"*/up/*"}),
    "a dict that takes over": (RuleBook({"*/up/*": 0}) | {"*/up/*": -1}, {"*/up/*"}),
    "a book that takes over": ({"*/up/*": 0} | RuleBook({"*/up/*": -1}), set()),
    "copied": (copy.deepcopy(STRANGERS | {"*/up/*": -1}), {"*/up/*"}),
}


@pytest.mark.parametrize("what", JOINED)
def test_of_joined_patterns_those_of_dicts_must_fit(what):
    book, must_fit = JOINED[what]
    assert book.must_fit == must_fit and book["*/up/*"] == -1
    strategy = TensorParallel(book).build(outputs(), 2)
    assert strategy == TensorParallel({"*/up/*": -1}).build(outputs(), 2)
    assert Strategy.from_json(strategy.to_json()) == strategy
    for ranks in (1, 2):  # even where there is nothing to split
        for joined in (book | {"no/such": 1}, {"no/such": 1} | book):
            with pytest.raises(UnknownNameError, match=r"'no/such': 1\} fits no trained variable"):
                TensorParallel(joined).build(outputs(), ranks)


@pytest.mark.parametrize(
    "book, axis",
    [
        ({"*/up/weight": 0} | RuleBook({"*up/weight": 1}), 0),
        (RuleBook({"*up/weight": 1}) | {"*/up/weight": 0}, 1),
        (RuleBook({"*up/weight": 1}) | {"*up/weight": 0}, 0),  # the same pattern
        ({"*/up/weight": 0} | MEGATRON, 0),  # the graph says it of those that no pattern fits
        (MEGATRON | {"*/up/weight": 0}, 0),
        (MEGATRON | {"*/down/weight": 0}, 1),
    ],
)
def test_of_several_patterns_that_fit_the_first_counts(book, axis):
    kept = TensorParallel(book).build(outputs(), 2).variables["mlp/up/weight"]
    assert kept == TensorParallel({"mlp/up/weight": axis}).build(outputs(), 2).variables["mlp/up/weight"]


def test_a_rule_book_of_experts_serves_many_models():
    book = RuleBook({"*/experts/*": 0})
    with pytest.raises(UnknownNameError, match="a pattern of experts= fits"):
        ExpertParallel(book).build(outputs(), 2)
    assert ExpertParallel(book | RuleBook({"*/up/*": 0})).build(outputs(), 2).variables


@pytest.mark.parametrize("axis", [0, 1])
def test_axes_count_from_the_end_too(axis):
    plain, negative = (TensorParallel({"*/weight": a}).build(outputs(), 2) for a in (axis, axis - 2))
    assert plain == negative and plain.variables


def halves(ranks):
    """The rows of a weight on these ranks, as a builder that no other test needs."""
    mesh = Mesh((2,), ("d",), ranks)
    return lambda: Strategy(mesh.layout(), {"mlp/up/weight": Kept(mesh.layout(d=0), mesh.layout(d=0))})


KEEPING = {"whole": DataParallel, "sharded": lambda: ZeRO(3), "split": lambda: TensorParallel({"*/up/weight": 1})}
KEEPING |= {"none": lambda: None, "stages": lambda: Pipeline(2, 1), "rows": halves((0, 1)), "turned": halves((1, 0))}
ALIKE = {frozenset({"whole", "none"})}  # where each rank has everything, whoever shares the work


@pytest.mark.parametrize("theirs", KEEPING)
@pytest.mark.parametrize("mine", KEEPING)
def test_values_shared_with_an_executor_of_another_strategy(theirs, mine):
    """Either all ranks have the same parts, or the error names one that has not, even if its shape is the same."""

    def act(comm):
        graph, feeds = mlp()
        other = ht.Executor(graph, strategy=KEEPING[theirs](), comm=comm)
        if theirs == mine or {theirs, mine} in ALIKE:
            return ht.Executor(graph, strategy=KEEPING[mine](), comm=comm, state=other.state) is not None
        with pytest.raises(ArgumentError, match=r"'mlp/.* is kept as .* in the shared state, and as .* here"):
            ht.Executor(graph, strategy=KEEPING[mine](), comm=comm, state=other.state)
        return np.isfinite(other.run("train", feeds[0])[0])

    assert run_ranks(2, act) == [True, True]


def test_an_executor_that_has_switched_shares_what_it_has_then():
    def act(comm):
        graph, feeds = mlp()
        first = ht.Executor(graph, strategy=ZeRO(3), comm=comm)
        first.switch(DataParallel())
        assert ht.Executor({"look": graph["eval"]}, comm=comm, state=first.state).run({"x": feeds[0]["x"]})
        with pytest.raises(ArgumentError, match="is kept as all of it on each rank in the shared state"):
            ht.Executor(graph, strategy=ZeRO(3), comm=comm, state=first.state)
        return True

    assert run_ranks(2, act) == [True, True]
