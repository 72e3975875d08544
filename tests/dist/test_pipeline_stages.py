"""How the stages of a graph are found: by marks that flow forward, or by balanced cuts between layers."""

from __future__ import annotations

import itertools
import re

import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, GraphError
from hetu.core.graph import topological
from hetu.dist.cut.pipeline_stages import balanced_cut, label_by, marked_stages, phases, stages_of


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
    placed = stages_of(outputs, phase, label_by({}))
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
    placed = stages_of(outputs, phase, label_by({}))
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
    assert [*balanced_cut(layers(8, 8, 8, 8, 8), {"x"}, [1, 1]).values()] == [0, 0, 1, 1]
    assert [*balanced_cut(layers(32, 32, 32, 2, 2, 2), {"x"}, [1, 1]).values()] == [0, 1, 1, 1, 1]


def test_among_nearly_equal_cuts_the_narrow_one_is_taken():
    assert [*balanced_cut(layers(64, 64, 2, 64, 64), {"x"}, [1, 1]).values()] == [0, 0, 1, 1]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ArgumentError, match="3 stages for 2 layers"):
        balanced_cut(layers(4, 4, 4), {"x"}, [1, 1, 1])


def test_layers_may_be_cut_inside_of_what_they_are_part_of():
    x = ht.placeholder("x", (None, 6, 8))
    cut = balanced_cut([ht.mean(ht.nn.TransformerBlock(8, 2)(x))], {"x"}, [1, 1])
    assert set(cut.values()) == {0, 1}
    assert not any(name.endswith("block") for name in cut)
