"""A cell that is run again makes the names that it made before, so that its checkpoints fit: `linear`, not `linear_1`.

Only where cells have identities, as in Jupyter; what is typed into a terminal is new each time.
"""

from __future__ import annotations

from typing import Any

from ...core.leaf import scope_now


def begin_cell(cell: str | None) -> None:
    """The names that this cell has made so far are free again."""
    found = scope_now()
    if cell is not None:
        found.makers = {name: maker for name, maker in found.makers.items() if maker != cell}
        found.counts = {}
    found.cell = cell


def follow(shell: Any) -> None:
    """Know which cell runs, from the one on that is running now."""
    shell.events.register("pre_run_cell", lambda info: begin_cell(info.cell_id))
    if hasattr(shell, "get_parent"):  # a kernel, whose cell has come in a message
        begin_cell(shell.get_parent().get("metadata", {}).get("cellId"))
