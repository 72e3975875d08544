"""Compiles what many programs need at once: most of the time that a small library takes is the start of a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from hetu.core.kernels import kernels


def compiled_at_once(programs: Iterable[Callable[[], object]]) -> None:
    """Bind programs, or calls that come back as a list, to no other use than to know what they lack; compile that."""
    room = kernels("cpu")
    if room.compiled and room.compiles():  # `test_wall.py` runs tests without the room
        with import_module("hetu.cpu_kernels.ahead").noting() as lacking:
            for make in programs:
                calls = made if isinstance(made := make(), list) else []
                lacking.extend(call.source for call in calls if hasattr(call, "source"))
        room.compiled.build(lacking)
