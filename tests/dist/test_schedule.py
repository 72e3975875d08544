"""Schedules as plain data, and how stages are found: what is held, the bubble, the order, cuts and marks."""

from __future__ import annotations

import itertools
import re

import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, GraphError
from hetu.core.graph import topological
from hetu.dist import Pipeline, Schedule
from hetu.dist.cut.stages import assign, balanced_cut, label_by, marked_stages, phases

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
    with pytest.raises(ArgumentError, match="stage -1"):
        ht.dist.stage(-1)


# -- stages of a graph ---------------------------------------------------------------------------------------------


def marked(stages: list[int]):
    x = h = ht.placeholder("x", (None, 4))
    for number in stages:
        with ht.dist.stage(number):
            h = ht.nn.Linear(4, 4, activation=ht.tanh)(h)
    loss = ht.mean(h * h)
    return x, loss, ht.optim.Adam(0.1).minimize(loss)


def test_variables_gradients_and_updates_lie_with_their_stage():
    _, loss, updates = marked([0, 1, 2])
    outputs = [loss, *updates.values()]
    phase = phases(outputs, {"x"})
    placed = assign(outputs, phase, label_by({}))
    weights = [v for v in updates if v.name.endswith("weight")]
    assert [placed[w] for w in weights] == [0, 1, 2]
    for w in weights:
        slots = [v for v in updates if v.name.startswith(f"{w.name}/")]
        assert len(slots) == 2
        assert {placed[w]} == {placed[v] for v in slots} == {placed[updates.gradients[w]]}
    step = next(v for v in updates if v.name.endswith("/step"))
    assert placed[step] == -1  # everywhere
    for node in topological(outputs):
        for i in node.inputs:
            if phase.get(node) == phase.get(i) == "F":
                assert placed[i] <= placed[node]
            if phase.get(node) == phase.get(i) == "B":
                assert placed[i] >= placed[node]


def test_each_edge_between_stages_carries_one_tensor_forward_and_one_gradient_back():
    """A residual sum makes two gradients of one value; they are added before they are sent."""
    h = ht.placeholder("x", (None, 4))
    for number in range(3):
        with ht.dist.stage(number):
            h = h + ht.nn.Linear(4, 4, activation=ht.tanh)(h)
    loss = ht.mean(h * h)
    outputs = [loss, *ht.optim.SGD(0.1).minimize(loss).values()]
    phase = phases(outputs, {"x"})
    placed = assign(outputs, phase, label_by({}))
    crossing = {
        (i, placed[node])
        for node in topological(outputs)
        for i in node.inputs
        if phase.get(i) in ("F", "B") and placed[i] != placed[node]
    }
    sent = sorted((phase[i], placed[i], to) for i, to in crossing if i.ndim)
    assert sent == [("B", 1, 0), ("B", 2, 1), ("F", 0, 1), ("F", 1, 2)]


def test_stages_that_flow_backward_are_refused_with_both_lines():
    _, loss, _ = marked([0, 1, 0])
    with pytest.raises(GraphError, match=r"in stage 0 needs .* of stage 1"):
        marked_stages([loss])


def test_a_missing_stage_is_named():
    with pytest.raises(ArgumentError, match=re.escape("stages [0, 2] are marked, stage 1 is not")):
        marked_stages([marked([0, 2])[1]])


def layers(*sizes: int):
    h = ht.placeholder("x", (None, sizes[0]))
    for before, after in itertools.pairwise(sizes):
        h = ht.relu(ht.nn.Linear(before, after)(h))
    return [ht.mean(h)]


def test_the_cut_balances_work():
    assert [*balanced_cut(layers(8, 8, 8, 8, 8), {"x"}, 2).values()] == [0, 0, 1, 1]
    assert [*balanced_cut(layers(32, 32, 32, 2, 2, 2), {"x"}, 2).values()] == [0, 1, 1, 1, 1]


def test_among_nearly_equal_cuts_the_narrow_one_is_taken():
    assert [*balanced_cut(layers(64, 64, 2, 64, 64), {"x"}, 2).values()] == [0, 0, 1, 1]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ArgumentError, match="3 stages for 2 layers"):
        balanced_cut(layers(4, 4, 4), {"x"}, 3)


def test_layers_may_be_cut_inside_of_what_they_are_part_of():
    x = ht.placeholder("x", (None, 6, 8))
    cut = balanced_cut([ht.mean(ht.nn.TransformerBlock(8, 2)(x))], {"x"}, 2)
    assert set(cut.values()) == {0, 1}
    assert not any(name.endswith("block") for name in cut)
