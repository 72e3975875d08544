"""Every exception that hetu raises: what was given, what was wanted, where, and how to fix it.

Each class is also the built-in a caller would expect to catch (`ShapeError` is a `ValueError`). There are no error
codes: the text is for people, the class for programs.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, Self, TypeVar

from .source import Site, user_site

__all__ = [
    "HetuError", "ShapeError", "AxisError", "DTypeError", "ArgumentError", "NodeUseError", "UnknownNameError",
    "GraphError", "GradientError", "FeedError", "ValueRangeError", "NumericError", "DataError", "CheckpointError",
    "BudgetError", "MissingDependencyError", "did_you_mean", "public",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


class HetuError(Exception):
    """Base class. `message` says what was got and wanted, `fix` what to do, `site` where the user wrote it.

    >>> print(HetuError("got 3 rows, wanted 4", fix="pass all rows", site=None).text(where=False))
    got 3 rows, wanted 4
      fix: pass all rows
    """

    def __init__(self, message: str, *, fix: str = "", site: Site | None = None) -> None:
        super().__init__(message)
        self.message, self.fix = message, fix
        self.site = site or user_site()

    def raised_by(self, operator: str, site: Site | None) -> Self:
        """This error, found at run time, as one of the operator that the user wrote at `site`."""
        if not self.message.startswith(operator):
            self.message = f"{operator}: {self.message}"
        self.site = site
        return self

    def text(self, where: bool = True) -> str:
        lines = [self.message]
        if where and self.site is not None:
            lines += [f"  at {self.site}", self.site.excerpt()]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(line for line in lines if line)

    def __str__(self) -> str:
        return self.text()


class ShapeError(HetuError, ValueError):
    """Shapes that do not fit together."""


class AxisError(HetuError, ValueError, IndexError):
    """An axis or index that the array does not have."""


class DTypeError(HetuError, TypeError):
    """A dtype the operator does not take."""


class ArgumentError(HetuError, TypeError, ValueError):
    """A missing, unknown or unusable argument."""


class NodeUseError(HetuError, TypeError):
    """A node used where a number or an array is needed."""


class UnknownNameError(HetuError, AttributeError, KeyError):
    """A name that does not exist; the fix names the nearest that does."""


class GraphError(HetuError, ValueError):
    """A graph that breaks a rule, such as two variables of one name."""


class GradientError(HetuError, ValueError):
    """A derivative that does not exist or was asked of the wrong thing."""


class FeedError(HetuError, ValueError):
    """A missing, extra or unfitting fed value."""


class ValueRangeError(HetuError, ValueError):
    """A value outside its range, such as a class id that names no class."""


class NumericError(HetuError, ArithmeticError):
    """A NaN or infinity where none should be."""


class DataError(HetuError, ValueError):
    """Data that is empty, malformed or of the wrong size."""


class CheckpointError(HetuError, ValueError):
    """A checkpoint that cannot be read or belongs to another model."""


class BudgetError(HetuError, MemoryError):
    """A plan that does not fit into the memory it was given; the message says by how much."""


class MissingDependencyError(HetuError, ImportError):
    """An optional package that is not installed; the fix is the exact pip command."""


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A remedy for an unknown name: the nearest known one, or the list of all.

    >>> did_you_mean("strid", ["stride", "padding"])
    "did you mean 'stride'?"
    """
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known names: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}" if names else ""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Cut hetu's own frames from the traceback of a `HetuError`, so that the user's line stands last but one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HetuError as error:
            raise error.with_traceback(None) from error.__cause__

    return call
