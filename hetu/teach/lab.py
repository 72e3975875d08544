"""`hetu lab`: list the labs, pack them for students, and grade a file.

The grader runs where the student works, as often as they like.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from ..core.errors import ArgumentError
from ..look.columns import in_columns
from .labs import LABS
from .labs.grading import Lab, report

EXERCISES = Path(__file__).parent / "labs" / "exercises"
LONG_AGO = (2020, 1, 1, 0, 0, 0)  # a fixed date, so that equal labs make equal archives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`list`, `export` and `check` below the command `hetu lab`."""
    commands = parser.add_subparsers(dest="action")
    commands.add_parser("list", help="show the labs")
    export = commands.add_parser("export", help="write a zip archive of the exercises, without solutions")
    export.add_argument("archive", nargs="?", type=Path, default=Path("hetu-labs.zip"), help="(default: %(default)s)")
    check = commands.add_parser("check", help="grade a lab: what passes, what fails, and a hint")
    check.add_argument("number", type=int, choices=LABS, help="of the lab")
    check.add_argument("file", nargs="?", type=Path, help="by default the lab's file here or in hetu-labs/")


def main(args: argparse.Namespace) -> int:
    """Run a parsed command; 0, or 1 when a check does not pass."""
    if args.action == "export":
        export(args.archive)
        print(f"wrote {args.archive}: unpack it, and begin with its README.md")
        return 0
    if args.action == "check":
        lab = LABS[args.number]
        outcomes = lab.grade_file(find(lab, args.file))
        print(report(lab, outcomes))
        return int(any(o.state != "pass" for o in outcomes))
    print(*in_columns([(f"{lab.number}", lab.title, lab.file) for lab in LABS.values()]), sep="\n")
    return 0


def find(lab: Lab, file: Path | None, here: Path = Path()) -> Path:
    """The student's file. ArgumentError where there is none."""
    candidates = [file] if file is not None else [here / lab.file, here / "hetu-labs" / lab.file]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ArgumentError(
        f"there is no {' or '.join(str(c) for c in candidates)}",
        fix="get the exercises with `hetu lab export`, unpack them, and check from their folder",
    )


def export(archive: Path) -> None:
    """Write the exercises and a README to a zip archive with one folder in it. ArgumentError if that fails."""
    rows = [f"| {lab.number} | {lab.title} | `{lab.file}` |" for lab in LABS.values()]
    readme = (EXERCISES / "README.md").read_text("utf-8").replace("{labs}", "\n".join(rows))
    texts = {"README.md": readme} | {lab.file: (EXERCISES / lab.file).read_text("utf-8") for lab in LABS.values()}
    try:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, text in texts.items():
                packed.writestr(zipfile.ZipInfo(f"hetu-labs/{name}", LONG_AGO), text)
    except OSError as error:
        raise ArgumentError(f"{archive}: {error.strerror}", fix="name a file in a folder that exists") from None
