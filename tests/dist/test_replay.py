"""Records: ranks run again alone bit for bit, where two part is found, and what is damaged or full is told."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hetu as ht
from hetu import cli, system
from hetu.core import executor as executor_module
from hetu.core.backend import Device
from hetu.core.errors import ArgumentError, CheckpointError, HetuError, NumericError
from hetu.core.executor import stepping
from hetu.dist import DataParallel, Pipeline, SerialComm, ZeRO, run_ranks, world
from hetu.dist.comm.comm import of_thread
from hetu.dist.launch.options import job_of, parse, told
from hetu.dist.replay import compare, tape
from hetu.dist.replay.again import CameToStep, Replay, environment, run_again
from hetu.dist.replay.record import Recording, Then, begin, taped
from hetu.dist.replay.tape import LIMIT, Record, RecordError, Tape, digest

from ..pairs import nightly, pairwise
from .every import EVERY
from .models import MODELS, losses
from .test_launch import DEADLINE, heturun
from .test_strategies import STRATEGIES

MORE = {
    "2 stages": lambda: Pipeline(2, data=world().world_size // 2),
    "accumulated": lambda: ZeRO(1, accumulate=4),
}


def record(folder, ranks, train, limit=LIMIT):
    """Record `train()` on ranks that are threads; what it returns on each."""

    def act(comm):
        begin(folder, ["train.py"], comm, limit)
        return train()

    with stepping(taped):
        return run_ranks(ranks, act)


def replay(folder, rank, train, step=None, **options):
    """Run `train()` again as this rank alone, up to a step, or the last one."""
    found = Record(folder, rank)
    made = Replay(found, found.last if step is None else step, **options)

    def act(comm):
        of_thread.set(made.comm)
        with suppress(CameToStep):
            train()
            raise AssertionError("the script went on")

    with stepping(taped):
        run_ranks(1, act)
    return made


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("strategy", "model", "ranks"), pairwise(STRATEGIES, MODELS, (2, 4)))
def test_every_rank_runs_again_bit_for_bit(tmp_path, strategy, model, ranks):
    def train():
        return losses(MODELS[model], STRATEGIES[strategy](), steps=4)

    plain = run_ranks(ranks, lambda comm: losses(MODELS[model], STRATEGIES[strategy](), comm, steps=4))
    assert record(tmp_path / "a", ranks, train) == plain
    for rank in range(ranks):
        replay(tmp_path / "a", rank, train)


@pytest.mark.parametrize("strategy", MORE)
def test_pipelines_and_parts_of_batches(tmp_path, strategy):
    def train():
        graph, feeds = EVERY["staged" if "stages" in strategy else "mlp"]()
        executor = ht.Executor(graph, strategy=MORE[strategy]())
        for size, feed in zip((12, 8, 12), feeds):
            executor.run("train", {name: value[:size] for name, value in feed.items()})

    record(tmp_path / "a", 4, train)
    for rank, step in itertools.product(range(4), range(3)):
        replay(tmp_path / "a", rank, train, step)


# -- what happens between steps ----------------------------------------------------------------------------------------


def small(**options):
    """A model of one layer, its updates, and what it is fed."""
    x, t = ht.placeholder("x", (None, 3)), ht.placeholder("t", (None,))
    w = ht.variable("w", np.ones(3, "float32"))
    loss = ht.mean((ht.sum(x * w, axis=1) - t) ** 2)
    executor = ht.Executor({"train": [loss, ht.optim.Momentum(0.05).minimize(loss)], "valid": [loss]}, **options)
    draws = np.random.default_rng(0)
    return executor, [{"x": draws.normal(size=(4, 3)), "t": draws.normal(size=4)} for _ in range(6)]


def assigns(step, executor, feed):
    if step == 3:
        executor.state["w"] = np.full(3, 2.0)


def evaluates(step, executor, feed):
    executor.run("valid", feed)


def trains_elsewhere(step, executor, feed):
    w = executor.state.variables["w"]
    if step:
        ht.Executor([{w: w * 0.5}], state=executor.state).run()


def tells(step, executor, feed):
    if world().world_size > 1:
        told = np.full(2, step, "float32")
        world().all_reduce(told, told)


def plays(step, executor, feed):
    run_ranks(2, lambda comm: small(strategy=DataParallel(), comm=comm)[0].run("train", feed))


BETWEEN = [assigns, evaluates, trains_elsewhere, tells, plays]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_happens_between_steps(tmp_path, between, ranks):
    def train():
        executor, feeds = small(strategy=DataParallel())
        for step, feed in enumerate(feeds):
            between(step, executor, feed)
            executor.run("train", feed)

    with pytest.warns(RuntimeWarning, match="no step is recorded of") if between is trains_elsewhere else nullcontext():
        record(tmp_path / "a", ranks, train)
    for step in range(6):
        replay(tmp_path / "a", ranks - 1, train, step)


def test_steps_that_are_looked_into_are_not_kept_but_what_they_change_is(tmp_path):
    def train():
        executor, feeds = small()
        for step, feed in enumerate(feeds):
            with ht.debug_nans() if step in (1, 4) else nullcontext():
                executor.run("train", feed)

    record(tmp_path / "a", 1, train)
    assert Record(tmp_path / "a", 0).window == "steps 0 to 3"
    replay(tmp_path / "a", 0, train)


def test_what_is_empty(tmp_path):
    def train():
        x, e, w = ht.placeholder("x", (None, 2)), ht.variable("e", np.ones((0, 2))), ht.variable("w", np.ones(2))
        executor = ht.Executor([{w: ht.sum(e, axis=0) + w + ht.sum(x, axis=0)}], comm=world())
        for rows in (3, 0, 1, 0):
            executor.run({x: np.ones((rows, 2))})

    record(tmp_path / "a", 2, train)
    for step in range(4):
        replay(tmp_path / "a", 1, train, step)


def test_what_ranks_were_sent_before_the_first_step_is_there(tmp_path):
    def train():
        rate = np.array([0.1 * (world().rank == 0), 1.0], "float32")
        world().broadcast(rate)
        x = ht.placeholder("x", (2,))
        w = ht.variable("w", np.ones(2, "float32"))
        executor = ht.Executor([{w: w - float(rate[0]) * x}], comm=world())
        executor.run({x: [1, 2]})
        return executor.state["w"]

    found = record(tmp_path / "a", 2, train)
    np.testing.assert_array_equal(found[0], found[1])
    replay(tmp_path / "a", 1, train)


# -- what is found -----------------------------------------------------------------------------------------------------


def logs(bad_step=None, scale=1.25, tell=lambda: None, first=0):
    """Each rank is fed its own part; in one step rank 1 is fed what makes a NaN."""
    x = ht.placeholder("x", (None, 3))
    w = ht.variable("w", np.ones(3, "float32"))
    cost = ht.log(ht.sum(x * w, axis=1))
    loss = ht.mean(cost * cost) * scale
    tell()
    executor = ht.Executor([loss, ht.optim.SGD(0.01).minimize(loss)], strategy=DataParallel(local_feeds=True))
    draws = np.random.default_rng(world().rank)
    for step in range(5):
        fed = draws.uniform(1, 2, (4 + first, 3))[first:]
        if (step, world().rank) == (bad_step, 1):
            fed[2] = -1.0
        executor.run({x: fed})


def line_of(text):
    """The number of the line of this file that begins so."""
    with open(__file__, encoding="utf-8") as file:
        return next(n for n, line in enumerate(file, 1) if line.strip().startswith(text))


@pytest.mark.parametrize(("rank", "made"), [(0, "<all_reduce_wait f32[4] at"), (1, "<log f32[4] at")])
def test_the_line_of_a_nan(tmp_path, rank, made):
    record(tmp_path / "a", 2, lambda: logs(bad_step=3))
    replay(tmp_path / "a", rank, logs, 2, nans=True)
    with pytest.raises(NumericError, match=re.escape(made)) as caught:
        replay(tmp_path / "a", rank, logs, 4, nans=True)
    if rank:
        assert caught.value.site.line == line_of("cost = ht.log(")
    else:
        assert caught.value.fix == "it came from another rank: look there"


def sides_of(monkeypatch, sides):
    """Have both sides run again in this process, each by its own function."""

    def again_here(record, step, wanted, command):
        found, train = [], next(train for folder, rank, train in sides if record.folder == folder / f"rank{rank}")

        def look(program):
            found.extend((row, [value.copy() for value in values]) for row, values in compare.nodes(program))

        replay(record.path, record.rank, train, step, look=look)
        return [row for row, _ in found], found[wanted][1]

    monkeypatch.setattr(compare, "again", again_here)
    records = [Record(folder, rank) for folder, rank, _ in sides]
    return compare.explain(["one", "other"], records, sides[0][0] == sides[1][0])


def flipped(step, rank=1):
    """Rank `rank` hears one bit otherwise, in the sum of several numbers of a step."""

    def tell():
        comm, seen = world().inner, itertools.count()
        plain = comm._start

        def flip(out):
            if next(seen) == step:
                out.reshape(-1).view(np.uint32)[1] ^= 1 << 12

        def start(call):
            handle = plain(call)
            flips = comm.rank == rank and call.op == "sum" and call.out.size > 1
            return Then(handle.wait, lambda: flip(call.out)) if flips else handle

        comm._start = start

    return tell


def test_two_runs_that_are_alike_and_two_ranks(tmp_path, monkeypatch):
    for name in "ab":
        record(tmp_path / name, 2, logs)
    assert sides_of(monkeypatch, [(tmp_path / "a", 0, logs), (tmp_path / "b", 0, logs)]) == ""
    assert sides_of(monkeypatch, [(tmp_path / "a", 0, logs), (tmp_path / "a", 1, logs)]) == ""


PARTED = {  # what the other run does -> which rank is compared, the first step, and words of the answer
    "another feed": (
        lambda: logs(bad_step=3),
        *(1, 3, ["in feed x", "the cause lies outside: feed x\n", "3 of 12 differ"]),
    ),
    "what it does to others": (
        lambda: logs(bad_step=3),
        *(
            0,
            3,
            [
                "in all_reduce sum of 0-1 for test_replay.py:",
                "outside: what was sent: <all_reduce",
                "nan",
            ],
        ),
    ),
    "another constant": (
        lambda: logs(scale=1.5),
        *(0, 0, ["the first node that differs: <constant f32[] at", "(cost * cost) * scale", "one: 1.25", "by 0.25"]),
    ),
    "another graph": (lambda: logs(scale=1.0), 0, 0, ["the graphs differ:", "one: <constant f32[] at"]),
    "a step later": (lambda: logs(first=1), 1, 0, ["in feed x", "12 of 12 differ"]),
}


@pytest.mark.parametrize("strategy", ["zero3", "data x tensor"])
def test_ranks_that_keep_parts_of_their_own_are_alike_in_what_they_share(tmp_path, monkeypatch, strategy):
    def train():
        losses(MODELS["mlp"], STRATEGIES[strategy](), steps=3)

    record(tmp_path / "a", 4, train)
    for other in (1, 2):
        assert sides_of(monkeypatch, [(tmp_path / "a", rank, train) for rank in (0, other)]) == ""


@pytest.mark.parametrize("case", PARTED)
def test_where_two_runs_part(tmp_path, monkeypatch, case):
    other, rank, step, told = PARTED[case]
    record(tmp_path / "a", 2, logs)
    record(tmp_path / "b", 2, other)
    said = sides_of(monkeypatch, [(tmp_path / "a", rank, logs), (tmp_path / "b", rank, other)])
    assert said.startswith(f"step {step} of 'default' is the first that differs: ")
    assert [words for words in told if words not in said] == [], said


def test_records_that_have_no_step_in_common(tmp_path, monkeypatch):
    monkeypatch.setattr(tape, "STEPS", 2)
    for name in "ab":
        record(tmp_path / name, 1, lambda: many(4, 10))
    Record(tmp_path / "a", 0).chapters[2].unlink()
    Record(tmp_path / "b", 0).chapters[0].unlink()
    with pytest.raises(RecordError, match="step 2 is not in the record of rank0, which has steps 0 to 1"):
        sides_of(monkeypatch, [(tmp_path / name, 0, few) for name in "ab"])


def test_where_two_ranks_part(tmp_path, monkeypatch):
    record(tmp_path / "a", 2, lambda: logs(tell=flipped(2)))
    said = sides_of(monkeypatch, [(tmp_path / "a", rank, logs) for rank in range(2)])
    assert said.startswith(
        "step 2 of 'default' is the first that differs: in all_reduce sum of 0-1 for test_replay.py:"
    )
    assert ", variable w" in said
    assert re.search(r" at \[1\]\n  1 of 4 differ, by .* at most$", said)


SHOWN = {  # two values -> what is said of them
    "one number": (np.float32(1), np.float32(1.5), ["1", "1.5", "  1 of 1 differ, by 0.5 at most"]),
    "NaN is the most": (
        np.array([[1, 2], [3, np.nan]]),
        np.array([[9, 2], [3, 4.0]]),
        ["nan at [1, 1]", "4 at [1, 1]", "  2 of 4 differ, by nan at most"],
    ),
    "bools": (
        np.array([True, False]),
        np.array([True, True]),
        ["False at [1]", "True at [1]", "  1 of 2 differ, by 1"],
    ),
    "large integers": (
        np.array([2**60]),
        np.array([2**60 + 1]),
        ["1152921504606846976 at [0]", "1152921504606846977 at [0]"],
    ),
    "signs of zeros": (np.zeros(2), np.array([0.0, -0.0]), ["0 at [1]", "-0 at [1]", "  1 of 2 differ, by 0 at most"]),
    "kinds of NaN": (
        np.array([0, 0x7FF8 << 48], "u8").view("f8"),
        np.array([0, 0x7FF9 << 48], "u8").view("f8"),
        ["nan at [1]", "nan at [1]", "  1 of 2 differ, by nan at most"],
    ),
    "rows that do not lie in order": (np.zeros((2, 3)).T, np.eye(3, 2), ["0 at [0, 0]", "1 at [0, 0]", "  2 of 6 "]),
    "shapes": (np.zeros(2), np.zeros(3), ["f64[2]", "f64[3]"]),
    "dtypes": (np.zeros(2), np.zeros(2, "int8"), ["f64[2]", "i8[2]"]),
}


@pytest.mark.parametrize("case", SHOWN)
def test_two_values_in_words(case):
    one, other, told = SHOWN[case]
    said = compare.show(np.asarray(one), np.asarray(other))
    assert [line for line, start in zip(said, told) if not line.startswith(start)] == []
    assert len(said) >= len(told)


# -- sizes, kills and damage -------------------------------------------------------------------------------------------


def many(steps=200, size=2000, rank_steps=None):
    """Steps of a model whose variable and message are of a known size."""
    x = ht.placeholder("x", (size,))
    w = ht.variable("w", np.zeros(size, "float32"))
    executor = ht.Executor([{w: w + ht.dist.all_reduce(x)}], comm=world())
    for step in range(steps):
        executor.run({x: np.full(size, step % 7, "float32")})


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.glob("*"))


def test_a_record_keeps_to_its_bytes_and_its_last_steps(tmp_path, monkeypatch):
    limit, most = 300_000, []
    plain = Tape.add

    def add(tape, *given):
        plain(tape, *given)
        most.append(bytes_of(tape.folder))

    monkeypatch.setattr(Tape, "add", add)
    record(tmp_path / "a", 2, many, limit)
    found = Record(tmp_path / "a", 0)
    assert limit // 2 < max(most) <= limit
    assert found.last == 199 and found.first <= 194
    assert len([*found.steps(found.first + 2)]) == 198 - found.first
    for step in (found.first, found.last):
        replay(tmp_path / "a", 0, many, step)
    with pytest.raises(RecordError, match=rf"step 3 is not in the record of rank0, which has {found.window}"):
        found.way(3)


LARGE = {  # bytes of a record, and the step in which much more arrives -> the last step that is kept, and what is told
    "not even the variables": (8_000, None, None, "with this step takes .* bytes, and the record 8,000 at most"),
    "no step": (
        20_000,
        None,
        None,
        r"takes 2.,... bytes, and the record 20,000 at most; heturun --record-limit 7\d{4}",
    ),
    "one step": (42_000, None, 11, ""),
    "a step of a third of it": (300_000, 5, 11, ""),
    "a step that is too large": (
        110_000,
        5,
        4,
        "before step 5, and the job goes on without it: a chapter with this step",
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_is_too_large_for_a_record_ends_it_and_not_the_job(tmp_path, case):
    limit, at, last, told = LARGE[case]

    def train():
        x, y = ht.placeholder("x", (2000,)), ht.placeholder("y", (None,))
        w = ht.variable("w", np.zeros(2000, "float32"))
        executor = ht.Executor([ht.sum(ht.dist.all_reduce(y)), {w: w + x}], comm=world())
        return [
            float(executor.run({x: np.ones(2000), y: np.ones(20_000 if step == at else 2000)})[0]) for step in range(12)
        ]

    with pytest.warns(RuntimeWarning, match=told) if told else nullcontext():
        found = record(tmp_path / "a", 1, train, limit)
    assert found == [[2000.0 if step != at else 20_000.0 for step in range(12)]]
    assert bytes_of(tmp_path / "a" / "rank0") <= limit
    if last is None:
        with pytest.raises(RecordError, match="has no step that can be reached"):
            Record(tmp_path / "a", 0)
    else:
        assert Record(tmp_path / "a", 0).last == last
        replay(tmp_path / "a", 0, train)


def test_what_arrives_before_the_first_step_has_bounds(tmp_path):
    def train():
        told = np.zeros(1000)
        for _ in range(100):
            world().all_reduce(told, told)
        assert world().tape.passed is None
        few()

    with pytest.warns(
        RuntimeWarning, match="before step 0, .*: a chapter with this step takes 304,000 bytes, and the record 300,000"
    ):
        record(tmp_path / "a", 2, train, 300_000)


def test_a_step_of_a_small_model_is_reached_by_some_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tape, "STEPS", 5)
    record(tmp_path / "a", 1, lambda: many(12, 10))
    found = Record(tmp_path / "a", 0)
    assert (found.first, found.last, [*found.chapters]) == (0, 11, [0, 5, 10])
    assert [len(found.way(step)) - 1 for step in (4, 5, 11)] == [5, 1, 2]
    assert [told.at for told in found.steps(3)] == [found.way(step)[-1].at for step in range(3, 12)]
    replay(tmp_path / "a", 0, lambda: many(12, 10), 8)


def few():
    many(4, 10)


def test_a_gpu_is_refused(tmp_path):
    made = Recording(tmp_path / "rank0", SerialComm(), ["train.py"])
    with pytest.raises(ArgumentError, match=r"a record of gpu:0[\s\S]*fix: record on CPUs"):
        made._follows(SimpleNamespace(device=Device("gpu", 0)), "train")


def test_the_command_of_another_users_record_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    record(tmp_path / "a", 1, few)
    found = Record(tmp_path / "a", 0)
    monkeypatch.setattr(os, "getuid", lambda: found.start.path.stat().st_uid + 1, raising=False)
    with pytest.raises(RecordError, match=r"'train.py' in .* is gone, or told by another user's record") as caught:
        run_again(found, Replay(found, 3), [])
    assert caught.value.fix.startswith("say what to run, ")


def begins(raw):
    """Where the frames of a file begin."""
    at = 0
    while at < len(raw):
        yield at
        line = raw.index(b"\n", at) + 1
        at = line + json.loads(raw[at:line])["nbytes"]


def rewritten(told, change=lambda name, array: array, **facts):
    """Write a frame of a record again, which then is the last of its file, so that it says otherwise."""
    other = Tape(told.path.parent / "other", LIMIT)
    other.folder.rmdir()
    other.files = [told.path]
    found = {name: change(name, array) for name, array in told.arrays().items()}
    os.truncate(told.path, max(at for at in begins(told.path.read_bytes()) if at < told.at))
    other.add(found, told.facts | facts)


def test_a_record_sets_no_variable_that_no_record_has(tmp_path, monkeypatch):
    """As PYTHONSTARTUP or LD_PRELOAD, by which whoever wrote it would run what they like."""
    record(tmp_path / "a", 1, few)
    asked = {"LD_PRELOAD": "it.so", "HETU_CC": "it", "HETU_BLAS": "0"}
    rewritten(Record(tmp_path / "a", 0).start, environment=asked)
    found = Record(tmp_path / "a", 0)
    assert environment(found) == {"HETU_CC": "it", "HETU_BLAS": "0"}
    monkeypatch.setattr(os, "getuid", lambda: found.start.path.stat().st_uid + 1, raising=False)
    assert environment(found) == {"HETU_BLAS": "0"}


def test_a_record_tells_a_terminal_nothing(tmp_path, capsys):
    record(tmp_path / "a", 1, few)
    rewritten(Record(tmp_path / "a", 0).start, command=["\x1b[2J", "train.py"])
    assert cli.main(["replay", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.startswith("'?[2J' train.py on 1 rank, by ")


@pytest.mark.parametrize("facts", [{"size": 10**15}, {"size": 1}, {"size": 0}, {"version": "hetu-record-2"}])
def test_a_start_that_cannot_be(tmp_path, facts):
    record(tmp_path / "a", 2, few)
    rewritten(Record(tmp_path / "a", 1).start, **facts)
    with pytest.raises(RecordError, match=r"rank1/start is damaged: it tells .* of rank 1; this hetu reads"):
        Record(tmp_path / "a", 1)


def test_a_script_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "a", 1, few)
    found = Record(Path("a"), 0)
    with pytest.raises(RecordError, match=r"'train.py' in .* is gone[\s\S]*fix: say what to run, .*--run python"):
        run_again(found, Replay(found, 3), [])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_values_that_are_not_whole_are_not_the_scripts_fault(tmp_path, damage):
    record(tmp_path / "a", 1, few)
    damage(tmp_path / "a" / "rank0" / "steps000000000")
    with pytest.raises(RecordError, match=r"has no step that can be reached[\s\S]*fix: .*copy all of it"):
        replay(tmp_path / "a", 0, few)


@pytest.mark.parametrize("chapter", [0, 5, 10])
def test_a_chapter_that_is_not_whole_is_lacking_and_no_other(tmp_path, monkeypatch, chapter):
    monkeypatch.setattr(tape, "STEPS", 5)
    record(tmp_path / "a", 1, lambda: many(12, 10))
    found = Record(tmp_path / "a", 0)
    os.truncate(found.chapters[chapter], found.way(chapter + 1)[-1].at + 3)
    found = Record(tmp_path / "a", 0)
    for step in range(12):
        with (
            pytest.raises(RecordError, match="is not in the record") if chapter < step < chapter + 5 else nullcontext()
        ):
            replay(tmp_path / "a", 0, lambda: many(12, 10), step)
    with pytest.raises(RecordError, match="is not in the record") if chapter < 10 else nullcontext():
        assert len([*found.steps(0)]) == 11


@pytest.mark.parametrize("torn", ["add", "begin"])
def test_a_full_disk_ends_the_record_and_not_the_job(tmp_path, monkeypatch, torn):
    """What has been kept until then can be run again."""
    plain, written = getattr(Tape, torn), []

    def write(tape, *given):
        written.append(tape)
        if len(written) > 1 + 2 * (torn == "add"):  # of frames the first one is the start
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(tape, *given)

    monkeypatch.setattr(Tape, torn, write)
    with pytest.warns(
        RuntimeWarning, match=r"the record ends before step \d+, .*: No space left on device; make"
    ) as told:
        record(tmp_path / "a", 1, lambda: many(40, 2000), 300_000)
    assert len(told) == 1
    last = Record(tmp_path / "a", 0).last
    assert f"before step {last + 1}," in str(told[0].message)
    replay(tmp_path / "a", 0, many, last)


def test_steps_behind_a_switch_are_not_recorded(tmp_path):
    def train(switch=True):
        x, w = ht.placeholder("x", (None, 4)), ht.variable("w", ht.init.ones, (4, 2))
        executor = ht.Executor([ht.optim.Momentum(0.1).minimize(ht.sum(x @ w))], strategy="dp")
        for step in range(5):
            if switch and step == 3:
                executor.switch("zero3")
            executor.run({x: np.full((4, 4), step, "float32")})
        return executor.state["w"]

    with pytest.warns(RuntimeWarning, match="no step is recorded of 'default', as .* by one strategy"):
        found = record(tmp_path / "a", 2, train)
    assert Record(tmp_path / "a", 1).window == "steps 0 to 2"
    replay(tmp_path / "a", 1, train, 2)
    np.testing.assert_array_equal(np.concatenate(found), train(False))


def test_values_that_were_given_to_other_variables(tmp_path):
    def train():
        executor, feeds = small()
        for step, feed in enumerate(feeds):
            assigns(step, executor, feed)
            executor.run("train", feed)

    record(tmp_path / "a", 1, train)
    told = Record(tmp_path / "a", 0).way(3)[-1]
    assert "given w" in told.facts["digests"]
    rewritten(told, lambda name, array: array[:1] if name.startswith("given ") else array)
    with pytest.raises(RecordError, match=r"the script has given w \(f32.3.\), the record given w \(f32.1.\)"):
        replay(tmp_path / "a", 0, train)


@pytest.mark.parametrize("rows", [2**27, 2**40, 2**62, 2**70])
def test_memory_is_not_taken_for_a_feed_that_a_record_only_tells_of(tmp_path, monkeypatch, rows):
    def train():
        executor, feeds = small()
        executor.run("train", feeds[0])

    monkeypatch.setattr(system, "memory", lambda: 2.0**29)
    record(tmp_path / "a", 1, train)
    rewritten(Record(tmp_path / "a", 0).way(0)[-1], feeds={"x": [rows, 3], "t": [rows]})
    tracemalloc.start()
    with pytest.raises(RecordError, match="are too large here|with feeds|is damaged"):
        replay(tmp_path / "a", 0, train)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_a_record_into_a_file(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match="a' cannot be made: File exists"):
        record(tmp_path / "a", 1, few)


def test_a_folder_that_holds_a_record(tmp_path):
    record(tmp_path / "a", 1, few)
    with pytest.raises(ArgumentError, match="rank0' holds a record"):
        record(tmp_path / "a", 1, few)


def test_whatever_a_kill_leaves_is_a_record_of_whole_steps(tmp_path):
    record(tmp_path / "a", 1, few)
    folder = tmp_path / "a" / "rank0"
    paths = [folder / name for name in ("start", "steps000000000")]
    assert sorted(folder.iterdir()) == sorted(paths)
    whole, found = {path: path.read_bytes() for path in paths}, Record(tmp_path / "a", 0)
    ends = [told.at + told.facts["nbytes"] for told in found.way(3)]
    written = [(paths[0], 0, len(whole[paths[0]])), *((paths[1], *each) for each in itertools.pairwise([0, *ends]))]
    for path in paths:
        path.unlink()
    for number, (path, first, last) in enumerate(written):
        for end in (first, first + 5, (first + last) // 2, last - 1):
            path.write_bytes(whole[path][:end])
            if number < 3:
                with pytest.raises(
                    RecordError, match="is damaged" if number == 0 else "has no step that can be reached"
                ):
                    Record(tmp_path / "a", 0)
            else:
                assert Record(tmp_path / "a", 0).last == number - 3
                replay(tmp_path / "a", 0, few)
        path.write_bytes(whole[path][:last])


def mutations(raw):
    """Files that no recorder has written."""
    yield from (
        b"",
        b"\0" * 16,
        b"\xff" * 64,
        raw[:20],
        raw[::-1],
        b"[" * 100_000,
        (1 << 62).to_bytes(8, "little") + raw[8:],
    )
    draws = np.random.default_rng(0)
    for _ in range(60):
        bits = bytearray(raw)
        bits[draws.integers(len(raw))] ^= 1 << draws.integers(8)
        yield bytes(bits)
    for word in (b"version", b"step", b"feed x", b'"F32"', b"shapes", b"digests"):
        yield raw.replace(word, word[::-1])


OTHER = [
    0,
    -1,
    3,
    2**24,
    2**31,
    2**40,
    2**62,
    2**70,
    0.5,
    None,
    True,
    "x",
    "",
    [],
    [2**40],
    [[2**40]],
    [2**40] * 9,
    {},
    {"x": 2**70},
]


def leaves(tree, path=()):
    """The ways to all parts of what JSON holds."""
    if path:
        yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from leaves(value, (*path, key))


def with_other_fields(raw):
    """The same file with another value in each place of what its last frame tells, and of the header of its arrays."""
    *_, first = begins(raw)
    told, _, arrays = raw[first:].partition(b"\n")
    size = int.from_bytes(arrays[:8], "little")
    both = {"told": json.loads(told), "header": json.loads(arrays[8 : 8 + size])}
    for (kind, *way, last), other in itertools.product((way for way in leaves(both) if len(way) > 1), OTHER):
        made = copy.deepcopy(both)
        functools.reduce(lambda tree, key: tree[key], way, made[kind])[last] = other
        text = json.dumps(made["header"]).encode()
        held = len(text).to_bytes(8, "little") + text + arrays[8 + size :]
        if way or last != "nbytes":
            made["told"]["nbytes"] = len(held)
        yield raw[:first] + json.dumps(made["told"]).encode() + b"\n" + held


@pytest.mark.parametrize("change", [mutations, with_other_fields])
@pytest.mark.parametrize("name", ["start", "steps000000000"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_record_is_told_or_does_no_harm(tmp_path, monkeypatch, name, change, ranks):
    monkeypatch.setattr(system, "memory", lambda: 2.0**29)
    record(tmp_path / "a", ranks, few)
    path, told = tmp_path / "a" / "rank0" / name, []
    whole = path.read_bytes()
    changed = [*change(whole)]
    tracemalloc.start()
    for raw in np.random.default_rng(0).permutation(len(changed))[:90]:
        path.write_bytes(changed[raw])
        try:
            replay(tmp_path / "a", 0, few)  # a bit of the line of a message, say
        except RecordError as error:
            assert error.fix
            told.append(str(error))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(told) > 20
    assert peak < 2**28, told
    path.write_bytes(whole)
    replay(tmp_path / "a", 0, few)


def test_a_bit_of_a_feed_is_told(tmp_path):
    record(tmp_path / "a", 1, few)
    path = Record(tmp_path / "a", 0).way(3)[-1].path
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 4
    path.write_bytes(raw)
    with pytest.raises(RecordError, match=r"rank0/steps000000000 is damaged: the bits of '.*' have changed"):
        replay(tmp_path / "a", 0, few)


def renamed():
    with ht.scope("other"):
        few()


SUM = r"all_reduce sum of 0-1 for test_replay.py:\d+ .f32.10..\n"
OTHERS = {  # a script that is not that of the record -> what is told
    "other names": (renamed, RecordError, r"the script has no such variable .*, the record given w \(f32.10.\)"),
    "other sizes": (
        lambda: many(4, 11),
        RecordError,
        r"the script has given w \(f32.11.\), the record given w \(f32.10.\)",
    ),
    "more before": (
        lambda: (tells(0, None, None), few()),
        *(
            RecordError,
            r"has all_reduce sum of 0-1 for .* \(f32.2.\), the record all_gather of 0-1 for test_rep.* \(u8.2, 8.\)",
        ),
    ),
    "more messages": (
        lambda: step_of(lambda x: ht.dist.all_reduce(ht.dist.all_reduce(x))),
        *(RecordError, f"the script has {SUM[:-2]}, the record nothing more"),
    ),
    "fewer messages": (
        lambda: step_of(lambda x: x),
        RecordError,
        "did not ask for all_reduce sum of 0-1 for test_rep",
    ),
    "other messages": (
        lambda: step_of(lambda x: ht.dist.all_reduce(x, "max")),
        *(RecordError, f"has all_reduce max of 0-1 for .* .f32.10.., the record {SUM}"),
    ),
    "other arithmetic": (
        lambda: step_of(lambda x: 2 * ht.dist.all_reduce(x)),
        *(RecordError, "the step is not what it was: variable w is another"),
    ),
    "other feeds": (
        lambda: step_of(ht.dist.all_reduce, "y"),
        *(RecordError, "no sub-graph 'default' with feeds {'x': .10.}"),
    ),
    "other sub-graphs": (
        lambda: step_of(ht.dist.all_reduce, name="learn"),
        *(RecordError, "no sub-graph 'default' with feeds {'x': .10.}"),
    ),
}


def step_of(act, feed="x", name="default"):
    x, w = ht.placeholder(feed, (10,)), ht.variable("w", np.zeros(10, "float32"))
    ht.Executor({name: [{w: w + act(x)}]}, comm=world()).run(name, {x: np.zeros(10)})


@pytest.mark.parametrize("case", OTHERS)
def test_another_script_than_that_of_the_record(tmp_path, case):
    train, kind, told = OTHERS[case]
    record(tmp_path / "a", 2, few)
    with pytest.raises(kind, match=told):
        replay(tmp_path / "a", 1, train)


def test_a_step_that_failed_fails_again(tmp_path):
    def train():
        ids, w = ht.placeholder("ids", (None,), "int64"), ht.variable("w", np.zeros((4, 2), "float32"))
        executor = ht.Executor([{w: w + ht.sum(ht.embedding(w, ids))}])
        for step in range(4):
            executor.run({ids: [step * 2]})

    with pytest.raises(HetuError) as first:
        record(tmp_path / "a", 1, train)
    shown = Record(tmp_path / "a", 0).way(2)[-1].facts["shown"]
    assert shown.startswith("failed: ") and str(first.value).split("\n")[0] in shown
    with pytest.raises(type(first.value), match=re.escape(str(first.value).split("\n")[0])):
        replay(tmp_path / "a", 0, train)


def test_a_digest_tells_bits_and_places_apart():
    a = np.arange(5000.0)
    changed = [a.copy(), a[::-1], a[:-1], np.roll(a, 1)]
    changed[0][4321] = np.nextafter(4321.0, 0)
    assert len({digest(a), *map(digest, changed)}) == 5
    assert digest(a[::2]) == digest(a[::2].copy())
    batch = np.arange(8192.0, dtype="float32").reshape(4, 2048)
    assert len({digest(np.roll(batch, by, axis)) for by in range(4) for axis in (0, 1)}) == 7  # samples in other orders


# -- real ranks, and the commands --------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
import numpy as np
import hetu as ht
from hetu.dist import DataParallel, Parallel, Pipeline, TensorParallel, ZeRO, stage, world

strategies = {
    "data": DataParallel,
    "zero": lambda: ZeRO(3),
    "tensor": lambda: TensorParallel({"up/weight": 1, "down/weight": 0}),
    "pipeline": lambda: Pipeline(2, data=world().world_size // 2),
}
x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
with stage(0):
    norm = ht.nn.LayerNorm(16) if sys.argv[1] == "pipeline" else ht.nn.BatchNorm(16)
    h = ht.relu(norm(ht.nn.Linear(10, 16, name="up")(x)))
    h = ht.dropout(h, 0.2)
with stage(1):
    y = ht.softmax(ht.nn.Linear(16, 5, name="down")(h))
    told = ht.log(ht.take_along_axis(y, ht.reshape(t, (-1, 1)), axis=1) - float(sys.argv[2]))
    loss = -ht.mean(told)
executor = ht.Executor({"train": [loss, ht.optim.Adam(0.01).minimize(loss)]}, strategy=strategies[sys.argv[1]]())
draws = np.random.default_rng(0)
for step in range(8):
    feed = {x: draws.normal(size=(16, 10)), t: draws.integers(0, 5, 16)}
    if step == 5 and "large" in sys.argv:
        feed[x] *= 1e38
    executor.run("train", feed)
    if step == 6 and "kill" in sys.argv and world().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def hetu(folder, *arguments, **options):
    line = [sys.executable, "-m", "hetu", *map(str, arguments)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False, **options)


def recorded_job(folder, name, ranks, *arguments):
    (folder / "train.py").write_text(SCRIPT)
    return heturun("-w", ranks, "--record", name, "python", "train.py", *arguments, cwd=folder)


@pytest.mark.parametrize(("strategy", "ranks"), nightly([("data", 2), ("zero", 4), ("tensor", 4), ("pipeline", 4)]))
def test_a_rank_of_a_real_job_runs_again(tmp_path, strategy, ranks):
    job = recorded_job(tmp_path, "a", ranks, strategy, "0")
    assert (job.returncode, job.stderr) == (0, "")
    for rank in range(ranks):
        again = hetu(tmp_path, "replay", "a", "--rank", rank)
        assert (again.returncode, again.stderr) == (0, "")
        assert re.fullmatch(rf"rank {rank}, step 7 fetched .*: equal to the record bit for bit\n", again.stdout)


def test_a_job_that_made_a_nan_and_was_killed(tmp_path):
    job = recorded_job(tmp_path, "bad", 2, "data", "0", "large", "kill")
    assert "killed by SIGKILL" in job.stderr
    listed = hetu(tmp_path, "replay", "bad").stdout
    assert listed.startswith("train.py data 0 large kill on 2 ranks, by Python ")
    assert "\nrank 0: steps 0 to 6; the last, of 'train', fetched nan\n" in listed
    assert hetu(tmp_path, "replay", "bad", "--rank", 0).returncode == 0
    found = hetu(tmp_path, "replay", "bad", "--rank", 1, "--nans")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("rank 1, step 5:\n<")
    assert " made the first NaN" in found.stderr
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "ht.relu(norm" in text)
    assert f"at train.py:{line}" in found.stderr

    stopped = hetu(
        tmp_path, "replay", "bad", "--rank", 1, "--step", 2, "--pdb", input="p len(program.feeds), executor\nc\n"
    )
    assert "(Pdb) (2, <Executor of train on cpu, <State of " in stopped.stdout
    assert "rank 1, step 2 fetched " in stopped.stdout


@pytest.mark.nightly
def test_two_runs_with_another_constant(tmp_path):
    for name in "ab":
        recorded_job(tmp_path, name, 1, "data", {"a": "1e-4", "b": "2e-4"}[name])
    found = hetu(tmp_path, "compare", "a", "b")
    assert found.returncode == 1
    assert "step 0 of 'train' is the first that differs: in " in found.stdout
    assert "the first node that differs: <constant f32[] at train.py:" in found.stdout
    assert "float(sys.argv[2])" in found.stdout
    assert "  a: 9.99999975e-05\n  b: 0.000199999995\n" in found.stdout


def test_what_heturun_is_told_of_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = told(job_of(parse(["--record", "a", "--record-limit", "2M", "python", "x.py"])[1]))
    assert said == {"HETU_RECORD": str(tmp_path / "a"), "HETU_RECORD_LIMIT": str(2 << 20)}
    for other in (["-s", "1"], ["--elastic", "1:2"]):
        with pytest.raises(ArgumentError, match="--record with servers, or ranks that change"):
            job_of(parse([*other, "--record", "a", "python", "x.py"])[1])
    with pytest.raises(ArgumentError, match="--record-limit 1024 without a folder"):
        job_of(parse(["--record-limit", "1K", "python", "x.py"])[1])


WRONG = {  # arguments -> what is said of them
    (
        "replay",
        "none",
    ): "in 'none'; ranks there: none\n  fix: name one of them, in a folder that heturun --record has made",
    ("replay", "a", "--rank", "4"): "no record of rank 4 in 'a'; ranks there: 0",
    ("replay", "a", "--step", "9"): "step 9 is not in the record of rank0, which has steps 0 to 3",
    ("compare", "a"): "1 record, and rank 0 of each",
    ("compare", "a", "a", "--ranks", "0", "1"): "2 records, and ranks 0, 1 of each",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments(tmp_path, monkeypatch, capsys, arguments):
    record(tmp_path / "a", 1, few)
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert WRONG[arguments] in said
    assert "fix: " in said


def test_ctrl_c_ends_what_compare_has_started(tmp_path, monkeypatch, capsys):
    jobs = []

    class Job(subprocess.Popen):
        def communicate(self, *given, **options):
            jobs.append(self)
            raise KeyboardInterrupt

    for name in "ab":
        record(tmp_path / name, 1, few)
    monkeypatch.setattr(subprocess, "Popen", Job)
    monkeypatch.setattr(compare, "parted", lambda *sides: (0, ["result 0"], [Record(tmp_path / "a", 0).way(0)[-1]] * 2))
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 130
    assert capsys.readouterr().err == "hetu compare: interrupted\n"
    assert [job.returncode for job in jobs] == [-signal.SIGKILL]


@pytest.mark.parametrize("step", range(4))
def test_variables_of_any_step_are_written_where_it_is_looked_at(tmp_path, monkeypatch, step):
    """Whoever is in the debugger has the executor at hand."""
    record(tmp_path / "a", 2, lambda: many(4, 10))
    executors = []
    monkeypatch.setattr(executor_module, "MADE", [executors.append])
    monkeypatch.setattr("builtins.breakpoint", lambda: executors[0].state.save(tmp_path / "w"))
    replay(tmp_path / "a", 1, lambda: many(4, 10), step, pause=True)
    executor = ht.Executor([ht.variable("w", np.zeros(10, "float32"))])
    ht.load_weights(executor, tmp_path / "w")
    np.testing.assert_array_equal(executor.state["w"], np.full(10, [0, 0, 2, 6][step]))


def test_a_script_that_does_not_train(tmp_path):
    record(tmp_path / "a", 1, few)
    (tmp_path / "empty.py").write_text("")
    job = hetu(tmp_path, "replay", "a", "--step", "2", "--run", "python", "empty.py")
    assert job.returncode == 1
    assert "empty.py ended without a step that trains" in job.stderr
