"""The cumulative track: its right answers pass, and common mistakes fail the check whose hint is about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetu.teach.labs import Student
from hetu.teach.labs.checks import Lab, labs_in, outcome
from hetu.teach.labs.report import report

TRACK = Path(__file__).parent.parent / "tutorials" / "track"
LABS = labs_in(TRACK)
FILES = {file.name: file.read_text("utf-8") for file in TRACK.glob("*.py")}
