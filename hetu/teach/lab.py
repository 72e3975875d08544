"""`hetu lab`: list the labs, hand them out, check one's own, and grade those of a class.

Labs stand in a folder: their files, and `checks/` and `drivers/` beside them. What `release` writes is such a folder,
without solutions and hidden cases, so that students and teachers use the same checks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core.errors import ArgumentError
from ..look.columns import in_columns
from .labs import Lab, Student
from .labs.checks import labs_in
from .labs.report import report

CHECKOUT = Path(__file__).parent.parent.parent / "tutorials" / "labs"
RELEASED = "hetu-labs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`list` and `check` below the command `hetu lab`."""
    parser.add_argument("--labs", type=Path, help="folder of the labs (default: here, hetu-labs, or the checkout's)")
    commands = parser.add_subparsers(dest="action")
    commands.add_parser("list", help="show the labs")
    check = commands.add_parser("check", help="check a lab: what passes, what does not, and a hint")
    check.add_argument("number", help="of the lab, or all")
    check.add_argument("file", nargs="?", type=Path, help="by default the lab's script or notebook in the folder")


def main(args: argparse.Namespace) -> int:
    """Run a parsed command; 0, or 1 when a check does not pass."""
    folder = labs_folder(args.labs)
    labs = labs_in(folder)
    if args.action == "check":
        return check(labs, folder, args.number, args.file)
    print(*in_columns([(lab.number, lab.title, lab.file) for lab in labs.values()]), sep="\n")
    return 0


def labs_folder(asked: Path | None, here: Path = Path()) -> Path:
    """Where the labs stand. ArgumentError where there are none."""
    candidates = [asked] if asked is not None else [here, here / RELEASED, CHECKOUT]
    for candidate in candidates:
        if (candidate / "checks").is_dir():
            return candidate
    raise ArgumentError(
        f"there are no labs in {' or '.join(str(c) for c in candidates)}",
        fix="go to the folder that your teacher gave you, or name it: `hetu lab --labs FOLDER ...`",
    )


def check(labs: dict[str, Lab], folder: Path, number: str, file: Path | None) -> int:
    """Print what the checks of one lab, or of all, say about one's own files."""
    if number != "all" and number not in labs:
        raise ArgumentError(f"there is no lab {number}", fix=f"choose one of {', '.join(labs)}, or all")
    asked = list(labs.values()) if number == "all" else [labs[number]]
    pages, passed = [], True
    for lab in asked:
        with Student(lab.code_of(find(lab, folder, file)), lab.limits) as student:
            outcomes = lab.grade(student)
        pages.append(report(lab, outcomes))
        passed &= all(o.state == "pass" for o in outcomes)
    print("\n\n".join(pages))
    return int(not passed)


def find(lab: Lab, folder: Path, file: Path | None) -> Path:
    """The student's file. ArgumentError where there is none."""
    script = folder / lab.file
    candidates = [file] if file is not None else [script, script.with_suffix(".ipynb")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ArgumentError(f"there is no {' or '.join(str(c) for c in candidates)}", fix="name the file that you wrote")
