"""Which cases of a table are run: a sample of them, chosen by their names, and those asked for by their ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .conftest import pytest_collection_modifyitems, pytest_configure


@pytest.mark.parametrize(
    ("arguments", "left"),
    [(["tests"], "not nightly"), (["a.py::test[1]"], ""), (["a.py::test[1]", "b.py::test"], "not nightly")],
)
def test_a_case_is_run_that_is_asked_for_by_its_id(arguments, left):
    for given, kept in (("not nightly", left), ("nightly", "nightly")):
        config = SimpleNamespace(args=arguments, option=SimpleNamespace(markexpr=given))
        pytest_configure(config)
        assert config.option.markexpr == kept


class Case:
    """As pytest's of a test that is `sampled(5)`."""

    def __init__(self, letter: str, number: int) -> None:
        self.nodeid, self.nightly = f"tests/e.py::test[{letter}-{number}]", False
        self.callspec = SimpleNamespace(params={"letter": letter, "number": number})

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(5,)) if name == "sampled" else None

    def add_marker(self, name: str) -> None:
        self.nightly = name == "nightly"


def test_a_sample_is_the_same_everywhere_and_has_each_choice_of_many_cases():
    """A number has six cases and must be there, a letter has three."""
    cases = [Case(letter, number) for letter in "abcdef" for number in range(3)]
    pytest_collection_modifyitems(cases)
    assert [case.nodeid[-4:-1] for case in cases if not case.nightly] == ["a-0", "a-1", "a-2", "c-2", "d-2"]
