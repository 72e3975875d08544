"""The `hetu` command: one word for each thing to do.

Ignored on purpose: starting jobs, which is the business of `heturun` (`dist/launch.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import lab
from .errors import HetuError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hetu ...` and return its exit code: 0 if all is well, 1 if a check fails, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="hetu", description="A deep learning system small enough to read.")
    commands = parser.add_subparsers(dest="command", required=True)
    lab.add_arguments(commands.add_parser("lab", help="exercises with blanks, and their grader"))
    args = parser.parse_args(arguments)
    try:
        return lab.main(args)
    except HetuError as error:
        print(f"hetu {args.command}: {error.text(where=False)}", file=sys.stderr)
        return 2
