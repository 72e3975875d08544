"""Grade a class: a folder with a folder for each student, in any layout below it. One table, as CSV and as JSON.

Submissions are graded side by side, one for each core; none can stop the others. A student who handed in a lab as
script and as notebook gets the better of the two; of more files the FILES nearest to the top are graded. Left out: late
days, and who has copied from whom.
"""

from __future__ import annotations

import csv
import json
import os
import unicodedata
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.errors import ArgumentError
from ...progress import bar
from .checks import Lab
from .student import Student, printable

FILES = 4  # of a student and lab that are graded: each may take all its time


@dataclass(frozen=True)
class Row:
    """One student and check: `points` of `most`, the state (of an outcome, or "missing"), and what was seen."""

    student: str
    lab: str
    check: str
    points: float
    most: float
    state: str
    seen: str = ""


@dataclass(frozen=True)
class Graded:
    """One submission: its rows, the seed that its inputs were drawn from, and the walls that stood around it."""

    rows: list[Row]
    seed: int | None = None
    walls: tuple[str, ...] = ()

    @property
    def points(self) -> float:
        return sum(row.points for row in self.rows)


def submissions(folder: Path, labs: Mapping[str, Lab]) -> dict[str, dict[str, list[Path]]]:
    """For each student, the files that were handed in for each lab. ArgumentError where there are none."""
    found: dict[str, dict[str, list[Path]]] = {}
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder}", fix="give it a folder for each student")
    students = sorted(p for p in folder.iterdir() if p.is_dir())
    for student in students:
        if not student.name.startswith("."):
            found[named(student, found)] = {number: list(files(student, lab.file)) for number, lab in labs.items()}
    if not any(paths for labs_of in found.values() for paths in labs_of.values()):
        names = [lab.file for lab in labs.values()]
        others = unknown(folder, set(names))
        raise ArgumentError(
            f"nobody in {folder} has handed in {', '.join(names)}{'; there is '.join(['', *others[:1]])}",
            fix="give it a folder for each student, with the lab's files in it under their own names",
        )
    return found


def named(student: Path, others: Container[str]) -> str:
    """The name of a student's folder as it can be written everywhere, and that no other has."""
    name = printable(os.fsencode(student.name).decode("utf-8", "replace")).replace("\n", " ")
    while name in others:
        name += "'"
    return name


def unknown(folder: Path, names: Container[str], most: int = 10) -> list[str]:
    """Scripts and notebooks of students that bear none of these names: perhaps a lab under another one."""
    found = (path for suffix in (".py", ".ipynb") for path in sorted(folder.glob(f"*/**/*{suffix}")))
    hidden = ("checks", "drivers", "__pycache__")
    others = (
        path.relative_to(folder)
        for path in found
        if path.with_suffix(".py").name not in names and path.parent.name not in hidden
    )
    shown = (
        printable(os.fsencode(p).decode("utf-8", "replace")) for p in others if not any(x[0] == "." for x in p.parts)
    )
    return list(islice(shown, most))


def files(student: Path, script: str) -> Iterator[Path]:
    """A student's scripts and notebooks of a name."""
    for name in (script, str(Path(script).with_suffix(".ipynb"))):
        for path in sorted(student.rglob(name)):
            parts = path.relative_to(student).parts
            is_own = path.parent.resolve() == student.resolve().joinpath(*parts[:-1])  # not behind a linked folder
            hidden = any(part.startswith(".") for part in parts)
            if path.is_file() and is_own and not hidden and path.parent.name not in ("checks", "drivers"):
                yield path


def grade(
    folder: Path, labs: Mapping[str, Lab], jobs: int | None = None, progress: bool | None = None
) -> dict[tuple[str, str], Graded]:
    """The grading of every student and lab that somebody handed in, `jobs` at a time (default: one for each core)."""
    found = submissions(folder, labs)
    asked = [number for number in labs if any(of[number] for of in found.values())]
    work = [(student, number, found[student][number]) for student in found for number in asked]
    graded: dict[tuple[str, str], Graded] = {}
    with bar("grading", len(work), progress) as shown, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:

        def one(task: tuple[str, str, list[Path]]) -> tuple[str, str, Graded]:
            student, number, paths = task
            nearest = sorted(paths, key=lambda path: len(path.parts))[:FILES]
            tried = [submission(student, labs[number], path, folder) for path in nearest]
            best = max(tried, key=lambda g: g.points, default=nothing(student, labs[number], "missing", ""))
            return student, number, best

        for student, number, best in pool.map(one, work):
            graded[student, number] = best
            shown.update(1)
    return graded


def submission(student: str, lab: Lab, path: Path, folder: Path) -> Graded:
    """One file, under all checks; whatever it brings the grader to, the others are graded.

    What it builds on may lie anywhere in the student's part of the class's `folder`.
    """
    try:
        top = folder / path.relative_to(folder).parts[0]
        others = [file.parent for name in lab.needs for file in files(top, name)]
        with Student(lab.code_of(path, others), lab.limits) as handed:
            rows = [
                Row(student, lab.number, o.check.wanted, o.points, o.check.points, o.state, o.seen)
                for o in lab.grade(handed)
            ]
            return Graded(rows, handed.seed, tuple(handed.walls))
    except ArgumentError as error:
        return nothing(student, lab, "error", printable(error.text(where=False)))
    except Exception as error:
        return nothing(student, lab, "error", f"the grader failed: {type(error).__name__}: {printable(str(error))}")


def nothing(student: str, lab: Lab, state: str, seen: str) -> Graded:
    return Graded([Row(student, lab.number, check.wanted, 0.0, check.points, state, seen) for check in lab.checks])


def write_csv(file: Path, graded: Mapping[tuple[str, str], Graded]) -> None:
    """A row for each student and check. What begins like a formula of a spreadsheet is quoted for it."""
    with _opened(file) as out:
        writer = csv.DictWriter(out, list(Row.__dataclass_fields__))
        writer.writeheader()
        for one in graded.values():
            writer.writerows({name: _cell(value) for name, value in asdict(row).items()} for row in one.rows)


def _cell(value: Any) -> Any:
    return "'" + value if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def write_json(file: Path, graded: Mapping[tuple[str, str], Graded]) -> None:
    """The rows, and for each submission its points, its seed and the walls that stood."""
    whole = {
        "rows": [asdict(row) for one in graded.values() for row in one.rows],
        "submissions": [
            {"student": student, "lab": number, "points": one.points, "seed": one.seed, "walls": one.walls}
            for (student, number), one in graded.items()
        ],
    }
    with _opened(file) as out:
        json.dump(whole, out, indent=1, ensure_ascii=False)
        out.write("\n")


def _opened(file: Path) -> Any:
    try:
        return file.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ArgumentError(f"{file}: {error.strerror}", fix="name a file in a folder that exists") from None


WALLS = {
    "limits": "nothing limits the memory of a submission",
    "files": "nothing keeps a submission from reading files: grade where the labs' folder cannot be read",
    "processes": "nothing keeps a submission from starting processes: read it before you grade it",
}
LEVELS = " ▁▂▃▄▅▆▇█"
NAME, COLUMNS = 18, 80  # of a student's name, and of the terminal that the tables are made for
BLOCKS = " ▏▎▍▌▋▊▉█"


def drawn(part: float, width: int = 20) -> str:
    """A part of 1 as a bar of text.

    >>> drawn(0.5, 4)
    '██  '
    """
    eighths = round(part * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BLOCKS[rest] if rest else "")).ljust(width)


def table(graded: Mapping[tuple[str, str], Graded], labs: Mapping[str, Lab]) -> str:
    """Two tables: what each student has, and what a class finds hard."""
    numbers = list(dict.fromkeys(number for _, number in graded))
    most = sum(labs[n].points for n in numbers)
    students = {s: [graded[s, n].points for n in numbers] for s in dict.fromkeys(s for s, _ in graded)}
    rows = [("student", ["lab " + numbers[0], *numbers[1:]], "points")]
    rows += [
        (s, [f"{p:g}" for p in got], f"{sum(got):g}")
        for s, got in [("of", [labs[n].points for n in numbers]), *students.items()]
    ]
    width = 1 + max(len(cell) for _, (_, *cells), _ in rows for cell in ["", *cells])
    parts = ["", "", *(drawn(sum(got) / most if most else 0.0) for got in students.values())]
    lines = [_line(*row, width, part) for row, part in zip(rows, parts)]
    missing = {
        wall for one in graded.values() if one.rows and one.seed is not None for wall in WALLS.keys() - set(one.walls)
    }
    lines += [f"  on this machine {WALLS[wall]}" for wall in WALLS if wall in missing]
    lines += ["", "what the class finds hard".ljust(37) + "passed"]
    for number in numbers:
        for check in labs[number].checks:
            states = [r.state for (_, n), g in graded.items() if n == number for r in g.rows if r.check == check.wanted]
            lines.append(_hard(number, check.wanted, states))
    lines += [
        "",
        spread([sum(got) for got in students.values()], most),
    ]
    return "\n".join(lines)


def spread(points: Sequence[float], most: float) -> str:
    """How the points of a class are spread, in ten columns from none to all.

    >>> spread([0, 5, 5, 10], 10)
    '4 students have 5 of 10 points on average: 0 ▄    █   ▄ 10'
    """
    columns = [0] * 10
    for p in points:
        columns[min(int(10 * p / most), 9) if most else 0] += 1
    heights = "".join(LEVELS[-(-8 * c // max(columns))] for c in columns)
    mean = sum(points) / len(points)
    return f"{len(points)} students have {mean:.3g} of {most:g} points on average: 0 {heights} {most:g}"


def _hard(number: str, wanted: str, states: Sequence[str]) -> str:
    part = states.count("pass") / len(states)
    others = [f"{states.count(s)} {s}" for s in ("FAIL", "error", "blank", "missing") if s in states]
    return f"  {number:3}{_fitted(wanted, 32)}{part:6.0%}  {', '.join(others)}".rstrip()


def _line(name: str, cells: Sequence[str], last: str, width: int, part: str) -> str:
    """One row, with a bar if there is place for it."""
    first, *rest = cells
    line = f"{_fitted(name, NAME)}{first:>6}{''.join(c.rjust(width) for c in rest)}{last:>9}"
    taken = NAME + 6 + width * len(rest) + 9 + 2 + len(part)
    return f"{line}  {part}".rstrip() if taken <= COLUMNS else line


def _fitted(text: str, width: int) -> str:
    """A text cut or filled up to so many columns of a terminal, in which letters of East Asia take two.

    >>> _fitted("pipeline", 5), _fitted("李小龙", 5), _fitted("ada", 5)
    ('pipe…', '李小…', 'ada  ')
    """
    wide = [1 + (unicodedata.east_asian_width(c) in "WF") for c in text]
    if sum(wide) > width:
        kept = next(k for k in range(len(text), -1, -1) if sum(wide[:k]) < width)
        return _fitted(text[:kept] + "…", width)
    return text + " " * (width - sum(wide))
