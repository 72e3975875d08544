"""What an executor asks of a placement: one process answers it, and a stranger's own kind of strategy is taken."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, UnknownNameError
from hetu.core.placement import STRATEGIES, Alone, Local, attach, attaches, chooses
from hetu.dist.comm.comm import SerialComm


def graphs():
    x = ht.placeholder("x", (None, 3))
    with ht.scope("model"):
        loss = ht.mean(ht.square(ht.nn.Linear(3, 1)(x)))
        return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}


@pytest.mark.parametrize("strategy", [5, {"data": 2}, Alone, [None]], ids=repr)
def test_what_is_no_strategy_is_refused(strategy):
    with pytest.raises(ArgumentError, match=r"is no strategy[\s\S]*fix: pass one of hetu.dist"):
        ht.Executor(graphs(), strategy=strategy)


def test_a_name_that_nobody_entered_is_refused():
    with pytest.raises(UnknownNameError, match=r"no strategy 'autp'[\s\S]*did you mean 'auto'"):
        ht.Executor(graphs(), strategy="autp")


def test_every_name_makes_a_strategy_that_can_be_attached():
    assert {*STRATEGIES} >= {"auto", "dp", "zero1", "zero2", "zero3", "tp", "pp", "ep", "ps", "hybrid", "partial"}
    assert repr(STRATEGIES["zero2"]()) == repr(ht.dist.ZeRO(2))
    for name in ("dp", "zero1", "zero2", "zero3"):
        executor = ht.Executor(graphs(), strategy=name)
        assert np.isfinite(executor.run("train", {"x": np.ones((2, 3))})[0])


class Noted:
    """A stranger's strategy."""


class Notes(Alone):
    """One process, which notes what it is asked and trains on the first half of what it is fed."""

    ahead = 1

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def start(self, state, asked):
        self.asked.append(f"start with {len(state)}")

    def sizes(self, sizes, name, training, fed):
        return {atom: size // 2 for atom, size in sizes.items()}

    def cut(self, fetches, updates):
        self.asked.append(f"cut {len(fetches)}, {len(updates)}")
        return Local(tuple(fetches), (), dict(updates), {"x": ("x", ((0, 4), (0, 3)))})

    def last(self, fetches, updates, then):
        self.asked.append("last")
        return super().last(fetches, updates, then)

    def expect(self, coming):
        self.asked += [f"expect {len(values)}" for _, values in coming]


@attaches(Noted)
def _notes(strategy: Noted, outputs, comm):
    return Notes()


def test_a_strangers_strategy_is_asked_for_all_that_it_may_decide():
    assert isinstance(attach(None, []), Alone)
    ex = ht.Executor(graphs(), strategy=Noted())
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("f4")
    wanted = ht.Executor(graphs()).run({"x": x[:4]})
    assert ex.run({"x": x}, ahead={"x": x}) == wanted
    ex.run({"x": x}, ahead=[{"x": x}, {"x": x}])
    assert ex.placement.asked == ["start with 3", "cut 1, 3", "last", "expect 1", "expect 1", "expect 1"]


class Undecided:
    """A stranger's strategy that decides when it sees what is to be run."""

    def __init__(self) -> None:
        self.seen: list[str] = []


@chooses(Undecided)
def _decide(strategy: Undecided, subgraphs, comm, precision):
    strategy.seen += [f"{name}: {len(entries)} in {precision}" for name, entries in subgraphs.items()]
    return Noted() if comm is None else None


@pytest.mark.parametrize(("comm", "placement"), [(None, Notes), (SerialComm(), Alone)])
def test_a_strangers_strategy_may_choose_another_once_it_sees_the_graphs(comm, placement):
    strategy = Undecided()
    made = ht.Executor(graphs(), strategy=strategy, comm=comm, precision="float16")
    assert type(made.placement) is placement and strategy.seen == ["train: 2 in float16"]


def test_a_choice_that_is_no_strategy_is_refused():
    class Wrong(Undecided):
        pass

    chooses(Wrong, lambda *_: 7)
    with pytest.raises(ArgumentError, match="7 is no strategy"):
        ht.Executor(graphs(), strategy=Wrong())
