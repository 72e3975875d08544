"""Make the notebooks from their sources: `python tutorials/build.py [name ...]`.

`NN_name.py` is the source (jupytext's percent format), `NN_name.ipynb` is what this makes of it: run from a fresh
kernel and stored with its outputs. Needs `pip install -e ".[tutorials]"`. What a cell writes to standard error is not
stored: it is about the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
SECONDS = 60  # a cell that takes longer is an error
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(source: Path) -> Any:
    """The notebook of a source with the outputs of a fresh kernel; nbclient's CellExecutionError when a cell fails."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=SECONDS, coalesce_streams=True, resources=where).execute()
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index}", nbformat.from_dict({})  # the same bytes from the same run
        if cell.cell_type == "code":
            cell.outputs = [kept(output) for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def kept(output: Any) -> Any:
    """An output without its HTML where there is a picture: sites that show notebooks cut SVG out of HTML."""
    if "image/svg+xml" in output.get("data", {}):
        output.data.pop("text/html", None)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tutorials and store them as notebooks.")
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 01; all when there is none")
    wanted = parser.parse_args().names
    for source in SOURCES:
        if not wanted or source.name.startswith(tuple(wanted)):
            nbformat.write(execute(source), source.with_suffix(".ipynb"))
            print(f"{source.stem}: done")


if __name__ == "__main__":
    main()
