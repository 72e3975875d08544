"""Compiles what many programs need at once: most of the time that a small library takes is the start of a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

from hetu.core.kernels import kernels


def compiles() -> bool:
    """Whether C is compiled; `test_wall.py` runs tests without the room that does."""
    room = kernels("cpu")
    return bool(room.compiled and room.compiles())


@contextmanager
def only_bound() -> Iterator[list[Any]]:
    """Inside, programs are bound to be looked at and cannot run; what they lack is not compiled but noted."""
    if not compiles():
        yield []
        return
    with import_module("hetu.cpu_kernels.ahead").noting() as lacking:
        yield lacking


def own_items(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """Those tests of a fixture's module that are to run."""
    return [i for i in request.session.items if isinstance(i, pytest.Function) and i.module is request.module]


def chosen(request: pytest.FixtureRequest, test: Callable[..., object]) -> list[dict[str, Any]]:
    """The parameters of those cases of a test of this module that are to run."""
    return [item.callspec.params for item in own_items(request) if item.function is test]


def compiled_at_once(programs: Iterable[Callable[[], object]]) -> None:
    """Bind programs, or calls that come back as a list, to no other use than to know what they lack; compile that."""
    if compiles():
        with only_bound() as lacking:
            for make in programs:
                calls = made if isinstance(made := make(), list) else []
                lacking.extend(call.source for call in calls if hasattr(call, "source"))
        kernels("cpu").compiled.build(lacking)
