"""The table of meanings: what an operator of ONNX is made of ours, declared by the signature of a function.

Positional parameters are the operator's inputs (None where one is left out), keyword-only ones its attributes, which
come with ONNX's defaults; `**slide` are all that say how a window slides. A parameter is annotated where a node is not
what the function wants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
KnownArray = Any  # an array, known when the graph is built: it decides shapes, or how something is computed
Exact = Any  # a node whose dtype is the one in the file: it says how something is rounded
Untrained = Any  # a node that no optimizer changes
OutputCount = Any  # instead of an attribute: how many outputs are asked for

SLIDES = set("auto_pad ceil_mode dilations group kernel_shape pads strides".split())
# Attributes that change nothing here: how to round to floats of 8 bits, in how many bits to compute, what to draw.
IGNORED = set("precision round_mode saturate seed sorted stash_type".split())
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
        words = {p.name: str(p.annotation) for p in given}  # also of what is left open: more inputs, or attributes
        self.inputs = [p.name for p in given if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        self.any_number = any(p.kind is p.VAR_POSITIONAL for p in given)
        self.kinds = [words[name] if known is None or i < known else "KnownArray" for i, name in enumerate(self.inputs)]
        self.count = next((name for name, word in words.items() if word == "OutputCount"), "")
        self.attributes = {p.name for p in given if p.kind is p.KEYWORD_ONLY and p.name != self.count}
        self.attributes |= SLIDES if any(p.kind is p.VAR_KEYWORD for p in given) else set()

    def kind(self, position: int) -> str:
        """The annotation of an input; behind the last stand more of its kind."""
        return self.kinds[min(position, len(self.kinds) - 1)]


def meaning(*names: str) -> Callable[[F], F]:
    """Enter a function as what operators of ONNX mean."""

    def enter(function: F) -> F:
        meanings(dict.fromkeys(names, function))
        return function

    return enter


def meanings(table: Mapping[str, Callable[..., Any]], known: int | None = None) -> None:
    """Enter a table of operators that are one of ours, or a line of them; inputs from `known` on are known arrays."""
    MEANINGS.update({name: Meaning(made, known) for name, made in table.items()})
