"""Random trainings, by strategies of every kind, equal one process."""

from __future__ import annotations

import pytest

from .drawn import KINDS, difference, training

TRAININGS, EACH, FIRST = 600, 7, 12  # of which a run of the suite has so many, from a first one on


@pytest.mark.kernels  # that go with whatever strategies do
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n % (TRAININGS // EACH) == FIRST else pytest.mark.nightly) for n in range(TRAININGS)],
)
def test_a_drawn_training_equals_one_process(number):
    if training(number).precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    assert difference(number) == ""


def test_the_usual_run_has_every_kind():
    assert {n % len(KINDS) for n in range(FIRST, TRAININGS, TRAININGS // EACH)} == {*range(len(KINDS))}
