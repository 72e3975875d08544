"""The `hetu` command: a subcommand for each task. `heturun` (`dist/launch/heturun.py`) starts jobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .automl import processes
from .core.errors import HetuError
from .dist.replay import again, compare
from .plan import forecast
from .plan.costs import calibrate
from .ps.wire import status
from .serving import serve
from .teach import doctor, lab, top

# Each module has `add_arguments(parser)`, `main(args) -> exit code`, and one line of help.
COMMANDS = {
    "doctor": (doctor, "what is installed, what is missing, and a job as a test"),
    "lab": (lab, "labs: hand them out, check your own, grade a class"),
    "profile": (calibrate, "measure this machine, for the planner of parallel strategies"),
    "plan": (forecast, "the best plan for a model on a cluster that one need not have, and what it costs"),
    "search": (processes, "a search by several processes, or how one stands"),
    "serve": (serve, "a model in a file, over HTTP: requests that wait together share a run"),
    "top": (top, "a running job as a live page: steps, bytes and waits of each rank"),
    "replay": (again, "one rank of a recorded job again, alone and bit for bit"),
    "compare": (compare, "the first step, node and line where two recorded runs or ranks part"),
    "ps": (status, "the parameter servers of a running job"),
}


def parser() -> argparse.ArgumentParser:
    """The command line, with what is below each command."""
    made = argparse.ArgumentParser(prog="hetu", description="A deep-learning system to read and to use.")
    made.add_argument("--version", action="version", version=f"hetu {__version__}", help="print the version, and end")
    commands = made.add_subparsers(dest="command", required=True)
    for name, (module, line) in COMMANDS.items():
        about = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=line, description=about))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hetu ...`, and return 0 if all is well, 1 if a check fails, 2 for wrong words, 130 for Ctrl-C."""
    args = parser().parse_args(arguments)
    try:
        code: int = COMMANDS[args.command][0].main(args)
        return code
    except KeyboardInterrupt:
        print(f"hetu {args.command}: interrupted", file=sys.stderr)
        return 130
    except HetuError as error:
        print(f"hetu {args.command}: {error.text(where=False)}", file=sys.stderr)
        return 2
