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


def test_a_sample_is_the_same_wherever_it_is_chosen():
    marked: list[int] = []
    mark = SimpleNamespace(args=(4,))
    items = [
        SimpleNamespace(
            nodeid=f"tests/a.py::test[{k}]",
            get_closest_marker={"sampled": mark}.get,
            add_marker=lambda name, k=k: marked.append(k),
        )
        for k in range(24)
    ]
    pytest_collection_modifyitems(items)
    assert sorted({*range(24)} - {*marked}) == [1, 5, 9, 13, 17, 22]
