"""Which cases of a table are run: a sample of them, chosen by their names, and those asked for by their ids."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from .conftest import is_nightly, mark_left_out, mark_products, pytest_configure, pytest_generate_tests


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


PRODUCTS = {  # choices by the names of what each sets, and the cases that are run
    "of two choices": (["a", "b"], {"a": "xyz", "b": [0, 1]}, ["x0", "y1", "z0"]),
    "of three": (["a", "b", ("c",)], {"a": "xy", "b": [0, 1], "c": [2, 3, 4]}, ["x02", "x04", "y13"]),
    "one of which is the same for all": (["a", "b", "c"], {"a": "xy", "b": [0, 1], "c": [2]}, ["x02", "y12"]),
    "one of which a fixture has": (["a"], {"a": "xy", "f": [0, 1, 2]}, ["x0", "x2", "y1"]),
    "a table of rows": (["a"], {"a": "xyz"}, ["x", "y", "z"]),
    "no choice": ([], {}, [""]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_of_a_product_each_choice_is_run_and_no_more_cases_than_that_takes(name):
    choices, values, run = PRODUCTS[name]
    cases = [
        SimpleNamespace(id="".join(map(str, case)), params=dict(zip(values, case)), marks=[])
        for case in product(*values.values())
    ]
    mark_products(choices, cases)
    assert [case.id for case in cases if not is_nightly(case)] == run


def test_what_a_row_sets_at_once_is_one_choice():
    rows = [("x", 0), ("y", 0), ("y", 1), ("z", 1)]
    cases = [SimpleNamespace(params={"a": a, "b": b}, marks=[]) for a, b in rows]
    mark_products(["a, b"], cases)
    assert not any(map(is_nightly, cases))


def stub(file: str, **marks: tuple) -> SimpleNamespace:
    """A test of a file, with marks and what they say."""
    made = {name: getattr(pytest.mark, name)(*given).mark for name, given in marks.items()}
    path, all_of = Path(__file__).parent / file, lambda name: [made[name]] if name in made else []
    return SimpleNamespace(nodeid=f"tests/{file}::test", path=path, get_closest_marker=made.get, iter_markers=all_of)


@pytest.mark.parametrize(
    ("file", "marks", "meant"),
    [
        ("dist/test_e.py", {}, True),
        ("dist/test_e.py", {"kernels": ()}, False),
        ("dist/test_e.py", {"compiled": ()}, False),
        ("dist/test_e.py", {"usefixtures": ("meaning",)}, True),
        ("test_dist.py", {}, False),
        ("test_e.py", {"usefixtures": ("tmp_path", "meaning")}, True),
    ],
)
def test_rooms_without_kernels_have_them_nightly(file, marks, meant):
    asked, config = [], SimpleNamespace(option=SimpleNamespace(markexpr=""))
    ask = lambda name, ways, **_: asked.append((name, [*ways]))  # noqa: E731
    metafunc = SimpleNamespace(_calls=[], definition=stub(file, **marks), config=config, parametrize=ask)
    assert [*pytest_generate_tests(metafunc)] == [None] and bool(asked) == meant
    for name, (plain, kernels) in asked:
        assert (name, plain, kernels.values, kernels.marks[0].name) == ("meaning", "0", ("1",), "nightly")


@pytest.mark.parametrize(
    ("expression", "kept"), [("not nightly", ["a"]), ("nightly", ["a", "b"]), ("", ["a", "b"])], ids=str
)
def test_nightly_cases_are_made_where_they_are_asked_for(expression, kept):
    """A test that is nightly as a whole keeps one, which pytest leaves out: without one it would lack parameters."""
    nightly = SimpleNamespace(id="b", params={}, marks=[pytest.mark.nightly.mark])
    for calls, wanted in (([SimpleNamespace(id="a", params={}, marks=[]), nightly], kept), ([nightly], ["b"])):
        config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        metafunc = SimpleNamespace(_calls=calls, definition=stub("e.py"), config=config)
        assert [*pytest_generate_tests(metafunc)] == [None]
        assert [call.id for call in metafunc._calls] == wanted
