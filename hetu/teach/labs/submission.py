"""What a student hands in: a script or a notebook, and the files of theirs that it builds on.

A notebook's code cells, one after the other, are the file; lines of magics are left out. Nothing is run here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ArgumentError

MOST = 2 << 20  # bytes of a file that is handed in
BLANK = "raise NotImplementedError"
CELL = "# cell {} of the notebook"
CELL_AGAIN = re.compile(r"# cell (\d+) of the notebook$")


@dataclass(frozen=True)
class Code:
    """Files of a submission by name, which of them is the lab's, the driver's text, and whether it may import hetu."""

    files: Mapping[str, str]
    main: str
    driver: str = ""
    with_hetu: bool = False

    def place(self, file: str, number: int) -> str:
        """What a student calls a line: that of the file, or of a cell."""
        lines = self.files.get(file, "").splitlines()[:number]
        for back, line in enumerate(reversed(lines)):
            if found := CELL_AGAIN.match(line):
                return f"cell {found[1]}, line {back}"
        return f"line {number}" if file == self.main else f"{file}, line {number}"


def text_of(file: Path) -> str:
    """A script, or the code of a notebook. ArgumentError for a link, whose file the student may not have written."""
    if file.is_symlink():
        raise ArgumentError(f"{file} is a link", fix="hand in the file itself")
    try:
        if file.stat().st_size > MOST:
            raise ArgumentError(f"{file} has {file.stat().st_size:,} bytes", fix=f"hand in at most {MOST:,}")
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file} cannot be read: {error}", fix="hand in a text file in UTF-8") from None
    if file.suffix != ".ipynb":
        return text
    code = text_of_cells(enumerate(cells_of(file, text), 1))
    return code.encode("utf-8", "replace").decode("utf-8")  # JSON can spell halves of letters, which no file can hold


def written(script: Path) -> Path | None:
    """The script, or the notebook of its name, if that has fewer blanks: students are handed both, and fill one."""
    forms = [path for path in (script, script.with_suffix(".ipynb")) if path.is_file()]
    return min(forms, key=lambda path: text_of(path).count(BLANK)) if len(forms) > 1 else next(iter(forms), None)


def cells_of(file: Path, text: str) -> list[str]:
    """The code cells of a notebook's file."""
    try:
        cells = json.loads(text)["cells"]
        found = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ArgumentError(f"{file} is no notebook", fix="save it again from Jupyter, in format 4") from None
    return found


def text_of_cells(cells: Iterable[tuple[int, str]]) -> str:
    """One script of code cells and their numbers, in which `place` finds a line's cell again."""
    parts = []
    for number, cell in cells:
        lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in cell.splitlines()]
        parts.append("\n".join([CELL.format(number), *lines]))
    return "\n".join(parts) + "\n"
