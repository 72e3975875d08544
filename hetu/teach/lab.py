"""`hetu lab`: list the labs, hand them out, check one's own, and grade those of a class.

Labs stand in a folder: their files, and `checks/` and `drivers/` beside them. What `release` writes is such a folder,
without solutions and hidden cases, so that students and teachers use the same checks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError
from ..look.columns import in_columns
from ..script import positive
from .labs import Lab, Student, classroom
from .labs.checks import labs_in
from .labs.figures import figures
from .labs.release import has_solutions, release
from .labs.report import report
from .labs.submission import written

CHECKOUT = Path(__file__).parent.parent.parent / "tutorials"
TRACK = "track"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`list`, `release`, `check` and `grade` below the commands `hetu lab` and `hetu lab track`."""
    parser.add_argument("--labs", type=Path, help="folder of the labs (default: here, hetu-labs, or the checkout's)")
    parser.set_defaults(course="labs")
    commands = parser.add_subparsers(dest="action")
    add_actions(commands, "labs")
    track = action(commands, TRACK, "the same of the cumulative track, whose labs build on one's own files")
    track.set_defaults(course=TRACK)
    within = track.add_subparsers(dest="action")
    add_actions(within, TRACK)
    shown = action(within, "figures", "train LeNet on four ranks with one's own files, beside hetu")
    shown.add_argument("--epochs", type=positive, default=3, metavar="N", help="(default: %(default)s)")


def action(commands: Any, name: str, about: str) -> Any:
    """A command, of which the list above it and its own help say what it is about."""
    return commands.add_parser(name, help=about, description=about)


def add_actions(commands: Any, course: str) -> None:
    """What can be done with the labs of either course."""
    action(commands, "list", "show the labs")
    handed = action(commands, "release", "write the students' files, without solutions and hidden cases")
    handed.add_argument("folder", nargs="?", type=Path, default=Path(f"hetu-{course}"), help="(default: %(default)s)")
    graded = action(commands, "grade", "grade a class: a folder with a folder for each student")
    graded.add_argument("folder", type=Path, help="of what was handed in")
    graded.add_argument("--lab", action="append", metavar="N", help="grade this one (default: all that were handed in)")
    graded.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each student and check")
    graded.add_argument("--json", type=Path, metavar="FILE", help="write the same, and the seeds")
    graded.add_argument("--jobs", type=positive, metavar="N", help="submissions at a time (default: one for each core)")
    check = action(commands, "check", "check a lab: what passes, what does not, and a hint")
    check.add_argument("number", help="of the lab, or all")
    check.add_argument("file", nargs="?", type=Path, help="or the folder that it is in (default: the one of the labs)")


def main(args: argparse.Namespace) -> int:
    """Run a parsed command; 0, or 1 when a check does not pass."""
    folder = labs_folder(args.labs, args.course, whole=args.action in ("grade", "release"))
    labs = labs_in(folder)
    if args.action == "figures":
        print(figures(folder, args.epochs))
        return 0
    if args.action == "check":
        return check(labs, folder, args.number, args.file)
    if args.action == "release":
        names = release(labs, folder, args.folder)
        print(f"wrote {len(names)} files to {args.folder}: students begin with its README.md")
        return 0
    if args.action == "grade":
        return grade({n: chosen(labs, n) for n in args.lab} if args.lab else labs, folder, args)
    print(*in_columns([(lab.number, lab.title, lab.file) for lab in labs.values()]), sep="\n")
    return 0


def labs_folder(asked: Path | None, course: str = "labs", here: Path = Path(), whole: bool = False) -> Path:
    """Where the labs of a course stand; the track has a `train.py`. ArgumentError where there are none.

    `whole` leaves out what students were handed, whose checks have lost their hidden cases, unless it is asked for.
    """
    candidates = [asked] if asked is not None else [here, here / f"hetu-{course}", CHECKOUT / course]
    for candidate in candidates:
        there = (candidate / "checks").is_dir() and (course != TRACK or (candidate / "train.py").is_file())
        if there and (asked is not None or not whole or has_solutions(candidate)):
            return candidate
    kind = "labs" + " of the track" * (course == TRACK) + " with solutions and hidden cases" * whole
    raise ArgumentError(
        f"there are no {kind} in {' or '.join(str(c) for c in candidates)}",
        fix=f"go to {'a checkout of hetu' if whole else 'the folder that your teacher gave you'}, or name it: "
        "`hetu lab --labs FOLDER ...`",
    )


def chosen(labs: dict[str, Lab], number: str) -> Lab:
    """A lab by its number. ArgumentError if there is none."""
    if number not in labs:
        raise ArgumentError(f"there is no lab {number}", fix=f"choose one of {', '.join(labs)}")
    return labs[number]


def grade(labs: dict[str, Lab], folder: Path, args: argparse.Namespace) -> int:
    """Grade a class, write what was asked for, and print the tables."""
    for file in (args.csv, args.json):
        if file is not None and not file.parent.is_dir():
            raise ArgumentError(f"there is no folder {file.parent}", fix="name a file in a folder that exists")
    graded = classroom.grade(args.folder, labs, args.jobs)
    for file, write in ((args.csv, classroom.write_csv), (args.json, classroom.write_json)):
        if file is not None:
            write(file, graded)
    print(classroom.table(graded, labs))
    for name in classroom.unknown(args.folder, {file.name for file in folder.glob("*.py")}):
        print(f"not graded, since no lab has this name: {name}")
    if not has_solutions(folder):
        print(f"graded without hidden cases, which {folder} does not have: students know each of these examples")
    return 0


def check(labs: dict[str, Lab], folder: Path, number: str, file: Path | None) -> int:
    """Print what the checks of one lab, or of all, say about one's own files."""
    asked = list(labs.values()) if number == "all" else [chosen(labs, number)]
    pages, passed = [], True
    for lab in asked:
        with Student(lab.code_of(find(lab, folder, file)), lab.limits) as student:
            outcomes = lab.grade(student)
        pages.append(report(lab, outcomes) + (f"\n\nwhat the code printed:\n{student.notes}" if student.notes else ""))
        passed &= all(o.state == "pass" for o in outcomes)
    print("\n\n".join(pages))
    return int(not passed)


def find(lab: Lab, folder: Path, file: Path | None) -> Path:
    """The student's file. ArgumentError where there is none."""
    given = file is not None and not file.is_dir()
    script = (file or folder) / lab.file
    found = file if given else written(script)
    if found is None or not found.is_file():
        named = f"{script} or {script.with_suffix('.ipynb')}" if found is None else found
        raise ArgumentError(f"there is no {named}", fix="name the file that you wrote")
    return found
