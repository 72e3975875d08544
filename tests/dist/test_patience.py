"""When a rank gives up: as soon as nobody has worked for as long as its deadline, and at ten deadlines in any case."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetu.dist.comm import mpi
from hetu.dist.comm.patience import MOST, Patience, works
from hetu.dist.comm.recorder import Entry, RankState, Recorder

WAITS = Entry((0, 1), "", 1, "barrier", "", "a.py:1")
AT = "a.py:3: x"


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (RankState(steps=3), RankState(steps=4), True),
        (RankState(steps=3, waiting=WAITS), RankState(steps=4, waiting=WAITS), True),
        (RankState(where=AT, cpu=1), RankState(where=AT, cpu=9), False),
        (RankState(where=AT, cpu=1), RankState(where="a.py:4: y", cpu=9), True),
        (RankState(where=AT, cpu=1, inside=True), RankState(where=AT, cpu=9), True),
        (RankState(where=AT, cpu=1), RankState(where=AT, cpu=9, inside=True), True),
        (RankState(where=AT, cpu=1), RankState(where="a.py:4: y", cpu=1.1), False),
        (RankState(where=AT, inside=True), RankState(where=AT, cpu=9, waiting=WAITS, inside=True), False),
    ],
)
def test_who_works(before, after, wanted):
    assert works(before, after, apart=10.0) is wanted


@pytest.mark.parametrize(("until", "over"), [(0, 10), (7, 20), (33, 45), (10_000, 10 * MOST)])
def test_patience_ends_a_deadline_after_the_last_work(until, over):
    now = 0.0
    patience = Patience(10.0, lambda: {1: RankState(cpu=min(now, until), inside=True)})
    while not patience.is_over(now):
        now += 0.25
    assert over - 5 <= now <= over


def test_who_does_not_answer_does_not_work():
    patience = Patience(10.0, dict)
    assert next(at / 4 for at in range(80) if patience.is_over(at / 4)) == 10


def test_a_long_wait_gives_the_core_away(monkeypatch):
    """It looks without end for a moment, as long as an answer may soon be there, and then about once a millisecond."""
    now, looks = 0.0, 0

    def pass_time(seconds):
        nonlocal now
        now += seconds

    def look(status):
        nonlocal looks
        looks += 1
        assert looks < 200_000
        pass_time(1e-6)
        return now > 10

    monkeypatch.setattr(mpi, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_time))
    monkeypatch.setattr(mpi, "_yield_core", lambda: None)  # a busy machine would keep it for a while each time
    comm = object.__new__(mpi.MPIComm)
    comm.recorder, comm.deadline, comm._spins = Recorder(), 300.0, 200
    comm._patience = lambda: SimpleNamespace(is_over=lambda waited: False)
    comm._refuse_differences = comm._in_vain = lambda entry: False
    comm._poll(SimpleNamespace(Test=look), (), (), False, None)
    assert looks > 50_000
