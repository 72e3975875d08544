"""What examples and tutorials import of hetu exists: a script that nobody runs for a day breaks without a word."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("examples", "tutorials", ".ci") for path in (ROOT / folder).rglob("*.py"))


def imported(text: str) -> list[tuple[str, str]]:
    """The modules of hetu that a script imports, and of each the name that it takes, "" for none."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [(node.module or "", alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "hetu"]


def missing(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return True
    return bool(name) and not hasattr(found, name) and missing(f"{module}.{name}", "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_scripts_import_exists(path):
    wrong = [f"{module}: {name}" for module, name in imported(path.read_text()) if missing(module, name)]
    assert not wrong


def test_what_is_missing_is_found():
    text = "def f():\n    from hetu.ps import Client, Nobody\nimport hetu.nowhere\nfrom hetu import ps\nimport numpy"
    found = imported(text)
    assert {name for name in found if missing(*name)} == {("hetu.ps", "Nobody"), ("hetu.nowhere", "")}
