"""Partial reduce while its server is killed: no member of a group waits for one that a later life puts elsewhere."""

from __future__ import annotations

import heapq
import itertools
import random
import resource
from pathlib import Path

import numpy as np

from hetu.dist.launch.servers import DECISIONS
from hetu.ps import ASP, ParameterStore
from hetu.ps.store.messages import Kind, Message
from hetu.ps.store.partial_reduce import Group
from hetu.ps.wire import decisions
from hetu.ps.wire.decisions import FILE, Decisions
from hetu.ps.wire.snapshot import Snapshots

from .simulation import hello, new_store

TOKEN, RETRY, BEAT, END = "secret", 0.05, 0.1, 200.0


class Rank:
    """Computes, asks for partners, and averages when all of its group are there, as in a collective of MPI."""

    def __init__(self, number: int) -> None:
        self.number, self.seq, self.iteration, self.steps, self.epoch = number, 0, 0, 0, 0
        self.asked: Message | None = None  # and not answered
        self.group: Group | None = None  # in whose collective it is
        self.done = False


class Job:
    """Ranks and a server that is killed, in virtual time; `records` says whether it writes down what it decides."""

    def __init__(
        self, seed: int, folder: Path, ranks: int, group: int, *, steps: int = 12, records: bool = True
    ) -> None:
        self.rng, self.folder, self.group, self.steps, self.records = random.Random(seed), folder, group, steps, records
        self.ranks = [Rank(number) for number in range(ranks)]
        self.now, self.turn, self.events, self.lives, self.store = 0.0, itertools.count(), [], 0, None
        self.speeds = [self.rng.choice([0.1, 0.1, 0.3]) for _ in self.ranks]
        self.half = 0  # groups of which only some had been told when the server was killed

    def run(self) -> None:
        self.start()
        for rank in self.ranks:
            self.greet(rank)
            self.at(self.speeds[rank.number], self.ask, rank)
        self.at(RETRY, self.resend)
        self.at(self.rng.uniform(0.2, 1.0), self.kill)
        while not all(rank.done for rank in self.ranks):
            self.now, _, act, arguments = heapq.heappop(self.events)
            stuck = [(r.number, r.group and r.group.members, r.asked is not None) for r in self.ranks if not r.done]
            assert self.now < END, f"ranks that wait forever: {stuck}"
            act(*arguments)

    def at(self, delay, act, *arguments) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.turn), act, arguments))

    # -- the server ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.lives += 1
        self.store = ParameterStore(len(self.ranks), ASP(), epoch=self.lives, lease=1.0, now=self.now)
        if self.records:
            Decisions(self.store, self.folder, TOKEN).recall()
        for rank in self.ranks if self.lives > 1 else ():
            self.greet(rank)

    def kill(self) -> None:
        if self.store is not None and self.lives < 8:
            self.store = None
            self.at(self.rng.uniform(0.05, 0.5), self.start)
        self.at(self.rng.uniform(0.2, 1.0), self.kill)

    def send(self, message: Message) -> None:
        if self.store is not None:
            self.answers(self.store.handle(message, self.now))

    def answers(self, replies: list[Message]) -> None:
        """What a server says; it may be killed between two of its answers."""
        for count, reply in enumerate(replies):
            if count and self.rng.random() < 0.15 and self.lives < 8 and self.store is not None:
                self.half += 1
                self.store = None
                self.at(self.rng.uniform(0.05, 0.5), self.start)
                return
            rank = self.ranks[reply.worker]
            if rank.asked is not None and reply.seq == rank.asked.seq and reply.kind is Kind.OK:
                rank.asked = None
                self.meet(rank, Group.of(reply))

    # -- ranks -----------------------------------------------------------------------------------------------------

    def greet(self, rank: Rank) -> None:
        if self.store is None or rank.done:
            return
        first = rank.asked.seq if rank.asked else rank.seq + 1
        meta = {"incarnation": 100 + rank.number, "first": first, "at": 0}
        replies = self.store.handle(Message(Kind.HELLO, worker=rank.number, meta=meta), self.now)
        assert all(reply.kind is Kind.OK for reply in replies), replies
        assert self.lives == 1 or not self.records or any("restored" in reply.facts for reply in replies)
        rank.epoch = self.lives
        self.answers(replies[1:])

    def ask(self, rank: Rank) -> None:
        rank.seq += 1
        meta = {"group": self.group, "decay": 0.5}
        rank.asked = Message(Kind.READY, worker=rank.number, seq=rank.seq, step=rank.iteration, meta=meta)
        self.transmit(rank)

    def transmit(self, rank: Rank) -> None:
        m = rank.asked
        self.send(Message(m.kind, worker=m.worker, seq=m.seq, step=m.step, epoch=rank.epoch, meta=m.meta))

    def meet(self, rank: Rank, group: Group) -> None:
        rank.group = group
        members = [self.ranks[number] for number in group.members]
        if all(other.group is not None and other.group.members == group.members for other in members):
            assert len({other.group for other in members}) == 1, "members of one collective know different weights"
            for other in members:
                self.at(0.01, self.go_on, other)

    def go_on(self, rank: Rank) -> None:
        rank.iteration, rank.group, rank.steps = rank.group.iteration + 1, None, rank.steps + 1
        if rank.iteration >= self.steps:
            rank.done = True
            rank.seq += 1
            self.send(Message(Kind.LEAVE, worker=rank.number, seq=rank.seq, epoch=rank.epoch))
        else:
            self.at(self.speeds[rank.number], self.ask, rank)

    def resend(self) -> None:
        for rank in self.ranks:
            if self.store is not None and not rank.done:
                self.store.renew(rank.number, 100 + rank.number, self.now)
                if rank.asked is not None:
                    self.transmit(rank)
        if self.store is not None:
            self.answers(self.store.tick(self.now))
        self.at(RETRY, self.resend)


def test_whenever_the_server_is_killed_no_rank_waits_forever(tmp_path):
    half = 0
    for seed in range(60):
        ranks = 2 + seed % 4
        job = Job(seed, tmp_path / str(seed), ranks, min(ranks, 2 + seed % 3))
        job.run()
        half += job.half
    assert half > 30


def test_without_a_record_one_does(tmp_path):
    """What the record is for; the simulation would see it."""
    stuck = 0
    for seed in range(20):
        try:
            Job(seed, tmp_path / str(seed), 4, 2, records=False).run()
        except AssertionError as error:
            stuck += "wait forever" in str(error)
    assert stuck > 5


# -- the record ----------------------------------------------------------------------------------------------------


def grouped(folder: Path, token: str = TOKEN):
    """A store of three workers, of which the first two are one group."""
    store = new_store(3, ASP())
    store.tables.clear()
    Decisions(store, folder, token)
    for worker in range(2):
        store.handle(Message(Kind.READY, worker=worker, seq=3, step=worker, epoch=1), 0.0)
    return store


def later(folder: Path, token: str = TOKEN) -> ParameterStore:
    store = ParameterStore(3, ASP(), epoch=2)
    Decisions(store, folder, token).recall()
    return store


def test_a_later_life_knows_who_takes_part_and_who_was_told_what(tmp_path):
    store = grouped(tmp_path / "new")
    store.handle(Message(Kind.READY, worker=2, seq=3, epoch=1, meta={"away": True}), 0.0)
    store.handle(Message(Kind.LEAVE, worker=1, seq=4, epoch=1), 0.0)
    again = later(tmp_path / "new")
    assert (again.partial.present, {*again.clocks.of}, again.partial.formed) == ({0}, {0, 2}, 1)
    assert again.restored["clock"] == 0 and [m.incarnation for m in again.members] == [100] * 3
    assert hello(again, 0).facts["restored"] == again.restored
    [told] = again.handle(Message(Kind.READY, worker=0, seq=3, epoch=2), 0.0)
    assert Group.of(told) == Group(1, (0, 1), (1 / 3, 2 / 3), 1)
    [told] = again.handle(Message(Kind.READY, worker=0, seq=4, step=2, epoch=2), 0.0)
    assert Group.of(told).number == 2  # is not given again


def test_records_of_other_jobs_and_damaged_ones_count_for_nothing(tmp_path):
    grouped(tmp_path)
    assert later(tmp_path, "another").restored is None and later(tmp_path).restored is not None
    whole = (tmp_path / FILE).read_text()
    for text in ("", "{", "[]", whole.splitlines()[-1][:-2]):
        (tmp_path / FILE).write_text(text)
        assert later(tmp_path).restored is None
    (tmp_path / FILE).write_text(whole + whole[:50])  # the line that was being written
    assert later(tmp_path).partial.formed == 1
    assert later(tmp_path / "nowhere").restored is None and FILE == DECISIONS


def test_tables_that_nothing_has_kept_are_not_gone_on_without(tmp_path):
    store = new_store(2, ASP())
    Decisions(store, tmp_path, TOKEN)
    for worker in range(2):
        store.handle(Message(Kind.READY, worker=worker, seq=3, epoch=1), 0.0)
    assert not (tmp_path / FILE).exists()
    snapshots = Snapshots(store, tmp_path, every=1.0)
    snapshots.take(clock=0)
    snapshots.finish()
    store.handle(Message(Kind.READY, worker=0, seq=4, epoch=1), 0.0)
    store.handle(Message(Kind.READY, worker=1, seq=4, epoch=1), 0.0)
    again = ParameterStore(2, ASP(), epoch=2)
    assert Snapshots(again, tmp_path, every=1.0).restore()
    Decisions(again, tmp_path, TOKEN).recall()
    assert again.partial.formed == 2 and {*again.tables} == {*store.tables}


def test_a_disk_that_is_full_stops_no_group(tmp_path, capsys):
    (tmp_path / "file").touch()
    store = grouped(tmp_path / "file" / "below")
    assert store.partial.formed == 1 and "no record of groups" in capsys.readouterr().err


def test_a_line_that_was_cut_by_a_full_disk_spoils_no_later_one(tmp_path, capsys):
    """It is said once, however many groups there are."""
    store = grouped(tmp_path)
    kept = (tmp_path / FILE).stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for seq in range(4, 9):
            resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 40 if seq == 4 else 10, limit[1]))
            for worker in range(3):
                store.handle(Message(Kind.READY, worker=worker, seq=seq, epoch=1), 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert capsys.readouterr().err.count("no record of groups") == 1
    formed = store.partial.formed
    for worker in range(3):
        store.handle(Message(Kind.READY, worker=worker, seq=9, epoch=1), 0.0)
        assert later(tmp_path).partial.formed == store.partial.formed or store.partial.formed == formed
    assert store.partial.formed > formed


def test_the_file_begins_anew_before_it_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "LONGEST", 2000)
    store = grouped(tmp_path)
    store.handle(Message(Kind.READY, worker=2, seq=3, epoch=1, meta={"away": True}), 0.0)  # or all wait for it at last
    for seq in range(4, 40):
        for worker in range(2):
            store.handle(Message(Kind.READY, worker=worker, seq=seq, epoch=1), 0.0)
    assert later(tmp_path).partial.formed == 37 and (tmp_path / FILE).stat().st_size < 4000


def test_a_snapshot_that_is_newer_knows_better_who_lives(tmp_path):
    """A worker began another life since the record, whose requests of that life must not count twice."""
    store = new_store(2, ASP())
    Decisions(store, tmp_path, TOKEN)
    snapshots = Snapshots(store, tmp_path, every=1.0)
    for worker in range(2):
        store.handle(Message(Kind.READY, worker=worker, seq=3, epoch=1), 0.0)
    snapshots.take(clock=1)
    snapshots.finish()
    store.handle(Message(Kind.READY, worker=1, seq=4, epoch=1, meta={"away": True}), 0.0)
    text = (tmp_path / FILE).read_text()
    hello(store, 1, 200)
    store.handle(Message(Kind.PUSH, key=1, worker=1, seq=1, epoch=1, values=np.ones((1, 8), "f")), 0.0)
    assert '"lives": [[100, ""], [200, ""]]' in (tmp_path / FILE).read_text()
    snapshots.take(clock=2)
    snapshots.finish()
    (tmp_path / FILE).write_text(text)
    again = ParameterStore(2, ASP(), epoch=2)
    Snapshots(again, tmp_path, every=1.0).restore()
    Decisions(again, tmp_path, TOKEN).recall()
    assert (again.members[1].incarnation, again.members[1].done, again.partial.formed) == (200, 1, 1)
