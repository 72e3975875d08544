"""A site finds the user's line and marks the expression, whatever the text looks like."""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import multiprocessing
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, HetuError, ShapeError, Site, user_site


def site_in(text: str, filename: str = "/home/student/model.py", **names) -> Site:
    """The site that `here()` sees when `text` runs as a file of that name."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    found: list[Site] = []

    def here(*args, **kwargs):
        found.append(caller_of_here())
        return 0

    def caller_of_here() -> Site:
        import sys

        frame = sys._getframe(2)
        return Site(frame.f_code, frame.f_lineno, frame.f_lasti)

    exec(compile(text, filename, "exec"), {"here": here, **names})
    return found[-1]


def marked(site: Site) -> str:
    """The part of the source line above the carets."""
    line, marks = site.excerpt().splitlines()
    assert set(marks.strip()) == {"^"}
    start = marks.index("^")
    return line[start : start + marks.count("^")]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("here()\n", "here()"),
        ("y = 1 + here(2, 3) + 4\n", "here(2, 3)"),
        ("if True:\n    y = here(1) * 2\n", "here(1)"),
        ("y = [here(i) for i in range(2)]\n", "here(i)"),
        ("name = 'Gewicht größer 重み' * here() + 'ü'\n", "here()"),
        ("größe = here('重み', x=1); z = 3\n", "here('重み', x=1)"),
    ],
)
def test_the_excerpt_marks_the_expression(text, wanted):
    assert marked(site_in(text)) == wanted


def test_a_call_over_several_lines_is_marked_to_the_end_of_its_first():
    site = site_in("y = 1 + here(\n    1,\n    2,\n)\n")
    assert site.line == 1
    assert marked(site) == "here("


def test_a_call_that_begins_below_is_found_on_its_own_line():
    site = site_in("y = (\n    1\n    + here(5)\n)\n")
    assert site.line == 3
    assert marked(site) == "here(5)"


def test_a_site_prints_as_file_and_line():
    assert str(site_in("\nhere()\n")) == "model.py:2"


@pytest.mark.parametrize(
    "filename, shown",
    [
        ("<ipython-input-3-0a1b2c>", "<ipython-input-3-0a1b2c>:1"),
        ("/tmp/ipykernel_412/3094578.py", "notebook cell:1"),
        ("<stdin>", "<stdin>:1"),
    ],
)
def test_notebook_cells_and_the_prompt_have_sites(filename, shown):
    site = site_in("w = here()\n", filename)
    assert str(site) == shown
    assert marked(site) == "here()"


def test_without_the_source_there_is_no_excerpt():
    site = site_in("here()\n", "<gone>")
    del linecache.cache["<gone>"]
    assert site.excerpt() == ""


def test_the_site_of_a_node_is_the_line_that_made_it():
    x = ht.placeholder("x", (2,))
    y = x + 1
    assert str(y.site).startswith("test_errors.py:")
    assert y.site.line == x.site.line + 1
    assert marked(y.site) == "x + 1"


@pytest.mark.parametrize(("path", "users"), [("numpy/mean.py", False), ("numpyro/model.py", True)])
def test_a_package_beside_numpy_is_the_users(path, users):
    file = str(Path(np.__file__).parents[1] / path)
    spoken = {"user_site": user_site}
    exec(compile("def asked():\n    return user_site()", file, "exec"), spoken)
    assert (spoken["asked"]().code.co_filename == file) == users


def test_user_site_is_outside_the_package():
    assert user_site().code.co_name == "test_user_site_is_outside_the_package"


@pytest.mark.parametrize("between", [functools.singledispatch, contextlib.contextmanager, functools.partial])
def test_the_site_of_an_error_is_not_in_what_python_calls_in_between(between):
    with pytest.raises(ArgumentError, match=r"at test_errors\.py"):
        between(ht.evaluate)(None)


def test_an_error_shows_the_line_and_the_remedy():
    a, b = ht.placeholder("a", (2, 3)), ht.placeholder("b", (4,))
    with pytest.raises(ShapeError) as caught:
        a + b
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("add(f32[2, 3], f32[4]): ")
    assert lines[1].startswith("  at test_errors.py:")
    assert lines[2].strip() == "a + b"
    assert lines[3].strip() == "^^^^^"
    assert lines[4].startswith("  fix: ")


def test_the_traceback_of_an_error_holds_no_inner_frames():
    a = ht.placeholder("a", (2, 3))
    with pytest.raises(ShapeError) as caught:
        ht.matmul(a, a)
    files = [str(entry.path) for entry in caught.traceback]
    assert len(files) <= 3


def kinds_of_errors() -> list[type[HetuError]]:
    """Every class of error in the package."""
    for module in pkgutil.walk_packages(ht.__path__, "hetu."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError, HetuError):  # what needs a GPU or MPI
                importlib.import_module(module.name)
    found = [HetuError]
    for kind in found:
        found += [below for below in kind.__subclasses__() if below not in found]
    return [kind for kind in found if kind.__module__.startswith("hetu.")]


class Strangers(ht.core.errors.ShapeError):
    """An error that a user derives from one of ours."""


class StrangersTimeout(ht.dist.DeadlineError, TimeoutError):
    """One with a class of Python's too, whose objects are laid out in a way of their own."""


def raise_in_worker(kind: type[HetuError]) -> None:
    laid_out = kind
    while laid_out.__module__ != "builtins":
        laid_out = laid_out.__base__
    error = laid_out.__new__(kind)  # some take other arguments
    HetuError.__init__(error, f"got 3, as a {kind.__name__}", fix="pass 4")
    error.add_note(str(error))
    raise error


def run_in_worker(shape: tuple[int, ...]) -> None:
    try:
        ht.placeholder("a", shape) + ht.placeholder("b", (4,))
    except HetuError as error:
        error.add_note(str(error))
        raise


def asked_of_pool(function, given) -> list[HetuError]:
    def caught(wait) -> HetuError:
        with pytest.raises(HetuError) as found:
            wait(60.0)
        return found.value

    with multiprocessing.Pool(1) as pool:
        return [caught(pool.apply_async(function, (each,)).get) for each in given]


def asked_of_executor(function, given) -> list[HetuError]:
    with ProcessPoolExecutor(1) as pool:
        return [pool.submit(function, each).exception(60.0) for each in given]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("asked", [asked_of_pool, asked_of_executor])
def test_errors_come_from_other_processes_as_they_were(asked):
    kinds = [*kinds_of_errors(), Strangers, StrangersTimeout]
    assert len(kinds) >= 28
    for kind, error in zip(kinds, asked(raise_in_worker, kinds), strict=True):
        assert type(error) is kind
        assert (error.message, error.fix) == (f"got 3, as a {kind.__name__}", "pass 4")
        said = str(error)
        assert "  at test_errors.py:" in said
        assert "HetuError.__init__(error" in said
        assert error.__notes__ == [said]
    (error,) = asked(run_in_worker, [(2, 3)])
    assert type(error) is ShapeError
    assert error.__notes__ == [str(error)]
