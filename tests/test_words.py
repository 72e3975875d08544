"""One name, one thing; one spelling of English: American."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "hetu").rglob("*.py"))
CAMEL_CASE = re.compile(r"_?[A-Z][A-Z0-9]*[a-z]\w*")
BRITISH = re.compile(
    r"(?:neighbo|colo|behavio|favo)ur|cent(?:re\b|red\b)|licence|grey\b|artefact|whilst\b|modell|labell|cancell(?!ederror)"
    r"|(?:special|normal|initial|recogn|optim|serial|synchron|vector|quant|summar|material|factor)is(?:e|ing|ation)"
    r"|analys(?:e\b|ed|ing)",
    re.IGNORECASE,
)


def defined(text: str) -> Iterator[str]:
    """The CamelCase names that a module defines: its classes, and its names of types."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            names = []
        yield from (name for name in names if CAMEL_CASE.fullmatch(name))


def twice(texts: dict[str, str]) -> list[str]:
    """The names that several of these modules define, with where they do."""
    places = defaultdict(list)
    for module, text in texts.items():
        for name in defined(text):
            places[name].append(module)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def test_a_name_of_a_class_or_type_is_defined_once() -> None:
    assert not twice({str(file.relative_to(ROOT)): file.read_text("utf-8") for file in FILES})


@pytest.mark.parametrize("name", ["table.py", "placement.py"])
def test_a_file_name_that_several_rooms_could_claim_says_whose_it_is(name: str) -> None:
    assert sum(file.name == name for file in FILES) <= 1


@pytest.mark.parametrize(
    "texts, found",
    [
        ({"a": "class Plan: ...", "b": "class Plan: ..."}, ["Plan: a, b"]),
        ({"a": "Call = Callable[[], Any]", "b": "class Call: ..."}, ["Call: a, b"]),
        ({"a": "_Box: TypeAlias = int", "b": "_Box = int"}, ["_Box: a, b"]),
        ({"a": "BLOCK = 1\nboxes = 2", "b": "BLOCK = 1\nboxes = 2\nfrom a import Plan"}, []),
        ({"a": "def f():\n    class Plan: ...", "b": "class Plan: ..."}, []),
    ],
    ids=["classes", "an alias", "annotated", "constants and imports", "inside a function"],
)
def test_what_counts_as_a_second_definition(texts: dict[str, str], found: list[str]) -> None:
    assert twice(texts) == found


def test_the_spelling_is_american() -> None:
    suffixes = {".py", ".cu", ".h", ".md"}
    files = [f for f in sorted((ROOT / "hetu").rglob("*")) if f.suffix in suffixes and f.name != "LICENSES.md"]
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {match.group()}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if (match := BRITISH.search(line))
    ]
    assert not lines


@pytest.mark.parametrize("word", ["normalised", "Neighbours", "colour", "centre", "labelled", "analyse", "Specialise"])
def test_british_words_are_found(word: str) -> None:
    assert BRITISH.search(f"a {word} b")


@pytest.mark.parametrize(
    "word", ["exercise", "otherwise", "precision", "labels", "analysis", "center", "canceled", "CancelledError"]
)
def test_american_words_pass(word: str) -> None:
    assert not BRITISH.search(word)
