"""`%lab check 4` in a notebook: the cells that have run are the submission, under the checks of `hetu lab check`.

A cell that was run again counts once, as it is now and where it was first. Cells run before `%load_ext hetu` do not
count. Files that a lab builds on are taken from where
the notebook runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..lab import chosen, labs_folder
from ..labs import Student
from ..labs.checks import labs_in
from ..labs.report import report
from ..labs.submission import text_of_cells


class Cells:
    """The cells of a shell that have run, by their identity."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.ran: dict[str, tuple[int, str]] = {}
        shell.events.register("pre_run_cell", self.note)

    def note(self, info: Any) -> None:
        if info.raw_cell and info.store_history:
            count = len(self.shell.user_ns["In"])  # inputs are counted from 1, and this one is not there yet
            self.ran[info.cell_id or f"typed {count}"] = count, info.raw_cell

    def check(self, number: str) -> str:
        """The page of one lab's checks. ArgumentError where there is no such lab."""
        folder = labs_folder(None)
        lab = chosen(labs_in(folder), number)
        text = text_of_cells(self.ran.values())
        with Student(lab.code({lab.file: text} | lab.needed([Path()])), lab.limits) as student:
            return report(lab, lab.grade(student))
