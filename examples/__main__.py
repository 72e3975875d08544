"""Every model that these examples train, with its data, its strategy, and what it reached: `python -m examples`.

`--run` trains those whose command has all of some words (`--run graph gat`, or `--run` alone for all) and keeps what
they reach in `results.json`, from which the tables of `README.md` are made. Ignored on purpose: several seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE / "README.md"
HEAD = ("command", "model", "data", "strategy", "reached", "seconds")
FAMILIES = {
    "cnn": "Images",
    "rnn": "Series",
    "nlp": "Text",
    "ctr": "Clicks and choices",
    "graph": "Graphs",
    "knowledge": "Knowledge",
    "experts": "Mixtures of experts",
    "ml": "Classic machine learning",
}  # the titles of folders
SHARES = {"--replicas": "1.5D", "--cut": "ps", "ml/": "sums"}  # by which a script itself shares the work
LAST = re.compile(r"(?:\[rank 0\] )?(?P<model>\w+) on (?P<data>[\w ]+): (?P<reached>.+)")


class Result(NamedTuple):
    """What a command reached: its last line, and the seconds of processor time of all its processes."""

    line: str
    seconds: float

    def row(self, command: str) -> tuple[str, ...]:
        model, data, reached = LAST.fullmatch(self.line).groups()
        return command, model, data, strategy(command), reached, f"{self.seconds:,.0f}"


def strategy(command: str) -> str:
    """How the processes of a command share the work."""
    ranks, servers = (re.search(rf"-{letter} (\d+)", command) for letter in "ws")
    if ranks is None:
        return "one process"
    named = re.search(r"--strategy (\S+)", command)
    shares = next((kind for option, kind in SHARES.items() if option in command), "hybrid" if servers else "dp")
    kind = named[1] if named else shares
    said = [kind, *(f"{n[1]} {what}{'s' * (n[1] != '1')}" for n, what in ((ranks, "rank"), (servers, "server")) if n)]
    return ", ".join(said)


def run(command: str) -> Result:
    """Train, and show how it goes on."""
    before = spent()
    threads = {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        shlex.split(command), cwd=HERE.parent, env=os.environ | threads, stdout=subprocess.PIPE, text=True, check=True
    )
    return Result(done.stdout.splitlines()[-1], spent() - before)


def spent() -> float:
    """Seconds of processor time of processes that have ended; 0 on Windows, which does not tell them."""
    used = os.times()
    return used.children_user + used.children_system


def tables(results: dict[str, Result]) -> str:
    """The tables of README.md, one a folder."""
    families = dict[str, list[tuple[str, ...]]]()
    for command, result in results.items():
        folder = re.search(r"examples/(\w+)/", command)[1]
        families.setdefault(folder, []).append((f"`{command}`", *result.row(command)[1:]))
    made = []
    for folder, rows in families.items():
        lines = [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]
        made.append("\n".join([f"## {FAMILIES[folder]}: `{folder}/`", "", *lines]))
    return "\n\n".join(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(": `")[0], prog="python -m examples")
    help = "train all whose command has these words, and keep what they reach"
    parser.add_argument("--run", nargs="*", metavar="WORD", help=help)
    words = parser.parse_args().run
    results = {command: Result(*kept) for command, kept in json.loads(RESULTS.read_text()).items()}
    if words is not None:
        chosen = [command for command in results if all(word in command for word in words)]
        for command in tqdm(chosen, leave=False):
            results[command] = run(command)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            tqdm.write(f"{command}\n    {results[command].line}")
        made = re.sub(r"^## .*?(?=\n\nReached )", lambda _: tables(results), PAGE.read_text("utf-8"), flags=re.S | re.M)
        PAGE.write_text(made, "utf-8")
        return
    rows = [HEAD, *(result.row(command) for command, result in results.items())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    main()
