"""What students are handed: scripts and notebooks with blanks, a README, and the checks without their hidden cases.

The marks are nbgrader's. A notebook is written as JSON by hand: a few cells need no library, and the same labs make the
same bytes. Its cells carry nbgrader's metadata: what a student writes is a solution, the rest is locked.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ArgumentError
from .checks import Lab
from .submission import BLANK

SOLUTION = ("### BEGIN SOLUTION", "### END SOLUTION")
HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
STUDENTS = "students.md"  # their README; {labs} is the table


def release(labs: Mapping[str, Lab], folder: Path, target: Path) -> list[str]:
    """Write the students' folder; the names of its files. ArgumentError if it is there already, or marks are wrong."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArgumentError(f"{target} is there already", fix="name a new folder, so that nobody's work is lost")
    texts = released(labs, folder)
    for name, text in texts.items():
        try:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text, "utf-8")
        except OSError as error:
            raise ArgumentError(f"{target / name}: {error.strerror}", fix="name a folder that can be written") from None
    return list(texts)


def has_solutions(folder: Path) -> bool:
    """Whether the labs of a folder are the source, and not what was made of it for students."""
    return any(SOLUTION[0] in file.read_text("utf-8") for file in folder.glob("*.py"))


def released(labs: Mapping[str, Lab], folder: Path) -> dict[str, str]:
    """The text of each file for students, by its name. Scripts beside the labs are given as they are."""
    texts = {file.name: file.read_text("utf-8") for file in sorted(folder.glob("*.py"))}
    rows = [f"| {lab.number} | {lab.title} | `{lab.file}` | {lab.points:g} |" for lab in labs.values()]
    if (folder / STUDENTS).is_file():
        texts["README.md"] = (folder / STUDENTS).read_text("utf-8").replace("{labs}", "\n".join(rows))
    for lab in labs.values():
        script = without((folder / lab.file).read_text("utf-8"), SOLUTION, BLANK, lab.file)
        texts[lab.file] = script
        texts[str(Path(lab.file).with_suffix(".ipynb"))] = notebook(lab, script)
        checks = f"checks/{lab.file}"
        texts[checks] = without((folder / checks).read_text("utf-8"), HIDDEN, "", checks)
        if lab.driver:
            texts[f"drivers/{lab.file}"] = lab.driver
    return texts


def without(text: str, marks: tuple[str, str], instead: str, name: str) -> str:
    """A text with what stands between each pair of marks replaced. ArgumentError if they do not come in pairs.

    >>> source = "def f():\\n    ### BEGIN SOLUTION\\n    return 1\\n    ### END SOLUTION"
    >>> print(without(source, SOLUTION, BLANK, "f.py"))
    def f():
        raise NotImplementedError
    """
    begin, end = marks
    kept, inside = [], False
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() in marks:
            if (line.strip() == end) is not inside:
                raise ArgumentError(f"{name}, line {number}: {line.strip()}", fix=f"write {begin} and {end} in turn")
            inside = not inside
            if inside and instead:
                kept.append(line[: len(line) - len(line.lstrip())] + instead)
        elif not inside:
            kept.append(line)
    if inside:
        raise ArgumentError(f"{name}: the last {begin} has no {end}", fix="write it where the solution ends")
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept))


def notebook(lab: Lab, script: str) -> str:
    """The notebook form of a script: its docstring as prose, a cell for each definition, and one that checks."""
    tree = ast.parse(script)
    lines = script.split("\n")
    title, _, prose = (ast.get_docstring(tree) or lab.title).partition("\n")
    cells = [markdown(f"# {title}\n{prose}".strip()), code("%load_ext hetu", "load", locked=True)]
    for number, group in enumerate(groups(tree.body[1:] if ast.get_docstring(tree) else tree.body)):
        text = "\n".join(lines[start(group[0]) - 1 : group[-1].end_lineno])
        name = getattr(group[0], "name", f"part-{number}")
        cells.append(code(text, name, locked=BLANK not in text))
    cells.append(code(f"%lab check {lab.number}", "check", locked=True))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
        if "nbgrader" in cell["metadata"]:
            cell["metadata"]["nbgrader"]["grade_id"] = f"lab{lab.number}-{cell['metadata']['nbgrader']['grade_id']}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def groups(body: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Statements that share a cell: a definition has its own, what stands between two shares one."""
    found: list[list[ast.stmt]] = []
    kinds = (ast.FunctionDef, ast.ClassDef)
    for statement in body:
        if found and not isinstance(statement, kinds) and not isinstance(found[-1][0], kinds):
            found[-1].append(statement)
        else:
            found.append([statement])
    return found


def start(statement: ast.stmt) -> int:
    """The first line of a statement, its decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(text: str, grade_id: str, locked: bool) -> dict[str, Any]:
    """A code cell with nbgrader's metadata: locked, or a solution."""
    marks = {"grade": False, "grade_id": grade_id, "locked": locked, "schema_version": 3, "solution": not locked}
    made: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": [], "source": text}
    return made | {"metadata": {"nbgrader": marks | {"task": False}}}
