"""A lab: what a student has to write, and the checks that say whether it is right.

A check is a function of the submission (`Student`) that returns "" when all is well, else what it saw. It runs in the
grader: the student's code is elsewhere, and only plain data comes from there. What stands between nbgrader's marks
`### BEGIN HIDDEN TESTS` and `### END HIDDEN TESTS` is not handed out: inputs drawn from `student.rng`, and what is
right for them.
"""

from __future__ import annotations

import importlib.util
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...core.errors import ArgumentError
from .process import Allowance
from .student import Blank, NoAnswer, Student, printable
from .submission import Code, text_of, written

Test = Callable[[Student], str]
SHOWN = 160  # letters of a value
MANY = 24  # numbers of an array; of a larger one the first that differs is told
SHORT = reprlib.Repr()
SHORT.maxdict = SHORT.maxlist = SHORT.maxtuple = 12
SHORT.maxother = SHORT.maxstring = SHOWN


@dataclass(frozen=True)
class Check:
    """What is wanted, in words; a hint for those who fail it; its points; and the test itself."""

    wanted: str
    hint: str
    points: float
    test: Test


@dataclass(frozen=True)
class Outcome:
    """`state` is "pass", "FAIL" (a wrong answer), "error" (there is none) or "blank"; `seen` says what was seen."""

    check: Check
    state: str
    seen: str = ""

    @property
    def points(self) -> float:
        return self.check.points if self.state == "pass" else 0.0


@dataclass
class Lab:
    """One exercise: its number, title and file, how its code is run, and its checks in the order to meet them.

    `needs` are other files of the student's that it builds on, `with_hetu` says that the code may import hetu.

    >>> lab = Lab("9", "double", "lab9_double.py")
    >>> @lab.check("twice as much", hint="add it to itself")
    ... def twice(student):
    ...     return different(student.double(2), 4)
    >>> lab.points
    1.0
    """

    number: str
    title: str
    file: str
    needs: tuple[str, ...] = ()
    with_hetu: bool = False
    limits: Allowance = field(default_factory=Allowance)
    checks: list[Check] = field(default_factory=list)
    driver: str = ""  # text of the functions that run beside the student's code

    def check(self, wanted: str, *, hint: str, points: float = 1.0) -> Callable[[Test], Test]:
        """Decorate a test: a function of the submission that returns "" or what it saw instead."""

        def enter(test: Test) -> Test:
            self.checks.append(Check(wanted, hint, points, test))
            return test

        return enter

    @property
    def points(self) -> float:
        return sum(check.points for check in self.checks)

    def code_of(self, file: Path, others: Sequence[Path] = ()) -> Code:
        """A submission whose script or notebook is `file`, with those that it builds on: beside it, or in `others`."""
        return self.code({self.file: text_of(file)} | self.needed([file.parent, *others]))

    def needed(self, folders: Sequence[Path]) -> dict[str, str]:
        """The texts of what it builds on, each from the first of the folders that has it."""
        found = {name: next(filter(None, (written(f / name) for f in folders)), None) for name in self.needs}
        return {name: text_of(path) for name, path in found.items() if path is not None}

    def code(self, files: Mapping[str, str]) -> Code:
        """A submission whose files are at hand as texts."""
        return Code(files, self.file, self.driver, self.with_hetu)

    def grade(self, student: Student) -> list[Outcome]:
        """The outcome of every check."""
        return [outcome(check, student) for check in self.checks]


def outcome(check: Check, student: Student) -> Outcome:
    """Run one check; only what the submission does is its fault."""
    try:
        seen = check.test(student)
    except Blank:
        return Outcome(check, "blank")
    except NoAnswer as error:
        return Outcome(check, "error", str(error))
    except Exception as error:  # whatever came back, the others are graded
        return Outcome(check, "FAIL", f"what came back is of another form than was asked for ({type(error).__name__})")
    return Outcome(check, "FAIL" if seen else "pass", seen)


def labs_in(folder: Path) -> dict[str, Lab]:
    """The labs of a folder by number: their checks stand in `checks/`, what runs beside the code in `drivers/`.

    ArgumentError where there is none.
    """
    labs = [read(file) for file in sorted((folder / "checks").glob("*.py"))]
    if not labs:
        raise ArgumentError(f"there are no labs in {folder}", fix="name a folder that has a folder `checks`")
    return {lab.number: lab for lab in sorted(labs, key=lambda lab: [len(lab.number), lab.number])}


def read(file: Path) -> Lab:
    """The `lab` of a file of checks."""
    name = f"hetu_checks_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{file} is no Python file", fix="keep only files of checks in the folder `checks`")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lab = of(module, file)
    driver = file.parent.parent / "drivers" / file.name
    lab.driver = driver.read_text("utf-8") if driver.is_file() else ""
    return lab


def of(module: ModuleType, file: Path) -> Lab:
    lab = getattr(module, "lab", None)
    if not isinstance(lab, Lab):
        raise ArgumentError(f"{file} has no lab", fix="write `lab = Lab(number, title, file)` in it")
    return lab


def different(got: Any, wanted: Any, what: str = "", tolerance: float = 1e-6) -> str:
    """ "" if both are equal, numbers up to `tolerance`; else a line that shows them. `got` may be anything.

    >>> different([1.0, 2.0], np.array([1, 2]))
    ''
    >>> different(np.eye(6), np.zeros((6, 6)))
    '6 of 36 numbers differ; at [0, 0]: got 1., wanted 0.'
    >>> different({"a": 1}, {"a": 2})
    "got {'a': 1}, wanted {'a': 2}"
    """
    if isinstance(wanted, dict) or isinstance(got, (dict, str)) or isinstance(wanted, (str, bool, type(None))):
        return "" if alike(got, wanted, tolerance) else f"{what}got {shown(got)}, wanted {shown(wanted)}"
    try:
        g, w = np.asarray(got, float), np.asarray(wanted, float)
    except (TypeError, ValueError, OverflowError):
        return "" if alike(got, wanted, tolerance) else f"{what}got {shown(got)}, wanted {shown(wanted)}"
    if g.shape != w.shape:
        return f"{what}got shape {g.shape}, wanted {w.shape}"
    with np.errstate(all="ignore"):
        if np.allclose(g, w, rtol=tolerance, atol=tolerance):
            return ""
        if g.size > MANY:
            apart = ~np.isclose(g, w, rtol=tolerance, atol=tolerance)
            place = tuple(int(k) for k in np.argwhere(apart)[0])
            what += f"{apart.sum()} of {g.size} numbers differ; at {list(place)}: "
            g, w = g[place], w[place]
    return f"{what}got {np.array2string(g, precision=4)}, wanted {np.array2string(w, precision=4)}"


def alike(got: Any, wanted: Any, tolerance: float) -> bool:
    """Whether two values of plain data are equal, part by part."""
    if isinstance(wanted, dict):
        return (
            isinstance(got, dict)
            and set(got) == set(wanted)
            and all(alike(got[k], wanted[k], tolerance) for k in wanted)
        )
    if isinstance(wanted, (list, tuple)):
        same = isinstance(got, (list, tuple)) and len(got) == len(wanted)
        return same and all(alike(g, w, tolerance) for g, w in zip(got, wanted))
    if isinstance(wanted, (str, bool, type(None))):
        return type(got) is type(wanted) and bool(got == wanted)
    if isinstance(got, (str, dict, type(None))):
        return False
    try:
        return not different(got, wanted, tolerance=tolerance)
    except RecursionError:
        return False


def shown(value: Any) -> str:
    """A value in one line, however large it is."""
    return printable(SHORT.repr(value), SHOWN)


def first(seen: Iterable[str]) -> str:
    """The first text that is not empty, or "": of many comparisons, the one to look at."""
    return next(filter(None, seen), "")
