"""Grade a lab: run each check on the student's file and say what passes, what fails, and a hint.

A check is a function of the student's module that returns "" when all is well, else what it saw. A student's file runs
with the rights of the person who checks it, so read the file first. There are no points.
"""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np

from ...core.errors import HetuError
from ...core.graph import OPS
from ...core.leaf import scope

Test = Callable[[ModuleType], str]
WIDTH = 100


@dataclass(frozen=True)
class Check:
    """What is wanted, in words; a hint for those who fail it; and the test itself."""

    wanted: str
    hint: str
    test: Test


@dataclass(frozen=True)
class Outcome:
    """`state` is "pass", "FAIL" or "blank" (not written yet); `seen` says what the test saw."""

    check: Check
    state: str
    seen: str = ""


@dataclass
class Lab:
    """One exercise: its number, title, file, and its checks in the order a student should meet them.

    >>> lab = Lab(9, "double", "lab9_double.py")
    >>> @lab.check("twice as much", hint="add it to itself")
    ... def test(student):
    ...     return different(student.double(2), 4)
    >>> lab.grade(ModuleType("student"))[0].state
    'FAIL'
    """

    number: int
    title: str
    file: str
    checks: list[Check] = field(default_factory=list)

    def check(self, wanted: str, *, hint: str) -> Callable[[Test], Test]:
        """Decorate a test: a function of the student's module that returns "" or what it saw instead."""

        def enter(test: Test) -> Test:
            self.checks.append(Check(wanted, hint, test))
            return test

        return enter

    def grade(self, student: ModuleType) -> list[Outcome]:
        """The outcome of every check; operators that the student defines are forgotten afterward."""
        return [_outcome(check, student) for check in self.checks]

    def grade_file(self, path: Path) -> list[Outcome]:
        """As `grade`, for a file; one that cannot be run fails every check."""
        before = dict(OPS)
        try:
            with scope(f"lab{self.number}"):
                return self.grade(load(path))
        except Exception as error:
            return [Outcome(check, "FAIL", explained(error, path)) for check in self.checks]
        finally:
            OPS.clear()
            OPS.update(before)


def _outcome(check: Check, student: ModuleType) -> Outcome:
    try:
        seen = check.test(student)
    except NotImplementedError:
        return Outcome(check, "blank")
    except Exception as error:
        return Outcome(check, "FAIL", explained(error, getattr(student, "__file__", "")))
    return Outcome(check, "FAIL" if seen else "pass", seen)


def load(path: Path) -> ModuleType:
    """Run a student's file as a module that no other code can import."""
    spec = importlib.util.spec_from_file_location(f"student_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def explained(error: Exception, file: str | Path) -> str:
    """An exception in one or two lines, with the last line of the student's file that led to it."""
    text = error.message if isinstance(error, HetuError) else str(error)
    lines = [f"{type(error).__name__}: {text}".rstrip(": ")]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    if frames:
        lines.append(f"in line {frames[-1].lineno}: {frames[-1].line}")
    return "\n".join(lines)


def different(got: object, wanted: object, what: str = "", tolerance: float = 1e-6) -> str:
    """ "" if both are equal arrays or numbers up to `tolerance`, else a line that shows them."""
    try:
        g, w = np.asarray(got, float), np.asarray(wanted, float)
    except (TypeError, ValueError):
        return "" if got == wanted else f"{what}got {got!r:.80}, wanted {wanted!r:.80}"
    if g.shape != w.shape:
        return f"{what}got shape {g.shape}, wanted {w.shape}"
    if np.allclose(g, w, rtol=tolerance, atol=tolerance):
        return ""
    return f"{what}got {np.array2string(g, precision=4)}, wanted {np.array2string(w, precision=4)}"


def report(lab: Lab, outcomes: Sequence[Outcome]) -> str:
    """The page a student sees."""
    lines = [f"lab {lab.number}: {lab.title}"]
    for outcome in outcomes:
        lines.append(f"  {outcome.state:5}  {outcome.check.wanted}")
        if outcome.state == "FAIL":
            lines += [textwrap.indent(outcome.seen, " " * 9)] if outcome.seen else []
            hint = textwrap.wrap(f"hint: {outcome.check.hint}", WIDTH - 9)
            lines += [" " * 9 + row for row in hint]
    passed = sum(o.state == "pass" for o in outcomes)
    blank = sum(o.state == "blank" for o in outcomes)
    return "\n".join([*lines, f"{passed} of {len(outcomes)} passed" + (f", {blank} not written yet" if blank else "")])
