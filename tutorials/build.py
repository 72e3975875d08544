"""Make the notebooks from their sources: `python tutorials/build.py [name ...]`.

`NN_name.py` is the source (jupytext's percent format), `NN_name.ipynb` is what this makes of it: run from a fresh
kernel and stored with its outputs, after what `opening.py` puts first. Needs `pip install -e ".[tutorials]"`. What a
cell writes to standard error is not stored: it is about the machine. `--opening` renews only what stands first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from opening import MARK, opened

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
SECONDS = 60  # a cell that takes longer is an error
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(source: Path) -> Any:
    """The notebook of a source with the outputs of a fresh kernel; nbclient's CellExecutionError when a cell fails."""
    notebook = with_opening(jupytext.read(source, fmt="py:percent"), source)
    notebook.metadata = nbformat.from_dict(METADATA)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=SECONDS, coalesce_streams=True, resources=where).execute()
    for cell in notebook.cells:
        kept_tags = {name: value for name, value in cell.metadata.items() if name == "tags"}
        cell.metadata = nbformat.from_dict(kept_tags)
        if cell.cell_type == "code":
            cell.outputs = [kept(output) for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def with_opening(notebook: Any, source: Path) -> Any:
    """The notebook, opened as `opening.py` says now; other cells keep their outputs."""
    title = jupytext.read(source, fmt="py:percent").cells[0].source
    (_, first), (_, install) = opened(source.stem, [("markdown", title)])
    rest = [cell for cell in notebook.cells[1:] if not cell.source.startswith(MARK)]
    new = nbformat.v4
    unseen = {"tags": ["remove-cell"]}  # on the site, where nothing is installed
    notebook.cells = [
        new.new_markdown_cell(first),
        new.new_code_cell(install, execution_count=1, metadata=unseen),
        *rest,
    ]
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"  # the same bytes from the same run
    return notebook


def kept(output: Any) -> Any:
    """An output without its HTML where there is a picture: sites that show notebooks cut SVG out of HTML."""
    if "image/svg+xml" in output.get("data", {}):
        output.data.pop("text/html", None)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tutorials and store them as notebooks.")
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 01; all when there is none")
    parser.add_argument("--opening", action="store_true", help="renew how stored notebooks open, and run nothing")
    asked = parser.parse_args()
    for source in SOURCES:
        if not asked.names or source.name.startswith(tuple(asked.names)):
            stored = source.with_suffix(".ipynb")
            made = with_opening(nbformat.read(stored, 4), source) if asked.opening else execute(source)
            nbformat.write(made, stored)
            print(f"{source.stem}: done")


if __name__ == "__main__":
    main()
