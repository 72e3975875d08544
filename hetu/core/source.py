"""Where in the user's own code a thing was made: file, line and the marked expression.

A `Site` is captured for every node, so it holds only a code object and an instruction offset; the text is looked up on
demand. Frames inside this package are skipped.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Site(NamedTuple):
    """One place in user code. `str(site)` is `mnist.py:22`."""

    code: CodeType
    line: int
    instruction: int

    def __str__(self) -> str:
        folder, name = os.path.split(self.code.co_filename)
        return f"{'notebook cell' if 'ipykernel_' in folder else name}:{self.line}"

    def excerpt(self) -> str:
        """The source line with carets under the expression; empty when the source is not at hand."""
        text = linecache.getline(self.code.co_filename, self.line).rstrip("\n")
        if not text.strip():
            return ""
        indent = len(text) - len(text.lstrip())
        first, last = self._columns(text)
        marks = " " * (max(first, indent) - indent) + "^" * max(1, last - max(first, indent))
        return f"    {text.strip()}\n    {marks}"

    def _columns(self, text: str) -> tuple[int, int]:
        """Start and end of the marked expression, as character offsets into `text`."""
        positions = next(itertools.islice(self.code.co_positions(), self.instruction // 2, None), None)
        if positions is None or positions[2] is None or positions[0] != self.line:
            return len(text) - len(text.lstrip()), len(text)
        line, end_line, column, end_column = positions
        raw = text.encode()  # the interpreter counts columns in bytes
        first = len(raw[:column].decode(errors="replace"))
        if end_line != line or end_column is None:
            return first, len(text)
        return first, len(raw[:end_column].decode(errors="replace"))


def user_site() -> Site | None:
    """The innermost frame of the running call that is not inside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return Site(frame.f_code, frame.f_lineno, frame.f_lasti)
        frame = frame.f_back
    return None
