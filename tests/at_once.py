"""Compiles what many programs need at once: most of the time that a small library takes is the start of a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import pytest

from hetu.core.kernels import kernels


class Noted(Exception):
    """What a program lacks is known; it is bound no further."""


def compiled_at_once(programs: Iterable[Callable[[], object]]) -> None:
    """Bind programs until it is known what they lack, and compile that."""
    compiled = kernels("cpu").compiled
    if not compiled:  # `test_wall.py` runs tests without the room
        return
    lacking: list[Any] = []

    def noted(wanted: Iterable[Any]) -> bool:
        lacking.extend(wanted)
        raise Noted

    c_calls = import_module("hetu.cpu_kernels.c_calls")
    if c_calls.compiles():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(c_calls, "build", noted)
            for make in programs:
                with pytest.raises(Noted):
                    make()
        compiled.build(lacking)
