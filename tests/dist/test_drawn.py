"""Random trainings, by strategies of every kind, equal one process."""

from __future__ import annotations

import pytest

from .drawn import KINDS, difference, training

TRAININGS, EACH = 600, 7  # of which a run of the suite has so many


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n % (TRAININGS // EACH) == 1 else pytest.mark.nightly) for n in range(TRAININGS)],
)
def test_a_drawn_training_equals_one_process(number):
    if training(number).precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    assert difference(number) == ""


def test_the_usual_run_has_every_kind():
    assert {n % len(KINDS) for n in range(1, TRAININGS, TRAININGS // EACH)} == {*range(len(KINDS))}
