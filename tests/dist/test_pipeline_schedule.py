"""Schedules as plain data: what is held, the bubble, the order, pictures."""

from __future__ import annotations

import itertools
import re

import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.dist import Pipeline, Schedule

SHAPES = [*itertools.product((1, 2, 4, 7), (1, 2, 3, 4, 8, 16))]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_stage_r_of_1f1b_holds_p_minus_r_microbatches_and_gpipe_all(stages, microbatches):
    eager, lazy = Schedule.of("gpipe", stages, microbatches), Schedule.of("1f1b", stages, microbatches)
    assert [eager.live(r) for r in range(stages)] == [microbatches] * stages
    assert [lazy.live(r) for r in range(stages)] == [min(microbatches, stages - r) for r in range(stages)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_the_bubble_is_p_minus_1_of_m_plus_p_minus_1(kind, stages, microbatches):
    assert Schedule.of(kind, stages, microbatches).bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "pipedream"])
def test_every_pass_comes_once_and_after_what_it_needs(kind, stages, microbatches):
    schedule = Schedule.of(kind, stages, microbatches)
    done, sent = [], set()
    for _, action, slot in schedule.order:
        here = (slot.phase, slot.microbatch, slot.stage)
        if action == "transfer":
            assert here in done
            sent.add(here)
            continue
        neighbor = slot.stage - 1 if slot.phase == "F" else slot.stage + 1
        if 0 <= neighbor < stages:
            assert (slot.phase, slot.microbatch, neighbor) in sent
        if slot.phase == "B":
            assert ("F", slot.microbatch, slot.stage) in done
        done.append(here)
    assert len(done) == len(set(done)) == len(sent) == 2 * stages * microbatches
    for stage in range(stages):
        assert tuple((phase, m) for phase, m, s in done if s == stage) == schedule.lists[stage]


def test_evaluation_is_a_staircase_of_forward_passes():
    rows = str(Schedule.of("1f1b", 3, 4, backward=False)).splitlines()[1:]
    assert rows == ["stage 0  F0 F1 F2 F3 .. ..", "stage 1  .. F0 F1 F2 F3 ..", "stage 2  .. .. F0 F1 F2 F3"]


def test_a_schedule_prints_as_rows_and_as_a_picture():
    schedule = Schedule.of("1f1b", 4, 8)
    title, *rows = str(schedule).splitlines()
    assert title == "1f1b: 4 stages, 8 micro-batches, bubble 27.3 %"
    assert rows[3].startswith("stage 3  .. .. .. F0 B0 B0 F1 B1 B1 F2")
    svg = schedule._repr_svg_()
    assert svg.count("<rect") == 2 * 4 * 8 and "stage 3" in svg


def test_pipedream_starts_with_the_newest_weights_of_its_stage():
    schedule = Schedule.of("pipedream", 4, 6)
    assert [schedule.version(0, m) for m in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [schedule.version(3, m) for m in range(6)] == [0, 1, 2, 3, 4, 5]


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match=re.escape("there is no schedule '1f1'")) as error:
        Pipeline(schedule="1f1")
    assert "1f1b" in error.value.fix
    with pytest.raises(ArgumentError, match="microbatches=0"):
        Pipeline(microbatches=0)
    with pytest.raises(ArgumentError, match="stage got index=-1"):
        ht.dist.stage(-1)
