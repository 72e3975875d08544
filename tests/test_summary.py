"""The model table: layers in order, every parameter counted once, totals that add up."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import Node, tagged
from hetu.look.summary import summary


def linear(name: str, x: Node, size: int, **options) -> Node:
    w = ht.variable(f"{name}/weight", np.ones((x.shape[-1], size), np.float32), **options)
    b = ht.variable(f"{name}/bias", np.ones(size, np.float32), **options)
    with tagged(layer=name):
        return x @ w + b


@pytest.fixture
def model() -> Node:
    h = linear("hidden", ht.placeholder("x", (None, 784)), 256)
    return linear("head", ht.exp(h), 10, trainable=False)


def test_layers_stand_in_order_with_output_and_parameters(model):
    hidden, head = summary(model).rows
    assert (hidden.layer, hidden.output) == ("hidden", "f32[?, 256]")
    assert (hidden.parameters, hidden.trainable) == (784 * 256 + 256, 784 * 256 + 256)
    assert (head.layer, head.output, head.parameters, head.trainable) == ("head", "f32[?, 10]", 2570, 0)
    assert head.nbytes == 4 * 2570


def test_totals_add_up(model):
    made = summary(model)
    assert made.parameters == 200_960 + 2570 and made.trainable == 200_960
    assert made.nbytes == 4 * made.parameters


def test_it_prints_an_aligned_table(model):
    lines = str(summary(model)).splitlines()
    assert lines[0].split() == ["layer", "output", "parameters", "trainable", "MB"]
    assert lines[-1].split() == ["total", "203,530", "200,960", "0.814"]
    assert len({len(line) for line in lines}) == 1
    assert str(summary(model)) == repr(summary(model))


def test_the_html_is_well_formed_and_escaped():
    with tagged(layer="<b>"):
        y = ht.placeholder("x", (3,)) * 2
    html = summary(y)._repr_html_()
    ElementTree.fromstring(html)
    assert "&lt;b&gt;" in html


def test_gradients_and_optimizer_state_change_nothing(model):
    loss = ht.sum(model * model)
    plain = summary(loss)
    slopes = ht.gradients(loss, [n for n in ht.Graph((loss,)).leaves("variable")])
    assert summary([loss, *slopes]) == plain


def test_a_shared_variable_counts_once():
    table = ht.variable("embed/table", np.ones((5, 3), np.float32))
    with tagged(layer="embed"):
        h = ht.placeholder("x", (None, 5)) @ table
    with tagged(layer="output"):
        y = h @ ht.matrix_transpose(table)
    rows = {r.layer: r.parameters for r in summary(y).rows}
    assert rows == {"embed": 15, "output": 0}


def test_a_table_without_a_bound_has_its_budget_and_no_number_of_parameters():
    table = ht.nn.DynamicEmbedding(4, budget=1 << 20)
    found = ht.summary(table(ht.placeholder("ids", (None,), "int64")))
    assert (found.parameters, found.nbytes, "parameters" in repr(table)) == (0, 1 << 20, False)


def test_a_variable_outside_of_layers_has_its_own_row():
    y = ht.placeholder("x", (None, 3)) * ht.variable("scale", 1.0, (3,))
    (row,) = summary(y).rows
    assert (row.layer, row.output, row.parameters) == ("scale", "f32[3]", 3)
    assert summary(ht.variable("alone", 1.0, (2,))).parameters == 2


def test_variables_of_nested_layers_belong_to_the_innermost():
    x = ht.placeholder("x", (None, 4))
    scale = ht.variable("block/scale", 1.0, (4,))
    with tagged(layer="block"):
        y = linear("block/inner", x, 4) * scale
    rows = {r.layer: r.parameters for r in summary(y).rows}
    assert rows == {"block/inner": 20, "block": 4}


def test_a_graph_without_variables_has_no_parameters():
    made = summary(ht.placeholder("x", (3,)) + 1)
    assert made.rows == () and made.parameters == 0
    assert "total" in str(made)


def test_layers_of_nn_are_recognized():
    x = ht.placeholder("x", (None, 8))
    with ht.scope("mlp"):
        hidden, head = ht.nn.Linear(8, 4), ht.nn.Linear(4, 2)
    y = head(hidden(x))
    assert [(r.layer, r.parameters) for r in summary(y).rows] == [("mlp/linear", 36), ("mlp/linear_1", 10)]
