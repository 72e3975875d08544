"""Which cases of a table are run: a sample of them, chosen by their names, and those asked for by their ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .conftest import is_nightly, mark_left_out, pytest_configure, pytest_generate_tests


@pytest.mark.parametrize(
    ("arguments", "left"),
    [(["tests"], "not nightly"), (["a.py::test[1]"], ""), (["a.py::test[1]", "b.py::test"], "not nightly")],
)
def test_a_case_is_run_that_is_asked_for_by_its_id(arguments, left):
    for given, kept in (("not nightly", left), ("nightly", "nightly")):
        config = SimpleNamespace(args=arguments, option=SimpleNamespace(markexpr=given))
        pytest_configure(config)
        assert config.option.markexpr == kept


def test_a_sample_is_the_same_everywhere_and_has_each_choice_of_many_cases():
    """A number has six cases and must be there, a letter has three."""
    made = [(letter, number) for letter in "abcdef" for number in range(3)]
    cases = [SimpleNamespace(id=f"{a}-{n}", params={"letter": a, "number": n}, marks=[]) for a, n in made]
    mark_left_out("tests/e.py::test", cases, 5)
    assert [case.id for case in cases if not is_nightly(case)] == ["a-0", "a-1", "a-2", "c-2", "d-2"]


def test_of_a_few_cases_one_is_run():
    cases = [SimpleNamespace(id="first", params={}, marks=[]), SimpleNamespace(id="other", params={}, marks=[])]
    mark_left_out("tests/e.py::test", cases, 1_000_000_007)
    assert [case.id for case in cases if not is_nightly(case)] == ["first"]
    mark_left_out("tests/e.py::test", [], 8)


@pytest.mark.parametrize(
    ("expression", "kept"), [("not nightly", ["a"]), ("nightly", ["a", "b"]), ("", ["a", "b"])], ids=str
)
def test_nightly_cases_are_made_where_they_are_asked_for(expression, kept):
    """A test that is nightly as a whole keeps one, which pytest leaves out: without one it would lack parameters."""
    nightly = SimpleNamespace(id="b", params={}, marks=[pytest.mark.nightly.mark])
    for calls, wanted in (([SimpleNamespace(id="a", params={}, marks=[]), nightly], kept), ([nightly], ["b"])):
        test = SimpleNamespace(nodeid="tests/e.py::test", get_closest_marker=lambda _: None)
        config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        metafunc = SimpleNamespace(_calls=calls, definition=test, config=config)
        assert [*pytest_generate_tests(metafunc)] == [None]
        assert [call.id for call in metafunc._calls] == wanted
