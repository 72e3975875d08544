"""Every exception that hetu raises: what was given, what was wanted, where in the user's code, and how to fix it.

Each class is also the built-in a caller would expect to catch (`ShapeError` is a `ValueError`). There are no error
codes: the text is for people, the class for programs. A `Site` is captured for every node, so it holds only a code
object and an instruction offset; the text is looked up on demand.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np

__all__ = [
    "HetuError", "ShapeError", "AxisError", "DTypeError", "ArgumentError", "NodeUseError", "UnknownNameError",
    "GraphError", "GradientError", "FeedError", "ValueRangeError", "NumericError", "DataError", "CheckpointError",
    "BudgetError", "MissingDependencyError", "Site", "did_you_mean", "public", "user_site",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
PACKAGE, NUMPY = (os.path.dirname(f) + os.sep for f in (os.path.dirname(os.path.abspath(__file__)), np.__file__))
BETWEEN = functools.__file__, contextlib.__file__, copy.__file__, threading.__file__, "<frozen runpy>"


class Site(NamedTuple):
    """One place in user code. `str(site)` is `mnist.py:22`."""

    code: CodeType
    line: int
    instruction: int

    def __str__(self) -> str:
        folder, name = os.path.split(self.code.co_filename)
        return f"{'notebook cell' if 'ipykernel_' in folder else name}:{self.line}"

    def excerpt(self) -> str:
        """The source line with carets under the expression; empty when the source is not at hand."""
        text = linecache.getline(self.code.co_filename, self.line).rstrip("\n")
        if not text.strip():
            return ""
        indent = len(text) - len(text.lstrip())
        first, last = self._columns(text)
        marks = " " * (max(first, indent) - indent) + "^" * max(1, last - max(first, indent))
        return f"    {text.strip()}\n    {marks}"

    def _columns(self, text: str) -> tuple[int, int]:
        """Start and end of the marked expression, as character offsets into `text`."""
        line, end, column, to = next(islice(self.code.co_positions(), self.instruction // 2, None), (None,) * 4)
        if column is None or line != self.line:
            return len(text) - len(text.lstrip()), len(text)
        first = len(text.encode()[:column].decode(errors="replace"))  # the interpreter counts columns in bytes
        ends_here = end == line and to is not None
        return first, len(text.encode()[:to].decode(errors="replace")) if ends_here else len(text)


def user_site() -> Site | None:
    """The innermost frame of the running call outside of this package, and of what Python and NumPy call in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename  # "<string>" for the methods that `dataclass` writes
        ours = file == "<string>" and frame.f_globals.get("__name__", "").startswith("hetu.")
        if not ours and not file.startswith((PACKAGE, NUMPY, *BETWEEN)):
            return Site(frame.f_code, frame.f_lineno, frame.f_lasti)
        frame = frame.f_back
    return None


class HetuError(Exception):
    """Base class. `message` says what was got and wanted, `fix` what to do, `site` where the user wrote it.

    >>> print(HetuError("got 3 rows, wanted 4", fix="pass all rows", site=None).text(where=False))
    got 3 rows, wanted 4
      fix: pass all rows
    """

    def __init__(self, message: str, *, fix: str = "", site: Site | None = None) -> None:
        super().__init__(message)
        self.message, self.fix = message, fix
        self.site, self.told = site or user_site(), ""  # as text, if it comes from another process
        self.operator = ""  # that raised it at run time

    def raised_by(self, operator: str, site: Site | None) -> Self:
        """This error, found at run time, as one of the operator that the user wrote at `site`, unless of another."""
        if not self.operator:
            said = "" if self.message.startswith(operator) else f"{operator}: "
            self.message, self.site, self.operator = said + self.message, site, operator
        return self

    def text(self, where: bool = True) -> str:
        fix = f"  fix: {self.fix}" if self.fix else ""
        return "\n".join(line for line in (self.message, self.place if where else "", fix) if line)

    @property
    def place(self) -> str:
        """Where the user wrote it, as text."""
        return f"  at {self.site}\n{self.site.excerpt()}".rstrip() if self.site else self.told

    def __reduce__(self) -> tuple[object, ...]:
        state = {**vars(self), "args": self.args, "site": None, "told": self.place}  # code does not travel
        base: Any = type(self)
        while issubclass(base, HetuError):  # up to a class of Python's, which makes exceptions laid out as this one
            base = base.__base__
        return base.__new__, (type(self),), state

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


ELSEWHERE: list[Callable[[str], tuple[Iterable[str], str]]] = []  # our words for one of other libraries, and a remedy


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A remedy for an unknown name: the nearest known one, or the list of all.

    >>> did_you_mean("strid", ["stride", "padding"])
    "did you mean 'stride'?"
    """
    names = sorted(map(str, known))
    meant = [word for of_it in ELSEWHERE for word in of_it(str(name))[0] if word in names]
    if near := meant or difflib.get_close_matches(str(name), names, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}?"
    return f"known names: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}" if names else ""


ANSWERS: list[Any] = []  # `hetu.answers`, which looks at arguments before a call, and explains those that did not fit


def public(function: Callable[P, R], *, watched: bool = True) -> Callable[P, R]:
    """Explain arguments that do not fit, of what is not `watched` once it failed; the user's line shows, not hetu's."""
    watch: Callable[[Any, Any], Any] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal watch
        try:
            if watch is None and watched and ANSWERS:
                watch = ANSWERS[0].watch(function)
            if watch is not None:
                args, kwargs = watch(args, kwargs)
            return function(*args, **kwargs)
        except HetuError as error:
            raise error.with_traceback(None) from error.__cause__
        except Exception as error:
            if ANSWERS and (answer := ANSWERS[0].explain(function, args, kwargs, error)) is not None:
                raise answer from answer.__cause__
            raise

    return call


of_steps = functools.partial(public, watched=False)  # each of which would be slower by its half
