"""Histories of jobs in which everything goes wrong, and a checker that three planted bugs do not get past."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hetu.ps import SSP, ParameterStore
from hetu.ps.store import store
from hetu.ps.store.consistency import Consistency
from hetu.ps.store.messages import Kind

from ..pairs import nightly
from .history import History, check
from .nemesis import MODES, World
from .soak import CLOCKS, flood, process_history

SEEDS = range(10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [*range(24), *nightly((seed,) for seed in range(24, 200))])
def test_what_was_confirmed_is_there_once_and_reads_obey_their_bound(seed, tmp_path):
    world = World(seed, MODES[seed % len(MODES)], tmp_path, servers=1 + seed // len(MODES) % 2)
    assert world.run() == []
    for host in world.hosts:
        assert all(len(host.history.of(kind)) >= world.clocks for kind in ("push", "read"))


def complaints(mode: str, tmp_path) -> str:
    """All that the checker says about the first of the same seeds in which it finds something."""
    for seed in SEEDS:
        if found := World(seed, mode, tmp_path / str(seed)).run():
            return "\n".join(found)
    return ""


def test_pushes_that_are_not_told_apart_are_found(tmp_path, monkeypatch):
    admit = ParameterStore._admit

    def forgetful(self, message, now):
        member = self.members[message.worker]
        if (
            message.kind is Kind.PUSH
            and message.epoch == self.epoch
            and member.knows(message.seq)
            and message.seq not in member.refused
        ):
            self._push(message)
        admit(self, message, now)

    monkeypatch.setattr(ParameterStore, "_admit", forgetful)
    assert "times" in complaints("asp", tmp_path)


def test_a_push_that_is_confirmed_before_it_is_applied_is_found(tmp_path, monkeypatch):
    push, tick, late = ParameterStore._push, ParameterStore.tick, []

    def apply_late(self, now):
        while late:
            push(self, late.pop())
        return tick(self, now)

    monkeypatch.setitem(store._WRITE, Kind.PUSH, lambda self, message: late.append(message))
    monkeypatch.setattr(ParameterStore, "tick", apply_late)
    found = complaints("asp", tmp_path)
    assert "misses its own" in found or "lost" in found


@pytest.mark.parametrize("mode", ["bsp", "ssp:1"])
def test_a_bound_that_is_off_by_one_is_found(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(Consistency, "may_work", lambda self, clock, slowest: clock - slowest <= self.staleness + 1)
    found = complaints(mode, tmp_path)
    assert "misses push" in found or "of a later time" in found


def test_a_killed_server_may_lose_what_came_after_its_snapshot_and_nothing_else():
    history = History(SSP(1), cells=4)
    before = history.begin("push", 0, 1, 0)
    history.end(before)
    saved = next(history.now)
    after = history.begin("push", 0, 1, 0)
    history.end(after)
    history.outages.append((saved, next(history.now)))
    late = history.begin("push", 0, 1, 0)
    history.end(late)
    for lost, allowed in ((before, False), (after, True), (late, False)):
        cells = np.array([2.0, *(float(push is not lost) for push in (before, after, late))])
        assert (check(history, cells, cells.astype(int)) == []) == allowed


# -- real processes --------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
@pytest.mark.parametrize("seed", [1, *nightly((seed,) for seed in (0, *range(2, 20)))])
def test_a_real_job_whose_server_and_workers_are_killed_frozen_and_cut_off(seed, tmp_path):
    history, found = process_history(seed, MODES[seed % len(MODES)], tmp_path)
    assert found == [] and len(history.of("push")) >= CLOCKS


def test_a_real_server_is_left_as_it_was_by_ten_thousand_mutated_messages():
    found = flood(10_000)
    assert (found["alive"], found["unchanged"], found["refused"]) == (True, True, 10_000)
    assert found["grown"] <= 64 << 20
