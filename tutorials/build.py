"""Make the notebooks from their sources: `python tutorials/build.py [name ...]`.

`NN_name.py` is the source (jupytext's percent format), `NN_name.ipynb` is what this makes of it: run from a fresh
kernel and stored with its outputs, after what `opening.py` puts first. Needs `pip install -e ".[tutorials]"`. What a
cell writes to standard error is not stored: it is about the machine. `--opening` renews only what stands first, and
`--prose` all that needs no run: prose, and exercises, which say the same until somebody answers them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from opening import MARK, opened

from hetu.teach.try_it import WAITING

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
IMPORT = "from hetu.teach.try_it import try_it"
EXERCISE = re.compile(r"^try_it\(\s*None,", re.MULTILINE)
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


def renewed(notebook: Any, source: Path) -> Any:
    """The stored notebook with the prose and the exercises of its source; SystemExit if other cells differ."""
    known = {_code(cell): cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    made = with_opening(jupytext.read(source, fmt="py:percent"), source)
    made.metadata = notebook.metadata
    count = 0
    for cell in made.cells:
        tags = {name: value for name, value in cell.metadata.items() if name == "tags"}
        cell.metadata = nbformat.from_dict(tags)
        if cell.cell_type != "code":
            continue
        count += 1
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"{WAITING}\n")]
        if not EXERCISE.search(cell.source):
            if _code(cell) not in known:
                raise SystemExit(f"{source.name} has a cell that was never run:\n{cell.source}")
            outputs = known[_code(cell)]
        cell.outputs, cell.execution_count = outputs, count
        for output in outputs:
            if "execution_count" in output:
                output.execution_count = count
    return made


def _code(cell: Any) -> str:
    """A cell of code, whose outputs do not depend on whether it imports exercises."""
    return "\n".join(line for line in cell.source.splitlines() if line != IMPORT)


def kept(output: Any) -> Any:
    """An output without its HTML where there is a picture: sites that show notebooks cut SVG out of HTML."""
    if "image/svg+xml" in output.get("data", {}):
        output.data.pop("text/html", None)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tutorials and store them as notebooks.")
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 01; all when there is none")
    parser.add_argument("--opening", action="store_true", help="renew how stored notebooks open, and run nothing")
    parser.add_argument("--prose", action="store_true", help="renew prose and exercises, too, and run nothing")
    asked = parser.parse_args()
    for source in SOURCES:
        if not asked.names or source.name.startswith(tuple(asked.names)):
            stored = source.with_suffix(".ipynb")
            renew = renewed if asked.prose else with_opening if asked.opening else None
            nbformat.write(renew(nbformat.read(stored, 4), source) if renew else execute(source), stored)
            print(f"{source.stem}: done")


if __name__ == "__main__":
    main()
