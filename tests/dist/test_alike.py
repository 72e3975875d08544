"""What must be alike on all ranks is compared when the executor is made or first runs; the error names what differs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, CheckpointError, GraphError
from hetu.dist import DataParallel, TensorParallel, ZeRO, run_ranks
from hetu.dist.cut.agreement import texts
from hetu.optim import Adam

from ..pairs import pairwise

X = {"x": np.ones((4, 6), np.float32)}


def made(
    comm, *, out=4, lr=0.1, name="m", strategy=DataParallel, entries=("train", "eval"), scale=None, w=None, **given
):
    """An executor on ranks of a model in which one thing can be another; a tuple can be gone through only once."""
    given = {name: iter(value) if isinstance(value, tuple) else value for name, value in given.items()}
    x = ht.placeholder("x", (None, 6))
    with ht.scope(name):
        h = ht.tanh(ht.nn.Linear(6, 8, name="up")(x))
        h = h * (np.ones(8, np.float32) if scale is None else scale)
        y = ht.nn.Linear(8, out, name="down")(h)
        if w is not None:
            y = y + ht.variable("w", w)
        loss = ht.mean(y * y)
        graph = dict(zip(entries, ([loss, Adam(lr).minimize(loss)], [y])))
    return ht.Executor(graph, strategy=strategy(), comm=comm, **given)


RANDOM = np.random.default_rng(0)
GIVEN = {  # what ranks 0 and 1 are given: what the error says
    "seed": ({"seed": 0}, {"seed": 1}, ArgumentError, r"seed is\n  0 on rank 0,\n  1 on rank 1"),
    "precision": (
        {},
        {"precision": "float16"},
        ArgumentError,
        r"precision is\n  float32 on rank 0,\n  float16 on rank 1",
    ),
    "passes": ({}, {"passes": []}, ArgumentError, r"passes is\n  None on rank 0,\n  \[\] on rank 1"),
    "passes, once": (
        {"passes": ("fuse_groups",)},
        {"passes": ["join_bags"]},
        ArgumentError,
        r"passes is\n  \['fuse_groups'\] on rank 0,\n  \['join_bags'\] on rank 1",
    ),
    "entries": (
        {},
        {"entries": ("train", "test")},
        ArgumentError,
        r"entries is\n  \['train', 'eval'\] .*\n  \['train', 'test'\]",
    ),
    "strategy": (
        {},
        {"strategy": lambda: ZeRO(1)},
        ArgumentError,
        r"'m/up/weight/adam_m' is\n  .*read as \[dup/2, dup/1\] on 0-1, kept as .*\n  .*read as \[0/2, dup/1\]",
    ),
    "kind of strategy": (
        {},
        {"strategy": lambda: ht.dist.Pipeline(2, 1)},
        ArgumentError,
        r"kind of strategy is\n  layouts on rank 0,\n  staged on rank 1",
    ),
    "split": (
        {"strategy": lambda: TensorParallel({"*up/weight": 1})},
        {"strategy": lambda: TensorParallel({"*up/weight": 0})},
        ArgumentError,
        r"variable 'm/up/weight' is\n  .*read as \[dup/1, 1/2\] on 0-1, .*\n  .*read as \[dup/1, 0/2\] on 0-1",
    ),
    "a name": ({}, {"name": "n"}, ArgumentError, r"variable 'm/up/weight' is\n  f32\[6, 8\].*\n  missing on rank 1"),
    "a size": (
        {},
        {"out": 5},
        ArgumentError,
        r"'m/down/weight' is\n  f32\[8, 4\], .*\n  f32\[8, 5\], ",
    ),
    "a constant": (
        {},
        {"scale": np.arange(8, dtype=np.float32)},
        ArgumentError,
        r"constant \d+ is\n  f32\[8\] of 1.0, ... with CRC .{8} on rank 0,\n  f32\[8\] of 0.0",
    ),
    "a rate": ({}, {"lr": 0.2}, GraphError, r"line \d+ is\n  .*0\.1.* on rank 0,\n  .*0\.2.* on rank 1"),
    "a variable more": (
        {},
        {"w": np.ones(4, np.float32)},
        ArgumentError,
        r"'m/w' is\n  missing on rank 0,\n  f32\[4\], read as",
    ),
    "initial values": (
        {"w": RANDOM.normal(size=4).astype("f")},
        {"w": RANDOM.normal(size=4).astype("f")},
        GraphError,
        r"different values of 'm/w' on ranks 0-1\n  rank 0 has f32\[4\] of 0.12.*,\n  rank 1 has f32\[4\] of -0.53",
    ),
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_differs_between_ranks_is_named_with_both_values(what):
    *given, kind, said = GIVEN[what]

    def act(comm):
        with pytest.raises(kind) as caught:
            made(comm, **given[comm.rank]).run("train", X)
        return str(caught.value)

    for told in run_ranks(2, act):
        assert re.search(said, told), told


@pytest.mark.parametrize(
    "strategy", [DataParallel, lambda: ZeRO(1), lambda: ZeRO(3), lambda: TensorParallel({"*up/*": -1})]
)
def test_values_that_are_assigned_or_loaded_must_be_alike_where_they_are_duplicates(strategy, tmp_path):
    def act(comm):
        ex = made(comm, strategy=strategy)
        name = "m/optimizer/step"  # every rank keeps it
        ex.state[name] = np.asarray(comm.rank)
        with pytest.raises(GraphError, match=f"have different values of '{name}' on ranks 0-1\n.*of 0,.*\n.*of 1,"):
            ex.run("train", X)
        ex.state[name] = np.asarray(0)
        ex.run("train", X)
        ex.save(tmp_path / "one")
        ex.run("train", X)
        ex.save(tmp_path / "two")
        with pytest.raises(CheckpointError, match="the ranks loaded different values of 'm/"):
            ex.load(tmp_path / ("one" if comm.rank else "two"))
        ex.load(tmp_path / "one")
        first = float(ex.run("train", X)[0])
        ex.state[name] = np.asarray(comm.rank)
        with pytest.raises(CheckpointError, match=f"three is written, .* different values of '{name}' on ranks 0-1"):
            ex.save(tmp_path / "three")
        with pytest.raises(GraphError, match=f"have different values of '{name}' on ranks 0-1"):
            ex.run("eval", X)
        with pytest.raises(GraphError, match=f"have different values of '{name}' on ranks 0-1"):
            made(comm, strategy=strategy, state=ex.state).run("train", X)
        ex.state[name] = np.asarray(1)
        ex.run("eval", X)
        return first

    first, second = run_ranks(2, act)
    assert first == second


STRATEGIES = {
    "data": DataParallel,
    "zero1": lambda: ZeRO(1),
    "zero3": lambda: ZeRO(3),
    "tensor": lambda: TensorParallel({"*up/*": -1}),
    "stages": lambda: ht.dist.Pipeline(2, 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "entry", "shared"), pairwise(STRATEGIES, ["train", "eval"], [False, True]))
def test_an_assignment_between_steps_of_programs_that_exist_is_compared_by_the_next_and_once(strategy, entry, shared):
    """Of each variable that two ranks keep alike; one that each keeps a part of may differ."""

    def act(comm):
        ex = made(comm, strategy=STRATEGIES[strategy])
        other = made(comm, strategy=STRATEGIES[strategy], state=ex.state) if shared else ex
        for _ in range(2):
            ex.run("train", X), other.run("eval", X), other.run("train", X)
        asked, compare = [], other.placement.compare_values
        other.placement.compare_values = lambda state: asked.append(compare(state)) or asked[-1]
        whole = {v.name: v.shape for v in ex.variables}
        kept = [n for n in ex.state if ex.state[n].shape == whole[n]]
        every = [name for name in kept if all(name in names for names in gathered(comm, kept))]
        for name in every if strategy != "stages" else ["m/optimizer/step"]:
            before = ex.state[name]
            ex.state[name] = before + comm.rank
            with pytest.raises(GraphError, match=f"have different values of '{name}' on ranks 0-1"):
                other.run(entry, X)
            asked.clear()
            ex.state[name] = before
            for _ in range(3):
                other.run(entry, X)
            assert len(asked) == 1 and asked.pop() is None
        for name in {*ex.state} - {*every} if strategy.startswith("zero") else ():
            ex.state[name] = ex.state[name] + comm.rank
            assert len(other.run(entry, X)) and asked.pop() is None
        return len(every)

    assert min(run_ranks(2, act)) >= 1


def gathered(comm, names):
    return [told.split(" ") for told in texts(comm, " ".join(names))]


def test_ranks_that_do_not_assign_alike_do_not_get_on():
    """In a job of processes it takes five seconds until they ask each other; here it is seen at once."""

    def act(comm):
        ex = made(comm)
        ex.run("train", X), ex.run("eval", X)
        if comm.rank == 0:
            ex.state["m/up/bias"] = np.ones(8)  # here
        ex.run("train", X)

    lines = Path(__file__).read_text().splitlines()
    here = next(i for i, line in enumerate(lines, 1) if line.endswith("  # here"))
    said = (
        f"(?s)call different collectives.*rank 0: all_gather .* at test_alike.py:{here}, which gave 'm/up/bias' a value"
    )
    with pytest.raises(ht.dist.CommError, match=said):
        run_ranks(2, act)


def test_values_that_each_rank_loads_by_itself_must_be_the_same(tmp_path):
    def act(comm):
        ex = made(comm)
        saved = [tmp_path / f"{name} of {comm.rank}" for name in ("before", "after")]
        for path in saved:
            ex.state.save(path)
            ex.run("train", X)
        ex.state.load(saved[comm.rank])
        with pytest.raises(GraphError, match=r"have different values of 'm/.*' on ranks 0-1"):
            ex.run("eval", X)
        ex.state.load(saved[0])
        return len(ex.run("eval", X))

    assert run_ranks(2, act) == [1, 1]


def test_trained_values_are_not_compared_once_more():
    """Replicas may differ in last digits on unlike machines; only what users give is compared."""

    def act(comm):
        first = made(comm)
        first.run("train", X)
        first.state.arrays["m/up/bias"][...] += comm.rank  # as a step would
        second = made(comm, state=first.state)
        return len(second.run("eval", X))

    assert run_ranks(2, act) == [1, 1]
