"""The table of meanings: what an operator of ONNX is made of ours, declared by the signature of a function.

Positional parameters are the operator's inputs (None where one is left out), keyword-only ones its attributes, with
ONNX's defaults. A parameter is annotated where a node is not what the function wants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
KnownArray = Any  # an array, known when the graph is built: it decides shapes, or how something is computed
DType = Any  # an attribute that is a dtype, for which ONNX has a number
Exact = Any  # a node whose dtype is the one in the file: it says how something is rounded
Untrained = Any  # a node that no optimizer changes
Slide = Any  # of `**slide`: all attributes that say how a window slides
OutputCount = Any  # instead of an attribute: how many outputs are asked for

SLIDES = {"auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides"}
MEANINGS: dict[str, Meaning] = {}


class Meaning:
    """A function of nodes, and what its signature says; inputs from `known` on are known arrays without a word of it.

    >>> from hetu.onnx.meaning import MEANINGS
    >>> MEANINGS["Reshape"].inputs, MEANINGS["Reshape"].kind(1)
    (['data', 'shape'], 'KnownArray')
    """

    def __init__(self, function: Callable[..., Any], known: int | None = None) -> None:
        self.function, self.signature = function, inspect.signature(function)
        given = self.signature.parameters.values()
        self.words = {p.name: str(p.annotation) for p in given}  # also of what is left open: more inputs, or attributes
        self.inputs = [p.name for p in given if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        self.any_number = any(p.kind is p.VAR_POSITIONAL for p in given)
        self.kinds = [self.words[n] if known is None or i < known else "KnownArray" for i, n in enumerate(self.inputs)]
        self.count = next((name for name, word in self.words.items() if word == "OutputCount"), "")
        self.attributes = {p.name for p in given if p.kind is p.KEYWORD_ONLY and p.name != self.count}
        self.attributes |= SLIDES if "Slide" in self.words.values() else set()

    def kind(self, position: int) -> str:
        """The annotation of an input; behind the last stand more of its kind."""
        return self.kinds[min(position, len(self.kinds) - 1)]


def meaning(*names: str) -> Callable[[F], F]:
    """Enter a function as what operators of ONNX mean."""

    def enter(function: F) -> F:
        MEANINGS.update(dict.fromkeys(names, Meaning(function)))
        return function

    return enter


def meanings(table: Mapping[str, Callable[..., Any]], known: int | None = None) -> None:
    """Enter a table of operators that are one of ours, or a line of them; inputs from `known` on are known arrays."""
    MEANINGS.update({name: Meaning(made, known) for name, made in table.items()})
